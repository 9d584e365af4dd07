"""Combiner over a plan of your own (Ren et al. 2021, section 3.1), given as index sets.

    def halves(n):                                        # direct[i], groups[i] for every query i
        direct = [[i] for i in range(n)]
        groups = [[range(i), range(i + 1, n)] for i in range(n)]
        return direct, groups
    subquad.attention("combiner-plan", plan=halves, …)

`plan` is such a function of n, or a `supports.partitions.Partition` whose groups are plain sets. For every query the
sets must be a partition of its support; with causal=True each keeps its positions ≤ i. Any plan is exact; the cost is
the plan's own, Σ terms + Σ members, over edge lists instead of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.abstraction import pooled
from subquad.attention.combiner import Combiner, CombinerOptions
from subquad.core.options import option
from subquad.kernels.constants import constant
from subquad.kernels.edges import EdgeList, edge_attention
from subquad.supports.partitions import POOLED, Group, IndexSets, Partition


@lru_cache(maxsize=16)
def _edges(partition: Partition, n: int) -> tuple[EdgeList, EdgeList]:
    """Groups → their members, and queries → tokens (0 … n-1) and groups (n …)."""
    number: dict[Group, int] = {}
    rows = []
    for i in range(n):
        groups = partition.groups(n, i)
        if any(group.children or group.asker != POOLED for group in groups):
            raise ValueError("combiner-plan: plan must be made of plain groups, without children or askers")
        rows.append(sorted(partition.direct(n, i)) + sorted(n + number.setdefault(g, len(number)) for g in groups))
    return _edge_list([sorted(group.members) for group in number], n), _edge_list(rows, n + len(number))


def _edge_list(rows: list[list[int]], keys: int) -> EdgeList:
    ends = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)[None]  # (1, rows + 1)
    return EdgeList(ends, torch.tensor([j for row in rows for j in row], dtype=torch.int32), keys)


def _pointers(partition: Partition, n: int, which: int) -> Tensor:
    return _edges(partition, n)[which].indptr


def _indices(partition: Partition, n: int, which: int) -> Tensor:
    return _edges(partition, n)[which].indices


@torch.compiler.assume_constant_result
def _keys(partition: Partition, n: int, which: int) -> int:
    return _edges(partition, n)[which].num_keys


def _list(partition: Partition, n: int, which: int, device: torch.device) -> EdgeList:
    given = (partition, n, which)
    return EdgeList(constant(_pointers, *given).to(device), constant(_indices, *given).to(device), _keys(*given))


def member_pool(edges: EdgeList) -> Callable[[Tensor, str], Tensor]:
    """The reduction of x (B, H, n, d) over each row's members: (B, H, rows, d)."""
    row = torch.arange(edges.num_queries, device=edges.indices.device)
    row = row.repeat_interleave(edges.indptr[0].diff(), output_size=edges.num_edges)  # (E,)

    def reduce(x: Tensor, kind: str) -> Tensor:
        members = x.index_select(2, edges.indices.long())  # (B, H, E, d)
        if kind == "sum":
            empty = members.new_zeros(*x.shape[:2], edges.num_queries, x.shape[3])
            return empty.index_add(2, row, members)
        empty = members.new_full((*x.shape[:2], edges.num_queries, x.shape[3]), -torch.inf)
        return empty.scatter_reduce(2, row[:, None].expand(members.shape), members, "amax")

    return reduce


class CombinerPlan(Combiner):
    __doc__ = __doc__
    cost = "the plan's own"
    exponent = 2.0

    @dataclass(frozen=True, kw_only=True)
    class Options(CombinerOptions):
        plan: Any = option(None, "a function n → (direct sets, groups), or a Partition")

    def __init__(self, options: CombinerPlan.Options) -> None:
        super().__init__(options)
        given = options.plan
        if isinstance(given, Partition):
            if given.causal != options.causal:
                raise ValueError(
                    f"combiner-plan: plan has causal={given.causal}, the mechanism causal={options.causal}"
                )
            self._partition = given
        elif callable(given):
            self._partition = IndexSets(sets=given, causal=options.causal)
        else:
            raise TypeError(
                f"combiner-plan: plan must be a function n → (direct, groups) or a Partition, not {given!r}"
            )

    @property
    def partition(self) -> Partition:
        return self._partition

    def combine(self, q, k, v, exists):
        n, scale = index(q.shape[2]), self.options.softmax_scale
        groups, main = (_list(self._partition, n, which, q.device) for which in (0, 1))
        keys, values = k, v
        if groups.num_queries:
            members, reduce = None if exists is None else exists[..., None], member_pool(groups)
            query, key = (pooled(x, self.abstraction.pool, members, reduce) for x in self.abstraction.features(q, k))
            inner = groups if exists is None else groups.masked(exists[:, 0], q.shape[1])
            value = edge_attention(query, k, v, inner, scale=scale)
            keys, values = torch.cat((k, key), 2), torch.cat((v, value), 2)  # (B, H, n + U, d)
        if exists is not None:
            alive = exists[:, 0]
            if groups.num_queries:
                alive = torch.cat((alive, (reduce(members.float(), "sum") > 0)[:, 0, :, 0]), 1)  # (B, n + U)
            main = main.masked(alive, q.shape[1])
        shape = (q.shape[0] * q.shape[1] // main.num_graphs, main.num_edges)
        gate = F.dropout(q.new_ones(shape), self.drop) if self.drop else None
        return edge_attention(q, keys, values, main, scale=scale, weight_gate=gate)
