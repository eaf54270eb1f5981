"""What a user could pick instead, on the same model, tokens and optimizer: the contenders of compare.py.

A contender is a function (work, rank) -> step, where step(number) trains on that step's global batch and returns its
loss. All start from the same weights, so equal losses say that equal work was done. Every rank is one process.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LEARNING_RATE, CLIP = 3e-4, 1.0
FUSED = {"fused": True, "lr": LEARNING_RATE, "betas": (0.9, 0.95), "eps": 1e-8}
CPU = torch.device("cpu")


def micro_batch(work, step, i):
    """(input_ids, target_ids), each [micro batch, seq], of micro-batch i of the global batch."""
    generator = torch.Generator().manual_seed(1000 * step + i)
    tokens = torch.randint(work.vocab_size, (work.micro_batch_size, work.seq_length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class MicroBatches:
    """The same, as our data loader: of dp rank `dp_rank`, every dp_size-th."""

    def __init__(self, work, dp_rank=0, dp_size=1):
        self.work, self.dp_rank, self.dp_size, self.step = work, dp_rank, dp_size, 0
        self.gradient_accumulation_steps = work.micro_batches // dp_size
        self.tokens = SimpleNamespace(sha256="")

    def __getitem__(self, i):
        inputs, targets = micro_batch(self.work, self.step, i * self.dp_size + self.dp_rank)
        return {"input_ids": inputs, "target_ids": targets}


# --- the model, as a careful user writes it in plain PyTorch ----------------------------------------------------------


class PlainLayer(nn.Module):
    def __init__(self, work):
        super().__init__()
        hidden, self.head_dim = work.hidden_size, work.hidden_size // work.heads
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-6)
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, work.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, work.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-6)
        self.gate_proj = nn.Linear(hidden, work.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden, work.intermediate_size, bias=False)
        self.down_proj = nn.Linear(work.intermediate_size, hidden, bias=False)
        frequencies = 10000.0 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(work.seq_length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x):
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def forward(self, x):
        y = self.input_layernorm(x)
        q, k, v = (
            projection(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class PlainLlama(nn.Module):
    """Layers [start, stop) of it: all of them, or one stage of a pipeline."""

    def __init__(self, work, start=0, stop=None):
        super().__init__()
        stop = work.layers if stop is None else stop
        self.embed_tokens = nn.Embedding(work.vocab_size, work.hidden_size) if start == 0 else None
        self.layers = nn.ModuleDict({str(i): PlainLayer(work) for i in range(start, stop)})
        is_last = stop == work.layers
        self.norm = nn.RMSNorm(work.hidden_size, eps=1e-6) if is_last else None
        self.lm_head = nn.Linear(work.hidden_size, work.vocab_size, bias=False) if is_last else None

    def forward(self, x):
        x = self.embed_tokens(x) if self.embed_tokens is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x)) if self.lm_head is not None else x


def initialise(model, work):
    """Our trainer's initial weights, found by the end of a parameter's name: the module and the layer."""
    if not work.same_weights:
        return model
    from checkpoint import hugging_face_name
    from config import Config
    from model import build_on_meta, initial_value

    config = Config.model_validate(our_config(work)).model
    ours = {
        hugging_face_name(name).replace("self_attn.", "").replace("mlp.", ""): (name, parameter.shape)
        for name, parameter in build_on_meta(config, torch.float32).named_parameters()
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            short = name.replace("self_attn.", "").replace("mlp.", "")
            short = short if short.startswith(("model.", "lm_head.")) else f"model.{short}"
            ours_name, shape = ours[short]
            parameter.copy_(initial_value(ours_name, shape, config, seed=42))
    return model


def adamw(model):
    """Fused, with weight decay on the matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **FUSED)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- the contenders ---------------------------------------------------------------------------------------------------


def plain_loop(work, rank):
    return accumulation_loop(work, initialise(PlainLlama(work), work))


def transformers_loop(work, rank):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=work.vocab_size, hidden_size=work.hidden_size, intermediate_size=work.intermediate_size,
        num_hidden_layers=work.layers, num_attention_heads=work.heads, num_key_value_heads=work.kv_heads,
        max_position_embeddings=work.seq_length, rms_norm_eps=1e-6, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = initialise(LlamaForCausalLM(config), work)
    return accumulation_loop(work, model, lambda inputs: model(inputs).logits)


def accumulation_loop(work, model, logits_of=None):
    logits_of, optimizer = logits_of or model, adamw(model)

    def step(number):
        optimizer.zero_grad()
        losses = []
        for i in range(work.micro_batches):
            inputs, targets = micro_batch(work, number, i)
            loss = cross_entropy(logits_of(inputs), targets) / work.micro_batches
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return sum(losses).item()

    return step


def torch_ddp(work, rank):
    from torch.nn.parallel import DistributedDataParallel

    model = initialise(PlainLlama(work), work)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
    optimizer, world_size = adamw(model), dist.get_world_size()
    rounds = work.micro_batches // world_size

    def step(number):
        optimizer.zero_grad()
        losses = []
        for i in range(rounds):
            inputs, targets = micro_batch(work, number, i * world_size + rank)
            wrapped.require_backward_grad_sync = i == rounds - 1  # what no_sync() sets
            loss = cross_entropy(wrapped(inputs), targets) / rounds
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        total = torch.stack(losses).sum()
        dist.all_reduce(total)
        return total.item() / world_size

    return step


