"""The merge operators on a CPU, in linear memory: one launch of the tile kernels for all parts of all batch elements.

Half precision and odd widths take torch's flash attention, part by part, on strided views.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.flash import flash, flash_backward
from subquad.kernels.merge import cpu_walk as walk
from subquad.kernels.merge import dropout as dropping
from subquad.kernels.merge.cpu_masks import kept_mask
from subquad.kernels.merge.rows import plans
from subquad.kernels.merge.views import absorb, add_keys, grid_view, keys_of
from subquad.kernels.parallel import ready
from subquad.supports.parts import Part, Plan

SMALL_MASK = 1 << 23  # masks of up to this many entries are made for all heads of all batch elements at once


def forward(q, keys, values, valid, lengths, seed, support, which, n, scale, dropout) -> tuple[Tensor, Tensor]:
    q, keys, values = ready(q), [ready(k) for k in keys], [ready(v) for v in values]
    chosen = list(plans(q, keys, values, lengths, support, which, n))
    if walk.takes(chosen, q):
        return walk.forward(chosen, q, keys, values, valid, scale, seed, dropout)
    out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:3], -torch.inf)  # (B, H, r, d), (B, H, r)
    for rows, plan in chosen:
        for frame in _frames(rows, plan, [q, out, lse[..., None]], keys, values, valid):
            q_, out_, lse_ = frame.queries
            drop = dropping.Settings.of(seed, dropout, scale, frame.instances)
            for part in plan.parts:
                views = _Views(frame, part, plan, q.dtype)
                o, here = drop.attend(q_, views) if drop else _attend(q_, views, scale)
                absorb(grid_view(out_, part.queries), grid_view(lse_, part.queries)[..., 0], o, here, part.fresh)
    return out, lse


def backward(grad, q, keys, values, out, lse, valid, lengths, seed, support, which, n, scale, dropout) -> list[Tensor]:
    grad, q, out, *kv = (ready(x) for x in (grad, q, out, *keys, *values))
    m, chosen = len(keys), list(plans(q, keys, values, lengths, support, which, n))
    if walk.takes(chosen, q):
        return walk.backward(chosen, grad, q, kv[:m], kv[m:], out, lse, valid, scale, seed, dropout)
    dq, *dkv = (x.new_zeros(x.shape) for x in (q, *kv))  # contiguous, as a compiled graph takes them to be
    safe = lse.masked_fill(lse == -torch.inf, 0)[..., None]  # exp(-inf - 0) = 0: empty rows get no gradient
    for rows, plan in chosen:
        sources = (kv[:m], kv[m:], valid, dkv)
        for frame in _frames(rows, plan, [grad, q, out, safe, dq], *sources):
            *given, dq_ = frame.queries
            drop = dropping.Settings.of(seed, dropout, scale, frame.instances)
            for part in plan.parts:
                views = _Views(frame, part, plan, q.dtype)
                g, x, o, total = (grid_view(t, part.queries) for t in given)
                grads = drop.backward(g, x, o, total, views) if drop else _part_backward(g, x, o, total, views, scale)
                grid_view(dq_, part.queries).add_(grads[0])
                for total_, change in zip((part.source, m + part.source), grads[1:], strict=True):
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
