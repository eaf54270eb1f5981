"""Every schedule's step, measured over predicted, and what the executor itself takes of it, in one run.

    torchrun --nproc_per_node 2 benchmarks/schedules.py --config benchmarks/w1.json [--cycles 12]

All schedules are built side by side on the same ranks and take turns, one step each, the order reversed every cycle. A
step's prediction is the timetable with that very step's mean F, B, I and W of every stage and the time that a boundary
tensor takes between two ranks, measured before. Executor: the share of a step that is neither computing nor waiting.
Medians over the cycles, with the 5th and 95th percentile.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

import pipeline_parallel  # noqa: E402
import process_group_manager as pgm  # noqa: E402
from config import load_config  # noqa: E402
from data_parallel import DataParallelBucket  # noqa: E402
from log import say  # noqa: E402
from run import build_model  # noqa: E402
from timeline import seconds, stage_costs  # noqa: E402
from timetable import make_timetable  # noqa: E402
from train import set_up  # noqa: E402

ENGINES = ["afab", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipev"]


class Stopwatch:
    """Adds up the time within the functions it watches."""

    total = 0.0

    def watch(self, function):
        def watched(*arguments, **options):
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.total += time.perf_counter() - start

        return watched


class WatchedWork:
    def __init__(self, work, stopwatch):
        self.wait = stopwatch.watch(work.wait)


def watch_computing_and_waiting(stopwatch):
    """From here on the stopwatch has what a step spends in the model, in autograd, in W and in waiting."""
    communicate, run = pipeline_parallel.pipeline_communicate, pipeline_parallel.ScheduleRun
    pipeline_parallel.PipelineParallel.forward = stopwatch.watch(pipeline_parallel.PipelineParallel.forward)
    torch.autograd.backward = stopwatch.watch(torch.autograd.backward)
    run.weight = stopwatch.watch(run.weight)
    pipeline_parallel.pipeline_communicate = lambda *arguments: [
        WatchedWork(work, stopwatch) for work in communicate(*arguments)
    ]


def transfer_seconds(shape, dtype, rounds=40):
    """Median one-way time of a boundary tensor between the first two ranks, found by sending it to and fro."""
    rank, times = dist.get_rank(), []
    tensor, operations = torch.zeros(shape, dtype=dtype), (dist.send, dist.recv)
    for _ in range(rounds if rank < 2 else 0):
        start = time.perf_counter()
        for operation in operations if rank == 0 else reversed(operations):
            operation(tensor, 1 - rank)
        times.append((time.perf_counter() - start) / 2)
    median = torch.tensor(statistics.median(times) if rank == 0 else 0.0, dtype=torch.float64)
    dist.broadcast(median, 0)
    return median.item()


def measure(model, data_parallel, train_data, boundary, transfer, stopwatch):
    """Of one step's pipeline: measured over predicted time and bubble, and the executor's share of the time."""
    data_parallel.zero_grad()
    dist.barrier()
    before = stopwatch.total
    pipeline_parallel.train_step_pipeline(model, train_data, *boundary)
    own = seconds(model.spans[0].start, model.spans[-1].end)
    executor = own - (stopwatch.total - before)
    largest = torch.tensor([own, executor], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    data_parallel.finish_grad_sync()
    costs, num_microbatches = stage_costs(model, boundary[1]), train_data.gradient_accumulation_steps
    layout = model.pp_engine, dist.get_world_size(), num_microbatches, model.num_chunks
    timetable = make_timetable(*layout, costs=costs, transfer=transfer)
    step_time, executor = largest.tolist()
    busy = (1 - timetable.bubble) * timetable.step_time  # mean over the ranks, the same in both
    return step_time / timetable.step_time, (1 - busy / step_time) / timetable.bubble, executor / step_time


def show(name, figures):
    def text(values, scale=1):
        values = sorted(scale * value for value in values)
        low, high = values[len(values) // 20], values[-1 - len(values) // 20]
        return f"{statistics.median(values):.3f} ({low:.3f}, {high:.3f})"

    steps, bubbles, executor = zip(*figures, strict=True)
    say(f"{name:18}{text(steps):24}{text(bubbles):24}{text(executor, 100):24}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--cycles", type=int, default=12)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load_config(arguments.config, [*arguments.overrides, f"distributed.pp_size={os.environ['WORLD_SIZE']}"])
    device, train_data, _ = set_up(config)
    assert pgm.process_group_manager.pp_size > 1, "one rank has no pipeline to measure"
    training, distributed = config.training, config.distributed
    shape = (training.micro_batch_size, training.seq_length, config.model.hidden_size)
    boundary = (shape, device, getattr(torch, config.model.dtype))
    transfer, stopwatch = transfer_seconds(shape, boundary[-1]), Stopwatch()
    watch_computing_and_waiting(stopwatch)
    contenders = {}
    for engine in ENGINES:
        distributed.pp_engine, distributed.pp_chunks = engine, 1 if engine in ("afab", "1f1b", "zb_h1") else 2
        model = build_model(config, device)
        contenders[engine] = (model, DataParallelBucket(model), train_data, boundary, transfer, stopwatch)
        measure(*contenders[engine])  # warm-up
    results = {engine: [] for engine in ENGINES}
    for cycle in range(arguments.cycles):
        for engine in ENGINES if cycle % 2 else reversed(ENGINES):
            results[engine].append(measure(*contenders[engine]))
    say(f"a transfer takes {1000 * transfer:.2f} ms")
    say(f"{'':18}{'step, measured/predicted':26}{'bubble, measured/predicted':28}executor, % of a step")
    for engine in ENGINES:
        show(engine, results[engine])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
