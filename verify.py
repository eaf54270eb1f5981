"""Does this layout compute what one process computes? The tool to run after changing anything.

    torchrun --nproc_per_node 4 train.py --config configs/tiny_pp2_tp2.json --verify model.dtype=float64

One step's loss, gradient norm and every parameter's gradient, put together from all ranks, against the same batch on a
plain `Llama` in one process: rank 0, which needs the memory for the whole model. And whether ranks that should hold the
same do, bit for bit. Nothing is clipped or updated: Adam hides a wrong factor, gradients show it. What both sides share
(`model.py`, `data.py`) is not checked. How they are compared, and what a difference looks like: `comparison.py`.
"""

import math
from collections import defaultdict
from dataclasses import replace

import torch
import torch.distributed as dist

import process_group_manager as pgm
from comparison import SCALARS, Comparison, Held, Reference
from data_parallel import DataParallelBucket
from log import say
from model import build_on_meta, materialize, named_parameters
from pipeline_parallel import train_step_pipeline
from run import boundary_of
from tensor_parallel import Shard


def verify(config, model, data_loader, device):
    """Called on all ranks with the layout's model before its first step. Returns the exit code, 0 or 1, on all."""
    group = pgm.process_group_manager.patient_group  # the others wait while rank 0 computes the reference
    is_first = dist.get_rank() == 0
    say(f"verify: a step of {model.pp_engine} on all ranks")
    mine = layout_step(config, model, data_loader, device)
    comparison = Comparison(config, model.layers, reference_step(config, data_loader, device)) if is_first else None
    for name in [*SCALARS, *dict(named_parameters(build_on_meta(config.model, torch.float32)))]:
        of_rank = [None] * dist.get_world_size() if is_first else None
        dist.gather_object(mine.get(name), of_rank, group=group)
        if is_first:
            comparison.add(name, {rank: held for rank, held in enumerate(of_rank) if held})
    exit_code = [comparison.report() if is_first else None]
    dist.broadcast_object_list(exit_code, group=group)
    return exit_code[0]


def layout_step(config, model, data_loader, device):
    """{name: Held} after what train.py does up to the optimizer."""
    zero1 = config.distributed.zero1
    data_parallel = DataParallelBucket(model, zero1)
    data_loader.step = 0
    for _ in range(2):  # data parallel only counts in its first step; how it overlaps shows from the second on
        data_parallel.zero_grad()
        loss = train_step_pipeline(model, data_loader, *boundary_of(config, device))
        data_parallel.finish_grad_sync()
    norm = data_parallel.clip_gradients(None)
    for bucket in data_parallel.buckets if zero1 else []:  # a rank has reduced its own shard only
        dist.all_gather_single(bucket.gradients, bucket.gradient.clone(), group=pgm.process_group_manager.dp_group)
    held = {}
    for name, value in zip(SCALARS, (loss.view(1), norm.view(1)), strict=True):
        held[name] = Held(Shard(value.shape, 0, 0, 1), torch.empty(0), value.cpu())
    for name, parameter in named_parameters(model):
        place = getattr(parameter, "shard", Shard(parameter.shape, 0, 0, parameter.size(0)))
        # Clones, as a view takes its whole bucket along when it is sent.
        held[name] = Held(place, parameter.detach().cpu().clone(), parameter.grad.cpu().clone())
    return held


def reference_step(config, data_loader, device):
    """The same step without any parallelism: the plain model, one micro-batch after the other."""
    dtype = getattr(torch, config.model.dtype)
    num_microbatches = data_loader.gradient_accumulation_steps * data_loader.dp_size
    data = replace(data_loader, dp_rank=0, dp_size=1, gradient_accumulation_steps=num_microbatches)
    model = materialize(build_on_meta(config.model, dtype), config.model, config.training.seed, device)
    if config.model.tie_word_embeddings:  # untied with the same values: so the gradients of the two uses come apart
        model.final_proj.weight = torch.nn.Parameter(model.embedding.weight.detach().clone())
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
    uses = {}
    if config.model.tie_word_embeddings:
        uses = {"lookup": sums["embedding.weight"], "head": sums.pop("final_proj.weight")}
        sums["embedding.weight"] = uses["lookup"] + uses["head"]
    norm = math.hypot(*(gradient.double().norm().item() for gradient in sums.values()))
    scalars = dict(zip(SCALARS, torch.tensor([[loss], [norm]], dtype=torch.float64), strict=True))
    return Reference(weights, scalars | sums, uses, by_microbatch)
