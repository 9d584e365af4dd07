"""Sinkhorn's balancing: the columns and the rows of a matrix are normalised in turn, rows last, in logarithms.

    X ← X - logsumexp of each column,   X ← X - logsumexp of each row,   `iterations` times;   R = exp X

One operator instead of a chain of log_softmax: the matrix stays in the cache, and all that the backward needs is the
last X and what was subtracted, from which it finds every step again. With X normalised, a step backwards is
dX ← dX - exp(X)·(the sum of dX over the same row or column). `cpu` has the kernels; no second derivative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.balancing import cpu
from subquad.kernels.operators import no_second_derivative


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
    run = cpu.balanced if cpu.takes(logits) else balanced._init_fn
    return run(logits, iterations)


@balanced_backward.register_kernel("cpu")
def _(grad, x, steps):
    run = cpu.balanced_backward if cpu.takes(x) else balanced_backward._init_fn
    return run(grad, x, steps)


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
