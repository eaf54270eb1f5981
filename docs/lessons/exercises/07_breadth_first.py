"""Exercise 7: `breadth_first`, AFAB with several chunks a rank (arXiv 2211.05953).

    python docs/lessons/exercises/07_breadth_first.py

Compares idle time and held micro-batches, then gradients on two real processes with plain PyTorch's.
"""

from exercise import difference_to_one_process, expect, timetable

for chunks in (1, 2, 4):
    costs = {kind: cost / chunks for kind, cost in {"F": 1, "B": 2, "I": 1, "W": 1}.items()}
    table = timetable("breadth_first", 4, 8, chunks, costs=costs)
    idle = 9 / chunks
    expect(table.idle == [idle] * 4, f"{chunks} chunks: idle {table.idle}, expected (p − 1)(F + B)/v = {idle:g}")
    expect(table.peak_microbatches == [8] * 4, f"{chunks} chunks: held {table.peak_microbatches}, AFAB holds all 8")
for num_microbatches in (1, 2, 5):
    timetable("breadth_first", 4, num_microbatches, 2)  # ends the check where this cannot run
difference = difference_to_one_process("breadth_first", num_chunks=4)
expect(difference < 1e-12, f"gradients on 2 processes are {difference:.2g} away from one process's")
print("right: 1/v of AFAB's idle time, and one process's gradients with 4 chunks a rank")
