"""`node_max`: the maxima of `binary_nodes` on a CPU, of several tensors at once; padding is no member.

A block without a member is 0, and a half without one is passed over: nothing is filled in before or cleared behind.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from subquad.kernels.operators import Eager, derive
from subquad.kernels.parallel import Workers, following, inline, keep, matrix, queue, ready
from subquad.kernels.pools.lines import DX, GRAD, OUT, X, address
from subquad.kernels.pools.max_rows import larger_of, pay_half
from subquad.kernels.vector_rows import add_row, fill_row
from subquad.kernels.vectors import scale_row


@torch.library.custom_op("subquad::node_max", mutates_args=(), device_types="cpu")
def node_max(xs: list[Tensor], exists: Tensor | None) -> list[Tensor]:
    """xs (B, H, n, d), exists bool (B, 1, n) → for each a tensor of its shape; see `nodes`."""
    xs = [ready(x) for x in xs]
    outs = [x.new_empty(x.shape) for x in xs]
    table = [matrix(x) + matrix(out) for x, out in zip(xs, outs, strict=True)]
    _pass.run(*_about(xs, exists), np.array(table, dtype=np.int64))
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
    _pass_backward.run(*_about(xs, exists), np.array(table, dtype=np.int64))
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
def _pass(worker, workers, arguments):
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
def _pass_backward(worker, workers, arguments):
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
