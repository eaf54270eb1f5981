"""Tensor parallel layers on real ranks against plain ones on one process: outputs, gradients, shards, collectives.

The functions in the first part run on every rank: they get the whole tensors, cut out what the rank would have, and
return what it computed. The tests put the ranks' parts together again with `join`.
"""

import itertools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import process_group_manager as pgm
from layouts import assemble, assert_close, assert_equal, snapshot, tiny_config
from linear import deferred_weight_gradients, linear
from model import CrossEntropy, build_on_meta, materialize
from tensor_parallel import (
    ColumnParallelLinear,
    ParallelRegion,
    RowParallelLinear,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    apply_tensor_parallel,
    shard_range,
)

TOLERANCE = 1e-12  # float64: the same sums in another order
CPU = torch.device("cpu")
ON_RANKS = pytest.mark.parametrize("tp", [2, 4])
WITH_SEQUENCE_PARALLEL = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence_parallel"])

# ---- on every rank ---------------------------------------------------------------------------------------------------


def take(tensor, dim, region):
    """This rank's part along `dim`, the first ranks one element more where it does not divide; None: all of it."""
    return (tensor if dim is None else tensor.tensor_split(region.size, dim)[region.rank]).clone()


def layer_on_rank(sequence_parallel, parallel_layer, plain, x, x_dim, grad_output, output_dim):
    """Forward and backward of this rank's share of `plain`: {"output", "input", and each parameter: gradient}."""
    region = ParallelRegion(dist.group.WORLD, sequence_parallel)
    layer = parallel_layer(plain, region)
    return forward_and_backward(layer, take(x, x_dim, region), take(grad_output, output_dim, region))


def forward_and_backward(layer, x, grad_output):
    x.requires_grad_(x.is_floating_point())  # tokens have no gradient
    output = layer(x)
    output.backward(grad_output)
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "input": x.grad, **gradients}


def entry_beside_another_reader(sequence_parallel, x, grad_output):
    """The gradient that a sum hands to f is, in one and the same tensor, also that of its other summand."""
    region = ParallelRegion(dist.group.WORLD, sequence_parallel)
    x = take(x, 1 if sequence_parallel else None, region).requires_grad_()
    other = torch.zeros_like(grad_output, requires_grad=True)
    beside = other.clone()  # before f, so its backward comes after f's
    (region.enter(x) + beside).backward(grad_output)
    return {"x": x.grad, "other": other.grad}


def cross_entropy_on_rank(logits, targets):
    region = ParallelRegion(dist.group.WORLD)
    loss_function = VocabParallelCrossEntropy(logits.size(-1), region)
    logits = take(logits, -1, region).requires_grad_()
    loss = loss_function(logits, targets)
    (loss / 4).backward()  # as one of four micro-batches
    return {"loss": loss.detach(), "gradient": logits.grad}


def model_on_rank(tp, sequence_parallel, config, dtype=torch.float64):
    pgm.setup_process_group_manager(tp, 1, 1)
    model = apply_tensor_parallel(build_on_meta(config, dtype), sequence_parallel)
    return materialize(model, config, 1, CPU)


def initial_shards(*arguments):
    return snapshot(model_on_rank(*arguments))


def partial_parameters(*arguments):
    return {name for name, p in model_on_rank(*arguments).named_parameters() if getattr(p, "partial_over_tp", False)}


def model_gradients(tp, sequence_parallel, config, tokens, targets):
    model = model_on_rank(tp, sequence_parallel, config)
    loss = model.loss_function(model(tokens), targets)
    loss.backward()
    for parameter in model.parameters():
        if getattr(parameter, "partial_over_tp", False):
            dist.all_reduce(parameter.grad)
    return loss.item(), snapshot(model, gradients=True)


