"""The operators `subquad::kernel_sums` and `subquad::kernel_sums_backward`: schema, shapes, derivative, FLOPs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.kernels.linear import chunks, cuda
from subquad.kernels.linear.chunks import CHUNK


def kernel_sums(
    a: Tensor, b: Tensor, v: Tensor, scales: Tensor | None = None, *, causal: bool, normalise: bool = True
) -> Tensor:
    """The sums of the package docstring: a (B, H, n, f), b (B, H, m, f), v (B, H, m, d) → (B, H, n, d).

    `scales` (B, H, m), only for causal sums, must never fall along the sequence and has no gradient. With
    normalise=False the denominator is left out. Half precision is computed in float32.
    """
    work = torch.promote_types(v.dtype, torch.float32)
    x, y, z = (t.to(work).flatten(0, 1).contiguous() for t in (a, b, v))
    s = None if scales is None else scales.detach().to(work).flatten(0, 1).contiguous()
    out, _ = sums(x, y, z, s, causal, normalise)
    return out.unflatten(0, a.shape[:2]).to(v.dtype)


@torch.library.custom_op("subquad::kernel_sums", mutates_args=())
def sums(
    a: Tensor, b: Tensor, v: Tensor, scales: Tensor | None, causal: bool, normalise: bool
) -> tuple[Tensor, Tensor]:
    """a (G, n, f), b (G, m, f), v (G, m, d) → out (G, n, d) and its denominators (G, n)."""
    if causal:
        return chunks.causal_forward(a, b, v, scales, normalise)
    return chunks.whole_forward(a, b, v, normalise)


@torch.library.custom_op("subquad::kernel_sums_backward", mutates_args=())
def sums_backward(
    grad: Tensor,
    a: Tensor,
    b: Tensor,
    v: Tensor,
    scales: Tensor | None,
    out: Tensor,
    den: Tensor,
    causal: bool,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a, b and v."""
    if causal:
        return chunks.causal_backward(grad, a, b, v, scales, out, den, normalise)
    return chunks.whole_backward(grad, a, b, v, out, den, normalise)


sums.register_kernel("cuda")(cuda.forward)
sums_backward.register_kernel("cuda")(cuda.backward)


@sums.register_fake
def _(a, b, v, scales, causal, normalise):
    return v.new_empty(*a.shape[:2], v.shape[2]), v.new_empty(a.shape[:2])


@sums_backward.register_fake
def _(grad, a, b, v, *about):
    return a.new_empty(a.shape), b.new_empty(b.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    a, b, v, scales, *ctx.about = inputs
    ctx.save_for_backward(a, b, v, scales, *output)


def _gradient(ctx, grad, grad_den):
    return *sums_backward(grad, *ctx.saved_tensors, *ctx.about), None, None, None


def _no_second_derivative(ctx, *grads):
    raise NotImplementedError("kernel_sums has no second derivative")


sums.register_autograd(_gradient, setup_context=_save)
sums_backward.register_autograd(_no_second_derivative)


# One multiply-add = 2. A forward multiplies b by v and the sum by a, causal also the pairs of a chunk twice.


@register_flop_formula(torch.ops.subquad.kernel_sums, get_raw=True)
def _flops(a, b, v, scales, causal, normalise, *args, out_val=None, **kwargs) -> int:
    (g, n, f), (_, m, d) = a.shape, v.shape
    return 2 * g * ((n + m) * f * d + (n * CHUNK * (f + d) if causal else 0))


@register_flop_formula(torch.ops.subquad.kernel_sums_backward, get_raw=True)
def _backward_flops(grad, a, b, v, scales, out, den, causal, normalise, *args, out_val=None, **kwargs) -> int:
    (g, n, f), (_, m, d) = a.shape, v.shape
    return 2 * g * ((2 * n + 3 * m) * f * d + (n * CHUNK * (3 * f + 2 * d) if causal else 0))
