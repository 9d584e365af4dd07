"""Pairs whose places follow from the lengths of rows, made on the device that has the lengths, without reading them.

Shapes follow from the length of the batch alone; what a shorter row lacks is masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Placed(NamedTuple):
    """A blocks of R queries × S keys for each of B rows. Where nothing is seen, places may lie outside of the row."""

    queries: Tensor  # int64 (B or 1, A, R): no place twice among those that see a key
    keys: Tensor  # int64 (B or 1, A, S)
    seen: Tensor  # bool (B, A, R, S)

    def split(self, pairs: int) -> Iterator[Placed]:
        """Some of the blocks at a time: about so many pairs of a row."""
        blocks = max(1, pairs // (self.seen.shape[2] * self.seen.shape[3]))
        yield from map(Placed, *(x.split(blocks, 1) for x in self))


def wrapped(first: int, ring: Tensor, reach: int) -> list[Placed]:
    """The first `reach` places of a ring to the last ones, and back, as far as they are at most `reach` apart round
    its end, but not the other way. The ring has `ring` (B,) tokens, the first of them at `first`.
    """
    ring = ring[:, None]  # (B, 1)
    head = first + torch.arange(reach, device=ring.device)[None]  # (1, reach)
    tail = head + ring - reach  # (B, reach)
    gap = tail[:, None] - head[..., None]  # (B, head, tail)
    seen = ((gap >= ring[..., None] - reach) & (gap > reach))[:, None]
    head, tail = head[:, None], tail[:, None]
    return [Placed(head, tail, seen), Placed(tail, head, seen.mT)]


def united(keys: Tensor, n: int) -> Tensor:
    """Lists of keys (…, many), n = none, ascending and each key once."""
    keys = keys.sort(-1).values
    again = torch.nn.functional.pad(keys[..., 1:] == keys[..., :-1], (1, 0))
    return keys.masked_fill(again, n).sort(-1).values


def modulo(bits: Tensor, size: Tensor) -> Tensor:
    """64 bits as a number without a sign, modulo a size below 2³¹: int64 tensors that broadcast."""
    low = (1 << 32) - 1
    return ((bits >> 32 & low) % size * ((1 << 32) % size) + (bits & low) % size) % size


def on_device(x: np.ndarray, like: Tensor) -> Tensor:
    """A constant, without waiting for the device."""
    return torch.from_numpy(x).to(like.device, non_blocking=True)
