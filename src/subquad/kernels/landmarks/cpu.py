"""The tensors' way to the kernels of `cpu_tiles`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from subquad.kernels.landmarks import cpu_tiles as kernels
from subquad.kernels.landmarks.reference import first_guess
from subquad.kernels.parallel import fits, matrix


def takes(scores: Tensor, v: Tensor) -> bool:
    """Are there vectors of this type and these widths?"""
    return fits(scores, v) and scores.dtype == v.dtype


def gather(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    (b, h, _, m), d = scores.shape, v.shape[3]
    read, lse = v.new_empty(b * h, m, d), v.new_empty(b * h, m)
    kernels.gather.run(*_about(scores, v), matrix(scores), matrix(v), read.numpy(), lse.numpy())
    return read.view(b, h, m, d), lse


def gather_backward(grad: Tensor, scores: Tensor, v: Tensor, read: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    grad = grad.flatten(0, 1).contiguous()
    delta = (grad * read.flatten(0, 1)).sum(-1)  # (G, m)
    dscores, dv = torch.empty_like(scores), torch.empty_like(v)
    kernels.gather_backward.run(
        *_about(scores, v), matrix(scores), matrix(v), grad.numpy(), delta.numpy(), lse.numpy(), matrix(dscores),
        matrix(dv),
    )  # fmt: skip
    return dscores, dv


def spread(scores: Tensor, read: Tensor, v: Tensor, filters: Tensor) -> Tensor:
    out = torch.empty_like(v)
    kernels.spread.run(
        *_about(scores, v), matrix(scores), read.flatten(0, 1).numpy(), matrix(v), filters.numpy(), matrix(out)
    )
    return out


def spread_backward(
    grad: Tensor, scores: Tensor, read: Tensor, v: Tensor, filters: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, taps = read.flatten(0, 1), filters.shape[1]
    dscores, dread, dfilters = torch.empty_like(scores), torch.empty_like(rows), v.new_empty(len(rows), taps)
    dv = torch.empty_like(v) if taps else torch.zeros_like(v)
    kernels.spread_backward.run(
        *_about(scores, v), matrix(scores), rows.numpy(), matrix(v), filters.numpy(), matrix(grad),
        matrix(dscores), dread.numpy(), matrix(dv), dfilters.numpy(),
    )  # fmt: skip
    return dscores, dread.view(read.shape), dv, dfilters.unflatten(0, read.shape[:2]).sum(0)


def inverse(a: Tensor, iterations: int) -> Tensor:
    """a float64 (G, m, m) → all steps (G, iterations + 1, m, m)."""
    steps = a.new_empty(len(a), iterations + 1, *a.shape[1:])
    steps[:, 0] = first_guess(a)
    kernels.inverse.run(np.zeros(1), a.contiguous().numpy(), steps.numpy())
    return steps


def inverse_backward(grad: Tensor, a: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a, but for what it gave to the first guess, and of the first guess."""
    da, dz = torch.empty_like(a), grad.clone(memory_format=torch.contiguous_format)
    kernels.inverse_backward.run(np.zeros(1), a.contiguous().numpy(), steps.numpy(), da.numpy(), dz.numpy())
    return da, dz


def _about(scores: Tensor, v: Tensor) -> tuple[np.ndarray, int, tuple[int, ...]]:
    """0, bytes of an entry, (B, H, n, m, d)"""
    return np.zeros(1, v.numpy().dtype), v.element_size(), (*scores.shape, v.shape[3])
