"""The model against transformers' on the same weights, its rotary tables, and the values its parameters start from."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from layouts import assert_close, tiny_config
from model import CrossEntropy, apply_rotary, build_on_meta, initial_value, materialize, named_parameters, rotary_tables

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
LLAMA3 = {  # head_dim 16 has waves of each kind in it: kept, on the ramp, stretched
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """On tensors as small as these a second thread costs more than it brings, most of all while the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(config, dtype=torch.float32, seed=1):
    return materialize(build_on_meta(config, dtype), config, seed, CPU)


def random_batch(config, batch_size=2, seq_length=16):
    """Inputs and targets [b, s]: windows of seq_length + 1 tokens, seen from either end."""
    windows = torch.randint(config.vocab_size, (batch_size, seq_length + 1), generator=torch.Generator().manual_seed(3))
    return windows[:, :-1], windows[:, 1:]


# ---- against transformers --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def llama():
    """transformers' module of the Llama; seconds to import, so only the tests that ask for it wait."""
    from transformers.models.llama import modeling_llama

    return modeling_llama


def hf_name(name):
    for ours, theirs in (
        ("embedding.", "model.embed_tokens."),
        ("decoder_layers.", "model.layers."),
        (".attention.out_proj.", ".attention.o_proj."),
        (".attention.", ".self_attn."),
        ("final_norm.", "model.norm."),
        ("final_proj.", "lm_head."),
    ):
        name = name.replace(ours, theirs)
    return name


def norm_without_cast(norm, x):
    return norm.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon))


def reference_of(model, llama, dtype):
    """transformers' Llama with the weights of `model`, every one of them."""
    config = llama.LlamaConfig(**vars(model.config), attn_implementation="sdpa")
    reference = llama.LlamaForCausalLM(config).to(dtype)
    reference.load_state_dict({hf_name(name): value for name, value in model.state_dict().items()})
    assert len(list(reference.parameters())) == len(list(model.parameters()))
    for module in reference.modules():
        if isinstance(module, llama.LlamaRMSNorm) and dtype == torch.float64:
            # LlamaRMSNorm computes in float32 whatever comes in: 1e-7 off in a float64 model, which would hide ours.
            module.forward = functools.partial(norm_without_cast, module)
    return reference


