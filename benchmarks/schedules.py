"""Every schedule's step, measured over predicted, in one run.

    torchrun --nproc_per_node 2 benchmarks/schedules.py --config benchmarks/w1.json [--cycles 12]

All schedules are built side by side on the same ranks and take turns, one step each, the order reversed every cycle. A
step's prediction is the timetable with that very step's mean F, B, I and W, so the ratio shows what the lists do not
have: transfers, stages of unequal cost, the executor. Medians over the cycles, with the 5th and 95th percentile.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

import process_group_manager as pgm  # noqa: E402
from config import load_config  # noqa: E402
from data_parallel import DataParallelBucket  # noqa: E402
from log import say  # noqa: E402
from pipeline_parallel import train_step_pipeline  # noqa: E402
from run import build_model  # noqa: E402
from timeline import bubbles, seconds  # noqa: E402
from train import set_up  # noqa: E402

ENGINES = ["afab", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipev"]


def measure(model, data_parallel, train_data, boundary):
    """(measured, predicted) seconds of one step's pipeline, the same on every rank; the schedules' own time alone."""
    data_parallel.zero_grad()
    dist.barrier()
    train_step_pipeline(model, train_data, *boundary)
    duration = torch.tensor(seconds(model.spans[0].start, model.spans[-1].end), dtype=torch.float64)
    dist.all_reduce(duration, dist.ReduceOp.MAX)
    measured, predicted = bubbles(model, train_data.gradient_accumulation_steps, boundary[1])
    data_parallel.finish_grad_sync()
    busy = duration.item() * (1 - measured)  # mean over the ranks
    return duration.item(), busy / (1 - predicted)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--cycles", type=int, default=12)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load_config(arguments.config, [*arguments.overrides, f"distributed.pp_size={os.environ['WORLD_SIZE']}"])
    device, train_data, _ = set_up(config)
    training = config.training
    shape = (training.micro_batch_size, training.seq_length, config.model.hidden_size)
    boundary = (shape, device, getattr(torch, config.model.dtype))
    contenders = {}
    for engine in ENGINES:
        config.distributed.pp_engine, config.distributed.pp_chunks = (
            engine,
            1 if engine in ("afab", "1f1b", "zb_h1") else 2,
        )
        model = build_model(config, device)
        contenders[engine] = (model, DataParallelBucket(model))
        measure(*contenders[engine], train_data, boundary)  # warm-up
    results = {engine: [] for engine in ENGINES}
    for cycle in range(arguments.cycles):
        for engine in ENGINES if cycle % 2 else reversed(ENGINES):
            results[engine].append(measure(*contenders[engine], train_data, boundary))
    say(f"{'':18}measured/predicted (5 %, 95 %)    step/1f1b's    predicted step/1f1b's")
    for engine in ENGINES:
        ratios = sorted(measured / predicted for measured, predicted in results[engine])
        low, high = ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
        against = [
            statistics.median(ours[i] / base[i] for ours, base in zip(results[engine], results["1f1b"], strict=True))
            for i in (0, 1)
        ]
        say(f"{engine:18}{statistics.median(ratios):8.3f} ({low:.3f}, {high:.3f}){against[0]:20.3f}{against[1]:18.3f}")
    assert pgm.process_group_manager.pp_size > 1, "one rank has no pipeline to measure"
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
