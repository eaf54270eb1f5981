"""f and g: what a tensor-parallel block communicates at its entry and its exit (the picture is in tensor_parallel.py).

                              forward          backward
f                             identity         all-reduce
g                             all-reduce       identity
f with sequence parallelism   all-gather       reduce-scatter
g with sequence parallelism   reduce-scatter   all-gather
"""

import torch
import torch.distributed as dist


def all_reduce(x, group):
    """Sums x over the group, in place."""
    start_all_reduce(x, group)()


def start_all_reduce(x, group):
    """The same, without waiting: returns the function that does. On a CPU two ranks swap their tensors and add: tp 2 is
    5 % faster than with gloo's all-reduce (W1 of benchmarks/compare.py; 7 pairs of steps, 90 % interval 2 to 7 %).
    """
    if x.is_cuda or group.size() != 2:
        return dist.all_reduce(x, group=group, async_op=True).wait
    theirs, other = torch.empty_like(x), 1 - group.rank()
    handles = [dist.isend(x, group=group, group_dst=other), dist.irecv(theirs, group=group, group_src=other)]

    def finish():
        for handle in handles:
            handle.wait()
        x.add_(theirs)

    return finish


class _CopyToTensorParallel(torch.autograd.Function):
    """f: identity forward, all-reduce backward, and meanwhile the weight gradients that the block put aside for it.

    (That overlap alone makes a tp 2 step 1.6 % faster on a CPU, 0.8 to 2.1 %; a GPU has a stream for each.)
    """

    @staticmethod
    def forward(ctx, x, region):
        ctx.region = region
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may still use the tensor it handed in
        finish = start_all_reduce(grad, ctx.region.group)
        ctx.region.compute_put_aside()
        finish()
        return grad, None


class _ReduceFromTensorParallel(torch.autograd.Function):
    """g: all-reduce forward (in place: x is a matrix product nobody else holds), identity backward."""

    @staticmethod
    def forward(ctx, x, region):
        ctx.mark_dirty(x)
        all_reduce(x, region.group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _gather_sequence(x, group):
    """[b, s/tp, ...] -> [b, s, ...]."""
    gathered = x.new_empty(group.size() * x.size(0), *x.shape[1:])
    dist.all_gather_single(gathered, x.contiguous(), group=group)  # [tp · b, s/tp, ...]
    return gathered.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)  # [b, tp · s/tp, ...]


def _start_reduce_scatter_sequence(x, group):
    """[b, s, ...] summed over tp -> [b, s/tp, ...], and the function that waits for it."""
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1).contiguous()  # [tp · b, s/tp, ...]
    mine = torch.empty_like(parts[: x.size(0)])
    return mine, dist.reduce_scatter_single(mine, parts, group=group, async_op=True).wait


class _GatherSequence(torch.autograd.Function):
    """f with sequence parallelism."""

    @staticmethod
    def forward(ctx, x, region):
        ctx.region = region
        return _gather_sequence(x, region.group)

    @staticmethod
    def backward(ctx, grad):
        mine, finish = _start_reduce_scatter_sequence(grad, ctx.region.group)
        ctx.region.compute_put_aside()
        finish()
        return mine, None


class _ReduceScatterSequence(torch.autograd.Function):
    """g with sequence parallelism."""

    @staticmethod
    def forward(ctx, x, region):
        ctx.group = region.group
        mine, finish = _start_reduce_scatter_sequence(x, region.group)
        finish()
        return mine

    @staticmethod
    def backward(ctx, grad):
        return _gather_sequence(grad, ctx.group), None


class ParallelRegion:
    """f and g of one tp group: `enter` where a block's input comes in, `exit` where its partial outputs are summed."""

    def __init__(self, group, sequence_parallel=False):
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.sequence_parallel = sequence_parallel
        self.aside = []  # weight gradients of the block whose backward runs, for the time that f's communication takes

    def enter(self, x):
        function = _GatherSequence if self.sequence_parallel else _CopyToTensorParallel
        return function.apply(x, self) if self.size > 1 else x

    def exit(self, x):
        function = _ReduceScatterSequence if self.sequence_parallel else _ReduceFromTensorParallel
        return function.apply(x, self) if self.size > 1 else x

    def compute_put_aside(self):
        while self.aside:
            self.aside.pop(0)()
