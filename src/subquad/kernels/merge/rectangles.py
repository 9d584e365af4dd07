"""Rectangles of a plan (queries × keys), as the tiles of a GPU visit them, and the geometry of blocks they come from.

A rectangle holds queries q_start + i·q_unit, i < q_count, and keys k_start + t·k_unit, t < k_count. With

    u = i + shift,  a = u // per,  r = u - a·per        the query's block, counted from the rectangle's first, and row
    s = s_start + t - a·s_shift                         the number of the key in that block
    offset = p_start + a·p_step + s·p_unit - i·q_unit   position(key) - position(query)

the pair is seen when u ≥ 0, a < blocks, r < q_length, 0 ≤ s < s_length and the part's rule holds, see `seen`, which is
the definition that the kernel is checked against. Rectangles with `full` = 1 need none of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from subquad.supports.parts import FAR, MEMBERS, NEAR, NODES_BACK, NOT_NEAR, Grid, Part

LIMIT = 1 << 30  # what stands for FAR in 32 bits
GAP = 2  # blocks of keys that fill less than 1 / GAP of the strip that holds them are visited one by one


class Rectangle(NamedTuple):
    """See the module; the order of the fields is that of the table on the device."""

    q_start: int
    q_unit: int
    q_count: int
    k_start: int
    k_unit: int
    k_count: int
    full: int
    shift: int
    per: int
    blocks: int
    q_length: int
    s_start: int
    s_shift: int
    s_length: int
    p_start: int
    p_step: int
    p_unit: int
    lo: int
    hi: int
    xlo: int
    xhi: int
    rule: int
    span: int
    past: int
    relative: int  # rules of a binary tree: where the first key of a block stands, counted from its first query
    k_stride: int
    q_stride: int
    unused: int = 0

    def seen(self) -> np.ndarray:
        """Who sees whom, bool (q_count, k_count)."""
        i, t = np.arange(self.q_count)[:, None], np.arange(self.k_count)
        if self.full:
            return np.ones((self.q_count, self.k_count), bool)
        u = i + self.shift
        a = u // self.per
        r, s = u - a * self.per, self.s_start + t - a * self.s_shift
        inside = (u >= 0) & (a < self.blocks) & (r < self.q_length) & (s >= 0) & (s < self.s_length)
        return inside & self._rule(r, s, a, i, t)

    def _rule(self, r, s, a, i, t) -> np.ndarray:
        row, key = self.q_start + i * self.q_unit, self.k_start + t * self.k_unit
        if self.rule in (NEAR, NOT_NEAR):
            first = key // self.span * self.span
            near = (first + self.span - 1 - row >= self.lo) & (first - row <= self.hi)
            return (near == (self.rule == NEAR)) & ((key <= row) | (not self.past))
        if self.rule:
            row, key = r * self.q_stride, self.relative + s * self.k_stride
            if self.rule == MEMBERS:
                node = row + 1
                return (key >= node - (node & -node)) & (key < node)
            if self.rule == NODES_BACK:
                row, node = self.q_length - 1 - row, self.q_length - key
                return row & -(node & -node) == node
            node = key + 1
            return (row & -(node & -node) == node) | ((key == row) & (key % 2 == 0))
        offset = self.p_start + a * self.p_step + s * self.p_unit - i * self.q_unit
        return (offset >= self.lo) & (offset <= self.hi) & ~((offset >= self.xlo) & (offset <= self.xhi))


FIELDS = len(Rectangle._fields)


class Tile(NamedTuple):
    start: int
    unit: int
    count: int  # type: ignore[assignment]  # a field, not tuple.count

    @property
    def last(self) -> int:
        return self.start + (self.count - 1) * self.unit


@dataclass(frozen=True)
class Axis:
    """One side of a part: its blocks, the distance `unit` of neighbours in a tile, blocks `per` neighbours apart."""

    start: int
    blocks: int
    step: int
    length: int
    unit: int

    @classmethod
    def of(cls, grid: Grid) -> Axis:
        unit = grid.stride if grid.length > 1 else (grid.step or 1) if grid.blocks > 1 else 1
        return cls(grid.start, grid.blocks, grid.step, grid.length, unit)

    @classmethod
    def drawn(cls, part: Part) -> Axis:
        size = part.keys.length // part.draws
        return cls(0, 1, 0, size, 1)

    @property
    def regular(self) -> bool:
        """Do the blocks stand among each other's neighbours?"""
        return self.blocks == 1 or (self.step >= 0 and self.step % self.unit == 0)

    @property
    def per(self) -> int:
        return self.step // self.unit if self.blocks > 1 else LIMIT

    def residue(self, tile: Tile) -> Iterator[int]:
        """The blocks that stand among the tile's places, where blocks do not stand among each other's."""
        for a in range(self.blocks):
            if (tile.start - self.start - a * self.step) % self.unit == 0:
                yield a

    def touched(self, tile: Tile) -> Iterator[tuple[int, int, int]]:
        """(first block, blocks, place of the tile in units from the first block's start): runs of touched blocks."""
        if not self.regular:
            for a in self.residue(tile):
                first = (tile.start - self.start - a * self.step) // self.unit
                if first < self.length and first + tile.count > 0:
                    yield a, 1, first
            return
        first, rest = divmod(tile.start - self.start, self.unit)
        if rest:
            return
        a, b = 0, self.blocks - 1
        if self.blocks > 1 and self.step:
            a, b = max(a, -((self.length - 1 - first) // self.per)), min(b, (first + tile.count - 1) // self.per)
        first -= a * self.per if self.blocks > 1 else 0
        last = (b - a) * (self.per if self.blocks > 1 else 0) + self.length  # one behind the end, in units
        if a <= b and first < last and first + tile.count > 0:
            yield a, b - a + 1, first


class Group(NamedTuple):
    """Some blocks of a part, on the way to a rectangle: queries and keys as (start, unit, count)."""

    part: Part
    block: int
    blocks: int
    shift: int
    q: Tile
    k: Tile
    s_start: int
    s_shift: int

    @property
    def per(self) -> int:
        return Axis.of(self.part.queries).per if self.blocks > 1 else LIMIT

    @property
    def s_length(self) -> int:
        return self.part.keys.length // (self.part.draws or 1)

    @property
    def p_unit(self) -> int:
        """Positions from one key of the run to the next; of keys that are blocks of their own it is the step."""
        where = self.part.placed
        return where.step if self.s_length == 1 and self.blocks > 1 else where.stride

    @property
    def even(self) -> bool:
        """Does a key stand at the same position for every block?"""
        one = self.blocks == 1 or self.part.placed.step == self.s_shift * self.p_unit
        return one and self.p_unit > 0 and not self.part.draws

    @property
    def first_position(self) -> int:
        """Where the key t = 0 stands."""
        return self.part.placed.start + self.block * self.part.placed.step + self.s_start * self.p_unit

    def rectangle(self, full: bool = False) -> Rectangle:
        part, where = self.part, self.part.placed
        drawn = bool(part.draws)
        limits = (part.lo, part.hi, part.xlo, part.xhi) if not drawn else (-FAR, FAR, 1, 0)
        grids: tuple[Any, ...] = (*self.q, *self.k)
        return Rectangle(  # type: ignore[call-arg]
            *grids,
            int(full),
            self.shift,
            self.per,
            self.blocks,
            part.queries.length,
            self.s_start,
            self.s_shift,
            self.s_length,
            0 if drawn else where.start + self.block * where.step - self.q.start,
            0 if drawn else where.step,
            0 if drawn else self.p_unit,
            *(max(-LIMIT, min(LIMIT, x)) for x in limits),
            part.rule,
            part.span,
            int(part.past),
            part.keys.start - part.queries.start,
            part.keys.stride,
            part.queries.stride,
        )
