"""Does this layout compute what one process computes? The tool to run after changing anything.

    torchrun --nproc_per_node 4 train.py --config configs/tiny_pp2_tp2.json --verify model.dtype=float64

One step's loss, gradient norm and every parameter's gradient, put together from all ranks, against the same global batch
on a plain `Llama` in one process: rank 0, which needs memory for the whole model. And whether ranks that should hold the
same do, bit for bit. Nothing is clipped or updated: Adam would hide a wrong factor, gradients show it. Where a difference
looks like a known kind of fault, that is said. What both sides share (`model.py`, `data.py`) is not checked.
"""

import math
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import process_group_manager as pgm
from data_parallel import DataParallelBucket
from log import say
from model import build_on_meta, materialize, named_parameters
from pipeline_parallel import train_step_pipeline
from tensor_parallel import Shard

# How far rounding may take a gradient a from its reference b: max|a − b| / max|b|. A pipeline alone changes no bit, tp
# and dp the order of sums. In bfloat16 tp rounds partial sums to 8 bits: wrong factors and missing sums show, no more.
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.1}
SCALARS = ("loss", "gradient norm")  # compared like parameters with one element
SHOWN = 8  # parameters in the table


class Held(NamedTuple):
    """What a rank has of a parameter: its place in the whole, and what is in it."""

    place: Shard
    weights: torch.Tensor
    gradients: torch.Tensor


class Reference(NamedTuple):
    """What one process computes."""

    weights: dict  # {name: tensor}
    gradients: dict  # {name: tensor}, and SCALARS
    parts: dict  # {"lookup" and "head": what it adds to the gradient of a tied embedding}
    by_microbatch: dict  # {name of a vector: [what each micro-batch adds to its gradient]}


class Row(NamedTuple):
    """One comparison: a from the layout, b from one process."""

    name: str
    stage: int
    error: float  # max|a − b| / max|b|
    factor: float  # the k that brings k · b closest to a
    is_multiple: bool  # a is k · b
    is_right: bool


def verify(config, model, data_loader, device):
    """Called on all ranks with the layout's model before its first step. Returns the exit code, 0 or 1, on all."""
    # gloo, as tensors travel to rank 0's main memory; patient, as the others wait while rank 0 computes the reference.
    group = dist.new_group(backend="gloo", timeout=pgm.LATE_START)
    is_first, exit_code = dist.get_rank() == 0, torch.zeros(1, dtype=torch.int64)
    say(f"verify: a step of {model.pp_engine} on all ranks")
    mine = layout_step(config, model, data_loader, device)
    comparison = Comparison(config, model.layers, reference_step(config, data_loader, device)) if is_first else None
    for name in [*SCALARS, *dict(named_parameters(build_on_meta(config.model, torch.float32)))]:
        of_rank = [None] * dist.get_world_size() if is_first else None
        dist.gather_object(mine.get(name), of_rank, group=group)
        if is_first:
            comparison.add(name, {rank: held for rank, held in enumerate(of_rank) if held})
    if is_first:
        exit_code[0] = comparison.report()
    dist.broadcast(exit_code, 0, group=group)
    return exit_code.item()


def layout_step(config, model, data_loader, device):
    """{name: Held} after what train.py does up to the optimizer."""
    training, distributed, dtype = config.training, config.distributed, getattr(torch, config.model.dtype)
    local_seq_length = training.seq_length // (distributed.tp_size if distributed.sequence_parallel else 1)
    shapes = training.micro_batch_size, local_seq_length, config.model.hidden_size
    data_parallel = DataParallelBucket(model, distributed.zero1)
    data_loader.step = 0
    for _ in range(2):  # data parallel only counts in its first step; how it overlaps shows from the second on
        data_parallel.zero_grad()
        loss = train_step_pipeline(model, data_loader, shapes, device, dtype)
        data_parallel.finish_grad_sync()
    norm = data_parallel.clip_gradients(None)
    for bucket in data_parallel.buckets if distributed.zero1 else []:  # a rank has reduced its own shard only
        dist.all_gather_single(bucket.gradients, bucket.master.grad.clone(), group=bucket.group)
    held = {}
    for name, value in zip(SCALARS, (loss.view(1), norm.view(1)), strict=True):
        held[name] = Held(Shard(value.shape, 0, 0, 1), torch.empty(0), value.cpu())
    for name, parameter in named_parameters(model):
        place = getattr(parameter, "shard", Shard(parameter.shape, 0, 0, parameter.size(0)))
        # Clones, as a view takes its whole bucket along when it is sent.
        held[name] = Held(place, parameter.detach().clone().cpu(), parameter.grad.clone().cpu())
    return held


