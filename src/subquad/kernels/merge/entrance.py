"""`merge_attention`: the entrance to the operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.kernels.merge.op import eager_merge


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
