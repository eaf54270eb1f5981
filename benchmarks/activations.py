"""What a step holds beyond weights, gradients and optimizer, against its micro-batches: measured beside planned.

    MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536 \\
        torchrun --nproc_per_node 4 benchmarks/activations.py --config configs/tiny_1gpu.json [--json held.json]

One pipeline of as many stages as there are processes; afab and 1F1B run steps of 1, 2, 4, … micro-batches. "measured"
is by how much resident memory on rank 0 rises above what it was before the step (Linux; the two variables make the C
library hand back what is freed). "planned" is --dry-run's figure: activations, logits, temporaries, boundary tensors.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.memory import resident  # noqa: E402
from data_parallel import DataParallelBucket  # noqa: E402
from log import say  # noqa: E402
from pipeline_parallel import train_step_pipeline  # noqa: E402
from plan import plan_rank  # noqa: E402
from read_config import load_config  # noqa: E402
from run import boundary_of, build_model  # noqa: E402
from timetable import make_timetable  # noqa: E402
from train import set_up  # noqa: E402

MICROBATCHES = (1, 2, 4, 6, 8, 12, 16)
HELD = ("activations", "logits", "temporary", "boundary")


def measure(config, device, train_data, boundary):
    """Bytes by which this process's own memory rises in the first step of a new model."""
    model = build_model(config, device)
    data_parallel = DataParallelBucket(model)
    data_parallel.zero_grad()  # writes on the gradients: from now on they are resident
    dist.barrier()
    before = resident("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # the peak, VmHWM, starts again from now
    train_step_pipeline(model, train_data, *boundary)
    data_parallel.finish_grad_sync()
    return resident("VmHWM") - resident("RssFile") - before


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--json", help="write the rows into this file too")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    more = [f"distributed.pp_size={os.environ['WORLD_SIZE']}", "distributed.device=cpu", "distributed.pp_engine=afab"]
    config = load_config(arguments.config, [*arguments.overrides, *more])
    config.training.gradient_accumulation_steps = max(MICROBATCHES)
    device, train_data, _ = set_up(config)
    boundary = boundary_of(config, device)
    rows = []
    say(f"{'':8}micro-batches   held     planned    measured (MiB, rank 0)")
    for engine, count in [("afab", 1), *product(("afab", "1f1b"), MICROBATCHES)]:  # the first one warms up
        config.distributed.pp_engine, config.training.gradient_accumulation_steps = engine, count
        measured = measure(config, device, replace(train_data, gradient_accumulation_steps=count), boundary)
        planned = sum(plan_rank(config, 0)["memory"][part] for part in HELD)
        held = make_timetable(engine, config.distributed.pp_size, count).peak_microbatches[0]
        rows.append({"schedule": engine, "microbatches": count, "held": held, "planned": planned, "measured": measured})
    for row in rows[1:]:
        sizes = f"{row['planned'] / 2**20:12.1f}{row['measured'] / 2**20:12.1f}"
        say(f"{row['schedule']:8}{row['microbatches']:13}{row['held']:7g}{sizes}")
    if arguments.json and dist.get_rank() == 0:
        Path(arguments.json).write_text(json.dumps(rows[1:]))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
