"""A linear layer whose backward can be split in two: I, the gradient for the input, and W, the gradient for the weight.

I is what the previous stage waits for; W nobody waits for, so a schedule may run it later, in what would be idle time
(Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2). Outside of `deferred_weight_gradients` the layer
does what `torch.nn.functional.linear` does.
"""

from contextlib import contextmanager

import torch
import torch.nn.functional as F

_onednn_linear = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
_unsafe_view = torch.ops.aten._unsafe_view.default
_deferred = None  # the list that collects W closures while a backward runs as I; None: weight gradients at once


@contextmanager
def deferred_weight_gradients():
    """Within it, backward of `linear` leaves weight gradients out; the yielded list gets a closure for each of them."""
    global _deferred
    _deferred = closures = []
    try:
        yield closures
    finally:
        _deferred = None


def linear(x, weight, bias=None, aside=None):
    """x [..., in] · weight [out, in] transposed + bias [out] -> [..., out].

    Backward leaves the weight gradient to whoever calls the closures in the list `aside`, if one is given. That must be
    the backward of something before x; where x needs no gradient, there is none, and the list stays empty.
    """
    return _Linear.apply(x, weight, bias, aside)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, aside):
        ctx.save_for_backward(x)
        ctx.aside = aside
        ctx.weight = weight  # the parameter itself: a saved tensor may come back (from recomputation) as a copy of it
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad_output):
        (x,), weight = ctx.saved_tensors, ctx.weight
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_rows = grad_output.flatten(0, -2)  # [tokens, out]
        grad_input = _linear(grad_output, weight.t()) if needs_input else None
        grad_bias = grad_rows.sum(0) if needs_bias else None
        grad_weight, later = None, _deferred
        if later is None and needs_input:
            later = ctx.aside
        if needs_weight and later is None:
            grad_weight = _weight_gradient(weight, grad_rows, x)
        elif needs_weight:
            later.append(lambda: _accumulate(weight, _weight_gradient(weight, grad_rows, x)))
        return grad_input, grad_weight, grad_bias, None


def _linear(x, weight, bias=None):
    """F.linear. Large float32 products on a CPU by oneDNN, which torch takes for bfloat16 only: those of W1 and W2
    (benchmarks/compare.py) take 0.74 to 0.95 of MKL's time, by shape. A call costs 60 µs more, so not the small ones.
    """
    is_large = x.numel() * weight.size(0) > 2**25
    if is_large and _onednn_linear and x.dtype == torch.float32 and x.device.type == "cpu":
        rows = _onednn_linear(x.flatten(0, -2), weight, bias, "none", [], "")
        return _unsafe_view(rows, [*x.shape[:-1], weight.size(0)])  # what `view` does, but may change in place
    return F.linear(x, weight, bias)


@torch.no_grad()  # W runs outside of autograd's backward
def _weight_gradient(weight, grad_rows, x):
    """[out, tokens] @ [tokens, in]; or None, added to weight.grad by the product itself, for a weight in a bucket.

    The latter saves a pass over the gradient and a temporary as large as the weight. It needs one dtype for all.
    """
    x = x.flatten(0, -2)
    if not hasattr(weight, "grad_ready") or weight.grad.dtype != x.dtype:
        return grad_rows.t() @ x
    weight.grad.addmm_(grad_rows.t(), x)
    return None


def _accumulate(weight, gradient):
    """What autograd does at a leaf, outside of it: adds the gradient, if it is not there yet, and says so."""
    if gradient is not None:
        weight.backward(gradient)
    else:
        weight.grad_ready(weight)
