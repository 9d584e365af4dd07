"""A tile of queries: the runs of keys that it visits, as rectangles."""

from __future__ import annotations

from collections.abc import Iterator

from subquad.kernels.merge.rectangles import GAP, Axis, Group, Rectangle, Tile
from subquad.supports.parts import FAR, NEAR, NOT_NEAR, Part, Plan


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
