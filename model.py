"""A Llama in plain PyTorch, for one device: it knows nothing of ranks.

Parallelism is applied from outside: `tensor_parallel.apply_tensor_parallel` swaps the layers for sharded ones of the
same name, `pipeline_parallel.PipelineParallel` keeps one stage's layers. That works because nothing here counts heads
from the config (local head counts come from weight shapes) and because `Llama.forward` is a loop over children.

Papers: RMSNorm (arXiv 1910.07467), rotary embedding (2104.09864), SwiGLU (2002.05202), grouped-query attention
(2305.13245), Llama (2302.13971). Names of sizes are those of transformers' `LlamaConfig`. Shapes: b batch, s sequence,
h hidden, d head_dim, n query heads, k key-value heads, v vocabulary.
"""

import hashlib
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from elementwise import apply_rotary, rms_norm, swiglu

LOGITS_BYTES = 256 * 2**20  # float32 logits a loss may hold: more cost memory, fewer cost a second product
# No dropout in the model, so no random state to bring back.
recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def rotary_tables(config, device=None):
    """cos and sin tables [max_position_embeddings, head_dim], float32 whatever the model's dtype (RoFormer, eq. 34).

    `config.rope_parameters` is {"rope_type": "default" | "linear" | "llama3", "rope_theta": …, …}.
    """
    rope = config.rope_parameters
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse_frequency = 1.0 / rope["rope_theta"] ** exponent  # [d/2], radians per token
    if rope["rope_type"] == "linear":
        inverse_frequency = inverse_frequency / rope["factor"]
    elif rope["rope_type"] == "llama3":
        inverse_frequency = _llama3_frequencies(inverse_frequency, rope)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequency).repeat(1, 2)  # [max positions, d]
    return angles.cos().to(device), angles.sin().to(device)


def _llama3_frequencies(inverse_frequency, rope):
    """Llama 3.1's long-context scaling: slow waves are stretched by `factor`, fast ones kept, a ramp between."""
    wavelength = 2 * math.pi / inverse_frequency
    turns = rope["original_max_position_embeddings"] / wavelength  # full turns within the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * inverse_frequency / rope["factor"] + ramp * inverse_frequency


class Linear(nn.Linear):
    """torch's. On the meta device it draws no values: torch's own drawing imports its compiler there."""

    def reset_parameters(self):
        if not self.weight.is_meta:
            super().reset_parameters()


class Embedding(nn.Embedding):
    def reset_parameters(self):
        if not self.weight.is_meta:
            super().reset_parameters()


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query self-attention. Under tensor parallelism it sees its share of the heads and cannot tell."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = Linear(config.hidden_size, key_value_size, bias=config.attention_bias)
        self.v_proj = Linear(config.hidden_size, key_value_size, bias=config.attention_bias)
        self.out_proj = Linear(query_size, config.hidden_size, bias=config.attention_bias)

    def forward(self, x, cos, sin):
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [b, s, h] -> [b, n or k, s, d]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        seq_length = query.size(2)
        cos, sin = cos[:seq_length], sin[:seq_length]
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        x = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)  # [b, n, s, d]
        return self.out_proj(x.transpose(1, 2).flatten(2))  # [b, s, h]


class MLP(nn.Module):
    """SwiGLU feed-forward: down(silu(gate(x)) · up(x))."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # [b, s, h]


class CrossEntropy(nn.Module):
    """Mean negative log-likelihood in float32 or better. logits: [b, s, v]; targets: [b, s]; result: []."""

    def forward(self, logits, targets):
        logits = logits.flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())


class Llama(nn.Module):
    """tokens [b, s] -> logits [b, s, v]. `config` has the fields of transformers' LlamaConfig."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        # A dict, not a list: a pipeline stage keeps some of the layers under their global numbers.
        self.decoder_layers = nn.ModuleDict({str(i): DecoderLayer(config) for i in range(config.num_hidden_layers)})
        self.final_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.final_proj = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_function = CrossEntropy()
        if config.tie_word_embeddings:
            self.tie_weights()

    def tie_weights(self):
        self.final_proj.weight = self.embedding.weight
        self.embedding.weight.tied_name = "embedding.weight"

    def forward(self, tokens):
        cos, sin = rotary_tables(self.config, tokens.device)
        x = self.embedding(tokens)  # [b, s, h]
        for layer in self.decoder_layers.values():
            x = layer(x, cos, sin)
        return self.final_proj(self.final_norm(x))  # [b, s, v]


def head_loss(model, x, targets):
    """Mean cross entropy [] of hidden states [b, s, h], in pieces of the sequence whose logits fit LOGITS_BYTES.

    With one piece the logits are kept for backward; with several, each piece's are made again there.
    """

    def piece_loss(x, targets):
        return model.loss_function(model.final_proj(x), targets)

    # out_features is the same on all tp ranks, their weights' rows are not: all have to cut alike.
    logits_bytes = targets.numel() * model.final_proj.out_features * torch.float32.itemsize
    num_pieces = min(-(-logits_bytes // LOGITS_BYTES), targets.size(1))
    if num_pieces == 1:
        return piece_loss(x, targets)
    pieces = zip(x.tensor_split(num_pieces, dim=1), targets.tensor_split(num_pieces, dim=1), strict=True)
    # Each piece's mean counts by its share of the tokens.
    return sum(recompute(piece_loss, *piece) * (piece[1].numel() / targets.numel()) for piece in pieces)


def build_on_meta(config, dtype):
    """The whole model without memory: parallelism decides what of it this rank keeps, `materialize` allocates that."""
    with torch.device("meta"):
        return Llama(config).to(dtype)


def materialize(model, config, seed, device):
    """Allocates `model`'s meta parameters on `device` with their initial values. Layout-free: see `initial_value`.

    A parameter that is one rank's share carries `shard` (set by tensor_parallel), which cuts it out of the full tensor.
    """
    for name, meta in list(named_parameters(model)):
        shard = getattr(meta, "shard", None)
        value = initial_value(name, shard.full_shape if shard else meta.shape, config, seed)
        value = shard.take(value) if shard else value
        parameter = nn.Parameter(value.to(device=device, dtype=meta.dtype, copy=True), meta.requires_grad)
        parameter.__dict__.update(meta.__dict__)
        for module in model.modules():  # everywhere it stands, so that tied weights stay one tensor
            for attribute, candidate in module.named_parameters(recurse=False):
                if candidate is meta:
                    setattr(module, attribute, parameter)
    return model


def named_parameters(model):
    """(name, parameter) pairs, each parameter once, under its name in the whole model.

    A last stage holds a tied output matrix without the embedding: its name is the embedding's there, too.
    """
    for name, parameter in model.named_parameters():
        yield getattr(parameter, "tied_name", name), parameter


def initial_value(name, shape, config, seed):
    """The full float32 tensor that parameter `name` starts from: a stream of its own, seeded by (seed, name).

    So no layout changes a weight, no two layers share a stream and no two tp ranks hold the same shard. Matrices are
    normal with std `initializer_range`; those that write to the residual stream are scaled by 1/sqrt(2 · layers), the
    number of writes (GPT-2). Norm weights are 1, biases 0.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    std = config.initializer_range
    if name.endswith(("out_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * config.num_hidden_layers)
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)
    )
    return torch.randn(shape, generator=generator) * std
