"""The parts of a plan one after the other, each by torch's flash attention on strided views, in linear memory.

For widths that there are no vectors of, and for plans whose places do not go upwards. With dropout the scores of a few
blocks at a time stay in the cache, and one pass of Numba goes over them: a weight is dropped by a hash of (seed,
instance, query, key), so that the backward pass, another batch or another process drops the same ones; see
`core.hashing`. The logsumexp is that of all keys: dropout comes after the softmax.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from threading import Lock
from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.core.hashing import chance, dropout_seed, halves, stream
from subquad.kernels.flash import flash, flash_backward
from subquad.kernels.merge.reference import SOURCE, key_places
from subquad.kernels.merge.views import absorb, add_keys, grid_view, keys_of
from subquad.kernels.parallel import exp, kernel, run
from subquad.supports.parts import Part, Plan

SMALL_MASK = 1 << 23  # masks of up to this many entries are made for all heads of all batch elements at once
BLOCK = 1 << 19  # scores at a time
KEPT_BYTES = 1 << 26  # of the most recent masks
SLACK = 16  # entries behind the last one, which kernels may read: they go in whole vectors


def forward(chosen, q, keys, values, valid, scale, seed, dropout) -> tuple[Tensor, Tensor]:
    out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:3], -torch.inf)  # (B, H, r, d), (B, H, r)
    for rows, plan in chosen:
        for frame in _frames(rows, plan, [q, out, lse[..., None]], keys, values, valid):
            q_, out_, lse_ = frame.queries
            drop = Settings.of(seed, dropout, scale, frame.instances)
            for part in plan.parts:
                views = _Views(frame, part, plan, q.dtype)
                o, here = drop.attend(q_, views) if drop else _attend(q_, views, scale)
                absorb(grid_view(out_, part.queries), grid_view(lse_, part.queries)[..., 0], o, here, part.fresh)
    return out, lse


def backward(chosen, grad, q, keys, values, out, lse, valid, scale, seed, dropout) -> list[Tensor]:
    dq, *dkv = (x.new_zeros(x.shape) for x in (q, *keys, *values))  # contiguous, as a compiled graph takes them to be
    safe = lse.masked_fill(lse == -torch.inf, 0)[..., None]  # exp(-inf - 0) = 0: empty rows get no gradient
    for rows, plan in chosen:
        sources = (keys, values, valid, dkv)
        for frame in _frames(rows, plan, [grad, q, out, safe, dq], *sources):
            *given, dq_ = frame.queries
            drop = Settings.of(seed, dropout, scale, frame.instances)
            for part in plan.parts:
                views = _Views(frame, part, plan, q.dtype)
                g, x, o, total = (grid_view(t, part.queries) for t in given)
                grads = drop.backward(g, x, o, total, views) if drop else _part_backward(g, x, o, total, views, scale)
                grid_view(dq_, part.queries).add_(grads[0])
                for total_, change in zip((part.source, len(keys) + part.source), grads[1:], strict=True):
                    add_keys(frame.gradients[total_], change, part, plan)
    return [dq, *dkv]


# ---- views --------------------------------------------------------------------------------------------------


class _Frame(NamedTuple):
    """Some instances (b, h) that are worked on together, everything as views (G, r or m, d)."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    valid: dict[int, Tensor]  # (G or 1, m), only of sources that lack a key
    gradients: list[Tensor]  # of all keys and all values
    instances: Tensor  # (G,): b·H + h, what dropout counts by


