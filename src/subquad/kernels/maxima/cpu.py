"""The maxima on a CPU: one pass over memory, several rows of the sequence's features at a time.

A tensor is seen as (outer, length, inner), the dimension in question in the middle; a task is one outer place and up
to `WIDTH` inner ones, whose running values stay in the cache. Comparisons are written so that NaN stays NaN.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.kernels.parallel import inline, kernel, run

WIDTH = 512


def running_max(x: Tensor, dim: int, backwards: bool) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    run(_running_max, *_arrays(dim, x, out), backwards)
    return out


def running_max_backward(grad: Tensor, x: Tensor, out: Tensor, dim: int, backwards: bool) -> Tensor:
    grad, x, out = (t.contiguous() for t in (grad, x, out))
    dx = torch.empty_like(x)
    run(_running_max_backward, *_arrays(dim, grad, x, out, dx), backwards)
    return dx


def others_max(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    out, first = torch.empty_like(x), x.new_empty(x.shape[:dim] + x.shape[dim + 1 :])
    second = torch.empty_like(first)
    run(_others_max, *_arrays(dim, x, out), *(t.view(-1, _inner(x, dim)).numpy() for t in (first, second)))
    return out, first, second


def others_max_backward(grad: Tensor, x: Tensor, first: Tensor, second: Tensor, dim: int) -> Tensor:
    grad, x, first, second = (t.contiguous() for t in (grad, x, first, second))
    dx = torch.empty_like(x)
    tops = (t.view(-1, _inner(x, dim)).numpy() for t in (first, second))
    run(_others_max_backward, *_arrays(dim, grad, x, dx), *tops)
    return dx


def takes(x: Tensor) -> bool:
    """Numba has no half precision."""
    return x.dtype in (torch.float32, torch.float64) and x.numel() > 0


def _inner(x: Tensor, dim: int) -> int:
    return x.shape[dim + 1 :].numel()


def _arrays(dim: int, *tensors: Tensor) -> list[np.ndarray]:
    """(outer, length, inner)"""
    return [x.view(-1, x.shape[dim], _inner(x, dim)).numpy() for x in tensors]


@inline
def _larger(x, y):
    return x if x > y or x != x else y


@inline
def _smaller(x, y):
    return x if x < y or x != x else y


@kernel
def _running_max(x, out, backwards):
    outer, length, inner = x.shape
    pieces = -(-inner // WIDTH)
    for task in numba.prange(outer * pieces):
        o, start = task // pieces, task % pieces * WIDTH
        stop = min(start + WIDTH, inner)
        top = np.full(WIDTH, -np.inf, x.dtype)
        for step in range(length):
            at = length - 1 - step if backwards else step
            for j in range(start, stop):
                value = _larger(x[o, at, j], top[j - start])
                top[j - start] = value
                out[o, at, j] = value


@kernel
def _running_max_backward(grad, x, out, dx, backwards):
    outer, length, inner = x.shape
    pieces = -(-inner // WIDTH)
    zero = x.dtype.type(0)
    for task in numba.prange(outer * pieces):
        o, start = task // pieces, task % pieces * WIDTH
        stop = min(start + WIDTH, inner)
        pending = np.zeros(WIDTH, x.dtype)  # what later maxima owe to an element not yet met
        for step in range(length):
            at = step if backwards else length - 1 - step
            for j in range(start, stop):
                owed = pending[j - start] + grad[o, at, j]
                here = x[o, at, j] == out[o, at, j]
                dx[o, at, j] = owed if here else zero
                pending[j - start] = zero if here else owed


@kernel
def _others_max(x, out, first, second):
    outer, length, inner = x.shape
    pieces = -(-inner // WIDTH)
    for task in numba.prange(outer * pieces):
        o, start = task // pieces, task % pieces * WIDTH
        stop = min(start + WIDTH, inner)
        most, next_ = np.full(WIDTH, -np.inf, x.dtype), np.full(WIDTH, -np.inf, x.dtype)
        for at in range(length):
            for j in range(start, stop):
                value, top = x[o, at, j], most[j - start]
                next_[j - start] = _larger(_smaller(value, top), next_[j - start])
                most[j - start] = _larger(value, top)
        for at in range(length):
            for j in range(start, stop):
                top = most[j - start]
                out[o, at, j] = next_[j - start] if x[o, at, j] == top else top
        for j in range(start, stop):
            first[o, j], second[o, j] = most[j - start], next_[j - start]


@kernel
def _others_max_backward(grad, x, dx, first, second):
    outer, length, inner = x.shape
    pieces = -(-inner // WIDTH)
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for task in numba.prange(outer * pieces):
        o, start = task // pieces, task % pieces * WIDTH
        stop = min(start + WIDTH, inner)
        others, own = np.zeros(WIDTH, x.dtype), np.zeros(WIDTH, x.dtype)  # gradients for the largest, for the second
        firsts, seconds = np.zeros(WIDTH, x.dtype), np.zeros(WIDTH, x.dtype)  # how many have these values
        for at in range(length):
            for j in range(start, stop):
                value, g, i = x[o, at, j], grad[o, at, j], j - start
                is_first = value == first[o, j]
                others[i] += zero if is_first else g
                own[i] += g if is_first else zero
                firsts[i] += one if is_first else zero
                seconds[i] += one if value == second[o, j] else zero
        for i in range(stop - start):
            others[i] /= firsts[i]
            own[i] /= max(seconds[i], one)
        for at in range(length):
            for j in range(start, stop):
                value, i = x[o, at, j], j - start
                dx[o, at, j] = (others[i] if value == first[o, j] else zero) + (
                    own[i] if value == second[o, j] else zero
                )
