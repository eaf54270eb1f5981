"""When each action of a schedule runs, who sends what to whom, and whether the lists work at all. Without torch.

A `Timetable` plays the ranks' lists: an action starts when its rank is free and its input exists. From that one table
come the picture, the bubble, the activations held, the explanation of a deadlock, and `rank_program`: the list that
`pipeline_parallel.py` runs, with the communication in it.
"""

import copy
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from find_schedule import action_lists, check_chunks, find_schedule, placement_of
from schedules import Action

UNIT_COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # per chunk, in ticks

# What a micro-batch has been through in a stage, and what may come next: F, then B or I and W, each once.
AFTER = {("", "F"): "F", ("F", "B"): "FB", ("F", "I"): "FI", ("FI", "W"): "FIW"}


class ScheduleError(ValueError):
    """The lists of a schedule cannot be run; the text says which action of which rank, and why."""


class Transfer(NamedTuple):
    """The result of `action` goes to the next stage (F) or to the previous one (B, I), at the end of `tick`."""

    tick: float
    action: Action
    source_stage: int
    target_stage: int
    source_rank: int
    target_rank: int


class Box(NamedTuple):
    """An action with its place and time, as it is drawn."""

    kind: str
    chunk: int
    microbatch: int
    stage: int
    start: float
    end: float

    def __str__(self):
        return str(Action(self.kind, self.chunk, self.microbatch))


