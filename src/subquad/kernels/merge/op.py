"""The operators `subquad::merge` and `subquad::merge_backward`: entrance, schema, shapes, derivative, FLOPs.

The reference runs on every device that has no kernel of its own; `cpu` and `cuda` register theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.kernels.merge import cpu, cuda, reference
from subquad.kernels.operators import Eager, derive
from subquad.supports.support import plan_of


def merge_attention(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    support: str,
    which: str,
    n: int,
    *,
    scale: float,
    lengths: Tensor | None = None,
    valid: Sequence[Tensor | None] = (),
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """One softmax per query over all the parts of a plan: the plan `which` of a support, for n tokens.

    q (B, H, r, d), r the rows of the plan; keys[source], values[source] (B, H or H/g, m, d), each with its own number
    of heads; lengths int64 (B,): batch element b follows the plan for lengths[b] tokens, and what lies behind gives 0;
    valid[source] bool (B or 1, 1, m) or None, False = the key does not exist. A query that sees nothing gets 0.
    `support` is the text of a support (`Support.text`). Half precision is computed in float32; on a GPU its products
    are those of the tensor cores, summed in float32.
    """
    work = q.dtype if q.is_cuda else torch.promote_types(q.dtype, torch.float32)
    masks = (
        []
        if all(x is None for x in valid)
        else [_everyone(k) if x is None else x for x, k in zip(valid, keys, strict=True)]
    )
    tensors = [[x.to(work) for x in group] for group in ([q], keys, values)]
    out, _ = eager_merge(tensors[0][0], *tensors[1:], masks, lengths, seed, support, which, n, scale, dropout)
    return out.to(q.dtype)


def _everyone(k: Tensor) -> Tensor:
    return torch.ones(1, 1, k.shape[2], dtype=torch.bool, device=k.device)


@torch.library.custom_op("subquad::merge", mutates_args=())
def merge(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    valid: list[Tensor],
    lengths: Tensor | None,
    seed: Tensor | None,
    support: str,
    which: str,
    n: int,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """out (B, H, r, d) and logsumexp (B, H, r), -inf where a row has no key; see `merge_attention`."""
    return reference.forward(q, keys, values, valid, lengths, seed, support, which, n, scale, dropout)


@torch.library.custom_op("subquad::merge_backward", mutates_args=())
def merge_backward(
    grad: Tensor,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    out: Tensor,
    lse: Tensor,
    valid: list[Tensor],
    lengths: Tensor | None,
    seed: Tensor | None,
    support: str,
    which: str,
    n: int,
    scale: float,
    dropout: float,
) -> list[Tensor]:
    """Gradients of q, all keys, all values; (out, lse) may be those of a softmax over more keys than these."""
    about = (valid, lengths, seed, support, which, n, scale, dropout)
    return reference.backward(grad, q, keys, values, out, lse, *about)


merge.register_kernel("cpu")(cpu.forward)
merge_backward.register_kernel("cpu")(cpu.backward)
merge.register_kernel("cuda")(cuda.forward)
merge_backward.register_kernel("cuda")(cuda.backward)


@merge.register_fake
def _(q, keys, values, valid, lengths, seed, support, which, n, scale, dropout):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def _flops(q, keys, values, valid, lengths, seed, support, which, n, *args, **kwargs) -> int:
    return 4 * q.shape[0] * q.shape[1] * q.shape[3] * plan_of(support, int(n), which).pairs


_derivative = derive(
    merge,
    merge_backward,
    "merge_attention",
    of=(0, 1, 2),
    behind=3,
    flops=_flops,
    call=Eager(merge_backward, cpu.backward),
)
eager_merge = Eager(merge, cpu.forward, *_derivative)
