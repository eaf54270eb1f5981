"""Exercise 8: `split_1f1b`, 1F1B whose B is an I and, at once, its W.

    python docs/lessons/exercises/08_split.py

Compares idle time and held micro-batches with 1F1B's, at several costs.
"""

from exercise import expect, timetable

for F, I, W in ((1, 1, 1), (2, 1, 3), (1, 2, 1)):  # noqa: E741
    plain, split = (
        timetable(name, 4, 8, costs={"F": F, "B": I + W, "I": I, "W": W}) for name in ("1f1b", "split_1f1b")
    )
    kinds = {action.kind for actions in split.lists for action in actions}
    expect(kinds == {"F", "I", "W"}, f"its actions are {', '.join(sorted(kinds))}; they are to be F, I and W")
    expect(split.peak_microbatches == plain.peak_microbatches, f"held {split.peak_microbatches}, more than 1F1B")
    idle = 3 * (F + I)
    expect(split.idle == [idle] * 4, f"F, I, W = {F}, {I}, {W}: idle {split.idle}, expected (p − 1)(F + I) = {idle}")
for num_microbatches in (1, 2, 5):
    timetable("split_1f1b", 4, num_microbatches)  # ends the check where this cannot run
print("right: idle (p − 1)(F + I) with 1F1B's memory")
