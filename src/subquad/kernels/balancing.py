"""Sinkhorn's balancing: the columns and the rows of a matrix are normalised in turn, rows last, in logarithms.

    X ← X - logsumexp of each column,   X ← X - logsumexp of each row,   `iterations` times;   R = exp X

One operator instead of a chain of log_softmax: the matrix stays in the cache, and all that the backward needs is the
last X and what was subtracted, from which it finds every step again. With X normalised, a step backwards is
dX ← dX - exp(X)·(the sum of dX over the same row or column). No second derivative.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.kernels.operators import no_second_derivative
from subquad.kernels.parallel import exp, inline, kernel, run

KERNELS = (torch.float32, torch.float64)  # the dtypes that there are kernels for


def balance(logits: Tensor, iterations: int) -> Tensor:
    """logits (…, N, N), rows × columns → R (…, N, N)."""
    return balanced(logits.flatten(0, -3), iterations)[0].view_as(logits)


@torch.library.custom_op("subquad::balance", mutates_args=())
def balanced(logits: Tensor, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits (G, N, N) → R, X (G, N, N), and what was subtracted (G, iterations, 2, N), columns and rows."""
    x, steps = logits.clone(memory_format=torch.contiguous_format), []
    for _ in range(iterations):
        for dim in (1, 2):
            steps.append(x.logsumexp(dim, keepdim=True))
            x -= steps[-1]
    return x.exp(), x, torch.stack([step.flatten(1) for step in steps], 1).unflatten(1, (-1, 2))


@torch.library.custom_op("subquad::balance_backward", mutates_args=())
def balanced_backward(grad: Tensor, x: Tensor, steps: Tensor) -> Tensor:
    now, dx = x.clone(), grad * x.exp()
    for step in reversed(steps.unbind(1)):  # (G, 2, N)
        for dim in (2, 1):
            dx -= now.exp() * dx.sum(dim, keepdim=True)
            now += step[:, dim - 1].unsqueeze(dim)
    return dx


@balanced.register_kernel("cpu")
def _(logits, iterations):
    if logits.dtype not in KERNELS:
        return balanced._init_fn(logits, iterations)
    x = logits.clone(memory_format=torch.contiguous_format)
    out, steps = torch.empty_like(x), x.new_empty(len(x), iterations, 2, x.shape[2])
    run(_balance_kernel, x.numpy(), steps.numpy(), out.numpy())
    return out, x, steps


@balanced_backward.register_kernel("cpu")
def _(grad, x, steps):
    if x.dtype not in KERNELS:
        return balanced_backward._init_fn(grad, x, steps)
    dx = grad.clone(memory_format=torch.contiguous_format)
    run(_backward_kernel, x.clone().numpy(), steps.numpy(), dx.numpy())
    return dx


@balanced.register_fake
def _(logits, iterations):
    like = logits.new_empty(logits.shape)
    return like, torch.empty_like(like), logits.new_empty(len(logits), iterations, 2, logits.shape[2])


@balanced_backward.register_fake
def _(grad, x, steps):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gradient(ctx, grad, *others):
    return balanced_backward(grad, *ctx.saved_tensors), None


balanced.register_autograd(_gradient, setup_context=_save)
balanced_backward.register_autograd(no_second_derivative("balance"))


# ---- on a CPU: one matrix after the other, in the cache ---------------------------------------------------


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
def _balance_kernel(x, steps, out):
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
def _backward_kernel(x, steps, dx):
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
