"""Sparsity patterns: the index sets A_k^l of Yun et al., "O(n) Connections are Expressive Enough" (section 3).

A pattern has p families of sets, l = 0 … p-1; token k of a layer with pattern l attends to A_k^l. Each class
gives its definition as a predicate on positions (0-based), `allows`, and, where the sets are regular, the same
sets once more as blocks for the kernel, `parts`. Masks, counts, edge lists and pictures come from the
definition; the tests hold the two against each other.

Everywhere `family` is l, or None for the union of the p families. Causal patterns keep the past half of each set,
A_k ∩ {0 … k}, with the self-loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from subquad.kernels.blocks import FAR, Part, columns, diagonal, part, rows_to_keys, selves, windows
from subquad.kernels.edges import EdgeList

ROWS = 1024  # masks of long sequences are made this many rows at a time
RUN = 16  # drawn keys of this many blocks are copied at a time: they stay in the cache


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A family of index sets for every length n."""

    causal: bool = False

    families = 1  # p of the paper

    def allows(self, family: int, i: Tensor, j: Tensor, n: int) -> Tensor:
        """Is j in A_i^l? Positions broadcast; causality is added by the caller."""
        raise TypeError(f"{type(self).__name__} is not given by a predicate")

    def parts(self, n: int, family: int | None) -> list[Part] | None:
        """The same sets as blocks, or None where they are not regular (then the edge list runs)."""
        return None

    def drawn(self, n: int) -> tuple[int, ...]:
        """The blocks that parts with draws refer to."""
        return ()

    # ---- from the definition ----

    def rows(self, n: int, family: int | None, first: int, last: int) -> Tensor:
        """Rows first … last-1 of the mask, bool (last - first, n)."""
        i, j = torch.arange(first, last)[:, None], torch.arange(n)
        chosen = range(self.families) if family is None else (family,)
        seen = torch.stack([self.allows(f, i, j, n).expand(last - first, n) for f in chosen]).any(0)
        return seen & (j <= i) if self.causal else seen

    def mask(self, n: int, family: int | None = None) -> Tensor:
        """bool (n, n), row = query."""
        return self.rows(n, family, 0, n)

    def edges(self, n: int, family: int | None = None) -> EdgeList:
        """The sets as CSR, made a strip of rows at a time."""
        strips = [self.rows(n, family, first, min(n, first + ROWS)) for first in range(0, n, ROWS)]
        degrees = torch.cat([strip.sum(1) for strip in strips])
        indices = torch.cat([strip.nonzero()[:, 1] for strip in strips]).int()
        return edge_list(degrees, indices, n)

    def sets(self, n: int, family: int | None = None) -> list[Tensor]:
        """A_0^l … A_{n-1}^l, each an ascending index tensor."""
        edges = self.edges(n, family)
        return list(edges.indices.long().split(edges.indptr[0].diff().tolist()))

    def connections(self, n: int, family: int | None = None) -> int:
        """Σ_k |A_k^l|."""
        return self.edges(n, family).num_edges

    def sparsity(self, n: int, family: int | None = None) -> float:
        """Share of the n² (causal: n(n+1)/2) possible connections that are absent."""
        return 1 - self.connections(n, family) / (n * (n + 1) // 2 if self.causal else n * n)


def edge_list(degrees: Tensor, indices: Tensor, n: int) -> EdgeList:
    """One graph from the number of keys per row and the keys in order."""
    indptr = torch.zeros(1, len(degrees) + 1, dtype=torch.int64)
    indptr[0, 1:] = degrees.cumsum(0)
    return EdgeList(indptr, indices.int(), n)


def root(n: int) -> int:
    """⌈√n⌉: the segment length that balances the two families."""
    return math.isqrt(n - 1) + 1 if n > 1 else 1


@dataclass(frozen=True, kw_only=True)
class Dense(Pattern):
    """Everyone to everyone."""

    def allows(self, family, i, j, n):
        return (i >= 0) & (j >= 0)

    def parts(self, n, family):
        return [part((0, 1, 0, n, 1), (0, 0, n, 1), hi=0 if self.causal else FAR)]


@dataclass(frozen=True, kw_only=True)
class Strided(Pattern):
    """Eq. 4 (Child et al.): ⌈w/2⌉ neighbours to the left and ⌊w/2⌋ to the right; then every w-th token."""

    w: int | None = None
    families = 2

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


@dataclass(frozen=True, kw_only=True)
class Fixed(Pattern):
    """Eq. 5 (Child et al.): the own segment of length w; then oneself and the last token of every segment.

    A partial last segment has no summary token, so the tokens in it reach nobody (Assumption 1.3 fails);
    `close=True` makes the last token of the sequence a summary token too.
    """

    w: int | None = None
    close: bool = False
    families = 2

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


@dataclass(frozen=True, kw_only=True)
class Star(Pattern):
    """Eq. 6 (Guo et al.): a ring in which everyone sees w neighbours on each side, and a relay token that sees
    everyone and is seen by everyone. The relay is the last token; in a causal model nobody could see it there,
    so `relay="first"` puts it in front.
    """

    w: int = 8
    relay: str = "last"

    def allows(self, family, i, j, n):
        relay = n - 1 if self.relay == "last" else 0
        if n == 1:
            return i == j
        around = (i - j) % (n - 1)  # positions on the ring differ by a shift only: the relay is at an end
        near = (around <= self.w) | (around >= n - 1 - self.w)
        return (i == relay) | (j == relay) | near

    def parts(self, n, family):
        w, m, hi = self.w, n - 1, 0 if self.causal else FAR
        relay, first = (n - 1, 0) if self.relay == "last" else (0, 1)
        ring = range(first, first + m)
        if 2 * w + 1 >= m:
            parts = rows_to_keys(ring, ring, hi=hi)
        else:
            parts = windows(first, first + m, w, 0 if self.causal else w)
            parts += rows_to_keys(ring[-w:], ring[:w], hi=w - m)  # round the end of the ring …
            if not self.causal:
                parts += rows_to_keys(ring[:w], ring[-w:], lo=m - w)  # … and back
        if not (self.causal and self.relay == "last"):
            parts += rows_to_keys(ring, range(relay, relay + 1))
        return parts + rows_to_keys(range(relay, relay + 1), range(n), hi=hi)


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


@dataclass(frozen=True, kw_only=True)
class Axial(Pattern):
    """Ho et al.: tokens row-major on a grid with `cols` columns (default ⌈√n⌉); the own row; then the own column."""

    cols: int | None = None
    families = 2

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


@dataclass(frozen=True, kw_only=True)
class Logsparse(Pattern):
    """Li et al.: oneself and the tokens 1, 2, 4, 8 … steps away (to both sides when bidirectional)."""

    def allows(self, family, i, j, n):
        gap = (i - j).abs()
        return (gap & (gap - 1)) == 0  # 0 or a power of two

    def edges(self, n, family=None):
        steps = torch.tensor([0] + [1 << b for b in range((n - 1).bit_length())])
        offsets = torch.cat([-steps.flip(0), steps[1:]]) if not self.causal else -steps.flip(0)
        keys = torch.arange(n)[:, None] + offsets  # (n, ≤ 2 log n + 1), ascending
        real = (keys >= 0) & (keys < n)
        return edge_list(real.sum(1), keys[real], n)


@lru_cache(maxsize=8)
def _drawn(pattern: Random | BigBird, n: int):
    """What a seeded pattern drew for length n, kept for the next call."""
    return pattern.draw(n)


@dataclass(frozen=True, kw_only=True)
class Random(Pattern):
    """Every query draws round(density · n) keys of its own (causal: of the i+1 it may see), itself among them."""

    density: float = 0.1
    seed: int = 0

    def draw(self, n: int) -> EdgeList:
        from subquad.supports.draws import draw_rows

        reach = torch.arange(1, n + 1) if self.causal else torch.full((n,), n)
        degrees = (self.density * reach).round().long().clamp(min=1)
        return edge_list(degrees, draw_rows(degrees, reach, self.seed), n)

    def edges(self, n, family=None):
        return _drawn(self, n)

    def rows(self, n, family, first, last):
        return self.edges(n).to_mask()[0, first:last]


@dataclass(frozen=True, kw_only=True)
class BigBird(Pattern):
    """Zaheer et al., by blocks of `block` tokens: every block sees `window_blocks` blocks around itself, the first
    `global_blocks` blocks (which see everyone), and `random_blocks` blocks drawn among the other whole
    blocks (causal: among the earlier ones).
    """

    block: int = 64
    random_blocks: int = 3
    global_blocks: int = 2
    window_blocks: int = 3
    seed: int = 0

    def draw(self, n: int) -> list[list[int]]:
        """For every block the blocks it drew, ascending."""
        whole, side = n // self.block, self.window_blocks // 2
        generator = torch.Generator().manual_seed(self.seed)
        drawn: list[list[int]] = []
        for a in range(-(-n // self.block)):
            order = torch.randperm(whole, generator=generator).tolist()
            others = [x for x in order if x >= self.global_blocks and abs(x - a) > side and not (self.causal and x > a)]
            drawn.append(sorted(others[: self.random_blocks]) if a >= self.global_blocks else [])
        return drawn

    def rows(self, n, family, first, last):
        size, side = self.block, self.window_blocks // 2
        i, j = torch.arange(first, last)[:, None], torch.arange(n)
        a, b = i // size, j // size
        picked = torch.zeros(-(-n // size), -(-n // size), dtype=torch.bool)
        for block, drawn in enumerate(_drawn(self, n)):
            picked[block, drawn] = True
        seen = ((a - b).abs() <= side) | (a < self.global_blocks) | (b < self.global_blocks) | picked[a, b]
        return seen & (j <= i) if self.causal else seen

    def parts(self, n, family):
        size, side, hi = self.block, self.window_blocks // 2, 0 if self.causal else FAR
        g = min(self.global_blocks * size, n)
        parts = self._window(g, n, size, side) + rows_to_keys(range(g, n), range(g))
        first = 0
        for a, drawn in enumerate(_drawn(self, n)):  # runs of blocks with equally many draws become one part
            if drawn:
                parts = self._join(parts, a, len(drawn), first, n)
            first += len(drawn)
        return parts + rows_to_keys(range(g), range(n), hi=hi)

    def drawn(self, n):
        return tuple(block for blocks in _drawn(self, n) for block in blocks)

    def _window(self, g: int, n: int, size: int, side: int) -> list[Part]:
        hi = 0 if self.causal else FAR
        ahead = 0 if self.causal else side
        last = max(0, (n - g) // size - ahead)  # blocks before this one have a whole strip to the right
        parts = []
        for a in range(-(-(n - g) // size)):
            start = g + a * size
            if side <= a < last:  # interior: strips as overlapping views
                if a == side:
                    queries = (start, last - side, size, size, 1)
                    parts.append(part(queries, (start - side * size, size, (side + 1 + ahead) * size, 1), hi=hi))
                continue
            rows = range(start, min(start + size, n))
            keys = range(max(g, start - side * size), min(n, start + (ahead + 1) * size))
            parts.append(part((rows[0], 1, 0, len(rows), 1), (keys[0], 0, len(keys), 1), hi=hi))
        return parts

    def _join(self, parts: list[Part], a: int, count: int, first: int, n: int) -> list[Part]:
        """Block a sees `count` drawn blocks, whose numbers stand from `first` on."""
        size, length = self.block, min(self.block, n - a * self.block)
        p = parts[-1] if parts else None
        if p and p.draws == count and p.q_len == length and p.q_start + p.blocks * size == a * size and p.blocks < RUN:
            return [*parts[:-1], p._replace(blocks=p.blocks + 1)]
        return [*parts, Part(a * size, 1, size, length, 1, first, count, count * size, 1, draws=count)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Custom(Pattern):
    """A user's own sets: `masks(n)` gives the p masks of length n, bool (p, n, n)."""

    masks: Callable[[int], Tensor]
    families: int = 1

    def rows(self, n, family, first, last):
        seen = self.masks(n)[:, first:last]  # (p, rows, n)
        seen = seen.any(0) if family is None else seen[family]
        return seen & (torch.arange(n) <= torch.arange(first, last)[:, None]) if self.causal else seen
