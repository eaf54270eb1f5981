"""Writes docs/schedules.html: every schedule's timetable to look at and click through, in one file without a network.

    python docs/make_page.py                                            # docs/schedules.html
    python docs/make_page.py 1f1b my_schedule.py:mine -o mine.html      # these schedules alone; one may be your own

The page knows no schedule and plays none: it draws the timetables that are put into docs/schedules.template.html here.
A layout is a schedule with its p, m and chunks; a play is the layout at one of COSTS. Times are whole ticks.
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from costs import NAMES, read_costs  # noqa: E402
from find_schedule import chunks_of, find_schedule  # noqa: E402
from schedules import SCHEDULES  # noqa: E402
from visualize import COLOURS  # noqa: E402

PP_SIZES, MICROBATCHES, CHUNKS = (2, 4, 8), (2, 4, 8, 16), (2, 4)
COSTS = {  # of a rank's share
    "F = I = W = 1": read_costs("1,1,1"),
    "F 1, I 1.1, W 0.9": read_costs("1,1.1,0.9"),
    "F 1, I 2, W 1 (recomputation: I runs F again)": read_costs("1,2,1"),
    "F = I = W = 1, a transfer takes 0.25": read_costs("1,1,1")._replace(transfer=0.25),
}
TICKS = 40  # in a unit of time: a quarter of 1.1, the shortest difference that occurs, is 11 of them


def ticks(time):
    assert (time * TICKS) % 1 == 0, f"{time} is not a whole number of ticks"
    return int(time * TICKS)


def make_play(name, timetable, num_chunks, costs):
    return {
        "costs": name,
        "lengths": {kind: ticks(cost / num_chunks) for kind, cost in costs.share.items()},
        "transfer": ticks(costs.transfer),
        "starts": [[ticks(start) for start in starts] for starts in timetable.starts],
        "step_time": ticks(timetable.step_time),
        "idle": [ticks(idle) for idle in timetable.idle],
        "bubble": round(float(timetable.bubble), 5),
    }


def needs(timetable):
    """Of every action, rank after rank, the numbers of those whose results it uses. Numbers count through all ranks."""
    actions = [
        (kind, stages[chunk], microbatch)
        for stages, actions in zip(timetable.stages, timetable.lists, strict=True)
        for kind, chunk, microbatch in actions
    ]
    maker = {("F" if kind == "F" else "BI", stage, i): n for n, (kind, stage, i) in enumerate(actions) if kind != "W"}
    for kind, stage, i in actions:
        if kind == "W":
            wanted = [("BI", stage, i)]  # the I that left it over
        elif kind == "F":
            wanted = [("F", timetable.source("F", stage), i)]
        else:  # the gradient, and what its own forward kept
            wanted = [("BI", timetable.source(kind, stage), i), ("F", stage, i)]
        yield [maker[key] for key in wanted if key in maker]


def make_layout(name, pp_size, num_microbatches, num_chunks):
    plays = {costs: COSTS[costs].timetable(name, pp_size, num_microbatches, num_chunks) for costs in COSTS}
    timetable = next(iter(plays.values()))  # lists, stages and what is held are the same at all costs
    return {
        "schedule": name,
        "p": pp_size,
        "m": num_microbatches,
        "chunks": num_chunks,
        "stages": timetable.stages,
        "actions": [" ".join(map(str, actions)) for actions in timetable.lists],
        "needs": list(needs(timetable)),
        "held": [[round(held * num_chunks) for held in counts] for counts in timetable.held],  # in chunks
        "peak": timetable.peak_microbatches,
        "plays": [make_play(costs, play, num_chunks, COSTS[costs]) for costs, play in plays.items()],
    }


def make_page(names):
    """The page with the schedules called `names`, as text. Raises ValueError where one of them is wrong."""
    layouts = [
        make_layout(name, pp_size, num_microbatches, num_chunks)
        for name in names
        for num_chunks in ([chunks_of(find_schedule(name))] if chunks_of(find_schedule(name)) else CHUNKS)
        for pp_size, num_microbatches in product(PP_SIZES, MICROBATCHES)
    ]
    kinds = {kind: {"name": name, "colour": COLOURS[kind]} for kind, name in NAMES.items()}
    data = json.dumps({"ticks": TICKS, "kinds": kinds, "layouts": layouts}, separators=(",", ":"))
    template = (ROOT / "docs" / "schedules.template.html").read_text()
    return template.replace("TIMETABLES", data.replace("</", "<\\/").replace('{"schedule"', '\n{"schedule"'))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="*", help="names, or file.py:function; none: those of schedules.py")
    parser.add_argument("-o", "--output", default=ROOT / "docs" / "schedules.html")
    arguments = parser.parse_args()
    try:
        Path(arguments.output).write_text(make_page(arguments.schedules or SCHEDULES))
    except (ValueError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
