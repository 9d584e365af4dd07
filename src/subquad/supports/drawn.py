"""Patterns whose sets are drawn from a seed: RANDOM and BigBird."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from subquad.supports.builders import rows_to_keys
from subquad.supports.draws import draw_few, draw_rows, stream
from subquad.supports.parts import FAR, Grid, Part
from subquad.supports.pattern import Pattern, kept_csr, pointers

RUN = 16  # drawn keys of this many blocks are copied at a time: they stay in the cache


@dataclass(frozen=True, kw_only=True)
class Random(Pattern):
    """Every query draws round(density · n) keys of its own (causal: of the i+1 it may see), itself among them.

    Each head and each layer has a graph of its own: family h is the graph of head h. `shared=True`: one graph for all.
    """

    density: float = 0.1
    seed: int = 0
    shared: bool = False
    layer_index: int = 0
    num_heads: int = 1

    @property
    def families(self) -> int:
        return 1 if self.shared else self.num_heads

    def csr(self, n, family=None):
        if family is None and self.families > 1:
            return super().csr(n)
        reach = np.arange(1, n + 1) if self.causal else np.full(n, n)
        degrees = np.maximum(np.rint(self.density * reach).astype(np.int64), 1)
        own = (0, 0) if self.shared else (self.layer_index, family or 0)
        return pointers(degrees), draw_rows(degrees, reach, stream(self.seed, *own))

    def rows(self, n, family, first, last):
        seen = np.zeros((n, n), dtype=bool)
        for f in range(self.families) if family is None else (family,):
            indptr, indices = kept_csr(self, n, f)
            seen[np.repeat(np.arange(n), np.diff(indptr)), indices] = True
        return seen[first:last]


@dataclass(frozen=True, kw_only=True)
class BigBird(Pattern):
    """Zaheer et al., by blocks of `block` tokens: every block sees `window_blocks` blocks around itself, the first
    `global_blocks` blocks (which see everyone), and `random_blocks` blocks drawn among the other whole blocks (causal:
    among the earlier ones), from a stream of its own.
    """

    block: int = 64
    random_blocks: int = 3
    global_blocks: int = 2
    window_blocks: int = 3
    seed: int = 0

    def draw(self, n: int) -> list[list[int]]:
        """For every block the blocks it drew, ascending."""
        side, first, drawn = self.window_blocks // 2, self.global_blocks, []
        for a in range(-(-n // self.block)):
            near = range(max(first, a - side), a + side + 1)  # seen already
            whole = n // self.block if not self.causal else min(a, n // self.block)
            eligible = [x for x in range(first, whole) if x not in near]
            picked = draw_few(self.random_blocks, len(eligible), stream(self.seed, a))
            drawn.append([eligible[x] for x in picked] if a >= first else [])
        return drawn

    def rows(self, n, family, first, last):
        size, side = self.block, self.window_blocks // 2
        i, j = np.arange(first, last)[:, None], np.arange(n)
        a, b = i // size, j // size
        picked = np.zeros((-(-n // size), -(-n // size)), dtype=bool)
        for block, drawn in enumerate(_drawn(self, n)):
            picked[block, drawn] = True
        seen = (abs(a - b) <= side) | (a < self.global_blocks) | (b < self.global_blocks) | picked[a, b]
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

    def named(self, family, i):
        """Whole blocks, the later tokens of the own one taken out."""
        size, side, g, n = self.block, self.window_blocks // 2, self.global_blocks, int(i.max()) + 1
        drawn = _drawn(self, 1 << n.bit_length())
        block = i // size
        lists = np.full((int(block.max()) + 1, g + side + 1 + self.random_blocks), -1)
        for a in np.unique(block):
            seen = (
                sorted({*range(min(g, a + 1)), *range(max(0, a - side), a + 1), *drawn[a]}) if a >= g else range(a + 1)
            )
            lists[a, : len(seen)] = list(seen)
        keys = (lists[block][..., None] * size + np.arange(size)).reshape(*i.shape, -1)
        return np.where(keys <= i[..., None], np.maximum(keys, -1), -1)

    def _window(self, g: int, n: int, size: int, side: int) -> list[Part]:
        hi = 0 if self.causal else FAR
        ahead = 0 if self.causal else side
        last = max(0, (n - g) // size - ahead)  # blocks before this one have a whole strip to the right
        parts = []
        for a in range(-(-(n - g) // size)):
            start = g + a * size
            if side <= a < last:  # interior: strips as overlapping views
                if a == side:
                    blocks, strip = last - side, (side + 1 + ahead) * size
                    queries = Grid(start, blocks, size, size)
                    parts.append(Part(queries, Grid(start - side * size, blocks, size, strip), hi=hi))
                continue
            rows = range(start, min(start + size, n))
            keys = range(max(g, start - side * size), min(n, start + (ahead + 1) * size))
            parts.append(Part(Grid.of(rows), Grid.of(keys), hi=hi))
        return parts

    def _join(self, parts: list[Part], a: int, count: int, first: int, n: int) -> list[Part]:
        """Block a sees `count` drawn blocks, whose numbers stand from `first` on."""
        size, length = self.block, min(self.block, n - a * self.block)
        p = parts[-1] if parts else None
        if p and p.draws == count and p.queries.length == length and p.queries.blocks < RUN:
            grid = p.queries
            if grid.start + grid.blocks * size == a * size:
                longer, keys = (x._replace(blocks=grid.blocks + 1) for x in (grid, p.keys))
                return [*parts[:-1], Part(longer, keys, draws=count)]
        keys = Grid(first, 1, count, count * size)
        return [*parts, Part(Grid(a * size, 1, size, length), keys, draws=count)]


@lru_cache(maxsize=8)
def _drawn(pattern: BigBird, n: int) -> list[list[int]]:
    """What a seeded pattern drew for length n, kept for the next call."""
    return pattern.draw(n)
