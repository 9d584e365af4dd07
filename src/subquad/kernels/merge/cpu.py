"""The merge operators on a CPU, in linear memory: one launch of the tile kernels for all parts of all batch elements.

Heads that are not a whole number of vectors wide are filled up with zeros, which adds nothing to a score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from subquad.core.hashing import dropout_seed
from subquad.kernels.merge import cpu_backward, cpu_forward
from subquad.kernels.merge import cpu_tiles as tiles
from subquad.kernels.merge.cpu_program import Program, kept_mask, make_program, together
from subquad.kernels.parallel import Described, cut, filled, launch, matrix, queue
from subquad.supports.parts import Plan
from subquad.supports.support import plans

Rows = Sequence[tuple[slice, Plan]]  # which batch elements follow which plan
State = tuple[Tensor, Tensor]  # out (B, H, r, d) and logsumexp (B, H, r)
SHARES = 8  # of one instance at most: each has gradients of the keys of its own
KEPT = 16  # things made of one plan: each length of a padded batch has a program of its own
LEAST = 1 << 12  # pairs of a query and a key: fewer are not worth a task


def forward(q, keys, values, valid, lengths, seed, support, which, n, scale, dropout) -> State:
    chosen, width = list(plans(q, keys, values, lengths, support, which, n)), q.shape[3]
    q, keys, values = filled(q), [filled(k) for k in keys], [filled(v) for v in values]
    out, lse = walk_forward(chosen, q, keys, values, valid, scale, seed, dropout)
    return cut(out, width), lse


def backward(grad, q, keys, values, out, lse, valid, lengths, seed, support, which, n, scale, dropout) -> list[Tensor]:
    chosen, m, width = list(plans(q, keys, values, lengths, support, which, n)), len(keys), q.shape[3]
    grad, q, out, *kv = (filled(x) for x in (grad, q, out, *keys, *values))
    found = walk_backward(chosen, grad, q, kv[:m], kv[m:], out, lse, valid, scale, seed, dropout)
    return [cut(x, width) for x in found]


def walk_forward(
    chosen: Rows,
    q: Tensor,
    keys,
    values,
    valid,
    scale,
    seed=None,
    dropout=0.0,
    *,
    before: State | None = None,
    into: State | None = None,
) -> State:
    """out and lse, written to `into` where it is given; `before`: those of other keys, which are put to these."""
    out, lse = into or (fresh(q, chosen)[0], q.new_full(q.shape[:3], -torch.inf))
    first = before or (out, lse)
    if not chosen:  # nobody has a token
        return out, lse
    with launch() as threads:
        work = _Work.of(chosen, q, threads)
        tables, _alive = work.tables(q, [*zip(keys, values, strict=True)], valid)
        begins = (matrix(first[0]), first[1].flatten(0, 1).numpy(), int(before is not None))
        ends = (matrix(q), matrix(out), lse.flatten(0, 1).numpy(), *begins, *_numbers(scale, seed, dropout))
        for begin in work.begins:
            cpu_forward.forward(threads, begin, queue(), *tables, *ends)
    return out, lse


class Deltas(NamedTuple):
    """dout·out of every row (B, H, r): known before the backward, or to be kept by it."""

    of: Tensor
    known: int = cpu_backward.GIVEN


def walk_backward(
    chosen: Rows,
    grad,
    q: Tensor,
    keys,
    values,
    out,
    lse,
    valid,
    scale,
    seed=None,
    dropout=0.0,
    *,
    deltas: Deltas | None = None,
    onto: Tensor | None = None,
) -> list[Tensor]:
    """Gradients of q, of all keys, of all values; that of q is added to `onto`, where it is given."""
    dq = fresh(q, chosen)[0] if onto is None else onto
    sums = deltas or Deltas(lse, cpu_backward.UNKNOWN)
    if not chosen:  # nobody has a token
        return [dq, *(x.new_zeros(x.shape) for x in (*keys, *values))]
    with launch() as threads:
        work = _Work.of(chosen, q, threads)
        least = min(x.shape[1] for x in (*keys, *values))
        shares = work.shares(len(q) * least, threads)
        clear = shares == 1 and sum(rows.stop - rows.start for rows, _ in chosen) == len(q)  # by those who add to them
        make = q.new_empty if clear else q.new_zeros
        pairs = [*zip(keys, values, strict=True)]
        dkv = [[make((shares * len(x), *x.shape[1:])) for x in pair] for pair in pairs]
        tables, _alive = work.tables(q, [(*pair, *new) for pair, new in zip(pairs, dkv, strict=True)], valid)
        ends = (*(matrix(x) for x in (q, out, grad, dq)), *(x.flatten(0, 1).numpy() for x in (lse, sums.of)))
        about = (sums.known, int(onto is not None), *_numbers(scale, seed, dropout), clear)
        for begin in work.backward_begins(least, shares):
            cpu_backward.backward(threads, begin, queue(), *tables, *ends, *about)
    if shares > 1:
        dkv = [[x.unflatten(0, (-1, shares)).sum(1) for x in pair] for pair in dkv]
    return [dq, *(pair[0] for pair in dkv), *(pair[1] for pair in dkv)]


def fresh(q: Tensor, chosen: Rows, count: int = 1) -> Tensor:
    """(count, *q.shape): the first phase writes every row, but batch elements without a token have no plan."""
    together = sum(rows.stop - rows.start for rows, _ in chosen) == len(q)
    return (q.new_empty if together else q.new_zeros)((count, *q.shape))


def kept(plan: Plan, key: tuple, make: Callable[[], Any]) -> Any:
    """What was made of a plan before, or is made now."""
    found = plan.lowered.get(key)
    if found is None:
        found = make()
        if len(plan.lowered) >= KEPT:
            plan.lowered.clear()
        plan.lowered[key] = found
    return found


def program_of(plan: Plan, rows: int, most: int) -> Program:
    """The program of a plan for tensors of `rows` queries; bands have at most `most` pairs, where they can."""
    return kept(plan, ("cpu", rows, most), lambda: make_program(plan, rows, most))


class _Work:
    """The program of a batch, and its division into tasks: what is the same for all tensors of some shape."""

    def __init__(self, chosen: Rows, q: Tensor, threads: int) -> None:
        self.heads, self.dtype, self.elements = q.shape[1], q.dtype, chosen
        self.type = np.zeros(1, q.numpy().dtype), q.element_size(), q.shape[3], q.shape[1]
        total = sum((rows.stop - rows.start) * plan.pairs for rows, plan in chosen) * self.heads
        most = max(LEAST, total // (8 * threads))
        most = 1 << most.bit_length()  # few different programs
        programs = [program_of(plan, q.shape[2], most) for _, plan in chosen]
        self.program, self.ranges = together(programs)
        self.phases = max(len(found) for found in self.ranges)
        self._backward: dict[tuple[int, int], list[Described]] = {}

    @classmethod
    def of(cls, chosen: Rows, q: Tensor, threads: int) -> _Work:
        """Kept with the plan, where all batch elements follow one."""
        if len(chosen) > 1:
            return cls(chosen, q, threads)
        rows, plan = chosen[0]
        return kept(plan, (rows.start, rows.stop, q.shape, q.dtype, threads), lambda: cls(chosen, q, threads))

    @cached_property
    def begins(self) -> list[Described]:
        """What the kernel of the forward is given first, in each phase."""
        return [self._begin(self.bands_of(phase)) for phase in range(self.phases)]

    def backward_begins(self, key_heads: int, shares: int) -> list[Described]:
        """The same for the backward, in each of its turns."""
        if (key_heads, shares) not in self._backward:
            self._backward[key_heads, shares] = [self._begin(tasks) for tasks in self.groups_of(key_heads, shares)]
        return self._backward[key_heads, shares]

    def _begin(self, tasks: np.ndarray) -> Described:
        p = self.program
        return Described.of(*self.type, tasks, p.bands, p.pieces, p.parts, p.drawn)

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
        """Tasks of the backward, in turns: (T, 6), see `cpu_backward`.

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

    def tables(self, q: Tensor, sources: list[tuple[Tensor, ...]], valid: Sequence[Tensor]) -> tuple[tuple, Any]:
        """What both kernels are given of the keys, and what must not go before they have run: they have its address."""
        exist, kept_masks = [x.contiguous() for x in valid], []
        masks: Any = self._no_masks
        if self.program.masked:
            masks = self._no_masks.arguments[0].copy()
            kept_masks = [(at, kept_mask(part, self.dtype)) for at, part in self.program.masked]
            for at, mask in kept_masks:
                masks[at] = mask.data_ptr(), len(mask), mask.stride(0), mask.stride(1)
        table = np.array([self._row(tensors) for tensors in sources], dtype=np.int64)
        table = np.stack((table, table))  # the second one for batch elements that lack no key
        for s, x in enumerate(exist):
            table[0, s, tiles.EXISTS : tiles.EXISTS + 2] = x.data_ptr(), x.stride(0) if len(x) > 1 else 0
        return (masks, table, self._whole(q, len(sources), exist)), (exist, kept_masks)

    @cached_property
    def _no_masks(self) -> Described:
        return Described.of(np.zeros((max(1, len(self.program.parts)), 4), dtype=np.int64))

    def _row(self, tensors: tuple[Tensor, ...]) -> list[int]:
        """One source: where its keys, values and their gradients are; see `cpu_tiles`."""
        row = [number for x in tensors for number in matrix(x)] + [0] * (4 * (4 - len(tensors)))
        return [*row, 0, 0, *(self.heads // x.shape[1] for x in tensors[:2]), tensors[0].shape[2]]

    def _whole(self, q: Tensor, sources: int, exist: list[Tensor]) -> np.ndarray:
        """int64 (B, sources): 1 where all keys that can be asked for exist."""
        whole = np.ones((len(q), sources), dtype=np.int64)
        for s, x in enumerate(exist):
            exists = x[:, 0].numpy()  # (B or 1, m)
            for rows, plan in self.elements:
                reach = plan.reaches.get(s) or None
                for b in range(rows.start, rows.stop):
                    whole[b, s] = exists[b % len(exists), :reach].all()
        return whole


def _numbers(scale: float, seed: Tensor | None, dropout: float) -> tuple:
    number = int(dropout_seed(seed)) % (1 << 64) if dropout and seed is not None else 0
    return scale, (np.uint64(number), dropout, 1 / (1 - dropout))
