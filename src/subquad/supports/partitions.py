"""Factorisation plans: how Combiner divides each query's support (Ren et al. 2021, sections 3.1 and 4).

For every query i a plan names the *direct* set Ω_i^0, whose keys are attended one by one, and the *groups*
Ω_i^1 … Ω_i^m, each attended through one summary. Together they are a partition of the support: disjoint, and their
union is everything (causal: 0 … i). The classes here are the definition, simple and slow; the mechanisms run the
same sets as blocks, and the tests hold the two against each other. Positions are 0-based, n is the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

POOLED = -1  # Group.asker: the local query is the pool of the members' queries


@dataclass(frozen=True)
class Group:
    """One group Ω: the positions `over`, without `hole`.

    p(j|Ω) = softmax_j(q_Ω·k_j) over the members or, with `children` (a partition of the members into groups of
    their own), p(j|Ω) = Σ_c softmax_c(q_Ω·k_c) p(j|c). q_Ω is the pool of the members' queries; with `asker` it
    is the query at that position (0 where there is no such token), and k_Ω = Σ_j p(j|Ω) k_j.
    """

    over: Sequence[int]
    hole: int = -1
    asker: int = POOLED
    children: tuple[Group, ...] = field(default=(), hash=False)  # equal anyway when the rest is

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(j for j in self.over if j != self.hole)

    @property
    def size(self) -> int:
        """How many terms its local expectation has."""
        return len(self.children) or len(self.over) - (self.hole in self.over)

    def count(self, found: np.ndarray) -> None:
        """found[j] += 1 for every member."""
        _count(found, self.over)
        if self.hole in self.over:
            found[self.hole] -= 1

    def check(self) -> None:
        """Raise if it is empty, or not the union of its children."""
        inside = sorted(j for child in self.children for j in child.members)
        if not self.size or (self.children and inside != sorted(self.members)):
            raise ValueError(f"plan: a group over {self.over} is empty or no union of its children")


class Cost(NamedTuple):
    """The three terms that section 3.1 asks to be sub-quadratic."""

    terms: int  # Σ_i (n_i + |Ω_i^0|): what the queries' softmaxes run over
    groups: int  # |U|: different groups, each summarised once
    members: int  # Σ_{Ω ∈ U} |Ω|: what the local expectations run over

    @property
    def total(self) -> int:
        return self.terms + self.groups + self.members


def root(n: int) -> int:
    """⌈√n⌉."""
    return math.isqrt(n - 1) + 1 if n > 1 else 1


def default_span(n: int, depth: int = 1) -> int:
    """The branching s ≈ n^(1/(depth+1)), which makes all levels equally wide, to the nearest 2^k or 3·2^k.

    Blocks of these sizes fill the vector registers; between 32 and 256 they are the ones that run fastest.
    """
    ideal = n ** (1 / (depth + 1))
    friendly = [b << e for e in range(24) for b in (2, 3)]
    return min([1, *friendly], key=lambda s: abs(math.log(s / ideal)))


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A factorisation plan ω."""

    causal: bool = False

    def direct(self, n: int, i: int) -> Iterable[int]:
        """Ω_i^0."""
        raise TypeError(f"{type(self).__name__} leaves this to a subclass")

    def groups(self, n: int, i: int) -> list[Group]:
        """Ω_i^1 … Ω_i^m, none of them empty."""
        raise TypeError(f"{type(self).__name__} leaves this to a subclass")

    def support(self, n: int, i: int) -> range:
        return range(i + 1) if self.causal else range(n)

    def cost(self, n: int) -> Cost:
        """The three terms of section 3.1, counted."""
        terms, unique = 0, set()
        for i in range(n):
            groups = self.groups(n, i)
            terms += len(groups) + sum(1 for _ in self.direct(n, i))
            unique.update(groups)
        below = list(unique)
        while below:  # a group of groups has these summarised too
            below = [child for group in below for child in group.children if child not in unique]
            unique.update(below)
        return Cost(terms, len(unique), sum(group.size for group in unique))

    def picture(self, n: int) -> Tensor:
        """int (n, n), row = query: 0 not attended, 1 directly, 2 through a group (Figure 1)."""
        drawn = torch.zeros(n, n, dtype=torch.int)
        for i in range(n):
            for group in self.groups(n, i):
                drawn[i, list(group.members)] = 2
            drawn[i, list(self.direct(n, i))] = 1
        return drawn

    def check(self, n: int, queries: Iterable[int] | None = None) -> None:
        """Raise unless the sets of every query (or of `queries`) are a partition of its support.

        How often query i has key j is one product of matrices: who uses which group × who is in it.
        """
        queries = range(n) if queries is None else list(queries)
        rows = [self.groups(n, i) for i in queries]
        every = {id(group): group for row in rows for group in row}  # plans share the groups that they make once
        number = {key: at for at, key in enumerate(every)}
        members, uses = np.zeros((len(every), n), np.float32), np.zeros((len(rows), len(every)), np.float32)
        for row, group in zip(members, every.values(), strict=True):
            group.check()
            group.count(row)
        found, support = np.zeros((2, len(rows), n), np.float32)
        for at, i in enumerate(queries):
            places = [number[id(group)] for group in rows[at]]
            uses[at, places] = 1
            _count(found[at], self.direct(n, i))
            _count(support[at], self.support(n, i))
            found[at] += len(places) - len(set(places))  # a group that stands there twice
        wrong = np.flatnonzero((found + uses @ members != support).any(1))
        if len(wrong):
            i = queries[wrong[0]]
            raise ValueError(f"plan: the direct set and the groups of query {i} are no partition of its support")


