"""Makes the pictures in docs/figures from runs on this machine, and docs/schedules.html. Prints each command it runs.

make figures                           # all, in under four minutes on two cores
python docs/figures.py loss bubble     # those with one of these words in their name
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "figures"
sys.path.insert(0, str(ROOT))

from timetable import make_timetable  # noqa: E402
from visualize import GREY, STYLE  # noqa: E402

# Okabe and Ito's colours that show on white and on black; a marker or a width goes with each, never colour alone.
BLUE, ORANGE, GREEN, RED, PINK, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
MIB = 2**20


def run(*command, **environment):
    """Runs a command in the project's folder. Its output is shown only when it fails, and ends this program."""
    shown = [f"{name}={value}" for name, value in environment.items()] + list(command)
    print(shlex.join(map(str, shown)), flush=True)
    programs = {"torchrun": ["-m", "torch.distributed.run"], "python": []}
    command = [sys.executable, *programs[command[0]], *map(str, command[1:])]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}error: the command above failed with {done.returncode}")


def train(num_processes, *overrides):
    run("torchrun", "--nproc_per_node", num_processes, "train.py", "--config", "configs/tiny_1gpu.json", *overrides)


def save(figure, name):
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


def make_axes(num_panels, size, **options):
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, num_panels, squeeze=False, **options)[0]
    for axes in panels:
        axes.grid(color=GREY, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


# --- losses -----------------------------------------------------------------------------------------------------------

SMALL = "model.dtype=float64 training.steps=30 training.micro_batch_size=2 training.seq_length=128".split()
LAYOUTS = {  # processes and what makes the layout; the global batch is the same: dp 2 has half the micro-batches
    "one process": (1, ""),
    "pp 2, 1F1B": (2, "distributed.pp_size=2"),
    "tp 2": (2, "distributed.tp_size=2"),
    "dp 2": (2, "distributed.dp_size=2 training.gradient_accumulation_steps=2"),
    "pp 2 × tp 2, ZB-H1": (4, "distributed.pp_size=2 distributed.tp_size=2 distributed.pp_engine=zb_h1"),
    "pp 2 × dp 2, ZB-V, ZeRO-1": (
        4,
        "distributed.pp_size=2 distributed.dp_size=2 distributed.pp_engine=zb_v distributed.zero1=true "
        "training.gradient_accumulation_steps=2",
    ),
}


def read_losses(path):
    return [json.loads(line)["loss"] for line in Path(path).read_text().splitlines()]


def loss_of_six_layouts(folder):
    losses = {}
    for name, (num_processes, overrides) in LAYOUTS.items():
        path = f"{folder}/{len(losses)}.jsonl"
        train(num_processes, *SMALL, *overrides.split(), f"logging.metrics_file={path}")
        losses[name] = read_losses(path)
    draw_losses(losses)


def draw_losses(losses):
    """Left the curves on top of each other, the first ones widest; right how far each is from the first one."""
    reference = next(iter(losses.values()))
    steps = range(1, len(reference) + 1)
    apart = {name: [abs(a - b) for a, b in zip(values, reference, strict=True)] for name, values in losses.items()}
    figure, (curves, differences) = make_axes(2, (9, 3.8))
    for i, (name, colour) in enumerate(zip(losses, (GREY, SKY, ORANGE, GREEN, PINK, BLUE), strict=True)):
        width, marker = 2 * (len(losses) - i) - 0.8, "osD^vX"[i]
        curves.plot(steps, losses[name], color=colour, linewidth=width, label=name, solid_capstyle="butt")
        if i:
            differences.plot(steps, apart[name], color=colour, marker=marker, markersize=4, linewidth=1, label=name)
    curves.set(xlabel="step", ylabel="loss (nats per token)", title="loss")
    differences.set(xlabel="step", ylabel="nats per token", title="distance from one process, where it is not 0")
    differences.set_yscale("log", nonpositive="mask")
    differences.minorticks_off()
    differences.yaxis.set_major_formatter("{x:.0e}")
    figure.legend(*curves.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    largest = max(max(values) for values in apart.values())
    figure.suptitle(f"Six layouts, one training run in float64: losses at most {largest:.1e} apart")
    save(figure, "loss_of_six_layouts")


# --- measured over predicted ------------------------------------------------------------------------------------------

# Steps long enough that two cores run them as the timetable says: an F takes about a tenth of a second.
LARGE = (
    "distributed.pp_size=2 model.hidden_size=512 model.num_attention_heads=8 model.num_key_value_heads=8 "
    "model.intermediate_size=1408 training.micro_batch_size=2 training.gradient_accumulation_steps=8 training.steps=3 "
    "logging.trace_step=3"
).split()


def timeline(engine, folder):
    train(2, *LARGE, f"distributed.pp_engine={engine}", f"logging.trace_file={folder}/{engine}.json")
    FOLDER.mkdir(exist_ok=True)
    run("python", "visualize.py", f"{folder}/{engine}.json", "-o", f"docs/figures/timeline_{engine}.svg")


def timeline_1f1b(folder):
    timeline("1f1b", folder)


def timeline_zb_h1(folder):
    timeline("zb_h1", folder)


# --- held activations -------------------------------------------------------------------------------------------------


def held_activations(folder):
    if not Path("/proc/self/clear_refs").exists():
        return print("held_activations.svg: not made, resident memory is measured on Linux alone")
    hand_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    script = ["benchmarks/activations.py", "--config", "configs/tiny_1gpu.json", "--json", f"{folder}/held.json"]
    run("torchrun", "--nproc_per_node", 4, *script, **hand_back)
    draw_held(json.loads(Path(f"{folder}/held.json").read_text()))


def draw_held(rows):
    """rows: as benchmarks/activations.py writes them."""
    figure, (counts, sizes) = make_axes(2, (9, 3.6), sharex=True)
    for schedule, colour, marker in (("afab", RED, "o"), ("1f1b", BLUE, "s")):
        of_schedule = [row for row in rows if row["schedule"] == schedule]
        columns = {key: [row[key] for row in of_schedule] for key in ("microbatches", "held", "planned", "measured")}
        microbatches = columns["microbatches"]
        planned, measured = ([size / MIB for size in columns[key]] for key in ("planned", "measured"))
        counts.plot(microbatches, columns["held"], color=colour, marker=marker, label=schedule)
        sizes.plot(microbatches, planned, color=colour, label=f"{schedule}, planned by --dry-run")
        sizes.plot(microbatches, measured, color=colour, marker=marker, linestyle="", label=f"{schedule}, measured")
    counts.set(ylabel="micro-batches held", title="in the timetable, rank 0 of 4")
    sizes.set(ylabel="MiB", title="memory that a step adds, rank 0 of 4")
    for axes in (counts, sizes):
        axes.set(xlabel="micro-batches of a step", ylim=(0, None))
        axes.legend(frameon=False)
    save(figure, "held_activations")


# --- bubble -----------------------------------------------------------------------------------------------------------

LINES = {  # label: schedule, chunks, and how it is drawn; some lie on each other, so the lower ones are wider
    "afab": ("afab", 1, {"color": GREY, "linewidth": 5, "alpha": 0.5}),
    "1f1b": ("1f1b", 1, {"color": BLUE, "marker": "s"}),
    "interleaved_1f1b, 2 chunks": ("interleaved_1f1b", 2, {"color": ORANGE, "marker": "^"}),
    "interleaved_1f1b, 4 chunks": ("interleaved_1f1b", 4, {"color": RED, "marker": "v"}),
    "zb_h1": ("zb_h1", 1, {"color": GREEN, "marker": "D"}),
    "dualpipev": ("dualpipev", 2, {"color": PINK, "linewidth": 5, "alpha": 0.7}),
    "zb_v": ("zb_v", 2, {"color": SKY, "marker": "o"}),
}


def bubble(folder):
    figure, (of_m, of_p) = make_axes(2, (9, 4.2), sharey=True)
    microbatches, ranks, percents = (1, 2, 4, 8, 16, 32, 64), (2, 4, 8, 16, 32), (1, 2, 5, 10, 20, 50)
    for label, (name, chunks, drawn) in LINES.items():
        costs = {kind: cost / chunks for kind, cost in {"F": 1, "B": 2, "I": 1, "W": 1}.items()}
        tables = [[make_timetable(name, 4, m, chunks, costs=costs) for m in microbatches]]
        tables += [[make_timetable(name, p, 32, chunks, costs=costs) for p in ranks]]
        for axes, numbers, row in zip((of_m, of_p), (microbatches, ranks), tables, strict=True):
            axes.plot(numbers, [100 * table.bubble for table in row], markersize=5, label=label, **drawn)
    of_m.set(xlabel="m, micro-batches of a step", ylabel="bubble: idle time / step time (%)", title="p = 4 ranks")
    of_p.set(xlabel="p, pipeline ranks", title="m = 32 micro-batches")
    for axes, numbers in ((of_m, microbatches), (of_p, ranks)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, map(str, numbers))
    of_m.set_yscale("log")  # and so of_p: they share it
    of_m.set_yticks(percents, map(str, percents))
    of_m.minorticks_off()
    figure.legend(*of_m.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("Bubble of every schedule, F = I = W = 1, B = 2, transfers free")
    save(figure, "bubble")


# --- command line -----------------------------------------------------------------------------------------------------


def page(folder):
    run("python", "docs/make_page.py")


def main(words):
    makers = (bubble, page, loss_of_six_layouts, timeline_1f1b, timeline_zb_h1, held_activations)
    chosen = [make for make in makers if not words or any(word in make.__name__ for word in words)]
    if not chosen:
        names = ", ".join(make.__name__ for make in makers)
        print(f"error: no picture has {' or '.join(words)} in its name: {names}", file=sys.stderr)
        return 2
    for make in chosen:
        with tempfile.TemporaryDirectory() as folder, rc_context(STYLE | {"svg.hashsalt": make.__name__}):
            make(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
