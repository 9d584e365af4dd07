"""Shapes of reduction over a grid or a binary tree: (x, "max" or "sum") → reduced x.

Padding is no member: it is left out of every maximum, sum and count, and what has no member pools to 0 (the caller
marks it as absent). `pooled` runs a shape and looks after padding and counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from subquad.kernels.maxima import others_max, running_max

Reduction = Callable[[Tensor, str], Tensor]


def pooled(x: Tensor, pool: str, exists: Tensor | None, reduce: Reduction) -> Tensor:
    """Pool the members that exist. x (B, H, n, d) or (B, H, rows, cols, d); exists broadcasts to x, last dim 1.

    `exists=None`: everything exists and no group is empty.
    """
    if pool == "max":
        if exists is None:
            return reduce(x, "max")
        top = reduce(x.masked_fill(~exists, -torch.inf), "max")
        return top.masked_fill(top == -torch.inf, 0)  # nobody there
    if exists is None:
        exists = torch.ones((1, 1, *x.shape[2:-1], 1), dtype=torch.bool, device=x.device)
    count = reduce(exists.to(x.dtype), "sum").clamp(min=1)
    return reduce(x.masked_fill(~exists, 0), "sum") / count


def anyone(exists: Tensor, reduce: Reduction) -> Tensor:
    """Which groups have a member at all: bool, shaped like the pool."""
    return reduce(exists.float(), "max") > 0


def prefixes(dim: int, *, backwards: bool = False) -> Reduction:
    """Everything up to and including oneself along `dim` (backwards: from oneself on)."""

    def reduce(x: Tensor, kind: str) -> Tensor:
        if kind == "max":
            return running_max(x, dim, backwards)
        return x.flip(dim).cumsum(dim).flip(dim) if backwards else x.cumsum(dim)

    return reduce


def others(dim: int) -> Reduction:
    """Everything along `dim` except oneself; the maximum of nothing is -inf."""

    def reduce(x: Tensor, kind: str) -> Tensor:
        if kind == "sum":
            return x.sum(dim, keepdim=True) - x
        return others_max(x, dim)[0]

    return reduce


def binary_nodes(x: Tensor, kind: str) -> Tensor:
    """All aligned binary blocks with an even number, in one array as long as x: (B, H, n, d) → (B, H, n, d).

    Place p holds the block of 2^l tokens that ends with token p, where 2^l is the largest power of two that
    divides p+1 (a Fenwick tree). Built in linear time: the even places hold the tokens themselves, the odd ones
    the nodes of the sequence of pairs.
    """
    pairs = x.shape[2] // 2
    if pairs == 0:
        return x
    left, right = x[:, :, 0 : 2 * pairs : 2], x[:, :, 1::2]  # (B, H, n // 2, d)
    above = binary_nodes(torch.maximum(left, right) if kind == "max" else left + right, kind)
    interleaved = torch.stack((left, above), 3).flatten(2, 3)
    return interleaved if 2 * pairs == x.shape[2] else torch.cat((interleaved, x[:, :, -1:]), 2)
