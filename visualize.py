"""Schedules and traces for the eye: as text, as a table, as a picture.

    python schedules.py 1f1b --pp-size 4 --microbatches 8               # a timetable as text
    python schedules.py --pp-size 4 --microbatches 8                    # every schedule, side by side
    python schedules.py --costs trace.json --max-held 4                 # which of them is fastest on this machine
    python visualize.py zb_h1 --pp-size 4 --microbatches 8 -o x.svg     # a timetable as a picture (.svg, .png, .pdf)
    python visualize.py trace.json -o timeline.svg                      # a measured step over the predicted one
    python docs/make_page.py                                            # docs/schedules.html: all, to click through

Costs are the times of one rank's share of the model for one micro-batch: F forward, I and W the two halves of the
backward B = I + W. With v chunks a rank, an action of one chunk takes a v-th of that.
"""

import argparse
import json
import os
import sys
from itertools import product
from math import floor, inf

from costs import NAMES, Trace, number, read_costs
from find_schedule import chunks_of, find_schedule
from schedules import SCHEDULES

# --- as text ----------------------------------------------------------------------------------------------------------

ANSI = {"F": 117, "B": 209, "I": 222, "W": 115}  # backgrounds, of the terminal's 256 colours


def grid(timetable, colour=False):
    """(tick, width of a cell, cells of every rank): a tick is the shortest action's time; others are rounded to it."""
    boxes = [box for row in timetable.boxes for box in row]
    tick = max(min(box.end - box.start for box in boxes), timetable.step_time / 20_000)
    width = 1 + max(len(str(box)) for box in boxes)
    rows = [[" " * width] * floor(timetable.step_time / tick + 0.5) for _ in timetable.boxes]
    for row, boxes in zip(rows, timetable.boxes, strict=True):
        for box in boxes:
            first, last = floor(box.start / tick + 0.5), floor(box.end / tick + 0.5)
            text = str(box).ljust((last - first) * width - 1, "─" if last - first > 1 else " ") + " "
            for i in range(last - first):
                cell = text[i * width : (i + 1) * width]
                row[first + i] = f"\x1b[30;48;5;{ANSI[box.kind]}m{cell}\x1b[0m" if colour else cell
    return tick, width, rows


