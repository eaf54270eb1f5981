"""Exercise 9: `schedules.wave`, a placement that goes down the ranks and up again, several times (arXiv 2308.15762).

    python docs/lessons/exercises/09_wave.py

Compares the placement and its messages, then gradients on two real processes with plain PyTorch's.
"""

from exercise import difference_to_one_process, expect

import schedules
from schedules import B, F, loop
from timetable import Timetable


def breadth_first(pp_rank, pp_size, num_microbatches, num_chunks):
    """All forward, all backward, chunk by chunk: what a placement is tried with here."""
    forward = [F(i, chunk) for chunk in range(num_chunks) for i in range(num_microbatches)]
    return forward + [B(i, chunk) for chunk in reversed(range(num_chunks)) for i in range(num_microbatches)]


QUARTERS = {"F": 0.25, "B": 0.5, "I": 0.25, "W": 0.25}  # of a rank's share, with 4 chunks
breadth_first.placement = getattr(schedules, "wave", loop)


if __name__ == "__main__":
    expect(hasattr(schedules, "wave"), "schedules.py has no placement `wave`")
    stages = [[schedules.wave(rank, chunk, 3) for chunk in range(4)] for rank in range(3)]
    wanted = [[0, 5, 6, 11], [1, 4, 7, 10], [2, 3, 8, 9]]
    expect(stages == wanted, f"with 3 ranks and 4 chunks the ranks hold {stages}, not {wanted}")
    lists = [breadth_first(rank, 4, 8, 4) for rank in range(4)]
    around, folded = (Timetable(lists, placement, 8, 4, QUARTERS) for placement in (loop, schedules.wave))
    saved = around.num_transfers - folded.num_transfers
    expect(saved == 2 * 8 * 3, f"{saved} messages are saved; three turns save 2 · 8 each")
    difference = difference_to_one_process(f"{__file__}:breadth_first", num_chunks=4)
    expect(difference < 1e-12, f"gradients on 2 processes are {difference:.2g} away from one process's")
    print(f"right: {folded.num_transfers} messages instead of {around.num_transfers}, and one process's gradients")
    print(f"a step takes {folded.step_time:g}, with `loop` {around.step_time:g} (a rank's F is 1)")