class Collectives(TorchDispatchMode):
    """Lists every collective, whoever calls it, as (name, elements of its largest tensor)."""

    NAMES = {
        "allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter",
        "recv_": "all-reduce",  # with the "send" before it, that of two ranks
    }  # fmt: skip

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" and function.name() != "c10d::send":
            name = function.name().removeprefix("c10d::")
            tensors = itertools.chain.from_iterable(arg if isinstance(arg, list) else [arg] for arg in args)
            sizes = [tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor)]
            self.seen.append((self.NAMES.get(name, name), max(sizes)))
        return function(*args, **kwargs or {})


def collectives_of_layer(tp, sequence_parallel, config, x, grad_output):
    """(those of forward, those of backward) of one decoder layer."""
    model = model_on_rank(tp, sequence_parallel, config)
    region = ParallelRegion(pgm.process_group_manager.tp_group)
    dim = 1 if sequence_parallel else None
    x, grad_output = take(x, dim, region).requires_grad_(), take(grad_output, dim, region)
    tables = [torch.ones(16, config.head_dim)] * 2
    with Collectives() as forward:
        output = model.decoder_layers["0"](x, *tables)
    with Collectives() as backward:
        output.backward(grad_output)
    return forward.seen, backward.seen


def collectives_of_model(tp, sequence_parallel, config, tokens, targets):
    model = model_on_rank(tp, sequence_parallel, config)
    with Collectives() as forward:
        loss = model.loss_function(model(tokens), targets)
    with Collectives() as backward:
        loss.backward()
    return forward.seen, backward.seen


def split_backward(tp, sequence_parallel, config, dtype, num_micro_batches, deferred):
    """Backward of a last pipeline stage, for each micro-batch: ordinary, or all the I halves and then all the W halves.

    Returns what there was after the I halves and what the W halves added: gradients, hooks fired, collectives.
    """
    model, fired, inputs, closures = model_on_rank(tp, sequence_parallel, config, dtype), Counter(), [], []
    for name, parameter in model.named_parameters():
        parameter.grad_dtype = torch.promote_types(dtype, torch.float32)  # as data parallel has it
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
    result, shape = {}, (2, 16 // tp if sequence_parallel else 16, config.hidden_size)
    for i in range(num_micro_batches):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        targets = torch.randint(config.vocab_size, (2, 16), generator=generator)
        inputs.append(x)
        loss = last_stage(model, x, targets)
        if not deferred:
            loss.backward()
            continue
        with deferred_weight_gradients() as of_this_micro_batch:
            loss.backward()
        closures.append(of_this_micro_batch)
    result["inputs"] = [x.grad.clone() for x in inputs]
    result["missing after I"] = {name for name, p in model.named_parameters() if p.grad is None} - {"embedding.weight"}
    result["closures"] = [len(of_one) for of_one in closures]
    fired_before_w = fired.copy()
    with Collectives() as collectives:
        for closure in itertools.chain.from_iterable(closures):
            closure()
    result["collectives of W"] = collectives.seen
    result["fired"], result["fired by W"] = dict(fired), dict(fired - fired_before_w)
    result["gradients"] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return result


def last_stage(model, x, targets):
    tables = [torch.linspace(0.1, 1, 16 * model.config.head_dim).view(16, -1)] * 2
    for layer in model.decoder_layers.values():
        x = layer(x, *tables)
    return model.loss_function(model.final_proj(model.final_norm(x)), targets)


# ---- the layers ------------------------------------------------------------------------------------------------------


def randn(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) * 1000 + shape[-1]), dtype=dtype)


def join(parts, dim):
    """One tensor from those of all ranks: joined along `dim`, "sum"med, or (None) the same bits on every rank."""
    if dim is None:
        assert all(torch.equal(part, parts[0]) for part in parts), "ranks disagree"
        return parts[0]
    return sum(parts) if dim == "sum" else torch.cat(parts, dim)


