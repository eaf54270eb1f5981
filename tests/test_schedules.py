"""Schedules and timetables, without processes: golden values, properties of every schedule, what wrong ones are told.

The properties are checked against simulations written here, which share no code with timetable.py.
"""

import time
from collections import Counter
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from find_schedule import action_lists, chunks_of, placement_of
from schedules import SCHEDULES, Action, B, F
from timeline import predicted_bubble
from timetable import ScheduleError, Timetable, make_timetable, rank_program
from visualize import grid

COLUMNS = (
    ("afab", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("zb_h1", 1),
    ("zb_v", 2),
    ("dualpipev", 2),
)
# (p, m): step time of each of COLUMNS when F, I and W of a rank's share take 1 and B takes 2
STEP_TIMES = {
    (4, 8): (33, 33, 28.5, 26.25, 27, 25.5, 25.5),
    (4, 16): (57, 57, 52.5, 50.25, 51, 49.5, 49.5),
    (8, 16): (69, 69, 58.5, 53.25, 55, 51.5, 51.5),
}
GOLDEN = [
    (name, p, m, v, step_time)
    for (p, m), step_times in STEP_TIMES.items()
    for (name, v), step_time in zip(COLUMNS, step_times, strict=True)
]


def share(v, F=1, I=1, W=1):  # noqa: E741
    """Costs of a chunk, exactly, from those of a rank's share."""
    return {kind: Fraction(cost, v) for kind, cost in {"F": F, "B": I + W, "I": I, "W": W}.items()}


# --- golden values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, p, m, v, step_time", GOLDEN)
def test_step_time(name, p, m, v, step_time):
    timetable = make_timetable(name, p, m, v, costs=share(v))
    ideal = 3 * m
    assert timetable.step_time == step_time
    assert timetable.idle == [step_time - ideal] * p
    assert timetable.bubble == pytest.approx(1 - ideal / step_time)


@pytest.mark.parametrize(
    "name, v, held_chunks",
    [
        ("afab", 1, [8, 8, 8, 8]),
        ("1f1b", 1, [4, 3, 2, 1]),
        ("interleaved_1f1b", 2, [11, 9, 7, 5]),
        ("zb_h1", 1, [4, 4, 4, 4]),
        ("zb_v", 2, [8, 8, 8, 8]),
        ("dualpipev", 2, [9, 9, 9, 9]),
    ],
)
def test_micro_batches_held(name, v, held_chunks):
    assert make_timetable(name, 4, 8, v).peak_microbatches == [chunks / v for chunks in held_chunks]


@pytest.mark.parametrize("name", SCHEDULES)
def test_picture_in_the_docstring_is_the_timetable(name):
    _, _, rows = grid(make_timetable(name, 2, 4, chunks_of(SCHEDULES[name]) or 2))
    drawn = [line.strip() for line in SCHEDULES[name].__doc__.splitlines() if line.strip().startswith("rank ")]
    assert drawn == [f"rank {rank}   {''.join(row).rstrip()}" for rank, row in enumerate(rows)]


def test_a_transfer_takes_time():
    timetable = make_timetable("1f1b", 2, 1, costs=share(1), transfer=10)  # F, over, F, B, over, B
    assert timetable.starts == [[0, 24], [11, 12]]
    assert timetable.step_time == 26
    in_a_v = make_timetable("zb_v", 1, 1, 2, costs=share(1), transfer=10)  # both chunks on one rank: nothing goes over
    assert in_a_v.step_time == 6


def test_predicted_bubble():
    assert predicted_bubble("1f1b", 4, 8, 1, {"F": 0.1, "B": 0.2}) == pytest.approx(9 / 33)
    assert predicted_bubble("zb_h1", 4, 8, 1, {"F": 0.1, "I": 0.1, "W": 0.1}) == pytest.approx(3 / 27)
    assert predicted_bubble("1f1b", 2, 1, 1, {"F": 0.1, "B": 0.2}, transfer=1.0) == pytest.approx(1 - 0.3 / 2.6)
    # the table that the programs come from has kept its own times
    assert make_timetable("1f1b", 4, 8).rank_program(1) == rank_program("1f1b", 1, 4, 8)


def test_large_timetables_are_quick():
    started = time.process_time()
    timetable = make_timetable("interleaved_1f1b", 64, 512, 4)
    timetable.rank_program(31)
    assert time.process_time() - started < 2
    assert sum(map(len, timetable.lists)) == 2 * 64 * 512 * 4


# --- properties -------------------------------------------------------------------------------------------------------


def for_every_schedule(max_examples):
    """The test, for each schedule, at all numbers that it takes: up to 8 ranks, 32 micro-batches, 4 chunks."""

    def decorate(test):
        numbers = given(p=st.integers(1, 8), m=st.integers(1, 32), v=st.integers(1, 4))
        test = settings(max_examples=max_examples, deadline=None)(numbers(test))
        return pytest.mark.parametrize("name", SCHEDULES)(test)

    return decorate


class Layout:
    """What there is to know without a timetable: who holds what, and who needs which result of whom."""

    def __init__(self, name, p, m, v, forward_only=False):
        self.v = chunks_of(SCHEDULES[name]) or v
        self.lists = action_lists(SCHEDULES[name], p, m, self.v)
        if forward_only:
            self.lists = [[action for action in actions if action.kind == "F"] for actions in self.lists]
        placement = placement_of(SCHEDULES[name])
        self.stage = {(rank, chunk): placement(rank, chunk, p) for rank in range(p) for chunk in range(self.v)}
        self.rank = {stage: rank for (rank, _), stage in self.stage.items()}
        self.last = p * self.v - 1

    def needs(self, rank, action):
        """The results (direction, stage, micro-batch) that must exist before the action may start."""
        kind, chunk, microbatch = action
        stage = self.stage[rank, chunk]
        if kind == "F":
            return [("forward", stage - 1, microbatch)] if stage > 0 else []
        if kind == "W":
            return [("input half", stage, microbatch)]
        behind = [("backward", stage + 1, microbatch)] if stage < self.last else []
        return [("forward", stage, microbatch), *behind]

    def makes(self, rank, action):
        kind, chunk, microbatch = action
        stage = self.stage[rank, chunk]
        names = {"F": ["forward"], "B": ["backward"], "I": ["backward", "input half"], "W": []}[kind]
        return [(name, stage, microbatch) for name in names]

    def sent(self, rank):
        """(action, target rank) of every result of `rank` that another rank needs."""
        for action in self.lists[rank]:
            stage = self.stage[rank, action.chunk]
            target = self.rank.get(stage + 1 if action.kind == "F" else stage - 1, rank)
            if action.kind != "W" and target != rank:
                yield action, target


def simulate(layout, costs):
    """Tick by tick: a free rank starts the next action of its list if all that this needs was there by now."""
    ranks = range(len(layout.lists))
    starts, free, ready, now = [[] for _ in ranks], [0 for _ in ranks], {}, 0
    todo = sum(map(len, layout.lists))
    while todo:
        assert now <= max(free), f"nothing goes on after tick {now}"
        for rank in ranks:
            position = len(starts[rank])
            if free[rank] <= now and position < len(layout.lists[rank]):
                action = layout.lists[rank][position]
                if all(ready.get(result, now + 1) <= now for result in layout.needs(rank, action)):
                    starts[rank].append(now)
                    free[rank] = now + costs[action.kind]
                    ready |= {result: free[rank] for result in layout.makes(rank, action)}
                    todo -= 1
        now += 1
    return starts


@for_every_schedule(max_examples=150)
def test_every_action_once_and_in_order(name, p, m, v):
    layout = Layout(name, p, m, v)
    for actions in layout.lists:
        counts = Counter(actions)
        for chunk in range(layout.v):
            for i in range(m):
                kinds = "".join(kind * counts.pop(Action(kind, chunk, i), 0) for kind in "FBIW")
                assert kinds in ("FB", "FIW")
        assert not counts
    costs = {"F": 2, "B": 5, "I": 2, "W": 3}
    timetable = make_timetable(name, p, m, layout.v, costs=costs)
    assert timetable.starts == simulate(layout, costs)  # `simulate` starts no action before what it needs is there
    assert timetable.ends == [
        [start + costs[action.kind] for start, action in zip(starts, actions, strict=True)]
        for starts, actions in zip(timetable.starts, layout.lists, strict=True)
    ]


def held_chunks(name, p, m, v, r):
    """The most (chunk, micro-batch) pairs whose activations rank r holds at once. Exact, with this exception:

    interleaved_1f1b with a short last group of micro-batches holds at most so many.
    """
    return {
        "afab": m,
        "1f1b": min(p - r, m),
        "interleaved_1f1b": min((v - 1) * p + 2 * (p - r - 1) + 1, v * m),
        "zb_h1": min(p, m),
        "zb_v": min(2 * p, m + 1 + r, 2 * m),
        "dualpipev": min(2 * p + 1, m + 1 + r, 2 * m),
    }[name]


@for_every_schedule(max_examples=150)
def test_predicted_peaks(name, p, m, v):
    layout = Layout(name, p, m, v)
    peaks = []
    for actions in layout.lists:
        held, sizes = set(), [0]
        for kind, chunk, i in actions:
            if kind == "F":
                held.add((chunk, i))
            elif kind in "BW":
                held.remove((chunk, i))
            sizes.append(len(held))
        peaks.append(max(sizes))
    assert make_timetable(name, p, m, layout.v).peak_microbatches == [peak / layout.v for peak in peaks]
    predicted = [held_chunks(name, p, m, layout.v, r) for r in range(p)]
    if name == "interleaved_1f1b" and m % p:
        assert all(peak <= most for peak, most in zip(peaks, predicted, strict=True))
    else:
        assert peaks == predicted


# (p − 1) · this is the idle time on every rank, for costs c of a rank's share, where `holds`
IDLE = {
    ("afab", 1): (lambda c: c["F"] + c["B"], lambda p, m, c: True),
    ("1f1b", 1): (lambda c: c["F"] + c["B"], lambda p, m, c: True),
    ("interleaved_1f1b", 2): (lambda c: (c["F"] + c["B"]) / 2, lambda p, m, c: m % p == 0),
    ("interleaved_1f1b", 3): (lambda c: (c["F"] + c["B"]) / 3, lambda p, m, c: m % p == 0),
    ("zb_h1", 1): (lambda c: c["F"] + c["I"] - c["W"], lambda p, m, c: m >= p and c["W"] <= min(c["F"], c["I"])),
    ("zb_v", 2): (lambda c: c["F"] / 2, lambda p, m, c: m >= 2 * p - 1 and c["F"] == c["I"] == c["W"]),
    ("dualpipev", 2): (
        lambda c: (c["F"] + c["I"] - c["W"]) / 2,
        lambda p, m, c: m >= 2 * p and c["F"] >= c["I"] == c["W"],
    ),
}


@pytest.mark.parametrize("name, v", IDLE)
def test_idle_time(name, v):
    idle, holds = IDLE[name, v]
    cases = [
        (p, m, numbers)
        for p, m, numbers in product(
            (1, 2, 3, 4, 8), (1, 2, 4, 8, 15, 16), ((1, 1, 1), (2, 3, 1), (3, 2, 2), (3, 5, 4))
        )
        if holds(p, m, share(1, *numbers))
    ]
    assert len(cases) >= 10
    for p, m, numbers in cases:
        assert make_timetable(name, p, m, v, costs=share(v, *numbers)).idle == [(p - 1) * idle(share(1, *numbers))] * p


# --- programs ---------------------------------------------------------------------------------------------------------


@for_every_schedule(max_examples=100)
@pytest.mark.parametrize("forward_only", [False, True])
def test_programs(name, forward_only, p, m, v):
    layout = Layout(name, p, m, v, forward_only)
    timetable = make_timetable(name, p, m, layout.v)
    timetable = timetable.forward_only() if forward_only else timetable
    programs = [timetable.rank_program(rank) for rank in range(p)]
    for rank, program in enumerate(programs):
        assert [step for step in program if isinstance(step, Action)] == layout.lists[rank]
        check_places(layout, rank, program)
    check_pairs(programs)
    check_standing_still(layout, programs)


def check_places(layout, rank, program):
    """Each result that another rank needs is sent once, after it was made; a receive comes before it is needed."""
    made, received, sent = set(), set(), []
    for step in program:
        if isinstance(step, Action):
            for direction, stage, i in layout.needs(rank, step):
                if layout.rank[stage] != rank:
                    assert (direction, stage, i) in received
            made.add(step)
        else:
            assert step  # no empty batch
            for transfer in step:
                stages = transfer.source_stage, transfer.target_stage
                assert [layout.rank[stage] for stage in stages] == [transfer.source_rank, transfer.target_rank]
                if transfer.source_rank == rank:
                    assert transfer.action in made and layout.stage[rank, transfer.action.chunk] == stages[0]
                    sent.append((transfer.action, transfer.target_rank))
                else:
                    assert transfer.target_rank == rank
                    direction = "forward" if transfer.action.kind == "F" else "backward"
                    received.add((direction, stages[0], transfer.action.microbatch))
    assert sorted(sent) == sorted(layout.sent(rank))


def check_pairs(programs):
    """Any two ranks post the transfers between them in the same order, in the same batches."""
    for a in range(len(programs)):
        for b in range(a):
            of_a, of_b = (
                [
                    [t for t in step if {t.source_rank, t.target_rank} == {a, b}]
                    for step in programs[rank]
                    if type(step) is list
                ]
                for rank in (a, b)
            )
            assert [batch for batch in of_a if batch] == [batch for batch in of_b if batch]


def check_standing_still(layout, programs):
    """No deadlock, even if a rank stood still at every batch until all its transfers are done.

    A transfer is done when both ends have posted their batch with it. The executor waits for less: for a receive when
    its action comes, for a batch of sends two batches later.
    """
    positions, posted, progress = [0] * len(programs), [set() for _ in programs], True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while positions[rank] < len(program):
                step = program[positions[rank]]
                if not isinstance(step, Action):
                    posted[rank].update(step)
                    if not all(t in posted[t.source_rank] and t in posted[t.target_rank] for t in step):
                        break
                positions[rank] += 1
                progress = True
    assert positions == [len(program) for program in programs]


def test_a_batch_that_only_receives_overlaps_with_the_action_of_its_tick():
    program = rank_program("1f1b", 1, 2, 4)
    kinds = [str(step) if isinstance(step, Action) else [str(transfer.action) for transfer in step] for step in program]
    # rank 0 makes F1 during tick 1 to 2, when rank 1 runs F0
    assert kinds[:5] == [["F0"], ["F1"], "F0", "B0", ["B0"]]


# --- schedules of one's own -------------------------------------------------------------------------------------------


def write_schedule(tmp_path, source):
    path = tmp_path / "mine.py"
    path.write_text("from schedules import Action, B, F, I, W, loop, v_shape\n\n\n" + source)
    return f"{path}:mine"


def test_a_right_one_of_a_file(tmp_path):
    name = write_schedule(
        tmp_path,
        """def mine(pp_rank, pp_size, num_microbatches):
    actions = []
    for i in range(num_microbatches):
        actions += [F(i), B(i)]
    return actions
""",
    )
    timetable = make_timetable(name, 2, 3)
    assert timetable.lists == [[F(0), B(0), F(1), B(1), F(2), B(2)]] * 2
    assert timetable.starts[0] == [0, 4, 6, 10, 12, 16]


def test_the_file_is_run_once_for_training_and_evaluation(tmp_path):
    name = write_schedule(tmp_path, "def mine(*_):\n    return [F(0), B(0), F(1), B(1)]\n")
    rank_program(name, 0, 2, 2)
    Path(name.removesuffix(":mine")).unlink()
    assert [step for step in rank_program(name, 0, 2, 2, forward_only=True) if isinstance(step, Action)] == [F(0), F(1)]


def test_one_of_a_file_that_takes_chunks_in_a_v(tmp_path):
    name = write_schedule(
        tmp_path,
        """def mine(pp_rank, pp_size, num_microbatches, num_chunks):
    ms, cs = range(num_microbatches), range(num_chunks)
    return [F(i, c) for i in ms for c in cs] + [B(i, c) for i in ms for c in reversed(cs)]

mine.placement = v_shape
""",
    )
    timetable = make_timetable(name, 2, 2, 2)
    assert timetable.stages == [[0, 3], [1, 2]]
    with pytest.raises(ValueError, match="pp_chunks: 3, but this schedule folds the model into a V: use 2"):
        make_timetable(name, 2, 2, 3)


# What `mine` does on 2 ranks with 2 micro-batches, and what it is told.
WRONG = {
    "deadlock": (
        "return [F(0), B(0), F(1), B(1)] if pp_rank == 0 else [F(0), F(1), B(0), B(1)]",
        "deadlock: rank 0, about to run B0 of stage 0, waits for B0 of stage 1 (on rank 1); "
        "rank 1, about to run F1 of stage 1, waits for F1 of stage 0 (on rank 0)",
    ),
    "missing B": ("return [F(0), F(1), B(0)]", "rank 0: B1 of stage 0 is missing, the backward of F1 (or I and W)"),
    "missing F": ("return [F(0), B(0)]", "rank 0: F1 of stage 0 is missing"),
    "missing W": (
        "return [F(0), B(0), F(1), I(1)]",
        "rank 0: W1 of stage 0 is missing, the weight half that I1 leaves over",
    ),
    "lost on one rank": ("return [F(0), F(1), B(0), B(1)][: 4 - pp_rank]", "rank 1: B1 of stage 1 is missing"),
    "repeated": ("return [F(0), F(0), B(0), F(1), B(1)]", "rank 0: F0 of stage 0 is there twice"),
    "B before F": ("return [B(0), F(0), F(1), B(1)]", "rank 0: B0 of stage 0 comes before its forward F0"),
    "W without I": ("return [F(0), W(0), F(1), B(1)]", "rank 0: W0 of stage 0 has no I0 before it"),
    "W after B": ("return [F(0), B(0), W(0), F(1), B(1)]", "rank 0: W0 of stage 0 has no I0 before it"),
    "B and I": ("return [F(0), B(0), I(0), W(0), F(1), B(1)]", "I0 of stage 0 is a second backward after B0"),
    "micro-batch": ("return [F(1), B(1), F(2), B(2)]", "rank 0: there is no F2: the micro-batches are 0 to 1"),
    "chunk": ("return [F(0), B(0, 1)]", "rank 0: there is no B0 of chunk 1: the chunks are 0 to 0"),
    "kind": ("return [Action('G', 0, 0)]", "rank 0: there is no kind of action 'G': the kinds are F, B, I and W"),
    "two kinds": ("return [Action('FB', 0, 0), F(1), B(1)]", "there is no kind of action 'FB'"),
    "nothing": ("pass", "mine(0, 2, 2) returned None; it must return a list of actions"),
    "generator": ("yield F(0)", "rank 0: B0 of stage 0 is missing"),  # is as good as a list, but for that
    "text": (
        "return ['F0', 'B0']",
        "mine(0, 2, 2) returned a list with 'F0' in it; make every action with F, B, I or W",
    ),
    "fraction": ("return [F(2 / 2)]", "microbatch=1.0) in it; make every action with F, B, I or W and whole numbers"),
    "exception": ("return [][5]", "mine(0, 2, 2) failed: IndexError: list index out of range (FILE, line 5)"),
    "no such parameter": (
        "return [F(0)",
        "cannot load 'FILE:mine': SyntaxError: '[' was never closed (mine.py, line 5)",
    ),
}


@pytest.mark.parametrize("source, message", WRONG.values(), ids=WRONG)
def test_a_wrong_one_of_a_file_is_told_what_is_wrong(tmp_path, source, message):
    name = write_schedule(tmp_path, f"def mine(pp_rank, pp_size, num_microbatches):\n    {source}\n")
    with pytest.raises(ValueError) as caught:
        make_timetable(name, 2, 2)
    assert message.replace("FILE", name.removesuffix(":mine")) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    if isinstance(caught.value, ScheduleError):
        assert f"distributed.pp_engine: {name!r} with pp_size 2 and 2 micro-batches: " in str(caught.value)


@pytest.mark.parametrize(
    "source, message",
    [
        ("import not_there\n", "ModuleNotFoundError: No module named 'not_there' (FILE, line 4)"),
        ("def mine(:\n", "SyntaxError: invalid syntax (mine.py, line 4)"),
        ("def helper():\n    return 1 / 0\n\nhelper()\n", "ZeroDivisionError: division by zero (FILE, line 5)"),
        ("mine = 3\n", "FILE has no function 'mine'"),
        ("def other():\n    pass\n", "FILE has no function 'mine'"),
        ("def mine(pp_rank, pp_size):\n    pass\n", "takes 2 positional arguments but 3 were given"),
        (
            "def mine(*_):\n    return []\n\nmine.placement = lambda rank, chunk, size: 0\n",
            "stages to one rank: [[0], [0]]",
        ),
        (
            "def mine(*_):\n    return []\n\nmine.placement = lambda rank, chunk: rank\n",
            "the placement failed: TypeError: <lambda>() takes 2 positional arguments but 3 were given",
        ),
        (
            "def mine(*_):\n    return []\n\nmine.placement = lambda rank, chunk, size: rank / 1\n",
            "stages to one rank: [[0.0], [1.0]]",
        ),
        (
            "def mine(*_):\n    return [B(0, 0), F(0, 0), F(1, 0), B(1, 0)]\n",
            "B0 of stage 0 comes before its forward F0",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_told_why(tmp_path, source, message):
    name = write_schedule(tmp_path, source)
    with pytest.raises(ValueError) as caught:
        make_timetable(name, 2, 2)
    assert message.replace("FILE", name.removesuffix(":mine")) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_rank_that_waits_for_itself():
    lists = [[F(0), B(0), F(0, 1), B(0, 1)]]
    message = "deadlock: rank 0, about to run B0 of stage 0, waits for B0' of stage 1 \\(later in its own list\\)"
    with pytest.raises(ScheduleError, match=message):
        Timetable(lists, lambda rank, chunk, size: chunk, num_microbatches=1, num_chunks=2)


@pytest.mark.parametrize(
    "name, chunks, message",
    [
        (
            "gpipe",
            1,
            f"pp_engine: 'gpipe' is not a schedule; use one of {', '.join(SCHEDULES)}",
        ),
        ("nowhere/mine.py:mine", 1, "cannot load 'nowhere/mine.py:mine': FileNotFoundError"),
        ("zb_h1", 2, "pp_chunks: 2, but this schedule has one chunk a rank: use 1"),
        ("dualpipev", 1, "pp_chunks: 1, but this schedule folds the model into a V: use 2"),
    ],
)
def test_unknown_schedule_or_chunks(name, chunks, message):
    with pytest.raises(ValueError, match=message):
        make_timetable(name, 4, 8, chunks)
