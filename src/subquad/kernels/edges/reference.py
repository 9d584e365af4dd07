"""The operators of the edge room in plain torch: any device, and what the kernels are checked against.

Numbers per edge are (B·H // g, E) as everywhere; memory is E·d instead of E. Arguments are those of the operators:
q (B, H, n, d), k and v (B, H or H/group, m, d), the list as indptr, indices and share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.core.hashing import dropout_factors, ranks
from subquad.kernels.edges.lists import EdgeList
from subquad.kernels.operators import in_float32


def scores(q: Tensor, k: Tensor, indptr: Tensor, indices: Tensor, share: int, scale: float) -> Tensor:
    """scale · q_i·k_j, (B·H // g, E)."""
    edges, k = EdgeList(indptr, indices, k.shape[2], share), _repeated(k, q.shape[1])
    return (_at(q, edges, edges.rows) * _at(k, edges, _keys(edges))).sum(-1) * scale


def sums(
    w: Tensor, x: Tensor, indptr: Tensor, indices: Tensor, share: int, heads: int, num_keys: int, transposed: bool
) -> Tensor:
    """Σ_e w_e x_j for each row i of `heads` query heads; transposed: Σ_e w_e x_i for each key j of `heads` key
    heads."""
    edges = EdgeList(indptr, indices, num_keys, share)
    source, target = (edges.rows, _keys(edges)) if transposed else (_keys(edges), edges.rows)
    x = x if transposed else _repeated(x, heads)  # (B, H, n or m, d)
    terms = w[..., None] * _at(x, edges, source)  # (B·H // g, E, d)
    length = num_keys if transposed else edges.num_queries
    total = terms.new_zeros(terms.shape[0], edges.num_graphs * length, terms.shape[2])
    total = total.index_add(1, target, terms).unflatten(1, (edges.num_graphs, length))
    out = edges.by_instance(total).unflatten(0, x.shape[:2])  # (B, H, rows, d)
    return out.unflatten(1, (heads, -1)).sum(2) if transposed else out


@in_float32
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indptr: Tensor,
    indices: Tensor,
    share: int,
    key_mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """Softmax over each row's edges to real keys, dropout, and the sum of the values: (B, H, n, d')."""
    edges = EdgeList(indptr, indices, k.shape[2], share)
    p = softmax(scores(q, k, indptr, indices, share, scale), edges, real_edges(edges, key_mask, q.shape[1]))
    p = p if not dropout else p * edge_dropout(edges, seed, dropout, key_mask, q.shape[:2], p.dtype)
    return sums(p, v, indptr, indices, share, q.shape[1], k.shape[2], False)


@in_float32
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indptr: Tensor,
    indices: Tensor,
    share: int,
    key_mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    edges, lists = EdgeList(indptr, indices, k.shape[2], share), (indptr, indices, share)
    p, ds, _ = row_gradients(dout, q, k, v, edges, key_mask, seed, scale, dropout)
    return (
        sums(ds * scale, k, *lists, q.shape[1], k.shape[2], False),
        sums(ds * scale, q, *lists, k.shape[1], k.shape[2], True),
        sums(p, dout, *lists, k.shape[1], k.shape[2], True),
    )


def row_gradients(dout, q, k, v, edges: EdgeList, key_mask, seed, scale, dropout) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers per edge: the weights after dropout, dL/ds = p·(drop·dout·v - Σ p·drop·dout·v), and the scores s."""
    lists, heads = (edges.indptr, edges.indices, edges.share), q.shape[1]
    s = scores(q, k, *lists, scale)
    p = softmax(s, edges, real_edges(edges, key_mask, heads))
    drop = edge_dropout(edges, seed, dropout, key_mask, q.shape[:2], p.dtype) if dropout else 1.0
    dp, rows = scores(dout, v, *lists, 1.0) * drop, edges.rows.expand_as(p)
    mean = p.new_zeros(p.shape[0], edges.num_graphs * edges.num_queries).scatter_add(1, rows, p * dp)
    return p * drop, p * (dp - mean.gather(1, rows)), s


def softmax(s: Tensor, edges: EdgeList, real: Tensor | None = None) -> Tensor:
    """Over the edges of each row, where `real` (B·H // g, E) says so: a row with nothing above -inf becomes 0."""
    s = s if real is None else s.masked_fill(~real, -torch.inf)
    rows, limits = edges.rows.expand_as(s), torch.finfo(s.dtype)
    top = s.new_full((s.shape[0], edges.num_graphs * edges.num_queries), -torch.inf)  # (B·H // g, g·n)
    top = top.scatter_reduce(1, rows, s.detach(), "amax").clamp_min(limits.min)
    p = (s - top.gather(1, rows)).exp()  # (B·H // g, E)
    total = torch.zeros_like(top).scatter_add(1, rows, p).clamp_min(limits.tiny)
    return p / total.gather(1, rows)


def real_edges(edges: EdgeList, key_mask: Tensor | None, heads: int) -> Tensor | None:
    """Which edges lead to real keys, bool (B·H // g, E); None = all."""
    if key_mask is None:
        return None
    return key_mask[_instances(edges, key_mask.shape[0], heads) // heads, edges.indices.long()]


def edge_dropout(
    edges: EdgeList, seed: Tensor | None, dropout: float, key_mask: Tensor | None, shape: tuple[int, int], dtype
) -> Tensor:
    """0 where an edge is dropped, 1 / (1 - dropout) where it is kept, (B·H // g, E); `shape` is (B, H)."""
    assert seed is not None
    n, m, device, (batch, heads) = edges.num_queries, edges.num_keys, edges.indices.device, shape
    numbers, columns = ranks(key_mask, batch, n, m, device)  # (B, n), (B, m)
    instance = _instances(edges, batch, heads)
    row, column = numbers[instance // heads, edges.rows % n], columns[instance // heads, edges.indices.long()]
    return dropout_factors(seed, dropout, instance, row, column, dtype)


def _instances(edges: EdgeList, batch: int, heads: int) -> Tensor:
    """The instance t of every number per edge, (B·H // g, E)."""
    instance = edges.by_graph(torch.arange(batch * heads, device=edges.indices.device))  # (B·H // g, g)
    return instance[:, edges.rows // edges.num_queries]


def _at(x: Tensor, edges: EdgeList, where: Tensor) -> Tensor:
    """(B, H, n, d) → (B·H // g, E, d), at the rows or keys of all graphs, counted through."""
    return edges.by_graph(x.flatten(0, 1)).flatten(1, 2).index_select(1, where)


def _keys(edges: EdgeList) -> Tensor:
    """(E,): the key r·m + j of each edge."""
    return edges.rows // edges.num_queries * edges.num_keys + edges.indices


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
