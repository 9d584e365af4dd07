"""Clusters of tokens: running pools, and attention to the own cluster and to summaries of the others.

Sorted by cluster (stably, so in the order of time inside each) the own clusters are diagonal blocks of any length.
They are cut into *tiles* of ROWS queries; the tiles that need equally many keys run as one batch. Summaries stand at
tokens: a stretch of TIME queries sees those that were the latest of their clusters when it began, and those that
stand inside it. Masks and scores live for one batch of tiles of at most BATCH scores; the backward makes them anew
from the logsumexp. Everything is a product of small matrices, on any device.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

ROWS = 32  # queries of a tile of the own cluster: small ones waste less of a cluster's end, large ones run faster
TIME = 64  # queries of a stretch: short ones copy the table of summaries more often, long ones mask more
BATCH = 1 << 18  # scores at a time: they stay in the cache

_kernel = numba.njit(parallel=True, cache=True, error_model="numpy")


@_kernel
def _prefix(x, cluster, real, clusters, is_max, out):
    """out[i] = pool of the real tokens ≤ i of i's cluster; 0 when there is none."""
    graphs, n, d = x.shape
    for g in numba.prange(graphs):
        state, count = np.zeros((clusters, d), x.dtype), np.zeros(clusters, np.int64)
        for i in range(n):
            c = cluster[g, i]
            if real[g, i]:
                count[c] += 1
                for f in range(d):
                    if is_max:
                        state[c, f] = x[g, i, f] if count[c] == 1 else max(state[c, f], x[g, i, f])
                    else:
                        state[c, f] += x[g, i, f]
            share = x.dtype.type(1 if is_max else max(1, count[c]))
            for f in range(d):
                out[g, i, f] = state[c, f] / share


@_kernel
def _prefix_backward(grad, x, out, cluster, real, clusters, is_max, dx):
    """Backwards, with what later tokens of a cluster owe to earlier ones; a maximum pays the one that set it."""
    graphs, n, d = x.shape
    for g in numba.prange(graphs):
        owed, count = np.zeros((clusters, d), x.dtype), np.zeros(clusters, np.int64)
        for i in range(n):
            count[cluster[g, i]] += real[g, i]
        for i in range(n - 1, -1, -1):
            c = cluster[g, i]
            share = x.dtype.type(1 if is_max else max(1, count[c]))
            for f in range(d):
                owed[c, f] += grad[g, i, f] / share
                pays = real[g, i] and (not is_max or x[g, i, f] == out[g, i, f])
                dx[g, i, f] = owed[c, f] if pays else 0
                if pays and is_max:
                    owed[c, f] = 0
            count[c] -= real[g, i]


@torch.library.custom_op("subquad::cluster_prefix", mutates_args=())
def cluster_prefix(x: Tensor, cluster: Tensor, real: Tensor, clusters: int, is_max: bool) -> Tensor:
    """The running pool, maximum or mean, of each token's cluster.

    x (G, n, d), cluster int64 (G, n), real bool (G, n) → (G, n, d).
    """
    values, groups, flags = (t.cpu().contiguous().numpy() for t in (x, cluster, real))  # elsewhere: there and back
    out = torch.empty(x.shape, dtype=x.dtype)
    _prefix(values, groups, flags, clusters, is_max, out.numpy())
    return out.to(x.device)


@cluster_prefix.register_fake
def _(x, cluster, real, clusters, is_max):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("subquad::cluster_prefix_backward", mutates_args=())
def cluster_prefix_backward(
    grad: Tensor, x: Tensor, out: Tensor, cluster: Tensor, real: Tensor, clusters: int, is_max: bool
) -> Tensor:
    given, values, pools, groups, flags = (t.cpu().contiguous().numpy() for t in (grad, x, out, cluster, real))
    dx = torch.empty(x.shape, dtype=x.dtype)
    _prefix_backward(given, values, pools, groups, flags, clusters, is_max, dx.numpy())
    return dx.to(x.device)


@cluster_prefix_backward.register_fake
def _(grad, x, out, cluster, real, clusters, is_max):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx, inputs, output):
    x, cluster, real, ctx.clusters, ctx.is_max = inputs
    ctx.save_for_backward(x, output, cluster, real)


def _backward(ctx, grad):
    return cluster_prefix_backward(grad, *ctx.saved_tensors, ctx.clusters, ctx.is_max), None, None, None, None


cluster_prefix.register_autograd(_backward, setup_context=_save)


