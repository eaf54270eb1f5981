"""Exercise 3: `tensor_parallel.ParallelRMSNorm`, a norm over features that are split over the tp ranks.

    python docs/lessons/exercises/03_parallel_norm.py

Compares its output and gradients, on 2 real processes, with torch.nn.RMSNorm of the whole features.
"""

import torch
from exercise import expect, run_on_ranks
from torch import nn

import process_group_manager as pgm
import tensor_parallel

FEATURES, EPS = 12, 1e-5


def make_norm():
    norm = nn.RMSNorm(FEATURES, EPS, dtype=torch.float64)
    norm.weight.data = torch.linspace(0.5, 1.5, FEATURES, dtype=torch.float64)
    return norm


def errors():
    """This rank's (output, input gradient, weight gradient), each as its largest difference to one process's; or in
    words what keeps them from being computed.
    """
    manager = pgm.setup_process_group_manager(tp_size=2, pp_size=1, dp_size=1)
    torch.manual_seed(0)
    x, gradient = torch.randn(2, 3, 5, FEATURES, dtype=torch.float64)
    x.requires_grad_()
    whole = make_norm()
    expected = whole(x)
    expected.backward(gradient)

    start, stop = tensor_parallel.shard_range(FEATURES, manager.tp_rank, manager.tp_size)
    region = tensor_parallel.ParallelRegion(manager.tp_group)
    norm = tensor_parallel.ParallelRMSNorm(make_norm(), region)
    if norm.weight.shape != (stop - start,):
        return f"its weight is {tuple(norm.weight.shape)}: a rank holds its share, ({stop - start},)"
    norm.weight.data = whole.weight.data[start:stop].clone()
    x_mine = x.detach()[..., start:stop].clone().requires_grad_()
    y = norm(x_mine)
    y.backward(gradient[..., start:stop])
    pairs = (y, expected[..., start:stop]), (x_mine.grad, x.grad[..., start:stop])
    pairs = (*pairs, (norm.weight.grad, whole.weight.grad[start:stop]))
    return [(ours - theirs).abs().max().item() for ours, theirs in pairs]


if __name__ == "__main__":
    expect(hasattr(tensor_parallel, "ParallelRMSNorm"), "tensor_parallel.py has no class ParallelRMSNorm")
    of_rank = run_on_ranks(2, errors)
    expect(not isinstance(of_rank[0], str), of_rank[0])
    for i, what in enumerate(("output", "gradient of its input", "gradient of its weight")):
        worst = max(errors[i] for errors in of_rank)
        expect(worst < 1e-12, f"the {what} is {worst:.2g} away from one process's")
    print("right: output and both gradients are one process's, on 2 processes")
