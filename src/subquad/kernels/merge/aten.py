"""The merge operators on torch's own GPU kernels: a call per part, for machines without Triton.

Parts without a mask run through `_scaled_dot_product_flash_attention` (half precision), the others, and float32,
through `_scaled_dot_product_efficient_attention` with a bias. Both return logsumexps, by which the parts are merged,
and their backwards take the merged output and logsumexp, as on a CPU. Nothing here waits for the device but reading the
lengths of a padded batch, where rows need plans of their own (`padded`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.merge.views import absorb, add_keys, grid_view, keys_of
from subquad.supports.parts import Part, Plan
from subquad.supports.support import plans

_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
_efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
ALIGNED = 8  # features, and keys of a bias, come in multiples of this
ROWS = 32  # the efficient kernel keeps logsumexps of so many rows at a time


def forward(q, keys, values, valid, lengths, seed, support, which, n, scale, dropout) -> tuple[Tensor, Tensor]:
    work = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros(q.shape, dtype=work, device=q.device), q.new_full(q.shape[:3], -torch.inf, dtype=work)
    for rows, plan in plans(q, keys, values, lengths, support, which, n):
        for group in _groups(rows, q.shape[1], [q, out, lse[..., None]], keys, values, valid, []):
            q_, out_, lse_ = group.queries
            for part in plan.parts:
                x = grid_view(q_, part.queries)  # (G, A, L, d)
                views: tuple[Any, ...] = _views(group, part, plan, q.dtype)
                o, here = _attend(x, *views, part, scale)  # type: ignore[call-arg]
                total, base = grid_view(out_, part.queries), grid_view(lse_, part.queries)[..., 0]
                absorb(total, base, o.to(work), here.to(work), part.fresh)
            group.write_back()
    return out.to(q.dtype), lse


def backward(grad, q, keys, values, out, lse, valid, lengths, seed, support, which, n, scale, dropout) -> list[Tensor]:
    work, m = torch.promote_types(q.dtype, torch.float32), len(keys)
    grads = [torch.zeros(x.shape, dtype=work, device=q.device) for x in (q, *keys, *values)]
    safe = lse.to(work).masked_fill(lse == -torch.inf, 0)[..., None]  # exp(-inf - 0) = 0: empty rows get no gradient
    for rows, plan in plans(q, keys, values, lengths, support, which, n):
        queries = [grad.to(q.dtype), q, out.to(q.dtype), safe, grads[0]]
        for group in _groups(rows, q.shape[1], queries, keys, values, valid, grads[1:]):
            for part in plan.parts:
                g, x, o, total, dq = (grid_view(t, part.queries) for t in group.queries)
                k, v, bias, _ = _views(group, part, plan, q.dtype)
                changes = _part_backward(g, x, o, total, k, v, bias, part, scale)
                dq.add_(changes[0])
                for whole, change in zip((part.source, m + part.source), changes[1:], strict=True):
                    add_keys(group.gradients[whole], change.to(work), part, plan)
            group.write_back()
    return [g.to(x.dtype) for g, x in zip(grads, (q, *keys, *values), strict=True)]


# ---- views ----------------------------------------------------------------------------------------------------


class _Group:
    """The heads number j of every key head, for some batch elements: tensors (G, n, d), views where strides allow."""

    def __init__(self, rows: slice, j: int, group: int, heads: int, queries, keys, values, valid, gradients) -> None:
        def mine(x: Tensor) -> Tensor:
            return x[rows, j::group] if x.shape[1] == heads else x[rows]

        self.targets = [(mine(x), x) for x in (*queries, *gradients)]
        flat = [x.flatten(0, 1) for x, _ in self.targets]
        self.queries, self.gradients = flat[: len(queries)], flat[len(queries) :]
        self.keys = [mine(x).flatten(0, 1) for x in keys]
        self.values = [mine(x).flatten(0, 1) for x in values]
        share = heads // group
        self.valid = [(x[rows] if len(x) > 1 else x)[:, 0] for x in valid]  # (b or 1, m)
        self.valid = [x.repeat_interleave(share, 0) if len(x) > 1 else x for x in self.valid]  # (G or 1, m)

    def write_back(self) -> None:
        """Where a tensor did not fold into (G, n, d) as a view, what was written stands in a copy."""
        for (target, _), flat in zip(self.targets, (*self.queries, *self.gradients), strict=True):
            if flat.untyped_storage()._cdata != target.untyped_storage()._cdata:
                target.copy_(flat.view(target.shape))


def _groups(rows: slice, heads: int, queries, keys, values, valid, gradients) -> Iterator[_Group]:
    group = heads // min(x.shape[1] for x in (*keys, *values))
    for j in range(group):
        yield _Group(rows, j, group, heads, queries, keys, values, valid, gradients)


def _views(group: _Group, part: Part, plan: Plan, dtype: torch.dtype):
    """Keys and values (G, A, S, d), the bias (G or 1, A or 1, L, S) or None, and which rows see nothing, or None."""
    k, v = (keys_of(x[part.source], part, plan) for x in (group.keys, group.values))
    seen = None if part.is_triangle or part.sees_everything else _allowed(part, k.device)[None]  # (1, A or 1, L, S)
    if group.valid:
        exists = keys_of(group.valid[part.source][..., None], part, plan)[..., 0][:, :, None]  # (G or 1, A, 1, S)
        inside = _allowed(part, k.device)[None] if seen is None else seen
        seen = inside & exists
    if seen is None:
        return k, v, None, None
    return k, v, _bias(seen, dtype, len(k), part), ~seen.any(-1)


def _allowed(part: Part, device: torch.device) -> Tensor:
    """Who may see whom, bool (A or 1, L, S)."""
    return torch.from_numpy(_kept_allowed(part)).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def _kept_allowed(part: Part):
    return part.allowed()


def _bias(seen: Tensor, dtype: torch.dtype, graphs: int, part: Part) -> Tensor:
    """0 or -inf, expanded to (G, A, L, S); its rows begin at multiples of ALIGNED entries."""
    keys = part.keys.length
    bias = torch.full((*seen.shape[:3], keys + -keys % ALIGNED), -torch.inf, dtype=dtype, device=seen.device)
    bias[..., :keys].masked_fill_(seen, 0)
    return bias[..., :keys].expand(graphs, part.queries.blocks, part.queries.length, keys)


# ---- one part -------------------------------------------------------------------------------------------------


def _attend(x: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, empty: Tensor | None, part: Part, scale: float):
    """Output (G, A, L, d) and logsumexp (G, A, L), -inf where a row has no key."""
    if part.is_self:
        out, lse = v, (x.float() * k).sum(-1).mul_(scale)
    elif bias is None and x.dtype != torch.float32:
        q_, k_, v_ = (_padded(t) for t in (x, k, v))
        out, lse = _flash(q_, k_, v_, 0.0, part.is_triangle, False, scale=scale)[:2]
        out = out[..., : v.shape[3]]
    else:
        q_, k_, v_ = (_padded(t) for t in (x, k, v))
        triangle = bias is None and part.is_triangle
        out, lse = _efficient(q_, k_, v_, bias, True, 0.0, triangle, scale=scale)[:2]
        out, lse = out[..., : v.shape[3]], lse[..., : x.shape[2]]
    if empty is not None:
        out, lse = out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
    return out, lse


def _part_backward(g, x, out, lse, k, v, bias, part: Part, scale: float):
    """Gradients of one part's q, k, v, given the merged out and lse."""
    if part.is_self:
        weight = ((x.float() * k).sum(-1, keepdim=True) * scale - lse).exp()  # (G, A, 1, 1)
        if bias is not None:
            weight = weight * bias.float().exp()  # 0 where the key does not exist
        ds = weight * (g.float() * (v - out)).sum(-1, keepdim=True) * scale
        return ds * k, ds * x, weight * g
    width, triangle = v.shape[3], bias is None and part.is_triangle
    g, x, out, k, v = (_padded(t) for t in (g, x, out, k, v))
    seed, offset = (torch.zeros((), dtype=torch.int64, device=x.device) for _ in range(2))  # nothing is dropped
    total = lse[..., 0].contiguous()
    if bias is None and x.dtype != torch.float32:
        sizes = (None, None, x.shape[2], k.shape[2])
        found = _flash_backward(g, x, k, v, out, total, *sizes, 0.0, triangle, seed, offset, scale=scale)
    else:
        total = F.pad(total, (0, -total.shape[2] % ROWS), value=torch.inf)
        wanted = [True, True, True, False]
        given = (bias, out, total, seed, offset, 0.0, wanted)
        found = _efficient_backward(g, x, k, v, *given, triangle, scale=scale)[:3]
    return tuple(t[..., :width] for t in found)


def _padded(x: Tensor) -> Tensor:
    """Features in multiples of ALIGNED, side by side."""
    if x.shape[3] % ALIGNED:
        return F.pad(x, (0, -x.shape[3] % ALIGNED))
    return x if x.stride(3) == 1 else x.contiguous()
