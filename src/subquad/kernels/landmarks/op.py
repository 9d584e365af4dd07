"""The operators of the landmarks: entrances, schemas, shapes, derivatives, FLOPs."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.kernels import devices
from subquad.kernels.landmarks import cpu, reference
from subquad.kernels.landmarks.cpu import takes
from subquad.kernels.operators import derive, no_second_derivative
from subquad.kernels.parallel import ready

__all__ = ["gather", "maps_tokens", "pseudo_inverse", "spread", "takes"]


def gather(scores: Tensor, v: Tensor) -> Tensor:
    """scores (B, H, n, m), v (B, H, n, d) → (B, H, m, d): one softmax per landmark, over all tokens."""
    return gather_op(ready(scores), ready(v))[0] if takes(scores, v) else reference.gather(scores, v)


def spread(scores: Tensor, read: Tensor, v: Tensor, filters: Tensor | None) -> Tensor:
    """scores (B, H, n, m), read (B, H, m, d), v (B, H, n, d), filters (H, taps) or None → (B, H, n, d): one softmax per
    token, over all landmarks, plus the convolution of v."""
    if not takes(scores, v):
        return reference.spread(scores, read, v, filters)
    filters = v.new_empty(v.shape[1], 0) if filters is None else filters.to(v.dtype)
    return spread_op(ready(scores), read.contiguous(), ready(v), filters.contiguous())


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """a (B, H, m, m) without negative entries → (B, H, m, m); rows and columns of 0 stay 0."""
    if not devices.is_host(a) or a.shape[-1] % 4:
        return reference.pseudo_inverse(a, iterations)
    return inverse_op(a.double().flatten(0, 1), iterations)[:, -1].view_as(a).to(a.dtype)


def maps_tokens(x: Tensor) -> bool:
    """Should tokens x (B, n, E) be mapped to their scores at once, instead of to queries and keys first? The products
    are larger and fewer, which pays on a CPU; the kernels of other devices and of autocast take queries and keys.
    """
    return devices.is_host(x) and not torch.is_autocast_enabled("cpu")


@torch.library.custom_op("subquad::landmarks_gather", mutates_args=(), device_types="cpu")
def gather_op(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What is gathered, and the logsumexps of the landmarks (B·H, m)."""
    return cpu.gather(scores, v)


@torch.library.custom_op("subquad::landmarks_gather_backward", mutates_args=(), device_types="cpu")
def gather_backward(grad: Tensor, scores: Tensor, v: Tensor, read: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return cpu.gather_backward(grad, scores, v, read, lse)


@torch.library.custom_op("subquad::landmarks_spread", mutates_args=(), device_types="cpu")
def spread_op(scores: Tensor, read: Tensor, v: Tensor, filters: Tensor) -> Tensor:
    return cpu.spread(scores, read, v, filters)


@torch.library.custom_op("subquad::landmarks_spread_backward", mutates_args=(), device_types="cpu")
def spread_backward(
    grad: Tensor, scores: Tensor, read: Tensor, v: Tensor, filters: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return cpu.spread_backward(ready(grad), scores, read, v, filters)


@torch.library.custom_op("subquad::landmarks_inverse", mutates_args=(), device_types="cpu")
def inverse_op(a: Tensor, iterations: int) -> Tensor:
    """float64 (G, m, m) → all steps (G, iterations + 1, m, m), the first guess among them."""
    return cpu.inverse(a, iterations)


@torch.library.custom_op("subquad::landmarks_inverse_backward", mutates_args=(), device_types="cpu")
def inverse_backward(grad: Tensor, a: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    return cpu.inverse_backward(grad, a, steps)


@gather_op.register_fake
def _(scores, v):
    b, h, _, m = scores.shape
    return v.new_empty(b, h, m, v.shape[3]), v.new_empty(b * h, m)


@spread_op.register_fake
def _(scores, read, v, filters):
    return torch.empty_like(v)


@inverse_op.register_fake
def _(a, iterations):
    return a.new_empty(a.shape[0], iterations + 1, *a.shape[1:])


@inverse_backward.register_fake
def _(grad, a, steps):
    return torch.empty_like(a), grad.new_empty(grad.shape)


# ---- derivatives ----


def _save_inverse(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output)


def _inverse_gradient(ctx, grad):
    """Only the last step is ever used."""
    a, steps = ctx.saved_tensors
    da, dz = inverse_backward(grad[:, -1], a, steps)
    with torch.enable_grad():
        x = a.detach().requires_grad_()
        (more,) = torch.autograd.grad(reference.first_guess(x), x, dz)
    return da + more, None


derive(gather_op, gather_backward, "gather", of=(0, 1), behind=2, empty=torch.empty_like)
derive(spread_op, spread_backward, "spread", of=(0, 1, 2, 3), behind=4, kept=slice(0), empty=torch.empty_like)
inverse_op.register_autograd(_inverse_gradient, setup_context=_save_inverse)
inverse_backward.register_autograd(no_second_derivative("pseudo_inverse"))


# ---- FLOPs: one multiply-add = 2 ----


@register_flop_formula(torch.ops.subquad.landmarks_gather)
def _gather_flops(scores_shape, v_shape, *args, **kwargs) -> int:
    return 2 * prod(scores_shape) * v_shape[3]


@register_flop_formula(torch.ops.subquad.landmarks_gather_backward)
def _gather_backward_flops(grad_shape, scores_shape, v_shape, *args, **kwargs) -> int:
    return 4 * prod(scores_shape) * v_shape[3]


@register_flop_formula(torch.ops.subquad.landmarks_spread)
def _spread_flops(scores_shape, read_shape, v_shape, filters_shape, *args, **kwargs) -> int:
    return 2 * prod(scores_shape) * v_shape[3] + 2 * prod(v_shape) * filters_shape[1]


@register_flop_formula(torch.ops.subquad.landmarks_spread_backward)
def _spread_backward_flops(grad_shape, scores_shape, read_shape, v_shape, filters_shape, *args, **kwargs) -> int:
    return 2 * _spread_flops(scores_shape, read_shape, v_shape, filters_shape)


@register_flop_formula(torch.ops.subquad.landmarks_inverse)
def _inverse_flops(a_shape, iterations, *args, **kwargs) -> int:
    return 8 * iterations * prod(a_shape) * a_shape[2]


@register_flop_formula(torch.ops.subquad.landmarks_inverse_backward)
def _inverse_backward_flops(grad_shape, a_shape, steps_shape, *args, **kwargs) -> int:
    return 22 * (steps_shape[1] - 1) * prod(a_shape) * a_shape[2]
