"""The operators of the cluster room, short and slow, in plain torch: any device."""

from __future__ import annotations

import torch
from torch import Tensor


def prefix(x: Tensor, cluster: Tensor, real: Tensor, clusters: int, is_max: bool) -> Tensor:
    """The pool of the real tokens ≤ i of i's cluster, 0 where there is none: (G, n, d), one cluster after the other."""
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for c in range(clusters):
        own = cluster == c  # (G, n)
        inside = (own & real)[..., None]
        if is_max:
            pool = x.masked_fill(~inside, -torch.inf).cummax(1).values
            pool = pool.masked_fill(~inside.cumsum(1).bool(), 0)
        else:
            pool = x.masked_fill(~inside, 0).cumsum(1) / inside.cumsum(1).clamp(min=1)
        out = torch.where(own[..., None], pool, out)
    return out.contiguous()


def prefix_backward(
    grad: Tensor, x: Tensor, out: Tensor, cluster: Tensor, real: Tensor, clusters: int, is_max: bool
) -> Tensor:
    """A mean pays all its members, a maximum the latest token that set it."""
    dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for c in range(clusters):
        own = cluster == c
        inside = own & real  # (G, n)
        given = grad.masked_fill(~own[..., None], 0)
        if not is_max:
            shares = given / inside.cumsum(1).clamp(min=1)[..., None]
            dx += shares.flip(1).cumsum(1).flip(1) * inside[..., None]
            continue
        place = torch.arange(x.shape[1], device=x.device)[:, None].expand(x.shape)
        set_here = (x == out) & inside[..., None]
        winner = torch.where(set_here, place, -1).cummax(1).values  # (G, n, d): who set the maximum up to i
        dx.scatter_add_(1, winner.clamp(min=0), given * (winner >= 0))
    return dx