def _frames(rows: slice, plan: Plan, queries, keys, values, valid, gradients=()) -> Iterator[_Frame]:
    """The batch elements `rows`: all their heads at once, or one element after the other.

    One at a time when batch and heads do not fold into one dimension as a view, and when key masks differ between
    elements: the heads then share a mask. Small masks are rather copied for every head. Of g query heads that share a
    key head, the first of each key head run together, then the second: no key is copied.
    """
    heads = queries[0].shape[1]
    group = heads // min(x.shape[1] for x in (*keys, *values))
    everything = (queries, keys, values, gradients)
    masks = {s: x[rows] if len(x) > 1 else x for s, x in enumerate(valid)}
    masks = {s: x[:, 0] for s, x in masks.items() if not bool(x[..., : plan.reaches.get(s) or None].all())}  # (b, m)
    pairs = max((part.pairs for part in plan.parts), default=0)
    number = torch.arange(rows.start * heads, rows.stop * heads, device="cpu").view(-1, heads)  # (b, H)
    for j in range(group):
        views = [[x[rows, j::group] if x.shape[1] == heads else x[rows] for x in xs] for xs in everything]
        count, size = len(number), heads // group
        folds = all(_folds(x) for xs in views for x in xs)
        if folds and (all(len(x) == 1 for x in masks.values()) or count * size * pairs <= SMALL_MASK):
            flat = [[x.flatten(0, 1) if count > 1 else x[0] for x in xs] for xs in views]
            shared = {s: x if len(x) == 1 else x.repeat_interleave(size, 0) for s, x in masks.items()}
            yield _Frame(flat[0], flat[1], flat[2], shared, flat[3], number[:, j::group].flatten())
            continue
        for b in range(count):
            own = {s: x[b : b + 1] if len(x) > 1 else x for s, x in masks.items()}
            one = [[x[b] for x in xs] for xs in views]
            yield _Frame(one[0], one[1], one[2], own, one[3], number[b, j::group])


def _folds(x: Tensor) -> bool:
    return x.shape[0] == 1 or x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


class _Views:
    """What one part attends to in one frame: its keys, its values, and its mask."""

    def __init__(self, frame: _Frame, part: Part, plan: Plan, dtype: torch.dtype) -> None:
        self.part, self.plan = part, plan
        self.keys = keys_of(frame.keys[part.source], part, plan)  # (G, A, S, d)
        self.values = keys_of(frame.values[part.source], part, plan)
        self.mask, self.empty = _mask(part, frame.valid.get(part.source), plan, dtype)


