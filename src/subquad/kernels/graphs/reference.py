"""Attention over sampled graphs in plain torch: any device, and what the kernels are checked against.

Arguments are those of the operators: q (B, H, n, d), k, v (B, H, m, d), w (B, H, n, c), z (B, H, m, c), graphs as in
`sampler.Sample`. Rows of a mask run over all pairs, some rows at a time, rows of a list over its edges.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from subquad.core.hashing import dropout_factors, ranks
from subquad.kernels.edges import EdgeList
from subquad.kernels.edges import reference as edges_room
from subquad.kernels.masks import unpack_mask
from subquad.kernels.operators import in_float32

MODES = ("pre", "published", "difference")
REST = 1e-3  # `difference` takes 1 - A_ij no smaller: v_j - out has lost its digits by then
PAIRS = 2**24  # of a mask, at a time
NEEDS_MASK = "ste=difference looks at every pair: its rows must come as a mask"


@in_float32
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    z: Tensor,
    indptr: Tensor,
    indices: Tensor,
    mask: Tensor,
    key_mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
    ste: str,
    causal: bool,
    reach: int,
) -> Tensor:
    parts = []
    if mask.numel():
        found = []
        for rows in _strips(q, k):
            _, weights, _ = _dense_weights(q, k, mask, scale, rows)
            found.append(weights * dense_dropout(q, k, key_mask, seed, dropout, rows) @ v)
        parts.append(torch.cat(found, 2))
    if indices.numel() or not parts:
        # its edges lead to real keys only: the key mask is for the dropout
        edges = EdgeList(indptr, indices, k.shape[2])
        p = edges_room.softmax(edges_room.scores(q, k, indptr, indices, 1, scale), edges)
        if dropout:
            p = p * edges_room.edge_dropout(edges, seed, dropout, key_mask, q.shape[:2], p.dtype)
        parts.append(edges_room.sums(p, v, indptr, indices, 1, q.shape[1], k.shape[2], False))
    return sum(parts[1:], parts[0])


@in_float32
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    z: Tensor,
    indptr: Tensor,
    indices: Tensor,
    mask: Tensor,
    key_mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
    ste: str,
    causal: bool,
    reach: int,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dw, dz. `gated`: the gradient of p is wanted; without it dw and dz are 0."""
    parts = []
    if mask.numel():
        random = (key_mask, seed, scale, dropout)
        parts.append(_mask_backward(grad, q, k, v, w, z, mask, *random, ste, causal, reach, gated))
    if indices.numel() or not parts:
        parts.append(
            _list_backward(grad, q, k, v, w, z, indptr, indices, key_mask, seed, scale, dropout, ste, reach, gated)
        )
    return tuple(sum(grads[1:], grads[0]) for grads in zip(*parts, strict=True))


def _mask_backward(
    grad, q, k, v, w, z, mask, key_mask, seed, scale, dropout, ste, causal, reach, gated
) -> tuple[Tensor, ...]:
    own, (dk, dv, dz) = [], (torch.zeros_like(x) for x in (k, v, z))
    for rows in _strips(q, k):
        drop = dense_dropout(q, k, key_mask, seed, dropout, rows)
        s, a, seen = _dense_weights(q, k, mask, scale, rows)  # (B, H, rows, m)
        dout, x = grad[:, :, rows], q[:, :, rows]
        dp = dout @ v.mT * drop
        mean = (a * dp).sum(-1, keepdim=True)
        ds = a * (dp - mean)
        if ste == "difference":
            c, alone = worth(s, seen)
            g = c * (dp - mean.masked_fill(alone, 0))
        else:
            g = ds * s if ste == "pre" else ds.clamp(-1, 1)
        g = settled_to_zero(g, causal and ste == "difference", reach, rows.start) * gated
        own.append((ds @ k * scale, g @ z))
        dk, dv, dz = dk + ds.mT @ x * scale, dv + (a * drop).mT @ dout, dz + g.mT @ w[:, :, rows]
    dq, dw = (torch.cat(strips, 2) for strips in zip(*own, strict=True))
    return dq, dk, dv, dw, dz


