"""Attention to whole clusters on a GPU by torch's own kernels: the host reads no size.

Sorted by cluster, clusters are sequences of different lengths one after the other, which `_efficient_attention_forward`
takes: where they begin stays on the device, and a program that has nothing to do ends. The host says how long they may
be, n. Padding is hidden from that kernel by a further feature, 1 in every query and 0 or HIDDEN in a key. A query per
cluster is one pass over the keys, and the summaries of other clusters are tiles (`StaticLayout`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.clusters.layout import StaticLayout
from subquad.kernels.clusters.tiles import absorb, add, softmax, take

ALIGNED = 8  # features come in multiples of this
ROWS = 32  # the kernel keeps logsumexps of so many rows at a time
HIDDEN = -1e30  # exp(s + HIDDEN - a sum over visible keys) is 0, and products with 0 stay finite
CAUSAL = 1  # the kernel's number for: query r of a sequence sees its keys 0 … r

_forward = torch.ops.aten._efficient_attention_forward.default
_backward = torch.ops.aten._efficient_attention_backward.default


def attention(
    q, keys, values, order, cluster, real, seed, clusters, causal, last_query_only, scale, *rest
) -> tuple[Tensor, Tensor]:
    """As `tiles.attention`, for one round of whole clusters without dropout."""
    layout, (g, n, d) = StaticLayout(order, cluster, real, clusters, causal), q.shape
    flat, tokens = _behind(q), [[_behind(x) for x in pair] for pair in zip(keys, values, strict=True)]
    find: Any = _asked if last_query_only else _own
    out, lse = find(layout, flat, *tokens[0], scale)
    for tiles in layout.others() if keys[1:] else ():
        k, v = (take(x, tiles.keys) for x in tokens[1])  # (S, M, d)
        p, here = softmax(tiles, take(flat, tiles.rows), k, scale)
        absorb(out, lse, tiles.rows, torch.bmm(p, v), here)
    return out[:-1].view(g, n, d), lse[:-1].view(g, n)


def attention_backward(
    grad, q, keys, values, out, lse, order, cluster, real, seed, clusters, causal, last_query_only, scale, *rest
) -> list[Tensor]:
    """As `tiles.attention_backward`."""
    layout = StaticLayout(order, cluster, real, clusters, causal)
    flat, upstream, found = _behind(q), _behind(grad), _behind(out)
    tokens = [[_behind(x) for x in pair] for pair in zip(keys, values, strict=True)]
    base = F.pad(
        lse.masked_fill(lse == -torch.inf, torch.inf).flatten(), (0, 1), value=torch.inf
    )  # nobody asks nothing
    given = (flat, *tokens[0], upstream, found, base)
    differentiate: Any = _asked_backward if last_query_only else _own_backward
    dq, dk, dv = differentiate(layout, *given, scale)
    more = [torch.zeros_like(x) for pair in tokens[1:] for x in pair]
    delta = (upstream * found).sum(-1, keepdim=True)  # (N + 1, 1)
    for tiles in layout.others() if more else ():
        k, v = (take(x, tiles.keys) for x in tokens[1])  # (S, M, d)
        a, g = take(flat, tiles.rows), take(upstream, tiles.rows)  # (S, R, d)
        p, here = softmax(tiles, a, k, scale)
        p.mul_((here - take(base[:, None], tiles.rows)).exp_())
        ds = torch.bmm(g, v.mT).sub_(take(delta, tiles.rows)).mul_(p).mul_(scale)
        changes = (torch.bmm(ds, k), torch.bmm(ds.mT, a), torch.bmm(p.mT, g))
        for total, where, change in zip((dq, *more), (tiles.rows, tiles.keys, tiles.keys), changes, strict=True):
            add(total, where, change)
    grads = [dq, dk, *more[:1], dv, *more[1:]]
    return [x[:-1].view(like.shape) for x, like in zip(grads, (q, *keys, *values), strict=True)]


def _behind(x: Tensor) -> Tensor:
    """(G, n, d) → (G·n + 1, d): the last row is nobody's, 0."""
    return F.pad(x.flatten(0, 1), (0, 0, 0, 1))


# ---- the query's cluster ----


class _Sorted(NamedTuple):
    """All tokens by cluster, as the kernel takes them."""

    q: Tensor  # (1, N, 1, d + 1), features filled up to a multiple of ALIGNED, as in k
    k: Tensor
    v: Tensor  # (1, N, 1, e)
    starts: Tensor  # int32 (G·C + 1,): where clusters begin
    place: Tensor  # (N,): of every token, in the kernel's table of logsumexps
    table: tuple[int, int, int]  # the shape of that table
    factor: float  # q is multiplied by this: the kernel divides scores by the root of the width

    @classmethod
    def of(cls, layout: StaticLayout, q: Tensor, k: Tensor, v: Tensor, scale: float) -> _Sorted:
        order, n = layout.order, layout.n
        factor = scale * math.sqrt(q.shape[1] + 1 + -(q.shape[1] + 1) % ALIGNED)
        least = max(HIDDEN, torch.finfo(k.dtype).min)  # 0 times -inf, which float16 would make of HIDDEN, is NaN
        hidden = k.new_zeros(len(order), 1).masked_fill_(~layout.real[order][:, None], least)
        x = torch.cat((q[order] * factor, torch.ones_like(hidden)), 1)
        y = torch.cat((k[order], hidden), 1)
        x, y, z = (F.pad(t, (0, -t.shape[1] % ALIGNED))[None, :, None] for t in (x, y, v[order]))
        starts = F.pad(layout.sizes.cumsum(0), (1, 0)).int()
        table = (len(layout.sizes), 1, n + -n % ROWS)
        label = layout.tag[order]
        rank = torch.arange(layout.total, device=order.device) - layout.starts[label]
        return cls(x, y, z, starts, label * table[2] + rank, table, factor)

    def sizes(self, layout: StaticLayout) -> tuple[Tensor, Tensor, int, int]:
        """Where sequences of queries and of keys begin, and how long they may be."""
        return self.starts, self.starts, layout.n, layout.n


