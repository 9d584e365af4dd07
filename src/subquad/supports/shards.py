"""Shards: one process's part of a support, when a sequence is divided among several.

The whole sequence has one plan. A process has a range of its queries, and a range of every source of its keys (tokens,
summaries); the plan, cut to these queries, names the keys that it lacks, and every process can work out what all others
lack: no process has to ask. What is left is two plans with the same rules, positions and numbers of keys for dropout:

    "main:local"    these queries to the keys of the process itself, which stand where they stand, from its first one on
    "main:remote"   these queries to the keys that it is sent, which are stored side by side, in order

("main" stands for any plan of the support.) One softmax over both is one softmax over the plan; its definition is the
definition of the support.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from subquad.supports.builders import rows_to_keys
from subquad.supports.parts import FAR, NEAR, NOT_NEAR, Grid, Part, Plan, make_plan
from subquad.supports.support import Support, plan_of

Range = tuple[int, int]  # first, last + 1
Cut = tuple[Range, ...]  # what each process has of a sequence, in order


def divide(n: int, processes: int) -> Cut:
    """n places in ranges that differ by one at most, the longer ones first."""
    small, longer = divmod(n, processes)
    ends = [small * r + min(r, longer) for r in range(processes + 1)]
    return tuple(itertools.pairwise(ends))


def aligned(cut: Cut, size: int, n: int) -> Cut:
    """The cut with its ends at the nearest multiples of `size`."""
    ends = [0, *(min(n, (stop + size // 2) // size * size) for _, stop in cut[:-1]), n]
    return tuple(itertools.pairwise(ends))


def in_blocks(cut: Cut, size: int) -> Cut:
    """Who has which blocks of `size` places: that of their first place."""
    return tuple((-(-lo // size), -(-hi // size)) for lo, hi in cut)


@dataclass(frozen=True, kw_only=True)
class Shard(Support):
    """The queries `rows` of the support `of`, for a process that has the range sources[s] of the keys of source s."""

    of: str
    rows: Range
    sources: tuple[Range, ...]

    def plan(self, n: int, which: str) -> Plan:
        which, _, place = which.rpartition(":")
        return self.split(n, which)[place == "remote"]

    def split(self, n: int, which: str) -> tuple[Plan, Plan]:
        return _split(self, n, which)

    def needed(self, n: int, which: str) -> tuple[np.ndarray, ...]:
        """Per source the keys that the queries see and the process does not have, ascending."""
        return _needed(self, n, which)


@dataclass(frozen=True, kw_only=True)
class Tail(Support):
    """The queries from `first` on of a support with `sources` sources. Keys of source 0 before `first` are a source of
    their own, behind the others: what was kept of a sequence and what is new need not be stored side by side.
    """

    of: str
    first: int
    sources: int

    def plan(self, n: int, which: str) -> Plan:
        shard = Shard(of=self.of, rows=(self.first, n), sources=((self.first, FAR), *((0, FAR),) * (self.sources - 1)))
        found = []
        for part in _pieces(shard, n, which):
            for piece, own in _by_owner(part, shard.sources[part.source]):
                keys = piece.keys if piece.source else piece.keys.moved(-self.first * own)
                source = piece.source if own else self.sources
                found.append(replace(_from_here(piece, keys, self.first), source=source, numbers=None))
        return make_plan(found, n - self.first)


@lru_cache(maxsize=256)
def _needed(shard: Shard, n: int, which: str) -> tuple[np.ndarray, ...]:
    found: list[list[np.ndarray]] = [[] for _ in shard.sources]
    for part in _pieces(shard, n, which):
        for piece, own in _by_owner(part, shard.sources[part.source]):
            if not own:
                found[piece.source].append(np.unique(piece.keys.places()))
    return tuple(np.unique(np.concatenate(some)) if some else np.empty(0, np.int64) for some in found)


@lru_cache(maxsize=128)
def _split(shard: Shard, n: int, which: str) -> tuple[Plan, Plan]:
    needed, local, remote = shard.needed(n, which), [], []
    for part in _pieces(shard, n, which):
        first = shard.sources[part.source][0]
        for piece, own in _by_owner(part, shard.sources[part.source]):
            if own:
                local.append(_from_here(piece, piece.keys.moved(-first), shard.rows[0]))
            else:
                remote += [_from_here(*stored, shard.rows[0]) for stored in _stored(piece, needed[part.source])]
    rows = shard.rows[1] - shard.rows[0]
    return make_plan(local, rows), make_plan(remote, rows)


def _from_here(part: Part, keys: Grid, origin: int) -> Part:
    """A piece with its queries counted from the first of the shard, and its keys where they are stored."""
    queries, positions = part.queries.moved(-origin), part.placed.moved(-origin)
    return replace(part, queries=queries, positions=positions, keys=keys, numbers=part.keys, origin=origin)


def _pieces(shard: Shard, n: int, which: str) -> Iterator[Part]:
    """The parts of the whole plan, with the queries of the shard and the keys that some of these may see."""
    for part in plan_of(shard.of, n, which).parts:
        if part.draws or part.rule not in (0, -1, NEAR, NOT_NEAR):
            raise TypeError(f"the plan of {shard.of} has parts that cannot be divided")
        yield from _cut(part, *shard.rows)


def _cut(part: Part, lo: int, hi: int) -> Iterator[Part]:
    q, p = part.queries, part.placed
    block = np.arange(q.blocks)
    first, at = q.start + block * q.step, p.start + block * p.step  # of the queries and the keys of each block
    r0, r1 = (np.clip(-(-(end - first) // q.stride), 0, q.length) for end in (lo, hi))
    low, high = _reach(part)
    s0 = np.clip(-(-(first + r0 * q.stride + low - at) // p.stride), 0, p.length)
    s1 = np.clip((first + (r1 - 1) * q.stride + high - at) // p.stride + 1, 0, p.length)
    for a, blocks, (i, j, s, t) in _runs(r0, r1, s0, s1):
        if i < j and s < t:
            yield part.piece(a, blocks, slice(i, j), slice(s, t))


def _reach(part: Part) -> Range:
    """Offsets of a key from a query beyond which no key is seen."""
    if part.rule == 0:
        return part.lo, part.hi
    if part.rule == NEAR:  # some token of the key's span lies in the interval
        return part.lo - part.span + 1, 0 if part.past else part.hi + part.span - 1
    return -FAR, 0 if part.past else FAR


def _by_owner(part: Part, own: Range) -> Iterator[tuple[Part, bool]]:
    """The part in pieces whose keys are all the process's own, or all others'."""
    keys = part.keys
    first = keys.start + np.arange(keys.blocks) * keys.step
    t0, t1 = (np.clip(-(-(end - first) // keys.stride), 0, keys.length) for end in own)
    rows = slice(0, part.queries.length)
    for a, blocks, (s, t) in _runs(t0, t1):
        for stretch, mine in (((0, s), False), ((s, t), True), ((t, keys.length), False)):
            if stretch[0] < stretch[1]:
                yield part.piece(a, blocks, rows, slice(*stretch)), mine


def _runs(*columns: np.ndarray) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Consecutive blocks that agree in all columns: first block, blocks, values."""
    table = np.stack(columns, 1)
    starts = np.flatnonzero(np.concatenate(([True], (table[1:] != table[:-1]).any(1))))
    for a, b in zip(starts, [*starts[1:], len(table)], strict=True):
        yield int(a), int(b - a), tuple(int(x) for x in table[a])


