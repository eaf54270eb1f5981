"""What a run takes, before it runs: `--dry-run`, without processes, GPU, data or model. And stages of equal cost.

    python train.py --config configs/llama_405b_16k.json --dry-run --memory 80GB
    python train.py --config configs/llama_1b_pp4_tp2.json --dry-run distributed.pp_layers=balanced

`Sizes` says what one micro-batch leaves behind in a stage; `memory_of_rank` walks through the very program that a rank
will run and finds the moment that needs most. Figures are of tp_rank 0, which has the largest share of the vocabulary,
and count tensors: a process needs more for CUDA's context, NCCL's buffers and what the allocator cannot use again.
"""

import json
import re
from functools import lru_cache
from itertools import combinations, product
from typing import NamedTuple

from config import unmet
from log import flops_per_token
from pipeline_parallel import LOGITS_BYTES, distribute_layers
from schedules import SCHEDULES, Action, chunks_of, find_schedule
from timetable import make_timetable

GIB = 2**30
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "boundary", "temporary")


# --- balanced stages --------------------------------------------------------------------------------------------------


def balance_layers(num_layers, num_stages, layer_cost=1.0, embedding_cost=0.0, head_cost=0.0, rank_of_stage=None):
    """Layers of each stage such that the slowest rank is as fast as any split makes it; then the slowest stage.

    The rank comes first because in the steady phase it works without a pause, and then takes the sum of its chunks.
    """
    rank_of_stage = rank_of_stage or list(range(num_stages))
    stage_costs = [0.0] * num_stages
    stage_costs[0] += embedding_cost
    stage_costs[-1] += head_cost
    rank_costs = [0.0] * (max(rank_of_stage) + 1)
    for rank, cost in zip(rank_of_stage, stage_costs, strict=True):
        rank_costs[rank] += cost
    counts = [0] * num_stages
    # Each layer goes to the rank that has least to do. That is exact: when the slowest rank got its last layer, every
    # rank's sum was at least the maximum less one layer; so in a split that stays below the maximum no rank has more
    # layers than it had at that moment, and one layer is left over. Ties: the later rank, it holds fewer micro-batches.
    for _ in range(num_layers):
        rank = min(range(len(rank_costs)), key=lambda rank: (rank_costs[rank], -rank))
        mine = [stage for stage in range(num_stages) if rank_of_stage[stage] == rank]
        stage = min(mine, key=lambda stage: (stage_costs[stage], -stage))
        counts[stage] += 1
        stage_costs[stage] += layer_cost
        rank_costs[rank] += layer_cost
    return counts


def head_cost(config):
    """Time of the output matrix in units of a layer's, by FLOPs. (The embedding is a lookup: 0.)"""
    m, sizes = config.model, Sizes(config)
    # as in log.flops_per_token: 2 a weight, and 4 · n · d · s for attention
    matrices = 2 * sizes.full_layer_parameters - 4 * m.hidden_size
    layer = matrices + 4 * m.num_attention_heads * m.head_dim * config.training.seq_length
    head = 2 * m.hidden_size * m.vocab_size
    # Backward is twice the forward; recomputation is a fourth part.
    return head * (3 + sizes.recomputes_logits) / (layer * (3 + sizes.recomputed))


def settle_stages(config):
    """Fills in pp_chunks where it is null and pp_layers where it is "balanced". ValueError for what cannot run."""
    d = config.distributed
    if d.pp_chunks is None:
        d.pp_chunks = chunks_of(find_schedule(d.pp_engine)) or 2
    timetable = timetable_of(config)
    if d.pp_layers == "balanced":
        ranks = [timetable.rank_of[stage] for stage in range(timetable.num_stages)]
        d.pp_layers = balance_layers(
            config.model.num_hidden_layers, len(ranks), head_cost=head_cost(config), rank_of_stage=ranks
        )
    distribute_layers(config.model.num_hidden_layers, timetable.num_stages, d.pp_layers)


def work_of_ranks(config):
    """What each pp rank has to do for a micro-batch, in layers."""
    timetable, head = timetable_of(config), head_cost(config)
    counts = [len(layers) for layers in layers_of_stages(config)]
    counts[-1] += head
    return [sum(counts[stage] for stage in stages) for stages in timetable.stages]


def explain_stages(config):
    """The reasons for the layer counts, in a line."""
    work = work_of_ranks(config)
    counts = " ".join(str(len(layers)) for layers in layers_of_stages(config))
    return (
        f"head costs {head_cost(config):.2f} layers, embedding 0: stages {counts}; "
        f"the slowest rank has {max(work):.2f} layers to do, the mean is {sum(work) / len(work):.2f}"
    )


def layers_of_stages(config):
    d = config.distributed
    return distribute_layers(config.model.num_hidden_layers, d.pp_size * d.pp_chunks, d.pp_layers)


def timetable_of(config):
    d = config.distributed
    recomputed = Sizes(config).recomputed
    return _timetable(d.pp_engine, d.pp_size, config.training.gradient_accumulation_steps, d.pp_chunks, recomputed)


@lru_cache
def _timetable(pp_engine, pp_size, num_microbatches, num_chunks, recomputed):
    """At the cost of FLOPs: backward takes two forwards, and one more where it has to recompute."""
    costs = {"F": 1, "B": 2 + recomputed, "I": 1 + recomputed, "W": 1}
    return make_timetable(pp_engine, pp_size, num_microbatches, num_chunks, costs=costs)


# --- memory -----------------------------------------------------------------------------------------------------------


