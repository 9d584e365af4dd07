"""The chosen blocks in plain torch, on any device: the keys of every query are gathered, some queries at a time.

No value is read on the host, so that a GPU is never waited for. Everything is (G, n, d), G = B·H.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BATCH = 1 << 24  # numbers that are gathered at a time


def forward(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, real: Tensor | None, block: int, scale: float, out, lse
) -> None:
    """Merges what the chosen blocks (G, n, t) give into out (G, n, d) and lse (G, n). real: bool (G, n), or None."""
    for rows, where, seen in _batches(k, chosen, real, block):
        scores = _scores(q[:, rows], _gathered(k, where), seen, scale)  # (G, r, M)
        before = lse[:, rows]
        total = torch.logaddexp(before, scores.logsumexp(-1))  # (G, r)
        base = total.masked_fill(total == -torch.inf, 0)[..., None]
        new = (scores - base).exp()[:, :, None] @ _gathered(v, where)  # (G, r, 1, d)
        out[:, rows] = out[:, rows] * (before[..., None] - base).exp() + new[:, :, 0]
        lse[:, rows] = total


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, chosen: Tensor, real: Tensor | None,
    block: int, scale: float, changes: list[Tensor],
) -> None:  # fmt: skip
    """Adds to `changes`, the gradients of q, k and v: with p = exp(s - lse), ds = p·(grad·v - grad·out)."""
    delta = (grad * out).sum(-1)[..., None]  # (G, n, 1)
    base = lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]  # who sees nothing gives nothing
    dq, dk, dv = changes
    for rows, where, seen in _batches(k, chosen, real, block):
        keys, values = _gathered(k, where), _gathered(v, where)  # (G, r, M, d)
        p = (_scores(q[:, rows], keys, seen, scale) - base[:, rows]).exp()  # (G, r, M)
        g = grad[:, rows, :, None]  # (G, r, d, 1)
        ds = p * ((values @ g)[..., 0] - delta[:, rows]) * scale
        dq[:, rows] += (ds[:, :, None] @ keys)[:, :, 0]
        for total, weights, x in ((dk, ds, q), (dv, p, grad)):
            change = weights[..., None] * x[:, rows, None]  # (G, r, M, d)
            total.view(-1, total.shape[2]).index_add_(0, where.flatten(), change.flatten(0, 2))


def _batches(k: Tensor, chosen: Tensor, real: Tensor | None, block: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some queries, the numbers of their keys among all G·n, and which of them are seen: (G, r, M), M = t·block."""
    (g, n, d), t = k.shape, chosen.shape[2]
    step = max(1, BATCH // max(1, g * t * block * d))
    within, first = torch.arange(block, device=k.device), torch.arange(g, device=k.device)[:, None, None] * n
    for start in range(0, n if t else 0, step):
        rows = slice(start, start + step)
        mine = chosen[:, rows, :, None]  # (G, r, t, 1)
        key = mine * block + within  # (G, r, t, block)
        seen = ((mine >= 0) & (key < n)).flatten(2)
        where = key.clamp(0, n - 1).flatten(2) + first
        yield rows, where, seen if real is None else seen & real.flatten()[where]


def _gathered(x: Tensor, where: Tensor) -> Tensor:
    return x.flatten(0, 1).index_select(0, where.flatten()).unflatten(0, where.shape)


def _scores(q: Tensor, keys: Tensor, seen: Tensor, scale: float) -> Tensor:
    """(G, r, M), -inf where a key is not seen."""
    return ((keys @ q[..., None])[..., 0] * scale).masked_fill(~seen, -torch.inf)
