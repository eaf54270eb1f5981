"""Exercise 10: a deadlock's message also tells how far every rank got.

    python docs/lessons/exercises/10_progress.py

Reads the message of two deadlocks.
"""

from exercise import ROOT, expect

from timetable import ScheduleError, make_timetable

cases = {
    "upside_down": "1 of 16, 1 of 16, 1 of 16, 1 of 16",
    "too_eager_to_send": "14 of 16, 13 of 16, 13 of 16, 14 of 16",
}
for name, progress in cases.items():
    try:
        make_timetable(f"{ROOT}/docs/lessons/deadlocks.py:{name}", pp_size=4, num_microbatches=8)
    except ScheduleError as problem:
        text = str(problem)
    expect("waits for" in text, f"the message no longer says who waits for whom: {text}")
    expect(f"(done: {progress})" in text, f"the message has no `(done: {progress})`: {text}")
print("right: a deadlock tells how many of its actions every rank has done")
