"""Combiner's plans over blocks of the sequence: fixed spans, a window over spans and a tree of spans."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from subquad.supports.builders import CHUNKS, diagonal, rows_to_keys, window_block, windows
from subquad.supports.kept import Kept, first_ones, recent
from subquad.supports.partitions import Group, GroupSet, Partition
from subquad.supports.parts import NEAR, NOT_NEAR, Grid, Part, Plan, make_plan
from subquad.supports.support import Within


def default_span(n: int, depth: int = 1) -> int:
    """The branching s ≈ n^(1/(depth+1)), which makes all levels equally wide, to the nearest 2^k or 3·2^k.

    Blocks of these sizes fill the vector registers; between 32 and 256 they are the ones that run fastest.
    """
    ideal = n ** (1 / (depth + 1))
    friendly = [b << e for e in range(24) for b in (2, 3)]
    return min([1, *friendly], key=lambda s: abs(math.log(s / ideal)))


def span_members(n: int, span: int, sinks: int = 0) -> Plan:
    """Summary a attends to its span of the n keys below (the last one may be shorter), without the sinks."""
    full, rest = divmod(n, span)
    whole = -(-sinks // span)  # the first span without a sink
    parts = [Part(Grid(whole, full - whole, 1), Grid(whole * span, full - whole, span, span))] if full > whole else []
    cut = min(n, whole * span)
    if sinks % span and cut > sinks:  # a span that begins with sinks
        parts.append(Part(Grid(whole - 1), Grid.of(range(sinks, cut))))
    if rest and full >= whole:
        parts.append(Part(Grid(full), Grid.of(range(full * span, n))))
    return make_plan(parts, full + bool(rest))


def _within_spans(self: Any, which: str, length: Any) -> Within | None:
    """`Support.within` for a tree of spans, or for one level of them."""
    s = self.span
    if s is None or which.startswith("from:"):
        return None
    counts = [-(-length // s**level) for level in range(getattr(self, "depth", 1) + 1)]  # tokens, spans, spans of spans
    if which == "main":
        return Within(length, tuple(counts))
    level = int(which.removeprefix("members:"))
    return Within(counts[level], (counts[level - 1],))


@dataclass(frozen=True, kw_only=True)
class Fixed(Partition):
    """Section 4.1: the query's span of s tokens directly, every other span (causal: every earlier one) a group.

    Eq. 10 is 1-based, says "mod" for "div" and drops the first span; here span(j) = ⌊j/s⌋ and all spans count. The sets
    are written for any `depth`, of which this is 1: see `Tree`.
    """

    span: int | None = None
    depth: ClassVar[int] = 1

    def sized(self, n):
        return replace(self, span=self.branch(n))

    def branch(self, n: int) -> int:
        return self.span or default_span(n)

    def direct(self, n, i):
        s = self.branch(n)
        return range(i // s * s, i + 1 if self.causal else min(n, i // s * s + s))

    def groups(self, n, i):
        s, found = self.branch(n), []
        for level in range(1, self.depth + 1):
            size = s**level
            around = i // (size * s) * (size * s) if level < self.depth else 0
            end = n if level == self.depth else min(n, around + size * s)
            last = i // size if self.causal else -(-end // size)
            found += [_block(n, s, level, a) for a in range(around // size, last) if a != i // size]
        return found

    def group_sets(self, n):
        s, depth = self.span, self.depth
        while depth > 1 and s ** (depth - 1) >= n:
            depth -= 1  # the tree is not that deep: all tokens are in the first block
        return tuple(GroupSet("spans", s**level, level - 1) for level in range(1, depth + 1))

    def plan(self, n, which):
        s, causal = self.span, self.causal
        assert s is not None
        if which.startswith("from:"):
            return self._continued(n, s, int(which.removeprefix("from:")))
        if which != "main":
            level = int(which.removeprefix("members:"))
            return span_members(-(-n // s ** (level - 1)), s)
        parts = diagonal(0, n, s, causal=causal)
        for level in range(1, self.depth + 1):
            size = s**level
            if level == self.depth or size * s >= n:
                ends = range(size - 1, size * -(-n // size), size)  # a summary stands where its block ends
                rule = {"hi": -1} if causal else {"xlo": 0, "xhi": size - 1}
                parts += rows_to_keys(range(n), range(len(ends)), positions=ends, source=level, **rule)
                break
            parts += self._inside(n, s, level)
        return make_plan(parts, n)

    within = _within_spans

    def _continued(self, n: int, s: int, before: int) -> Plan:
        """ "from:a" is "main" for n causal tokens that a complete blocks of s stand before.

        Source t has the blocks of level t from the first one in the parent of the first token on; the top has all.
        """
        parts, begin = diagonal(0, n, s, causal=True), before * s
        for level in range(1, self.depth + 1):
            size, parent = s**level, s ** (level + 1)
            top = level == self.depth
            inside = begin if top else begin % parent  # tokens before the first one, in its parent
            rows = n if top or not inside else min(n, parent - inside)  # tokens in the parent that has begun
            if top or inside:
                complete = (inside + rows) // size
                ends = range(size - 1 - inside, complete * size - inside, size)  # counted from the first token
                parts += rows_to_keys(range(rows), range(complete), positions=ends, source=level, hi=-1)
            if not top:
                first = rows if inside else 0  # the parents that begin among the n tokens
                parts += [
                    replace(
                        part,
                        queries=part.queries.moved(first),
                        keys=part.keys.moved(s if inside else 0),
                        positions=part.placed.moved(first),
                    )
                    for part in self._inside(n - first, s, level)
                ]
        return make_plan(parts, n)

    def begin(self, i):
        return i // self.span * self.span

    def kept(self, margin):
        s, inner = self.span, range(1, self.depth)
        levels = (recent(s, margin, source=level, unit=s**level) for level in inner)
        return (recent(s - 1, margin), *levels, Kept(self.depth, unit=s**self.depth))

    def sees(self, source, i, entry):
        """Tokens of the query's block; blocks before i inside its block of the next level, at the top all of them."""
        size, parent = self.span**source, self.span ** (source + 1)
        if source == 0:
            return (entry <= i) & (entry >= i // parent * parent)
        seen = entry < i // size
        return seen if source == self.depth else seen & (entry * size >= i // parent * parent)

    def ranges(self, i):
        s, runs = self.span, [range(i // self.span * self.span, i + 1)]
        for level in range(1, self.depth + 1):
            size = s**level
            first = 0 if level == self.depth else i // (size * s) * s
            runs.append(range(first, i // size))
        return list(enumerate(runs))

    def _inside(self, n: int, s: int, level: int) -> list[Part]:
        """Level t < depth: each block of s^(t+1) queries sees the s summaries inside it, except its own.

        Causal, the rows of a block go in chunks that take only the summaries some row can see.
        """
        size, parent, causal = s**level, s ** (level + 1), self.causal
        rule = {"hi": -1} if causal else {"xlo": 0, "xhi": size - 1}
        full, rest = divmod(n, parent)
        parts = []
        for first, blocks, rows in ((0, full, parent), (full * parent, 1, rest)):
            if not blocks or not rows:
                continue
            step = max(size, 128, -(-rows // CHUNKS // size) * size) if causal else rows
            for start in range(0, rows, step):
                chunk = min(step, rows - start)
                seen = -(-(start + chunk) // size) - 1 if causal else -(-rows // size)
                if seen > 0:
                    queries = Grid(first + start, blocks, parent, chunk)
                    keys = Grid(first // size, blocks, s, seen)
                    ends = Grid(first + size - 1, blocks, parent, seen, size)
                    parts.append(Part(queries, keys, level, ends, **rule))
        return parts


@dataclass(frozen=True, kw_only=True)
class Tree(Fixed):
    """The remark in section 3.1: groups of groups. Level t has blocks of s^t tokens, t = 1 … depth.

    Query i attends directly to its own block of s tokens, at level t < depth to the other blocks of s^t inside its
    own block of s^(t+1), at the top to all other blocks. A block of level t > 1 is a group of its blocks of level
    t-1. Causal: up to i, and earlier blocks only. depth=1 is `Fixed`; s ≈ n^(1/(depth+1)).
    """

    depth: int = 2  # type: ignore[misc]

    def branch(self, n: int) -> int:
        return self.span or max(2, default_span(n, self.depth))


@dataclass(frozen=True, kw_only=True)
class Window(Partition):
    """A sliding window over spans: the first `sinks` tokens directly, and every token from the start of the span that
    contains i - window + 1 up to i (bidirectional: to the end of the span that contains i + window - 1); every other
    span (causal: every complete one before that) is a group. A sink is in no group. window=1, sinks=0 is `Fixed`.
    """

    span: int | None = None
    window: int = 256
    sinks: int = 0

    def sized(self, n):
        return replace(self, span=self.span or default_span(n))

    def near(self, n: int, i: int) -> range:
        """The window, rounded to whole spans."""
        s = self.span or default_span(n)
        first = max(0, (i - self.window + 1) // s * s)
        return range(first, i + 1 if self.causal else min(n, (i + self.window - 1) // s * s + s))

    def direct(self, n, i):
        near = self.near(n, i)
        sinks = range(min(n, self.sinks, i + 1) if self.causal else min(n, self.sinks))
        return [*(j for j in sinks if j not in near), *near]

    def groups(self, n, i):
        s, near = self.span or default_span(n), self.near(n, i)
        blocks = (_span(n, s, a, self.sinks) for a in range(-(-n // s)))
        past = (block for block in blocks if block.over and (not self.causal or block.over[-1] < near.start))
        return [block for block in past if block.over[0] not in near]

    def group_sets(self, n):
        return (GroupSet("spans", self.span, skip=self.sinks),)

    def plan(self, n, which):
        s, w, causal = self.span, self.window, self.causal
        assert s is not None
        if which.startswith("from:"):
            return self._continued(n, int(which.removeprefix("from:")))
        if which != "main":
            return span_members(n, s, self.sinks)
        rule = {"rule": NEAR, "span": s, "lo": 1 - w, "hi": 0 if causal else w - 1, "past": causal}
        block = -(-window_block(w) // s) * s  # whole spans: then all blocks have the same mask
        reach = windows(0, n, w + s - 2, 0 if causal else w + s - 2, block=block)
        parts = [replace(p, **rule) for p in reach]
        sinks = min(self.sinks, n)
        parts += [
            replace(p, **{**rule, "rule": NOT_NEAR})
            for p in rows_to_keys(range(n), range(sinks), hi=-w if causal else n, positions=range(sinks))
        ]
        begin = self.sinks // s  # spans of sinks alone are no keys
        ends = range(s - 1, s * -(-n // s), s)[begin:]
        seen = {"hi": -w} if causal else {"xlo": 1 - w, "xhi": w + s - 2}
        parts += rows_to_keys(range(n), range(-(-n // s))[begin:], positions=ends, source=1, **seen)
        return make_plan(parts, n)

    within = _within_spans

    def kept(self, margin):
        near = recent(self.window + self.span - 2, margin)
        sinks = (first_ones(self.sinks),) if self.sinks else ()
        return (*sinks, near, Kept(1, unit=self.span))

    def _continued(self, n: int, before: int) -> Plan:
        """ "from:a" is "main" for n causal tokens that a spans stand before, the sinks among them: sources 1 and 2."""
        s, w = self.span, self.window
        assert s is not None
        rule: dict[str, Any] = {"rule": NEAR, "span": s, "lo": 1 - w, "hi": 0, "past": True}
        reach = windows(0, n, w + s - 2, 0, block=-(-window_block(w) // s) * s)
        spans = range(self.sinks // s, before + n // s)
        ends = range(s * (spans.start + 1 - before) - 1, s * (spans.stop - before), s)  # counted from the first token
        parts = [replace(p, **rule) for p in reach] + rows_to_keys(range(n), range(self.sinks), source=2)
        return make_plan(parts + rows_to_keys(range(n), spans, positions=ends, source=1, hi=-w), n)

    def ranges(self, i):
        near = max(self.begin(i), self.sinks)
        runs = [range(min(self.sinks, i + 1))] if self.sinks else []
        runs += [range(near, i + 1), range(self.sinks // self.span, self.begin(i) // self.span)]
        return list(enumerate(runs))

    def begin(self, i):
        return max(0, (i - self.window + 1) // self.span * self.span)

    def sees(self, source, i, entry):
        s = self.span
        near = ((i - self.window + 1) // s * s).clamp(min=0)
        if source:
            return (entry + 1) * s <= near
        return (entry <= i) & ((entry >= near) | (entry < self.sinks))


@lru_cache(maxsize=4096)
def _span(n: int, s: int, a: int, sinks: int) -> Group:
    return Group(range(max(a * s, min(sinks, a * s + s)), min(n, a * s + s)))


@lru_cache(maxsize=4096)
def _block(n: int, s: int, level: int, a: int) -> Group:
    """Block a of s^level tokens, a group of its blocks of s^(level-1)."""
    over, inner = range(a * s**level, min(n, (a + 1) * s**level)), s ** (level - 1)
    below = range(over.start // inner, -(-over.stop // inner)) if level > 1 else ()
    return Group(over, children=tuple(_block(n, s, level - 1, b) for b in below))
