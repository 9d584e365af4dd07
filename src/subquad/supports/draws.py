"""Seeded draws of index sets, row by row: exactly as many keys as asked, no key twice, linear in what is drawn."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.core.hashing import GAMMA, bits, mix
from subquad.supports.placed import modulo, on_device

HELD = 1 << 22  # draws that are made at a time on a device


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


def draw_rows_on_device(degrees: Tensor, lengths: Tensor, most: int, n: int, seed: int) -> Tensor:
    """The same for rows of their own length: each of the n queries of a row of lengths (B,) draws degrees (B,) of its
    keys, at most `most`. int64 (B, n, most), ascending, n = none.
    """
    place = np.arange(n, dtype=np.uint64)
    state = on_device(_mix_array(np.uint64(seed) ^ _mix_array(place + GAMMA)).view(np.int64), lengths)
    others, wanted = lengths - 1, degrees - 1  # (B,)
    row = torch.arange(len(lengths) * n, device=lengths.device)
    found = [
        _draw_some(state[some % n], (others - wanted)[some // n], wanted[some // n], most - 1)
        for some in row.split(max(1, HELD // most))
    ]
    drawn, own = torch.cat(found).view(len(lengths), n, -1), torch.arange(n, device=lengths.device)[:, None]
    keys = torch.where(drawn < 0, n, drawn + (drawn >= own))  # numbers skip the row itself
    keys = torch.cat((own.expand(len(lengths), n, 1), keys), 2)
    return torch.where(own < lengths[:, None, None], keys, n).sort(2).values


def _draw_some(state: Tensor, base: Tensor, wanted: Tensor, most: int) -> Tensor:
    """Floyd's algorithm for R rows at once: `wanted` of the numbers 0 … base + wanted - 1, (R, most), -1 = none.

    Step t picks among 0 … base + t, and takes base + t where the pick is taken: by an equal pick before it, or because
    it is the base + s of a step s that found its own pick taken. Those chains are followed by doubling.
    """
    step = torch.arange(most, device=state.device)
    top = base[:, None] + step  # (R, most)
    pick = modulo(bits(state[:, None], step + 1), (top + 1).clamp(min=1))
    ordered, order = pick.sort(dim=1, stable=True)
    equal = torch.nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    taken = torch.zeros_like(equal).scatter_(1, order, equal)
    before = pick - base[:, None]
    before = torch.where((before >= 0) & (before < step), before, step)
    for _ in range(max(0, most - 1).bit_length()):
        taken = taken | taken.gather(1, before)
        before = before.gather(1, before)
    return torch.where(step < wanted[:, None], torch.where(taken, top, pick), -1)


def draw_few_on_device(bits: Tensor, sizes: Tensor) -> Tensor:
    """`draw_few` of sizes (…, A), with the random bits of every step, (A, count): (…, A, count), -1 = none."""
    count = bits.shape[1]
    taken: list[Tensor] = []
    first = (sizes - count).clamp(min=0)
    for step in range(count):
        pick = modulo(bits[:, step], first + step + 1)
        for other in taken:
            pick = torch.where(pick == other, -1, pick)
        taken.append(torch.where(pick < 0, first + step, pick))
    found = torch.stack(taken, -1)
    return torch.where(torch.arange(count, device=sizes.device) < sizes[..., None], found, -1)


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