def check_layer(pool, tp, sequence_parallel, parallel_layer, plain, x, grad_output, dims):
    """`dims`: how each of "output", "input" and the parameters is spread over the ranks, as `join` takes it."""
    x_dim = None if dims["input"] == "sum" else dims["input"]
    arguments = (parallel_layer, plain, x, x_dim, grad_output, dims["output"])
    ranks = pool.run(tp, layer_on_rank, sequence_parallel, *arguments)
    joined = {
        name: join([rank[name] for rank in ranks], dim) for name, dim in dims.items() if ranks[0][name] is not None
    }
    expected = forward_and_backward(plain, x, grad_output)
    assert_close(joined, {name: value for name, value in expected.items() if value is not None}, TOLERANCE)


class EnteredColumnParallelLinear(ColumnParallelLinear):
    """With f before it, as in a block that has one matrix."""

    def forward(self, x):
        return super().forward(self.region.enter(x))


@WITH_SEQUENCE_PARALLEL
@ON_RANKS
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("out_features", [20, 61])
def test_column_parallel_linear(pool, tp, sequence_parallel, out_features, bias):
    plain = nn.Linear(12, out_features, bias, dtype=torch.float64)
    dims = {"output": -1, "input": 1 if sequence_parallel else None, "weight": 0} | ({"bias": 0} if bias else {})
    x, grad_output = randn(2, 8, 12), randn(2, 8, out_features)
    check_layer(pool, tp, sequence_parallel, EnteredColumnParallelLinear, plain, x, grad_output, dims)


@ON_RANKS
def test_column_parallel_linear_inside_a_block_leaves_a_partial_input_gradient(pool, tp):
    plain = nn.Linear(12, 20, dtype=torch.float64)
    dims = {"output": -1, "input": "sum", "weight": 0, "bias": 0}
    check_layer(pool, tp, False, ColumnParallelLinear, plain, randn(2, 8, 12), randn(2, 8, 20), dims)


@WITH_SEQUENCE_PARALLEL
def test_the_entry_of_a_block_sums_its_own_gradient_only(pool, sequence_parallel):
    x, grad_output = randn(2, 8, 12), randn(2, 8, 12)
    ranks = pool.run(2, entry_beside_another_reader, sequence_parallel, x, grad_output)
    assert torch.equal(join([rank["other"] for rank in ranks], None), grad_output)
    assert torch.equal(join([rank["x"] for rank in ranks], 1 if sequence_parallel else None), 2 * grad_output)


@WITH_SEQUENCE_PARALLEL
@ON_RANKS
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_row_parallel_linear(pool, tp, sequence_parallel, bias):
    plain = nn.Linear(24, 10, bias, dtype=torch.float64)
    dims = {"output": 1 if sequence_parallel else None, "input": -1, "weight": 1}
    if bias:  # added after the sum: to all tokens on every rank, or to this rank's tokens
        dims["bias"] = "sum" if sequence_parallel else None
    check_layer(pool, tp, sequence_parallel, RowParallelLinear, plain, randn(2, 8, 24), randn(2, 8, 10), dims)


@WITH_SEQUENCE_PARALLEL
@ON_RANKS
@pytest.mark.parametrize("vocab_size", [64, 61])
def test_vocab_parallel_embedding(pool, tp, sequence_parallel, vocab_size):
    plain = nn.Embedding(vocab_size, 12, dtype=torch.float64)
    tokens = torch.arange(2 * 40).remainder(vocab_size).view(2, 40)  # every token, some twice
    dims = {"output": 1 if sequence_parallel else None, "input": None, "weight": 0}
    check_layer(pool, tp, sequence_parallel, VocabParallelEmbedding, plain, tokens, randn(2, 40, 12), dims)


def check_cross_entropy(pool, tp, logits, targets, tolerances):
    ranks = pool.run(tp, cross_entropy_on_rank, logits, targets)
    loss = join([rank["loss"] for rank in ranks], None)
    gradient = join([rank["gradient"] for rank in ranks], -1)
    logits = logits.clone().requires_grad_()
    expected = CrossEntropy()(logits, targets)
    (expected / 4).backward()
    assert (loss.dtype, gradient.dtype) == (expected.dtype, logits.dtype)
    assert loss.isfinite() and gradient.isfinite().all() and gradient.any()
    assert_close({"loss": loss}, {"loss": expected.detach()}, tolerances[0])
    assert_close({"gradient": gradient}, {"gradient": logits.grad}, tolerances[1])


