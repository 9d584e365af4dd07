"""Sinkhorn's balancing on a CPU: one matrix after the other, in the cache."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.parallel import exp, inline, kernel, run


def takes(x: Tensor) -> bool:
    return devices.is_host(x) and x.dtype in (torch.float32, torch.float64)


def balanced(logits: Tensor, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    x = logits.clone(memory_format=torch.contiguous_format)
    out, steps = torch.empty_like(x), x.new_empty(len(x), iterations, 2, x.shape[2])
    run(_balance, x.numpy(), steps.numpy(), out.numpy())
    return out, x, steps


def balanced_backward(grad: Tensor, x: Tensor, steps: Tensor) -> Tensor:
    dx = grad.clone(memory_format=torch.contiguous_format)
    run(_backward, x.clone().numpy(), steps.numpy(), dx.numpy())
    return dx


@inline
def _columns(x, top, total):
    """top = the logsumexp of each column of x, which is subtracted."""
    top[:] = x[0]
    for i in range(1, len(x)):
        for j in range(len(top)):
            top[j] = top[j] if top[j] > x[i, j] else x[i, j]  # NaN moves down, and is lost only if a number follows
    total[:] = 0
    for i in range(len(x)):
        for j in range(len(top)):
            total[j] += exp(x[i, j] - top[j])
    for j in range(len(top)):
        top[j] += np.log(total[j])
    for i in range(len(x)):
        for j in range(len(top)):
            x[i, j] -= top[j]


@inline
def _row(row):
    """The logsumexp of a row, which is subtracted."""
    top, total = row[0], row.dtype.type(0)
    for j in range(1, len(row)):
        top = top if top > row[j] else row[j]
    for j in range(len(row)):
        total += exp(row[j] - top)
    top += np.log(total)
    for j in range(len(row)):
        row[j] -= top
    return top


@kernel
def _balance(x, steps, out):
    """x (G, N, N) = the logarithms of out; steps (G, iterations, 2, N)."""
    for g in numba.prange(len(x)):
        total = np.empty(x.shape[2], x.dtype)
        for t in range(steps.shape[1]):
            _columns(x[g], steps[g, t, 0], total)
            for i in range(x.shape[1]):
                steps[g, t, 1, i] = _row(x[g, i])
        for i in range(x.shape[1]):
            for j in range(x.shape[2]):
                out[g, i, j] = exp(x[g, i, j])


@kernel
def _backward(x, steps, dx):
    """dx: the gradient of exp x → that of the logits; x goes back to the logits."""
    for g in numba.prange(len(x)):
        sums = np.empty(x.shape[2], x.dtype)
        for i in range(x.shape[1]):
            for j in range(x.shape[2]):
                dx[g, i, j] *= exp(x[g, i, j])
        for t in range(steps.shape[1] - 1, -1, -1):
            sums[:] = 0
            for i in range(x.shape[1]):
                row, now, total = dx[g, i], x[g, i], x.dtype.type(0)
                for j in range(len(row)):
                    total += row[j]
                back = steps[g, t, 1, i]
                for j in range(len(row)):
                    row[j] -= exp(now[j]) * total
                    sums[j] += row[j]
                    now[j] += back
            for i in range(x.shape[1]):
                row, now = dx[g, i], x[g, i]
                for j in range(len(row)):
                    row[j] -= exp(now[j]) * sums[j]
                    now[j] += steps[g, t, 0, j]