def _stored(part: Part, needed: np.ndarray) -> Iterator[tuple[Part, Grid]]:
    """The part with its keys among the needed ones; in pieces where they do not stand there at regular distances."""
    keys = part.keys
    places = np.searchsorted(needed, keys.places())  # (A, S)
    step = int(places[1, 0] - places[0, 0]) if keys.blocks > 1 else 0
    stride = int(places[0, 1] - places[0, 0]) if keys.length > 1 else 1
    grid = Grid(int(places[0, 0]), keys.blocks, step, keys.length, stride)
    if (grid.places() == places).all():
        yield part, grid
        return
    rows = slice(0, part.queries.length)
    for a in range(keys.blocks):
        gaps = np.diff(places[a])
        start = 0
        while start < keys.length:  # as far as the distances stay equal
            stop = start + 1
            while stop < keys.length and gaps[stop - 1] == gaps[start]:
                stop += 1
            stretch = slice(start, stop)
            stride = int(gaps[start]) if stop - start > 1 else 1
            yield part.piece(a, 1, rows, stretch), Grid(int(places[a, start]), 1, 0, stop - start, stride)
            start = stop


@dataclass(frozen=True, kw_only=True)
class Rectangle(Support):
    """Some queries of a sequence to some of its keys, all of them or, causal, those that are not ahead."""

    rows: Range
    keys: Range

    def plan(self, n: int, which: str) -> Plan:
        origin, first = self.rows[0], self.keys[0]
        hi = 0 if self.causal else FAR
        whole = Grid.of(range(*self.rows))
        same = self.rows == self.keys  # one triangle: a causal kernel needs no mask
        parts = [Part(whole, whole, hi=hi)] if same else rows_to_keys(range(*self.rows), range(*self.keys), hi=hi)
        return make_plan((_from_here(part, part.keys.moved(-first), origin) for part in parts), whole.length)