def outcome(model, logits, targets, name_of=str):
    """Logits, loss and every gradient, under our names."""
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    model.zero_grad()
    loss.backward()
    gradients = {name_of(name): parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": logits.detach(), "loss": loss.item(), "gradients": gradients}


# Relative to the largest value of each tensor. float64: sums in another order differ by some 1e-15. float32: 0 where
# measured, but another CPU may choose another attention kernel for one of the two. An epsilon is 1.2e-7; 1e-5 is some
# tens of them, and well below what the mildest wrong formula makes (rms_norm_eps 1e-6 in place of 1e-5: 7e-4).
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
CONFIGS = {
    "default": {},
    "rope_theta 500000": dict(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    "llama3 scaling": dict(rope_parameters=LLAMA3, head_dim=16, max_position_embeddings=512),
    "linear scaling": dict(rope_parameters=LINEAR),
    "tied": dict(tie_word_embeddings=True),
    "attention_bias": dict(attention_bias=True),
    "head_dim not hidden / heads": dict(head_dim=12),
    "multi-head": dict(num_key_value_heads=4),
    "one key-value head": dict(num_key_value_heads=1),
    "rms_norm_eps": dict(rms_norm_eps=0.1),
    "everything": dict(
        rope_parameters=LLAMA3, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
        attention_bias=True, num_hidden_layers=3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["float32", "float64"])
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_logits_loss_and_gradients_are_those_of_transformers(llama, changes, dtype):
    assert_like_transformers(llama, tiny_config(**{"num_hidden_layers": 2} | changes), dtype, seq_length=16)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["float32", "float64"])
@pytest.mark.parametrize("seq_length", [1, 7, 32])
def test_any_sequence_length_up_to_the_maximum(llama, seq_length, dtype):
    assert_like_transformers(llama, tiny_config(max_position_embeddings=32, num_hidden_layers=2), dtype, seq_length)


def assert_like_transformers(llama, config, dtype, seq_length):
    model = build(config, dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # norm weights start at 1 and biases at 0, which is what an unused one looks like
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    inputs, targets = random_batch(config, seq_length=seq_length)
    ours = outcome(model, model(inputs), targets)
    reference = reference_of(model, llama, dtype)
    theirs = outcome(reference, reference(inputs).logits, targets)
    theirs["gradients"] = {name: theirs["gradients"][hf_name(name)] for name in ours["gradients"]}
    if seq_length == 1:  # one token attends to itself whatever its query and key are, so their gradients are nothing
        for name in [name for name in ours["gradients"] if name.endswith(("q_proj.weight", "k_proj.weight"))]:
            assert ours["gradients"].pop(name).abs().max() < 1e-6 > theirs["gradients"].pop(name).abs().max()
    assert_close(ours, theirs, TOLERANCES[dtype])


def test_the_loss_is_transformers_loss(llama):
    """It shifts the labels itself, we take targets; both are the mean over all tokens."""
    model = build(tiny_config())
    inputs, targets = random_batch(model.config)
    windows = torch.cat((inputs, targets[:, -1:]), dim=1)
    theirs = reference_of(model, llama, torch.float32)(windows, labels=windows).loss
    assert model.loss_function(model(inputs), targets).item() == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss_is_computed_in_float32_or_better(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(2, 50, 61, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(61, (2, 50), generator=generator)
    loss = CrossEntropy()(logits, targets)
    exact = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-14 if dtype == torch.float64 else 1e-6)


def test_no_token_sees_a_later_one():
    model = build(tiny_config(), torch.float64)
    inputs, _ = random_batch(model.config)
    changed = inputs.clone()
    changed[:, 9] = (changed[:, 9] + 1) % model.config.vocab_size
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


# ---- rotary tables ---------------------------------------------------------------------------------------------------

ROPES = {"default": {"rope_type": "default", "rope_theta": 500000.0}, "linear": LINEAR, "llama3": LLAMA3}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rotary_tables_are_transformers_bit_for_bit(llama, rope):
    config = tiny_config(rope_parameters=rope, head_dim=16, max_position_embeddings=2048)
    embedding = llama.LlamaRotaryEmbedding(llama.LlamaConfig(**vars(config)))
    theirs = embedding(torch.zeros(1), torch.arange(2048).unsqueeze(0))
    for ours, reference in zip(rotary_tables(config), theirs, strict=True):
        assert ours.shape == (2048, 16) and torch.equal(ours, reference[0])


def test_rotary_tables_are_exact_far_out():
    """At position 100,000 the last float32 bit of an angle is 1/128 radian; of a bfloat16 one it is 512 radians."""
    config = tiny_config(head_dim=64, max_position_embeddings=100_001)
    cos, sin = rotary_tables(config)
    angles = 100_000 * 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert (cos[-1] - angles.cos().repeat(2)).abs().max() < 0.02
    assert (sin[-1] - angles.sin().repeat(2)).abs().max() < 0.02


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_tables_are_float32_in_a_model_of_any_dtype(dtype):
    model = build(tiny_config(), dtype)
    seen = []
    model.decoder_layers["1"].register_forward_pre_hook(lambda _, arguments: seen.extend(arguments[1:]))
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        logits = model(random_batch(model.config)[0])
    finally:
        torch.set_default_dtype(previous)
    assert logits.dtype == dtype
    assert [table.dtype for table in seen] == [torch.float32, torch.float32]
    for table, expected in zip(seen, rotary_tables(model.config), strict=True):
        assert torch.equal(table, expected)


def test_bfloat16_is_rotated_in_float32_and_rounded_once():
    cos, sin = rotary_tables(tiny_config(head_dim=64, max_position_embeddings=512))
    x = torch.randn(2, 3, 512, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rotated = apply_rotary(x, cos, sin)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, apply_rotary(x.float(), cos, sin).bfloat16())
    lengths = [pairs.float().unflatten(-1, (2, 32)).norm(dim=-2) for pairs in (x, rotated)]
    torch.testing.assert_close(lengths[1], lengths[0], rtol=2**-7, atol=0)  # a rotation keeps the length of a pair


# ---- initial values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, num_layers, factor", [
    ("embedding.weight", 4, 1),
    ("final_proj.weight", 4, 1),
    ("decoder_layers.0.attention.q_proj.weight", 4, 1),
    ("decoder_layers.3.attention.k_proj.weight", 4, 1),
    ("decoder_layers.3.mlp.gate_proj.weight", 8, 1),
    ("decoder_layers.1.mlp.up_proj.weight", 8, 1),
    ("decoder_layers.0.attention.out_proj.weight", 8, 1 / 4),
    ("decoder_layers.7.attention.out_proj.weight", 8, 1 / 4),
    ("decoder_layers.0.mlp.down_proj.weight", 2, 1 / 2),
    ("decoder_layers.1.mlp.down_proj.weight", 8, 1 / 4),
])  # fmt: skip
def test_matrices_start_normal_with_std_initializer_range_and_residual_ones_scaled(name, num_layers, factor):
    config = tiny_config(num_hidden_layers=num_layers, initializer_range=0.02)
    value = initial_value(name, (400, 500), config, seed=5)
    assert value.dtype == torch.float32 and value.shape == (400, 500)
    unit = value / (0.02 * factor)
    # 200,000 samples: the mean is known to 0.0022, the std to 0.0016, the fourth moment (3 of a normal) to 0.022.
    assert abs(unit.mean()) < 0.01
    assert unit.std().item() == pytest.approx(1, abs=0.01)
    assert unit.pow(4).mean().item() == pytest.approx(3, abs=0.1)


def test_norm_weights_start_at_1_and_biases_at_0():
    vectors = {name: p for name, p in build(tiny_config(attention_bias=True)).named_parameters() if p.ndim == 1}
    assert len(vectors) == 4 * (2 + 4) + 1
    for name, vector in vectors.items():
        assert torch.equal(vector.detach(), torch.full_like(vector, float("norm" in name))), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_first_loss_is_ln_of_the_vocabulary(tied):
    config = tiny_config(hidden_size=64, head_dim=16, vocab_size=256, initializer_range=0.02, tie_word_embeddings=tied)
    model = build(config)
    inputs, targets = random_batch(config, batch_size=32)
    # Logits of std 0.02 · sqrt(64) = 0.16 add half its square, 0.013; their mean over 512 targets is known to 0.007.
    assert model.loss_function(model(inputs), targets).item() == pytest.approx(math.log(256), abs=0.05)


def test_no_two_matrices_share_a_stream():
    """Of any two matrices, in one layer or in two, the first 512 values are uncorrelated."""
    matrices = {name: p.detach() for name, p in build(tiny_config()).named_parameters() if p.ndim == 2}
    assert len(matrices) == 4 * 7 + 2
    correlation = torch.stack([matrix.flatten()[:512] for matrix in matrices.values()]).corrcoef()
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 0.25  # of 435 pairs the largest is about 3.3 / sqrt(512) = 0.15; a copy has 1


def test_a_seed_decides_every_matrix():
    one, same, other = (dict(build(tiny_config(), seed=seed).named_parameters()) for seed in (1, 1, 2))
    for name in one:
        assert torch.equal(one[name], same[name])
        assert torch.equal(one[name], other[name]) == (one[name].ndim == 1), name


def test_a_stream_depends_on_its_name_alone():
    """Neither on what was drawn before nor on torch's own generator, which stays as it was."""
    model = build_on_meta(tiny_config(), torch.float32)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    forwards = {name: initial_value(name, shapes[name], model.config, seed=1) for name in shapes}
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    for name in reversed(shapes):
        assert torch.equal(initial_value(name, shapes[name], model.config, seed=1), forwards[name]), name


def test_a_part_of_the_model_starts_as_it_does_in_the_whole():
    config = tiny_config(tie_word_embeddings=True)
    whole = dict(build(config).named_parameters())
    part = build_on_meta(config, torch.float32)
    part.embedding = None  # the last stage of a pipeline: the tied matrix is there as the output matrix only
    for i in "012":
        del part.decoder_layers[i]
    materialize(part, config, 1, CPU)
    named = dict(named_parameters(part))
    assert "embedding.weight" in named and "decoder_layers.3.mlp.up_proj.weight" in named and len(named) == 1 + 9 + 1
    for name, parameter in named.items():
        assert torch.equal(parameter, whole[name]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_materialize_keeps_dtype_ties_and_frozen_parameters(dtype):
    config = tiny_config(tie_word_embeddings=True)
    model = build_on_meta(config, dtype)
    frozen = "decoder_layers.2.mlp.up_proj.weight"
    model.get_parameter(frozen).requires_grad_(False)
    assert materialize(model, config, 1, CPU) is model
    assert model.final_proj.weight is model.embedding.weight
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name != frozen)
        assert (parameter.dtype, parameter.device) == (dtype, CPU)
        assert torch.equal(parameter.detach(), initial_value(name, parameter.shape, config, seed=1).to(dtype)), name


class AllocatedBytes(TorchDispatchMode):
    """Adds up the bytes of every result that is not on the meta device, those of views and in-place ones again."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and result.device.type != "meta":
            self.total += result.untyped_storage().nbytes()
        return result


def test_only_what_is_kept_is_allocated():
    """Of a model of 280 million parameters one layer and the last norm stay: 3.4 million."""
    config = tiny_config(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=64, num_attention_heads=8, num_key_value_heads=8,
        head_dim=64, vocab_size=60_000,
    )  # fmt: skip
    with AllocatedBytes() as allocated:
        model = build_on_meta(config, torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 279_609_856
    assert allocated.total == 0
    model.embedding = model.final_proj = None
    for i in set(model.decoder_layers) - {"5"}:
        del model.decoder_layers[i]
    with AllocatedBytes() as allocated:
        materialize(model, config, 1, CPU)
    kept = 4 * sum(p.numel() for p in model.parameters() if p.device == CPU)
    assert kept == 4 * (4 * 512**2 + 3 * 512 * 1536 + 3 * 512)
    assert kept <= allocated.total <= 5 * kept  # the draw, its scaling and the parameter itself, for each in turn
