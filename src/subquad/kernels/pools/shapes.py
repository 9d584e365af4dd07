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
    return reduce(exists.float(), "sum") > 0


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
