"""One softmax over several key sets, without materialising the scores.

For a query with key sets K_1 … K_m (its parts),

    lse = log Σ_p exp(lse_p),    out = Σ_p exp(lse_p - lse) · out_p,

where (out_p, lse_p) come from the flash kernel of part p. The flash *backward* of one part needs of the other
parts only the row's merged (out, lse): calling it per part with the merged values gives the exact gradient of
the joint softmax. Memory stays linear: per part one output, never a score.

`merge_attention` is the entrance. On the CPU it runs the fused op; with dropout, and on devices where the
aten op does not exist, it runs `plain_merge`, ordinary differentiable torch that materialises the scores part
by part. Both are compared with dense attention in the tests. The fused op has no second derivative: asking
for one raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.blocks import Part, drawn_blocks, unplan

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
SMALL_MASK = 1 << 23  # masks of up to this many entries are made for all heads of all batch elements at once
KEPT_MASK = 1 << 20  # masks up to this many entries are kept between calls, larger ones are made anew


def merge_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    plan: Sequence[int],
    *,
    scale: float,
    valid: Sequence[Tensor | None] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """One softmax per query over all the parts of `plan` (see `kernels.blocks`).

    q (B, H, n, d); keys[source], values[source] (B, H, m, d); valid[source] bool (B or 1, 1 or H, m) or
    None, False = the key does not exist. Returns (B, H, n, d); a query that sees nothing gets 0.
    """
    if valid is None or all(x is None for x in valid):
        valid = []
    valid = [_everyone(k) if x is None else x for x, k in zip(valid, keys, strict=False)]
    if dropout > 0 or q.device.type != "cpu":
        return plain_merge(q, keys, values, plan, scale=scale, valid=valid, dropout=dropout)
    kind = q.dtype
    q, keys, values = _ready(q), [_ready(k) for k in keys], [_ready(v) for v in values]
    out, _ = fused_merge(q, keys, values, valid, list(plan), scale)
    return out.to(kind)


def _ready(x: Tensor) -> Tensor:
    """As the flash kernel needs it: features side by side; half precision in float32, for the statistics."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if x.stride(-1) == 1 else x.contiguous()


def _everyone(k: Tensor) -> Tensor:
    return torch.ones(1, 1, k.shape[2], dtype=torch.bool, device=k.device)


# ---- the fused op -------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _kept_mask(part: Part, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    allowed = part.allowed()  # (A or 1, L, S)
    empty = ~allowed.any(-1)  # (A or 1, L)
    additive = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -torch.inf)
    return additive, (empty if bool(empty.any()) else None)


