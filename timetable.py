"""When each action of a schedule runs, who sends what to whom, and whether the lists work at all. Plain Python, no torch.

A `Timetable` plays the ranks' lists: an action starts when its rank is free and its input exists. From that one table come
the picture, the bubble, the activations held, the explanation of a deadlock, and `rank_program`: the list that
`pipeline_parallel.py` runs, with the communication in it.
"""

from functools import lru_cache
from typing import NamedTuple

from schedules import Action, action_lists, check_chunks, find_schedule, placement_of

UNIT_COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # per chunk, in ticks


class ScheduleError(ValueError):
    """The lists of a schedule cannot be run; the text says which action of which rank, and why."""


class Transfer(NamedTuple):
    """The result of `action` goes from one stage to the next one (F) or to the previous one (B, I), at the end of `tick`."""

    tick: float
    action: Action
    source_stage: int
    target_stage: int
    source_rank: int
    target_rank: int


class Timetable:
    """Plays `lists` (one list of actions a rank). Raises ScheduleError when they are wrong or wait in a circle.

    `starts[r][i]` and `ends[r][i]` are the times of rank r's i-th action, in units of `costs` (time per action of one
    chunk); `transfer` is the time a result takes to reach another rank.
    """

    def __init__(self, lists, placement, num_microbatches, num_chunks=1, costs=UNIT_COSTS, transfer=0, forward_only=False):
        self.lists, self.costs, self.transfer = lists, costs, transfer
        self.pp_size, self.num_microbatches, self.num_chunks = len(lists), num_microbatches, num_chunks
        self.num_stages = self.pp_size * num_chunks
        self.stages = [[placement(r, c, self.pp_size) for c in range(num_chunks)] for r in range(self.pp_size)]
        self.rank_of = {stage: rank for rank, stages in enumerate(self.stages) for stage in stages}
        for rank in range(self.pp_size):
            self._check_list(rank, forward_only)
        self._play()

    # --- checks -------------------------------------------------------------------------------------------------

    def _check_list(self, rank, forward_only):
        """Each micro-batch of each chunk exactly once: F, then B or I and W."""
        done = set()

        def require(condition, action, why):
            if not condition:
                raise ScheduleError(f"rank {rank}: {self._name(rank, action)} {why}")

        for action in self.lists[rank]:
            kind, chunk, microbatch = action
            if kind not in "FBIW" or not 0 <= chunk < self.num_chunks or not 0 <= microbatch < self.num_microbatches:
                raise ScheduleError(
                    f"rank {rank}: there is no action {kind}{microbatch} of chunk {chunk}: kinds are F, B, I, W, chunks "
                    f"0 to {self.num_chunks - 1}, micro-batches 0 to {self.num_microbatches - 1}"
                )
            F, B, I, W = (Action(k, chunk, microbatch) for k in "FBIW")  # noqa: E741
            require(action not in done, action, "is there twice")
            if kind in "BI":
                require(F in done, action, f"comes before its forward {F}")
                require(not {B, I} & done, action, "is a second backward of the same micro-batch: B, or I and W, not both")
            if kind == "W":
                require(I in done, action, f"has no {I} before it: W is the weight half that I leaves over")
            done.add(action)
        for chunk in range(self.num_chunks):
            for microbatch in range(self.num_microbatches):
                F, B, I, W = (Action(k, chunk, microbatch) for k in "FBIW")  # noqa: E741
                require(F in done, F, "is missing")
                if not forward_only:
                    require({B, I} & done, B, "is missing: no backward for this micro-batch")
                    require(B in done or W in done, W, f"is missing: {I} leaves the weight gradient over")

    def _name(self, rank, action):
        return f"{action.kind}{action.microbatch} of stage {self.stages[rank][action.chunk]}"

    # --- the play -----------------------------------------------------------------------------------------------

    def _needs(self, kind, stage, microbatch):
        """(is_backward, stage, micro-batch) of the result that an action waits for; None if it waits for nobody."""
        if kind == "F" and stage > 0:
            return False, stage - 1, microbatch
        if kind in "BI" and stage < self.num_stages - 1:
            return True, stage + 1, microbatch
        return None

    def _play(self):
        finished = {}  # result -> when it was made
        waiting = {}  # result -> the rank that stands still until it is made
        self.starts, self.ends = [[] for _ in self.lists], [[] for _ in self.lists]
        runnable = list(range(self.pp_size))
        while runnable:
            rank = runnable.pop()
            starts, ends, actions, stages = self.starts[rank], self.ends[rank], self.lists[rank], self.stages[rank]
            now = ends[-1] if ends else 0
            for kind, chunk, microbatch in actions[len(ends) :]:
                stage = stages[chunk]
                needs = self._needs(kind, stage, microbatch)
                if needs is not None:
                    if needs not in finished:
                        waiting[needs] = rank
                        break
                    travel = self.transfer if self.rank_of[needs[1]] != rank else 0
                    now = max(now, finished[needs] + travel)
                starts.append(now)
                now += self.costs[kind]
                ends.append(now)
                if kind != "W":
                    result = (kind != "F", stage, microbatch)
                    finished[result] = now
                    if result in waiting:
                        runnable.append(waiting.pop(result))
        if waiting:
            raise ScheduleError("deadlock: " + "; ".join(self._who_waits(waiting)))

    def _who_waits(self, waiting):
        for (is_backward, stage, microbatch), rank in sorted(waiting.items(), key=lambda item: item[1]):
            stuck = self.lists[rank][len(self.ends[rank])]
            other = self.rank_of[stage]
            result = f"{'B' if is_backward else 'F'}{microbatch} of stage {stage}"
            yield f"rank {rank}, about to run {self._name(rank, stuck)}, waits for {result} (rank {other})"

    # --- figures --------------------------------------------------------------------------------------------------

    @property
    def step_time(self):
        return max(ends[-1] for ends in self.ends if ends)

    @property
    def idle(self):
        """Idle time of each rank, from the step's start to its end."""
        return [self.step_time - sum(self.costs[action.kind] for action in actions) for actions in self.lists]

    @property
    def bubble(self):
        """Idle time / step time, mean over ranks. (Papers also divide by the busy time: bubble / (1 − bubble).)"""
        return sum(self.idle) / self.pp_size / self.step_time

    @property
    def peak_microbatches(self):
        """The most micro-batches whose activations each rank holds at once (F until B or W), in shares of its layers."""
        peaks = []
        for actions in self.lists:
            held = peak = 0
            for action in actions:
                held += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
                peak = max(peak, held)
            peaks.append(peak / self.num_chunks)
        return peaks

    # --- communication ----------------------------------------------------------------------------------------------

    def _transfers_of(self, rank):
        """All transfers that `rank` sends or receives, by tick, each tick's in an order that both ends derive alike."""
        by_tick = {}
        for source in range(self.pp_size):
            for chunk, stage in enumerate(self.stages[source]):
                for kinds, target_stage in (("F", stage + 1), ("BI", stage - 1)):
                    target = self.rank_of.get(target_stage)  # None beyond the first and the last stage
                    if target is None or source == target or rank not in (source, target):
                        continue
                    for action, tick in zip(self.lists[source], self.ends[source], strict=True):
                        if action.chunk == chunk and action.kind in kinds:
                            transfer = Transfer(tick, action, stage, target_stage, source, target)
                            by_tick.setdefault(tick, []).append(transfer)
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


def make_timetable(pp_engine, pp_size, num_microbatches, num_chunks=1, forward_only=False, **costs):
    """The Timetable of a schedule by name. Raises ValueError where the schedule is unknown or does not take the numbers."""
    schedule = find_schedule(pp_engine)
    check_chunks(schedule, num_chunks)
    lists = action_lists(schedule, pp_size, num_microbatches, num_chunks)
    if forward_only:  # evaluation runs the same schedule without its backwards
        lists = [[action for action in actions if action.kind == "F"] for actions in lists]
    return Timetable(lists, placement_of(schedule), num_microbatches, num_chunks, forward_only=forward_only, **costs)


@lru_cache
def rank_program(pp_engine, pp_rank, pp_size, num_microbatches, num_chunks=1, forward_only=False):
    """The program of one rank, made once a run: costs of 1 give every rank the same table."""
    timetable = make_timetable(pp_engine, pp_size, num_microbatches, num_chunks, forward_only)
    return timetable.rank_program(pp_rank)
