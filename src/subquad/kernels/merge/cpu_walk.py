"""Plans through the tile kernels: what they take, and how the work is divided."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from subquad.core.hashing import dropout_seed
from subquad.kernels.merge import cpu_tiles as tiles
from subquad.kernels.merge.cpu_masks import kept_mask
from subquad.kernels.merge.cpu_program import program_of, together
from subquad.kernels.parallel import launch
from subquad.kernels.vectors import BYTES
from subquad.supports.parts import Plan

Rows = Sequence[tuple[slice, Plan]]  # which batch elements follow which plan
SHARES = 8  # of one instance at most: each has gradients of the keys of its own
LEAST = 1 << 12  # pairs of a query and a key: fewer are not worth a task


def takes(chosen: Rows, q: Tensor) -> bool:
    """Are there vectors of this type and width, and do all places go upwards?"""
    fits = q.dtype in (torch.float32, torch.float64) and q.shape[-1] * q.element_size() % BYTES == 0
    return fits and bool(chosen) and all(plan.goes_up for _, plan in chosen)


def forward(chosen: Rows, q: Tensor, keys, values, valid, scale, seed, dropout) -> tuple[Tensor, Tensor]:
    """out (B, H, r, d) and lse (B, H, r)."""
    out, lse = _fresh(q, chosen), q.new_full(q.shape[:3], -torch.inf)
    with launch() as threads:
        work = _Work(chosen, q, threads)
        tables = work.tables(q, [*zip(keys, values, strict=True)], valid)
        ends = (_matrix(q), _matrix(out), lse.flatten(0, 1).numpy(), *_numbers(q, scale, seed, dropout))
        for phase in range(work.phases):
            tiles.forward(threads, *_type(q), work.bands_of(phase), *tables, *ends)
    return out, lse


def backward(chosen: Rows, grad, q: Tensor, keys, values, out, lse, valid, scale, seed, dropout) -> list[Tensor]:
    """Gradients of q, of all keys, of all values."""
    dq = _fresh(q, chosen)
    with launch() as threads:
        work = _Work(chosen, q, threads)
        least = min(x.shape[1] for x in (*keys, *values))
        shares = work.shares(len(q) * least, threads)
        clear = shares == 1 and sum(rows.stop - rows.start for rows, _ in chosen) == len(q)  # by those who add to them
        make = torch.empty if clear else torch.zeros
        pairs = [*zip(keys, values, strict=True)]
        dkv = [[make((shares * len(x), *x.shape[1:]), dtype=q.dtype) for x in pair] for pair in pairs]
        tables = work.tables(q, [(*pair, *new) for pair, new in zip(pairs, dkv, strict=True)], valid)
        ends = (*(_matrix(x) for x in (q, out, grad, dq)), lse.flatten(0, 1).numpy())
        for tasks in work.groups_of(least, shares):
            tiles.backward(threads, *_type(q), tasks, *tables, *ends, *_numbers(q, scale, seed, dropout), clear)
    if shares > 1:
        dkv = [[x.unflatten(0, (-1, shares)).sum(1) for x in pair] for pair in dkv]
    return [dq, *(pair[0] for pair in dkv), *(pair[1] for pair in dkv)]


def _fresh(q: Tensor, chosen: Rows) -> Tensor:
    """Memory like q: the first phase writes every row, but batch elements without a token have no plan."""
    together = sum(rows.stop - rows.start for rows, _ in chosen) == len(q)
    return (torch.empty if together else torch.zeros)(q.shape, dtype=q.dtype)


class _Work:
    """The program of a batch, and its division into tasks."""

    def __init__(self, chosen: Rows, q: Tensor, threads: int) -> None:
        self.heads, self.dtype = q.shape[1], q.dtype
        self.elements = chosen
        total = sum((rows.stop - rows.start) * plan.pairs for rows, plan in chosen) * self.heads
        most = max(LEAST, total // (8 * threads))
        most = 1 << most.bit_length()  # few different programs
        programs = [program_of(plan, q.shape[2], most) for _, plan in chosen]
        self.program, self.ranges = together(programs)
        self.phases = max(len(found) for found in self.ranges)

    def bands_of(self, phase: int) -> np.ndarray:
        """(T, 2): every instance with every band that it has in a phase."""
        found = []
        for (rows, _), ranges in zip(self.elements, self.ranges, strict=True):
            if phase < len(ranges):
                instances = np.arange(rows.start * self.heads, rows.stop * self.heads)
                bands = np.arange(ranges[phase].start, ranges[phase].stop)
                found.append(np.stack((instances.repeat(len(bands)), np.tile(bands, len(instances))), 1))
        return np.concatenate(found)

    def shares(self, groups: int, threads: int) -> int:
        """Into how many tasks the bands of a group of heads are divided."""
        return 1 if groups % threads == 0 or groups >= 4 * threads else min(SHARES, -(-2 * threads // groups))

    def groups_of(self, key_heads: int, shares: int) -> list[np.ndarray]:
        """Tasks of the backward, in turns: (T, 6), see `cpu_tiles.backward`.

        One turn where each task has all bands of its heads; else one for each phase, whose bands have no row in common.
        """
        turns: list[list[tuple[int, ...]]] = [[] for _ in range(1 if shares == 1 else self.phases)]
        size = self.heads // key_heads
        for (rows, _), ranges in zip(self.elements, self.ranges, strict=True):
            spans = [range(ranges[0].start, ranges[-1].stop)] if shares == 1 else ranges
            for turn, bands in zip(turns, spans, strict=False):
                cuts = [bands.start + len(bands) * at // shares for at in range(shares + 1)]
                turn += [
                    (b, h * size, h * size + size, cuts[at], cuts[at + 1], b * shares + at)
                    for b in range(rows.start, rows.stop)
                    for h in range(key_heads)
                    for at in range(shares)
                ]
        return [np.array(turn, dtype=np.int64) for turn in turns]

    def tables(self, q: Tensor, sources: list[tuple[Tensor, ...]], valid: Sequence[Tensor]) -> tuple:
        """What both kernels are given of the program and of the keys."""
        p = self.program
        masks = np.zeros((max(1, len(p.parts)), 4), dtype=np.int64)
        kept = [(at, kept_mask(part, self.dtype)[0]) for at, part in p.masked]
        for at, mask in kept:
            masks[at] = mask.data_ptr(), len(mask), mask.stride(0), mask.stride(1)
        self.alive = kept, [x.contiguous() for x in valid]  # addresses: they must not go before the kernel has run
        table = np.zeros((2, len(sources), 21), dtype=np.int64)
        for s, tensors in enumerate(sources):
            for at, x in enumerate(tensors):
                table[:, s, 4 * at : 4 * at + 4] = _matrix(x)
            table[:, s, tiles.GROUP : tiles.GROUP + 2] = [self.heads // x.shape[1] for x in tensors[:2]]
            table[:, s, tiles.ENTRIES] = tensors[0].shape[2]
        for s, x in enumerate(self.alive[1]):
            table[0, s, tiles.EXISTS : tiles.EXISTS + 2] = x.data_ptr(), x.stride(0) if len(x) > 1 else 0
        return p.bands, p.pieces, p.parts, p.drawn, masks, table, self._whole(q, len(sources))

    def _whole(self, q: Tensor, sources: int) -> np.ndarray:
        """int64 (B, sources): 1 where all keys that can be asked for exist."""
        whole = np.ones((len(q), sources), dtype=np.int64)
        for s, x in enumerate(self.alive[1]):
            exists = x[:, 0].numpy()  # (B or 1, m)
            for rows, plan in self.elements:
                reach = plan.reaches.get(s) or None
                for b in range(rows.start, rows.stop):
                    whole[b, s] = exists[b % len(exists), :reach].all()
        return whole


# ---- arguments ----------------------------------------------------------------------------------------------


def _type(q: Tensor) -> tuple[np.ndarray, int, int, int]:
    return np.zeros(1, q.numpy().dtype), q.element_size(), q.shape[3], q.shape[1]


def _matrix(x: Tensor) -> tuple[int, int, int, int]:
    return x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)


def _numbers(q: Tensor, scale: float, seed: Tensor | None, dropout: float) -> tuple:
    number = int(dropout_seed(seed)) % (1 << 64) if dropout and seed is not None else 0
    return scale, (np.uint64(number), dropout, 1 / (1 - dropout))
