"""Patterns whose sets are drawn from a seed: RANDOM and BigBird."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from subquad.supports.builders import rows_to_keys
from subquad.supports.draws import draw_few, draw_few_on_device, draw_rows, draw_rows_on_device, stream
from subquad.supports.parts import FAR, Grid, Part
from subquad.supports.pattern import Pattern, kept_csr, pointers
from subquad.supports.placed import Placed, on_device, united

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
        return pointers(degrees), draw_rows(degrees, reach, self._stream(family))

    def _stream(self, family: int | None) -> int:
        return stream(self.seed, *((0, 0) if self.shared else (self.layer_index, family or 0)))

    def listed(self, n, family, lengths):
        if family is None and self.families > 1:
            return united(torch.cat([self.listed(n, f, lengths) for f in range(self.families)], 2), n)
        degrees = (self.density * lengths.double()).round().long().clamp(min=1)
        most = max(1, int(np.rint(self.density * n)))
        return draw_rows_on_device(degrees, lengths, most, n, self._stream(family))

    def masked(self, n, family, lengths):
        keys = self.listed(n, family, lengths)
        return torch.zeros(*keys.shape[:2], n + 1, dtype=torch.bool, device=keys.device).scatter_(2, keys, True)[
            ..., :n
        ]

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
        return self._blocks(n, _drawn(self, n))

    def _blocks(self, n: int, draws: list[list[int]]) -> list[Part]:
        size, side, hi = self.block, self.window_blocks // 2, 0 if self.causal else FAR
        g = min(self.global_blocks * size, n)
        parts = self._window(g, n, size, side) + rows_to_keys(range(g, n), range(g))
        first = 0
        for a, drawn in enumerate(draws):  # runs of blocks with equally many draws become one part
            if drawn:
                parts = self._join(parts, a, len(drawn), first, n)
            first += len(drawn)
        return parts + rows_to_keys(range(g), range(n), hi=hi)

    def common(self, n, family):
        return self._blocks(n, [])

    def placed(self, n, family, lengths):
        """The drawn blocks."""
        numbers, g = self._drawn_on_device(n, lengths)[:, self.global_blocks :], self.global_blocks
        if 0 in numbers.shape:
            return []
        inside = torch.arange(self.block, device=lengths.device)
        block = torch.arange(g, g + numbers.shape[1], device=lengths.device)[:, None]
        queries = (block * self.block + inside)[None]  # (1, A, block)
        keys = (numbers[..., None] * self.block + inside).flatten(2)  # (B, A, draws·block)
        asks = queries < lengths[:, None, None]  # (B, A, block)
        return [Placed(queries, keys, asks[..., None] & (keys >= 0)[:, :, None])]

    def global_queries(self, n, lengths):
        """The global tokens."""
        place = torch.arange(min(n, self.global_blocks * self.block), device=lengths.device)
        return place.expand(len(lengths), -1) if len(place) else None

    def listed(self, n, family, lengths):
        g, side, place = self.global_blocks, self.window_blocks // 2, torch.arange(n, device=lengths.device)
        block, inside = torch.arange(-(-n // self.block), device=place.device), place[: self.block]
        near = block[:, None] + torch.arange(-side, side + 1, device=place.device)
        near = torch.where(near < g, -1, near)  # global blocks are there already
        drawn = self._drawn_on_device(n, lengths)  # (B, blocks, draws)
        always = torch.cat((torch.arange(g, device=place.device).expand(len(block), g), near), 1)
        numbers = torch.cat((always.expand(len(lengths), -1, -1), drawn), 2)  # (B, blocks, some)
        keys = numbers[..., None] * self.block + inside  # (B, blocks, some, block)
        keys = torch.where((numbers < 0)[..., None], n, keys).flatten(2)[:, place // self.block]  # (B, n, most)
        length = lengths[:, None, None]
        asks = (place >= g * self.block)[:, None] & (place[:, None] < length)
        return torch.where(asks & (keys < length), keys, n).sort(2).values

    def masked(self, n, family, lengths):
        blocks, place = -(-n // self.block), torch.arange(n, device=lengths.device) // self.block
        numbers = self._drawn_on_device(n, lengths)
        picked = torch.zeros(len(lengths), blocks, blocks + 1, dtype=torch.bool, device=lengths.device)
        picked.scatter_(2, torch.where(numbers < 0, blocks, numbers), True)
        a, b = place[:, None], place
        near = ((a - b).abs() <= self.window_blocks // 2) | (a < self.global_blocks) | (b < self.global_blocks)
        return near | picked[:, place][:, :, place]

    def _drawn_on_device(self, n: int, lengths: Tensor) -> Tensor:
        """`draw` for rows of lengths (B,), without reading them: int64 (B, blocks, draws), -1 = nothing."""
        first, side, whole = self.global_blocks, self.window_blocks // 2, (lengths // self.block)[:, None]  # (B, 1)
        block = torch.arange(-(-n // self.block), device=lengths.device)
        low = (block - side).clamp(min=first)  # blocks from here on are near, and seen already
        near = (torch.minimum(block + side + 1, whole) - low).clamp(min=0)  # (B, blocks): how many of them
        eligible = ((whole - first).clamp(min=0) - near).masked_fill(block < first, 0)
        bits = on_device(_bits(self, len(block)), lengths)
        if not self.random_blocks:
            return bits.expand(len(lengths), *bits.shape)
        found = draw_few_on_device(bits, eligible)  # (B, blocks, draws)
        number = found + first
        return torch.where(found < 0, -1, number + near[..., None] * (number >= low[:, None]))

    def drawn(self, n):
        return tuple(block for blocks in _drawn(self, n) for block in blocks)

    def named(self, family, i):
        """Whole blocks, the later tokens of the query's taken out."""
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


@lru_cache(maxsize=8)
def _bits(pattern: BigBird, blocks: int) -> np.ndarray:
    """What `draw` draws from: 64 bits for every block and draw, int64 (blocks, draws)."""
    found = [[stream(stream(pattern.seed, a), step) for step in range(pattern.random_blocks)] for a in range(blocks)]
    return np.array(found, np.uint64).reshape(blocks, -1).view(np.int64)