# Losses and gradients apart by what the order of the sums makes; a bfloat16 gradient is rounded at its end, to 8 bits.
CROSS_ENTROPY_TOLERANCES = {
    torch.float64: (TOLERANCE, TOLERANCE),
    torch.float32: (1e-6, 1e-6),
    torch.bfloat16: (1e-6, 2**-8),
}


@ON_RANKS
@pytest.mark.parametrize("vocab_size", [64, 61, 5])
@pytest.mark.parametrize("dtype", CROSS_ENTROPY_TOLERANCES, ids=str)
def test_vocab_parallel_cross_entropy(pool, tp, dtype, vocab_size):
    logits = (3 * randn(2, 16, vocab_size)).to(dtype)
    targets = torch.arange(2 * 16).remainder(vocab_size).view(2, 16)
    check_cross_entropy(pool, tp, logits, targets, CROSS_ENTROPY_TOLERANCES[dtype])


@ON_RANKS
@pytest.mark.parametrize("dtype", CROSS_ENTROPY_TOLERANCES, ids=str)
def test_vocab_parallel_cross_entropy_of_huge_logits(pool, tp, dtype):
    """exp(89) is no float32 and exp(710) no float64. Also: one rank's logits all far below another's."""
    logits = 1e4 * randn(2, 16, 61)
    logits[0, :, :20] -= 1e6
    logits[1] += 1e6
    targets = torch.arange(2 * 16).remainder(61).view(2, 16)
    check_cross_entropy(pool, tp, logits.to(dtype), targets, CROSS_ENTROPY_TOLERANCES[dtype])


def test_shards_are_as_even_as_they_can_be():
    assert [shard_range(257, rank, 2) for rank in range(2)] == [(0, 129), (129, 257)]
    assert [shard_range(61, rank, 4) for rank in range(4)] == [(0, 16), (16, 31), (31, 46), (46, 61)]
    assert [shard_range(8, rank, 4) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert shard_range(7, 0, 1) == (0, 7)


# ---- a model ---------------------------------------------------------------------------------------------------------

SHARDED = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight", "gate_proj.weight", "up_proj.weight",
           "down_proj.weight", "embedding.weight", "final_proj.weight"}  # fmt: skip
SHARDED_BIASES = {"q_proj.bias", "k_proj.bias", "v_proj.bias"}


def config_for(tp, **changes):
    return tiny_config(**{"num_hidden_layers": 2, "num_key_value_heads": max(2, tp)} | changes)


def last_two(name):
    return ".".join(name.split(".")[-2:])


@ON_RANKS
def test_step_0_shards_are_the_one_process_weights_bit_for_bit(pool, tp):
    config = config_for(tp, attention_bias=True)
    shards = pool.run(tp, initial_shards, tp, False, config)
    plain = materialize(build_on_meta(config, torch.float64), config, 1, CPU)
    assert_equal_with_zeros(assemble(shards), {name: p.detach() for name, p in plain.named_parameters()})
    for of_rank in shards:
        assert {last_two(name) for name, (_, shard) in of_rank.items() if shard} == SHARDED | SHARDED_BIASES


def assert_equal_with_zeros(actual, expected):  # biases start at 0: no relative error
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@ON_RANKS
def test_shards_of_two_ranks_differ_and_std_does_not_depend_on_tp(pool, tp):
    config = config_for(tp, hidden_size=128, head_dim=32, intermediate_size=256, vocab_size=509, initializer_range=0.02)
    shards = pool.run(tp, initial_shards, tp, False, config)
    for name, (_, shard) in shards[0].items():
        if shard is None:
            continue
        parts = [of_rank[name][0].flatten() for of_rank in shards]
        common = torch.stack([part[: min(map(len, parts))] for part in parts])
        correlation = common.corrcoef().fill_diagonal_(0)
        assert correlation.abs().max() < 0.1, (
            f"{name}: two ranks hold the same numbers"
        )  # 4,096 values or more: 6 sigma
        std = 0.02 / (2 if last_two(name) in ("out_proj.weight", "down_proj.weight") else 1)  # 2 layers: / sqrt(2 · 2)
        for part in parts:
            assert part.std().item() == pytest.approx(std, rel=0.07), name


