"""Sparsity patterns: index sets A_k^l, whom token k may attend to in family l of p (Yun et al., section 3.1).

A pattern is described once, and everything else follows from it: the mask, the edge list (CSR), the plan of blocks for
the kernel, the number of connections, the input of the theory's checkers. The definition is a predicate on positions
(`allows`) or, for drawn patterns, the draw itself; `parts` gives the same sets as regular blocks where they have any,
and the tests hold the two against each other.

Everywhere `family` is l, or None for the union of the p families. Causal patterns keep the past half of each set,
A_k ∩ {0 … k}, with the self-loop, and the sets of query k depend on k and the options, never on n.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subquad.core.numbers import possible_pairs
from subquad.supports.kept import EVERYTHING, Kept, Ranges
from subquad.supports.parts import Grid, Part, Plan, make_plan
from subquad.supports.placed import Placed
from subquad.supports.support import GivenSupport, Support, Within

ROWS = 1024  # masks of long sequences are made this many rows at a time
COMMON = "common-"  # before the name of a plan: without the pairs that depend on the length
DENSE = 0.75  # share of all pairs from which on blocks are not worth their while

Csr = tuple[np.ndarray, np.ndarray]  # indptr (n + 1,) int64, indices (E,) int32 ascending within a row


@dataclass(frozen=True, kw_only=True)
class Pattern(Support):
    """A family of index sets for every length n."""

    families = 1  # p of the paper

    @property
    def longest(self) -> int | None:
        """The length that its sets are given for; None = they are known for any."""
        return None

    def allows(self, family: int, i: np.ndarray, j: np.ndarray, n: int) -> np.ndarray:
        """Is j in A_i^l? Positions broadcast; causality is added by the caller."""
        raise TypeError(f"{type(self).__name__} is not given by a predicate")

    def parts(self, n: int, family: int | None) -> list[Part] | None:
        """The same sets as blocks, or None where they are not regular (then the edge list runs)."""
        return None

    @property
    def is_nested(self) -> bool:
        """Are the sets of fewer tokens those of more tokens, cut off? Causal sets are."""
        return self.causal

    def drawn(self, n: int) -> tuple[int, ...]:
        """The blocks that parts with draws refer to."""
        return ()

    @property
    def has_parts(self) -> bool:
        return self.parts(4, None) is not None

    def plan(self, n: int, which: str) -> Plan:
        """The blocks of family `which`, a number or "union"."""
        family, common = _family(which), which.startswith(COMMON)
        parts = self.common(n, family) if common else self.parts(n, family)
        if parts is None:
            raise TypeError(f"{type(self).__name__} has no blocks")
        plan = make_plan(parts, n, self.drawn(n))
        if n >= 256 and not self.causal and not common and plan.pairs > DENSE * n * n:  # one masked product is faster
            return make_plan([_Masked.of(self.rows(n, family, 0, n))], n)
        return plan

    def within(self, which, length):
        return Within(length, (length,)) if self.is_nested or which.startswith(COMMON) else None

    # ---- rows of their own length on a device: their sets without reading how long they are ----

    def common(self, n: int, family: int | None) -> list[Part] | None:
        """Blocks of the pairs that are seen at any length which has both tokens; `placed` has the others. None: there
        is no such division.
        """
        return None

    def placed(self, n: int, family: int | None, lengths: Tensor) -> list[Placed]:
        """What rows of lengths (B,), of n at most, have beside `common`."""
        return []

    def listed(self, n: int, family: int | None, lengths: Tensor) -> Tensor | None:
        """The keys of all queries of rows of lengths (B,), int64 (B, n, most of them), ascending, n = none; None where
        they are not made on a device. Those of `global_queries` have none here.
        """
        return None

    def global_queries(self, n: int, lengths: Tensor) -> Tensor | None:
        """The few queries that see everyone, int64 (B, r), whose lists would make all others long; None = nobody."""
        return None

    def masked(self, n: int, family: int | None, lengths: Tensor) -> Tensor | None:
        """The masks of rows of lengths (B,), bool (B, n, n), whatever they say behind the ends of rows."""
        if not self.is_predicate:
            return None
        place = torch.arange(n, device=lengths.device)
        return self.sees(family, place[:, None], place, lengths[:, None, None]).expand(len(lengths), n, n)

    def beside(self, which, n, lengths):
        if self.is_nested or which.startswith(COMMON) or self.common(1, _family(which)) is None:
            return None
        return COMMON + which, self.placed(n, _family(which), lengths)

    # ---- streaming ----

    def kept(self, families: Collection[int | None], margin: int) -> tuple[Kept, ...]:
        """Which keys queries of these families can still name; `margin` tokens more, so that they can be taken back."""
        return EVERYTHING

    def ranges(self, families: Collection[int | None], i: int) -> Ranges | None:
        """What a query at i sees of `kept(families)`, as runs; None where it has no such form."""
        return None

    def begin(self, i: int) -> int | None:
        """The first of the recent tokens that queries from i on see, where these and the first ones, put together, are
        a sequence with the same pattern; None where they are not.
        """
        return None

    def sees(self, family: int | None, i: Tensor, j: Tensor, n: Tensor | int = 0) -> Tensor:
        """The definition for positions and lengths that are tensors: is j in A_i? Causal sets know of no length."""
        seen: Any = i == -1
        for f in range(self.families) if family is None else (family,):
            seen = seen | self.allows(f, i, j, n)  # type: ignore[arg-type]
        return seen & (j <= i) if self.causal else seen

    @property
    def is_predicate(self) -> bool:
        """Is it given by `allows`, so that tensors can be asked?"""
        return type(self).allows is not Pattern.allows

    def named(self, family: int | None, i: np.ndarray) -> np.ndarray:
        """The keys of the queries at positions i (…,), as a list each: (…, most of them), ascending, -1 = none.

        From the edges of a length that seldom changes: causal sets do not depend on it.
        """
        return self._named(family, i, 1 << int(i.max()).bit_length())

    def _named(self, family: int | None, i: np.ndarray, n: int) -> np.ndarray:
        indptr, indices = kept_csr(self, n, family)
        place = indptr[i][..., None] + np.arange(max(1, int((indptr[i + 1] - indptr[i]).max())))
        return np.where(place < indptr[i + 1][..., None], indices[np.minimum(place, len(indices) - 1)], -1)

    # ---- from the definition ----

    def rows(self, n: int, family: int | None, first: int, last: int) -> np.ndarray:
        """Rows first … last-1 of the mask, bool (last - first, n)."""
        i, j = np.arange(first, last)[:, None], np.arange(n)
        chosen = range(self.families) if family is None else (family,)
        seen = np.zeros((last - first, n), dtype=bool)
        for f in chosen:
            seen |= self.allows(f, i, j, n)
        return seen & (j <= i) if self.causal else seen

    def mask(self, n: int, family: int | None = None) -> Tensor:
        """bool (n, n), row = query."""
        return torch.from_numpy(self.rows(n, family, 0, n))

    def csr(self, n: int, family: int | None = None) -> Csr:
        """The sets as CSR, made a strip of rows at a time."""
        strips = [self.rows(n, family, first, min(n, first + ROWS)) for first in range(0, n, ROWS)]
        degrees = np.concatenate([strip.sum(1) for strip in strips])
        return pointers(degrees), np.concatenate([strip.nonzero()[1] for strip in strips]).astype(np.int32)

    def connections(self, n: int, family: int | None = None) -> int:
        """Σ_k |A_k^l|."""
        return len(kept_csr(self, n, family)[1])

    def sparsity(self, n: int, family: int | None = None) -> float:
        """Share of the n² (causal: n(n+1)/2) possible connections that are absent."""
        return 1 - self.connections(n, family) / possible_pairs(n, self.causal)


def _family(which: str) -> int | None:
    """The family that the name of a plan stands for."""
    name = which.removeprefix(COMMON)
    return None if name == "union" else int(name)


@lru_cache(maxsize=16)
def kept_csr(pattern: Pattern, n: int, family: int | None) -> Csr:
    return pattern.csr(n, family)


def csr_of_mask(mask: Tensor) -> Csr:
    """The edges of a bool mask (n, m), True = attends."""
    seen = mask.cpu().numpy()
    return pointers(seen.sum(1)), seen.nonzero()[1].astype(np.int32)


def pointers(degrees: np.ndarray) -> np.ndarray:
    """Where the rows of a CSR list begin, from the number of keys per row."""
    return np.concatenate(([0], degrees.cumsum())).astype(np.int64)


@dataclass(frozen=True, eq=False)
class _Masked(Part):
    """Everyone to everyone under a mask: what a nearly dense pattern comes down to."""

    mask: np.ndarray | None = None

    @classmethod
    def of(cls, mask: np.ndarray) -> _Masked:
        whole = Grid.of(range(len(mask)))
        return cls(whole, whole, rule=-1, mask=mask)

    __hash__ = object.__hash__  # the mask is what it is: two of them are never the same part
    __eq__ = object.__eq__

    def piece(self, block, blocks, rows, keys):
        assert self.mask is not None
        return replace(super().piece(block, blocks, rows, keys), mask=self.mask[rows, keys])

    def allowed(self) -> np.ndarray:
        assert self.mask is not None
        return self.mask[None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Custom(GivenSupport, Pattern):
    """A user's own sets: `masks(n)` gives the p masks of length n, bool (p, n, n). A function of one's own may look at
    the length: who does not says so by `nested`.
    """

    masks: Callable[[int], Tensor]
    families: int = 1
    nested: bool = False

    @property
    def is_nested(self):
        return self.nested

    @property
    def longest(self):
        return getattr(self.masks, "length", None)

    def named(self, family, i):
        """From the sets of the one length that they are given for, or of one that seldom changes."""
        n = self.longest or 1 << int(i.max()).bit_length()
        if int(i.max()) >= n:
            raise ValueError(f"pattern: sets are for {n} tokens, position {int(i.max())} is beyond")
        return self._named(family, i, n)

    def rows(self, n, family, first, last):
        seen = self.masks(n)[:, first:last].cpu().numpy()  # (p, rows, n)
        seen = seen.any(0) if family is None else seen[family]
        return seen & (np.arange(n) <= np.arange(first, last)[:, None]) if self.causal else seen
