"""The operators in plain torch: on any device, differentiable any number of times."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # tokens that are convolved together


def gather(scores: Tensor, v: Tensor) -> Tensor:
    return scores.softmax(2).mT @ v


def spread(scores: Tensor, read: Tensor, v: Tensor, filters: Tensor | None) -> Tensor:
    return convolved(scores.softmax(-1) @ read, v, filters)


def convolved(out: Tensor, v: Tensor, filters: Tensor | None) -> Tensor:
    """out + the convolution of v: a block of BLOCK outputs is a product of a band matrix and the values around it."""
    if filters is None:
        return out
    n, taps = v.shape[2], filters.shape[1]
    row, column = torch.arange(BLOCK, device=v.device)[:, None], torch.arange(BLOCK + taps - 1, device=v.device)
    tap = column - row  # (BLOCK, BLOCK + taps - 1)
    band = filters.to(v.dtype)[:, tap.clamp(0, taps - 1)] * ((tap >= 0) & (tap < taps))  # (H, …)
    around = F.pad(v, (0, 0, taps // 2, taps // 2 + -n % BLOCK)).unfold(2, BLOCK + taps - 1, BLOCK)
    mixed = band[:, None] @ around.mT  # (B, H, N, BLOCK, d)
    return out + mixed.flatten(2, 3)[:, :, :n]


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """In float64: rounding errors grow with every step."""
    kind, a = a.dtype, a.double()
    z, eye = first_guess(a), torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z.to(kind)


def first_guess(a: Tensor) -> Tensor:
    """Aᵀ / (‖A‖₁ ‖A‖∞) of matrices (…, m, m) without negative entries."""
    one, inf = a.sum(-2).amax(-1), a.sum(-1).amax(-1)  # the norms
    return a.mT / (one * inf).clamp(min=torch.finfo(a.dtype).tiny)[..., None, None]
