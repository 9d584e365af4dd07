"""A tile of keys: the runs of queries that visit it, as rectangles."""

from __future__ import annotations

from collections.abc import Iterator

from subquad.kernels.merge.rectangles import GAP, Axis, Group, Rectangle, Tile
from subquad.supports.parts import FAR, NEAR, NOT_NEAR, Part, Plan


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
