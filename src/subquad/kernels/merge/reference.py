"""The merge operators in plain torch: the scores of one part at a time, on any device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from subquad.core.hashing import dropout_factors
from subquad.supports.parts import Part, Plan
from subquad.supports.support import plans

SOURCE = 1 << 26  # dropout counts the keys of source s from s·SOURCE on


def forward(
    q, keys, values, valid, lengths, seed, support, which, n, scale, dropout, moved=None
) -> tuple[Tensor, Tensor]:
    """`moved` (B,): by so many slots the tokens stand behind where dropout counts them."""
    out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:3], -torch.inf)
    for rows, plan in plans(q, keys, values, lengths, support, which, n):
        scored = list(_scores(q[rows], keys, valid, rows, plan, scale))
        top = q.new_full(q[rows].shape[:3], -torch.inf)  # (b, H, r)
        for _, s, at, _ in scored:
            found = s.amax(-1).flatten(2)  # (b, H, A·L)
            top[:, :, at.flatten()] = torch.maximum(top[:, :, at.flatten()], found)
        base = top.masked_fill(top == -torch.inf, 0)
        total = torch.zeros_like(top)
        for part, s, at, key in scored:
            w = (s - base[:, :, at][..., None]).exp()  # (b, H, A, L, S)
            total.index_add_(2, at.flatten(), w.sum(-1).flatten(2))
            w = w * _kept(w, part, rows, at, key, seed, dropout, moved)
            v = _take(values[part.source][rows], key, q.shape[1])
            out[rows] = out[rows].index_add(2, at.flatten(), (w @ v).flatten(2, 3))
        out[rows] /= total.masked_fill(total == 0, 1)[..., None]
        lse[rows] = torch.where(total == 0, -torch.inf, base + total.log())
    return out, lse


def backward(
    grad, q, keys, values, out, lse, valid, lengths, seed, support, which, n, scale, dropout, moved=None
) -> list[Tensor]:
    """With p = exp(s - lse): dv = (p·kept)ᵀ g, ds = p·(kept·g·v - g·out), dq = ds k, dk = dsᵀ q."""
    dq, dk, dv = q.new_zeros(q.shape), *([x.new_zeros(x.shape) for x in xs] for xs in (keys, values))
    delta = (grad * out).sum(-1)  # (B, H, r)
    base = lse.masked_fill(lse == -torch.inf, 0)
    for rows, plan in plans(q, keys, values, lengths, support, which, n):
        for part, s, at, key in _scores(q[rows], keys, valid, rows, plan, scale):
            g, x = grad[rows][:, :, at], q[rows][:, :, at]  # (b, H, A, L, d)
            k, v = (_take(z[part.source][rows], key, q.shape[1]) for z in (keys, values))
            p = (s - base[rows][:, :, at][..., None]).exp()
            kept = _kept(p, part, rows, at, key, seed, dropout, moved)
            ds = p * (g @ v.mT * kept - delta[rows][:, :, at][..., None]) * scale
            dq[rows] = dq[rows].index_add(2, at.flatten(), (ds @ k).flatten(2, 3))
            for total, change in ((dk, ds.mT @ x), (dv, (p * kept).mT @ g)):
                _add(total[part.source], rows, key, change)
    return [dq, *dk, *dv]


def _scores(
    q: Tensor, keys, valid, rows: slice, plan: Plan, scale: float
) -> Iterator[tuple[Part, Tensor, Tensor, Tensor]]:
    """Every part with its scores (b, H, A, L, S), -inf where a key is not seen, and the places of queries and keys."""
    for part in plan.parts:
        at = torch.from_numpy(part.queries.places()).to(q.device)  # (A, L)
        key = key_places(part, plan).to(q.device)  # (A, S)
        s = q[:, :, at] @ _take(keys[part.source][rows], key, q.shape[1]).mT * scale
        seen = torch.from_numpy(part.allowed()).to(q.device)  # (A or 1, L, S)
        if valid:
            exists = valid[part.source]
            exists = exists[rows] if len(exists) > 1 else exists
            seen = seen & exists[:, :, key][..., None, :]  # (b, 1, A, L, S)
        yield part, s.masked_fill(~seen, -torch.inf), at, key


def key_places(part: Part, plan: Plan) -> Tensor:
    """(A, S): the places of a part's keys in their source."""
    if not part.draws:
        return torch.from_numpy(part.keys.places())
    size = part.keys.length // part.draws
    numbers = torch.tensor(plan.drawn, device="cpu").as_strided(
        (part.keys.blocks, part.draws), (part.keys.step, 1), part.keys.start
    )
    return (numbers[..., None] * size + torch.arange(size, device="cpu")).flatten(1)


def _take(x: Tensor, key: Tensor, heads: int) -> Tensor:
    """(b, H or H/g, m, d) at (A, S): (b, H, A, S, d)."""
    x = x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
    return x[:, :, key]


def _add(total: Tensor, rows: slice, key: Tensor, change: Tensor) -> None:
    """total[rows] at `key` += change (b, H, A, S, d), summed over the heads that share a key head."""
    change = change.unflatten(1, (total.shape[1], -1)).sum(2).flatten(2, 3)
    total[rows] = total[rows].index_add(2, key.flatten(), change)


def _kept(
    like: Tensor, part: Part, rows: slice, at: Tensor, key: Tensor, seed: Tensor | None, dropout: float, moved=None
):
    """What dropout multiplies the weights of a part with, (b, H, A, L, S), or 1."""
    if not dropout:
        return 1.0
    assert seed is not None
    b, h = like.shape[:2]
    instance = torch.arange(rows.start * h, rows.start * h + b * h, device=like.device).view(b, h, 1, 1, 1)
    number = key if part.numbers is None else torch.from_numpy(part.numbers.places()).to(key.device)
    columns = (number + part.source * SOURCE)[:, None]  # (A, 1, S)
    rows_ = at[..., None] + part.origin  # (A, L, 1)
    if moved is not None:
        shift = moved[rows].view(-1, 1, 1, 1, 1)
        rows_, columns = rows_ - shift, columns - shift  # (b, 1, A, …)
    return dropout_factors(seed, dropout, instance, rows_, columns, like.dtype)
