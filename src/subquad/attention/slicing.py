"""Slices of a sequence as views: nothing is padded. Slice t holds the tokens t·size … min(n, (t+1)·size) - 1."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def slices(x: Tensor, size: int) -> Iterator[Tensor]:
    """(B, n, …) → views (B, full slices, size, …) and, where n is no multiple, the tail (B, 1, rest, …)."""
    full, rest = x.shape[1] // size, x.shape[1] % size
    if full:
        yield x[:, : full * size].unflatten(1, (full, size))
    if rest:
        yield x[:, None, full * size :]


def add_by_slice(x: Tensor, y: Tensor, size: int) -> Tensor:
    """x (B, n, …) + y (B or 1, m or 1, 1 or size, …), slice by slice."""
    sums, first = [], 0
    for view in slices(x, size):
        count, length = view.shape[1:3]
        piece = y if y.shape[1] == 1 else y[:, first : first + count]
        sums.append((view + piece[:, :, :length]).flatten(1, 2))
        first += count
    return sums[0] if len(sums) == 1 else torch.cat(sums, 1)