def _strips(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Some rows of all graphs at a time, about PAIRS pairs."""
    step = max(1, PAIRS // (q.shape[0] * q.shape[1] * k.shape[2]))
    return (slice(first, min(q.shape[2], first + step)) for first in range(0, q.shape[2], step))


def _list_backward(
    grad, q, k, v, w, z, indptr, indices, key_mask, seed, scale, dropout, ste, reach, gated
) -> tuple[Tensor, ...]:
    if gated and ste == "difference":
        raise NotImplementedError(NEEDS_MASK)
    edges, heads, m = EdgeList(indptr, indices, k.shape[2]), q.shape[1], k.shape[2]
    p, ds, s = edges_room.row_gradients(grad, q, k, v, edges, key_mask, seed, scale, dropout)
    free = (edges.rows % edges.num_queries - indices).abs() > reach  # (E,): not pinned
    credit = (ds * s if ste == "pre" else ds.clamp(-1, 1)) * (free & gated)

    def sums(weights: Tensor, x: Tensor, transposed: bool) -> Tensor:
        return edges_room.sums(weights, x, indptr, indices, 1, heads, m, transposed)

    pairs = ((ds * scale, k, q), (credit, z, w))
    (dq, dk), (dw, dz) = ((sums(number, keys, False), sums(number, queries, True)) for number, keys, queries in pairs)
    return dq, dk, sums(p, grad, True), dw, dz


def _dense_weights(q: Tensor, k: Tensor, mask: Tensor, scale: float, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Of some rows the scores, the softmax over the edges of a packed mask, 0 in rows without edges, and the edges."""
    s = q[:, :, rows] @ k.mT * scale
    seen = unpack_mask(mask.view(*q.shape[:3], -1)[:, :, rows].contiguous(), s.shape)
    return s, masked_softmax(s, seen), seen


def masked_softmax(s: Tensor, seen: Tensor) -> Tensor:
    """Softmax of s (…, n, m) over the pairs that are seen, 0 in rows that see nothing."""
    top = s.detach().masked_fill(~seen, -torch.inf).amax(-1, keepdim=True).clamp_min(torch.finfo(s.dtype).min)
    e = (s - top).masked_fill(~seen, -torch.inf).exp()
    return e / e.sum(-1, keepdim=True).clamp_min(torch.finfo(s.dtype).tiny)


def dense_dropout(
    q: Tensor, k: Tensor, key_mask: Tensor | None, seed: Tensor | None, dropout: float, rows: slice
) -> Tensor:
    """0 or 1 / (1 - dropout) for every pair of some rows, (B, H, rows, m); 1 without dropout."""
    if not dropout:
        return q.new_ones(())
    (batch, heads, n, _), m = q.shape, k.shape[2]
    assert seed is not None
    numbers, columns = ranks(key_mask, batch, n, m, q.device)
    instance = torch.arange(batch * heads, device=q.device).view(batch, heads, 1, 1)
    pairs = numbers[:, None, rows, None], columns[:, None, None]
    return dropout_factors(seed, dropout, instance, *pairs, q.dtype)


# ---- the gradient of p ----


def worth(s: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """For every pair how far its edge moves the output along v_j - out (`difference`), and whether it is a row's only
    one.

    Without its only edge a row gives 0, and in a row without edges any would be all it has: there it moves along v_j.
    """
    edge = s.masked_fill(~seen, -torch.inf)
    top = edge.amax(-1, keepdim=True)
    alone = seen & (seen.sum(-1, keepdim=True) == 1)
    r = torch.where(top == -torch.inf, torch.inf, (s - edge.logsumexp(-1, keepdim=True)).exp())
    c = torch.where(seen, r / (1 - r).clamp_min(REST), torch.where(r.isinf(), 1, r / (1 + r)))
    return torch.where(alone, 1, c), alone


def credited(weights: Tensor, s: Tensor, seen: Tensor, p: Tensor) -> Tensor:
    """`difference` for plain autograd: the weights by value, and a gradient for p on every pair."""
    with torch.no_grad():
        c, alone = worth(s, seen)
    x = c * (p - p.detach())
    return weights + x - weights.detach() * x.masked_fill(alone, 0).sum(-1, keepdim=True)


class _Clipped(torch.autograd.Function):
    """x, whose gradient is clipped to ±1."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1, 1)


def gated_weights(s: Tensor, seen: Tensor, p: Tensor, ste: str) -> Tensor:
    """The weights over the pairs that are seen, (…, n, m), for plain autograd: the gradient of p is that of `ste`.

    1 + (p - p.detach()) is the mask on its edges, and hands its gradient to p.
    """
    if ste == "difference":
        return credited(masked_softmax(s, seen), s, seen, p)
    if ste == "pre":
        return masked_softmax(s * (1 + (p - p.detach())), seen)
    weights = masked_softmax(s, seen) * (1 + (_Clipped.apply(p) - p.detach()))
    return weights / weights.sum(-1, keepdim=True).masked_fill(~seen.any(-1, keepdim=True), 1)


def settled_to_zero(x: Tensor, causal: bool, reach: int, first: int = 0) -> Tensor:
    """x (…, rows, keys) with 0 where p has no say: pinned edges, and in causal later keys. `first` is the first row."""
    if reach < 0 and not causal:
        return x
    i, j = (torch.arange(size, device=x.device) for size in x.shape[-2:])
    distance = j - (i[:, None] + first)  # (rows, keys)
    settled = distance.abs() <= reach
    return x.masked_fill(settled | (distance > 0) if causal else settled, 0)
