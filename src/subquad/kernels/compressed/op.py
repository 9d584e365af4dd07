"""The operators `subquad::compressed` and `subquad::compressed_backward`: computation, shapes, derivative, FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.compressed import reference
from subquad.kernels.flash import flash, flash_backward
from subquad.kernels.merge.op import merge, merge_backward
from subquad.kernels.merge.views import absorb
from subquad.kernels.operators import derive
from subquad.supports.patterns import Longformer
from subquad.supports.support import plan_of, text_of

ROWS = 512  # queries whose entries are masked together


def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    entries: Tensor,
    values: Tensor,
    seen: Tensor,
    sink: Tensor,
    *,
    window: int,
    scale: float,
    key_mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """q (B, H, n, d); k, v (B, H or H/g, n, d); entries, values (B, 1, m, d); seen bool (B or 1, n, m); sink (H,).

    A query sees itself and the window - 1 tokens before it; key_mask bool (B, n), lengths int64 (B,): what exists.
    Behind the end of a row nothing may be seen. Float32 or float64.
    """
    tensors = [t.contiguous() for t in (q, k, v, entries, values)]
    return compressed(*tensors, seen, sink, key_mask, lengths, window, scale)[0]


def _near(key_mask: Tensor | None, lengths: Tensor | None, window: int, n: int, scale: float) -> tuple:
    """The remaining arguments of the merge operators, for the window."""
    valid = [] if key_mask is None else [key_mask[:, None]]
    return valid, lengths, None, _text(window), "union", n, scale, 0.0


def _text(window: int) -> str:
    return text_of(Longformer(causal=True, window=2 * (window - 1)))


def _blocks(seen: Tensor, kind: torch.dtype) -> Iterator[tuple[slice, int, Tensor, Tensor]]:
    """Blocks of queries, how many entries at most they see, what is added to the scores, and who sees none."""
    for first in range(0, seen.shape[1], ROWS):
        rows = slice(first, first + ROWS)
        stop = _last(seen[:, rows])
        if stop:
            here = seen[:, None, rows, :stop]  # (B or 1, 1, r, m)
            bias = torch.zeros(here.shape, dtype=kind, device=seen.device).masked_fill_(~here, -torch.inf)
            yield rows, stop, bias, ~here.any(-1)


def _last(seen: Tensor) -> int:
    """How many entries to look at. On a GPU all of them: to ask for fewer would be to wait for it."""
    if not devices.is_host(seen):
        return seen.shape[2]
    some = seen.any(1).any(0).nonzero()  # (…, 1)
    return int(some[-1]) + 1 if len(some) else 0


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if devices.is_host(q):
        return flash(q, k, v, attn_mask=bias, scale=scale)
    return reference.attend(q, k, v, bias, scale)


def _attend_backward(*tensors: Any, bias: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """tensors: grad, q, k, v, the merged out and lse, which the sink keeps finite."""
    if devices.is_host(tensors[0]):
        return flash_backward(*tensors, 0.0, False, attn_mask=bias, scale=scale)
    return reference.attend_backward(*tensors, bias=bias, scale=scale)


def _views(rows: slice, stop: int, queries: list[Tensor], entries: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    heads = queries[0].shape[1]
    return [t[:, :, rows] for t in queries], [t[:, :, :stop].expand(-1, heads, -1, -1) for t in entries]


@torch.library.custom_op("subquad::compressed", mutates_args=())
def compressed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    entries: Tensor,
    values: Tensor,
    seen: Tensor,
    sink: Tensor,
    key_mask: Tensor | None,
    lengths: Tensor | None,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out (B, H, n, d) and the logsumexp of all scores and the sink, (B, H, n)."""
    out, lse = merge(q, [k], [v], *_near(key_mask, lengths, window, q.shape[2], scale))
    for rows, stop, bias, empty in _blocks(seen, q.dtype):
        (x, o, s), (y, z) = _views(rows, stop, [q, out, lse], [entries, values])
        new, here = _attend(x, y, z, bias, scale)
        here = here.masked_fill(empty, -torch.inf)  # the kernel reports 0 for a row that sees nothing
        absorb(o, s, new, here)
    whole = torch.logaddexp(lse, sink[:, None].to(lse))
    return out.mul_((lse - whole).exp_()[..., None]), whole


@torch.library.custom_op("subquad::compressed_backward", mutates_args=())
def compressed_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    entries: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    seen: Tensor,
    sink: Tensor,
    key_mask: Tensor | None,
    lengths: Tensor | None,
    window: int,
    scale: float,
) -> list[Tensor]:
    """Gradients of q, k, v, entries, values and sink."""
    grad = grad.contiguous()
    dq, dk, dv = merge_backward(grad, q, [k], [v], out, lse, *_near(key_mask, lengths, window, q.shape[2], scale))
    d_entries, d_values = (x.new_zeros(x.shape) for x in (entries, values))
    for rows, stop, bias, _ in _blocks(seen, q.dtype):
        (g, x, o, s), (y, z) = _views(rows, stop, [grad, q, out, lse], [entries, values])
        a, b, c = _attend_backward(g, x, y, z, o, s, bias=bias, scale=scale)
        dq[:, :, rows] += a
        d_entries[:, :, :stop] += b.sum(1, keepdim=True)
        d_values[:, :, :stop] += c.sum(1, keepdim=True)
    share = (sink[:, None].to(lse) - lse).exp_()  # (B, H, n)
    d_sink = -(share * (grad * out).sum(-1)).sum((0, 2))
    return [dq, dk, dv, d_entries, d_values, d_sink.to(sink.dtype)]


@compressed.register_fake
def _(q, *about):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3])


def _flops(q, k, v, entries, values, seen, sink, key_mask, lengths, window, *args, **kwargs) -> int:
    """Of the plan of the window, and about half of all entries."""
    (batch, heads, n, d), m = q.shape, seen.shape[2]
    return 4 * d * batch * heads * (plan_of(_text(window), int(n), "union").pairs + n * m // 2)


derive(compressed, compressed_backward, "compressed_attention", of=(0, 1, 2, 3, 4, 6), behind=5, flops=_flops)
