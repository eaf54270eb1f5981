"""Tensor parallelism: every matrix of a layer is split over the tp ranks (Megatron-LM, arXiv 1909.08053, section 3).

    block entry (f)      column-parallel        row-parallel       block exit (g)
    forward: identity    Y_r = X · W_r (cols)   Z_r = Y_r · V_r    forward: all-reduce
    backward: all-reduce                                           backward: identity

f and g (parallel_region.py) are conjugate: one communicates forward, the other backward. f stands once at the entry of
a block, not once per matrix, so a decoder layer costs two all-reduces forward and two backward. With sequence
parallelism (arXiv 2205.05198, section 4.2) the norms and the residual stream between the blocks hold seq/tp tokens per
rank: f becomes all-gather (backward: reduce-scatter) and g reduce-scatter (backward: all-gather), as many bytes.

Sizes that tp does not divide (only the vocabulary may be one) give shards that differ by one row; nothing is padded.
Shapes: b batch, s sequence, h hidden, v vocabulary, v/tp this rank's share of it.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import process_group_manager as pgm
from linear import linear
from parallel_region import ParallelRegion


class Shard(NamedTuple):
    """Which part of a full tensor a rank holds: [start, stop) of dimension `dim`."""

    full_shape: torch.Size
    dim: int
    start: int
    stop: int

    def take(self, full):
        return full.narrow(self.dim, self.start, self.stop - self.start)


def shard_range(size, rank, num_shards):
    """[start, stop) of `rank`'s part when `size` is split as evenly as it goes. (257, 0, 2) -> (0, 129)."""
    small, larger = divmod(size, num_shards)
    start = rank * small + min(rank, larger)
    return start, start + small + (rank < larger)


def _shard_parameter(full, dim, rank, num_shards):
    """A meta parameter for this rank's part of the meta parameter `full`."""
    shard = Shard(full.shape, dim, *shard_range(full.size(dim), rank, num_shards))
    parameter = nn.Parameter(shard.take(full.detach()), full.requires_grad)
    parameter.shard = shard
    return parameter


class ColumnParallelLinear(nn.Module):
    """y_r = x · W_rᵀ: `layer`'s output features are split, so y_r is this rank's share of y. x is whole and has been
    through f, as q, k and v share the one at the entry of their block. `out_features` is the largest rank's share.

    With `overlaps` the weight gradient is put aside for f's backward, which keeps y's gradient until then.
    """

    def __init__(self, layer, region, overlaps=False):
        super().__init__()
        self.region = region
        self.aside = region.aside if overlaps and region.size > 1 else None
        self.in_features, self.out_features = layer.in_features, shard_range(layer.out_features, 0, region.size)[1]
        self.weight = _shard_parameter(layer.weight, 0, region.rank, region.size)  # [out/tp, in]
        self.bias = None
        if layer.bias is not None:
            self.bias = _shard_parameter(layer.bias, 0, region.rank, region.size)  # [out/tp]

    def forward(self, x):
        return linear(x, self.weight, self.bias, self.aside)

    def extra_repr(self):
        return f"in={self.in_features}, out={self.out_features}, tp_rank={self.region.rank}/{self.region.size}"


class RowParallelLinear(nn.Module):
    """y = g(x_r · W_rᵀ) + bias: `layer`'s input features are split as x already is; y is the same on every rank."""

    def __init__(self, layer, region):
        super().__init__()
        self.region = region
        self.in_features, self.out_features = layer.in_features // region.size, layer.out_features
        self.weight = _shard_parameter(layer.weight, 1, region.rank, region.size)  # [out, in/tp]
        self.bias = layer.bias  # whole on every rank, added once, after the sum

    def forward(self, x):
        y = self.region.exit(linear(x, self.weight))
        return y if self.bias is None else y + self.bias

    extra_repr = ColumnParallelLinear.extra_repr


