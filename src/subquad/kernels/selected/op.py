"""The operators `subquad::selected` and `subquad::selected_backward`: computation, shapes, derivative, FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.flash import flash, flash_backward
from subquad.kernels.merge.op import merge, merge_backward
from subquad.kernels.operators import derive
from subquad.kernels.runs import cpu
from subquad.kernels.selected import choice, reference
from subquad.supports.patterns import Blocks

TILE = 64  # queries that are multiplied together


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    *,
    block: int,
    scale: float,
    key_mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """q, k, v (B, H, n, d); chosen int64 (B, H, n, t): the blocks that a query sees beside its own, -1 = none.

    A chosen block lies wholly before the query's own, has a real key, and is chosen once. key_mask bool (B, n),
    lengths int64 (B,): what exists. Half precision is computed in float32.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    x, y, z = (t.to(work).contiguous() for t in (q, k, v))
    return selected(x, y, z, chosen, key_mask, lengths, block, scale)[0].to(q.dtype)


class _Visit(NamedTuple):
    """The queries of one sequence that chose one block."""

    sequence: int  # b·H + h
    queries: Tensor  # (r,)
    keys: slice
    mask: Tensor | None  # what is added to the scores, (1, 1, 1, block); None = every key exists


def _visits(chosen: Tensor, key_mask: Tensor | None, block: int) -> Iterator[_Visit]:
    heads, (n, t) = chosen.shape[1], chosen.shape[2:]
    if t == 0:
        return
    blocks = -(-n // block)
    flat = chosen.reshape(-1, n * t)
    for sequence, order in enumerate(flat.argsort(dim=1, stable=True)):  # by block, and by query inside a block
        stops = torch.bincount(flat[sequence] + 1, minlength=blocks + 1).cumsum(0).tolist()
        for number in range(blocks):
            if stops[number] < stops[number + 1]:
                keys = slice(number * block, (number + 1) * block)
                real = None if key_mask is None else key_mask[sequence // heads, keys]
                mask = None
                if real is not None and not bool(real.all()):
                    mask = torch.where(real, 0.0, -torch.inf).view(1, 1, 1, -1)
                yield _Visit(sequence, order[stops[number] : stops[number + 1]] // t, keys, mask)


def _own(key_mask: Tensor | None, lengths: Tensor | None, block: int, n: int, scale: float) -> tuple:
    """The remaining arguments of the merge operators, for the query's block."""
    valid = [] if key_mask is None else [key_mask[:, None]]
    return valid, lengths, None, Blocks(causal=True, size=block).text, "union", n, scale, 0.0


def _real(key_mask: Tensor | None, q: Tensor) -> Tensor | None:
    """(G, n): which keys exist."""
    return None if key_mask is None else key_mask.repeat_interleave(q.shape[1], 0)


def _bias(key_mask: Tensor | None, q: Tensor) -> Tensor | None:
    """(G, n): -inf for keys that do not exist."""
    if key_mask is None:
        return None
    bias = q.new_zeros(key_mask.shape).masked_fill_(~key_mask, -torch.inf)
    return bias.repeat_interleave(q.shape[1], 0)


@torch.library.custom_op("subquad::selected", mutates_args=())
def selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    key_mask: Tensor | None,
    lengths: Tensor | None,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out (B, H, n, d) and logsumexp (B, H, n), -inf where a query sees nothing."""
    out, lse = merge(q, [k], [v], *_own(key_mask, lengths, block, q.shape[2], scale))
    x, y, z, o, s = (t.flatten(0, 1) for t in (q, k, v, out, lse))  # views (G, n, d) and (G, n)
    if cpu.takes(q) and chosen.numel():
        asks, tables = choice.tables(chosen.flatten(0, 1), block, q.shape[2])
        cpu.forward(x, [y], [z], _bias(key_mask, q), (asks, None), tables, scale, o, s, fresh=False, again=True)
        return out, lse
    if not devices.is_host(q):
        reference.forward(x, y, z, chosen.flatten(0, 1), _real(key_mask, q), block, scale, o, s)
        return out, lse
    for g, rows, keys, mask in _visits(chosen, key_mask, block):
        mask = None if mask is None else mask.to(q.dtype)
        count, padded = len(rows), F.pad(rows, (0, -len(rows) % TILE))  # whole tiles
        new, here = _attend(x[g], padded, y[g, keys], z[g, keys], mask, scale)  # (r, d), (r,)
        before = s[g, padded]
        total = torch.logaddexp(before, here)
        old, share = ((t - total).exp()[:count, None] for t in (before, here))
        o[g, rows] = o[g, rows] * old + new[:count] * share
        s[g, rows] = total[:count]
    return out, lse


def _attend(q: Tensor, rows: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Some rows of q (n, d) to one block. In tiles of a fixed height: how a matrix product or an exponential rounds a
    row depends on the number of rows, and so a query would change in the last digit with what later queries choose.
    """
    tiles = q[rows].unflatten(0, (-1, TILE))[None]  # (1, A, TILE, d)
    keys, values = (t.expand(1, tiles.shape[1], *t.shape) for t in (k, v))
    out, lse = flash(tiles, keys, values, attn_mask=mask, scale=scale)
    return out.flatten(0, 2), lse.flatten()


@torch.library.custom_op("subquad::selected_backward", mutates_args=())
def selected_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    chosen: Tensor,
    key_mask: Tensor | None,
    lengths: Tensor | None,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    grad = grad.contiguous()
    dq, dk, dv = merge_backward(grad, q, [k], [v], out, lse, *_own(key_mask, lengths, block, q.shape[2], scale))
    a, b, c = (t.flatten(0, 1) for t in (dq, dk, dv))
    if cpu.takes(q) and chosen.numel():
        asks, tables = choice.tables(chosen.flatten(0, 1), block, q.shape[2])
        g, x, y, z, o, s = (t.flatten(0, 1) for t in (grad, q, k, v, out, lse))
        empty = s == -torch.inf
        about = (g, (g * o).sum(-1).masked_fill_(empty, 0), s.masked_fill(empty, torch.inf))
        cpu.backward(x, [y], [z], _bias(key_mask, q), (asks, None), tables, scale, *about, [a, b, c])
        return dq, dk, dv
    if not devices.is_host(q):
        g, x, y, z, o, s, own = (t.flatten(0, 1) for t in (grad, q, k, v, out, lse, chosen))
        reference.backward(g, x, y, z, o, s, own, _real(key_mask, q), block, scale, [a, b, c])
        return dq, dk, dv
    flat = [t.flatten(0, 1)[None] for t in (grad, q, k, v, out, lse)]  # (1, G, n, d) and (1, G, n)
    for at, rows, keys, mask in _visits(chosen, key_mask, block):
        mask = None if mask is None else mask.to(q.dtype)
        dout, x, o, s = (flat[i][:, at : at + 1, rows] for i in (0, 1, 4, 5))
        y, z = (flat[i][:, at : at + 1, keys] for i in (2, 3))
        changes = flash_backward(dout, x, y, z, o, s, 0.0, False, attn_mask=mask, scale=scale)
        a[at, rows] += changes[0][0, 0]
        b[at, keys] += changes[1][0, 0]
        c[at, keys] += changes[2][0, 0]
    return dq, dk, dv


@selected.register_fake
def _(q, k, v, chosen, key_mask, lengths, block, scale):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3])


def _flops(q, k, v, chosen, key_mask, lengths, block, *args, **kwargs) -> int:
    """Pairs of queries and keys: half of the query's block on average, and all of the chosen ones."""
    pairs = chosen.numel() * block + chosen.shape[0] * chosen.shape[1] * chosen.shape[2] * (block + 1) // 2
    return 4 * q.shape[3] * pairs


derive(selected, selected_backward, "selected_attention", of=(0, 1, 2), behind=3, flops=_flops)
