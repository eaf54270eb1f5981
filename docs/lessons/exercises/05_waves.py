"""Exercise 5: `afab_waves`, AFAB that holds no more than pp_size micro-batches.

    python docs/lessons/exercises/05_waves.py

Compares held micro-batches and idle time, at several sizes, with what waves give.
"""

from exercise import expect, timetable

for pp_size, num_microbatches in ((4, 8), (4, 6), (2, 8), (4, 3), (1, 2)):
    table = timetable("afab_waves", pp_size, num_microbatches)
    held, most = max(table.peak_microbatches), min(pp_size, num_microbatches)
    numbers = f"pp_size {pp_size}, {num_microbatches} micro-batches"
    expect(held <= pp_size, f"{numbers}: a rank holds {held:g} micro-batches, more than {pp_size}")
    expect(held == most, f"{numbers}: a rank holds only {held:g} micro-batches of {most}: waves can be larger")
    waves = -(-num_microbatches // pp_size)
    idle = waves * (pp_size - 1) * 3
    expect(
        table.idle == [idle] * pp_size, f"{numbers}: idle {table.idle}, expected {idle} on each rank ({waves} waves)"
    )
print("right: holds pp_size micro-batches, fills and drains once a wave")
