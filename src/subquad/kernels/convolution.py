"""`convolve`: a depthwise convolution along the sequence, one filter per head.

    out_i = plus_i + Σ_t f_t x_(i + t - T // 2)          f (H, T), T odd; 0 beyond both ends

On a CPU one pass over rows where they stand (heads of one projection beside each other, say), so that nothing is
padded, unfolded or transposed. Elsewhere a block of outputs is the product of a band matrix and the rows around it.
Both gradients are convolutions again, so every derivative exists.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.kernels.parallel import kernel, run

BLOCK = 64  # rows that are convolved together


def convolve(x: Tensor, filters: Tensor, plus: Tensor) -> Tensor:
    """x and plus (B, H, n, d), filters (H, T) → (B, H, n, d), all of one dtype."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return _convolve(_ready(x), filters.contiguous(), _ready(plus))
    return plus + banded(x, filters)


def banded(x: Tensor, filters: Tensor) -> Tensor:
    """The same without `plus`, on any device."""
    n, taps = x.shape[2], filters.shape[1]
    row, column = torch.arange(BLOCK, device=x.device)[:, None], torch.arange(BLOCK + taps - 1, device=x.device)
    tap = column - row  # (BLOCK, BLOCK + taps - 1)
    band = filters[:, tap.clamp(0, taps - 1)] * ((tap >= 0) & (tap < taps))  # (H, BLOCK, BLOCK + taps - 1)
    around = F.pad(x, (0, 0, taps // 2, taps // 2 + -n % BLOCK)).unfold(2, BLOCK + taps - 1, BLOCK)
    return (band[:, None] @ around.mT).flatten(2, 3)[:, :, :n]  # (B, H, N, BLOCK, d) → (B, H, n, d)


def _ready(x: Tensor) -> Tensor:
    """With the entries of a row side by side."""
    return x if x.stride(3) == 1 else x.contiguous()


@torch.library.custom_op("subquad::convolve", mutates_args=(), device_types="cpu")
def _convolve(x: Tensor, filters: Tensor, plus: Tensor | None) -> Tensor:
    out = torch.empty_like(x)  # in the order of the memory of x
    given = out if plus is None else plus
    run(_pass, tuple(x.shape), *_flat(x), filters.numpy(), *_flat(given), plus is not None, *_flat(out))
    return out


@torch.library.custom_op("subquad::convolve_filters", mutates_args=(), device_types="cpu")
def _convolve_filters(grad: Tensor, x: Tensor, taps: int) -> Tensor:
    """The gradient of the filters, (H, taps): Σ_i grad_i·x_(i + t - taps // 2)."""
    batch, heads, n, _ = x.shape
    parts = torch.zeros(batch, heads, -(-n // BLOCK), taps, dtype=x.dtype)
    run(_filter_pass, tuple(x.shape), *_flat(grad), *_flat(x), parts.numpy())
    return parts.sum((0, 2))


def _flat(x: Tensor) -> tuple[np.ndarray, tuple[int, ...]]:
    """The memory of x as a line, and how far the batch, the heads and the rows are apart on it."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    line = x.detach().as_strided((reach if x.numel() else 0,), (1,))
    return line.numpy(), x.stride()[:3]


@_convolve.register_fake
def _(x, filters, plus):
    return torch.empty_like(x)


@_convolve_filters.register_fake
def _(grad, x, taps):
    return x.new_empty(x.shape[1], taps)


def _save(ctx, inputs, output):
    x, filters, plus = inputs
    ctx.save_for_backward(x, filters)
    ctx.has_plus = plus is not None


def _gradient(ctx, grad):
    x, filters = ctx.saved_tensors
    ready = _ready(grad)
    dx = _convolve(ready, filters.flip(1), None) if ctx.needs_input_grad[0] else None
    df = _convolve_filters(ready, x, filters.shape[1]) if ctx.needs_input_grad[1] else None
    return dx, df, grad if ctx.has_plus else None


def _save_filters(ctx, inputs, output):
    grad, x, ctx.taps = inputs
    ctx.save_for_backward(grad, x)


def _gradient_of_filters(ctx, change):
    grad, x = ctx.saved_tensors
    return _convolve(x, change.contiguous(), None), _convolve(grad, change.flip(1), None), None


_convolve.register_autograd(_gradient, setup_context=_save)
_convolve_filters.register_autograd(_gradient_of_filters, setup_context=_save_filters)


@register_flop_formula(torch.ops.subquad.convolve)
def _flops(x_shape, filters_shape, *args, out_shape=None, **kwargs) -> int:
    return 2 * x_shape.numel() * filters_shape[1]


@register_flop_formula(torch.ops.subquad.convolve_filters)
def _filter_flops(grad_shape, x_shape, taps, *args, out_shape=None, **kwargs) -> int:
    return 2 * x_shape.numel() * taps


# ---- the loops ----


@kernel
def _pass(shape, x, x_steps, filters, plus, plus_steps, has_plus, out, out_steps):
    batch, heads, n, width = shape
    taps, blocks = filters.shape[1], (n + BLOCK - 1) // BLOCK
    for task in numba.prange(batch * heads * blocks):
        b, h, first = task // (heads * blocks), task // blocks % heads, task % blocks * BLOCK
        total = np.empty(width, x.dtype)
        for i in range(first, min(n, first + BLOCK)):
            if has_plus:
                at = b * plus_steps[0] + h * plus_steps[1] + i * plus_steps[2]
                for c in range(width):
                    total[c] = plus[at + c]
            else:
                total[:] = 0
            low, high = max(0, taps // 2 - i), min(taps, n - i + taps // 2)  # taps that reach a row
            row, step = b * x_steps[0] + h * x_steps[1] + (i + low - taps // 2) * x_steps[2], x_steps[2]
            whole = low + (high - low) // 4 * 4
            for t in range(low, whole, 4):  # four rows at a time: the sums are loaded and stored once
                f0, f1, f2, f3 = filters[h, t], filters[h, t + 1], filters[h, t + 2], filters[h, t + 3]
                r1, r2, r3 = row + step, row + 2 * step, row + 3 * step
                for c in range(width):
                    total[c] += f0 * x[row + c] + f1 * x[r1 + c] + f2 * x[r2 + c] + f3 * x[r3 + c]
                row += 4 * step
            for t in range(whole, high):
                for c in range(width):
                    total[c] += filters[h, t] * x[row + c]
                row += step
            at = b * out_steps[0] + h * out_steps[1] + i * out_steps[2]
            for c in range(width):
                out[at + c] = total[c]


@kernel
def _filter_pass(shape, grad, grad_steps, x, x_steps, parts):
    batch, heads, n, width = shape
    taps, blocks = parts.shape[3], parts.shape[2]
    for task in numba.prange(batch * heads * blocks):
        b, h, block = task // (heads * blocks), task // blocks % heads, task % blocks
        for i in range(block * BLOCK, min(n, block * BLOCK + BLOCK)):
            at = b * grad_steps[0] + h * grad_steps[1] + i * grad_steps[2]
            for t in range(max(0, taps // 2 - i), min(taps, n - i + taps // 2)):
                row = b * x_steps[0] + h * x_steps[1] + (i + t - taps // 2) * x_steps[2]
                total = x.dtype.type(0)
                for c in range(width):
                    total += grad[at + c] * x[row + c]
                parts[b, h, block, t] += total
