"""Data parallelism: replicas average their gradients, in buckets, while backward still runs. ZeRO-1.

The naive way is a loop after backward: `for p in parameters: all_reduce(p.grad); p.grad /= dp_size`. It sends many
small messages and sends them late. So gradients live in a few flat buffers, and a bucket's all-reduce starts as soon as
its last gradient of the step has arrived (PyTorch DDP, arXiv 2006.15704, section 3.2).

A bucket also holds its parameters flat, so that the optimizer works on one long tensor instead of hundreds. ZeRO-1
(arXiv 1910.02054, section 5.1) is then a matter of slices: reduce-scatter instead of all-reduce, every rank updates its
own slice `shard` of the bucket, and an all-gather hands the new parameters round. Without it the shard is the whole
bucket.

Gradients are float32 (float64 for a float64 model) whatever the model's dtype and the layout. A bfloat16 model gets
float32 master weights, on which the optimizer works.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import process_group_manager as pgm

BUCKET_ELEMENTS = 8 * 2**20  # 32 MiB of float32: long enough to use the link well, short enough to start early
ALIGNMENT = 64  # elements; every parameter starts at a multiple, as fast matrix kernels want


class Kind(NamedTuple):
    """What the parameters of one bucket have in common."""

    decay: bool  # weight decay applies: matrices, but neither norm weights nor biases
    has_copy: bool  # tied embedding with a copy at the other end of the pipeline: the two gradients are summed
    partial_over_tp: bool  # the gradient is that of this tp rank's tokens (or heads) only: summed over tp
    counted: bool  # in the gradient norm, by this rank


def _kind(parameter):
    return Kind(
        decay=parameter.ndim >= 2,
        has_copy=getattr(parameter, "has_copy", False),
        partial_over_tp=getattr(parameter, "partial_over_tp", False),
        counted=counts_here(parameter),
    )


def counts_here(parameter):
    """Whether this rank counts it where the whole model is summed up: of tp replicas and tied copies, one rank does."""
    has_own = hasattr(parameter, "shard") or pgm.process_group_manager.tp_rank == 0
    return has_own and not getattr(parameter, "is_copy", False)


class Bucket:
    """Some parameters of one kind, laid end to end in `values`, with their gradients in `gradients`."""

    def __init__(self, parameters, kind, zero1):
        manager = pgm.process_group_manager
        self.parameters, self.kind, self.zero1 = parameters, kind, zero1
        self.dp_size = manager.dp_size
        self.offsets, length = [], 0
        for parameter in parameters:
            self.offsets.append(length)
            length += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        length = -(-length // self.dp_size) * self.dp_size  # ZeRO-1 shards are equal
        first = parameters[0]
        grad_dtype = torch.promote_types(first.dtype, torch.float32)
        self.values = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(length, dtype=grad_dtype, device=first.device)
        for parameter, values, gradients in zip(
            parameters, self.views(self.values), self.views(self.gradients), strict=True
        ):
            values.copy_(parameter.detach())
            parameter.data = values
            parameter.grad_dtype = grad_dtype
            parameter.grad = gradients  # autograd adds to an existing .grad in place: the bucket is where it arrives
        shard_length = length // self.dp_size if zero1 else length
        self.shard = (
            slice(manager.dp_rank * shard_length, (manager.dp_rank + 1) * shard_length) if zero1 else slice(None)
        )
        # What the optimizer works on: this rank's slice, in float32 or better (where the values are that: itself).
        self.master, self.gradient = self.values[self.shard].to(grad_dtype), self.gradients[self.shard]
        self.expected = None  # gradients that arrive here in one step; the first step counts them
        self.arrived, self.work = 0, None

    def views(self, flat):
        """`flat`, laid out like this bucket, as one tensor per parameter."""
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for parameter, offset in zip(self.parameters, self.offsets, strict=True)
        ]

    def on_grad_ready(self, _parameter):
        """A gradient has been added; or none, as autograd calls this for a weight gradient that is put off, too, and
        linear.py once more when it has been added. How many calls a step makes depends on the schedule (that, and tied
        weights): so the first step counts, and from the second on the reduction starts with the last of them.
        """
        self.arrived += 1
        if self.arrived == self.expected:
            self.start_grad_sync()

    def start_grad_sync(self):
        assert self.work is None, "a bucket is reduced once a step"
        group = pgm.process_group_manager.dp_group
        if self.zero1:
            self.work = dist.reduce_scatter_single(self.gradient, self.gradients, group=group, async_op=True)
        else:
            self.work = dist.all_reduce(self.gradients, group=group, async_op=True)

    def finish_grad_sync(self):
        if self.work is None:
            self.start_grad_sync()
        self.work.wait()
        assert self.expected in (None, self.arrived), f"{self.expected} gradients expected, {self.arrived} arrived"
        self.expected, self.arrived, self.work = self.arrived, 0, None
        if self.dp_size > 1:  # else a pass over all gradients for nothing
            self.gradient.div_(self.dp_size)
        if self.kind.has_copy:
            dist.all_reduce(self.gradient, group=pgm.process_group_manager.embedding_group)
        if self.kind.partial_over_tp:
            dist.all_reduce(self.gradient, group=pgm.process_group_manager.tp_group)

    def publish(self):
        """After the optimizer's step: the new master values become the model's weights on every dp rank."""
        mine = self.values[self.shard]
        if mine.dtype != self.master.dtype:
            mine.copy_(self.master)
        if self.zero1:
            dist.all_gather_single(self.values, mine.clone(), group=pgm.process_group_manager.dp_group)


class DataParallelBucket(nn.Module):
    """Wraps a module on its device: buckets for its trainable parameters, filled in reverse order (that of backward).

    A step is `zero_grad`, any number of backwards, `finish_grad_sync`, `clip_gradients`, `optimizer.step`, `publish`.
    """

    def __init__(self, module, zero1=False, bucket_elements=BUCKET_ELEMENTS):
        super().__init__()
        self.module, self.zero1 = module, zero1
        by_kind = {}
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            by_kind.setdefault(_kind(parameter), []).append(parameter)
        self.buckets = [
            Bucket(parameters, kind, zero1)
            for kind, same_kind in by_kind.items()
            for parameters in _split(same_kind, bucket_elements)
        ]
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(bucket.on_grad_ready)
                parameter.grad_ready = bucket.on_grad_ready  # for linear.py, which adds to .grad by itself

    def forward(self, *arguments):
        return self.module(*arguments)

    def optimizer(self, weight_decay, lr, betas, eps):
        return AdamW(self.buckets, weight_decay, lr, betas, eps)

    def zero_grad(self):
        for bucket in self.buckets:
            bucket.gradients.zero_()

    def finish_grad_sync(self):
        for bucket in self.buckets:
            bucket.finish_grad_sync()

    def publish(self):
        for bucket in self.buckets:
            bucket.publish()

    def clip_gradients(self, max_norm):
        """Scales all gradients so that their norm is at most `max_norm` (None: only measures). Returns the norm before.

        One number, the same on every rank and layout: shards and stages add up, replicas and tied copies count once.
        """
        manager = pgm.process_group_manager
        device = self.buckets[0].values.device if self.buckets else torch.device("cpu")
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for bucket in self.buckets:
            if bucket.kind.counted and (self.zero1 or manager.dp_rank == 0):
                for piece in bucket.gradient.split(2**20):  # pieces: the float64 copy stays small
                    squares += torch.linalg.vector_norm(piece, dtype=torch.float64).square()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        if max_norm is not None:
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # stays on the device: nobody waits for a number
            scale = scale.where(norm.isfinite(), 1.0)  # else it would hide where the gradients are not finite
            for bucket in self.buckets:
                bucket.gradient.mul_(scale)
        return norm

    def weights_are_finite(self):
        """On all ranks."""
        bad = torch.zeros((), device=self.buckets[0].values.device if self.buckets else torch.device("cpu"))
        for bucket in self.buckets:
            bad += (~bucket.master.isfinite()).any()
        dist.all_reduce(bad)
        return bad.item() == 0

    def where_not_finite(self):
        """In words, for every rank: the first gradient that is not finite, and on which rank."""
        found = None
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                found = name
                break
        of_all_ranks = [None] * pgm.process_group_manager.world_size
        dist.all_gather_object(of_all_ranks, found)
        places = [f"of {name} on rank {rank}" for rank, name in enumerate(of_all_ranks) if name]
        more = f" and on {len(places) - 1} more ranks" if places[1:] else ""
        return f"not finite: the gradient {places[0]}{more}" if places else "all gradients are finite"


class AdamW:
    """AdamW (arXiv 1711.05101) on the buckets' master shards, by torch's fused kernel: in place, no temporary copies.

    torch.optim.AdamW calls the same kernel, but imports torch's compiler first: over a second on every rank.
    """

    def __init__(self, buckets, weight_decay, lr, betas, eps):
        self.buckets, self.weight_decay, self.lr, self.betas, self.eps = buckets, weight_decay, lr, betas, eps
        self.state = {
            bucket.master: {
                "step": torch.zeros((), dtype=torch.float32, device=bucket.master.device),
                "exp_avg": torch.zeros_like(bucket.master),
                "exp_avg_sq": torch.zeros_like(bucket.master),
            }
            for bucket in self.buckets
        }

    def step(self):
        beta1, beta2 = self.betas
        for bucket in self.buckets:
            step, exp_avg, exp_avg_sq = self.state[bucket.master].values()
            step += 1
            torch._fused_adamw_(
                [bucket.master], [bucket.gradient], [exp_avg], [exp_avg_sq], [], [step],
                lr=self.lr, beta1=beta1, beta2=beta2, eps=self.eps,
                weight_decay=self.weight_decay if bucket.kind.decay else 0.0, amsgrad=False, maximize=False,
            )  # fmt: skip


def _split(parameters, max_elements):
    """Consecutive runs of parameters with at most `max_elements` together (or one larger parameter alone)."""
    runs, size = [], 0
    for parameter in parameters:
        if not runs or size + parameter.numel() > max_elements:
            runs.append([])
            size = 0
        runs[-1].append(parameter)
        size += parameter.numel()
    return runs
