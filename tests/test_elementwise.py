"""The backward passes that elementwise.py writes out, against autograd's of the same formulas."""

import pytest
import torch
import torch.nn.functional as F

from elementwise import apply_rotary, rms_norm, swiglu


def rms_norm_formula(x, weight):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight).to(x.dtype)


def rotary_formula(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


ANGLES = random(16, 4).repeat(1, 2)
CASES = {
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), rms_norm_formula, (random(2, 16, 24), random(24))),
    "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up, (random(2, 16, 24), random(2, 16, 25)[..., 1:])),
    "apply_rotary": (
        lambda x: apply_rotary(x, ANGLES.cos().float(), ANGLES.sin().float()),
        lambda x: rotary_formula(x, ANGLES.cos().float(), ANGLES.sin().float()),
        (random(2, 16, 3, 8).transpose(1, 2),),  # [b, heads, s, d] as attention has it
    ),
}
# A handful of roundings of values near 1; in bfloat16 the two sides round at different places.
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 0.04}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_formula(name, dtype):
    ours, formula, inputs = CASES[name]
    results = []
    for function in (ours, formula):
        arguments = [value.to(dtype).requires_grad_() for value in inputs]
        output = function(*arguments)
        gradient = random(*output.shape).flip(-1).to(dtype)
        results.append([output, *torch.autograd.grad(output, arguments, gradient)])
    for value, expected in zip(*results, strict=True):
        assert value.dtype == expected.dtype == dtype and value.shape == expected.shape
        assert (value - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_backward_is_the_derivative(name):
    ours, _, inputs = CASES[name]
    small = [value[..., :4, :] if value.ndim > 2 and name != "apply_rotary" else value for value in inputs]
    assert torch.autograd.gradcheck(ours, [value.clone().requires_grad_() for value in small])


def test_only_what_goes_in_is_kept():
    """rms_norm keeps x and a number a row, swiglu its two inputs: no third tensor of their size."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()), lambda _: None):
        rms_norm(random(4, 24).requires_grad_(), random(24).requires_grad_(), 1e-5)
        swiglu(random(4, 30).requires_grad_(), random(4, 30).requires_grad_())
    assert sorted(saved) == [4, 24, 4 * 24, 4 * 30, 4 * 30]
