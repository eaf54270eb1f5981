"""What the actions of a schedule take: three given numbers, or the means of a measured step, read from its trace."""

import json
from contextlib import suppress
from fractions import Fraction
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from timetable import Box, make_timetable

NAMES = {"F": "F forward", "B": "B backward", "I": "I input half", "W": "W weight half"}


class Costs(NamedTuple):
    """Times of a rank's share, by kind, and of a transfer."""

    share: dict
    transfer: float = 0
    unit: str = ""

    def timetable(self, name, pp_size, num_microbatches, num_chunks):
        chunk = {kind: cost / num_chunks for kind, cost in self.share.items()}
        return make_timetable(name, pp_size, num_microbatches, num_chunks, costs=chunk, transfer=self.transfer)

    def __str__(self):
        shares = ", ".join(f"{kind} {number(self.share[kind])}{self.unit}" for kind in NAMES)
        return f"a rank's share of a micro-batch takes {shares}; a transfer {number(self.transfer)}{self.unit}"


def number(value):
    return f"{float(value):.4g}"


def read_costs(text):
    with suppress(ValueError, ZeroDivisionError):
        F, I, W = map(Fraction, text.split(","))  # noqa: E741
        if min(F, I, W) > 0:
            return Costs({"F": F, "B": I + W, "I": I, "W": W})
    raise ValueError(f"--costs: {text!r}, but it takes three positive numbers F,I,W or a trace.json")


class Trace:
    """One measured step, in milliseconds from its first action. Raises ValueError where the file is something else."""

    def __init__(self, path):
        try:
            content = json.loads(Path(path).read_text())
            keys = ("pp_engine", "pp_size", "num_microbatches", "num_chunks")
            self.layout = [content["metadata"][key] for key in keys]
            self.boxes = self._read_boxes(content["traceEvents"])
            actions = [box for boxes in self.boxes for box in boxes if box.kind in NAMES]
            self.step_time = max(box.end for box in actions)
            self.bubble = 1 - sum(box.end - box.start for box in actions) / len(self.boxes) / self.step_time
            self.means = self._mean_times(actions)
        except (KeyError, TypeError, IndexError, ValueError) as problem:
            raise ValueError(f"{path} is not the trace of a step: {type(problem).__name__} {problem}") from None

    def _read_boxes(self, events):
        """Of every pp rank, in the order of time; tid 0 is dp rank 0 and tp rank 0."""
        events = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
        first = min(event["ts"] for event in events if event["cat"] in NAMES)
        boxes = [[] for _ in range(self.layout[1])]
        for event in sorted(events, key=lambda event: event["ts"]):
            where = [event.get("args", {}).get(key, 0) for key in ("chunk", "microbatch", "stage")]
            start = event["ts"] - first
            kind = event["cat"] if event["cat"] in NAMES else "waiting" if event["cat"] == "wait" else "other"
            boxes[event["pid"]].append(Box(kind, *where, start / 1e3, (start + event["dur"]) / 1e3))
        return boxes

    def _mean_times(self, actions):
        """By kind, of one chunk. A kind that the schedule does not use follows from B = I + W, the halves alike."""
        times = {kind: [box.end - box.start for box in actions if box.kind == kind] for kind in NAMES}
        means = {kind: mean(values) for kind, values in times.items() if values}
        if "B" in means:
            means = {"I": means["B"] / 2, "W": means["B"] / 2} | means
        else:
            means["B"] = means["I"] + means["W"]
        return {kind: means[kind] for kind in NAMES}

    def costs(self, pp_size):
        _, trace_pp_size, _, num_chunks = self.layout
        share = num_chunks * trace_pp_size / pp_size  # in chunks of the trace
        return Costs({kind: time * share for kind, time in self.means.items()}, self.transfer(), " ms")

    def transfer(self):
        """How long a result takes to the next rank: the median over the actions that stood waiting when it was made."""
        made, free, times = {}, [-inf] * len(self.boxes), []
        actions = [(box, rank) for rank, boxes in enumerate(self.boxes) for box in boxes if box.kind in NAMES]
        for box, rank in sorted(actions, key=lambda action: action[0].start):
            if box.kind != "W":
                step = -1 if box.kind == "F" else 1  # to the stage that its input comes from
                maker, when = made.get((step, box.stage + step, box.microbatch), (rank, 0))
                if maker != rank and free[rank] <= when:
                    times.append(max(0, box.start - when))
                made[step, box.stage, box.microbatch] = rank, box.end
            free[rank] = box.end
        return median(times) if times else 0