def _own(layout: StaticLayout, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every token to its cluster: out (N + 1, e) and logsumexp (N + 1,)."""
    by = _Sorted.of(layout, q, k, v, scale)
    found, table = _forward(by.q, by.k, by.v, None, *by.sizes(layout), 0.0, CAUSAL if layout.causal else 0, True)[:2]
    empty = _sees_nothing(layout)
    out = found[0, :, 0, : v.shape[1]].masked_fill(empty[:, None], 0)
    here = table.flatten()[by.place].to(q.dtype).masked_fill(empty, -torch.inf)
    whole = q.new_zeros(layout.total + 1, v.shape[1]).index_copy_(0, layout.order, out)
    return whole, q.new_full((layout.total + 1,), -torch.inf).index_copy_(0, layout.order, here)


def _own_backward(layout: StaticLayout, q, k, v, grad, out, base, scale: float) -> list[Tensor]:
    """Gradients of q, k and v, (N + 1, …) each."""
    by, order = _Sorted.of(layout, q, k, v, scale), layout.order
    g, o = (F.pad(t[order], (0, -t.shape[1] % ALIGNED))[None, :, None] for t in (grad, out))
    rows = base[order].masked_fill(_sees_nothing(layout), torch.inf)  # (N,): weights are exp(s - base)
    table = torch.full(by.table, torch.inf, dtype=torch.float32, device=q.device)
    table.view(-1).index_copy_(0, by.place, rows.float())
    seed, offset = (torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2))  # nothing is dropped
    found = _backward(
        g, by.q, by.k, by.v, None, o, *by.sizes(layout), table, 0.0, seed, offset, CAUSAL if layout.causal else 0, False
    )[:3]
    dq, dk, dv = (
        torch.zeros_like(x).index_copy_(0, order, change[0, :, 0, : x.shape[1]].to(x.dtype))
        for x, change in zip((q, k, v), found, strict=True)
    )
    return [dq.mul_(by.factor), dk, dv]


def _sees_nothing(layout: StaticLayout) -> Tensor:
    """Which queries, by cluster, have no real key in their cluster (causal: none up to themselves): bool (N,)."""
    label = layout.tag[layout.order]
    real = layout.real[layout.order].long()
    if not layout.causal:
        return (layout.last == layout.total)[label]
    upto = real.cumsum(0)
    return upto == (F.pad(upto, (1, 0)))[layout.starts[label]]


# ---- a query per cluster ----


def _asked(layout: StaticLayout, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The last token of every cluster to all of it: out (N + 1, e) and logsumexp (N + 1,)."""
    s, label = _scores(layout, q, k, scale)
    top = s.new_full(layout.sizes.shape, -torch.inf).scatter_reduce_(0, label, s, "amax")  # (G·C,)
    base = top.masked_fill(top == -torch.inf, 0)
    p = (s - base[label]).exp()  # (N,)
    total = torch.zeros_like(top).scatter_add_(0, label, p)
    sums = v.new_zeros(len(top), v.shape[1]).index_add_(0, label, p[:, None] * v[:-1])
    found = sums / total.clamp(min=torch.finfo(s.dtype).tiny)[:, None]
    out = q.new_zeros(layout.total + 1, v.shape[1]).index_copy_(0, layout.last, found)
    lse = q.new_full((layout.total + 1,), -torch.inf).index_copy_(0, layout.last, base + total.log())
    return out, lse


def _asked_backward(layout: StaticLayout, q, k, v, grad, out, base, scale: float) -> list[Tensor]:
    s, label = _scores(layout, q, k, scale)
    asking = layout.last[label]  # (N,): whose query a key meets
    p = (s - base[asking]).exp()
    g = grad[asking]  # (N, e)
    ds = p * ((g * v[:-1]).sum(-1) - (grad * out).sum(-1)[asking]) * scale
    dq = torch.zeros_like(q).index_add_(0, asking, ds[:, None] * k[:-1])
    dk, dv = ds[:, None] * q[asking], p[:, None] * g
    return [dq, F.pad(dk, (0, 0, 0, 1)), F.pad(dv, (0, 0, 0, 1))]


def _scores(layout: StaticLayout, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every key with the query of its cluster, -inf where it is padding, and the cluster: (N,) each."""
    label = layout.tag[:-1]
    s = (q[layout.last[label]] * k[:-1]).sum(-1) * scale
    return s.masked_fill(~layout.real[:-1], -torch.inf), label
