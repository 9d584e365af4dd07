"""Parts: the regular pieces of which a structured support is made.

A part is a grid of equal blocks. In block a, some queries attend to some keys,

    query (a, r) stands at  queries.start + a·queries.step + r·queries.stride
    key   (a, s) stands at  keys.start + a·keys.step + s·keys.stride   of its source (the tokens, or summaries of them)

and may see it when the offset  position(key) - position(query)  lies in [lo, hi] and not in [xlo, xhi].
Sliding windows, diagonal blocks, grid columns and "everyone to these few" are all of this form. The grids are strided
*views* of the sequence, so no length needs padding and nothing is copied: what sticks out at either end is a part of
its own. A plan is a list of parts for one length.

Where keys stand in no regular place, a part may *draw*: block a takes `draws` blocks of its source, each as long as
keys.length / draws, whose numbers stand in the plan's list of drawn blocks from keys.start + a·keys.step on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

FAR = 1 << 40  # an offset that no sequence reaches: "no limit"
NODES, NODES_BACK, MEMBERS = 1, 2, 3  # `Part.rule`: relations of a binary tree, see `Part._binary`
NEAR, NOT_NEAR = 4, 5  # `Part.rule`: a window that is rounded to whole spans, see `Part._spans`
SMALL = 24  # rows of a block that is not worth a tile of its own


class Grid(NamedTuple):
    """Equal blocks of places: place (a, r) is start + a·step + r·stride."""

    start: int
    blocks: int = 1
    step: int = 0
    length: int = 1
    stride: int = 1

    @classmethod
    def of(cls, places: range) -> Grid:
        """One block."""
        return cls(places.start, 1, 0, len(places), places.step)

    def cut(self, block: int, blocks: int, inside: slice) -> Grid:
        """Some of the blocks, and of each the same stretch."""
        start = self.start + block * self.step + inside.start * self.stride
        return Grid(start, blocks, self.step if blocks > 1 else 0, inside.stop - inside.start, self.stride)

    def moved(self, by: int) -> Grid:
        return self._replace(start=self.start + by)

    @property
    def end(self) -> int:
        """Behind the last place; 0 = there is none."""
        if not self.blocks or not self.length:
            return 0
        return 1 + self.start + max(0, (self.blocks - 1) * self.step) + max(0, (self.length - 1) * self.stride)

    def places(self) -> np.ndarray:
        return self.start + np.arange(self.blocks)[:, None] * self.step + np.arange(self.length) * self.stride


class Limits(NamedTuple):
    """A query at position i sees the positions of [i+lo, i+hi] without [i+xlo, i+xhi], up to i+end.

    Intervals grow to whole spans: from the start of the span of their first position to the end of that of their last.
    """

    lo: int = -FAR
    hi: int = FAR
    xlo: int = 1
    xhi: int = 0
    span: int = 1
    end: int = FAR


@dataclass(frozen=True)
class Part:
    """One grid of query blocks × key blocks; see the module docstring."""

    queries: Grid
    keys: Grid
    source: int = 0  # which key set: 0 = the tokens
    positions: Grid | None = None  # where the keys stand among the queries; None = where they are stored
    lo: int = -FAR
    hi: int = FAR
    xlo: int = 1  # an empty interval: nothing excluded
    xhi: int = 0
    draws: int = 0  # > 0: the keys are that many drawn blocks of the source
    rule: int = 0  # 0: the intervals above; else a relation of another kind
    span: int = 1  # rule=NEAR: tokens of a span
    past: bool = False  # rule=NEAR: only keys at or before the query
    origin: int = 0  # where place 0 stands in the whole sequence: not 0 in a shard (`supports.shards`)
    numbers: Grid | None = None  # which keys of the whole source they are; None = those where they are stored
    fresh: bool = False  # no earlier part has touched these queries (set by `make_plan`)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept: masks are looked up by their part in every call."""
        return hash((self.queries, self.keys, self.source, self.positions, self.rule, self.lo, self.hi))

    @cached_property
    def placed(self) -> Grid:
        return self.keys if self.positions is None else self.positions

    def piece(self, block: int, blocks: int, rows: slice, keys: slice) -> Part:
        """Some blocks of the part, with some of their rows and keys."""
        stored, placed = (grid.cut(block, blocks, keys) for grid in (self.keys, self.placed))
        return replace(self, queries=self.queries.cut(block, blocks, rows), keys=stored, positions=placed, fresh=False)

    @cached_property
    def is_self(self) -> bool:
        """One key per query: the product is elementwise, a matrix kernel would crawl."""
        return self.queries.length == 1 and self.keys.length == 1

    @cached_property
    def pairs(self) -> int:
        return self.queries.blocks * self.queries.length * self.keys.length

    def allowed(self) -> np.ndarray:
        """Who may see whom inside the blocks: bool (blocks, or 1 where all blocks agree, rows, keys)."""
        if self.rule:
            return self._spans() if self.rule in (NEAR, NOT_NEAR) else self._binary()
        q, p = self.queries, self.placed
        same = q.step == p.step or q.blocks == 1
        block = np.arange(1 if same else q.blocks)[:, None, None]  # (A, 1, 1)
        row, key = np.arange(q.length)[:, None], np.arange(p.length)  # (L, 1), (S,)
        offset = p.start - q.start + block * (p.step - q.step) + key * p.stride - row * q.stride
        inside = (offset >= self.lo) & (offset <= self.hi)
        return inside & ~((offset >= self.xlo) & (offset <= self.xhi))

    def _spans(self) -> np.ndarray:
        """NEAR: a key is seen when some token of its span of `span` tokens lies at an offset in [lo, hi].

        NOT_NEAR is the complement. Blocks that are a whole number of spans apart agree.
        """
        q, k = self.queries, self.placed
        same = q.blocks == 1 or (q.step == k.step and q.step % self.span == 0)
        row, key = (grid.places()[: 1 if same else None] + self.origin for grid in (q, k))
        row, key = row[:, :, None], key[:, None]  # (A, L, 1), (A, 1, S)
        first = key // self.span * self.span
        near = (first + self.span - 1 - row >= self.lo) & (first - row <= self.hi)
        return (near if self.rule == NEAR else ~near) & ((key <= row) | (not self.past))

    def _binary(self) -> np.ndarray:
        """Relations of a binary (Fenwick) tree, the same in every block: bool (1, rows, keys).

        Node m ≥ 1 holds the lowbit(m) tokens m - lowbit(m) … m-1 and stands at place m-1, relative to its block.
        NODES: query r sees the nodes whose tokens make up 0 … r-1, and itself where it is a node of its own.
        NODES_BACK: the mirror image of it, without itself. MEMBERS: node r+1 sees the tokens that it holds.
        """
        row = np.arange(self.queries.length)[:, None] * self.queries.stride  # (L, 1)
        key = self.keys.start - self.queries.start + np.arange(self.keys.length) * self.keys.stride  # (S,)
        if self.rule == MEMBERS:
            node = row + 1
            return ((key >= node - (node & -node)) & (key < node))[None]
        if self.rule == NODES_BACK:
            row, node = self.queries.length - 1 - row, self.queries.length - key
            return (row & -(node & -node) == node)[None]
        node = key + 1
        return ((row & -(node & -node) == node) | ((key == row) & (key % 2 == 0)))[None]

    @cached_property
    def limits(self) -> Limits:
        """The rule as intervals of positions; where it is of another kind, what no query of it sees beyond."""
        if not self.rule:
            return Limits(self.lo, self.hi, self.xlo, self.xhi)
        end = 0 if self.past else FAR
        if self.rule == NEAR:
            return Limits(self.lo, self.hi, span=self.span, end=end)
        if self.rule == NOT_NEAR:
            return Limits(xlo=self.lo, xhi=self.hi, span=self.span, end=end)
        return Limits(0 if self.rule == NODES_BACK else -FAR, 0 if self.rule in (NODES, MEMBERS) else FAR)

    @cached_property
    def is_interval(self) -> bool:
        """Do the limits say it all?"""
        return self.rule in (0, NEAR, NOT_NEAR) and (not self.draws or self.sees_everything)

    @cached_property
    def in_spans(self) -> Part:
        """Small blocks in a row that see themselves, as one block whose rule is spans; any other part as it is."""
        q, past = self.queries, self.is_triangle
        in_a_row = q == self.keys == self.placed and q.stride == 1 and q.step == q.length and q.blocks > 1
        begins = (q.start + self.origin) % q.length == 0 and self.numbers is None
        if not in_a_row or not begins or not 1 < q.length <= SMALL or not (past or self.sees_everything):
            return self
        whole = Grid(q.start, 1, 0, q.blocks * q.length)
        rule: dict[str, Any] = {"rule": NEAR, "span": q.length, "past": past, "lo": 0, "hi": 0}
        return replace(self, queries=whole, keys=whole, positions=None, **rule)

    def joined_with(self, other: Part) -> Part | None:
        """One part for both, where the other's queries follow on and the keys of one are the first of the other's."""
        same = replace(other, queries=self.queries, keys=self.keys, positions=self.positions) == self
        grids = (self.queries, other.queries, self.keys, other.keys, self.placed, other.placed)
        if not same or not self.is_interval or self.draws or any(grid.blocks > 1 for grid in grids):
            return None
        rows, more = self.queries, other.queries
        follows = rows.stride == more.stride and rows.start + rows.length * rows.stride == more.start
        starts = [(grid.start, grid.stride) for grid in (self.keys, other.keys, self.placed, other.placed)]
        if not follows or starts[0] != starts[1] or starts[2] != starts[3]:
            return None
        shorter, longest = sorted((self, other), key=lambda part: part.keys.length)
        if shorter.keys.length < longest.keys.length:  # no query of the shorter one may see the keys it lacks
            places, last = shorter.placed, shorter.queries.start + (shorter.queries.length - 1) * shorter.queries.stride
            if shorter.rule or places.start + places.length * places.stride - last <= shorter.hi:
                return None
        return replace(longest, queries=rows._replace(length=rows.length + more.length))

    @cached_property
    def is_triangle(self) -> bool:
        """Row r sees exactly the keys 0..r of its block: a causal kernel needs no mask."""
        q, p = self.queries, self.placed
        return (
            p.start == q.start
            and (q.blocks == 1 or p.step == q.step)
            and not self.rule
            and q.length == p.length
            and p.stride == q.stride > 0
            and self.hi == 0
            and self.lo <= -p.stride * (p.length - 1)
            and self.xlo > self.xhi
        )

    @cached_property
    def sees_everything(self) -> bool:
        q, p = self.queries, self.placed
        last = (q.blocks - 1) * (p.step - q.step)
        low = p.start - q.start + min(0, last) - (q.length - 1) * q.stride
        high = p.start - q.start + max(0, last) + (p.length - 1) * p.stride
        excluded = self.xlo <= self.xhi and self.xhi >= low and self.xlo <= high
        return not self.rule and self.lo <= low and high <= self.hi and not excluded


