"""Exercise 6: `eager_1f1b`, a 1F1B with a longer warm-up, for links that are slow.

    python docs/lessons/exercises/06_eager.py

Compares held micro-batches, and step times with free and with slow messages.
"""

from exercise import expect, timetable

plain, eager = (timetable(name, 4, 16) for name in ("1f1b", "eager_1f1b"))
expect(eager.peak_microbatches == [7, 5, 3, 1], f"held {eager.peak_microbatches}, expected [7, 5, 3, 1] at pp_size 4")
expect(eager.step_time == plain.step_time, f"with free links it takes {eager.step_time}, 1f1b {plain.step_time}")
plain, eager = (timetable(name, 4, 16, transfer=0.5) for name in ("1f1b", "eager_1f1b"))
expect(eager.step_time == 60, f"with transfers of half a forward it takes {eager.step_time}, 60 is possible")
for num_microbatches in (1, 2, 5):
    timetable("eager_1f1b", 4, num_microbatches)  # ends the check where this cannot run
print(f"right: with transfers of half a forward {eager.step_time:g} instead of {plain.step_time:g}")