def print_timetable(name, table, costs):
    """The grid, on a terminal in bands as wide as that; then what it comes to."""
    on_terminal = sys.stdout.isatty()
    tick, width, rows = grid(table, colour=on_terminal and "NO_COLOR" not in os.environ)
    band = max(1, ((os.get_terminal_size().columns or 80) - 9) // width) if on_terminal else len(rows[0])
    print(f"{name}: pp_size {table.pp_size}, micro-batches {table.num_microbatches}, chunks {table.num_chunks}")
    print(f"{costs}; a column is {number(tick)}{costs.unit}")
    print(f"{', '.join(NAMES.values())}; F3' is F3 of the rank's chunk 1\n")
    for start in range(0, len(rows[0]), band):
        for rank, row in enumerate(rows):
            print(f"rank {rank:<3}", "".join(row[start : start + band]).rstrip())
        print()
    ranks = zip(table.idle, table.peak_microbatches, strict=True)
    print_table([{"rank": rank, "idle": idle, "micro-batches held": held} for rank, (idle, held) in enumerate(ranks)])
    figures = f"step time {number(table.step_time)}{costs.unit}, bubble {float(table.bubble):.1%}"
    print(f"\n{figures} (idle time / step time, mean over ranks)")


def print_table(rows):
    texts = [[cell if isinstance(cell, str) else number(cell) for cell in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(rows[0], *texts, strict=True)]
    for row in (rows[0], *texts):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def compare(costs, pp_size, microbatch_counts, chunk_counts, max_held):
    """A row for every schedule, at the micro-batch count that is best for it; the fastest per micro-batch first."""
    rows = []
    for name, schedule in SCHEDULES.items():
        fixed = chunks_of(schedule)
        for num_chunks, count in product((fixed,) if fixed else chunk_counts, microbatch_counts):
            table = costs.timetable(name, pp_size, count, num_chunks)
            row = {"schedule": name, "chunks": num_chunks, "microbatches": count, "step_time": table.step_time}
            row |= {"per_microbatch": table.step_time / count, "bubble": table.bubble}
            rows.append(row | {"held": max(table.peak_microbatches), "transfers": table.num_transfers})
    best = {}
    for row in sorted(rows, key=lambda row: (row["per_microbatch"], row["held"])):
        if row["held"] <= max_held:
            best.setdefault((row["schedule"], row["chunks"]), row)
    if not best:
        raise ValueError(f"--max-held: {max_held}, but every schedule holds more micro-batches than that")
    return list(best.values())


def print_comparison(rows, costs):
    print(f"{costs}\n")
    print_table([row | {"bubble": f"{float(row['bubble']):.1%}"} for row in rows])
    print("\nbubble: idle time / step time, mean over ranks; held: the most micro-batches that a rank holds at once")
    print("fastest per micro-batch: {schedule}, chunks {chunks}, micro-batches {microbatches}".format(**rows[0]))


# --- as a picture -----------------------------------------------------------------------------------------------------

# Okabe and Ito's colours, distinct to colour-blind eyes too; what is not an action lies behind, see-through
COLOURS = {"F": "#56B4E9", "B": "#D55E00", "I": "#E69F00", "W": "#009E73", "waiting": "#80808060", "other": "#CC79A780"}
GREY = "#7A7A7A"  # to be read on a white page and on a dark one
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, and can be searched
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib; else every text has a list of a dozen
    "savefig.transparent": True,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
}


def colour(kind, chunk, last_chunk):
    """Later chunks are lighter."""
    from matplotlib.colors import to_rgba

    *rgb, alpha = to_rgba(COLOURS[kind])
    white = 0.6 * chunk / max(1, last_chunk)
    return *((1 - white) * part + white for part in rgb), alpha


def draw_rows(axes, rows, last_chunk, inches):
    """A row per rank. A box gets its name, or its micro-batch alone, where that fits: a time unit is so many inches."""
    for rank, boxes in enumerate(rows):
        boxes = sorted(boxes, key=lambda box: box.kind in NAMES)  # the rest lies underneath
        spans = [(box.start, box.end - box.start) for box in boxes]
        colours = [colour(box.kind, box.chunk, last_chunk) for box in boxes]
        many = len(boxes) > 300  # then as pixels: the file would have many megabytes
        axes.broken_barh(spans, (rank - 0.46, 0.92), facecolors=colours, edgecolors="k", linewidth=0.3, rasterized=many)
        for box in boxes:
            room = (box.end - box.start) * inches / 0.09  # in characters; the ' are narrow
            names = [name for name in (str(box), str(box.microbatch)) if len(name.rstrip("'")) < room]
            if box.kind in NAMES and names:
                axes.text((box.start + box.end) / 2, rank, names[0], color="k", ha="center", va="center", fontsize=7)
    stages = [sorted({box.stage for box in boxes if box.kind in NAMES}) for boxes in rows]
    axes.set_yticks(
        range(len(rows)),
        [f"rank {r}, stage{'s' * (len(s) > 1)} {', '.join(map(str, s))}" for r, s in enumerate(stages)],
    )
    axes.set_ylim(len(rows) - 0.4, -0.6)


def draw(path, pictures, unit):
    """`pictures`, each (title, Timetable or Trace), above each other on one time axis, into the file `path`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    boxes = [box for _, played in pictures for row in played.boxes for box in row]
    start, end = min(box.start for box in boxes), max(box.end for box in boxes)
    # The rest is mostly far too short to be seen: many messages being posted.
    boxes = {box for box in boxes if box.kind in NAMES or box.end - box.start > (end - start) / 400}
    last_chunk = max(box.chunk for box in boxes)
    durations = sorted(box.end - box.start for box in boxes if box.kind in NAMES)
    width = min(max(8, 0.28 * (end - start) / durations[len(durations) // 4] + 1.5), 40)
    height = 0.8 + sum(0.6 + 0.4 * len(played.boxes) for _, played in pictures)
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        rows = figure.subplots(len(pictures), sharex=True, squeeze=False).flat
        for axes, (title, played) in zip(rows, pictures, strict=True):
            axes.set_xlim(start, end)
            seen = [[box for box in row if box in boxes] for row in played.boxes]
            draw_rows(axes, seen, last_chunk, inches=(width - 1.5) / (end - start))
            figures = f"step time {number(played.step_time)}{unit}, bubble {float(played.bubble):.1%}"
            axes.set_title(f"{title}: {figures} (idle / step time)", loc="left", fontsize=10)
        axes.set_xlabel(f"time ({unit.strip()})" if unit else "time (F, I and W of a rank's share as in --costs)")
        kinds = {box.kind for box in boxes}
        legend = [Patch(color=COLOURS[kind], label=NAMES.get(kind, kind)) for kind in COLOURS if kind in kinds]
        legend += [
            Patch(color=colour(kind, chunk, last_chunk), label=f"{kind} of chunk {chunk}")
            for chunk in range(1, last_chunk + 1)
            for kind in NAMES
            if kind in kinds
        ]
        figure.legend(handles=legend, loc="outside lower center", ncols=min(len(legend), 6), frameon=False)
        figure.savefig(path)
    print(f"drawn into {path}")


# --- command line -----------------------------------------------------------------------------------------------------


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", help="a schedule, file.py:function or trace.json; none: all schedules")
    parser.add_argument("--pp-size", type=int, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, help="of a step; to find the fastest: at most so many")
    parser.add_argument("--chunks", type=int, help="model chunks a rank")
    parser.add_argument("--costs", default="1,1,1", help="F,I,W of a rank's share, or a measured trace.json")
    parser.add_argument("--max-held", type=float, help="find the fastest that holds at most so many micro-batches")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-o", "--output", help="draw into this file (.svg, .png, .pdf); a trace: timeline.svg")
    parser.error = lambda message: parser.exit(2, f"error: {message}\n")  # without the usage: that is in --help
    arguments = parser.parse_args(arguments)
    for option in ("pp_size", "microbatches", "chunks", "max_held"):
        value = getattr(arguments, option)
        if value is not None and not value > 0:
            raise ValueError(f"--{option.replace('_', '-')}: {value} is not above 0")
    return arguments


def run(arguments):
    what, output, max_held = arguments.what, arguments.output, arguments.max_held
    if what and what.endswith(".json"):
        trace = Trace(what)
        predicted = trace.costs(trace.layout[1]).timetable(*trace.layout)
        pictures = [(f"measured, {trace.layout[0]}", trace), ("predicted from the mean times", predicted)]
        return draw(output or "timeline.svg", pictures, " ms")
    if output and not what:
        raise ValueError("-o: name the schedule or the trace.json to draw")
    trace = Trace(arguments.costs) if arguments.costs.endswith(".json") else None
    pp_size = arguments.pp_size or (trace and trace.layout[1])
    num_microbatches = arguments.microbatches or (trace and trace.layout[2])
    if not (pp_size and num_microbatches):
        raise ValueError("--pp-size and --microbatches are needed")
    costs = trace.costs(pp_size) if trace else read_costs(arguments.costs)
    if what is None:
        counts = range(1, num_microbatches + 1) if trace or max_held else (num_microbatches,)
        rows = compare(costs, pp_size, counts, (arguments.chunks,) if arguments.chunks else (2, 4), max_held or inf)
        return print(json.dumps(rows, default=float)) if arguments.json else print_comparison(rows, costs)
    num_chunks = arguments.chunks or chunks_of(find_schedule(what)) or 2
    timetable = costs.timetable(what, pp_size, num_microbatches, num_chunks)
    if output:
        draw(output, [(f"{what}, {num_microbatches} micro-batches", timetable)], costs.unit)
    elif arguments.json:
        figures = {key: getattr(timetable, key) for key in ("step_time", "bubble", "peak_microbatches")}
        figures["actions"] = [[box._asdict() for box in boxes] for boxes in timetable.boxes]
        print(json.dumps(figures, default=float))
    else:
        print_timetable(what, timetable, costs)


def print_schedules(arguments=None):
    """The command line of schedules.py and of this file; returns the exit code."""
    try:
        return run(parse(arguments)) or 0
    except (ValueError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(print_schedules())
