"""Attention in clusters by products of small matrices, on any device.

Masks and scores live for one batch of tiles of at most `layout.BATCH` scores; the backward makes them anew from the
logsumexp. Tokens are numbered through all sequences; behind the last one stands nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from subquad.core.hashing import dropout_seed, ranks, streams
from subquad.kernels import devices
from subquad.kernels.clusters.layout import Layout, StaticLayout, Tiles
from subquad.kernels.dropout import dropout_blocks


def flattened(x: Tensor) -> Tensor:
    """(G, n, d) → (G·n, d), with a row of 0 behind it for nobody where the last token would not do.

    What nobody has is multiplied by 0: any finite number does, and saves a copy. A GPU is not asked, only to be waited
    for.
    """
    flat = x.flatten(0, 1)
    finite = devices.is_host(flat) and bool(flat[-1].isfinite().all())
    return flat if finite else torch.cat((flat, flat.new_zeros(1, x.shape[2])))


def take(x: Tensor, where: Tensor) -> Tensor:
    """x (N or N + 1, …) at `where` (S, R): (S, R, …)."""
    return x.index_select(0, where.flatten().clamp(max=len(x) - 1)).unflatten(0, where.shape)


def add(total: Tensor, where: Tensor, change: Tensor) -> None:
    """total (N + 1, d) += change (S, R, d)."""
    total.index_add_(0, where.flatten(), change.flatten(0, 1))


def softmax(tiles: Tiles, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax over the keys of the tile (S, R, M) and its logsumexp (S, R, 1), -inf where none is seen.

    The largest weight is 1 / Σ exp(s - top), hence the logsumexp. A row that sees nothing has weights that count for
    nothing: they are merged with the logsumexp.
    """
    hidden = tiles.hidden.to(q.dtype).mul_(torch.finfo(q.dtype).min).mul_(2)  # 0 or -inf, faster than masked_fill_
    s = torch.baddbmm(hidden, q, k.mT, alpha=scale)
    if tiles.selves is not None:
        s.scatter_(-1, tiles.selves[..., None], -torch.inf)
    top = s.amax(-1, keepdim=True)
    empty = top == -torch.inf
    s[..., :1].masked_fill_(empty, 0)
    p = s.softmax(-1)
    return p, (top - p.amax(-1, keepdim=True).log_()).masked_fill_(empty, -torch.inf)


def absorb(out: Tensor, lse: Tensor, rows: Tensor, new: Tensor, here: Tensor) -> None:
    """Merge what some rows found in a tile, new (S, R, d) with logsumexp here (S, R, 1), into out and lse."""
    before = take(lse, rows)[..., None]
    after = torch.logaddexp(before, here)
    base = after.masked_fill(after == -torch.inf, 0)
    merged = new.mul_((here - base).exp_()).addcmul_(take(out, rows), (before - base).exp_())
    out.index_copy_(0, rows.flatten(), merged.flatten(0, 1))
    lse.index_copy_(0, rows.flatten(), after.flatten())


def attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    order: Tensor,
    cluster: Tensor,
    real: Tensor,
    seed: Tensor | None,
    clusters: int,
    causal: bool,
    last_query_only: bool,
    scale: float,
    dropout: float,
    chunk: int,
    avoid_self: bool,
) -> tuple[Tensor, Tensor]:
    """out (G, n, d) and its logsumexp (G, n), -inf where a query sees nothing."""
    g, n, d = q.shape
    layouts, dropped = rounds(order, cluster, real, clusters, causal, chunk, avoid_self), _dropout(seed, dropout, real)
    flat, tokens = flattened(q), [[flattened(x) for x in pair] for pair in zip(keys, values, strict=True)]
    out, lse = q.new_zeros(g * n + 1, d), q.new_full((g * n + 1,), -torch.inf)  # the last one is nobody's
    for tiles, source in (pair for layout in layouts for pair in layout.tiles(last_query_only, bool(keys[1:]))):
        k, v = (take(x, tiles.keys) for x in tokens[source])  # (S, M, d)
        p, here = softmax(tiles, take(flat, tiles.rows), k, scale)
        absorb(out, lse, tiles.rows, torch.bmm(dropped(p, tiles, source), v), here)
    out, lse = out[:-1].view(g, n, d), lse[:-1].view(g, n)
    return with_itself(out, lse, q, values[0], real) if avoid_self else out, lse


