"""How speed and memory grow with micro-batches, layers and pipeline ranks, beside what is to be expected.

    python benchmarks/growth.py                  # about five minutes on two cores; needs Linux

A row is a run of train.py with 1F1B. Expected is the timetable's step time for stages that cost as many forwards as
they have layers, the head counted in layers too, or, with more ranks than cores, what the cores need for the sum
of the work if that is longer. Speeds are relative to the block's first row. Memory is as in memory.py: of the largest
rank, planned by `--dry-run` and measured, without the interpreter and its libraries.
"""

import json
import os
import tempfile
from pathlib import Path
from statistics import median

import memory  # first: it lets what follows be found

from read_config import load_config
from stages import head_cost, layers_of_stages, settle_stages
from timetable import make_timetable

MODEL = (
    "model.hidden_size=256 model.intermediate_size=688 model.num_attention_heads=4 model.num_key_value_heads=2 "
    "training.seq_length=128 training.micro_batch_size=1 training.steps=4"
)
BLOCKS = [  # (pp_size, layers, micro-batches) of each row
    *([(p, 8, m) for m in (4, 8, 16, 32, 64)] for p in (1, 2, 4)),
    *([(p, layers, 8) for layers in (4, 8, 16, 32)] for p in (1, 2, 4)),
]


def expected_step(config):
    """In units of one layer's forward."""
    d, num_microbatches = config.distributed, config.training.gradient_accumulation_steps
    work = [float(len(layers)) for layers in layers_of_stages(config)]
    work[-1] += head_cost(config)
    costs = {"F": work, "B": [2 * forwards for forwards in work]}
    step_time = make_timetable(d.pp_engine, d.pp_size, num_microbatches, costs=costs).step_time
    return max(step_time, 3 * sum(work) * num_microbatches / os.cpu_count())


def measure(pp_size, num_layers, num_microbatches):
    """(tokens/s expected, by some factor; tokens/s measured; MiB planned; MiB measured)"""
    layout = f"distributed.pp_size={pp_size} model.num_hidden_layers={num_layers}"
    overrides = f"{MODEL} {layout} training.gradient_accumulation_steps={num_microbatches}"
    with tempfile.TemporaryDirectory() as folder:
        path, metrics_file = f"{folder}/config.json", f"{folder}/metrics.jsonl"
        Path(path).write_text(json.dumps(memory.BASE))
        config = load_config(path, overrides.split())
        settle_stages(config)
        planned, measured = memory.run(f"{overrides} logging.metrics_file={metrics_file}")
        steps = [json.loads(line) for line in Path(metrics_file).read_text().splitlines()]
    speed = median(step["tokens_per_second"] for step in steps[1:])  # the first one warms up
    return config.tokens_per_step / expected_step(config), speed, max(planned) / 2**20, max(measured) / 2**20


def main():
    for block in BLOCKS:
        print("pp  layers  micro-batches   tokens/s   relative  expected   MiB planned  measured")
        first = None
        for row in block:
            expected, speed, planned, measured = measure(*row)
            first = first or (expected, speed)
            print(f"{row[0]:2} {row[1]:7} {row[2]:14} {speed:10.0f} {speed / first[1]:10.2f} {expected / first[0]:9.2f}"
                  f" {planned:13.0f} {measured:9.0f}", flush=True)  # fmt: skip
        print()


if __name__ == "__main__":
    main()
