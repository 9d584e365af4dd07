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


def attention(
    q: Tensor, keys: list[Tensor], values: list[Tensor], cluster: Tensor, real: Tensor, causal: bool, scale: float
) -> Tensor:
    """`cluster_attention` with all pairs written out, (G, n, d): what the tiles are checked against.

    The summary of a cluster that query i sees stands at its last real token (causal: ≤ i).
    """
    n = q.shape[1]
    time = torch.ones(n, n, dtype=torch.bool, device=q.device)
    time = time.tril() if causal else time
    same = cluster[:, :, None] == cluster[:, None]  # (G, n, n)
    seen = [time & real[:, None] & same]
    if keys[1:]:
        visible = time & real[:, None]  # (G, i, p)
        later = (
            visible[:, :, None] & same[:, None] & torch.ones_like(time).triu(1)
        )  # (G, i, p, p'): p' > p, same cluster
        seen.append(visible & ~same & ~later.any(-1))
    s = torch.cat([q @ k.mT * scale for k in keys], -1).masked_fill(~torch.cat(seen, -1), -torch.inf)
    p = s.softmax(-1).masked_fill((s == -torch.inf).all(-1, keepdim=True), 0)
    return p @ torch.cat(values, 1)