def reference_step(config, data_loader, device):
    """The same step without any parallelism: the plain model, one micro-batch after the other."""
    dtype = getattr(torch, config.model.dtype)
    num_microbatches = data_loader.gradient_accumulation_steps * data_loader.dp_size
    data = replace(data_loader, dp_rank=0, dp_size=1, gradient_accumulation_steps=num_microbatches)
    model = materialize(build_on_meta(config.model, dtype), config.model, config.training.seed, device)
    if config.model.tie_word_embeddings:  # untied with the same values: so the gradients of the two uses come apart
        model.final_proj.weight = nn.Parameter(model.embedding.weight.detach().clone())
    weights = dict(model.named_parameters())
    count = sum(weight.numel() for weight in weights.values())
    say(f"verify: the same batch in one process, with the whole model in rank 0's memory ({count:,} parameters)")
    sums = {name: torch.zeros_like(w, dtype=torch.promote_types(dtype, torch.float32)) for name, w in weights.items()}
    by_microbatch, loss = defaultdict(list), 0.0
    for i in range(num_microbatches):
        batch = data[i]
        share = model.loss_function(model(batch["input_ids"]), batch["target_ids"]) / num_microbatches
        share.backward()
        loss += share.item()
        for name, weight in weights.items():
            sums[name] += weight.grad
            if weight.ndim == 1:
                by_microbatch[name].append(weight.grad.double().cpu())
            weight.grad = None
    parts = {}
    if config.model.tie_word_embeddings:
        parts = {"lookup": sums["embedding.weight"], "head": sums.pop("final_proj.weight")}
        sums["embedding.weight"] = parts["lookup"] + parts["head"]
    norm = math.hypot(*(gradient.double().norm().item() for gradient in sums.values()))
    scalars = dict(zip(SCALARS, torch.tensor([[loss], [norm]], dtype=torch.float64), strict=True))
    return Reference(weights, scalars | sums, parts, by_microbatch)


# --- comparison, on rank 0 --------------------------------------------------------------------------------------------


def compare(name, stage, a, b, tolerance):
    scale = b.abs().max().item() or 1.0
    error, factor = (a - b).abs().max().item() / scale, ((a * b).sum() / b.square().sum()).item()
    rest = (a - factor * b).abs().max().item() / scale / max(1.0, abs(factor))
    return Row(name, stage, error, factor, rest <= tolerance, error <= tolerance)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Comparison:
    """Takes each parameter from all ranks, then says what differs and what that looks like."""

    def __init__(self, config, layers, expected):
        self.config, self.expected, self.tolerance = config, expected, TOLERANCE[config.model.dtype]
        self.stage_of = {str(i): stage for stage, numbers in enumerate(layers) for i in numbers}
        self.stage_of |= {"embedding": 0, "final_norm": len(layers) - 1, "final_proj": len(layers) - 1}
        self.rows, self.gathered = [], {}
        self.odd_weights = []  # names of parameters that do not even start as in one process
        self.unequal = defaultdict(lambda: ({}, {}))  # axis, field of Held -> names, pairs of ranks that differ

    def add(self, name, of_rank):
        """of_rank: {rank: Held} of parameter `name`."""
        expected = self.expected.gradients[name].cpu()
        whole = torch.full_like(expected, math.nan)
        for held in reversed(of_rank.values()):  # where ranks differ, it is the first one's that is compared
            held.place.take(whole).copy_(held.gradients)
        self.gathered[name] = whole.double()
        
