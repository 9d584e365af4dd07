"""Some rows of an edge list, as a list of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.edges.lists import EdgeList


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
