"""`fourier_mix`: the real part of the Fourier transform of every row of a batch, along tokens and features.

One operator, because rows of their own length have transforms of their own length. The transform is symmetric and real
on real input, so it is its own derivative.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def fourier_mix(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Re(F_n x F_E), (B, n, E) → (B, n, E); batch element b is lengths[b] tokens long, and 0 behind."""
    work = torch.promote_types(x.dtype, torch.float32)
    return mix(x.to(work), lengths).to(x.dtype)


@torch.library.custom_op("subquad::fourier_mix", mutates_args=())
def mix(x: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return _transformed(x)
    out, sizes = torch.zeros_like(x, memory_format=torch.contiguous_format), lengths.tolist()
    for size in set(sizes) - {0}:
        rows = torch.tensor([b for b, own in enumerate(sizes) if own == size], device=x.device)
        out[rows, :size] = _transformed(x[rows, :size])
    return out


def _transformed(x: Tensor) -> Tensor:
    """Half of the transform is computed: y[i, j] = y[-i, -j] for the real part y of real input."""
    width = x.shape[2]
    half = torch.fft.rfft2(x).real  # (B, n, E // 2 + 1)
    rest = half[:, :, 1 : (width + 1) // 2].flip(1, 2).roll(1, 1)
    return torch.cat((half, rest), 2)


@mix.register_fake
def _(x, lengths):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


def _gradient(ctx, grad):
    return mix(grad, *ctx.saved_tensors), None


mix.register_autograd(_gradient, setup_context=_save)


@register_flop_formula(torch.ops.subquad.fourier_mix, get_raw=True)
def _flops(x, lengths, *args, out_val=None, **kwargs) -> int:
    b, n, width = x.shape
    return int(2.5 * b * n * width * math.log2(max(2, int(n) * int(width))))
