"""`fourier_mix`: the real part of the Fourier transform of every row of a batch, along tokens and features.

One operator, because rows of their own length have transforms of their own length. The transform is symmetric and real
on real input, so it is its own derivative.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.kernels import devices


def fourier_mix(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Re(F_n x F_E), (B, n, E) → (B, n, E); batch element b is lengths[b] tokens long, and 0 behind."""
    work = torch.promote_types(x.dtype, torch.float32)
    return mix(x.to(work), lengths).to(x.dtype)


@torch.library.custom_op("subquad::fourier_mix", mutates_args=())
def mix(x: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return _transformed(x)
    if not devices.is_host(x):
        return _of_any_length(x, lengths)
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


def _of_any_length(x: Tensor, lengths: Tensor) -> Tensor:
    """The same without reading the lengths, which a GPU would have to be waited for: Bluestein's algorithm.

    As jk = (j² + k² - (k-j)²) / 2, a transform of L tokens is a convolution, X_k = w_k Σ_j (x_j w_j) / w_(k-j) with
    w_m = exp(-πi m²/L), and transforms of one length compute those of all rows.
    """
    n = x.shape[1]
    size, place = 1 << (2 * n - 1).bit_length(), torch.arange(n, device=x.device)
    inside = (place < lengths[:, None])[..., None]  # (B, n, 1)
    length = lengths.clamp(min=1)[:, None]
    angle = (place.square() % (2 * length)).double() * math.pi / length  # (B, n): m² modulo the period keeps its digits
    wave, back = (torch.complex(angle.cos(), sine).to(x.dtype.to_complex()) for sine in (-angle.sin(), angle.sin()))
    middle = back.new_zeros(len(x), size - 2 * n + 1)
    around = torch.cat((back, middle, back[:, 1:].flip(1)), 1)  # (B, size): 1 / w_m for m = 0 … n-1, …, -(n-1) … -1
    spectrum = torch.fft.fft(x.masked_fill(~inside, 0), dim=2) * wave[..., None]  # (B, n, E)
    mixed = torch.fft.ifft(torch.fft.fft(spectrum, size, 1) * torch.fft.fft(around)[..., None], dim=1)[:, :n]
    return (mixed * wave[..., None]).real.masked_fill(~inside, 0)


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
