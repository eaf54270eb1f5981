"""Exercise 4: data parallelism the naive way, to see what buckets are for.

    python docs/lessons/exercises/04_naive.py

Counts, on 2 real processes, the all-reduces of a step and how many of them have started before backward has ended.
"""

import torch
import torch.distributed as dist
from exercise import expect, run_on_ranks
from torch import nn

import process_group_manager as pgm
from data_parallel import DataParallelBucket


def two_steps():
    """(all-reduces, those before the end of backward, parameters, error of the gradient) of the second step."""
    manager = pgm.setup_process_group_manager(tp_size=1, pp_size=1, dp_size=2)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    data = torch.randn(2, 4, 8, dtype=torch.float64)  # [dp rank, row, feature]
    expected = torch.autograd.grad((module(data[0]).mean() + module(data[1]).mean()) / 2, [*module.parameters()])
    model, calls, all_reduce = DataParallelBucket(module), [], dist.all_reduce

    def counting(tensor, *arguments, **options):
        calls.append(tensor)
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = counting
    try:
        for _ in range(2):  # buckets only count in the first step; how they overlap shows in the second
            calls.clear()
            model.zero_grad()
            model(data[manager.dp_rank]).mean().backward()
            before_the_end = len(calls)
            model.finish_grad_sync()
    finally:
        dist.all_reduce = all_reduce
    pairs = zip(module.parameters(), expected, strict=True)
    error = max((parameter.grad - gradient).abs().max().item() for parameter, gradient in pairs)
    return len(calls), before_the_end, len(expected), error


if __name__ == "__main__":
    for number, before_the_end, parameters, error in run_on_ranks(2, two_steps):
        expect(error < 1e-12, f"the gradient is {error:.2g} away from the mean of both ranks'")
        counts = f"{number} all-reduces a step for {parameters} parameters, {before_the_end} before backward has ended"
        expect(number == parameters, f"{counts}; naive is one for each, after it")
        expect(before_the_end == 0, f"{before_the_end} all-reduces start before backward has ended; naive is after it")
    print(f"right: {number} all-reduces, all after backward, and the same gradients")
