"""Who attends to whom, as lists of edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

Buckets: TypeAlias = tuple[list[tuple[Tensor, Tensor]], Tensor]  # see `EdgeList.buckets`


@dataclass(frozen=True, eq=False)
class EdgeList:
    """g graphs of n query rows each, as CSR.

    Instance (b, h), of flat index t = b·H + h with H query heads, uses graph t // share % g. So g = 1 is one graph for
    all, g = H one per head, g = B·H one per instance, and g = B with share = H one per batch element.
    A tensor with a number per edge and instance is (B·H // g, E); `by_graph` puts instances in that order.
    """

    indptr: Tensor  # (g, n + 1) int64: row i of graph r owns indices[indptr[r, i] : indptr[r, i + 1]]
    indices: Tensor  # (E,) int32: key positions, ascending within a row
    num_keys: int
    share: int = 1  # so many consecutive instances use the same graph

    def __post_init__(self) -> None:
        for name, dtype, dims in (("indptr", torch.int64, 2), ("indices", torch.int32, 1)):
            x = getattr(self, name)
            if x.dtype != dtype or x.ndim != dims:
                raise TypeError(f"{name} must be {dims}-D {dtype}, got {x.ndim}-D {x.dtype}")
        if 0 in self.indptr.shape:
            raise ValueError(f"indptr must be (graphs, rows + 1), got {tuple(self.indptr.shape)}")
        if self.indptr.device != self.indices.device:
            raise ValueError(
                f"indptr must be on the device of indices, {self.indices.device}, got {self.indptr.device}"
            )

    @classmethod
    def from_mask(cls, mask: Tensor) -> EdgeList:
        """The edges of a bool mask (n, m) or (g, n, m), True = attends."""
        if mask.dtype != torch.bool or mask.ndim not in (2, 3):
            raise TypeError(f"mask must be 2-D or 3-D bool, got {mask.ndim}-D {mask.dtype}")
        mask = mask[None] if mask.ndim == 2 else mask  # (g, n, m)
        graphs, n, m = mask.shape
        ends = mask.sum(-1).flatten().cumsum(0)  # (g·n,)
        offsets = torch.cat((ends.new_zeros(1), ends))  # (g·n + 1,)
        graph = torch.arange(graphs, device=mask.device)[:, None]  # (g, 1)
        return cls(offsets[graph * n + torch.arange(n + 1, device=mask.device)], mask.nonzero()[:, 2].int(), m)

    @classmethod
    def stack(cls, lists: Sequence[EdgeList], num_heads: int) -> EdgeList:
        """One list per batch element, of any lengths, each of 1 graph or of num_heads → the list of the batch.

        Rows beyond the end of a shorter element have no edges.
        """
        if not lists:
            raise ValueError("lists must have an EdgeList for each batch element, got none")
        graphs = {x.num_graphs for x in lists}
        if graphs not in ({1}, {num_heads}):
            raise ValueError(f"lists must all have 1 graph or all have {num_heads}, got {sorted(graphs)}")
        n, m, before, pointers = max(x.num_queries for x in lists), max(x.num_keys for x in lists), 0, []
        for x in lists:
            end = x.indptr[:, -1:].expand(-1, n - x.num_queries)
            pointers.append(torch.cat((x.indptr, end), 1) + before)
            before += x.num_edges
        share = num_heads if graphs == {1} else 1
        return cls(torch.cat(pointers), torch.cat([x.indices for x in lists]), m, share)

    def to_mask(self) -> Tensor:
        """(g, n, m) bool, the inverse of `from_mask`."""
        mask = self.indices.new_zeros(self.num_graphs * self.num_queries, self.num_keys, dtype=torch.bool)
        mask[self.rows, self.indices.long()] = True
        return mask.unflatten(0, (self.num_graphs, self.num_queries))

    def to(self, device: torch.device | str) -> EdgeList:
        return EdgeList(self.indptr.to(device), self.indices.to(device), self.num_keys, self.share)

    def num_copies(self, batch: int, num_heads: int) -> int:
        """B·H // g: how many instances use a graph."""
        # in a traced graph the batch is a symbol: it has no hash, and comparing it first would fix its value
        allowed = [(1, 1), (1, num_heads), (1, batch * num_heads), (num_heads, batch)]
        if (self.share, self.num_graphs) not in allowed:
            raise ValueError(
                f"edges must have 1, H = {num_heads} or B·H = {batch * num_heads} graphs, or B = {batch} with share = "
                f"{num_heads}, got {self.num_graphs} with share = {self.share}"
            )
        return batch * num_heads // self.num_graphs

    def by_graph(self, x: Tensor) -> Tensor:
        """Something of every instance, (B·H, …) → (B·H // g, g, …): copy after copy of the graphs."""
        return x.unflatten(0, (-1, self.num_graphs, self.share)).transpose(1, 2).flatten(0, 1)

    def by_instance(self, x: Tensor) -> Tensor:
        """The inverse of `by_graph`."""
        return x.unflatten(0, (-1, self.share)).transpose(1, 2).flatten(0, 2)

    @property
    def num_edges(self) -> int:
        return self.indices.shape[0]

    @property
    def num_graphs(self) -> int:
        return self.indptr.shape[0]

    @property
    def num_queries(self) -> int:
        return self.indptr.shape[1] - 1

    @property
    def degrees(self) -> Tensor:
        """(g, n): keys per row."""
        return self.indptr.diff(dim=1)

    @property
    def rows(self) -> Tensor:
        """(E,): the row r·n + i of each edge."""
        rows = torch.arange(self.num_graphs * self.num_queries, device=self.indptr.device)
        return rows.repeat_interleave(self.degrees.flatten(), output_size=self.num_edges)

    @cached_property
    def buckets(self) -> Buckets:
        """The edges as padded rows, for `edge_map`: one bucket per power of two that rounds up a degree.

        Pairs (slots, mask), both (g, rows, width), and the place (E,) of every edge in all slots in sequence.
        Kept, because fixed patterns use it at every step.
        """
        degrees, starts = self.degrees, self.indptr[:, :-1]  # (g, n)
        place = self.indptr.new_empty(self.num_edges)
        pairs, before, width = [], 0, 1
        while width < 2 * degrees.max():
            inside = (width // 2 < degrees) & (degrees <= width)  # (g, n)
            longest = int(inside.sum(1).max())
            rows = inside.byte().argsort(dim=1, descending=True, stable=True)[:, :longest]  # (g, rows)
            degree = (degrees * inside).gather(1, rows)[..., None]  # (g, rows, 1), 0 where a graph has fewer
            offset = torch.arange(width, device=degrees.device)
            mask = offset < degree  # (g, rows, width)
            slots = (starts.gather(1, rows)[..., None] + offset).masked_fill(~mask, 0)
            place[slots[mask]] = before + mask.flatten().nonzero()[:, 0]
            if longest:  # rows that only fill up a graph get one entry: no map need accept an empty set
                pairs.append((slots, mask | ((degree == 0) & (offset == 0))))
            before, width = before + mask.numel(), 2 * width
        return pairs, place


def rows_of(edges: EdgeList, row: Tensor) -> EdgeList:
    """Rows `row` (g, t) of the g graphs, in that order; a row behind the last one, number n, has no edge."""
    return EdgeList(*_rows(edges.indptr, edges.indices, row), edges.num_keys, edges.share)


@torch.library.custom_op("subquad::edge_rows", mutates_args=())
def _rows(indptr: Tensor, indices: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """indptr (g, t + 1) and indices (E',)."""
    begin = indptr.gather(1, row)  # (g, t)
    degree = (indptr.gather(1, (row + 1).clamp(max=indptr.shape[1] - 1)) - begin).flatten()
    ends = degree.cumsum(0)
    starts = (ends - degree).view(row.shape)  # in the new list
    most = int(ends[-1])
    shift = (begin - starts).flatten().repeat_interleave(degree, output_size=most)
    place = torch.arange(most, device=row.device) + shift  # (E',)
    return torch.cat((starts, ends.view(row.shape)[:, -1:]), 1), indices[place]


@_rows.register_fake
def _(indptr, indices, row):
    edges = torch.library.get_ctx().new_dynamic_size()
    return indptr.new_empty(row.shape[0], row.shape[1] + 1), indices.new_empty(edges)
