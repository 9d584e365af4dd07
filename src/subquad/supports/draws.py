"""Seeded draws of index sets, row by row: exactly as many keys as asked, no key twice, linear in what is drawn."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.core.hashing import mix


@numba.njit(cache=True)
def _draw(degrees, reach, seed, indices):
    """Floyd's algorithm per row over the keys other than the row itself, then the row itself."""
    start = 0
    for i in range(len(degrees)):
        taken = set()
        taken.add(i)
        others, wanted = reach[i] - 1, degrees[i] - 1
        state = mix(np.uint64(seed) ^ mix(np.uint64(i) + np.uint64(0x9E3779B97F4A7C15)))
        for top in range(others - wanted, others):
            state += np.uint64(0x9E3779B97F4A7C15)
            pick = np.int64(mix(state) % np.uint64(top + 1))
            pick += pick >= i  # skip the row itself
            last = top + (top >= i)
            taken.add(last if pick in taken else pick)
        row = indices[start : start + degrees[i]]
        for at, key in enumerate(taken):
            row[at] = key
        row.sort()
        start += degrees[i]


def draw_rows(degrees: Tensor, reach: Tensor, seed: int) -> Tensor:
    """Row i draws degrees[i] of the keys 0 … reach[i]-1, i among them; keys concatenated, ascending per row.

    Row i depends on (seed, i, degrees[i], reach[i]) alone.
    """
    indices = np.empty(int(degrees.sum()), np.int32)
    _draw(degrees.numpy(), reach.numpy(), seed, indices)
    return torch.from_numpy(indices)
