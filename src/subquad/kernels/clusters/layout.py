"""Who attends to whom in clusters, as tiles of queries and keys.

Sorted by cluster (stably, so in the order of time inside each) clusters are diagonal blocks of any length.
They are cut into *tiles* of ROWS queries; the tiles that need equally many keys run as one batch. Summaries stand at
tokens: a stretch of TIME queries sees those that were the latest of their clusters when it began, and those that
stand inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels import devices

ROWS = 32  # queries of a tile of the query's cluster: small ones waste less of a cluster's end, large ones run faster
TIME = 64  # queries of a stretch: short ones copy the table of summaries more often, long ones mask more
BATCH = 1 << 18  # scores at a time: they stay in the cache


class Tiles(NamedTuple):
    """S blocks of R queries × M keys. Tokens have numbers 0 … N-1, N = G·n; N is nobody."""

    rows: Tensor  # (S, R)
    keys: Tensor  # (S, M)
    hidden: Tensor  # bool (S, R or 1, M)
    selves: Tensor | None = None  # (S, R): where a query stands among its keys, if it should rather not see itself


class Layout:
    """Who attends to whom, from the clusters of all tokens of G sequences.

    chunk > 0: a query sees those of its cluster that are in its own chunk or in the one before, where the c-th `chunk`
    members of a cluster are its c-th chunk. That rank counts earlier tokens alone: nothing of the future is in it.
    """

    batch = BATCH

    def __init__(
        self,
        order: Tensor,
        cluster: Tensor,
        real: Tensor,
        clusters: int,
        causal: bool,
        chunk: int = 0,
        avoid_self: bool = False,
    ) -> None:
        (g, self.n), self.clusters, self.causal = cluster.shape, clusters, causal
        self.chunk, self.avoid_self = chunk, avoid_self
        self.rows = ROWS if chunk % ROWS == 0 or chunk > 2 * ROWS else chunk  # queries of a tile
        self.order, self.total = order, cluster.numel()
        label = (cluster + torch.arange(g, device=order.device)[:, None] * clusters).flatten()  # (N,)
        self.tag = torch.cat((label, label.new_full((1,), -1)))  # (N + 1,): the cluster, numbered over all sequences
        self.sizes = self._count(label, g * clusters)  # (G·C,)
        self.starts = self.sizes.cumsum(0) - self.sizes
        self.real = torch.cat((real.flatten(), real.new_zeros(1)))  # (N + 1,)
        self._place_members()

    def _count(self, label: Tensor, labels: int) -> Tensor:
        return torch.bincount(label, minlength=labels)

    def _place_members(self) -> None:
        """Where the summaries stand.

        The summary at token p stands for its cluster before time end[p] (causal: from p on), at padding never.
        """
        members = self.order[self.real[self.order]]  # the tokens that count, by cluster
        following = torch.cat((members, members.new_full((1,), self.total)))[1:]
        again = self.tag[following] == self.tag[members]
        last = members[~again]
        self.last = torch.full_like(self.sizes, self.total)  # (G·C,)
        self.last[self.tag[last]] = last
        self.end = torch.zeros_like(self.tag)  # (N + 1,)
        self.end[last] = self.n
        if self.causal:
            self.end[members[again]] = following[again] % self.n

    def own(self, last_query_only: bool) -> Iterator[Tiles]:
        """Every token to its cluster, causal up to itself; `last_query_only`: the last of a cluster, to all of it."""
        size, upward = self.rows, self.causal and not last_query_only
        blocks = -(-self.sizes // size)  # (G·C,)
        counts = blocks.clamp(max=1) if last_query_only else blocks
        owner = torch.arange(len(blocks), device=blocks.device).repeat_interleave(counts)  # (tiles,)
        number = torch.arange(len(owner), device=blocks.device) - (counts.cumsum(0) - counts)[owner]
        first, stop = torch.zeros_like(number), (number + 1 if upward else blocks[owner]) * size
        if self.chunk:
            first = ((number * size // self.chunk - 1) * self.chunk).clamp_(min=0)
            stop = stop.minimum((((number + 1) * size - 1) // self.chunk + 1) * self.chunk)
        width, by_width = (stop - first).sort(stable=True)
        widths, repeats = (x.tolist() for x in width.unique_consecutive(return_counts=True))
        for w, same in zip(widths, by_width.split(repeats), strict=True):
            for tiles in same.split(max(1, self.batch // (size * w))):
                yield self._own_tiles(owner[tiles], number[tiles][:, None], first[tiles][:, None], w, last_query_only)

    def _own_tiles(self, owner: Tensor, number: Tensor, first: Tensor, width: int, last_query_only: bool) -> Tiles:
        """Tiles (S,) of the clusters `owner`, with the keys of the ranks first … first + width - 1."""
        place = torch.arange(self.rows, device=owner.device)
        reach = torch.arange(width, device=owner.device)
        rank, among = number * self.rows + place, first + reach  # (S, R), (S, M)
        keys = self._tokens(owner, among)
        if last_query_only:
            return Tiles(self.last[owner][:, None], keys, ~self.real[keys][:, None])
        hidden = ~self.real[keys][:, None]  # (S, 1, M)
        if self.causal:
            hidden = hidden | (reach > place[:, None] + width - self.rows)  # its own rank is the last but R - 1 - place
        if self.chunk % self.rows:  # a tile with queries of two chunks
            back = rank[..., None] // self.chunk - among[:, None] // self.chunk  # (S, R, M)
            hidden = hidden | (back < 0) | (back > 1)
        selves = (rank - first).clamp_(max=width - 1) if self.avoid_self else None
        return Tiles(self._tokens(owner, rank), keys, hidden, selves)

    def _tokens(self, owner: Tensor, rank: Tensor) -> Tensor:
        """The tokens with these ranks (S or 1, …) in the clusters `owner` (S,), N where there is none."""
        found = self.order[(self.starts[owner][:, None] + rank).clamp_(max=self.total - 1)]
        return torch.where(rank < self.sizes[owner][:, None], found, self.total)

    def others(self) -> Iterator[Tiles]:
        """Every token to the summaries that stand for the other clusters at its time."""
        table = self._table().flatten(0, 1)  # (G·stretches, C)
        stretches = -(-self.n // TIME)
        step = max(1, self.batch // (TIME * (self.clusters + TIME * self.causal)))
        within = torch.arange(TIME, device=table.device)
        for first in range(0, len(table), step):
            stretch = torch.arange(first, min(first + step, len(table)), device=table.device)[:, None]  # (S, 1)
            time = stretch % stretches * TIME + within  # (S, R)
            rows = torch.where(time < self.n, stretch // stretches * self.n + time, self.total)
            keys = table[first : first + step]
            keys = torch.cat((keys, rows), 1) if self.causal else keys  # (S, M)
            hidden = (self.end[keys][:, None] <= time[..., None]) | (
                self.tag[keys][:, None] == self.tag[rows][..., None]
            )
            if self.causal:
                hidden[:, :, self.clusters :] |= within > within[:, None]  # what stands later
            yield Tiles(rows, keys, hidden)

    def _table(self) -> Tensor:
        """The summaries that stand when a stretch begins, (G, stretches, C) numbers of tokens."""
        stretches, g = -(-self.n // TIME), self.total // self.n
        if not self.causal:
            return self.last.view(g, 1, self.clusters).expand(g, stretches, self.clusters)
        token = torch.arange(self.total, device=self.tag.device)
        stretch = token // self.n * stretches + token % self.n // TIME
        latest = self.tag.new_full((g * stretches * self.clusters,), -1)
        where, counts = stretch * self.clusters + self.tag[:-1] % self.clusters, torch.where(self.real[:-1], token, -1)
        latest.scatter_reduce_(0, where, counts, "amax")
        before = latest.view(g, stretches, self.clusters).cummax(1).values
        before = torch.cat((before.new_full((g, 1, self.clusters), -1), before[:, :-1]), 1)
        return torch.where(before < 0, self.total, before)

    def asked(self, keys: Layout) -> Iterator[Tiles]:
        """Every token to those that are in the same cluster by `keys`, another layout of the same tokens."""
        owner = torch.arange(len(self.sizes), device=self.sizes.device)[(self.sizes > 0) & (keys.sizes > 0)]
        owner = owner.repeat_interleave(-(-self.sizes[owner] // ROWS))
        number = torch.arange(len(owner), device=owner.device) - torch.searchsorted(owner, owner)
        width, by_width = (-(-keys.sizes[owner] // ROWS) * ROWS).sort(stable=True)
        widths, repeats = (x.tolist() for x in width.unique_consecutive(return_counts=True))
        place = torch.arange(ROWS, device=owner.device)
        for w, same in zip(widths, by_width.split(repeats), strict=True):
            for tiles in same.split(max(1, self.batch // (ROWS * w))):
                rows = self._tokens(owner[tiles], number[tiles][:, None] * ROWS + place)  # (S, R)
                seen = keys._tokens(owner[tiles], torch.arange(w, device=owner.device)[None])  # (S, M)
                hidden = ~self.real[seen][:, None]  # (S, 1, M)
                yield Tiles(rows, seen, hidden | (seen[:, None] > rows[..., None]) if self.causal else hidden)

    def tiles(self, last_query_only: bool, summaries: bool) -> Iterator[tuple[Tiles, int]]:
        """All tiles, and which keys they are about: 0 the tokens, 1 the summaries."""
        yield from ((tiles, 0) for tiles in self.own(last_query_only))
        if summaries:
            yield from ((tiles, 1) for tiles in self.others())


class StaticLayout(Layout):
    """Tiles whose shapes follow from the length and the options alone, but for whole clusters of long sequences: what a
    GPU runs without the host reading a size.

    Σ ⌈size/R⌉ over all clusters is at most N/R + the number of clusters, so there are never more tiles of R queries;
    those that no cluster needs are nobody's. Keys are bounded where clusters are cut into chunks: a tile sees two or
    three of them. A whole cluster may have all tokens, and every bound on its keys makes the work quadratic: short
    sequences have tiles of all pairs, for long ones see `aten`; where torch's kernels cannot do it, the host reads the
    sizes, or, where it must not, all pairs are computed.
    """

    batch = 1 << 24  # scores at a time: few launches

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