class Timetable:
    """Plays `lists` (one list of actions a rank). Raises ScheduleError when they are wrong or wait in a circle.

    `starts[r][i]` and `ends[r][i]` are the times of rank r's i-th action, in units of `costs` (of each kind: time per
    action of one chunk, or a list of it by stage); `transfer` is the time a result takes to reach another rank.
    """

    def __init__(self, lists, placement, num_microbatches, num_chunks=1, costs=UNIT_COSTS, transfer=0):
        self.lists, self.costs, self.transfer = lists, costs, transfer
        self.pp_size, self.num_microbatches, self.num_chunks = len(lists), num_microbatches, num_chunks
        self.num_stages = self.pp_size * num_chunks
        if not callable(placement):
            raise ScheduleError(f"placement = {placement!r}: must be a function (pp_rank, chunk, pp_size) -> stage")
        try:
            self.stages = [[placement(r, c, self.pp_size) for c in range(num_chunks)] for r in range(self.pp_size)]
        except Exception as problem:
            raise ScheduleError(f"the placement failed: {type(problem).__name__}: {problem}") from problem
        stages = list(chain(*self.stages))
        if not all(type(stage) is int for stage in stages) or set(stages) != set(range(self.num_stages)):
            raise ScheduleError(f"the placement must give each of {self.num_stages} stages to one rank: {self.stages}")
        self.rank_of = {stage: rank for rank, stages in enumerate(self.stages) for stage in stages}
        for rank in range(self.pp_size):
            self._check_list(rank)
        self._play()

    def with_costs(self, costs, transfer=0):
        """The same lists, played at other costs."""
        other = copy.copy(self)
        other.costs, other.transfer = costs, transfer
        other._play()
        return other

    def forward_only(self):
        """The same lists without their backwards: what an evaluation runs."""
        other = copy.copy(self)
        other.lists = [[action for action in actions if action.kind == "F"] for actions in self.lists]
        other._play()
        return other

    # --- checks -------------------------------------------------------------------------------------------------

    def _check_list(self, rank):
        """Each micro-batch of each chunk exactly once: F, then B or I and W."""
        done = {(chunk, i): "" for chunk in range(self.num_chunks) for i in range(self.num_microbatches)}
        for kind, chunk, microbatch in self.lists[rank]:
            before = done.get((chunk, microbatch))
            after = AFTER.get((before, kind))
            if after is None:
                raise ScheduleError(f"rank {rank}: {self._what_is_wrong(rank, kind, chunk, microbatch, before)}")
            done[chunk, microbatch] = after
        for (chunk, microbatch), history in done.items():
            if history not in ("FB", "FIW"):
                missing, why = {
                    "": ("F", ""),
                    "F": ("B", f", the backward of F{microbatch} (or I and W)"),
                    "FI": ("W", f", the weight half that I{microbatch} leaves over"),
                }[history]
                raise ScheduleError(f"rank {rank}: {self._name(rank, missing, chunk, microbatch)} is missing{why}")

    def _what_is_wrong(self, rank, kind, chunk, microbatch, before):
        """Why `kind` may not follow upon `before`, in words."""
        if kind not in ("F", "B", "I", "W"):
            return f"there is no kind of action {kind!r}: the kinds are F, B, I and W"
        if not 0 <= chunk < self.num_chunks:
            return f"there is no {kind}{microbatch} of chunk {chunk}: the chunks are 0 to {self.num_chunks - 1}"
        if not 0 <= microbatch < self.num_microbatches:
            return f"there is no {kind}{microbatch}: the micro-batches are 0 to {self.num_microbatches - 1}"
        name = self._name(rank, kind, chunk, microbatch)
        if kind in before:
            return f"{name} is there twice"
        if kind == "W":
            return f"{name} has no I{microbatch} before it: W is the weight half that I leaves over"
        if before == "":
            return f"{name} comes before its forward F{microbatch}"
        return f"{name} is a second backward after {before[1]}{microbatch}: B, or I and W, not both"

    def _name(self, rank, kind, chunk, microbatch):
        return f"{Action(kind, chunk, microbatch)} of stage {self.stages[rank][chunk]}"

    # --- the play -----------------------------------------------------------------------------------------------

    def _play(self):
        made = {  # (is it a backward, stage) -> when its result for each micro-batch was made, None until then
            (is_backward, stage): [None] * self.num_microbatches
            for is_backward in (False, True)
            for stage in range(self.num_stages)
        }
        self.starts, self.ends = [[] for _ in self.lists], [[] for _ in self.lists]
        players = [self._play_rank(rank, made) for rank in range(self.pp_size)]
        while players:
            num_ended = sum(map(len, self.ends))
            players = [player for player in players if next(player, None)]
            if players and num_ended == sum(map(len, self.ends)):  # nobody could do anything
                raise ScheduleError(f"deadlock: {self._who_waits()}")

    def _play_rank(self, rank, made):
        """Runs the list of `rank`; yields True as long as it has to wait for another rank."""
        wires = {}  # (kind, chunk) -> results it needs, the time they travel, results it makes, cost
        for chunk, stage in enumerate(self.stages[rank]):
            for kind, cost in self.costs.items():
                source = self.source(kind, stage)
                travel = self.transfer if self.rank_of.get(source, rank) != rank else 0
                needed = made.get((kind != "F", source))
                results = made[kind != "F", stage] if kind != "W" else None
                wires[kind, chunk] = needed, travel, results, cost[stage] if isinstance(cost, list) else cost
        starts, ends, now = self.starts[rank], self.ends[rank], 0
        for kind, chunk, microbatch in self.lists[rank]:
            needed, travel, results, cost = wires[kind, chunk]
            if needed is not None:
                while needed[microbatch] is None:
                    yield True
                now = max(now, needed[microbatch] + travel)
            starts.append(now)
            now += cost
            ends.append(now)
            if results is not None:
                results[microbatch] = now

    def source(self, kind, stage):
        """The stage whose result an action of `stage` waits for (beyond the ends there is none); None for W."""
        return {"F": stage - 1, "B": stage + 1, "I": stage + 1}.get(kind)

    def _who_waits(self):
        """From a rank that stands still, who waits for whom until that closes in a circle: the circle in words."""
        rank = next(rank for rank, actions in enumerate(self.lists) if len(self.ends[rank]) < len(actions))
        texts = {}
        while rank not in texts:
            stuck = self.lists[rank][len(self.ends[rank])]
            source = self.source(stuck.kind, self.stages[rank][stuck.chunk])
            other, kinds = self.rank_of[source], "F" if stuck.kind == "F" else "BI"
            chunk = self.stages[other].index(source)
            kind = next(k for k, c, i in self.lists[other] if k in kinds and (c, i) == (chunk, stuck.microbatch))
            result = self._name(other, kind, chunk, stuck.microbatch)
            where = "later in its own list" if other == rank else f"on rank {other}"
            texts[rank] = f"rank {rank}, about to run {self._name(rank, *stuck)}, waits for {result} ({where})"
            rank = other
        circle = list(texts)
        return "; ".join(texts[r] for r in circle[circle.index(rank) :])

    @property
    def boxes(self):
        """The actions of every rank with their times."""
        return [
            [Box(*action, stages[action.chunk], *map(float, times)) for action, *times in zip(*columns, strict=True)]
            for stages, *columns in zip(self.stages, self.lists, self.starts, self.ends, strict=True)
        ]

    # --- figures --------------------------------------------------------------------------------------------------

    @property
    def step_time(self):
        return max(ends[-1] for ends in self.ends)

    @property
    def idle(self):
        """Idle time of each rank, from the step's start to its end."""
        return [
            self.step_time - sum(end - start for start, end in zip(*times, strict=True))
            for times in zip(self.starts, self.ends, strict=True)
        ]

    @property
    def bubble(self):
        """Idle time / step time, mean over ranks. (Papers also divide by the busy time: bubble / (1 − bubble).)"""
        return sum(self.idle) / self.pp_size / self.step_time

    @property
    def held(self):
        """How many micro-batches' activations each rank holds after each of its actions, in shares of its layers."""
        change = {"F": 1, "B": -1, "W": -1, "I": 0}
        running = [accumulate(change[action.kind] for action in actions) for actions in self.lists]
        return [[num_chunks_held / self.num_chunks for num_chunks_held in counts] for counts in running]

    @property
    def peak_microbatches(self):
        """The most micro-batches that each rank holds at once."""
        return [max(counts) for counts in self.held]

    @property
    def num_transfers(self):
        return sum(1 for rank in range(self.pp_size) for _ in self._sends(rank))

    # --- communication ----------------------------------------------------------------------------------------------

    def _sends(self, rank):
        """The results that other ranks need, in the order in which `rank` makes them."""
        for action, tick in zip(self.lists[rank], self.ends[rank], strict=True):
            if action.kind != "W":
                stage = self.stages[rank][action.chunk]
                target_stage = stage + 1 if action.kind == "F" else stage - 1
                target = self.rank_of.get(target_stage, rank)  # nobody beyond the first and the last stage
                if target != rank:
                    yield Transfer(tick, action, stage, target_stage, rank, target)

    def _transfers_of(self, rank):
        """All transfers that `rank` sends or receives, by tick, each tick's in an order that both ends derive alike."""
        neighbours = {self.rank_of.get(stage + step, rank) for stage in self.stages[rank] for step in (-1, 0, 1)}
        by_tick = {}
        for source in neighbours:
            for transfer in self._sends(source):
                if rank in (source, transfer.target_rank):
                    by_tick.setdefault(transfer.tick, []).append(transfer)
        return {tick: sorted(by_tick[tick], key=lambda t: (t.source_stage, t.target_stage)) for tick in sorted(by_tick)}

    def rank_program(self, rank):
        """What `rank` does in a step: its actions, and between them lists of Transfers, each posted as one batch.

        All transfers of one tick are one batch. A batch with a send of this rank's is posted when the action that made
        the tensor has ended; one that only receives is posted before the action that runs at that tick, and so overlaps
        with it. Every rank posts its batches in the order of ticks, and any two ranks agree on the transfers between
        them at each tick: so both ends post matching operations in the same order, whatever the schedule.
        """
        actions, ends = self.lists[rank], self.ends[rank]
        program, position = [], 0
        for tick, transfers in self._transfers_of(rank).items():
            sends = any(transfer.source_rank == rank for transfer in transfers)
            while position < len(actions) and (ends[position] < tick or (sends and ends[position] == tick)):
                program.append(actions[position])
                position += 1
            program.append(transfers)
        return program + actions[position:]


