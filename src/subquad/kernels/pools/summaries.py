"""`span_summaries`: query, key and value of whole spans, pooled and found in one pass over their tokens, on a CPU.

For inference alone: it has no gradient. What it gives is what `span_pool` and the plan "members:1" give together.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from subquad.kernels.parallel import Workers, fits, following, inline, matrix, queue
from subquad.kernels.vector_rows import add_row, exp_row, fill_row, larger_row
from subquad.kernels.vectors import BYTES, dot, largest, scale_row


def takes(*tensors: Tensor) -> bool:
    """On a CPU, of one type that has vectors, without gradients, and with as many heads each?"""
    x = tensors[0]
    if not fits(x) or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return all(y.dtype == x.dtype and y.shape[1] == x.shape[1] and y.stride(3) == 1 for y in tensors)


def span_summaries(
    past: tuple[Tensor, Tensor, Tensor],
    new: tuple[Tensor, Tensor, Tensor],
    count: int,
    size: int,
    pool: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The first `count` spans of `size` tokens of a sequence whose q, k and v are given in two pieces, (B, H, r, d) and
    (B, H, t, d): the pooled queries, the pooled keys, and what the queries find, (B, H, count, d) each.
    """
    like, size_of = past[0], past[0].element_size()
    batch, heads, before, width = like.shape
    out = [like.new_empty(batch, heads, count, width) for _ in range(3)]
    kind = (np.zeros(1, like.numpy().dtype), size_of, width, heads, batch * heads, count, size, before)
    matrices = [tuple(matrix(x) for x in group) for group in (past, new, out)]
    _summaries.run(*kind, queue(), *matrices, int(pool == "max"), float(scale))
    return out[0], out[1], out[2]


@inline
def _row(matrix, b, h, place, size):
    return matrix[0] + (b * matrix[1] + h * matrix[2] + place * matrix[3]) * size


@inline
def _token(past, new, before, b, h, place, size):
    """The address of a token, which stands in one of two pieces."""
    return _row(past, b, h, place, size) if place < before else _row(new, b, h, place - before, size)


@inline
def _pool(like, size, width, past, new, before, b, h, first, count, is_max, into):
    """The maximum or the mean of `count` tokens from `first` on."""
    one = like.dtype.type(1)
    scale_row(one, into, _token(past, new, before, b, h, first, size), width)
    for i in range(first + 1, first + count):
        token = _token(past, new, before, b, h, i, size)
        if is_max:
            larger_row(like[0], into, token, width)
        else:
            add_row(one, into, token, width)
    if not is_max:
        scale_row(like.dtype.type(1 / count), into, into, width)


@Workers
def _summaries(worker, workers, arguments):
    """A span of an instance is a task."""
    (like, size, width, heads, instances, spans, count, before, queue, past, new, out, is_max, scale) = arguments[0]
    lanes = BYTES // size
    weights = np.empty(-(-count // lanes) * lanes, like.dtype)
    w, nothing, one = weights.ctypes.data, like.dtype.type(-np.inf), like.dtype.type(1)
    for _ in range(instances * spans):
        task = following(queue.ctypes.data)
        if task >= instances * spans:
            break
        b, h, a = task // spans // heads, task // spans % heads, task % spans
        first = a * count
        query, key = _row(out[0], b, h, a, size), _row(out[1], b, h, a, size)
        value = _row(out[2], b, h, a, size)
        _pool(like, size, width, past[0], new[0], before, b, h, first, count, is_max, query)
        _pool(like, size, width, past[1], new[1], before, b, h, first, count, is_max, key)
        fill_row(nothing, w, len(weights))
        for i in range(count):
            k = _token(past[1], new[1], before, b, h, first + i, size)
            weights[i] = dot(like[0], query, k, width) * like.dtype.type(scale)
        total = exp_row(largest(like[0], w, len(weights)), w, len(weights))
        fill_row(like.dtype.type(0), value, width)
        for i in range(count):
            add_row(weights[i], value, _token(past[2], new[2], before, b, h, first + i, size), width)
        scale_row(one / total, value, value, width)
