"""Seeded draws of index sets, row by row: exactly as many keys as asked, no key twice, linear in what is drawn."""

from __future__ import annotations

import numba
import numpy as np

from subquad.core.hashing import GAMMA, mix


@numba.njit(cache=True)
def _draw(degrees, reach, seed, indices):
    """Floyd's algorithm per row over the keys other than the row itself, then the row itself."""
    start = 0
    for i in range(len(degrees)):
        taken = set()
        taken.add(i)
        others, wanted = reach[i] - 1, degrees[i] - 1
        state = mix(np.uint64(seed) ^ mix(np.uint64(i) + GAMMA))
        for top in range(others - wanted, others):
            state += GAMMA
            pick = np.int64(mix(state) % np.uint64(top + 1))
            pick += pick >= i  # skip the row itself
            last = top + (top >= i)
            taken.add(last if pick in taken else pick)
        row = indices[start : start + degrees[i]]
        for at, key in enumerate(taken):
            row[at] = key
        row.sort()
        start += degrees[i]


def draw_rows(degrees: np.ndarray, reach: np.ndarray, seed: int) -> np.ndarray:
    """Row i draws degrees[i] of the keys 0 … reach[i]-1, i among them; keys (E,) int32, ascending per row.

    Row i depends on (seed, i, degrees[i], reach[i]) alone.
    """
    indices = np.empty(int(degrees.sum()), np.int32)
    _draw(degrees, reach, np.uint64(seed), indices)
    return indices


def draw_few(count: int, size: int, seed: int) -> list[int]:
    """`count` of the numbers 0 … size-1 (all of them where there are fewer), ascending, by Floyd's algorithm."""
    taken: set[int] = set()
    for step, top in enumerate(range(max(0, size - count), size)):
        pick = stream(seed, step) % (top + 1)
        taken.add(top if pick in taken else pick)
    return sorted(taken)


def stream(*numbers: int) -> int:
    """A 64-bit number that depends on all the given ones: the seed of a stream of one's own."""
    state = np.zeros(1, np.uint64)  # arrays wrap around silently
    for number in numbers:
        state = _mix_array(state ^ _mix_array(np.array([number % (1 << 64)], np.uint64) + GAMMA))
    return int(state[0])


def _mix_array(x: np.ndarray) -> np.ndarray:
    """`mix` for arrays, without compiling it."""
    return mix.py_func(x)
