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

from subquad.core.numbers import root, triangle
from subquad.supports.kept import EVERYTHING, Kept, Ranges, first_ones, recent
from subquad.supports.parts import FAR, Grid, Part, Plan, columns, diagonal, make_plan, rows_to_keys, selves, windows
from subquad.supports.support import GivenSupport, Support

ROWS = 1024  # masks of long sequences are made this many rows at a time
DENSE = 0.75  # share of all pairs from which on blocks are not worth their while

Csr = tuple[np.ndarray, np.ndarray]  # indptr (n + 1,) int64, indices (E,) int32 ascending within a row


@dataclass(frozen=True, kw_only=True)
class Pattern(Support):
    """A family of index sets for every length n."""

    families = 1  # p of the paper

    def allows(self, family: int, i: np.ndarray, j: np.ndarray, n: int) -> np.ndarray:
        """Is j in A_i^l? Positions broadcast; causality is added by the caller."""
        raise TypeError(f"{type(self).__name__} is not given by a predicate")

    def parts(self, n: int, family: int | None) -> list[Part] | None:
        """The same sets as blocks, or None where they are not regular (then the edge list runs)."""
        return None

    def drawn(self, n: int) -> tuple[int, ...]:
        """The blocks that parts with draws refer to."""
        return ()

    @property
    def has_parts(self) -> bool:
        return self.parts(4, None) is not None

    def plan(self, n: int, which: str) -> Plan:
        """The blocks of family `which`, a number or "union"."""
        family = None if which == "union" else int(which)
        parts = self.parts(n, family)
        if parts is None:
            raise TypeError(f"{type(self).__name__} has no blocks")
        plan = make_plan(parts, n, self.drawn(n))
        if n >= 256 and not self.causal and plan.pairs > DENSE * n * n:  # one masked product is faster
            return make_plan([_Masked.of(self.rows(n, family, 0, n))], n)
        return plan

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

    def sees(self, family: int | None, i: Tensor, j: Tensor) -> Tensor:
        """The definition for the positions of a causal pattern, which know of no length: is j in A_i?"""
        seen: Any = i == -1
        for f in range(self.families) if family is None else (family,):
            seen = seen | self.allows(f, i, j, 0)  # type: ignore[arg-type]
        return seen & (j <= i)

    def named(self, family: int | None, i: np.ndarray) -> np.ndarray:
        """The keys of the queries at positions i (…,), as a list each: (…, most of them), -1 = none.

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
        return 1 - self.connections(n, family) / (triangle(n) if self.causal else n * n)


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


@dataclass(frozen=True, kw_only=True)
class Strided(Pattern):
    """Eq. 4 (Child et al.): ⌈w/2⌉ neighbours to the left and ⌊w/2⌋ to the right; then every w-th token."""

    w: int | None = None
    families = 2

    def sized(self, n):
        return replace(self, w=self.w or root(n))

    def reach(self, n: int) -> tuple[int, int, int]:
        w = self.w or root(n)
        return w, -(-w // 2), w // 2

    def allows(self, family, i, j, n):
        w, left, right = self.reach(n)
        return ((j >= i - left) & (j <= i + right)) if family == 0 else (i - j) % w == 0

    def parts(self, n, family):
        w, left, right = self.reach(n)
        window = windows(0, n, left, 0 if self.causal else right)
        if family == 0:
            return window
        if family == 1:
            return columns(n, w, causal=self.causal)
        return window + columns(n, w, causal=self.causal, xlo=-left, xhi=right)

    def kept(self, families, margin):
        return (recent(self.reach(0)[1], margin),) if set(families) == {0} else EVERYTHING

    def ranges(self, families, i):
        return [(0, range(max(0, i - self.reach(0)[1]), i + 1))] if set(families) == {0} else None

    def named(self, family, i):
        w, left, _ = self.reach(0)
        near = np.arange(left + 1)  # distances
        column = w * np.arange(int(i.max()) // w + 1)
        steps = near if family == 0 else column if family == 1 else np.union1d(near, column)
        return np.maximum(i[..., None] - steps, -1)


@dataclass(frozen=True, kw_only=True)
class Fixed(Pattern):
    """Eq. 5 (Child et al.): the own segment of length w; then oneself and the last token of every segment.

    A partial last segment has no summary token, so the tokens in it reach nobody (Assumption 1.3 fails);
    `close=True` makes the last token of the sequence a summary token too.
    """

    w: int | None = None
    close: bool = False
    families = 2

    def sized(self, n):
        return replace(self, w=self.w or root(n))

    def allows(self, family, i, j, n):
        w = self.w or root(n)
        if family == 0:
            return i // w == j // w
        summary = j % w == w - 1
        if self.close:
            summary = summary | (j == n - 1)
        return summary | (i == j)

    def parts(self, n, family):
        w, hi = self.w or root(n), 0 if self.causal else FAR
        summaries, rest = range(w - 1, n, w), n % w
        segments = diagonal(0, n, w, causal=self.causal)
        if family == 0:
            return segments
        if family == 1:
            parts = selves(n) + rows_to_keys(range(n), summaries, hi=hi, xlo=0, xhi=0)
            lonely = range(n - 1)  # queries that the closing token is new to
        else:
            parts = segments + rows_to_keys(range(n), summaries, hi=hi, xlo=0, xhi=w - 1)
            lonely = range(n - rest)
        if self.close and rest and not self.causal:
            parts += rows_to_keys(lonely, range(n - 1, n))
        return parts

    def kept(self, families, margin):
        near = recent(0 if set(families) == {1} else self.w - 1, margin)
        return (near,) if set(families) == {0} else (Kept(start=self.w - 1, step=self.w), near)

    def ranges(self, families, i):
        w, first = self.w, i // self.w * self.w
        if set(families) == {0}:
            return [(0, range(first, i + 1))]
        stop = i + 1 if i % w < w - 1 else i  # the last token of a segment is a summary token
        return [(0, range(w - 1, i + 1, w)), (1, range(i if set(families) == {1} else first, stop))]


@dataclass(frozen=True, kw_only=True)
class Star(Pattern):
    """Eq. 6 (Guo et al.): a ring in which everyone sees w neighbours on each side, and a relay token that sees everyone
    and is seen by everyone. The relay is the last token. Causal: the ring is cut, and nobody could see a relay at the
    end, so there is none; `relay="first"` puts it in front.
    """

    w: int = 8
    relay: str = "last"

    def allows(self, family, i, j, n):
        if self.causal:
            near = (i - j >= 0) & (i - j <= self.w)
            return near | (j == 0) if self.relay == "first" else near
        relay = n - 1 if self.relay == "last" else 0
        if n == 1:
            return i == j
        around = (i - j) % (n - 1)  # positions on the ring differ by a shift only: the relay is at an end
        near = (around <= self.w) | (around >= n - 1 - self.w)
        return (i == relay) | (j == relay) | near

    def parts(self, n, family):
        w, m = self.w, n - 1
        if self.causal:
            if self.relay == "last":
                return windows(0, n, w, 0)
            return windows(1, n, w, 0) + rows_to_keys(range(1, n), range(1)) + rows_to_keys(range(1), range(1))
        relay, first = (n - 1, 0) if self.relay == "last" else (0, 1)
        ring = range(first, first + m)
        if 2 * w + 1 >= m:
            parts = rows_to_keys(ring, ring)
        else:
            parts = windows(first, first + m, w, w)
            parts += rows_to_keys(ring[-w:], ring[:w], hi=w - m)  # round the end of the ring …
            parts += rows_to_keys(ring[:w], ring[-w:], lo=m - w)  # … and back
        parts += rows_to_keys(ring, range(relay, relay + 1))
        return parts + rows_to_keys(range(relay, relay + 1), range(n))

    def kept(self, families, margin):
        near = recent(self.w, margin)
        return (first_ones(1), near) if self.relay == "first" else (near,)

    def ranges(self, families, i):
        return _window_ranges(i, self.w, int(self.relay == "first"))

    def begin(self, i):
        return i - self.w if i - self.w >= 1 else None


@dataclass(frozen=True, kw_only=True)
class Longformer(Pattern):
    """Beltagy et al.: a window of ⌈window/2⌉ to the left and ⌊window/2⌋ to the right; the first `global_tokens`
    tokens see everyone and are seen by everyone.
    """

    window: int = 128
    global_tokens: int = 0

    def allows(self, family, i, j, n):
        near = (j >= i - -(-self.window // 2)) & (j <= i + self.window // 2)
        return near | (i < self.global_tokens) | (j < self.global_tokens)

    def parts(self, n, family):
        g, hi = min(self.global_tokens, n), 0 if self.causal else FAR
        left, right = -(-self.window // 2), 0 if self.causal else self.window // 2
        parts = windows(g, n, left, right) + rows_to_keys(range(g, n), range(g))
        return parts + rows_to_keys(range(g), range(n), hi=hi)

    def kept(self, families, margin):
        near = recent(-(-self.window // 2), margin)
        return (first_ones(self.global_tokens), near) if self.global_tokens else (near,)

    def ranges(self, families, i):
        return _window_ranges(i, -(-self.window // 2), self.global_tokens)

    def begin(self, i):
        first = i - -(-self.window // 2)
        return first if first >= self.global_tokens else None


def _window_ranges(i: int, left: int, first: int) -> Ranges:
    """Of the `first` tokens and the last ones."""
    near = range(max(first, i - left), i + 1)
    return [(0, range(min(first, i + 1))), (1, near)] if first else [(0, near)]


@dataclass(frozen=True, kw_only=True)
class Blocks(Pattern):
    """The own block of `size` tokens, and nothing else."""

    size: int = 128

    def allows(self, family, i, j, n):
        return i // self.size == j // self.size

    def parts(self, n, family):
        return diagonal(0, n, self.size, causal=self.causal)

    def kept(self, families, margin):
        return (recent(self.size - 1, margin),)

    def ranges(self, families, i):
        return [(0, range(i // self.size * self.size, i + 1))]

    def begin(self, i):
        return i // self.size * self.size


@dataclass(frozen=True, kw_only=True)
class Axial(Pattern):
    """Ho et al.: tokens row-major on a grid with `cols` columns (default ⌈√n⌉); the own row; then the own column."""

    cols: int | None = None
    families = 2

    def sized(self, n):
        return replace(self, cols=self.cols or root(n))

    def allows(self, family, i, j, n):
        cols = self.cols or root(n)
        return i // cols == j // cols if family == 0 else i % cols == j % cols

    def parts(self, n, family):
        cols = self.cols or root(n)
        row = diagonal(0, n, cols, causal=self.causal)
        if family == 0:
            return row
        if family == 1:
            return columns(n, cols, causal=self.causal)
        return row + columns(n, cols, causal=self.causal, xlo=0, xhi=0)

    def kept(self, families, margin):
        return (recent(self.cols - 1, margin),) if set(families) == {0} else EVERYTHING

    def ranges(self, families, i):
        return [(0, range(i // self.cols * self.cols, i + 1))] if set(families) == {0} else None

    def named(self, family, i):
        c = self.cols
        row, column = i[..., None] - np.arange(c), i[..., None] - c * np.arange(int(i.max()) // c + 1)
        row = np.where(row >= i[..., None] // c * c, row, -1)
        column = np.maximum(column, -1)
        return row if family == 0 else column if family == 1 else np.concatenate((row, column[..., 1:]), -1)


@dataclass(frozen=True, kw_only=True)
class Logsparse(Pattern):
    """`suffix` (Ren et al. 2021, section 4.2 and Figure 1B): i itself and, for every suffix sum c > 0 of the binary
    digits of i (i first, then i without its lowest set bit, and so on), the token c - 1: the last token of every block
    of Combiner-Logsparse; bidirectional also the mirror image, the same on n-1-i.
    `powers` (Li et al. 2019): oneself and the tokens 1, 2, 4, 8 … steps away, to both sides when bidirectional.
    """

    sets: str = "suffix"

    def allows(self, family, i, j, n):
        if self.sets == "powers":
            gap = abs(i - j)
            return (gap & (gap - 1)) == 0  # 0 or a power of two
        before = self._ends_a_block(i, j)
        return before if self.causal else before | self._ends_a_block(n - 1 - i, n - 1 - j)

    @staticmethod
    def _ends_a_block(i, j):
        """j = i, or j + 1 is what is left of i when some of its lowest bits are cleared."""
        c = j + 1
        return (i == j) | ((c <= i) & ((i & -(c & -c)) == c))

    def csr(self, n, family=None):
        if self.sets == "powers":
            steps = np.array([0] + [1 << b for b in range((n - 1).bit_length())])
            offsets = -steps[::-1] if self.causal else np.concatenate([-steps[::-1], steps[1:]])
            keys = np.arange(n)[:, None] + offsets  # (n, ≤ 2 log n + 1), ascending
        else:
            keys = self._suffixes(n)
            if not self.causal:
                both = np.concatenate([keys, np.where(keys < 0, -1, n - 1 - keys)[::-1]], 1)
                keys = np.sort(both, 1)
                keys[:, 1:][keys[:, 1:] == keys[:, :-1]] = -1  # oneself is in both halves
                keys = np.sort(keys, 1)
        real = (keys >= 0) & (keys < n)
        return pointers(real.sum(1)), keys[real].astype(np.int32)

    @staticmethod
    def _suffixes(n: int) -> np.ndarray:
        """The keys before and at i, (n, bits + 1), ascending, -1 where there is none."""
        left = np.arange(n)
        keys = [left]
        for _ in range(max(1, (n - 1).bit_length())):
            keys.append(np.where(left > 0, left - 1, -1))
            left = left & (left - 1)
        return np.sort(np.stack(keys, 1), 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Custom(GivenSupport, Pattern):
    """A user's own sets: `masks(n)` gives the p masks of length n, bool (p, n, n)."""

    masks: Callable[[int], Tensor]
    families: int = 1

    def named(self, family, i):
        """From the sets of the one length that they are given for, or of one that seldom changes."""
        n = getattr(self.masks, "length", None) or 1 << int(i.max()).bit_length()
        if int(i.max()) >= n:
            raise ValueError(f"pattern: sets are for {n} tokens, position {int(i.max())} is beyond")
        return self._named(family, i, n)

    def rows(self, n, family, first, last):
        seen = self.masks(n)[:, first:last].cpu().numpy()  # (p, rows, n)
        seen = seen.any(0) if family is None else seen[family]
        return seen & (np.arange(n) <= np.arange(first, last)[:, None]) if self.causal else seen
