"""Who is on which level: tiles of queries and runs of keys for `kernels.runs`."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from subquad.kernels.runs.op import EVERYTHING, Runs


def spans_of(first: Tensor, stop: Tensor, m: int, last: Tensor | None = None) -> Tensor:
    """Runs of the keys first … stop - 1 that exist, (T, 4), seen by all queries unless `last` says otherwise."""
    first, stop = first.clamp(min=0), stop.clamp(max=m)
    last = torch.full_like(first, EVERYTHING) if last is None else last
    return torch.stack((first, (stop - first).clamp(min=0), last, torch.full_like(first, -EVERYTHING)), -1)


@lru_cache(maxsize=64)
def runs_of_level(m: int, size: int, number: int, device: torch.device) -> Runs:
    """The m rows of a level, in blocks and, but for the finest, in halves of blocks: those that touch the neighbour see
    only the half of it that does not touch them."""
    step = size // 2 if number else size
    first = torch.arange(0, m, step, device=device)
    tiles = torch.stack((first, (m - first).clamp(max=step)), -1)
    if not number:
        spans = spans_of(first - size, first + 2 * size, m)[:, None]
        return Runs(tiles, spans, (0,), 3 * size * m, (step, 3 * size))
    block, half = first // size * size, first // step % 2  # the first row of the block, and which half it is
    before = spans_of(block - size, block - step * (1 - half), m)
    after = spans_of(block + size + step * half, block + 2 * size, m)
    return Runs(tiles, torch.stack((before, after), 1), (0, 0), 3 * step * m, (step, size, size))