def _mask(part: Part, valid: Tensor | None, drawn: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """What the flash kernel adds to the scores, and which rows are left with no key at all.

    valid (G or 1, m) → mask (G or 1, A or 1, L or 1, S), empty rows (G or 1, A or 1, L or 1).
    """
    mask = empty = None
    if not part.is_triangle() and not part.sees_everything():
        make = _kept_mask if part.q_len * part.k_len <= KEPT_MASK else _kept_mask.__wrapped__
        mask, empty = make(part, dtype)
        mask, empty = mask[None], None if empty is None else empty[None]
    if valid is None:
        return mask, empty
    exists = _keys(valid[..., None], part, drawn)
    bias = torch.zeros(exists.shape[:3], dtype=dtype).masked_fill_(~exists[..., 0], -torch.inf)  # (G, A, S)
    bias = bias[:, :, None]  # (G, A, 1, S)
    if part.is_triangle():
        bias = bias + torch.full((part.q_len, part.k_len), -torch.inf, dtype=dtype).triu_(1)
    mask = bias if mask is None else mask + bias
    return mask, mask.amax(-1) == -torch.inf


def _grid(x: Tensor, start: int, blocks: int, step: int, length: int, stride: int) -> Tensor:
    """The blocks of a sequence as a view: (G, n, d) → (G, blocks, length, d)."""
    group, place, feature = x.stride()
    return x.as_strided(
        (x.shape[0], blocks, length, x.shape[2]),
        (group, step * place, stride * place, feature),
        x.storage_offset() + start * place,
    )


def _queries(x: Tensor, p: Part) -> Tensor:
    return _grid(x, p.q_start, p.blocks, p.q_step, p.q_len, p.q_stride)  # (G, A, L, d)


def _keys(x: Tensor, p: Part, drawn: Tensor) -> Tensor:
    """(G, A, S, d): a view, or a copy of the drawn blocks."""
    if not p.draws:
        return _grid(x, p.k_start, p.blocks, p.k_step, p.k_len, p.k_stride)
    return _blocks(x, p).index_select(1, _numbers(p, drawn)).view(x.shape[0], p.blocks, p.k_len, x.shape[2])


def _blocks(x: Tensor, p: Part) -> Tensor:
    """The whole blocks that a part draws from: (G, n, d) → (G, n // size, size, d)."""
    size = p.k_len // p.draws
    return _grid(x, 0, x.shape[1] // size, size, size, 1)


def _numbers(p: Part, drawn: Tensor) -> Tensor:
    return drawn.as_strided((p.blocks, p.draws), (p.k_step, 1), p.k_start).flatten()  # (A·draws,)


def _add_keys(total: Tensor, grad: Tensor, p: Part, drawn: Tensor) -> None:
    """total[key] += grad; where key blocks overlap they are added in slices that do not."""
    if p.draws:
        pieces = grad.reshape(grad.shape[0], p.blocks * p.draws, -1, grad.shape[3])  # (G, A·draws, size, d)
        blocks = _blocks(total, p)
        for at, number in enumerate(_numbers(p, drawn).tolist()):  # a block may be drawn twice
            blocks[:, number].add_(pieces[:, at])
        return
    overlap = p.blocks > 1 and p.k_stride == 1 and p.k_step < p.k_len
    if overlap and p.k_step == 0:  # the same keys in every block
        _grid(total, p.k_start, 1, 0, p.k_len, p.k_stride)[:, 0].add_(grad.sum(1))
        return
    width = p.k_step if overlap else p.k_len
    for first in range(0, p.k_len, width):
        piece = grad[:, :, first : first + width]
        start = p.k_start + first * p.k_stride
        _grid(total, start, p.blocks, p.k_step, piece.shape[2], p.k_stride).add_(piece)


def _groups(tensors: list[Tensor], valid: list[Tensor], parts: list[Part]):
    """(B, H, n, d) → slices (G, n, d) to work on: all B·H at once, or one batch element after the other.

    One at a time when batch and heads do not fold into one dimension as a view, and when key masks differ between
    batch elements: the heads then share a mask. Small masks are rather copied for every head.
    """
    batch, heads = tensors[0].shape[:2]
    folds = all(t.stride(0) == t.shape[1] * t.stride(1) or t.shape[0] == 1 for t in tensors)
    pairs = max((p.blocks * p.q_len * p.k_len for p in parts), default=0)
    if folds and (all(x.shape[0] == 1 for x in valid) or batch * heads * pairs <= SMALL_MASK):
        shared = [x[0] if x.shape[:2] == (1, 1) else x.expand(batch, heads, -1).flatten(0, 1) for x in valid]
        yield [t.flatten(0, 1) if batch > 1 else t[0] for t in tensors], dict(enumerate(shared))
        return
    for b in range(batch):
        yield [t[b] for t in tensors], dict(enumerate(x[b if x.shape[0] > 1 else 0] for x in valid))


def _attend(q: Tensor, k: Tensor, v: Tensor, p: Part, valid: Tensor | None, drawn: Tensor, scale: float):
    """One part: output (G, A, L, d) and logsumexp (G, A, L), -inf where a row has no key."""
    mask, empty = _mask(p, valid, drawn, q.dtype)
    qs, ks, vs = _queries(q, p), _keys(k, p, drawn), _keys(v, p, drawn)
    if p.is_self:
        lse = (qs * ks).sum(-1).mul_(scale)  # (G, A, 1)
        out = vs
    else:
        triangle = mask is None and p.is_triangle()
        out, lse = _flash(qs, ks, vs, 0.0, triangle, attn_mask=mask, scale=scale)
    if empty is not None:  # the flash kernel reports 0 for such a row
        lse = lse.masked_fill(empty, -torch.inf)
        if p.is_self:
            out = out.masked_fill(empty[..., None], 0)
    return out, lse


@torch.library.custom_op("subquad::merge", mutates_args=())
def fused_merge(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    valid: list[Tensor],
    plan: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    parts, drawn = unplan(plan), torch.tensor(drawn_blocks(plan), dtype=torch.int64)
    covered = sum(p.blocks * p.q_len for p in parts if p.fresh) == q.shape[2]
    out = torch.empty_like(q) if covered else torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], -torch.inf)  # (B, H, n)
    m = len(keys)
    for (q_, out_, lse_, *kv), valid_ in _groups([q, out, lse[..., None], *keys, *values], valid, parts):
        for p in parts:
            o, l_new = _attend(q_, kv[p.source], kv[m + p.source], p, valid_.get(p.source), drawn, scale)
            o_old, l_old = _queries(out_, p), _queries(lse_, p)[..., 0]  # views
            if p.fresh:
                o_old.copy_(o)
                l_old.copy_(l_new)
                continue
            total = torch.logaddexp(l_old, l_new)
            base = total.masked_fill(total == -torch.inf, 0)  # -inf - -inf is not a number
            o_old.mul_((l_old - base).exp_()[..., None]).addcmul_(o, (l_new - base).exp_()[..., None])
            l_old.copy_(total)
    return out, lse


@fused_merge.register_fake
def _(q, keys, values, valid, plan, scale):
    return torch.empty_like(q), q.new_empty(q.shape[:3])


@torch.library.custom_op("subquad::merge_backward", mutates_args=())
def fused_merge_backward(
    grad: Tensor,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    out: Tensor,
    lse: Tensor,
    valid: list[Tensor],
    plan: list[int],
    scale: float,
) -> list[Tensor]:
    parts, m, drawn = unplan(plan), len(keys), torch.tensor(drawn_blocks(plan), dtype=torch.int64)
    grad = _ready(grad)
    dq, dkv = torch.zeros_like(q), [torch.zeros_like(t) for t in (*keys, *values)]
    safe = lse.masked_fill(lse == -torch.inf, 0)[..., None]  # exp(-inf - 0) = 0: empty rows get no gradient
    tensors = [grad, q, out, safe, dq, *keys, *values, *dkv]
    for (g_, q_, out_, safe_, dq_, *rest), valid_ in _groups(tensors, valid, parts):
        kv, dkv_ = rest[: 2 * m], rest[2 * m :]
        for p in parts:
            g, qs, o, l_all = (_queries(t, p) for t in (g_, q_, out_, safe_))
            k, v = _keys(kv[p.source], p, drawn), _keys(kv[m + p.source], p, drawn)
            mask, empty = _mask(p, valid_.get(p.source), drawn, q.dtype)
            grads = _part_backward(g, qs, o, l_all, k, v, p, mask, empty, scale)
            _queries(dq_, p).add_(grads[0])
            _add_keys(dkv_[p.source], grads[1], p, drawn)
            _add_keys(dkv_[m + p.source], grads[2], p, drawn)
    return [dq, *dkv]


def _part_backward(g, q, out, lse, k, v, p: Part, mask: Tensor | None, empty: Tensor | None, scale: float):
    """Gradients of one part's q, k, v, given the merged out and lse (all as views (G, A, L or S, d))."""
    if p.is_self:
        weight = ((q * k).sum(-1, keepdim=True) * scale - lse).exp_()  # (G, A, 1, 1)
        if empty is not None:
            weight = weight.masked_fill(empty[..., None], 0)
        ds = weight * (g * (v - out)).sum(-1, keepdim=True) * scale
        return ds * k, ds * q, weight * g
    triangle = mask is None and p.is_triangle()
    return _flash_backward(g, q, k, v, out, lse[..., 0], 0.0, triangle, attn_mask=mask, scale=scale)


@fused_merge_backward.register_fake
def _(grad, q, keys, values, out, lse, valid, plan, scale):
    return [torch.empty_like(t) for t in (q, *keys, *values)]


def _setup(ctx, inputs, output):
    q, keys, values, valid, plan, scale = inputs
    ctx.save_for_backward(q, *keys, *values, *output, *valid)
    ctx.sources, ctx.plan, ctx.scale = len(keys), plan, scale


def _backward(ctx, grad, grad_lse):
    m = ctx.sources
    q, *rest = ctx.saved_tensors
    keys, values, (out, lse, *valid) = rest[:m], rest[m : 2 * m], rest[2 * m :]
    dq, *dkv = fused_merge_backward(grad, q, keys, values, out, lse, valid, ctx.plan, ctx.scale)
    return dq, dkv[:m], dkv[m:], [None] * len(valid), None, None


fused_merge.register_autograd(_backward, setup_context=_setup)


# ---- the plain path -----------------------------------------------------------------------------------------


def plain_merge(q, keys, values, plan, *, scale: float, valid, dropout: float = 0.0) -> Tensor:
    """The same by ordinary torch: scores of one part at a time, any device, any order of derivative."""
    kind, work = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, keys, values = q.to(work), [k.to(work) for k in keys], [v.to(work) for v in values]
    parts, drawn = unplan(plan), torch.tensor(drawn_blocks(plan), device=q.device)
    scores, places = [], []
    for p in parts:
        at = _places(p.q_start, p.blocks, p.q_step, p.q_len, p.q_stride, q.device)  # (A, L)
        key = _places(p.k_start, p.blocks, p.k_step, p.k_len, p.k_stride, q.device)  # (A, S)
        if p.draws:
            size = p.k_len // p.draws
            key = (_numbers(p, drawn)[:, None] * size + torch.arange(size, device=q.device)).view(p.blocks, p.k_len)
        s = q[:, :, at] @ keys[p.source][:, :, key].mT * scale  # (B, H, A, L, S)
        seen = p.allowed(q.device)  # (A or 1, L, S)
        if valid:
            seen = seen & valid[p.source][:, :, key][..., None, :]  # (B, 1 or H, A, L, S)
        scores.append(s.masked_fill(~seen, -torch.inf))
        places.append((at, key))
    top = _row_top(scores, places, q)  # (B, H, n): a constant shift, so it needs no gradient
    total = torch.zeros_like(top)
    shifted = []
    for s, (at, _) in zip(scores, places, strict=True):
        shifted.append((s - top[:, :, at][..., None]).exp())
        total = total.index_add(2, at.flatten(), shifted[-1].sum(-1).flatten(2))
    total = total.masked_fill(total == 0, 1)  # a row with no key: 0 / 1
    out = torch.zeros_like(q)
    for p, w, (at, key) in zip(parts, shifted, places, strict=True):
        w = F.dropout(w / total[:, :, at][..., None], dropout)
        out = out.index_add(2, at.flatten(), (w @ values[p.source][:, :, key]).flatten(2, 3))
    return out.to(kind)


def _places(start: int, blocks: int, step: int, length: int, stride: int, device) -> Tensor:
    block, row = torch.arange(blocks, device=device)[:, None], torch.arange(length, device=device)
    return start + block * step + row * stride  # (blocks, length)


@torch.no_grad()
def _row_top(scores, places, q: Tensor) -> Tensor:
    top = q.new_full(q.shape[:3], -torch.inf)
    for s, (at, _) in zip(scores, places, strict=True):
        best = s.detach().amax(-1)  # (B, H, A, L)
        top[:, :, at] = torch.maximum(top[:, :, at], best)
    return top.masked_fill(top == -torch.inf, 0)
