"""Attention to runs in plain torch, on any device: a tile after the other, in batches of equal size.

No value of the tables is read on the host: tiles and runs have the sizes that the caller knows, and `nobody` for the
rest, a row behind the last.
"""

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
    sizes: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    (g, n), (k, v) = q.shape[:2], _joined(keys, values)
    out, lse = v.new_zeros(g, n + 1, v.shape[2]), q.new_full((g, n + 1), -torch.inf)
    for rows, columns, seen in _batches(q, keys, tiles, spans, sources, sizes):
        scores = _scores(q, k, bias, rows, columns, seen, scale)  # (G, S, R, M)
        here = scores.logsumexp(-1)
        weights = (scores - here.masked_fill(here == -torch.inf, 0)[..., None]).exp()
        out.index_copy_(1, rows.flatten(), (weights @ v[:, columns]).flatten(1, 2))
        lse.index_copy_(1, rows.flatten(), here.flatten(1))
    return out[:, :-1], lse[:, :-1]


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
    sizes: list[int],
    scale: float,
) -> list[Tensor]:
    k, v = _joined(keys, values)
    dq, dk, dv = (x.new_zeros(x.shape[0], x.shape[1] + 1, x.shape[2]) for x in (q, k, v))  # nobody's row is the last
    for rows, columns, seen in _batches(q, keys, tiles, spans, sources, sizes):
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
    q: Tensor, keys: list[Tensor], tiles: Tensor, spans: Tensor, sources: list[int], sizes: list[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of S tiles at a time: the queries (S, R), n = nobody, the keys (S, M) of all sources, who sees whom (S, R, M)."""
    begins = [sum(k.shape[1] for k in keys[:source]) for source in sources]
    most, lengths = sizes[0], sizes[1:]
    step = max(1, BATCH // max(1, len(q) * most * sum(lengths)))
    i = torch.arange(most, device=q.device)
    for t in range(0, len(tiles), step):
        (first, count), columns, seen = tiles[t : t + step].unbind(-1), [], []
        rows = torch.where(i < count[:, None], first[:, None] + i, q.shape[1])  # (S, R)
        for run, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
            start, many, last, own = (x[:, None] for x in spans[t : t + step, run].unbind(-1))  # (S, 1)
            j = torch.arange(length, device=q.device)
            there = j < many  # (S, L)
            columns.append(torch.where(there, start + begin + j, 0))
            reach, self_ = ((i + x)[..., None] for x in (last, own))  # (S, R, 1)
            seen.append(there[:, None] & (j <= reach) & (j != self_))  # (S, R, L)
        yield rows, torch.cat(columns, 1), torch.cat(seen, 2)