# ---- tiles --------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """S blocks of R queries × M keys. Tokens have numbers 0 … N-1, N = G·n; N is nobody."""

    rows: Tensor  # (S, R)
    keys: Tensor  # (S, M)
    hidden: Tensor  # bool (S, R or 1, M)


class Layout:
    """Who attends to whom, from the clusters of all tokens of G sequences."""

    def __init__(self, order: Tensor, cluster: Tensor, real: Tensor, clusters: int, causal: bool) -> None:
        (g, self.n), self.clusters, self.causal = cluster.shape, clusters, causal
        self.order, self.total = order, cluster.numel()
        label = (cluster + torch.arange(g, device=order.device)[:, None] * clusters).flatten()  # (N,)
        self.tag = torch.cat((label, label.new_full((1,), -1)))  # (N + 1,): the cluster, numbered over all sequences
        self.sizes = torch.bincount(label, minlength=g * clusters)  # (G·C,)
        self.starts = self.sizes.cumsum(0) - self.sizes
        self.real = torch.cat((real.flatten(), real.new_zeros(1)))  # (N + 1,)
        self._stand(order[self.real[order]])

    def _stand(self, members: Tensor) -> None:
        """Where the summaries stand. members: the tokens that count, by cluster.

        The summary at token p stands for its cluster before time end[p] (causal: from p on), at padding never.
        """
        following = torch.cat((members, members.new_full((1,), self.total)))[1:]
        again = self.tag[following] == self.tag[members]
        last = members[~again]
        self.last = torch.full_like(self.sizes, self.total)  # (G·C,)
        self.last[self.tag[last]] = last
        self.end = torch.zeros_like(self.tag)  # (N + 1,)
        self.end[last] = self.n
        if self.causal:
            self.end[members[again]] = following[again] % self.n

    def own(self, last_asks: bool) -> Iterator[Tiles]:
        """Every token to its cluster, causal up to itself; `last_asks`: only the last of each cluster, to all of it."""
        blocks = -(-self.sizes // ROWS)  # (G·C,)
        counts = blocks.clamp(max=1) if last_asks else blocks
        owner = torch.arange(len(blocks), device=blocks.device).repeat_interleave(counts)  # (tiles,)
        number = torch.arange(len(owner), device=blocks.device) - (counts.cumsum(0) - counts)[owner]
        upward = self.causal and not last_asks
        width, by_width = (number + 1 if upward else blocks[owner]).sort(stable=True)
        place = torch.arange(ROWS, device=blocks.device)
        widths, repeats = (x.tolist() for x in width.unique_consecutive(return_counts=True))
        for w, same in zip(widths, by_width.split(repeats), strict=True):
            reach = torch.arange(w * ROWS, device=blocks.device)
            above = reach > place[:, None] + (w - 1) * ROWS  # (R, M)
            for tiles in same.split(max(1, BATCH // (ROWS * ROWS * w))):
                who = owner[tiles]
                rows = (
                    self.last[who][:, None] if last_asks else self._tokens(who, number[tiles][:, None] * ROWS + place)
                )
                keys = self._tokens(who, reach)
                hidden = ~self.real[keys][:, None]  # (S, 1, M)
                yield Tiles(rows, keys, hidden | above if upward else hidden)

    def _tokens(self, owner: Tensor, rank: Tensor) -> Tensor:
        """The tokens with these ranks (S or 1, …) in the clusters `owner` (S,), N where there is none."""
        found = self.order[(self.starts[owner][:, None] + rank).clamp_(max=self.total - 1)]
        return torch.where(rank < self.sizes[owner][:, None], found, self.total)

    def others(self) -> Iterator[Tiles]:
        """Every token to the summaries that stand for the other clusters at its time."""
        table = self._table().flatten(0, 1)  # (G·stretches, C)
        stretches = -(-self.n // TIME)
        step = max(1, BATCH // (TIME * (self.clusters + TIME * self.causal)))
        within = torch.arange(TIME, device=table.device)
        for first in range(0, len(table), step):
            stretch = torch.arange(first, min(first + step, len(table)), device=table.device)[:, None]  # (S, 1)
            time = stretch % stretches * TIME + within  # (S, R)
            rows = torch.where(time < self.n, stretch // stretches * self.n + time, self.total)
            keys = table[first : first + step]
            keys = torch.cat((keys, rows), 1) if self.causal else keys  # (S, M)
            hidden = (self.end[keys][:, None] <= time[..., None]) | (
                self.tag[keys][:, None] == self.tag[rows][..., None]
            )
            if self.causal:
                hidden[:, :, self.clusters :] |= within > within[:, None]  # what stands later
            yield Tiles(rows, keys, hidden)

    def _table(self) -> Tensor:
        """The summaries that stand when a stretch begins, (G, stretches, C) numbers of tokens."""
        stretches, g = -(-self.n // TIME), self.total // self.n
        if not self.causal:
            return self.last.view(g, 1, self.clusters).expand(g, stretches, self.clusters)
        token = torch.arange(self.total, device=self.tag.device)[self.real[:-1]]
        stretch = token // self.n * stretches + token % self.n // TIME
        latest = self.tag.new_full((g * stretches * self.clusters,), -1)
        latest.scatter_reduce_(0, stretch * self.clusters + self.tag[token] % self.clusters, token, "amax")
        before = latest.view(g, stretches, self.clusters).cummax(1).values
        before = torch.cat((before.new_full((g, 1, self.clusters), -1), before[:, :-1]), 1)
        return torch.where(before < 0, self.total, before)


# ---- attention ----------------------------------------------------------------------------------------------

BELOW = -1e30  # added to a hidden score: exp gives 0


def _tiles(layout: Layout, last_asks: bool, summaries: list[Tensor]) -> Iterator[tuple[Tiles, int]]:
    """All tiles, and which keys they are about: 0 the tokens, 1 the summaries."""
    yield from ((tiles, 0) for tiles in layout.own(last_asks))
    if summaries:
        yield from ((tiles, 1) for tiles in layout.others())


def _gates(dropout: float, seed: Tensor):
    """shape → what dropout multiplies the weights with, or None; the same sequence for the same seed."""
    draw = torch.Generator(seed.device).manual_seed(int(seed)) if dropout else None

    def gate(like: Tensor) -> Tensor | None:
        if draw is None:
            return None
        kept = torch.rand(like.shape, generator=draw, device=like.device) >= dropout
        return kept.to(like.dtype).div_(1 - dropout)

    return gate


def _take(x: Tensor, where: Tensor) -> Tensor:
    """x (N, …) at `where` (S, R): (S, R, …); of nobody something, which no one sees."""
    return x.index_select(0, where.flatten().clamp(max=len(x) - 1)).unflatten(0, where.shape)


def _softmax(tiles: Tiles, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax over the keys of the tile (S, R, M) and its logsumexp (S, R, 1), -inf where none is seen.

    The largest weight is 1 / Σ exp(s - top), hence the logsumexp.
    """
    hidden = tiles.hidden.to(q.dtype).mul_(BELOW)
    s = torch.baddbmm(hidden, q, k.mT, alpha=scale)
    top, p = s.amax(-1, keepdim=True), s.softmax(-1)
    lse = top - p.amax(-1, keepdim=True).log_()
    return p, lse.masked_fill_(top < BELOW / 2, -torch.inf)


@torch.library.custom_op("subquad::cluster_attention", mutates_args=())
def cluster_attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    order: Tensor,
    cluster: Tensor,
    real: Tensor,
    seed: Tensor,
    clusters: int,
    causal: bool,
    last_asks: bool,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """One softmax over the own cluster's tokens and, if given, the summaries of the others: out (G, n, d), lse (G, n).

    q (G, n, d); keys, values: those of the tokens and, where wanted, those of the summaries that stand at the tokens,
    (G, n, d) each; order (G·n,) sorts all tokens by sequence, cluster and time; cluster int64, real bool (G, n).
    `last_asks`: a query only at the last token of each cluster, which sees all of it. Who sees nothing gets 0.
    """
    g, n, d = q.shape
    layout, gate = Layout(order, cluster, real, clusters, causal), _gates(dropout, seed)
    flat, tokens = q.flatten(0, 1), [[x.flatten(0, 1) for x in pair] for pair in zip(keys, values, strict=True)]
    out, lse = q.new_zeros(g * n + 1, d), q.new_full((g * n + 1,), -torch.inf)  # the last one is nobody's
    for tiles, source in _tiles(layout, last_asks, keys[1:]):
        k, v = (_take(x, tiles.keys) for x in tokens[source])  # (S, M, d)
        p, here = _softmax(tiles, _take(flat, tiles.rows), k, scale)
        drop = gate(p)
        _absorb(out, lse, tiles.rows, torch.bmm(p if drop is None else p.mul_(drop), v), here)
    return out[:-1].view(g, n, d), lse[:-1].view(g, n)


def _absorb(out: Tensor, lse: Tensor, rows: Tensor, new: Tensor, here: Tensor) -> None:
    """Merge what some rows found in a tile, new (S, R, d) with logsumexp here (S, R, 1), into out and lse."""
    before = _take(lse, rows)[..., None]
    after = torch.logaddexp(before, here)
    base = after.masked_fill(after == -torch.inf, 0)
    merged = new.mul_((here - base).exp_()).addcmul_(_take(out, rows), (before - base).exp_())
    out.index_copy_(0, rows.flatten(), merged.flatten(0, 1))
    lse.index_copy_(0, rows.flatten(), after.flatten())


@cluster_attention.register_fake
def _(q, keys, values, order, cluster, real, seed, clusters, causal, last_asks, scale, dropout):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(q.shape[:2])


@torch.library.custom_op("subquad::cluster_attention_backward", mutates_args=())
def cluster_attention_backward(
    grad: Tensor,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    out: Tensor,
    lse: Tensor,
    order: Tensor,
    cluster: Tensor,
    real: Tensor,
    seed: Tensor,
    clusters: int,
    causal: bool,
    last_asks: bool,
    scale: float,
    dropout: float,
) -> list[Tensor]:
    """Gradients of q, of all keys, of all values: with p = exp(s - lse), ds = p·(grad·v - grad·out)."""
    layout, gate = Layout(order, cluster, real, clusters, causal), _gates(dropout, seed)
    delta = torch.cat(((grad * out).sum(-1).flatten(), grad.new_zeros(1)))[:, None]  # (N + 1, 1)
    lse = torch.cat((lse.masked_fill(lse == -torch.inf, torch.inf).flatten(), lse.new_full((1,), torch.inf)))[:, None]
    found = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, *keys, *values)]
    dq, *dkv = (x.flatten(0, 1) for x in found)
    flat, grad = q.flatten(0, 1), grad.flatten(0, 1)
    tokens = [[x.flatten(0, 1) for x in pair] for pair in zip(keys, values, strict=True)]
    for tiles, source in _tiles(layout, last_asks, keys[1:]):
        k, v = (_take(x, tiles.keys) for x in tokens[source])  # (S, M, d)
        a, g = _take(flat, tiles.rows), _take(grad, tiles.rows)  # (S, R, d)
        p, here = _softmax(tiles, a, k, scale)
        p.mul_((here - _take(lse, tiles.rows)).exp_())
        dp, drop = torch.bmm(g, v.mT), gate(p)  # (S, R, M)
        ds = (dp if drop is None else dp.mul_(drop)).sub_(_take(delta, tiles.rows)).mul_(p).mul_(scale)
        p = p if drop is None else p.mul_(drop)
        _add(dq, tiles.rows, torch.bmm(ds, k))
        _add(dkv[source], tiles.keys, torch.bmm(ds.mT, a))
        _add(dkv[len(keys) + source], tiles.keys, torch.bmm(p.mT, g))
    return found


def _add(total: Tensor, where: Tensor, change: Tensor) -> None:
    """total (N, d) += change (S, R, d); nobody's is 0."""
    total.index_add_(0, where.flatten().clamp(max=len(total) - 1), change.flatten(0, 1))


@cluster_attention_backward.register_fake
def _(grad, q, keys, values, *args):
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, *keys, *values)]


def _save_attention(ctx, inputs, output):
    q, keys, values, *layout, ctx.clusters, ctx.causal, ctx.last_asks, ctx.scale, ctx.dropout = inputs
    ctx.save_for_backward(q, *output, *layout, *keys, *values)


def _attention_backward(ctx, grad, _):
    q, out, lse, *layout = ctx.saved_tensors[:7]
    rest = ctx.saved_tensors[7:]
    m = len(rest) // 2
    fixed = (ctx.clusters, ctx.causal, ctx.last_asks, ctx.scale, ctx.dropout)
    dq, *dkv = cluster_attention_backward(grad, q, rest[:m], rest[m:], out, lse, *layout, *fixed)
    return dq, dkv[:m], dkv[m:], *[None] * 9


cluster_attention.register_autograd(_attention_backward, setup_context=_save_attention)


@register_flop_formula(torch.ops.subquad.cluster_attention, get_raw=True)
def _flops(q, keys, values, order, cluster, real, seed, clusters, causal, last_asks, *args, **kwargs) -> int:
    layout = Layout(order, cluster, real, clusters, causal)
    pairs = (t.hidden.shape[0] * t.rows.shape[1] * t.keys.shape[1] for t, _ in _tiles(layout, last_asks, keys[1:]))
    return 4 * q.shape[2] * sum(pairs)


@register_flop_formula(torch.ops.subquad.cluster_attention_backward, get_raw=True)
def _backward_flops(grad, q, keys, values, out, lse, *args, **kwargs) -> int:
    return 5 * _flops(q, keys, values, *args) // 2
