"""Every schedule's step, measured over predicted, and what the executor itself takes of it, in one run.

    torchrun --nproc_per_node 2 benchmarks/schedules.py --config benchmarks/w1.json [--cycles 12]

All schedules are built side by side on the same ranks and take turns, one step each, the order reversed every cycle. A
step's prediction is the timetable with that very step's mean F, B, I and W of every stage and the time that a boundary
tensor takes between two ranks, measured before. Executor: the share of a step that is neither computing nor waiting.
Medians over the cycles (least, most).
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
from data_parallel import DataParallelBucket  # noqa: E402
from find_schedule import chunks_of  # noqa: E402
from log import say  # noqa: E402
from read_config import load_config  # noqa: E402
from run import boundary_of, build_model  # noqa: E402
from schedules import SCHEDULES  # noqa: E402
from timeline import seconds, stage_costs  # noqa: E402
from timetable import make_timetable  # noqa: E402
from train import set_up  # noqa: E402


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
    communicate, run = pipeline_parallel.pipeline_communicate, pipeline_parallel.PipelineExecutor
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
    """Of one step's pipeline: its seconds, those predicted, its bubble over the predicted, the executor's share."""
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
    return step_time, timetable.step_time, (1 - busy / step_time) / timetable.bubble, executor / step_time


def show(name, figures, figures_of_1f1b):
    def text(values):
        return f"{statistics.median(values):.3f} ({min(values):.3f}, {max(values):.3f})"

    def ratio(values, others):
        return text([value / other for value, other in zip(values, others, strict=True)])

    steps, predicted, bubbles, executor = zip(*figures, strict=True)
    steps_of_1f1b, predicted_of_1f1b, *_ = zip(*figures_of_1f1b, strict=True)
    columns = [ratio(steps, steps_of_1f1b), ratio(predicted, predicted_of_1f1b), ratio(steps, predicted), text(bubbles)]
    say(f"{name:18}" + "".join(f"{column:24}" for column in columns) + text([100 * share for share in executor]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--cycles", type=int, default=12)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load_config(arguments.config, [*arguments.overrides, f"distributed.pp_size={os.environ['WORLD_SIZE']}"])
    device, train_data, _ = set_up(config)
    assert pgm.process_group_manager.pp_size > 1, "one rank has no pipeline to measure"
    distributed, boundary = config.distributed, boundary_of(config, device)
    transfer, stopwatch = transfer_seconds(boundary[0], boundary[-1]), Stopwatch()
    watch_computing_and_waiting(stopwatch)
    contenders = {}
    for engine in SCHEDULES:
        distributed.pp_engine, distributed.pp_chunks = engine, chunks_of(SCHEDULES[engine]) or 2
        model = build_model(config, device)
        contenders[engine] = (model, DataParallelBucket(model), train_data, boundary, transfer, stopwatch)
        measure(*contenders[engine])  # warm-up
    results = {engine: [] for engine in SCHEDULES}
    for cycle in range(arguments.cycles):
        for engine in SCHEDULES if cycle % 2 else reversed(SCHEDULES):
            results[engine].append(measure(*contenders[engine]))
    say(f"a transfer takes {1000 * transfer:.2f} ms")
    titles = ("step, 1F1B's = 1", "predicted", "measured/predicted", "bubble, likewise", "executor, % of a step")
    say(f"{'':18}" + "".join(f"{title:24}" for title in titles))
    for engine in SCHEDULES:
        show(engine, results[engine], results["1f1b"])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
