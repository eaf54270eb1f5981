"""Schedules that cannot run: the lab of lesson 10.

    python schedules.py docs/lessons/deadlocks.py:upside_down --pp-size 4 --microbatches 8

Each looks reasonable on one rank. What cannot run does not get as far as a process: the checker plays all ranks' lists
and says in words which action is wrong, or who waits for whom.
"""

from schedules import SCHEDULES, B, F, I, W, v_shape

one_f_one_b, interleaved_1f1b, zb_h1 = SCHEDULES["1f1b"], SCHEDULES["interleaved_1f1b"], SCHEDULES["zb_h1"]


def upside_down(pp_rank, pp_size, num_microbatches):
    """1F1B with the warm-up counted from the wrong end: the first rank has none, the last rank the longest."""
    return one_f_one_b(pp_size - 1 - pp_rank, pp_size, num_microbatches)


def too_eager_to_send(pp_rank, pp_size, num_microbatches):
    """1F1B where odd ranks, to give their gradients sooner, run each B before the F that it stands behind."""
    actions = one_f_one_b(pp_rank, pp_size, num_microbatches)
    for i in range(len(actions) - 1):
        this, after = actions[i : i + 2]
        if pp_rank % 2 and (this.kind, after.kind) == ("F", "B") and after.microbatch < this.microbatch:
            actions[i : i + 2] = after, this
    return actions


def last_in_first_out(pp_rank, pp_size, num_microbatches):
    """All forward, all backward; but the last rank takes the newest micro-batch first, the others the oldest."""
    order = range(num_microbatches) if pp_rank < pp_size - 1 else reversed(range(num_microbatches))
    return [F(i) for i in range(num_microbatches)] + [B(i) for i in order]


def one_short(pp_rank, pp_size, num_microbatches):
    """1F1B as it is written when rank 0 believes that there is one micro-batch less."""
    return one_f_one_b(pp_rank, pp_size, num_microbatches - (pp_rank == 0))


def forgets_w(pp_rank, pp_size, num_microbatches):
    """zb_h1 without the loop at the end that works off what is left of W."""
    actions = zb_h1(pp_rank, pp_size, num_microbatches)
    while pp_rank and actions[-1].kind == "W":
        actions.pop()
    return actions


def folded(pp_rank, pp_size, num_microbatches):
    """The lists of interleaved 1F1B, with 2 chunks, on a model that is folded into a V."""
    return interleaved_1f1b(pp_rank, pp_size, num_microbatches, 2)


folded.placement = v_shape


def inside_out(pp_rank, pp_size, num_microbatches):
    """A V in which every rank does the chunk on the way up before the one on the way down."""
    both = [(i, chunk) for chunk in (1, 0) for i in range(num_microbatches)]
    return [F(*task) for task in both] + [action for task in both for action in (I(*task), W(*task))]


inside_out.placement = v_shape