@WITH_SEQUENCE_PARALLEL
def test_parameters_with_partial_gradients_are_marked(pool, sequence_parallel):
    config = config_for(2, attention_bias=True)
    norms = {f"decoder_layers.{i}.{norm}" for i in "01" for norm in ("input_layernorm", "post_attention_layernorm")}
    partial = {f"{norm}.weight" for norm in norms} | {f"decoder_layers.{i}.attention.out_proj.bias" for i in "01"}
    expected = partial | {"final_norm.weight"} if sequence_parallel else set()
    assert pool.run(2, partial_parameters, 2, sequence_parallel, config) == [expected] * 2


@WITH_SEQUENCE_PARALLEL
@ON_RANKS
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_loss_and_gradients_of_a_model_are_those_of_one_process(pool, tp, sequence_parallel, tied):
    config = config_for(tp, attention_bias=True, tie_word_embeddings=tied)
    tokens, targets = random_tokens(config)
    ranks = pool.run(tp, model_gradients, tp, sequence_parallel, config, tokens, targets)
    plain = materialize(build_on_meta(config, torch.float64), config, 1, CPU)
    loss = F.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    assert len({loss for loss, _ in ranks}) == 1
    actual = {"loss": ranks[0][0], **assemble([gradients for _, gradients in ranks])}
    assert_close(actual, {"loss": loss.item(), **{name: p.grad for name, p in plain.named_parameters()}}, TOLERANCE)


def random_tokens(config):
    return torch.randint(config.vocab_size, (2, 2, 16), generator=torch.Generator().manual_seed(0)).unbind()


# ---- collectives -----------------------------------------------------------------------------------------------------


@WITH_SEQUENCE_PARALLEL
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_decoder_layer_costs_two_all_reduces_a_direction(pool, tp, sequence_parallel):
    """Or as many bytes: with sequence parallelism an all-gather and a reduce-scatter for each of the two."""
    config = config_for(tp)
    hidden_states = 2 * 16 * config.hidden_size
    kinds = ["all-gather", "reduce-scatter"] if sequence_parallel else ["all-reduce"]
    expected = [(kind, hidden_states) for kind in kinds] * 2 if tp > 1 else []
    x, grad_output = randn(2, 16, config.hidden_size), randn(2, 16, config.hidden_size)
    for forward, backward in pool.run(tp, collectives_of_layer, tp, sequence_parallel, config, x, grad_output):
        assert forward == expected
        assert backward == expected  # g's all-gather, then f's reduce-scatter


@ON_RANKS
def test_logits_are_never_gathered(pool, tp):
    """The whole list of a model's collectives: of the loss there are three numbers a token."""
    config = config_for(tp, vocab_size=1001)
    num_tokens, num_layers = 2 * 16, 2
    per_layer = [("all-reduce", num_tokens * config.hidden_size)] * 2
    embedding = final_projection = per_layer[:1]
    loss = [("all-reduce", num_tokens), ("all-reduce", 2 * num_tokens)]  # the maximum; the sum and the target's logit
    for forward, backward in pool.run(tp, collectives_of_model, tp, False, config, *random_tokens(config)):
        assert forward == embedding + num_layers * per_layer + loss
        assert backward == final_projection + num_layers * per_layer


PUT_ASIDE = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")


# ---- backward in two halves ------------------------------------------------------------------------------------------