def torch_pipelining(work, rank, schedule, v_shape=False, chunks=1):
    """torch.distributed.pipelining on the same stages as ours."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    pp_size = dist.get_world_size()
    num_stages = pp_size * chunks
    mine = [rank, num_stages - 1 - rank] if v_shape else list(range(rank, num_stages, pp_size))
    cuts = [work.layers * stage // num_stages for stage in range(num_stages + 1)]
    models = nn.ModuleList(initialise(PlainLlama(work, cuts[s], cuts[s + 1]), work) for s in mine)
    stages = [PipelineStage(model, s, num_stages, CPU) for model, s in zip(models, mine, strict=True)]
    # The single-stage schedules take a stage, the others a list.
    pipeline = get_schedule_class(schedule)(stages if chunks > 1 else stages[0], work.micro_batches, cross_entropy)
    optimizer = adamw(models)
    has_first, has_last = 0 in mine, num_stages - 1 in mine

    def step(number):
        optimizer.zero_grad()
        losses = []
        batches = [micro_batch(work, number, i) for i in range(work.micro_batches)]
        arguments = (torch.cat([inputs for inputs, _ in batches]),) if has_first else ()
        options = {"target": torch.cat([targets for _, targets in batches]), "losses": losses} if has_last else {}
        pipeline.step(*arguments, **options, return_outputs=False)
        squares = sum(parameter.grad.square().sum() for parameter in models.parameters())
        loss = torch.stack(losses).mean().detach() if has_last else torch.zeros(())
        sums = torch.stack((squares, loss))
        dist.all_reduce(sums)
        scale = (CLIP / (sums[0].sqrt() + 1e-6)).clamp(max=1.0)
        for parameter in models.parameters():
            parameter.grad.mul_(scale)
        optimizer.step()
        return sums[1].item()

    return step


def our_config(work, **distributed):
    model = {
        "hidden_size": work.hidden_size, "intermediate_size": work.intermediate_size,
        "num_hidden_layers": work.layers, "num_attention_heads": work.heads, "num_key_value_heads": work.kv_heads,
        "vocab_size": work.vocab_size, "max_position_embeddings": work.seq_length, "rms_norm_eps": 1e-6,
        "dtype": distributed.pop("dtype", "float32"),
    }  # fmt: skip
    training = {
        "seq_length": work.seq_length, "micro_batch_size": work.micro_batch_size,
        "gradient_accumulation_steps": work.micro_batches // distributed.get("dp_size", 1),
        "learning_rate": LEARNING_RATE, "min_learning_rate": LEARNING_RATE, "grad_clip": CLIP,
    }  # fmt: skip
    return {"distributed": {"device": "cpu", **distributed}, "model": model, "training": training}


def ours(work, rank, **distributed):
    import process_group_manager as pgm
    from config import Config
    from run import Run, boundary_of
    from timeline import stage_costs
    from timetable import make_timetable
    from train import settle_layout, train_step

    config = Config.model_validate(our_config(work, **distributed))
    settle_layout(config, int(os.environ["WORLD_SIZE"]))
    layout = config.distributed
    manager = pgm.setup_process_group_manager(layout.tp_size, layout.pp_size, layout.dp_size)
    run = Run(config, CPU, MicroBatches(work, manager.dp_rank, layout.dp_size))
    boundary = boundary_of(config, CPU)

    def step(number):
        run.step, run.sequences = number, number * config.global_batch_size
        return train_step(run, *boundary)[0]

    def speed_up():
        """Over one process, by the timetable with the last step's mean F, B, I and W of every stage."""
        costs, pp_size = stage_costs(run.model, CPU), layout.pp_size
        timetable = make_timetable(layout.pp_engine, pp_size, work.micro_batches, run.model.num_chunks, costs=costs)
        return pp_size * (1 - timetable.bubble)

    step.speed_up = speed_up if layout.pp_size > 1 else None
    return step


WORKS = {
    "W1": SimpleNamespace(
        hidden_size=512, intermediate_size=1408, layers=8, heads=8, kv_heads=4, vocab_size=4096,
        seq_length=256, micro_batch_size=2, micro_batches=8, same_weights=True,
    ),
    "W2": SimpleNamespace(  # communication-heavy: more bytes between stages for each of fewer FLOPs
        hidden_size=1024, intermediate_size=2816, layers=4, heads=8, kv_heads=4, vocab_size=4096,
        seq_length=128, micro_batch_size=1, micro_batches=16, same_weights=True,
    ),
    "tiny": SimpleNamespace(  # to try the benchmark itself
        hidden_size=64, intermediate_size=128, layers=4, heads=4, kv_heads=2, vocab_size=256,
        seq_length=32, micro_batch_size=2, micro_batches=8, same_weights=True,
    ),
}  # fmt: skip
