"""`binary_nodes`: all aligned binary blocks with an even number pooled, a Fenwick tree as long as the sequence.

Place p has the block of 2^l tokens that ends with token p, 2^l the largest power of two that divides p+1. It is made of
the token itself and of the nodes at p-1, p-2, p-4 … p-2^(l-1): linear time in all. On a CPU sums are one pass, and so
are maxima (`node_max`), of several tensors at once: a block without a member is 0, and a half without one is passed
over, so that nothing is filled in before or cleared behind. Elsewhere the even places have the tokens themselves, and
the odd ones the nodes of the sequence of pairs.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.operators import Eager, derive, no_second_derivative
from subquad.kernels.parallel import Workers, following, inline, keep, kernel, matrix, queue, ready, run
from subquad.kernels.pools.lines import DX, GRAD, OUT, X, address
from subquad.kernels.pools.max_rows import larger_of, pay_half
from subquad.kernels.vector_rows import add_row, fill_row
from subquad.kernels.vectors import scale_row


def binary_nodes(x: Tensor, kind: str) -> Tensor:
    """x (B, H, n, d), kind "max" or "sum" → (B, H, n, d)."""
    if kind == "sum" and devices.is_host(x) and x.dtype in (torch.float32, torch.float64):
        return _nodes(x)
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
def _nodes(x: Tensor) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    run(_pass, out.flatten(0, 1).numpy())
    return out


@torch.library.custom_op("subquad::binary_nodes_backward", mutates_args=(), device_types="cpu")
def _nodes_backward(grad: Tensor) -> Tensor:
    dx = grad.clone(memory_format=torch.contiguous_format)
    run(_pass_backward, dx.flatten(0, 1).numpy())
    return dx


@_nodes.register_fake
@_nodes_backward.register_fake
def _(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _gradient(ctx, grad):
    return _nodes_backward(grad)


_nodes.register_autograd(_gradient)
_nodes_backward.register_autograd(no_second_derivative("binary_nodes"))


@kernel
def _pass(out):
    """out begins as the tokens."""
    instances, n, width = out.shape
    for g in numba.prange(instances):
        for p in range(n):
            back = 1
            while (p + 1) & back == 0:  # the nodes at p-1, p-2, p-4 … are its left halves, from small to large
                for t in range(width):
                    out[g, p, t] += out[g, p - back, t]
                back *= 2


@kernel
def _pass_backward(dx):
    """dx begins as the gradient of the nodes, which they hand to their halves, from the last node to the first."""
    instances, n, width = dx.shape
    for g in numba.prange(instances):
        for p in range(n - 1, -1, -1):
            back = 1
            while (p + 1) & back == 0:
                for t in range(width):
                    dx[g, p - back, t] += dx[g, p, t]
                back *= 2


@torch.library.custom_op("subquad::node_max", mutates_args=(), device_types="cpu")
def node_max(xs: list[Tensor], exists: Tensor | None) -> list[Tensor]:
    """xs (B, H, n, d), exists bool (B, 1, n) → for each a tensor of its shape; see `nodes`."""
    xs = [ready(x) for x in xs]
    outs = [x.new_empty(x.shape) for x in xs]
    table = [matrix(x) + matrix(out) for x, out in zip(xs, outs, strict=True)]
    _max_pass.run(*_about(xs, exists), np.array(table, dtype=np.int64))
    return outs


@torch.library.custom_op("subquad::node_max_backward", mutates_args=(), device_types="cpu")
def _node_max_backward(
    grads: list[Tensor], xs: list[Tensor], outs: list[Tensor], exists: Tensor | None
) -> list[Tensor]:
    """A maximum pays the half that has it; halves that are equal share."""
    grads, xs = [ready(g) for g in grads], [ready(x) for x in xs]
    changes = [x.new_empty(x.shape) for x in xs]
    every = zip(xs, outs, grads, changes, strict=True)
    table = [[number for x in four for number in matrix(x)] for four in every]
    _max_pass_backward.run(*_about(xs, exists), np.array(table, dtype=np.int64))
    return changes


@node_max.register_fake
def _(xs, exists):
    return [x.new_empty(x.shape) for x in xs]


_paid = Eager(_node_max_backward, _node_max_backward._init_fn)
_derivative = derive(node_max, _node_max_backward, "node_max", of=(0,), behind=1, call=_paid)
eager_node_max = Eager(node_max, node_max._init_fn, *_derivative)


def _about(xs: list[Tensor], exists: Tensor | None) -> tuple:
    x = xs[0]
    like, real = np.zeros(1, x.numpy().dtype), np.zeros((1, 0), dtype=bool)
    if exists is not None:
        real = np.ascontiguousarray(exists[:, 0].numpy())
    tasks = len(xs) * len(x) * x.shape[1]
    return like, x.element_size(), x.shape[3], x.shape[1], x.shape[2], tasks, queue(), real


# ---- kernels ------------------------------------------------------------------------------------------------


@inline
def _find_alive(real, b, n, alive):
    """Which nodes have a member."""
    for p in range(n):
        found, back = real.shape[1] == 0 or real[b % len(real), p], 1
        while (p + 1) & back == 0:
            found = found or alive[p - back]
            back *= 2
        alive[p] = found


@Workers
def _max_pass(worker, workers, arguments):
    """A task is a head of a tensor: the nodes at p-1, p-2, p-4 … are the left halves of p, from small to large."""
    like, size, width, heads, n, tasks, queue, real, matrices = arguments[0]
    zero, one, instances = like.dtype.type(0), like.dtype.type(1), tasks // len(matrices)
    alive = np.empty(n, np.bool_)
    for _ in range(tasks):
        task = following(queue.ctypes.data)
        if task >= tasks:
            break
        t, b, h = task // instances, task % instances // heads, task % instances % heads
        _find_alive(real, b, n, alive)
        for p in range(n):
            out, here = address(matrices, t, OUT, b, h, p, size), 0
            if not alive[p]:
                fill_row(zero, out, width)
                continue
            if real.shape[1] == 0 or real[b % len(real), p]:
                here = address(matrices, t, X, b, h, p, size)  # the maximum so far: of the token alone
            back = 1
            while (p + 1) & back == 0:
                if alive[p - back]:
                    left = address(matrices, t, OUT, b, h, p - back, size)
                    if here == 0:
                        here = left
                    else:
                        larger_of(one, left, here, out, 0, 0, width)
                        here = out
                back *= 2
            if here != out:
                scale_row(one, out, here, width)
    keep(alive)


@Workers
def _max_pass_backward(worker, workers, arguments):
    """What a node owes to its halves is paid from the last node to the first."""
    like, size, width, heads, n, tasks, queue, real, matrices = arguments[0]
    zero, one, instances = like.dtype.type(0), like.dtype.type(1), tasks // len(matrices)
    alive, partial = np.empty(n, np.bool_), np.empty((64, width), like.dtype)
    rights = np.empty(65, np.int64)  # the right halves of a node, from small to large; 0 = without a member
    for _ in range(tasks):
        task = following(queue.ctypes.data)
        if task >= tasks:
            break
        t, b, h = task // instances, task % instances // heads, task % instances % heads
        _find_alive(real, b, n, alive)
        for p in range(n):
            from_, dx = address(matrices, t, GRAD, b, h, p, size), address(matrices, t, DX, b, h, p, size)
            if alive[p]:
                scale_row(one, dx, from_, width)
            else:
                fill_row(zero, dx, width)
        for p in range(n - 1, -1, -1):
            member, levels = real.shape[1] == 0 or real[b % len(real), p], 0
            rights[0] = address(matrices, t, X, b, h, p, size) if member else 0
            while (p + 1) & (1 << levels) == 0:
                at = p - (1 << levels)
                rights[levels + 1] = rights[levels]
                if alive[at] and (p + 1) & (2 << levels) == 0:  # nobody asks for the largest
                    left, here = address(matrices, t, OUT, b, h, at, size), partial.ctypes.data + levels * width * size
                    if rights[levels] == 0:
                        rights[levels + 1] = left
                    else:
                        larger_of(one, left, rights[levels], here, 0, 0, width)
                        rights[levels + 1] = here
                levels += 1
            dx = address(matrices, t, DX, b, h, p, size)
            for level in range(levels - 1, -1, -1):
                at = p - (1 << level)
                if alive[at]:
                    left, to = address(matrices, t, OUT, b, h, at, size), address(matrices, t, DX, b, h, at, size)
                    if rights[level] == 0:
                        add_row(one, to, dx, width)
                        fill_row(zero, dx, width)
                    else:
                        pay_half(one, left, rights[level], to, dx, 0, width)
    keep(alive, partial)