class Sizes:
    """Numbers of elements and bytes of one rank's part: parameters, and what a micro-batch leaves for backward."""

    def __init__(self, config):
        m, t, d = config.model, config.training, config.distributed
        self.element = {"bfloat16": 2, "float32": 4, "float64": 8}[m.dtype]  # bytes: weights, activations
        self.wide = max(self.element, 4)  # bytes: gradients in buckets, optimizer, softmax
        self.every = {"none": 0, "layer": 1}.get(m.recompute, m.recompute)
        self.recomputed = 1 / self.every if self.every else 0
        tp = d.tp_size
        self.hidden, self.mlp, self.vocab = m.hidden_size, m.intermediate_size // tp, -(-m.vocab_size // tp)
        self.query, self.key_value = m.num_attention_heads * m.head_dim // tp, m.num_key_value_heads * m.head_dim // tp
        self.heads = m.num_attention_heads // tp
        self.tokens = t.micro_batch_size * t.seq_length
        self.own_tokens = self.tokens // tp if d.sequence_parallel else self.tokens  # between the blocks
        self.boundary = self.element * self.own_tokens * self.hidden
        # RMSNorm keeps 1/rms and its input; torch computes it in steps on a CPU, and keeps two float32 tensors.
        norm = 2 * self.wide if d.device == "cpu" else self.element
        self.norm = self.own_tokens * (norm * self.hidden + self.wide)
        num_pieces = min(-(-self.tokens * self.vocab * 4 // LOGITS_BYTES), t.seq_length)  # as in PipelineParallel.loss
        self.recomputes_logits = num_pieces > 1
        self.piece_tokens = t.micro_batch_size * -(-t.seq_length // num_pieces)
        biases = m.attention_bias * (self.query + 2 * self.key_value + self.hidden)
        self.replicated = 2 * self.hidden + m.attention_bias * self.hidden  # of a layer's, whole on every tp rank
        self.layer_parameters = self.hidden * (2 * self.query + 2 * self.key_value + 3 * self.mlp + 2) + biases

    def layer(self):
        """Kept by a decoder layer, in the order of model.DecoderLayer.forward."""
        attention = self.hidden + 2 * self.query + 2 * self.key_value  # norm's output; rotated q, k; v; attention
        mlp = self.hidden + 4 * self.mlp  # norm's output; gate, silu(gate), up, their product
        softmax = self.wide * self.tokens * self.heads  # flash attention: a number a row
        return 2 * self.norm + self.element * self.tokens * (attention + mlp) + softmax

    def layer_after_input_backward(self):
        """Kept from I to W: input and output gradient of every matrix."""
        inputs = 2 * self.hidden + self.query + self.mlp
        gradients = 2 * self.hidden + self.query + 2 * self.key_value + 2 * self.mlp
        return self.element * self.tokens * (inputs + gradients)

    def weight_gradient(self, elements):
        """While it is added to its bucket: itself, and in float32."""
        return elements * (self.element + (self.wide if self.wide > self.element else 0))



class Phase(NamedTuple):
    """Bytes at some moment of an action, on top of what is held at the start of B, I, W or at the end of F."""

    activations: int = 0
    logits: int = 0
    temporary: int = 0


class Stage:
    """What one stage keeps for one micro-batch: `kept` from F on, `left` from I to W, and the `phases` of each kind."""

    def __init__(self, sizes, layers, is_first, is_last, owns_head):
        self.sizes, self.is_first, self.is_last = sizes, is_first, is_last
        self.recomputed = [sizes.every and i % sizes.every == 0 for i in layers]
        table, stream = sizes.vocab * sizes.hidden, sizes.element * sizes.tokens * sizes.hidden
        self.parameters = len(layers) * sizes.layer_parameters + is_first * table
        self.parameters += is_last * (sizes.hidden + owns_head * table)
        self.replicated = len(layers) * sizes.replicated + is_last * sizes.hidden
        self.layers_kept = [sizes.boundary if recomputed else sizes.layer for recomputed in self.recomputed]
        self.head_kept = is_last * (sizes.norm + stream)
        tokens_kept = 9 * sizes.tokens * (is_first + is_last)  # token numbers and a mask
        self.kept = Phase(sum(self.layers_kept) + self.head_kept + tokens_kept, is_last * sizes.softmax)
        self.left = Phase(len(layers) * sizes.layer_left + is_last * stream, is_last * sizes.grad_logits)
        matrices = [sizes.hidden * sizes.mlp] * bool(layers) + [table] * is_last
        self.phases = {
            "F": [Phase(logits=is_last * (sizes.logits_forward - sizes.softmax))],
            "B": list(self._backward(sizes.weight_gradient)),
            "I": list(self._backward(lambda elements: 0)),
            "W": [Phase(temporary=sizes.weight_gradient(max(matrices, default=0)))],
        }

    def _backward(self, weight_gradient):
        """From the loss to the input; what is behind has been freed."""
        sizes = self.sizes
        table, stream = sizes.vocab * sizes.hidden, sizes.element * sizes.tokens * sizes.hidden
        if self.is_last:
            if sizes.recomputes_logits:
                yield Phase(logits=sizes.logits_forward)
            yield Phase(logits=sizes.logits_backward, temporary=stream + weight_gradient(table))
        freed = self.head_kept
        for kept in reversed(self.layers_kept):
            again = sizes.layer - kept  # recomputed
            gradients = 2 * stream + sizes.mlp_gradients
            ...