def make_timetable(pp_engine, pp_size, num_microbatches, num_chunks=1, costs=UNIT_COSTS, transfer=0):
    """The Timetable of a schedule by name. Raises ValueError where that is unknown, wrong, or not for the numbers."""
    schedule = find_schedule(pp_engine)
    check_chunks(schedule, num_chunks)
    lists = action_lists(schedule, pp_size, num_microbatches, num_chunks)
    try:
        return Timetable(lists, placement_of(schedule), num_microbatches, num_chunks, costs, transfer)
    except ScheduleError as problem:
        numbers = f"pp_size {pp_size} and {num_microbatches} micro-batches"
        raise ScheduleError(f"distributed.pp_engine: {pp_engine!r} with {numbers}: {problem}") from None


@lru_cache
def timetable_of_run(pp_engine, pp_size, num_microbatches, num_chunks):
    """The table that all ranks take their programs from: at unit costs, so that it is the same for all."""
    return make_timetable(pp_engine, pp_size, num_microbatches, num_chunks)


@lru_cache
def rank_program(pp_engine, pp_rank, pp_size, num_microbatches, num_chunks=1, forward_only=False):
    """The program of one rank, made once a run."""
    timetable = timetable_of_run(pp_engine, pp_size, num_microbatches, num_chunks)
    return (timetable.forward_only() if forward_only else timetable).rank_program(pp_rank)
