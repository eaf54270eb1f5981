"""Pipeline schedules: for every rank the list of what it does, in order. Plain Python, no torch.

    python schedules.py 1f1b --pp-size 4 --microbatches 8      # the timetable of one schedule
    python schedules.py --pp-size 4 --microbatches 8           # all of them side by side

A schedule is a function (pp_rank, pp_size, num_microbatches[, num_chunks]) -> list of actions:

    F  forward          B  backward: gradients for input and weights          B = I + W
    I  the input half   W  the weight half that I left over

Nothing here sends or receives: `timetable.py` finds out from the lists when each action can start, who has to send what
to whom, and whether the lists deadlock. `pipeline_parallel.py` runs them. A model is cut into pp_size × num_chunks
stages; with several chunks a rank holds several stages, and its `placement` says which. In the pictures F0' is F0 of
chunk 1. Every schedule here takes any pp_size and num_microbatches, fewer micro-batches than ranks too.

A schedule of your own is such a function in a file of yours: `distributed.pp_engine=my_schedule.py:my_function`.
It holds one chunk a rank unless it takes num_chunks; `my_function.placement = v_shape` folds the model into a V.
"""

import sys
from itertools import count
from typing import NamedTuple


class Action(NamedTuple):
    """One piece of work on one micro-batch, by the stage that is this rank's local chunk number `chunk`."""

    kind: str  # F, B, I or W
    chunk: int
    microbatch: int

    def __str__(self):
        return f"{self.kind}{self.microbatch}" + "'" * self.chunk  # F3' is F3 of chunk 1


def F(microbatch, chunk=0):
    return Action("F", chunk, microbatch)


def B(microbatch, chunk=0):
    return Action("B", chunk, microbatch)


def I(microbatch, chunk=0):  # noqa: E743
    return Action("I", chunk, microbatch)


def W(microbatch, chunk=0):
    return Action("W", chunk, microbatch)


# --- placement: which stage a rank's chunk is -------------------------------------------------------------------------


def loop(pp_rank, chunk, pp_size):
    """Stages go round the ranks: with 2 ranks and 2 chunks, rank 0 holds stages 0 and 2, rank 1 stages 1 and 3."""
    return chunk * pp_size + pp_rank


def v_shape(pp_rank, chunk, pp_size):
    """Stages go down the ranks and up again: rank 0 holds the first and the last, so tokens and loss meet there."""
    return 2 * pp_size - 1 - pp_rank if chunk else pp_rank


# --- one chunk a rank -------------------------------------------------------------------------------------------------


def afab(pp_rank, pp_size, num_microbatches):
    """All forward, then all backward (GPipe, arXiv 1811.06965). Holds every micro-batch's activations at once.

    rank 0   F0 F1 F2 F3          B0─── B1─── B2─── B3───
    rank 1      F0 F1 F2 F3 B0─── B1─── B2─── B3───
    """
    return [F(i) for i in range(num_microbatches)] + [B(i) for i in range(num_microbatches)]


def one_f_one_b(pp_rank, pp_size, num_microbatches):
    """1F1B (PipeDream-Flush, arXiv 2006.09503): as idle as afab, but rank r holds only pp_size − r micro-batches.

    rank 0   F0 F1       B0─── F2 B1─── F3 B2───    B3───
    rank 1      F0 B0─── F1 B1─── F2 B2─── F3 B3───
    """
    warmup = min(pp_size - pp_rank - 1, num_microbatches)  # until the first micro-batch's gradient can be back
    actions = [F(i) for i in range(warmup)]
    for i in range(num_microbatches - warmup):
        actions += [F(warmup + i), B(i)]
    return actions + [B(i) for i in range(num_microbatches - warmup, num_microbatches)]


def zb_h1(pp_rank, pp_size, num_microbatches):
    """ZB-H1 (arXiv 2401.10241, section 2.1): 1F1B whose late ranks put W off, up to pp_rank of them, to give I earlier.

    Idle time (p − 1)(F + I − W), a third of 1F1B's when F = I = W; every rank holds p micro-batches.

    rank 0   F0 F1    I0 W0 F2 I1 W1 F3 I2 W2 I3 W3
    rank 1      F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3
    """
    warmup = min(pp_size - pp_rank - 1, num_microbatches)
    actions = [F(i) for i in range(warmup)]
    for i in range(num_microbatches):
        if warmup + i < num_microbatches:
            actions.append(F(warmup + i))
        actions.append(I(i))
        if i >= pp_rank:
            actions.append(W(i - pp_rank))
    return actions + [W(i) for i in range(max(0, num_microbatches - pp_rank), num_microbatches)]


# --- several chunks a rank --------------------------------------------------------------------------------------------


