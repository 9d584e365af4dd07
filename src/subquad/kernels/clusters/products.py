"""The softmax of one batch of tiles, and what it is made of: rows taken, sums added, tiles merged by their logsumexps.

Tokens are numbered through all sequences; behind the last one stands nobody.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.clusters.layout import Tiles


def flattened(x: Tensor) -> Tensor:
    """(G, n, d) → (G·n, d), with a row of 0 behind it for nobody where the last token would not do.

    What nobody has is multiplied by 0: any finite number does, and saves a copy. A GPU is not asked, only to be waited
    for.
    """
    flat = x.flatten(0, 1)
    finite = devices.is_host(flat) and bool(flat[-1].isfinite().all())
    return flat if finite else torch.cat((flat, flat.new_zeros(1, x.shape[2])))


def take(x: Tensor, where: Tensor) -> Tensor:
    """x (N or N + 1, …) at `where` (S, R): (S, R, …)."""
    return x.index_select(0, where.flatten().clamp(max=len(x) - 1)).unflatten(0, where.shape)


def add(total: Tensor, where: Tensor, change: Tensor) -> None:
    """total (N + 1, d) += change (S, R, d)."""
    total.index_add_(0, where.flatten(), change.flatten(0, 1))


def softmax(tiles: Tiles, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax over the keys of the tile (S, R, M) and its logsumexp (S, R, 1), -inf where none is seen.

    The largest weight is 1 / Σ exp(s - top), hence the logsumexp. A row that sees nothing has weights that count for
    nothing: they are merged with the logsumexp.
    """
    hidden = tiles.hidden.to(q.dtype).mul_(torch.finfo(q.dtype).min).mul_(2)  # 0 or -inf, faster than masked_fill_
    s = torch.baddbmm(hidden, q, k.mT, alpha=scale)
    if tiles.selves is not None:
        s.scatter_(-1, tiles.selves[..., None], -torch.inf)
    top = s.amax(-1, keepdim=True)
    empty = top == -torch.inf
    s[..., :1].masked_fill_(empty, 0)
    p = s.softmax(-1)
    return p, (top - p.amax(-1, keepdim=True).log_()).masked_fill_(empty, -torch.inf)


def absorb(out: Tensor, lse: Tensor, rows: Tensor, new: Tensor, here: Tensor) -> None:
    """Merge what some rows found in a tile, new (S, R, d) with logsumexp here (S, R, 1), into out and lse."""
    before = take(lse, rows)[..., None]
    after = torch.logaddexp(before, here)
    base = after.masked_fill(after == -torch.inf, 0)
    merged = new.mul_((here - base).exp_()).addcmul_(take(out, rows), (before - base).exp_())
    out.index_copy_(0, rows.flatten(), merged.flatten(0, 1))
    lse.index_copy_(0, rows.flatten(), after.flatten())
