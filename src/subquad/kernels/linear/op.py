"""The operators `subquad::kernel_sums` and `subquad::kernel_sums_backward`: schema, shapes, derivative, FLOPs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.kernels import devices
from subquad.kernels.linear import chunks, cpu
from subquad.kernels.linear.chunks import CHUNK
from subquad.kernels.linear.reference import elu_plus_one
from subquad.kernels.operators import derive
from subquad.kernels.parallel import ready


def room(a: Tensor, v: Tensor) -> Any:
    """Who computes `causal_forward` and `causal_backward` for these features and values."""
    if not a.is_cuda or devices.route("linear", v.dtype, max(a.shape[2], v.shape[2])).impl == "reference":
        return chunks
    from subquad.kernels.linear import gpu

    return gpu


def kernel_sums(
    a: Tensor,
    b: Tensor,
    v: Tensor,
    scales: Tensor | None = None,
    *,
    causal: bool,
    normalise: bool = True,
    elu: bool = False,
) -> Tensor:
    """The sums of the package docstring: a (B, H, n, f), b (B, H, m, f), v (B, H, m, d) → (B, H, n, d).

    `scales` (B, H, m), only for causal sums, must never fall along the sequence and has no gradient. With
    normalise=False the denominator is left out. elu=True: the features are elu(a) + 1 and elu(b) + 1. Half precision is
    computed in float32.
    """
    work = torch.promote_types(v.dtype, torch.float32)
    x, y, z = (ready(t.to(work).flatten(0, 1)) for t in (a, b, v))
    s = None if scales is None else scales.detach().to(work).flatten(0, 1).contiguous()
    out, _ = sums(x, y, z, s, causal, normalise, elu)
    return out.unflatten(0, a.shape[:2]).to(v.dtype)


@torch.library.custom_op("subquad::kernel_sums", mutates_args=())
def sums(
    a: Tensor, b: Tensor, v: Tensor, scales: Tensor | None, causal: bool, normalise: bool, elu: bool
) -> tuple[Tensor, Tensor]:
    """a (G, n, f), b (G, m, f), v (G, m, d) → out (G, n, d) and its denominators (G, n)."""
    if cpu.takes(a, v, scales):
        return cpu.forward(a, b, v, causal, normalise, elu)
    x, y = (elu_plus_one(a), elu_plus_one(b)) if elu else (a, b)
    if causal:
        out, den = room(a, v).causal_forward(x.contiguous(), y.contiguous(), v.contiguous(), scales, normalise)
    else:
        out, den = chunks.whole_forward(x, y, v, normalise)
    return cpu.empty_output(a, v).copy_(out), den


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
    elu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a, b and v."""
    if cpu.takes(a, v, scales):
        return cpu.backward(ready(grad), a, b, v, out, den, causal, normalise, elu)
    x, y = (elu_plus_one(a), elu_plus_one(b)) if elu else (a, b)
    if causal:
        x, y, z = x.contiguous(), y.contiguous(), v.contiguous()
        da, db, dv = room(a, v).causal_backward(grad.contiguous(), x, y, z, scales, out, den, normalise)
    else:
        da, db, dv = chunks.whole_backward(grad, x, y, v, out, den, normalise)
    da, db = (da * x.clamp(max=1), db * y.clamp(max=1)) if elu else (da, db)
    return torch.empty_like(a).copy_(da), torch.empty_like(b).copy_(db), torch.empty_like(v).copy_(dv)


@sums.register_fake
def _(a, b, v, scales, causal, normalise, elu):
    return cpu.empty_output(a, v), v.new_empty(a.shape[:2])


derive(sums, sums_backward, "kernel_sums", of=(0, 1, 2), behind=4, empty=torch.empty_like)


# One multiply-add = 2. A forward multiplies b by v and the sum by a, causal also the pairs of a chunk twice.


@register_flop_formula(torch.ops.subquad.kernel_sums, get_raw=True)
def _flops(a, b, v, scales, causal, *args, out_val=None, **kwargs) -> int:
    (g, n, f), (_, m, d) = a.shape, v.shape
    return 2 * g * ((n + m) * f * d + (n * CHUNK * (f + d) if causal else 0))


@register_flop_formula(torch.ops.subquad.kernel_sums_backward, get_raw=True)
def _backward_flops(grad, a, b, v, scales, out, den, causal, *args, out_val=None, **kwargs) -> int:
    (g, n, f), (_, m, d) = a.shape, v.shape
    return 2 * g * ((2 * n + 3 * m) * f * d + (n * CHUNK * (3 * f + 2 * d) if causal else 0))
