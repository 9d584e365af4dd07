"""The parts of a plan as tiles for a GPU: which rectangles (queries × keys) each tile of queries, or of keys, visits.

A tile is up to `size` places start + i·unit. Parts whose queries stand side by side share tiles of unit 1; parts whose
queries are w apart (columns of a grid) need tiles of unit w, which are a *pass* of their own: it takes up the running
softmax where the pass before has left it. Most plans are one pass. The gradients of keys and values go by tiles of keys
in the same way, so that every row is written by one program: no atomics, the same bits at every run.

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

from subquad.supports.parts import FAR, MEMBERS, NEAR, NODES, NODES_BACK, NOT_NEAR, Grid, Part, Plan

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


class Pass(NamedTuple):
    """Tiles of one unit, and the rectangles of each, source by source."""

    tiles: list[Tile]
    rectangles: list[list[list[Rectangle]]]  # per tile, per source


def by_queries(plan: Plan, sources: int, size: int, width: int) -> list[Pass]:
    """The passes over tiles of queries; keys come `width` at a time."""
    axes = [(part, _Axis.of(part.queries)) for part in plan.parts]
    return _passes(axes, plan, plan.rows, size, _key_runs, [part.source for part in plan.parts], sources, width)


def by_keys(plan: Plan, source: int, count: int, size: int, width: int) -> list[Pass]:
    """The passes over tiles of the `count` keys of one source; queries come `width` at a time."""
    parts = [part for part in plan.parts if part.source == source]
    axes = [(part, _Axis.drawn(part) if part.draws else _Axis.of(part.keys)) for part in parts]
    return _passes(axes, plan, count, size, _query_runs, [0] * len(parts), 1, width)


def _passes(axes, plan: Plan, places: int, size: int, runs, slots: list[int], sources: int, width: int) -> list[Pass]:
    found = []
    for unit in sorted({axis.unit for _, axis in axes}):
        tiles, visits = [], []
        for start in range(min(unit, places)):
            for first in range(start, places, unit * size):
                tile = Tile(first, unit, min(size, (places - 1 - first) // unit + 1))
                visited: list[list[Rectangle]] = [[] for _ in range(sources)]
                for (part, axis), slot in zip(axes, slots, strict=True):
                    if axis.unit == unit:
                        visited[slot] += runs(part, axis, plan, tile, width)
                if any(visited):
                    tiles.append(tile)
                    visits.append(visited)
        if tiles:
            found.append(Pass(tiles, visits))
    return found


@dataclass(frozen=True)
class _Axis:
    """One side of a part: its blocks, the distance `unit` of neighbours in a tile, blocks `per` neighbours apart."""

    start: int
    blocks: int
    step: int
    length: int
    unit: int

    @classmethod
    def of(cls, grid: Grid) -> _Axis:
        unit = grid.stride if grid.length > 1 else (grid.step or 1) if grid.blocks > 1 else 1
        return cls(grid.start, grid.blocks, grid.step, grid.length, unit)

    @classmethod
    def drawn(cls, part: Part) -> _Axis:
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


class _Group(NamedTuple):
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
        return _Axis.of(self.part.queries).per if self.blocks > 1 else LIMIT

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


# ---- a tile of queries: the runs of keys that it visits -------------------------------------------------------


def _key_runs(part: Part, axis: _Axis, plan: Plan, tile: Tile, width: int) -> Iterator[Rectangle]:
    keys = _Axis.of(part.keys)
    for a, many, shift in axis.touched(tile):
        if part.draws:
            yield from _drawn_keys(part, axis, plan, tile, a, many, shift)
            continue
        gap = keys.per > GAP * keys.length if keys.blocks > 1 and keys.length > 1 else False
        if many == 1 or not keys.regular or gap:
            for x in range(many):
                low = part.keys.start + (a + x) * part.keys.step
                run = Tile(low, part.keys.stride if keys.length > 1 else 1, keys.length)
                own = shift - x * axis.per if many > 1 else shift
                yield from _trimmed_keys(_Group(part, a + x, 1, own, tile, run, 0, 0), width)
            continue
        s_shift = keys.per if keys.blocks > 1 else 0
        run = Tile(part.keys.start + a * part.keys.step, keys.unit, (many - 1) * s_shift + keys.length)
        yield from _trimmed_keys(_Group(part, a, many, shift, tile, run, 0, s_shift), width)


def _drawn_keys(part: Part, axis: _Axis, plan: Plan, tile: Tile, a: int, many: int, shift: int):
    size = part.keys.length // part.draws
    for x in range(many):
        begin = part.keys.start + (a + x) * part.keys.step
        for number in plan.drawn[begin : begin + part.draws]:
            own = shift - x * axis.per if many > 1 else shift
            yield _Group(part, a + x, 1, own, tile, Tile(number * size, 1, size), 0, 0).rectangle()


def _rows(group: _Group) -> tuple[int, int]:
    """The first and the last query of the rectangle that may lie in its blocks."""
    length = (group.blocks - 1) * (group.per if group.blocks > 1 else 0) + group.part.queries.length
    return max(0, -group.shift), min(group.q.count, length - group.shift) - 1


def _trimmed_keys(group: _Group, width: int) -> Iterator[Rectangle]:
    """Without the keys that no query of the tile sees; a long middle that all see becomes `full`."""
    (first, last), part = _rows(group), group.part
    low, high = group.q.start + first * group.q.unit, group.q.start + last * group.q.unit
    a, b = _between(group, *_position_bounds(part, low, high), group.k.count)
    if a > b:
        return
    c, d = _between(group, *_full_bounds(part, low, high), group.k.count) if _whole_rows(group) else (0, -1)
    c, d = max(a, c), min(b, d)
    if d - c + 1 < width:
        yield _cut_keys(group, a, b).rectangle()
        return
    for x, y, full in ((a, c - 1, False), (c, d, True), (d + 1, b, False)):
        if x <= y:
            yield _cut_keys(group, x, y).rectangle(full)


def _cut_keys(group: _Group, a: int, b: int) -> _Group:
    k = Tile(group.k.start + a * group.k.unit, group.k.unit, b - a + 1)
    return group._replace(k=k, s_start=group.s_start + a)


def _position_bounds(part: Part, low: int, high: int) -> tuple[int, int]:
    """Between which positions keys may be seen by queries at low … high."""
    if part.rule in (NEAR, NOT_NEAR):
        top = high if part.past else FAR
        reach = part.span - 1
        return (low + part.lo - reach, min(top, high + part.hi + reach)) if part.rule == NEAR else (-FAR, top)
    return (-FAR, FAR) if part.rule else (low + part.lo, high + part.hi)


def _full_bounds(part: Part, low: int, high: int) -> tuple[int, int]:
    """Between which positions every key is seen by every query at low … high."""
    if part.rule:
        return 1, 0
    a, b = high + part.lo, low + part.hi
    if part.xlo <= part.xhi:  # the larger side of what is excluded
        left, right = (a, min(b, low + part.xlo - 1)), (max(a, high + part.xhi + 1), b)
        return max(left, right, key=lambda side: side[1] - side[0])
    return a, b


def _between(group: _Group, low: int, high: int, count: int) -> tuple[int, int]:
    """The keys t of the run that stand at positions low … high, as far as that is known."""
    if group.part.rule in (NEAR, NOT_NEAR):  # these go by the places of keys
        base, unit = group.k.start, group.k.unit
    elif group.even and not group.part.rule:
        base, unit = group.first_position, group.p_unit
    else:
        return 0, count - 1
    return max(0, -((base - low) // unit)), min(count - 1, (high - base) // unit)


def _whole_rows(group: _Group) -> bool:
    """Do all queries of the rectangle lie in one and the same block, which sees all keys of the run?"""
    first, last = _rows(group)
    return group.blocks == 1 and group.even and not group.part.rule and (first, last) == (0, group.q.count - 1)


# ---- a tile of keys: the runs of queries that visit it ----------------------------------------------------------


def _query_runs(part: Part, axis: _Axis, plan: Plan, tile: Tile, width: int) -> Iterator[Rectangle]:
    queries = _Axis.of(part.queries)
    if part.draws:
        yield from _drawn_queries(part, queries, plan, tile)
        return
    for a, many, first in axis.touched(tile):
        s_shift = axis.per if axis.blocks > 1 else 0
        gap = queries.per > GAP * queries.length if queries.blocks > 1 and queries.length > 1 else False
        if many == 1 or not queries.regular or gap:
            for x in range(many):
                start = part.queries.start + (a + x) * part.queries.step
                run = Tile(start, part.queries.stride if queries.length > 1 else 1, queries.length)
                yield from _trimmed_queries(_Group(part, a + x, 1, 0, run, tile, first - x * s_shift, 0), width)
            continue
        per = queries.per if queries.blocks > 1 else 0
        run = Tile(part.queries.start + a * part.queries.step, queries.unit, (many - 1) * per + queries.length)
        yield from _trimmed_queries(_Group(part, a, many, 0, run, tile, first, s_shift), width)


def _drawn_queries(part: Part, queries: _Axis, plan: Plan, tile: Tile) -> Iterator[Rectangle]:
    size = part.keys.length // part.draws
    for a in range(part.keys.blocks):
        begin = part.keys.start + a * part.keys.step
        for number in plan.drawn[begin : begin + part.draws]:
            first = tile.start - number * size
            if first < size and first + tile.count > 0:
                start = part.queries.start + a * part.queries.step
                run = Tile(start, part.queries.stride if queries.length > 1 else 1, queries.length)
                yield _Group(part, a, 1, 0, run, tile, first, 0).rectangle()


def _trimmed_queries(group: _Group, width: int) -> Iterator[Rectangle]:
    """Without the queries that see no key of the tile; a long middle that sees all becomes `full`."""
    part, count = group.part, group.q.count
    exact = group.even and not part.rule
    a, b, c, d = 0, count - 1, 0, -1
    if exact or part.rule in (NEAR, NOT_NEAR):
        t, u = 0, group.k.count - 1
        if group.blocks == 1:
            t, u = max(0, -group.s_start), min(u, group.s_length - 1 - group.s_start)
        base, unit = (group.first_position, group.p_unit) if exact else (group.k.start, group.k.unit)
        low, high = base + t * unit, base + u * unit  # the positions of the keys
        a, b = _queries_between(group, *_query_bounds(part, low, high))
        if exact and group.blocks == 1 and group.s_start >= 0 and group.s_start + group.k.count <= group.s_length:
            c, d = _queries_between(group, *_full_query_bounds(part, low, high))
    if a > b:
        return
    c, d = max(a, c), min(b, d)
    pieces = ((a, c - 1, 0), (c, d, 1), (d + 1, b, 0)) if d - c + 1 >= width else ((a, b, 0),)
    for x, y, full in pieces:
        if x <= y:
            q = Tile(group.q.start + x * group.q.unit, group.q.unit, y - x + 1)
            yield group._replace(q=q, shift=group.shift + x).rectangle(bool(full))


def _query_bounds(part: Part, low: int, high: int) -> tuple[int, int]:
    """Between which places queries may see keys at low … high."""
    if part.rule in (NEAR, NOT_NEAR):
        bottom, reach = low if part.past else -FAR, part.span - 1
        return (max(bottom, low - part.hi - reach), high - part.lo + reach) if part.rule == NEAR else (bottom, FAR)
    return low - part.hi, high - part.lo


def _full_query_bounds(part: Part, low: int, high: int) -> tuple[int, int]:
    a, b = high - part.hi, low - part.lo
    if part.xlo <= part.xhi:
        left, right = (a, min(b, low - part.xhi - 1)), (max(a, high - part.xlo + 1), b)
        return max(left, right, key=lambda side: side[1] - side[0])
    return a, b


def _queries_between(group: _Group, low: int, high: int) -> tuple[int, int]:
    base, unit = group.q.start, group.q.unit
    return max(0, -((base - low) // unit)), min(group.q.count - 1, (high - base) // unit)


RULES = {0: 0, NODES: 1, NODES_BACK: 1, MEMBERS: 1, NEAR: 2, NOT_NEAR: 2}  # what a kernel must be able to do, as bits


def rules_of(plan: Plan) -> int:
    """Which kinds of rules the parts of a plan have, as bits."""
    found = 0
    for part in plan.parts:
        found |= RULES[part.rule]
    return found