@WITH_SEQUENCE_PARALLEL
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_deferred_weight_gradients_are_the_ordinary_ones_later(pool, sequence_parallel, dtype, num_micro_batches):
    config = config_for(2, attention_bias=True)
    arguments = (2, sequence_parallel, config, dtype, num_micro_batches)
    ordinary = pool.run(2, split_backward, *arguments, False)
    deferred = pool.run(2, split_backward, *arguments, True)
    for once, twice in zip(ordinary, deferred, strict=True):
        matrices = {name for name in once["gradients"] if last_two(name) in SHARDED}
        assert len(matrices) == 2 * 7 + 1
        for ours, theirs in zip(twice["inputs"], once["inputs"], strict=True):
            assert torch.equal(ours, theirs) and ours.any()
        assert twice["missing after I"] == matrices
        assert twice["closures"] == [len(matrices)] * num_micro_batches
        assert twice["collectives of W"] == []
        # Those that wait for f's backward come in it, and are announced before that, as all are before W.
        times = {name: 1 + name.endswith(PUT_ASIDE) for name in once["gradients"]}
        assert once["fired"] == {name: num_micro_batches * count for name, count in times.items()}
        assert twice["fired by W"] == dict.fromkeys(matrices, num_micro_batches)
        assert all(
            gradient.dtype == torch.promote_types(dtype, torch.float32) for gradient in once["gradients"].values()
        )
        assert_equal(twice["gradients"], once["gradients"])


def leaves(bias, frozen=()):
    tensors = {"x": randn(2, 5, 6), "weight": randn(4, 6), **({"bias": randn(4)} if bias else {})}
    return {name: tensor.requires_grad_(name not in frozen) for name, tensor in tensors.items()}


@pytest.mark.parametrize("bias, frozen", [
    (False, ()), (False, ("weight",)), (False, ("x",)),
    (True, ()), (True, ("weight",)), (True, ("x",)), (True, ("x", "weight")),
], ids=str)  # fmt: skip
def test_linear_is_torchs_and_defers_only_weights_that_learn(bias, frozen):
    plain, at_once, split = leaves(bias, frozen), leaves(bias, frozen), leaves(bias, frozen)
    expected = F.linear(*plain.values())
    expected.backward(randn(2, 5, 4))
    output = linear(*at_once.values())
    assert torch.equal(output, expected)
    output.backward(randn(2, 5, 4))
    with deferred_weight_gradients() as closures:
        linear(*split.values()).backward(randn(2, 5, 4))
    assert len(closures) == ("weight" not in frozen) and split["weight"].grad is None
    for closure in closures:
        closure()
    for name, leaf in plain.items():
        if name in frozen:
            assert at_once[name].grad is split[name].grad is None
        else:
            assert_close({name: at_once[name].grad}, {name: leaf.grad}, TOLERANCE)
            assert torch.equal(split[name].grad, at_once[name].grad), name


def test_an_error_in_a_backward_ends_the_deferral():
    tensors = leaves(bias=False)
    with pytest.raises(RuntimeError, match="shape"), deferred_weight_gradients():
        linear(*tensors.values()).backward(randn(3))
    linear(*tensors.values()).backward(randn(2, 5, 4))
    assert tensors["weight"].grad is not None


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("shape", ((2, 256), (600,)), ids=("batch and sequence", "rows"))
def test_a_large_float32_linear(shape, bias):
    """It goes through another library. Its output may change in place, as the exit of a row-parallel block does."""
    exact = [randn(*shape, 512), randn(384, 512), *([randn(384)] if bias else [])]
    assert exact[0].numel() * 384 > 2**25  # else it is torch's
    gradient = randn(384, *shape).movedim(0, -1)  # not contiguous
    results = []
    for function, dtype in ((F.linear, torch.float64), (linear, torch.float32)):
        tensors = [tensor.to(dtype, copy=True).requires_grad_() for tensor in exact]
        output = function(*tensors)
        output.mul_(3)
        output.backward(gradient.to(dtype))
        results.append([output, *(tensor.grad for tensor in tensors)])
    bound = 4 * 600**0.5 * 2**-24  # a sum of at most 600 products, each rounded
    for value, expected in zip(*reversed(results), strict=True):
        assert value.shape == expected.shape and value.dtype == torch.float32
        assert (value - expected).abs().max() <= bound * expected.abs().max()