@dataclass(frozen=True)
class Plan:
    """The parts of one attention for one length."""

    parts: tuple[Part, ...]
    rows: int  # how many queries there are
    drawn: tuple[int, ...] = ()  # the blocks that parts with draws refer to

    @cached_property
    def pairs(self) -> int:
        """How many (query, key) pairs are multiplied."""
        return sum(part.pairs for part in self.parts)

    @cached_property
    def reaches(self) -> dict[int, int]:
        """Per source: the keys that are attended to stand before this place."""
        found: dict[int, int] = {}
        for part in self.parts:
            end = part.keys.end
            if part.draws and end:
                last = part.keys.start + (part.keys.blocks - 1) * part.keys.step + part.draws
                end = (max(self.drawn[part.keys.start : last]) + 1) * (part.keys.length // part.draws)
            found[part.source] = max(found.get(part.source, 0), end)
        return found

    @cached_property
    def joined(self) -> tuple[Part, ...]:
        """The parts, with chunks of one rectangle, and small blocks in a row, put together: for kernels that skip what
        the limits exclude.
        """
        found: list[Part] = []
        for part in (part.in_spans for part in self.parts):
            whole = found[-1].joined_with(part) if found else None
            found[-1:] = [whole] if whole else [*found[-1:], part]
        return tuple(found)

    @cached_property
    def lowered(self) -> dict[tuple, Any]:
        """What kernels have made of the plan, kept as long as the plan is."""
        return {}


def make_plan(parts: Iterable[Part], rows: int, drawn: Iterable[int] = ()) -> Plan:
    """The parts in order, each marked `fresh` when no earlier part touched its queries."""
    touched, marked = np.zeros(rows, dtype=bool), []
    for part in parts:
        places = part.queries.places()
        marked.append(replace(part, fresh=not touched[places].any()))
        touched[places] = True
    return Plan(tuple(marked), rows, tuple(drawn))
