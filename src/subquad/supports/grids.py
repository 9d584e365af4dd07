"""Combiner's axial plans (Ren et al. 2021, section 4.3 and appendix C): the sequence as a grid, row by row.

A summary of a column stands at the last token it holds (causal) or at the place it leaves out; one of a row stands at
(row, asking column). So every plan is made of strided blocks: rows, columns, and rows of summaries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from subquad.core.numbers import root
from subquad.supports.builders import diagonal
from subquad.supports.partitions import Group, GroupSet, Partition
from subquad.supports.parts import FAR, Grid, Part, Plan, make_plan
from subquad.supports.support import Support, Within, constant_of_graphs, parse


@dataclass(frozen=True, kw_only=True)
class Axial(Partition):
    """Section 4.3: the sequence as a grid, row by row; position i stands at (i // cols, i % cols)."""

    cols: int | None = None

    def sized(self, n):
        return replace(self, cols=self.cols or root(n))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Its sets of summaries, by the shape of their pool."""
        raise TypeError(f"{type(self).__name__} leaves this to a subclass")

    def group_sets(self, n):
        return tuple(GroupSet(kind, self.cols) for kind in self.kinds)

    def plan(self, n, which):
        """Own row, own column (Rowmajor has none), and the summaries of every kind, sources 1, 2, …"""
        c = self.cols
        assert c is not None
        if which != "main":
            return member_plan(n, c, self.causal, self.kinds[int(which.removeprefix("members:")) - 1])
        parts = direct_parts(n, c, self.causal, column=self.kinds != ("asked-row",))
        return make_plan(parts + group_parts(n, c, self.causal, self.kinds, 1), n)

    def within(self, which, length):
        c = self.cols
        if c is None:
            return None
        if which != "main":
            kind = self.kinds[int(which.removeprefix("members:")) - 1]
            return Within(_summaries(length, c, self.causal, kind), (length,))
        return Within(length, (length, *(_summaries(length, c, self.causal, kind) for kind in self.kinds)))

    def width(self, n: int) -> int:
        return self.cols or root(n)

    def own_row(self, n: int, i: int) -> range:
        start = i - i % self.width(n)
        return range(start, i + 1 if self.causal else min(n, start + self.width(n)))

    def direct(self, n, i):
        """The query's row (up to i) and column (above)."""
        c = self.width(n)
        column = range(i % c, i if self.causal else n, c)
        return [*self.own_row(n, i), *(j for j in column if j // c != i // c)]

    def other_rows(self, n: int, i: int) -> list[int]:
        c = self.width(n)
        return [r for r in range(i // c if self.causal else -(-n // c)) if r != i // c]


@dataclass(frozen=True, kw_only=True)
class AxialVertical(Axial):
    """Every other column a group, without the query's row's element (causal: only the rows above)."""

    kinds = ("column",)

    def groups(self, n, i):
        c = self.width(n)
        every = _columns(n, c, i // c, self.causal)
        return [group for column, group in enumerate(every) if column != i % c and group is not None]


@lru_cache(maxsize=4096)
def _columns(n: int, c: int, row: int, causal: bool) -> list[Group | None]:
    """All columns as a row has them: above it, or without its element."""
    if causal:
        return [_unless_empty(range(column, row * c, c)) for column in range(c)]
    return [_unless_empty(range(column, n, c), hole=row * c + column) for column in range(c)]


def _unless_empty(over: range, hole: int = -1) -> Group | None:
    group = Group(over, hole)
    return group if group.size else None


@dataclass(frozen=True, kw_only=True)
class AxialHorizontal(Axial):
    """Every other row (causal: every earlier one) a group, without the query's column's element.

    `split`: two groups per row, strictly left and strictly right of the query's column.
    """

    split: bool = False

    @property
    def kinds(self):
        return ("left", "right") if self.split else ("row",)

    def groups(self, n, i):
        c = self.width(n)
        every = [_rows(n, c, i % c, half) for half in ((-1, 1) if self.split else (0,))]
        return [group for r in self.other_rows(n, i) for rows in every if (group := rows[r]) is not None]


@lru_cache(maxsize=4096)
def _rows(n: int, c: int, column: int, half: int) -> list[Group | None]:
    """All rows without the column's element, or only what is left (-1) or right (1) of it."""
    found = []
    for start in range(0, n, c):
        own, stop = start + column, min(n, start + c)
        over = {0: range(start, stop), -1: range(start, min(stop, own)), 1: range(own + 1, stop)}[half]
        found.append(_unless_empty(over, -1 if half else own))
    return found


@dataclass(frozen=True, kw_only=True)
class AxialRowmajor(Axial):
    """The query's row directly, every other row (causal: every earlier one) a group that the query's column asks.

    The local query is the token's at (row, own column); where the last row is too short to have one, it is 0.
    """

    kinds = ("asked-row",)

    def direct(self, n, i):
        return self.own_row(n, i)

    def groups(self, n, i):
        every = _asked_rows(n, self.width(n), i % self.width(n))
        return [every[r] for r in self.other_rows(n, i)]


@lru_cache(maxsize=4096)
def _asked_rows(n: int, c: int, column: int) -> list[Group]:
    """All rows, each asked by its token in the column."""
    return [Group(range(start, min(n, start + c)), query_position=start + column) for start in range(0, n, c)]


# ---- blocks -------------------------------------------------------------------------------------------------


def grid_shape(n: int, c: int) -> tuple[int, int]:
    """Rows of the grid, and how many tokens the last one has."""
    rows = -(-n // c)
    return rows, n - (rows - 1) * c


def has_groups(n: int, c: int, kind: str) -> bool:
    """One row has no other rows; one column has no other columns."""
    return n > c and (c > 1 or kind == "asked-row")


def _summaries(n: Any, c: int, causal: bool, kind: str) -> Any:
    """How many summaries of a kind there are places for; causal, only complete rows have any."""
    return (-(-n // c) - int(causal)) * c * (n > c) * int(c > 1 or kind == "asked-row")


def direct_parts(n: int, c: int, causal: bool, *, column: bool = True) -> list[Part]:
    """Every token to its own row and, if wanted, to the rest of its own column."""
    parts = diagonal(0, n, c, causal=causal)
    return parts + _other_rows(n, c, causal) if column and n > c else parts


def group_parts(n: int, c: int, causal: bool, kinds: tuple[str, ...], first: int) -> list[Part]:
    """The summaries of every kind, sources first, first + 1, …"""
    parts: list[Part] = []
    for source, kind in enumerate(kinds, first):
        if not has_groups(n, c, kind):
            continue
        if kind == "column":
            parts += _row_of_summaries(n, c, causal, source)
        else:
            ends = {"left": (1, c), "right": (0, c - 1)}.get(kind, (0, c))  # nothing left of the first column
            parts += _other_rows(n, c, causal, source=source, first=ends[0], last=ends[1])
    return parts


def _other_rows(
    n: int, c: int, causal: bool, *, source: int | None = None, first: int = 0, last: int | None = None
) -> list[Part]:
    """Each token to the other rows of its column (causal: above), for the columns first … last-1.

    To their tokens (source None) or to the summaries there, which without causality fill a whole last row.
    """
    rows, rest = grid_shape(n, c)
    last = c if last is None else last
    parts = []
    for low, high, length in ((first, min(rest, last), rows), (max(rest, first), last, rows - 1)):
        count, keys = high - low, length if causal or source is None else rows
        if count <= 0 or length < 1:
            continue
        if not causal:  # the query's row is attended in the row
            queries, others = Grid(low, count, 1, length, c), Grid(low, count, 1, keys, c)
            parts.append(Part(queries, others, source or 0, xlo=0, xhi=0))
        elif length > 1:  # row r sees rows 0 … r-1: counted from row 1, a triangle
            below, above = (Grid(at, count, 1, length - 1, c) for at in (low + c, low))
            parts.append(Part(below, above, source or 0, below, hi=0))
    return parts


def _row_of_summaries(n: int, c: int, causal: bool, source: int) -> list[Part]:
    """Each row to one row of column summaries, its own or, causal, the one above; not to the query's column's."""
    rows, rest = grid_shape(n, c)
    up = c if causal else 0
    parts = []
    if rows - 1 > bool(causal):
        blocks = rows - 1 - bool(causal)
        parts.append(Part(Grid(up, blocks, c, c), Grid(0, blocks, c, c), source, xlo=-up, xhi=-up))
    start = (rows - 1) * c
    return [*parts, Part(Grid(start, 1, 0, rest), Grid(start - up, 1, 0, c), source, xlo=-up, xhi=-up)]


def member_plan(n: int, c: int, causal: bool, kind: str) -> Plan:
    """How the summaries of a kind attend to their members; causal, only complete rows are ever summarised."""
    rows, rest = grid_shape(n, c)
    if not has_groups(n, c, kind):
        return make_plan([], 0)
    if kind == "column":
        if causal:
            above = Grid(0, c, 1, rows - 1, c)
            return make_plan([Part(above, above, hi=0)], (rows - 1) * c)
        lengths = ((0, rest, rows), (rest, c - rest, rows - 1))
        return make_plan(
            [Part(Grid(a, m, 1, rows, c), Grid(a, m, 1, size, c), xlo=0, xhi=0) for a, m, size in lengths if m * size],
            rows * c,
        )
    low, high = {"left": (-FAR, -1), "right": (1, FAR)}.get(kind, (-FAR, FAR))
    hole: dict[str, Any] = {"xlo": 0, "xhi": 0} if kind == "row" else {}
    whole = Grid(0, rows - 1, c, c)
    parts = [Part(whole, whole, lo=low, hi=high, **hole)]
    if not causal:
        start = (rows - 1) * c
        parts.append(Part(Grid(start, 1, 0, c), Grid(start, 1, 0, rest), lo=low, hi=high, **hole))
    return make_plan(parts, (rows - bool(causal)) * c)


@dataclass(frozen=True, kw_only=True)
class AxialMixture(Support):
    """Several axial plans over one grid: the query's row and column, and each component's summaries.

    Plans: "direct", "groups:m" (component m's kinds, sources 0, 1, …), "joint" (all of them, summaries from source 1).
    """

    cols: int
    kinds: tuple[tuple[str, ...], ...]

    def plan(self, n, which):
        c, causal = self.cols, self.causal
        if which.startswith("groups:"):
            return make_plan(group_parts(n, c, causal, self.kinds[int(which.removeprefix("groups:"))], 0), n)
        every = tuple(kind for kinds in self.kinds for kind in kinds)
        parts = direct_parts(n, c, causal, column=set(every) != {"asked-row"})
        return make_plan(parts if which == "direct" else parts + group_parts(n, c, causal, every, 1), n)

    def within(self, which, length):
        about = (self.cols, self.causal)
        if which.startswith("groups:"):
            kinds = self.kinds[int(which.removeprefix("groups:"))]
            return Within(length, tuple(_summaries(length, *about, kind) for kind in kinds))
        every = () if which == "direct" else (kind for kinds in self.kinds for kind in kinds)
        return Within(length, (length, *(_summaries(length, *about, kind) for kind in every)))


@constant_of_graphs
def mixture_text(texts: tuple[str, ...]) -> str:
    """The text of the mixture of some axial plans, given by theirs: a constant of a compiled graph."""
    plans = [cast(Axial, parse(text)) for text in texts]
    first = plans[0]
    assert first.cols is not None
    return AxialMixture(causal=first.causal, cols=first.cols, kinds=tuple(plan.kinds for plan in plans)).text