def interleaved_1f1b(pp_rank, pp_size, num_microbatches, num_chunks):
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2): v chunks a rank, idle time (p − 1)(F + B)/v.

    Micro-batches go through in groups of p: each chunk takes the whole group before the next chunk does.

    rank 0   F0  F1  F0' F1' F2      B0'──── F3  B1'──── F2' B0───── F3' B1─────     B2'────     B3'──── B2───── B3─────
    rank 1       F0  F1  F0' B0'──── F1' B1'──── F2  B0───── F3  B1───── F2' B2'──── F3' B3'──── B2───── B3─────
    """
    groups = -(-num_microbatches // pp_size)  # the last one may be short: see `_only`
    forward = [
        (group * pp_size + i, chunk) for group in range(groups) for chunk in range(num_chunks) for i in range(pp_size)
    ]
    backward = [(microbatch, num_chunks - 1 - chunk) for microbatch, chunk in forward]
    warmup = min((num_chunks - 1) * pp_size + 2 * (pp_size - pp_rank - 1), len(forward))
    actions = [F(*task) for task in forward[:warmup]]
    for forward_task, backward_task in zip(forward[warmup:], backward, strict=False):
        actions += [F(*forward_task), B(*backward_task)]
    actions += [B(*task) for task in backward[len(forward) - warmup :]]
    return _only(actions, num_microbatches)


def zb_v(pp_rank, pp_size, num_microbatches):
    """ZB-V (arXiv 2401.10241, section 6): two chunks in a V. Idle time (p − 1)F/2 if F = I = W; holds p micro-batches.

    rank 0   F0  F1  F2  F0' I0' W0' F1' I1' W1' F3  I0  W0  F2' I2' W2' I1  W1  F3' I3' W3' I2  W2  I3  W3
    rank 1       F0  F0' F1  F1' I0' W0' F2  I0  W0  F2' I1' W1' F3  I1  W1  F3' I2' W2' I2  I3' I3  W2  W3' W3
    """
    n = max(num_microbatches, 2 * pp_size - 1)  # the pattern needs so many; `_only` takes the surplus out again
    down, up = 0, 1  # the chunk on the way down the V, and the one on the way back up
    counts = {(kind, chunk): 0 for kind in "FIW" for chunk in (down, up)}
    actions = []

    def do(*tasks):
        for kind, chunk in tasks:
            actions.append(Action(kind, chunk, counts[kind, chunk]))
            counts[kind, chunk] += 1

    # Warm-up: fill the V; the first micro-batch comes back up to this rank after 2 · (p − r) − 1 forwards.
    do(*[("F", down)] * (2 * (pp_size - pp_rank) - 1))
    for _ in range(pp_rank):
        do(("F", up), ("F", down))
    for _ in range(pp_size - pp_rank):
        do(("F", up), ("I", up), ("W", up))
    # Steady: one forward, I and W of either chunk in turn.
    while counts["F", up] < n:
        if counts["F", down] < n:
            do(("F", down))
        do(("I", down), ("W", down), ("F", up), ("I", up), ("W", up))
    # Cool-down: the input gradients that others wait for first, the older micro-batch's before; then the rest of W.
    for _ in range(pp_rank):
        do(("I", down), ("I", up))
    for _ in range(pp_size - pp_rank):
        do(("I", down), ("W", down))
    do(*[("W", up)] * (n - counts["W", up]), *[("W", down)] * (n - counts["W", down]))
    return _only(actions, num_microbatches)


def dualpipev(pp_rank, pp_size, num_microbatches):
    """DualPipeV (DeepSeek-V3's DualPipe, arXiv 2412.19437, cut in half): two chunks in a V; holds p + ½ micro-batches.

    Forwards of one chunk alternate with backwards of the other; W is split off where the pipeline fills and drains.

    rank 0   F0  F1  F2  F0' I0' W0' F1' F3  B1'──── F2' B0───── B2'──── F3'     B1───── B3'──── I2  W2  I3  W3
    rank 1       F0  F0' F1  F1' F2  B0'──── F2' B0───── F3  B1'──── F3' B1───── B2'──── B2───── I3' I3  W3' W3
    """
    n = max(num_microbatches, 2 * pp_size)  # the pattern needs so many; `_only` takes the surplus out again
    down, up = 0, 1
    below, here_and_above = pp_size - pp_rank - 1, pp_rank + 1  # numbers of ranks in the V
    microbatches = {(is_forward, chunk): count() for is_forward in (True, False) for chunk in (down, up)}
    actions, left_over = [], []

    def do(kind, chunk):
        microbatch = next(microbatches[kind == "F", chunk])
        actions.append(Action(kind, chunk, microbatch))
        if kind == "I":
            left_over.append(W(microbatch, chunk))

    for _ in range(2 * below):  # 1: fill
        do("F", down)
    for _ in range(here_and_above):  # 2: both directions forward
        do("F", down)
        do("F", up)
    for _ in range(below):  # 3: the first gradients go down quickly
        do("I", up)
        actions.append(left_over.pop(0))
        do("F", up)
    for _ in range(n - 2 * pp_size + here_and_above):  # 4: steady
        do("F", down)
        do("B", up)
        do("F", up)
        do("B", down)
    for _ in range(below):  # 5: the last forwards
        do("B", up)
        do("F", up)
        do("B", down)
    for i in range(here_and_above):  # 6: drain; from half-way on, W waits
        do("B" if i < (here_and_above + 1) // 2 else "I", up)
        do("B" if i < here_and_above // 2 else "I", down)
    for _ in range(below):  # 7: W that waited, between the last I
        actions.append(left_over.pop(0))
        do("I", down)
    return _only(actions + left_over, num_microbatches)  # 8: and the rest of W


def _only(actions, num_microbatches):
    """Without the micro-batches that only filled up a pattern. Dropping whole micro-batches cannot make a deadlock."""
    return [action for action in actions if action.microbatch < num_microbatches]


zb_v.placement = dualpipev.placement = v_shape  # `loop` where a schedule does not say

SCHEDULES = {
    "afab": afab,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
    "dualpipev": dualpipev,
}


if __name__ == "__main__":
    from visualize import print_schedules

    sys.exit(print_schedules())
