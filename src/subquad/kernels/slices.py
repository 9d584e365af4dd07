"""Slices: a sequence in pieces of equal length, the last one shorter, as views: nothing is padded.

slice t holds the tokens  t·size … min(n, (t+1)·size) - 1
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from operator import index

import torch
from torch import Tensor

from subquad.kernels.blocks import FAR, Part, part, plan


def strips(n: int, size: int, lo: int, hi: int, *, source: int = 0, causal: bool = False) -> list[Part]:
    """Queries of slice t to the keys t·size+lo … t·size+hi-1 that exist: a part per run of equal slices."""

    def shape(t: int) -> tuple[int, int, int]:
        first = t * size
        return min(size, n - first), max(lo, -first), min(hi, n - first)

    parts = []
    for (rows, low, high), run in groupby(range(-(-n // size)), shape):
        ts = list(run)
        if low < high:
            first = ts[0] * size
            keys = (first + low, size, high - low, 1)
            parts.append(part((first, len(ts), size, rows, 1), keys, source=source, hi=0 if causal else FAR))
    return parts


@lru_cache(maxsize=128)
def _blocks(n: int, size: int, reach: int, causal: bool, placed: bool) -> tuple[int, ...]:
    if not placed or not reach:
        return plan(strips(n, size, -reach, size + (0 if causal else reach), causal=causal), n)
    parts = strips(n, size, 0, size, causal=causal) + strips(n, size, -reach, 0, source=1)
    return plan(parts + ([] if causal else strips(n, size, size, size + reach, source=2)), n)


@torch.compiler.assume_constant_result
def _constant_blocks(n: int, size: int, reach: int, causal: bool, placed: bool) -> tuple[int, ...]:
    return _blocks(n, size, reach, causal, placed)


def local_plan(n: int, size: int, reach: int, *, causal: bool, placed: bool) -> tuple[int, ...]:
    """Every token to its slice and `reach` tokens beyond, as blocks for the merge kernel.

    `placed`: keys carry their place in the extended slice, so those that reach in from the slice before are a
    source of their own (1), and those from the slice behind too (2).
    """
    # `index` pins a length that torch.compile holds as a symbol: a plan is a constant of its length
    return _constant_blocks(index(n), index(size), reach, causal, placed)


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
