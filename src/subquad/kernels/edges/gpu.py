"""The edge operators on a GPU: launches of the Triton kernels of `triton_rows`, and the list by key.

Half precision is read and written as it is; a number per edge is float32, and so is everything in between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.core.hashing import dropout_seed, ranks
from subquad.kernels import devices
from subquad.kernels.edges.lists import EdgeList

EDGES = 32  # of a row at a time
MODES = {"pre": 1, "published": 2}  # what edges are credited with; 0: nothing


class ByKey(NamedTuple):
    """A list by key: offsets (g, m + 1), the query of every edge (E,), and where its number stands (E,)."""

    indptr: Tensor
    queries: Tensor
    slots: Tensor

    @classmethod
    def of(cls, edges: EdgeList) -> ByKey:
        n, m = edges.num_queries, edges.num_keys
        graph = edges.rows // n  # (E,)
        keys, slots = torch.sort(graph * m + edges.indices, stable=True)  # graph by graph, key by key
        ends = torch.searchsorted(keys, torch.arange(edges.num_graphs * m + 1, device=keys.device))
        first = m * torch.arange(edges.num_graphs, device=keys.device)[:, None]
        return cls(ends[first + torch.arange(m + 1, device=keys.device)], (edges.rows % n)[slots].int(), slots)


def attention(
    q: Tensor, k: Tensor, v: Tensor, indptr: Tensor, indices: Tensor, share: int, key_mask: Tensor | None,
    seed: Tensor | None, scale: float, dropout: float, counted: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`counted`: the key mask that dropout counts by, where the edges need none."""
    from subquad.kernels.edges import triton_rows as rows

    q, k, v = (x.contiguous() for x in (q, k, v))
    out = torch.empty_like(q)
    given, constants = _random(q, k, key_mask, seed, dropout, counted)
    sizes = (q.shape[2], k.shape[2], q.shape[1], q.shape[1] // k.shape[1], len(indptr), share)
    grid = (q.shape[2], q.shape[0] * q.shape[1])
    lists = (indptr.contiguous(), indices)
    rows.attention_rows[grid](
        q,
        k,
        v,
        out,
        *lists,
        *given,
        *sizes,
        scale,
        dropout,
        1 / (1 - dropout),
        **constants,
        **devices.launch_options(q.dtype),
    )
    return out


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, indptr: Tensor, indices: Tensor, share: int,
    key_mask: Tensor | None, seed: Tensor | None, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    edges = EdgeList(indptr.contiguous(), indices, k.shape[2], share)
    return gradients(dout, q, k, v, edges, key_mask, None, seed, scale, dropout)[:3]


def gradients(dout, q, k, v, edges: EdgeList, key_mask, counted, seed, scale, dropout, mode=0, reach=-1):
    """dq, dk, dv, the list by key, and with `mode` a number per edge: the gradient of its probability.

    `counted`: the key mask that dropout counts by, where the edges need none.
    """
    from subquad.kernels.edges import triton_rows as rows

    dout, q, k, v = (x.contiguous() for x in (dout, q, k, v))
    instances = q.shape[0] * q.shape[1]
    per_edge = (instances // edges.num_graphs, edges.num_edges)
    ds, p = (q.new_empty(per_edge, dtype=torch.float32) for _ in range(2))
    credit = torch.empty_like(ds) if mode else ds
    dq = torch.empty_like(q)
    given, constants = _random(q, k, key_mask, seed, dropout, counted)
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    sizes = (q.shape[2], k.shape[2], edges.num_edges, heads, group, edges.num_graphs, edges.share, reach)
    numbers = (scale, dropout, 1 / (1 - dropout))
    lists = (edges.indptr, edges.indices)
    constants |= {"MODE": mode, **devices.launch_options(q.dtype)}
    rows.gradient_rows[(q.shape[2], instances)](
        q, k, v, dout, dq, ds, p, credit, *lists, *given, *sizes, *numbers, **constants
    )
    by_key = ByKey.of(edges)
    dk, dv = key_sums(ds, q, k.shape[1], edges, by_key), key_sums(p, dout, k.shape[1], edges, by_key)
    return dq, dk, dv, by_key, credit if mode else None


def key_sums(w: Tensor, x: Tensor, heads: int, edges: EdgeList, by_key: ByKey) -> Tensor:
    """Σ_e w_e x_i for each key of `heads` key heads: x (B, H, n, d) → (B, heads, m, d)."""
    out = x.new_empty(x.shape[0], heads, edges.num_keys, x.shape[3])
    lists = (by_key.indptr, by_key.queries, by_key.slots)
    _sum(w, x, out, lists, edges, 1, x.shape[1] // heads, True)
    return out


def query_sums(w: Tensor, x: Tensor, heads: int, edges: EdgeList) -> Tensor:
    """Σ_e w_e x_j for each row of `heads` query heads: x (B, H/g, m, d) → (B, heads, n, d)."""
    out = x.new_empty(x.shape[0], heads, edges.num_queries, x.shape[3])
    _sum(w, x, out, (edges.indptr, edges.indices, edges.indices), edges, heads // x.shape[1], 1, False)
    return out


def sums(
    w: Tensor, x: Tensor, indptr: Tensor, indices: Tensor, share: int, heads: int, num_keys: int, transposed: bool
) -> Tensor:
    edges = EdgeList(indptr.contiguous(), indices, num_keys, share)
    return key_sums(w, x, heads, edges, ByKey.of(edges)) if transposed else query_sums(w, x, heads, edges)


def _sum(w, x, out, lists, edges: EdgeList, spread: int, gather: int, moved: bool) -> None:
    from subquad.kernels.edges import triton_rows as rows

    sizes = (out.shape[2], x.shape[2], edges.num_edges, spread, gather, edges.num_graphs, edges.share)
    grid = (out.shape[2], out.shape[0] * out.shape[1])
    rows.sum_rows[grid](
        w.contiguous(),
        x.contiguous(),
        out,
        *lists,
        *sizes,
        **widths(x.shape[3]),
        MOVED=moved,
        **devices.launch_options(x.dtype),
    )


def widths(width: int) -> dict[str, int]:
    return {"D": width, "DP": max(16, 1 << (width - 1).bit_length()), "BE": EDGES}


def _random(q, k, key_mask, seed, dropout, counted=None) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """real, numbers, columns and the seed for dropout; q stands for what is not there."""
    constants = {**widths(q.shape[3]), "MASK": key_mask is not None, "DROP": dropout > 0}
    real = q if key_mask is None else key_mask.contiguous().view(torch.uint8)
    if not dropout:
        return (real, q, q, q), constants
    by = key_mask if counted is None else counted
    numbers, columns = ranks(by, q.shape[0], q.shape[2], k.shape[2], q.device)
    return (
        real,
        numbers.contiguous(),
        columns.contiguous(),
        dropout_seed(seed.to(q.device, non_blocking=True)).view(1),
    ), constants