def _count(found: np.ndarray, positions: Iterable[int]) -> None:
    """found[j] += how often j is among the positions."""
    if isinstance(positions, range):
        found[positions.start : positions.stop : positions.step] += 1
    else:
        found += np.bincount(np.fromiter(positions, np.int64), minlength=len(found))


@dataclass(frozen=True, kw_only=True)
class Fixed(Partition):
    """Section 4.1: the own span of s tokens directly, every other span (causal: every earlier one) a group.

    Eq. 10 is 1-based, says "mod" for "div" and drops the first span; here span(j) = ⌊j/s⌋ and all spans count.
    """

    span: int | None = None

    def direct(self, n, i):
        s = self.span or default_span(n)
        return range(i // s * s, i + 1 if self.causal else min(n, i // s * s + s))

    def groups(self, n, i):
        s = self.span or default_span(n)
        last = i // s if self.causal else -(-n // s)
        return [_block(n, s, 1, a) for a in range(last) if a != i // s]


@dataclass(frozen=True, kw_only=True)
class Logsparse(Partition):
    """Section 4.2 and appendix B: i itself and, for every set bit l of i, block (i>>l)-1 of size 2^l.

    A block of level 0 is one token, hence direct. Bidirectional adds the mirror image, the same on n-1-i.
    """

    def blocks(self, n: int, i: int) -> list[range]:
        def before(i: int) -> list[range]:
            levels = [level for level in range(i.bit_length()) if i >> level & 1]
            return [range(((i >> level) - 1) << level, (i >> level) << level) for level in levels]

        found = before(i)
        if not self.causal:
            found += [range(n - block.stop, n - block.start) for block in before(n - 1 - i)]
        return found

    def direct(self, n, i):
        return [i, *(block.start for block in self.blocks(n, i) if len(block) == 1)]

    def groups(self, n, i):
        return [Group(block) for block in self.blocks(n, i) if len(block) > 1]


@dataclass(frozen=True, kw_only=True)
class Axial(Partition):
    """Section 4.3: the sequence as a grid, row by row; position i stands at (i // cols, i % cols)."""

    cols: int | None = None

    def width(self, n: int) -> int:
        return self.cols or root(n)

    def own_row(self, n: int, i: int) -> range:
        start = i - i % self.width(n)
        return range(start, i + 1 if self.causal else min(n, start + self.width(n)))

    def direct(self, n, i):
        """Own row (up to i) and own column (above)."""
        c = self.width(n)
        column = range(i % c, i if self.causal else n, c)
        return [*self.own_row(n, i), *(j for j in column if j // c != i // c)]

    def other_rows(self, n: int, i: int) -> list[int]:
        c = self.width(n)
        return [r for r in range(i // c if self.causal else -(-n // c)) if r != i // c]


@dataclass(frozen=True, kw_only=True)
class AxialVertical(Axial):
    """Every other column a group, without the own row's element (causal: only the rows above)."""

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
    """Every other row (causal: every earlier one) a group, without the own column's element.

    `split`: two groups per row, strictly left and strictly right of the own column.
    """

    split: bool = False

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
    """The own row directly, every other row (causal: every earlier one) a group that the own column asks.

    The local query is the token's at (row, own column); where the last row is too short to have one, it is 0.
    """

    def direct(self, n, i):
        return self.own_row(n, i)

    def groups(self, n, i):
        every = _asked_rows(n, self.width(n), i % self.width(n))
        return [every[r] for r in self.other_rows(n, i)]


@lru_cache(maxsize=4096)
def _asked_rows(n: int, c: int, column: int) -> list[Group]:
    """All rows, each asked by its token in the column."""
    return [Group(range(start, min(n, start + c)), asker=start + column) for start in range(0, n, c)]


@dataclass(frozen=True, kw_only=True)
class Routing(Partition):
    """Section 4.4: the own cluster directly, every other cluster a group (causal: their members up to i).

    `assignment` names the cluster of every token; without it `dealt` clusters take the tokens in turn.
    """

    assignment: tuple[int, ...] | None = None
    dealt: int = 1

    def clusters(self, n: int) -> Sequence[int]:
        """The cluster of every token."""
        return [j % self.dealt for j in range(n)] if self.assignment is None else self.assignment

    def direct(self, n, i):
        of = self.clusters(n)
        return [j for j in self.support(n, i) if of[j] == of[i]]

    def groups(self, n, i):
        of, found = self.clusters(n), {}
        for j in self.support(n, i):
            found.setdefault(of[j], []).append(j)
        return [Group(tuple(m)) for c, m in sorted(found.items()) if c != of[i]]


@dataclass(frozen=True, kw_only=True)
class Tree(Partition):
    """The remark in section 3.1: groups of groups. Level t has blocks of s^t tokens, t = 1 … depth.

    Query i attends directly to its own block of s tokens, at level t < depth to the other blocks of s^t inside its
    own block of s^(t+1), at the top to all other blocks. A block of level t > 1 is a group of its blocks of level
    t-1. Causal: up to i, and earlier blocks only. depth=1 is `Fixed`; s ≈ n^(1/(depth+1)).
    """

    span: int | None = None
    depth: int = 2

    def branch(self, n: int) -> int:
        return self.span or default_span(n, self.depth)

    def direct(self, n, i):
        return Fixed(span=self.branch(n), causal=self.causal).direct(n, i)

    def groups(self, n, i):
        s, found = self.branch(n), []
        for level in range(1, self.depth + 1):
            size = s**level
            around = i // (size * s) * (size * s) if level < self.depth else 0
            end = n if level == self.depth else min(n, around + size * s)
            last = i // size if self.causal else -(-end // size)
            found += [_block(n, s, level, a) for a in range(around // size, last) if a != i // size]
        return found


@lru_cache(maxsize=4096)
def _block(n: int, s: int, level: int, a: int) -> Group:
    """Block a of s^level tokens, a group of its blocks of s^(level-1)."""
    over, inner = range(a * s**level, min(n, (a + 1) * s**level)), s ** (level - 1)
    below = range(over.start // inner, -(-over.stop // inner)) if level > 1 else ()
    return Group(over, children=tuple(_block(n, s, level - 1, b) for b in below))


@dataclass(frozen=True, kw_only=True)
class IndexSets(Partition):
    """A plan of your own: sets(n) gives (direct, groups), direct[i] positions and groups[i] lists of positions.

    With `causal` every set keeps its positions ≤ i, as the paper makes a causal plan of any other (Ω ∩ [i]).
    A length is checked when it is first asked for: the sets of each query must be a partition of its support.
    """

    sets: Callable[[int], tuple[Sequence[Iterable[int]], Sequence[Iterable[Iterable[int]]]]]

    def direct(self, n, i):
        return _index_sets(self, n)[0][i]

    def groups(self, n, i):
        return _index_sets(self, n)[1][i]


@lru_cache(maxsize=16)
def _index_sets(plan: IndexSets, n: int) -> tuple[list[tuple[int, ...]], list[list[Group]]]:
    direct, groups = plan.sets(n)
    if len(direct) != n or len(groups) != n:
        raise ValueError(f"plan: for length {n} it gives {len(direct)} direct sets and {len(groups)} lists of groups")
    reach = [plan.support(n, i) for i in range(n)]
    kept = [tuple(sorted(j for j in map(int, direct[i]) if j in reach[i] or not plan.causal)) for i in range(n)]
    cut = [
        [tuple(sorted(j for j in map(int, g) if j in reach[i] or not plan.causal)) for g in groups[i]] for i in range(n)
    ]
    for i in range(n):
        if sorted(j for members in (kept[i], *cut[i]) for j in members) != list(reach[i]):
            raise ValueError(f"plan: the direct set and the groups of query {i} of {n} are no partition of its support")
    return kept, [[Group(members) for members in sets if members] for sets in cut]


PLANS: dict[str, type[Partition]] = {
    "fixed": Fixed,
    "logsparse": Logsparse,
    "axial-vertical": AxialVertical,
    "axial-horizontal": AxialHorizontal,
    "axial-rowmajor": AxialRowmajor,
    "routing": Routing,
    "tree": Tree,
}
