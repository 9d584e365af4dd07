"""Attention to runs in plain torch, on any device: a tile after the other, in batches of equal size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BATCH = 1 << 22  # scores at a time


def forward(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    bias: Tensor | None,
    tiles: Tensor,
    spans: Tensor,
    sources: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    (k, v), out, lse = _joined(keys, values), q.new_zeros(q.shape), q.new_full(q.shape[:2], -torch.inf)
    for rows, columns, seen in _batches(q, keys, tiles, spans, sources):
        scores = _scores(q, k, bias, rows, columns, seen, scale)  # (G, S, R, M)
        here = scores.logsumexp(-1)
        weights = (scores - here.masked_fill(here == -torch.inf, 0)[..., None]).exp()
        inside = rows < q.shape[1]
        out[:, rows[inside]] = (weights @ v[:, columns])[:, inside]
        lse[:, rows[inside]] = here[:, inside]
    return out, lse


def backward(
    grad: Tensor,
    delta: Tensor,
    lse: Tensor,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    bias: Tensor | None,
    tiles: Tensor,
    spans: Tensor,
    sources: list[int],
    scale: float,
) -> list[Tensor]:
    k, v = _joined(keys, values)
    dq, dk, dv = (x.new_zeros(x.shape[0], x.shape[1] + 1, x.shape[2]) for x in (q, k, v))  # nobody's row is the last
    for rows, columns, seen in _batches(q, keys, tiles, spans, sources):
        scores = _scores(q, k, bias, rows, columns, seen, scale)
        here = rows.clamp(max=q.shape[1] - 1)
        weights = (scores - lse[:, here][..., None]).exp()  # (G, S, R, M)
        weights = weights * (rows < q.shape[1])[..., None]
        g, x = grad[:, here], q[:, here]  # (G, S, R, d)
        ds = weights * (g @ v[:, columns].mT - delta[:, here][..., None]) * scale
        changes = ((dq, rows, ds @ k[:, columns]), (dk, columns, ds.mT @ x), (dv, columns, weights.mT @ g))
        for total, where, change in changes:
            total.index_add_(1, where.flatten(), change.flatten(1, 2))
    counts = [x.shape[1] for x in keys]
    return [dq[:, :-1], *dk[:, :-1].split(counts, 1), *dv[:, :-1].split(counts, 1)]


def _joined(keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """All sources one after the other, (G, m of all, d)."""
    return torch.cat(keys, 1), torch.cat(values, 1)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor, seen: Tensor, scale: float):
    """(G, S, R, M), -inf where a key is not seen."""
    scores = q[:, rows.clamp(max=q.shape[1] - 1)] @ k[:, columns].mT * scale
    if bias is not None:
        scores = scores + bias[:, columns][:, :, None]
    return scores.masked_fill(~seen, -torch.inf)


def _batches(
    q: Tensor, keys: list[Tensor], tiles: Tensor, spans: Tensor, sources: list[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of S tiles at a time: the queries (S, R), n = nobody, the keys (S, M) of all sources, who sees whom (S, R, M)."""
    begins = torch.tensor([0, *(k.shape[1] for k in keys)], device=q.device).cumsum(0)[list(sources)]  # (P,)
    most, length = int(tiles[:, 1].max()), int(spans[..., 1].max())
    step = max(1, BATCH // max(1, len(q) * most * length * len(sources)))
    i, j = torch.arange(most, device=q.device), torch.arange(length, device=q.device)
    for t in range(0, len(tiles), step):
        (first, count), (start, many, last, own) = tiles[t : t + step].unbind(-1), spans[t : t + step].unbind(-1)
        rows = torch.where(i < count[:, None], first[:, None] + i, q.shape[1])  # (S, R)
        there = j < many[..., None]  # (S, P, L)
        columns = torch.where(there, (start + begins)[..., None] + j, 0)
        reach, self_ = ((i[:, None] + x[:, None])[..., None] for x in (last, own))  # (S, R, P, 1)
        seen = there[:, None] & (j <= reach) & (j != self_)  # (S, R, P, L)
        yield rows, columns.flatten(1), seen.flatten(2)
