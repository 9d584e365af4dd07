"""Factorisation plans: how Combiner divides each query's support (Ren et al. 2021, sections 3.1 and 4).

For every query i a plan names the *direct* set Ω_i^0, whose keys are attended one by one, and the *groups*
Ω_i^1 … Ω_i^m, each attended through one summary. Together they are a partition of the support: disjoint, and their
union is everything (causal: 0 … i). Positions are 0-based, n is the length.

A partition is described once. Its index sets (`direct`, `groups`) are the definition, simple and slow. For the kernels
it gives the same sets as blocks: `group_sets` lists its kinds of summaries, source 1, 2, …, each with the shape of its
pool; the plan "members:r" lets the summaries of source r attend to their members, the plan "main" lets the queries
attend to tokens (source 0) and summaries. The tests hold the two against each other.

Here is what all partitions share; `spans` has the plans over blocks of the sequence, `grids` those over a grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from subquad.supports.kept import Kept, Ranges
from subquad.supports.support import GivenSupport, Support, constant_of_graphs, parse

POOLED = -1  # Group.query_position: the local query is the pool of the members' queries


@dataclass(frozen=True)
class Group:
    """One group Ω: the positions `over`, without `hole`.

    p(j|Ω) = softmax_j(q_Ω·k_j) over the members or, with `children` (a partition of the members into groups of
    their own), p(j|Ω) = Σ_c softmax_c(q_Ω·k_c) p(j|c). q_Ω is the pool of the members' queries; with `query_position`
    it is the query at that position (0 where there is no such token), and k_Ω = Σ_j p(j|Ω) k_j.
    """

    over: Sequence[int]
    hole: int = -1
    query_position: int = POOLED
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


class GroupSet(NamedTuple):
    """One kind of summaries, a source of keys and values for the queries."""

    pool: str  # which members: "spans", "nodes", "nodes-back", "column", "row", "left", "right", "asked-row"
    size: int = 0  # tokens of a span, or columns of the grid
    below: int = 0  # the source that its members are in: 0 = the tokens
    skip: int = 0  # that many first tokens are in no group


@dataclass(frozen=True, kw_only=True)
class Partition(Support):
    """A factorisation plan ω."""

    def direct(self, n: int, i: int) -> Iterable[int]:
        """Ω_i^0."""
        raise TypeError(f"{type(self).__name__} leaves this to a subclass")

    def groups(self, n: int, i: int) -> list[Group]:
        """Ω_i^1 … Ω_i^m, none of them empty."""
        raise TypeError(f"{type(self).__name__} leaves this to a subclass")

    def group_sets(self, n: int) -> tuple[GroupSet, ...]:
        """Sources 1, 2, … of the plan "main" for sequences of up to n tokens; sizes must be decided."""
        raise TypeError(f"{type(self).__name__} is not made of blocks")

    def kept(self, margin: int) -> tuple[Kept, ...] | None:
        """Which tokens and summaries queries can still name, `margin` tokens more; None = streaming keeps all."""
        return None

    def ranges(self, i: int) -> Ranges | None:
        """What a query at i sees of `kept`, as runs of entries; None where it has no such form."""
        return None

    def begin(self, i: int) -> int | None:
        """Where the plan "from:a" for queries from i on begins, after a whole spans; None = it has none."""
        return None

    def sees(self, source: int, i: Tensor, entry: Tensor) -> Tensor:
        """Does the query at i see an entry of a source: token `entry`, or the summary of span number `entry`?"""
        raise TypeError(f"{type(self).__name__} does not say what streaming keeps")

    def unique_groups(self, n: int) -> tuple[list[Group], list[list[int]]]:
        """Every group once, children before parents, and for every query the numbers of its groups."""
        number: dict[Group, int] = {}

        def add(group: Group) -> int:
            for child in group.children:
                add(child)
            return number.setdefault(group, len(number))

        rows = [[add(group) for group in self.groups(n, i)] for i in range(n)]
        return list(number), rows

    def summaries(self, n: int) -> tuple[list[Sequence[int]], list[list[int]]]:
        """The members of every group, and for every query the numbers of its groups."""
        groups, rows = self.unique_groups(n)
        return [group.over if group.hole < 0 else group.members for group in groups], rows

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
        drawn = np.zeros((n, n), np.int32)
        for i, row in enumerate(drawn):
            for group in self.groups(n, i):
                _mark(row, group.over if group.hole < 0 else group.members, 2)
            _mark(row, self.direct(n, i), 1)
        return torch.from_numpy(drawn)

    def is_nested_at(self, n: int) -> bool:
        """Are the sets of n tokens those of n + 1 … 2n tokens, cut off?"""

        def sets(length: int, i: int) -> tuple[set[int], set[frozenset[int]]]:
            cut = {frozenset(j for j in group.members if j < n) for group in self.groups(length, i)}
            return {j for j in self.direct(length, i) if j < n}, cut - {frozenset()}

        return all(sets(n, i) == sets(more, i) for more in range(n + 1, 2 * n + 1) for i in range(n))

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


def _mark(row: np.ndarray, positions: Iterable[int], kind: int) -> None:
    if isinstance(positions, range):
        row[positions.start : positions.stop : positions.step] = kind
    else:
        row[list(positions)] = kind


def _count(found: np.ndarray, positions: Iterable[int]) -> None:
    """found[j] += how often j is among the positions."""
    if isinstance(positions, range):
        found[positions.start : positions.stop : positions.step] += 1
    else:
        found += np.bincount(np.fromiter(positions, np.int64), minlength=len(found))


@dataclass(frozen=True, kw_only=True)
class Routing(Partition):
    """Section 4.4: the query's cluster directly, every other cluster a group (causal: their members up to i).

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


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexSets(GivenSupport, Partition):
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


@constant_of_graphs
def group_sets_of(text: str, n: int) -> tuple[GroupSet, ...]:
    """The group sets of a partition for length n: constants of a compiled graph."""
    return cast(Partition, parse(text)).group_sets(n)