class VocabParallelEmbedding(nn.Module):
    """Each rank looks up the tokens of its own rows and contributes zeros for the others; g sums."""

    def __init__(self, layer, region):
        super().__init__()
        self.region = region
        self.weight = _shard_parameter(layer.weight, 0, region.rank, region.size)  # [v/tp, h]

    def forward(self, tokens):
        start, stop = self.weight.shard.start, self.weight.shard.stop
        elsewhere = (tokens < start) | (tokens >= stop)
        x = F.embedding((tokens - start).masked_fill(elsewhere, 0), self.weight)  # [b, s, h]
        return self.region.exit(x.masked_fill(elsewhere.unsqueeze(-1), 0))


class VocabParallelCrossEntropy(nn.Module):
    """`model.CrossEntropy` of logits whose vocabulary is split over tp. The logits are never gathered."""

    def __init__(self, vocab_size, region):
        super().__init__()
        self.region, self.start = region, shard_range(vocab_size, region.rank, region.size)[0]

    def forward(self, logits, targets):
        return _VocabParallelCrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), self.start, self.region.group)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """loss = mean(log(sum(exp(logits))) − logits[target]); its gradient is (softmax − onehot(target)) / tokens."""

    @staticmethod
    def forward(ctx, logits, targets, start, group):  # logits: [tokens, v/tp]; targets: [tokens]
        largest = logits.amax(dim=-1)  # [tokens]
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        shifted = logits.to(dtype) - largest.unsqueeze(-1)
        column = targets - start
        elsewhere = (column < 0) | (column >= logits.size(-1))
        column = column.masked_fill(elsewhere, 0).unsqueeze(-1)  # [tokens, 1]
        target_logit = shifted.gather(-1, column).squeeze(-1).masked_fill(elsewhere, 0)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(dim=-1), target_logit))  # [2, tokens]: two numbers a token cross the wire
        dist.all_reduce(sums, group=group)
        total, target_logit = sums
        softmax = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, column, elsewhere)
        ctx.dtype = logits.dtype
        return (total.log() - target_logit).mean()

    @staticmethod
    def backward(ctx, grad_loss):
        grad_logits, column, elsewhere = ctx.saved_tensors  # the softmax becomes the gradient in place
        ones = (~elsewhere).to(grad_logits.dtype).unsqueeze(-1)
        grad_logits.scatter_add_(-1, column, -ones)
        grad_logits.mul_(grad_loss / grad_logits.size(0))
        return grad_logits.to(ctx.dtype), None, None, None


# --- applied to a model -----------------------------------------------------------------------------------------------


def apply_tensor_parallel(model, sequence_parallel=False):
    """Replaces the layers of a meta-device `Llama` by this tp rank's share of them, in place.

    With `sequence_parallel`, parameters whose gradient covers only this rank's tokens are marked `partial_over_tp`:
    their gradients have to be summed over tp (data_parallel does).
    """
    region = ParallelRegion(pgm.process_group_manager.tp_group, sequence_parallel)

    def enter_block(block, arguments):  # f, once for all the matrices that read a block's input
        return region.enter(arguments[0]), *arguments[1:]

    for layer in model.decoder_layers.values():
        for block, columns, row in (
            (layer.attention, ("q_proj", "k_proj", "v_proj"), "out_proj"),
            (layer.mlp, ("gate_proj", "up_proj"), "down_proj"),
        ):
            block.register_forward_pre_hook(enter_block)
            for name in columns:
                sharded = ColumnParallelLinear(getattr(block, name), region, overlaps=True)
                setattr(block, name, sharded)
            setattr(block, row, RowParallelLinear(getattr(block, row), region))
    model.embedding = VocabParallelEmbedding(model.embedding, region)
    # The head's f stands behind the final norm: the loss may go through the head in pieces of the sequence.
    model.final_norm.register_forward_hook(lambda norm, arguments, x: region.enter(x))
    model.final_proj = ColumnParallelLinear(model.final_proj, region)
    model.loss_function = VocabParallelCrossEntropy(model.config.vocab_size, region)
    if model.config.tie_word_embeddings:
        model.tie_weights()
    if sequence_parallel:
        for parameter in model.parameters():
            parameter.partial_over_tp = not hasattr(parameter, "shard")
    return model
