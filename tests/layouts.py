"""The same tiny training run on any layout, and on plain PyTorch: what the equality tests compare.

`train_on_layout` runs in the worker processes, `train_plainly` in the test's own: a single-device `Llama`,
F.cross_entropy, torch's AdamW and clip_grad_norm_, one backward per micro-batch.
"""

import functools
import math
from types import SimpleNamespace

import torch
import torch.distributed as dist

import model as llama
import process_group_manager as pgm
from data_parallel import DataParallelBucket
from model import build_on_meta, materialize, named_parameters
from pipeline_parallel import PipelineParallel, train_step_pipeline
from tensor_parallel import apply_tensor_parallel

SEQ_LENGTH, MICRO_BATCH_SIZE = 16, 2


def tiny_config(**changes):
    fields = dict(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, vocab_size=61, max_position_embeddings=32, rms_norm_eps=1e-5, initializer_range=0.2,
        tie_word_embeddings=False, attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


class RandomMicroBatches:
    """Micro-batch i of dp rank d is sequence block i · dp_size + d: every layout sees the same global batch."""

    def __init__(self, vocab_size, num_microbatches, dp_rank=0, dp_size=1):
        self.vocab_size, self.gradient_accumulation_steps = vocab_size, num_microbatches
        self.dp_rank, self.dp_size, self.step = dp_rank, dp_size, 0

    def __getitem__(self, microbatch):
        block = microbatch * self.dp_size + self.dp_rank
        generator = torch.Generator().manual_seed(1000 * self.step + block)
        shape = (MICRO_BATCH_SIZE, SEQ_LENGTH + 1)
        tokens = torch.randint(self.vocab_size, shape, generator=generator)
        return {"input_ids": tokens[:, :-1], "target_ids": tokens[:, 1:]}


def train_on_layout(
    tp=1, pp=1, dp=1, *, config, engine="1f1b", chunks=1, microbatches=4, steps=1, clip=None, dtype=torch.float64,
    pp_layers=None, zero1=False, sequence_parallel=False, bucket_elements=1000, recompute_every=0,
    logits_bytes=llama.LOGITS_BYTES, lr=0.001, micro_batches_of=RandomMicroBatches,
):  # fmt: skip
    """Trains on this worker's rank of the layout. Returns what `assemble` puts together."""
    manager = pgm.process_group_manager or pgm.setup_process_group_manager(tp, pp, dp)
    llama.LOGITS_BYTES = logits_bytes
    model = apply_tensor_parallel(build_on_meta(config, dtype), sequence_parallel)
    model = PipelineParallel(model, engine, chunks, pp_layers, recompute_every)
    materialize(model, config, seed=1, device=torch.device("cpu"))
    data_parallel = DataParallelBucket(model, zero1, bucket_elements)
    optimizer = data_parallel.optimizer(weight_decay=0.1, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    data_loader = micro_batches_of(config.vocab_size, microbatches, manager.dp_rank, dp)
    shapes = (MICRO_BATCH_SIZE, SEQ_LENGTH // (tp if sequence_parallel else 1), config.hidden_size)
    result = {"losses": [], "norms": [], "initial": snapshot(model)}
    for step in range(steps):
        data_loader.step = step
        data_parallel.zero_grad()
        loss = train_step_pipeline(model, data_loader, shapes, torch.device("cpu"), dtype)
        data_parallel.finish_grad_sync()
        norm = data_parallel.clip_gradients(clip)
        if step == 0:
            for bucket in data_parallel.buckets if zero1 else []:  # every rank has reduced its own shard only
                dist.all_gather_single(bucket.gradients, bucket.gradient.clone(), group=manager.dp_group)
            result["gradients"] = snapshot(model, gradients=True)
        optimizer.step()
        data_parallel.publish()
        result["losses"].append(loss.item())
        result["norms"].append(norm.item())
    result["final"] = snapshot(model)
    result["masters"] = snapshot(model, of=masters(data_parallel))
    return result


def snapshot(model, gradients=False, of=None):
    """{name: (this rank's part, its place in the full tensor or None)} of parameters, or what `of` has for them."""
    parts = of or {p: p.grad if gradients else p for p in model.parameters()}
    return {
        name: (parts[parameter].detach().clone(), getattr(parameter, "shard", None))
        for name, parameter in named_parameters(model)
    }


def masters(data_parallel):
    """{parameter: the values that the optimizer works on, float32 where the parameter is bfloat16}."""
    parts = {}
    for bucket in data_parallel.buckets:
        whole = bucket.master
        if data_parallel.zero1:
            whole = torch.empty(bucket.values.shape, dtype=whole.dtype)
            dist.all_gather_single(whole, bucket.master, group=pgm.process_group_manager.dp_group)
        parts.update(zip(bucket.parameters, bucket.views(whole), strict=True))
    return parts


def assemble(snapshots):
    """Full tensors by name from every rank's snapshot. Ranks that hold the same part must agree bit for bit."""
    full, seen = {}, {}
    for part_of_rank in snapshots:
        for name, (part, shard) in part_of_rank.items():
            place = (shard.start, shard.stop) if shard else None
            if (name, place) in seen:
                assert torch.equal(seen[name, place], part), f"two ranks disagree on {name} {place}"
                continue
            seen[name, place] = part
            if shard is None:
                full[name] = part
            else:
                full.setdefault(name, torch.full(shard.full_shape, float("nan"), dtype=part.dtype))
                shard.take(full[name]).copy_(part)
    assert not any(tensor.isnan().any() for tensor in full.values()), "a part of a tensor is on no rank"
    return full


def train_cases(layout, cases):
    usual = llama.LOGITS_BYTES
    results = [train_on_layout(*layout, **case) for case in cases]
    llama.LOGITS_BYTES = usual
    return results


def run_cases(pool, layout, cases):
    """`train_on_layout` for each of `cases` (its keyword arguments) on one and the same grid of workers.

    Yields of each: losses, norms, and full tensors `initial`, `gradients`, `final`, and `masters` of a bfloat16 model.
    """
    by_rank = pool.run(math.prod(layout), train_cases, layout, cases, timeout=60 + 5 * len(cases))
    for case, *results in zip(cases, *by_rank, strict=True):
        for key in ("losses", "norms"):
            assert all(result[key] == results[0][key] for result in results), f"ranks report different {key}"
        combined = {key: results[0][key] for key in ("losses", "norms")}
        keys = ("initial", "gradients", "final", "masters")
        for key in keys if case.get("dtype") is torch.bfloat16 else keys[:-1]:
            combined[key] = assemble([result[key] for result in results])
        yield combined


def run(pool, tp=1, pp=1, dp=1, **options):
    return next(run_cases(pool, (tp, pp, dp), [options]))


def train_plainly(config, microbatches=4, steps=1, clip=None, dtype=torch.float64, rounded_to=None, lr=0.001):
    """The reference: no code of ours but `model.py`. Initial weights are those of a model of dtype `rounded_to`."""
    model = materialize(build_on_meta(config, rounded_to or dtype), config, seed=1, device=torch.device("cpu")).to(
        dtype
    )
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    data_loader = RandomMicroBatches(config.vocab_size, microbatches)
    result = {"losses": [], "norms": [], "initial": {name: p.detach().clone() for name, p in parameters.items()}}
    for step in range(steps):
        data_loader.step = step
        optimizer.zero_grad()
        total = 0.0
        for i in range(microbatches):
            batch = data_loader[i]
            logits = model(batch["input_ids"])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["target_ids"].flatten()) / microbatches
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), clip or float("inf"))
        if step == 0:
            result["gradients"] = {name: p.grad.clone() for name, p in parameters.items()}
        optimizer.step()
        result["losses"].append(total)
        result["norms"].append(norm.item())
    result["final"] = {name: p.detach() for name, p in parameters.items()}
    return result


@functools.cache
def plain(microbatches=4, steps=1, clip=None, **config):
    """`train_plainly` with these changes of the tiny config, trained once for all tests."""
    return train_plainly(tiny_config(**config), microbatches, steps, clip)


def on_layout(layout, microbatches=4, steps=1, clip=None, **config):
    """The arguments of `train_on_layout` for what `plain` trains with these: the same global batch."""
    return dict(config=tiny_config(**config), microbatches=microbatches // layout[2], steps=steps, clip=clip)


def assert_close(actual, expected, tolerance, what=""):
    """Losses, norms and every tensor within `tolerance`, relative to the largest of each; `what` names the run."""
    assert isinstance(expected, dict) and actual.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_close(actual[key], value, tolerance, f"{what} {key}")
        else:
            ours, theirs = torch.as_tensor(actual[key]), torch.as_tensor(value)
            difference, largest = (ours - theirs).abs().max(), theirs.abs().max()
            assert difference <= tolerance * largest, f"{what} {key}: {difference:.2e} off, of {largest:.2e}"


def assert_equal(actual, expected, what=""):
    """The same bits."""
    assert_close(actual, expected, 0.0, what)