def attention_backward(
    grad: Tensor,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    out: Tensor,
    lse: Tensor,
    order: Tensor,
    cluster: Tensor,
    real: Tensor,
    seed: Tensor | None,
    clusters: int,
    causal: bool,
    last_query_only: bool,
    scale: float,
    dropout: float,
    chunk: int,
    avoid_self: bool,
) -> list[Tensor]:
    """Gradients of q, of all keys, of all values: with p = exp(s - lse), ds = p·(grad·v - grad·out)."""
    layouts, dropped = rounds(order, cluster, real, clusters, causal, chunk, avoid_self), _dropout(seed, dropout, real)
    delta = torch.cat(((grad * out).sum(-1).flatten(), grad.new_zeros(1)))[:, None]  # (N + 1, 1)
    alone = lse == -torch.inf
    lse = torch.cat((lse.masked_fill(alone, torch.inf).flatten(), lse.new_full((1,), torch.inf)))[:, None]
    found = [x.new_zeros(x.shape[0] * x.shape[1] + 1, x.shape[2]) for x in (q, *keys, *values)]
    dq, *dkv = found
    flat, upstream = flattened(q), flattened(grad)
    tokens = [[flattened(x) for x in pair] for pair in zip(keys, values, strict=True)]
    for tiles, source in (pair for layout in layouts for pair in layout.tiles(last_query_only, bool(keys[1:]))):
        k, v = (take(x, tiles.keys) for x in tokens[source])  # (S, M, d)
        a, g = take(flat, tiles.rows), take(upstream, tiles.rows)  # (S, R, d)
        p, here = softmax(tiles, a, k, scale)
        p.mul_((here - take(lse, tiles.rows)).exp_())
        dp = dropped(torch.bmm(g, v.mT), tiles, source)  # (S, R, M)
        ds = dp.sub_(take(delta, tiles.rows)).mul_(p).mul_(scale)
        p = dropped(p, tiles, source)
        add(dq, tiles.rows, torch.bmm(ds, k))
        add(dkv[source], tiles.keys, torch.bmm(ds.mT, a))
        add(dkv[len(keys) + source], tiles.keys, torch.bmm(p.mT, g))
    if avoid_self:  # who met nobody has its own value
        dkv[len(keys)][:-1] += (grad * (alone & real)[..., None]).flatten(0, 1)
    return [x[:-1].view(like.shape) for x, like in zip(found, (q, *keys, *values), strict=True)]


def with_itself(out: Tensor, lse: Tensor, q: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """out, with its own value for a token that met nobody else."""
    alone = ((lse == -torch.inf) & real)[..., None]
    return torch.where(alone, v.masked_fill(q.sum(-1, keepdim=True).isnan(), torch.nan), out).contiguous()


def layout_of(x: Tensor) -> type[Layout]:
    """Which layout of tiles the device of x is for."""
    return Layout if devices.is_host(x) else StaticLayout


def rounds(order: Tensor, cluster: Tensor, real: Tensor, *about: Any) -> Iterator[Layout]:
    """One layout per round: order (N,) or (R, N), cluster (G, n) or (R, G, n)."""
    kind = layout_of(order)
    for own in zip(order.view(-1, real.numel()), cluster.view(-1, *real.shape), strict=True):
        yield kind(*own, real, *about)


def _dropout(seed: Tensor | None, dropout: float, real: Tensor) -> Callable[[Tensor, Tiles, int], Tensor]:
    """A function that drops weights of a tile, in place. A summary has a number of its own beside its token's."""
    if not dropout or seed is None:
        return lambda p, tiles, source: p
    g, n = real.shape
    numbers, columns = ranks(real, g, n, n, real.device)  # (G, n)
    instance = torch.arange(g, device=real.device)[:, None]
    rows = _behind(streams(dropout_seed(seed.to(real.device, non_blocking=True)), instance, numbers))
    columns = _behind(columns)

    def dropped(p: Tensor, tiles: Tiles, source: int) -> Tensor:
        numbers = ~columns[tiles.keys] if source else columns[tiles.keys]
        gone = dropout_blocks(rows[tiles.rows], numbers, dropout)
        return p.masked_fill_(gone, 0).mul_(1 / (1 - dropout))

    return dropped


def _behind(x: Tensor) -> Tensor:
    """(G, n) → (G·n + 1,)."""
    return torch.cat((x.flatten(), x.new_zeros(1)))
