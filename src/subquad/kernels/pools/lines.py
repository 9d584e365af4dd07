"""`line_max`: maxima along the lines of a grid, its rows or its columns, on a CPU.

Of every token either the maximum up to and including itself, from either end, or that of all others on its line. One
pass over memory (two over what is in the cache), wherever the tokens stand: nothing is cut, filled up or copied before.
Padding is no member, and what has no member is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.operators import Eager, derive
from subquad.kernels.parallel import Workers, following, inline, keep, matrix, queue, ready
from subquad.kernels.pools.max_rows import (
    gather_shares,
    others_row,
    pay_shares,
    running_gradient,
    running_row,
    two_largest,
)
from subquad.kernels.vector_rows import add_row, fill_row

WIDE = 8  # neighbouring columns that are walked together: their tokens stand side by side
X, OUT, GRAD, DX = 0, 4, 8, 12  # where a row of the table of matrices has what


def takes(xs: Sequence[Tensor]) -> bool:
    """On a CPU, of a type that has vectors?"""
    x = xs[0]
    return devices.is_host(x) and x.dtype in (torch.float32, torch.float64) and x.numel() > 0


@torch.library.custom_op("subquad::line_max", mutates_args=(), device_types="cpu")
def line_max(
    xs: list[Tensor], exists: Tensor | None, rows: int, cols: int, down: bool, running: bool, backwards: bool
) -> list[Tensor]:
    """xs (B, H, n, d), exists bool (B, 1, n) → for each a tensor (B, H, rows·cols, d), places row by row.

    `down`: along the columns, else along the rows; `running`: up to and including oneself (`backwards`: from oneself
    on), else all others.
    """
    xs = [ready(x) for x in xs]
    outs = [x.new_empty(*x.shape[:2], rows * cols, x.shape[3]) for x in xs]
    table = [matrix(x) + matrix(out) for x, out in zip(xs, outs, strict=True)]
    kernel = _running if running else _others
    kernel.run(*_about(xs, exists, rows, cols, down, backwards), np.array(table, dtype=np.int64))
    return outs


@torch.library.custom_op("subquad::line_max_backward", mutates_args=(), device_types="cpu")
def _line_max_backward(
    grads: list[Tensor],
    xs: list[Tensor],
    outs: list[Tensor],
    exists: Tensor | None,
    rows: int,
    cols: int,
    down: bool,
    running: bool,
    backwards: bool,
) -> list[Tensor]:
    """The latest of those that have a running maximum is paid for it; of others those who are equal share."""
    grads, xs = [ready(g) for g in grads], [ready(x) for x in xs]
    changes = [x.new_empty(x.shape) for x in xs]
    for dx in changes:
        dx[:, :, rows * cols :] = 0  # in no line
    every = zip(xs, outs, grads, changes, strict=True)
    table = [[number for x in four for number in matrix(x)] for four in every]
    kernel = _running_backward if running else _others_backward
    kernel.run(*_about(xs, exists, rows, cols, down, backwards), np.array(table, dtype=np.int64))
    return changes


@line_max.register_fake
def _(xs, exists, rows, cols, *about):
    return [x.new_empty(*x.shape[:2], rows * cols, x.shape[3]) for x in xs]


_paid = Eager(_line_max_backward, _line_max_backward._init_fn)
_derivative = derive(line_max, _line_max_backward, "line_max", of=(0,), behind=1, call=_paid)
eager_line_max = Eager(line_max, line_max._init_fn, *_derivative)


# ---- arguments ----------------------------------------------------------------------------------------------


def _about(xs: list[Tensor], exists: Tensor | None, rows: int, cols: int, down: bool, backwards: bool) -> tuple:
    """What every kernel is given first; `nobody` is the maximum of no one."""
    x = xs[0]
    like, real = np.zeros(1, x.numpy().dtype), np.zeros((1, 0), dtype=bool)
    if exists is not None:
        real = np.ascontiguousarray(exists[:, 0].numpy())
    nobody = -np.inf if exists is None and rows * cols <= x.shape[2] else 0.0
    lines, apart, length, wide = (cols, cols, rows, WIDE) if down else (rows, 1, cols, 1)
    packs = -(-lines // wide)
    tasks = len(xs) * len(x) * x.shape[1] * packs
    kind = (like, x.element_size(), x.shape[3], x.shape[1], x.shape[2])
    shape = (packs, lines, 1 if down else cols, -apart if backwards else apart, length, wide)
    return (*kind, tasks, queue(), *shape, real, float(nobody))


# ---- kernels ------------------------------------------------------------------------------------------------


@inline
def address(matrices, t, which, b, h, place, size):
    """The address of a token."""
    m = matrices[t]
    return m[which] + (b * m[which + 1] + h * m[which + 2] + place * m[which + 3]) * size


@inline
def _is_member(real, b, place, n):
    return place < n and (real.shape[1] == 0 or real[b % len(real), place])


@inline
def _pack(task, instances, heads, packs, lines, beside, wide):
    """(tensor, batch element, head, its first line, where that begins, how many lines)."""
    pack, g = task % packs, task // packs % instances
    first = pack * wide
    return task // packs // instances, g // heads, g % heads, first * beside, min(wide, lines - first)


@Workers
def _running(worker, workers, arguments):
    """A task is a pack of neighbouring lines of one head of one tensor."""
    (like, size, width, heads, n, tasks, queue, packs, lines, beside, apart, length, wide, real, nobody,
     matrices) = arguments[0]  # fmt: skip
    lowest, nobody = like.dtype.type(-np.inf), like.dtype.type(nobody)
    instances = tasks // packs // len(matrices)
    so_far = np.empty((wide, width), like.dtype)
    for _ in range(tasks):
        task = following(queue.ctypes.data)
        if task >= tasks:
            break
        t, b, h, start, many = _pack(task, instances, heads, packs, lines, beside, wide)
        start += max(0, -apart) * (length - 1)  # backwards: the end of the line
        fill_row(lowest, so_far.ctypes.data, wide * width)
        for step in range(length):
            for w in range(many):
                place, top = start + w * beside + step * apart, so_far.ctypes.data + w * width * size
                x = address(matrices, t, X, b, h, place, size) if _is_member(real, b, place, n) else top
                running_row(nobody, top, x, address(matrices, t, OUT, b, h, place, size), 0, 0, width)
    keep(so_far)


@Workers
def _running_backward(worker, workers, arguments):
    (like, size, width, heads, n, tasks, queue, packs, lines, beside, apart, length, wide, real, _nobody,
     matrices) = arguments[0]  # fmt: skip
    zero, one = like.dtype.type(0), like.dtype.type(1)
    instances = tasks // packs // len(matrices)
    pending = np.empty((wide, width), like.dtype)  # what later maxima owe to a token not yet met
    for _ in range(tasks):
        task = following(queue.ctypes.data)
        if task >= tasks:
            break
        t, b, h, start, many = _pack(task, instances, heads, packs, lines, beside, wide)
        start += max(0, -apart) * (length - 1)  # backwards: the end of the line
        fill_row(zero, pending.ctypes.data, wide * width)
        for step in range(length - 1, -1, -1):
            for w in range(many):
                place, owed = start + w * beside + step * apart, pending.ctypes.data + w * width * size
                grad, dx = (address(matrices, t, GRAD, b, h, place, size), address(matrices, t, DX, b, h, place, size))
                if _is_member(real, b, place, n):
                    x, out = address(matrices, t, X, b, h, place, size), address(matrices, t, OUT, b, h, place, size)
                    running_gradient(one, owed, grad, x, out, dx, width)
                else:
                    add_row(one, owed, grad, width)
                    if place < n:
                        fill_row(zero, dx, width)
    keep(pending)


@inline
def _find_largest(like, size, width, matrices, t, b, h, start, apart, length, real, n, tops):
    """The two largest values of the members of a line."""
    fill_row(like.dtype.type(-np.inf), tops, 2 * width)
    for step in range(length):
        place = start + step * apart
        if _is_member(real, b, place, n):
            two_largest(like[0], tops, address(matrices, t, X, b, h, place, size), 0, 0, 0, width)


@Workers
def _others(worker, workers, arguments):
    (like, size, width, heads, n, tasks, queue, packs, lines, beside, apart, length, wide, real, nobody,
     matrices) = arguments[0]  # fmt: skip
    nobody, instances = like.dtype.type(nobody), tasks // packs // len(matrices)
    tops, absent = np.empty((2, width), like.dtype), np.full(width, -np.inf, like.dtype)
    for _ in range(tasks):
        task = following(queue.ctypes.data)
        if task >= tasks:
            break
        t, b, h, start, many = _pack(task, instances, heads, packs, lines, beside, wide)
        for w in range(many):
            first, at = start + w * beside, tops.ctypes.data
            _find_largest(like, size, width, matrices, t, b, h, first, apart, length, real, n, at)
            for step in range(length):
                place = first + step * apart
                member = _is_member(real, b, place, n)
                x = address(matrices, t, X, b, h, place, size) if member else absent.ctypes.data
                others_row(nobody, at, x, address(matrices, t, OUT, b, h, place, size), 0, 0, width)
    keep(tops, absent)


@Workers
def _others_backward(worker, workers, arguments):
    (like, size, width, heads, n, tasks, queue, packs, lines, beside, apart, length, wide, real, _nobody,
     matrices) = arguments[0]  # fmt: skip
    zero, instances = like.dtype.type(0), tasks // packs // len(matrices)
    tops, absent = np.empty((2, width), like.dtype), np.full(width, -np.inf, like.dtype)
    shares = np.empty((4, width), like.dtype)
    for _ in range(tasks):
        task = following(queue.ctypes.data)
        if task >= tasks:
            break
        t, b, h, start, many = _pack(task, instances, heads, packs, lines, beside, wide)
        for w in range(many):
            first, at, sums = start + w * beside, tops.ctypes.data, shares.ctypes.data
            _find_largest(like, size, width, matrices, t, b, h, first, apart, length, real, n, at)
            fill_row(zero, sums, 4 * width)
            for step in range(length):
                place = first + step * apart
                member = _is_member(real, b, place, n)
                x = address(matrices, t, X, b, h, place, size) if member else absent.ctypes.data
                gather_shares(zero, at, x, address(matrices, t, GRAD, b, h, place, size), sums, 0, width)
            for step in range(length):
                place = first + step * apart
                if place < n:
                    dx = address(matrices, t, DX, b, h, place, size)
                    if _is_member(real, b, place, n):
                        pay_shares(zero, at, address(matrices, t, X, b, h, place, size), sums, dx, 0, width)
                    else:
                        fill_row(zero, dx, width)
    keep(tops, absent, shares)
