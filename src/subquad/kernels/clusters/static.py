"""Tiles whose shapes follow from the length and the options alone: what a GPU runs without the host reading a size.

Σ ⌈size/R⌉ over all clusters is at most N/R + the number of clusters, so there are never more tiles of R queries; those
that no cluster needs are nobody's. Keys are bounded where clusters are cut into chunks: a tile sees two or three of
them. A whole cluster may have all tokens, and every bound on its keys makes the work quadratic: short sequences have
tiles of all pairs, for long ones see `aten`; where torch's kernels cannot do it, the host reads the sizes, or, where it
must not, all pairs are computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.clusters.layout import Layout, Tiles

BATCH = 1 << 24  # scores at a time: few launches


class StaticLayout(Layout):
    """`Layout` without a shape that depends on the clusters, but for whole clusters of long sequences."""

    batch = BATCH

    def _count(self, label: Tensor, labels: int) -> Tensor:
        return label.new_zeros(labels).scatter_add_(0, label, torch.ones_like(label))

    def _place_members(self) -> None:
        place = torch.arange(self.total, device=self.order.device)
        real = self.real[self.order]  # (N,), by cluster
        upto = torch.where(real, place, self.total).flip(0).cummin(0).values.flip(0)  # the first real one from here on
        behind = torch.cat((upto[1:], upto.new_full((1,), self.total)))
        following = torch.cat((self.order, self.order.new_full((1,), self.total)))[behind]
        again = self.tag[following] == self.tag[self.order]
        later = following % self.n if self.causal else torch.zeros_like(following)
        end = torch.where(again, later, self.n).masked_fill_(~real, 0)
        self.end = torch.zeros_like(self.tag).index_copy_(0, self.order, end)  # (N + 1,)
        token = torch.where(self.real[:-1], place, -1)
        last = torch.full_like(self.sizes, -1).scatter_reduce_(0, self.tag[:-1], token, "amax")
        self.last = torch.where(last < 0, self.total, last)  # (G·C,)

    def own(self, last_query_only: bool) -> Iterator[Tiles]:
        if last_query_only:
            yield from self._last_queries()
        elif self.chunk:
            yield from self._chunks()
        else:
            yield from self._all_pairs(self) if devices.is_short(self.n) else super().own(last_query_only)

    def asked(self, keys: Layout) -> Iterator[Tiles]:
        yield from self._all_pairs(keys) if devices.is_short(self.n) else super().asked(keys)

    def _all_pairs(self, keys: Layout) -> Iterator[Tiles]:
        """Every token to its whole sequence, of which those in other clusters by `keys` are hidden; of long sequences
        some queries at a time.
        """
        tokens = torch.arange(self.total, device=self.tag.device).view(-1, self.n)
        for some in tokens.split(max(1, self.batch // self.n**2)):  # (S, n)
            step = max(1, self.batch // self.n)
            for first in range(0, self.n, step):
                rows = some[:, first : first + step]  # (S, R)
                among = some[:, : first + step] if self.causal else some  # (S, M)
                hidden = ~self.real[among][:, None] | (self.tag[rows][..., None] != keys.tag[among][:, None])
                if self.causal:
                    hidden = hidden | (among[:, None] > rows[..., None])  # (S, R, M)
                yield Tiles(rows, among, hidden, rows % self.n if self.avoid_self else None)

    def _last_queries(self) -> Iterator[Tiles]:
        """The last token of every cluster to its whole sequence, of which other clusters are hidden."""
        tokens = torch.arange(self.total, device=self.tag.device).view(-1, self.n)
        step = max(1, self.batch // (self.clusters * self.n))
        rows = self.last.view(-1, self.clusters)  # (G, C)
        for some, asking in zip(tokens.split(step), rows.split(step), strict=True):
            yield Tiles(
                asking, some, ~self.real[some][:, None] | (self.tag[asking][..., None] != self.tag[some][:, None])
            )

    def _chunks(self) -> Iterator[Tiles]:
        size, chunk = self.rows, self.chunk
        blocks = -(-self.sizes // size)  # (G·C,)
        ends = blocks.cumsum(0)
        tile = torch.arange(self.total // size + len(blocks), device=blocks.device)
        owner = torch.searchsorted(ends, tile, right=True).clamp_(max=len(blocks) - 1)
        number = tile - (ends - blocks)[owner]  # a tile too many is behind the end of the last cluster
        first = ((number * size // chunk - 1) * chunk).clamp_(min=0)
        width = min((2 if chunk % size == 0 else 3) * chunk, -(-self.n // size) * size)
        step = max(1, self.batch // (size * width))
        for begin in range(0, len(tile), step):
            some = slice(begin, begin + step)
            yield self._chunk_tiles(owner[some], number[some][:, None], first[some][:, None], width)

    def _chunk_tiles(self, owner: Tensor, number: Tensor, first: Tensor, width: int) -> Tiles:
        """Tiles (S,) of the clusters `owner`, with the keys of the ranks first … first + width - 1."""
        rank = number * self.rows + torch.arange(self.rows, device=owner.device)  # (S, R)
        among = first + torch.arange(width, device=owner.device)  # (S, M)
        keys = self._tokens(owner, among)
        back = rank[..., None] // self.chunk - among[:, None] // self.chunk  # (S, R, M)
        hidden = ~self.real[keys][:, None] | (back < 0) | (back > 1)
        if self.causal:
            hidden = hidden | (among[:, None] > rank[..., None])
        selves = (rank - first).clamp_(max=width - 1) if self.avoid_self else None
        return Tiles(self._tokens(owner, rank), keys, hidden, selves)
