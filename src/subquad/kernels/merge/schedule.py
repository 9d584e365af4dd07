"""The parts of a plan as tiles for a GPU: which rectangles (queries × keys) each tile of queries, or of keys, visits.

A tile is up to `size` places start + i·unit. Parts whose queries stand side by side share tiles of unit 1; parts whose
queries are w apart (columns of a grid) need tiles of unit w, which are a *pass* of their own: it takes up the running
softmax where the pass before has left it. Most plans are one pass. The gradients of keys and values go by tiles of keys
in the same way, so that every row is written by one program: no atomics, the same bits at every run. `key_runs` are the
runs of keys that a tile of queries visits, `query_runs` the runs of queries that visit a tile of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from subquad.kernels.merge.rectangles import GAP, Axis, Group, Rectangle, Tile
from subquad.supports.parts import FAR, MEMBERS, NEAR, NODES, NODES_BACK, NOT_NEAR, Part, Plan


class Pass(NamedTuple):
    """Tiles of one unit, and the rectangles of each, source by source."""

    tiles: list[Tile]
    rectangles: list[list[list[Rectangle]]]  # per tile, per source


def by_queries(plan: Plan, sources: int, size: int, width: int) -> list[Pass]:
    """The passes over tiles of queries; keys come `width` at a time."""
    axes = [(part, Axis.of(part.queries)) for part in plan.parts]
    return _passes(axes, plan, plan.rows, size, key_runs, [part.source for part in plan.parts], sources, width)


def by_keys(plan: Plan, source: int, count: int, size: int, width: int) -> list[Pass]:
    """The passes over tiles of the `count` keys of one source; queries come `width` at a time."""
    parts = [part for part in plan.parts if part.source == source]
    axes = [(part, Axis.drawn(part) if part.draws else Axis.of(part.keys)) for part in parts]
    return _passes(axes, plan, count, size, query_runs, [0] * len(parts), 1, width)


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


RULES = {0: 0, NODES: 1, NODES_BACK: 1, MEMBERS: 1, NEAR: 2, NOT_NEAR: 2}  # what a kernel must be able to do, as bits


def rules_of(plan: Plan) -> int:
    """Which kinds of rules the parts of a plan have, as bits."""
    found = 0
    for part in plan.parts:
        found |= RULES[part.rule]
    return found


def key_runs(part: Part, axis: Axis, plan: Plan, tile: Tile, width: int) -> Iterator[Rectangle]:
    keys = Axis.of(part.keys)
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
                yield from _trimmed_keys(Group(part, a + x, 1, own, tile, run, 0, 0), width)
            continue
        s_shift = keys.per if keys.blocks > 1 else 0
        run = Tile(part.keys.start + a * part.keys.step, keys.unit, (many - 1) * s_shift + keys.length)
        yield from _trimmed_keys(Group(part, a, many, shift, tile, run, 0, s_shift), width)


def _drawn_keys(part: Part, axis: Axis, plan: Plan, tile: Tile, a: int, many: int, shift: int):
    size = part.keys.length // part.draws
    for x in range(many):
        begin = part.keys.start + (a + x) * part.keys.step
        for number in plan.drawn[begin : begin + part.draws]:
            own = shift - x * axis.per if many > 1 else shift
            yield Group(part, a + x, 1, own, tile, Tile(number * size, 1, size), 0, 0).rectangle()


def _rows(group: Group) -> tuple[int, int]:
    """The first and the last query of the rectangle that may lie in its blocks."""
    length = (group.blocks - 1) * (group.per if group.blocks > 1 else 0) + group.part.queries.length
    return max(0, -group.shift), min(group.q.count, length - group.shift) - 1


def _trimmed_keys(group: Group, width: int) -> Iterator[Rectangle]:
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


def _cut_keys(group: Group, a: int, b: int) -> Group:
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


def _between(group: Group, low: int, high: int, count: int) -> tuple[int, int]:
    """The keys t of the run that stand at positions low … high, as far as that is known."""
    if group.part.rule in (NEAR, NOT_NEAR):  # these go by the places of keys
        base, unit = group.k.start, group.k.unit
    elif group.even and not group.part.rule:
        base, unit = group.first_position, group.p_unit
    else:
        return 0, count - 1
    return max(0, -((base - low) // unit)), min(count - 1, (high - base) // unit)


def _whole_rows(group: Group) -> bool:
    """Do all queries of the rectangle lie in one and the same block, which sees all keys of the run?"""
    first, last = _rows(group)
    return group.blocks == 1 and group.even and not group.part.rule and (first, last) == (0, group.q.count - 1)


def query_runs(part: Part, axis: Axis, plan: Plan, tile: Tile, width: int) -> Iterator[Rectangle]:
    queries = Axis.of(part.queries)
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
                yield from _trimmed_queries(Group(part, a + x, 1, 0, run, tile, first - x * s_shift, 0), width)
            continue
        per = queries.per if queries.blocks > 1 else 0
        run = Tile(part.queries.start + a * part.queries.step, queries.unit, (many - 1) * per + queries.length)
        yield from _trimmed_queries(Group(part, a, many, 0, run, tile, first, s_shift), width)


def _drawn_queries(part: Part, queries: Axis, plan: Plan, tile: Tile) -> Iterator[Rectangle]:
    size = part.keys.length // part.draws
    for a in range(part.keys.blocks):
        begin = part.keys.start + a * part.keys.step
        for number in plan.drawn[begin : begin + part.draws]:
            first = tile.start - number * size
            if first < size and first + tile.count > 0:
                start = part.queries.start + a * part.queries.step
                run = Tile(start, part.queries.stride if queries.length > 1 else 1, queries.length)
                yield Group(part, a, 1, 0, run, tile, first, 0).rectangle()


def _trimmed_queries(group: Group, width: int) -> Iterator[Rectangle]:
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


def _queries_between(group: Group, low: int, high: int) -> tuple[int, int]:
    base, unit = group.q.start, group.q.unit
    return max(0, -((base - low) // unit)), min(group.q.count - 1, (high - base) // unit)
