"""Masks of one bit per pair, and all pairs a block at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from subquad.kernels.parallel import inline

BLOCK = 2**20  # pairs of a block: a float32 buffer of 4 MB


@inline
def pack(marks, bits):
    """0 and 1 in bytes, a multiple of eight of them → bits, the first in the lowest place."""
    words = marks.view(np.uint64)
    for c in range(bits.size):
        bits[c] = (words[c] * np.uint64(0x0102040810204080)) >> np.uint64(56)


@inline
def unpack(bits):
    """The inverse of `pack`: as many bytes, 0 or 1, as there are bits."""
    marks = np.empty(8 * bits.size, np.uint8)
    words = marks.view(np.uint64)
    for c in range(bits.size):
        spread = np.uint64(bits[c]) * np.uint64(0x0101010101010101) & np.uint64(0x8040201008040201)
        words[c] = (spread + np.uint64(0x7F7F7F7F7F7F7F7F)) >> np.uint64(7) & np.uint64(0x0101010101010101)
    return marks


def unpack_mask(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Packed masks (…·⌈m / 8⌉,) uint8 as bool of the given shape (…, m)."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(*shape[:-1], -1, 1) >> places & 1).bool().flatten(-2)[..., : shape[-1]]


def pack_mask(mask: Tensor) -> Tensor:
    """The inverse of `unpack_mask`."""
    bytes_ = torch.nn.functional.pad(mask.byte(), (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (bytes_ << places).sum(-1, dtype=torch.uint8).flatten()


def blocks(graphs: int, n: int, m: int, causal: bool, pairs: int = BLOCK) -> Iterator[tuple[slice, slice, slice]]:
    """Some graphs, some rows, and the keys that these rows may see: about so many pairs at a time."""
    rows = max(1, min(n, pairs // m))
    step = max(1, pairs // (rows * m))
    for first in range(0, n, rows):
        last = min(n, first + rows)
        for t in range(0, graphs, step):
            yield slice(t, min(graphs, t + step)), slice(first, last), slice(0, min(m, last) if causal else m)


def scratch(like: Tensor, graphs: int, n: int, m: int) -> Tensor:
    """Room for the largest of the blocks: fresh pages for each would cost as much as a product."""
    rows = max(1, min(n, BLOCK // m))
    return like.new_empty(min(graphs, max(1, BLOCK // (rows * m))) * rows * m)


def product(x: Tensor, y: Tensor, buffer: Tensor) -> Tensor:
    """x @ y, batched, into the buffer."""
    shape = (*x.shape[:2], y.shape[2])
    return torch.bmm(x, y, out=buffer[: math.prod(shape)].view(shape))