def _mask(part: Part, valid: Tensor | None, plan: Plan, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """What the flash kernel adds to the scores, and which rows are left with no key at all.

    valid (G or 1, m) → mask (G or 1, A or 1, L or 1, S), empty rows (G or 1, A or 1, L or 1).
    """
    mask = empty = None
    if not part.is_triangle and not part.sees_everything:
        mask, empty = kept_mask(part, dtype)
        mask, empty = mask[None], None if empty is None else empty[None]
    if valid is None:
        return mask, empty
    exists = keys_of(valid[..., None], part, plan)[..., 0]  # (G, A, S)
    bias = exists.new_zeros(exists.shape, dtype=dtype).masked_fill_(~exists, -torch.inf)[:, :, None]  # (G, A, 1, S)
    if part.is_triangle:
        rows = part.queries.length
        bias = bias + bias.new_full((rows, rows), -torch.inf).triu_(1)
    mask = bias if mask is None else mask + bias
    return mask, mask.amax(-1) == -torch.inf


# ---- one part -----------------------------------------------------------------------------------------------


def _attend(q: Tensor, views: _Views, scale: float) -> tuple[Tensor, Tensor]:
    """Output (G, A, L, d) and logsumexp (G, A, L), -inf where a row has no key."""
    part, mask, empty = views.part, views.mask, views.empty
    x = grid_view(q, part.queries)
    if part.is_self:
        out, lse = views.values, (x * views.keys).sum(-1).mul_(scale)  # (G, A, 1)
        if bool(lse.isnan().any()):
            out = out.masked_fill(lse.isnan()[..., None], torch.nan)
    else:
        triangle = mask is None and part.is_triangle
        out, lse = flash(x, views.keys, views.values, 0.0, triangle, attn_mask=mask, scale=scale)
        zero = lse == 0 if empty is None else (lse == 0) & ~empty
        if bool(zero.any()):  # the kernel may report 0 for a query that is not a number
            lost = x.sum(-1).isnan()  # (G, A, L)
            if bool(lost.any()):
                out, lse = out.masked_fill(lost[..., None], torch.nan), lse.masked_fill(lost, torch.nan)
    if empty is not None:  # the flash kernel reports 0 for such a row
        lse = lse.masked_fill(empty, -torch.inf)
        if part.is_self:
            out = out.masked_fill(empty[..., None], 0)
    return out, lse


def _part_backward(g, q, out, lse, views: _Views, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one part's q, k, v, given the merged out and lse (all as views (G, A, L or S, d))."""
    k, v, part, mask, empty = views.keys, views.values, views.part, views.mask, views.empty
    if part.is_self:
        weight = ((q * k).sum(-1, keepdim=True) * scale - lse).exp_()  # (G, A, 1, 1)
        if empty is not None:
            weight = weight.masked_fill(empty[..., None], 0)
        ds = weight * (g * (v - out)).sum(-1, keepdim=True) * scale
        return ds * k, ds * q, weight * g
    triangle = mask is None and part.is_triangle
    return flash_backward(g, q, k, v, out, lse[..., 0], 0.0, triangle, attn_mask=mask, scale=scale)


# ---- dropout ------------------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """The dropout of one frame."""

    seed: int
    dropout: float
    scale: float
    instances: Tensor  # (G,)

    @classmethod
    def of(cls, seed: Tensor | None, dropout: float, scale: float, instances: Tensor) -> Settings | None:
        if not dropout:
            return None
        assert seed is not None
        return cls(int(dropout_seed(seed)) % (1 << 64), dropout, scale, instances)

    def attend(self, q: Tensor, views) -> tuple[Tensor, Tensor]:
        """Output (G, A, L, d), with weights dropped, and logsumexp (G, A, L), of all of them."""
        x = grid_view(q, views.part.queries)  # (G, A, L, d)
        out, lse = x.new_empty(x.shape[:3] + views.values.shape[3:]), x.new_empty(x.shape[:3])
        for a, where in self._chunks(views, x):
            s = x[:, a] @ views.keys[:, a].mT  # (G, a, L, S)
            total = s.new_empty(s.shape[:3])
            run(_forward, s.numpy(), *where, total.numpy(), *self._numbers(s))
            lse[:, a], out[:, a] = total, s @ views.values[:, a]
        return out, lse

    def backward(self, g: Tensor, q: Tensor, out: Tensor, lse: Tensor, views) -> tuple[Tensor, Tensor, Tensor]:
        dq = q.new_empty(q.shape)
        dk, dv = (x.new_empty(x.shape) for x in (views.keys, views.values))
        delta = (g * out).sum(-1)  # (G, A, L)
        for a, where in self._chunks(views, q):
            s, dp = q[:, a] @ views.keys[:, a].mT, g[:, a] @ views.values[:, a].mT  # (G, a, L, S)
            given = (x[:, a].contiguous().numpy() for x in (lse[..., 0], delta))
            run(_backward, s.numpy(), dp.numpy(), *where, *given, *self._numbers(s))
            dq[:, a] = s @ views.keys[:, a]
            dk[:, a], dv[:, a] = s.mT @ q[:, a], dp.mT @ g[:, a]
        return dq, dk, dv

    def _chunks(self, views, q: Tensor):
        """Some blocks at a time: which, and their (mask, instances, query places, key numbers)."""
        part, mask = views.part, views.mask
        if mask is None and part.is_triangle:
            rows = part.queries.length
            mask = q.new_full((rows, rows), -torch.inf).triu_(1)[None, None]
        mask = q.new_zeros(1, 1, 1, 1) if mask is None else mask  # (G or 1, A or 1, L or 1, S)
        mask = mask.expand(*mask.shape[:3], part.keys.length) if mask.shape[3] == 1 else mask
        numbers = key_places(part, views.plan).numpy() if part.numbers is None else part.numbers.places()  # (A, S)
        places, numbers = part.queries.places() + part.origin, numbers + part.source * SOURCE  # (A, L), (A, S)
        step = max(1, BLOCK // (q.shape[0] * part.queries.length * part.keys.length))
        for first in range(0, part.queries.blocks, step):
            a = slice(first, min(first + step, part.queries.blocks))
            bias = mask if mask.shape[1] == 1 else mask[:, a]
            yield a, (bias.contiguous().numpy(), self.instances.numpy(), places[a], numbers[a])

    def _numbers(self, s: Tensor):
        kind = s.numpy().dtype.type
        return np.uint64(self.seed), kind(self.scale), np.float32(self.dropout), kind(1 / (1 - self.dropout))


@kernel
def _forward(s, mask, instances, places, numbers, lse, seed, scale, dropout, up):
    """s: products → weights, dropped and scaled; lse: of the weights before dropout."""
    graphs, blocks, rows, keys = s.shape
    nothing = s.dtype.type(-np.inf)
    for task in numba.prange(graphs * blocks * rows):
        t, a, r = task // (blocks * rows), task // rows % blocks, task % rows
        row = s[t, a, r]
        bias = mask[t % mask.shape[0], a % mask.shape[1], r % mask.shape[2]]
        top, total = nothing, s.dtype.type(0)
        for j in range(keys):
            row[j] = row[j] * scale + bias[j]
        for j in range(keys):
            top = row[j] if row[j] > top or row[j] != row[j] else top  # NaN stays NaN
        if top == nothing:
            row[:] = 0
            lse[t, a, r] = nothing
            continue
        for j in range(keys):
            row[j] = exp(row[j] - top)
        for j in range(keys):
            total += row[j]
        lse[t, a, r] = top + np.log(total)
        share = up / total
        low, high = halves(stream(seed, instances[t], places[a, r]))
        for j in range(keys):
            row[j] = row[j] * share if chance(low, high, numbers[a, j]) >= dropout else s.dtype.type(0)


@kernel
def _backward(s, dp, mask, instances, places, numbers, lse, delta, seed, scale, dropout, up):
    """s: products → ds · scale; dp: dout·v → weights, dropped and scaled. lse and delta are those of the whole row."""
    graphs, blocks, rows, keys = s.shape
    zero = s.dtype.type(0)
    for task in numba.prange(graphs * blocks * rows):
        t, a, r = task // (blocks * rows), task // rows % blocks, task % rows
        row, grad = s[t, a, r], dp[t, a, r]
        bias = mask[t % mask.shape[0], a % mask.shape[1], r % mask.shape[2]]
        base, less = lse[t, a, r], delta[t, a, r]
        low, high = halves(stream(seed, instances[t], places[a, r]))
        for j in range(keys):
            row[j] = min(zero, row[j] * scale + bias[j] - base)  # rounding may lift it above 0
        for j in range(keys):
            row[j] = exp(row[j])
        for j in range(keys):
            kept = up if chance(low, high, numbers[a, j]) >= dropout else zero
            p = row[j]
            row[j] = p * (grad[j] * kept - less) * scale
            grad[j] = p * kept


# ---- masks of parts whose rule is no interval, kept between calls -------------------------------------------


class _MaskCache:
    """Masks of parts, the most recent ones, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes, self.lock = limit, 0, Lock()
        self.kept: OrderedDict[tuple[Part, torch.dtype], tuple[Tensor, Tensor | None]] = OrderedDict()

    def __call__(self, part: Part, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """What the part's rule adds to the scores, (A or 1, L, S), and which rows see nothing, (A or 1, L) or None."""
        with self.lock:
            found = self.kept.get((part, dtype))
            if found is not None:
                self.kept.move_to_end((part, dtype))
                return found
        found = self._make(part, dtype)
        size = found[0].numel() * found[0].element_size()
        with self.lock:
            if size <= self.limit // 8 and (part, dtype) not in self.kept:
                self.kept[part, dtype] = found
                self.bytes += size
            while self.bytes > self.limit:
                _, (mask, _) = self.kept.popitem(last=False)
                self.bytes -= mask.numel() * mask.element_size()
        return found

    @staticmethod
    def _make(part: Part, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        allowed = torch.from_numpy(part.allowed())  # (A or 1, L, S)
        empty = ~allowed.any(-1)  # (A or 1, L)
        room = allowed.new_zeros(allowed.numel() + SLACK, dtype=dtype)
        additive = room[: allowed.numel()].view(allowed.shape).masked_fill_(~allowed, -torch.inf)
        return additive, (empty if bool(empty.any()) else None)


kept_mask = _MaskCache(KEPT_BYTES)
