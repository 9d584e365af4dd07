"""New queries and the keys that are kept: one softmax, or any probability map, under a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.values import as_queries_are, readable

Map = Callable[[Tensor, Tensor], Tensor]


def attend_kept(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, factors: Tensor | None = None, rho: Map | None = None
) -> Tensor:
    """q (B, H, t, d), k and v (B, H or H/g, m, d), seen bool (B, H or 1, t, m) → (B, H, t, d).

    `factors` is what dropout multiplies the weights with, `rho` a map other than softmax. A query that sees nothing
    gives 0, one that is not a number NaN. Half precision is computed in float32.
    """
    kind, work = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(work), k.to(work), v.to(work)
    if factors is None and rho is None:
        return _fused(q, k, v, seen, scale).to(kind)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    scores = q @ k.mT * scale
    if rho is None:
        empty = ~seen.any(-1, keepdim=True)
        weights = scores.masked_fill(~(seen | empty), -torch.inf).softmax(-1).masked_fill(empty, 0)
    else:
        weights = rho(scores, seen)
    return ((weights if factors is None else weights * factors) @ v).to(kind)


def attend_runs(q: Tensor, k: Tensor, v: Tensor, runs: list[slice], scale: float) -> Tensor:
    """The same for queries (B, H, 1, d) that all see these runs of slots, softmax alone."""
    kind, work = q.dtype, torch.promote_types(q.dtype, torch.float32)
    first, stop = min(run.start for run in runs), max(run.stop for run in runs)
    q, k, v = q.to(work), k[:, :, first:stop].to(work), v[:, :, first:stop].to(work)
    mask = None
    if sum(run.stop - run.start for run in runs) < stop - first:
        mask = torch.full((1, 1, 1, stop - first), -torch.inf, dtype=work, device=q.device)
        for run in runs:
            mask[..., run.start - first : run.stop - first].zero_()
    grouped = {"enable_gqa": True} if k.shape[1] < q.shape[1] else {}
    return as_queries_are(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, **grouped), q).to(kind)


def _fused(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    grouped: dict[str, Any] = {"enable_gqa": True} if k.shape[1] < q.shape[1] else {}
    looks = readable(seen)
    if looks and bool(seen.all()):
        out = F.scaled_dot_product_attention(q, k, v, scale=scale, **grouped)
        return as_queries_are(out, q)
    empty = ~seen.any(-1, keepdim=True)  # (B, H or 1, t, 1)
    if looks and not bool(empty.any()):
        return as_queries_are(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, **grouped), q)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | empty, scale=scale, **grouped)
    return as_queries_are(out, q).masked_fill(empty, 0)
