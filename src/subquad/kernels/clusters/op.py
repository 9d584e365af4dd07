"""Entrances, schemas, derivatives and costs of the operators of clusters; see the package for the formulas."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.clusters import cpu, cuda, reference, tiles
from subquad.kernels.operators import derive

prefix_op = torch.library.custom_op("subquad::cluster_prefix", mutates_args=())(reference.prefix)
prefix_backward_op = torch.library.custom_op("subquad::cluster_prefix_backward", mutates_args=())(
    reference.prefix_backward
)
attention_op = torch.library.custom_op("subquad::cluster_attention", mutates_args=())(tiles.attention)
attention_backward_op = torch.library.custom_op("subquad::cluster_attention_backward", mutates_args=())(
    tiles.attention_backward
)
prefix_op.register_kernel("cpu")(cpu.prefix)
prefix_backward_op.register_kernel("cpu")(cpu.prefix_backward)
attention_op.register_kernel("cpu")(cpu.attention)
attention_backward_op.register_kernel("cpu")(cpu.attention_backward)
attention_op.register_kernel("cuda")(cuda.attention)
attention_backward_op.register_kernel("cuda")(cuda.attention_backward)


def cluster_prefix(x: Tensor, cluster: Tensor, real: Tensor, clusters: int, is_max: bool) -> Tensor:
    """The running pool, maximum or mean, of each token's cluster, 0 where it has no real token yet.

    x (G, n, d), cluster int64 (G, n), real bool (G, n) → (G, n, d).
    """
    return prefix_op(x, cluster, real, clusters, is_max)


def cluster_attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    where: tuple[Tensor, Tensor, Tensor],
    clusters: int,
    *,
    causal: bool,
    scale: float,
    last_query_only: bool = False,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    chunk: int = 0,
    avoid_self: bool = False,
) -> Tensor:
    """One softmax over the query's cluster's tokens and, if given, the summaries of the others: (G, n, d).

    q (G, n, d); keys, values: those of the tokens and, where wanted, those of the summaries that stand at the tokens,
    (G, n, d) each; `where`: order (G·n,) sorts all tokens by sequence, cluster and time; cluster int64 and real bool
    (G, n). `last_query_only`: a query only at the last token of each cluster, which sees all of it. Who sees nothing
    gets 0.

    Several rounds of clusters, order (R, G·n) and cluster (R, G, n), share the softmax; who is met in several rounds
    counts as often. `chunk` > 0 cuts clusters into chunks (see `Layout`); with `avoid_self` a token attends to itself
    only where it meets nobody else. Under autocast the tensors may differ in dtype: the widest one is computed in.
    """
    if dropout and seed is None:
        raise TypeError("seed must be an int64 tensor where dropout > 0, not None")
    seed = seed if dropout else None
    if devices.is_host(q) and chunk >= q.shape[1]:  # nothing is cut; on other devices chunks bound the keys of a tile
        chunk = 0
    about = (clusters, causal, last_query_only, scale, dropout, chunk, avoid_self)
    work = reduce(torch.promote_types, (x.dtype for x in (q, *keys, *values)))
    keys, values = ([x.to(work) for x in group] for group in (keys, values))
    return attention_op(q.to(work), keys, values, *where, seed, *about)[0].to(q.dtype)


@prefix_op.register_fake
def _(x, cluster, real, clusters, is_max):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@attention_op.register_fake
def _(q, keys, values, *about):
    return _room_for(q), q.new_empty(q.shape[:2])


def _room_for(x: Tensor) -> Tensor:
    """On a CPU in the order of the memory of x."""
    return torch.empty_like(x) if devices.is_host(x) else x.new_empty(x.shape)


def _flops(
    q, keys, values, order, cluster, real, seed, clusters, causal, last_query_only, scale, dropout, *chunks, **kwargs
) -> int:
    layouts = tiles.rounds(order, cluster, real, clusters, causal, *chunks[:1])
    found = (t for layout in layouts for t, _ in layout.tiles(last_query_only, bool(keys[1:])))
    return 4 * q.shape[2] * sum(t.hidden.shape[0] * t.rows.shape[1] * t.keys.shape[1] for t in found)


derive(attention_op, attention_backward_op, "cluster_attention", of=(0, 1, 2), behind=3, empty=_room_for, flops=_flops)
derive(prefix_op, prefix_backward_op, "cluster_prefix", of=(0,), behind=1)
