"""`binary_nodes`: all aligned binary blocks with an even number pooled, a Fenwick tree as long as the sequence.

Place p has the block of 2^l tokens that ends with token p, 2^l the largest power of two that divides p+1. It is made of
the token itself and of the nodes at p-1, p-2, p-4 … p-2^(l-1): linear time in all. On a CPU that is one pass; elsewhere
the even places have the tokens themselves, and the odd ones the nodes of the sequence of pairs.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.kernels.parallel import inline, kernel, run


def binary_nodes(x: Tensor, kind: str) -> Tensor:
    """x (B, H, n, d), kind "max" or "sum" → (B, H, n, d)."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return _nodes(x, kind == "max")
    return nodes_of_pairs(x, kind)


def nodes_of_pairs(x: Tensor, kind: str) -> Tensor:
    """The same on any device, in steps over whole tensors."""
    pairs = x.shape[2] // 2
    if pairs == 0:
        return x
    left, right = x[:, :, 0 : 2 * pairs : 2], x[:, :, 1::2]  # (B, H, n // 2, d)
    above = nodes_of_pairs(torch.maximum(left, right) if kind == "max" else left + right, kind)
    interleaved = torch.stack((left, above), 3).flatten(2, 3)
    return interleaved if 2 * pairs == x.shape[2] else torch.cat((interleaved, x[:, :, -1:]), 2)


@torch.library.custom_op("subquad::binary_nodes", mutates_args=(), device_types="cpu")
def _nodes(x: Tensor, is_max: bool) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    run(_pass, x.flatten(0, 1).numpy(), out.flatten(0, 1).numpy(), is_max)
    return out


@torch.library.custom_op("subquad::binary_nodes_backward", mutates_args=(), device_types="cpu")
def _nodes_backward(grad: Tensor, x: Tensor, out: Tensor, is_max: bool) -> Tensor:
    """A maximum pays the half that has it; halves that are equal share."""
    grad, x, out = (t.contiguous() for t in (grad, x, out))
    dx = grad.clone()
    run(_pass_backward, *(t.flatten(0, 1).numpy() for t in (x, out, dx)), is_max)
    return dx


@_nodes.register_fake
def _(x, is_max):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@_nodes_backward.register_fake
def _(grad, x, out, is_max):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx, inputs, output):
    x, ctx.is_max = inputs
    ctx.save_for_backward(x, output)


def _gradient(ctx, grad):
    return _nodes_backward(grad, *ctx.saved_tensors, ctx.is_max), None


def _no_second_derivative(ctx, *grads):
    raise NotImplementedError("binary_nodes has no second derivative")


_nodes.register_autograd(_gradient, setup_context=_save)
_nodes_backward.register_autograd(_no_second_derivative)


@inline
def _larger(x, y):
    return x if x > y or x != x else y


@kernel
def _pass(x, out, is_max):
    instances, n, width = x.shape
    for g in numba.prange(instances):
        for p in range(n):
            for t in range(width):
                out[g, p, t] = x[g, p, t]
            back = 1
            while (p + 1) & back == 0:  # the nodes at p-1, p-2, p-4 … are its left halves, from small to large
                for t in range(width):
                    left, here = out[g, p - back, t], out[g, p, t]
                    out[g, p, t] = _larger(left, here) if is_max else left + here
                back *= 2


@kernel
def _pass_backward(x, out, dx, is_max):
    """dx begins as the gradient of out; what a node owes to its halves is paid from the last node to the first."""
    instances, n, width = x.shape
    half, zero = x.dtype.type(0.5), x.dtype.type(0)
    for g in numba.prange(instances):
        right = np.empty((64, width), x.dtype)  # the right halves of a node, from small to large
        for p in range(n - 1, -1, -1):
            levels = 0
            while (p + 1) & (1 << levels) == 0:
                levels += 1
            for t in range(width):
                right[0, t] = x[g, p, t]
            for level in range(1, levels):
                for t in range(width):
                    right[level, t] = _larger(out[g, p - (1 << (level - 1)), t], right[level - 1, t])
            for level in range(levels - 1, -1, -1):
                at = p - (1 << level)
                for t in range(width):
                    owed, left, other = dx[g, p, t], out[g, at, t], right[level, t]
                    if is_max:
                        share = half * owed if left == other else (owed if left > other else zero)
                        dx[g, at, t] += share
                        dx[g, p, t] = owed - share
                    else:
                        dx[g, at, t] += owed
