"""The operators `subquad::selected` and `subquad::selected_backward`: computation, shapes, derivative, FLOPs."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.merge.op import merge, merge_backward
from subquad.kernels.operators import derive
from subquad.kernels.parallel import cut, filled
from subquad.kernels.runs import cpu
from subquad.kernels.selected import choice, reference
from subquad.supports.patterns import Blocks


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
    x, y, z = (filled(t.to(work)).contiguous() for t in (q, k, v))
    return cut(selected(x, y, z, chosen, key_mask, lengths, block, scale)[0], q.shape[3]).to(q.dtype)


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
    reference.forward(x, y, z, chosen.flatten(0, 1), _real(key_mask, q), block, scale, o, s)
    return out, lse


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
    g, x, y, z, o, s = (t.flatten(0, 1) for t in (grad, q, k, v, out, lse))
    if cpu.takes(q) and chosen.numel():
        asks, tables = choice.tables(chosen.flatten(0, 1), block, q.shape[2])
        empty = s == -torch.inf
        about = (g, (g * o).sum(-1).masked_fill_(empty, 0), s.masked_fill(empty, torch.inf))
        cpu.backward(x, [y], [z], _bias(key_mask, q), (asks, None), tables, scale, *about, [a, b, c])
        return dq, dk, dv
    reference.backward(g, x, y, z, o, s, chosen.flatten(0, 1), _real(key_mask, q), block, scale, [a, b, c])
    return dq, dk, dv


@selected.register_fake
def _(q, k, v, chosen, key_mask, lengths, block, scale):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3])


def _flops(q, k, v, chosen, key_mask, lengths, block, *args, **kwargs) -> int:
    """Pairs of queries and keys: half of the query's block on average, and all of the chosen ones."""
    pairs = chosen.numel() * block + chosen.shape[0] * chosen.shape[1] * chosen.shape[2] * (block + 1) // 2
    return 4 * q.shape[3] * pairs


derive(selected, selected_backward, "selected_attention", of=(0, 1, 2), behind=3, flops=_flops)
