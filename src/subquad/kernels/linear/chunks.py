"""The kernel sums in chunks: forward and backward, on (G, n, f) tensors of G = B·H independent sequences.

With w_ij = a_i·b_j e^(s_j - s_i), den_i = Σ_j w_ij and the gradient γ_i of out_i, let g_i = γ_i / den_i and
h_i = -γ_i·out_i / den_i. Then ∂w_ij = g_i·v_j + h_i, and

    ∂a_i = Σ_j ∂w_ij e^(s_j - s_i) b_j        ∂b_j = Σ_i ∂w_ij e^(s_j - s_i) a_i        ∂v_j = Σ_i w_ij g_i

The sums over j are prefix sums of b_j v_jᵀ and b_j, the sums over i are suffix sums of a_i g_iᵀ and a_i h_i.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.linear.reference import smallest

CHUNK = 64  # tokens of a chunk
SLAB = 1 << 15  # tokens that are worked on at a time, so that what lies between stays in the cache


def divide(total: Tensor, den: Tensor) -> Tensor:
    """total (…, d) / den (…) in place, 0 where the denominator vanishes."""
    return total.mul_(_inverse(den)[..., None])


def _inverse(den: Tensor) -> Tensor:
    empty = den <= smallest(den.dtype)
    return den.masked_fill(empty, 1).reciprocal_().masked_fill_(empty, 0)


def divided_gradients(grad: Tensor, out: Tensor, den: Tensor) -> tuple[Tensor, Tensor]:
    """g (G, n, d) and h (G, n) of the backward."""
    g = (grad * _inverse(den)[..., None]).contiguous()
    return g, -(g * out).sum(-1)


# ---- everyone to everyone ----


def whole_forward(a: Tensor, b: Tensor, v: Tensor, normalise: bool) -> tuple[Tensor, Tensor]:
    out = a @ (b.mT @ v)  # (G, n, d)
    if not normalise:
        return out, out.new_ones(out.shape[:2])
    den = (a @ b.sum(1)[..., None])[..., 0]  # (G, n)
    return divide(out, den), den


def whole_backward(grad: Tensor, a: Tensor, b: Tensor, v: Tensor, out: Tensor, den: Tensor, normalise: bool):
    g, h = divided_gradients(grad, out, den) if normalise else (grad, None)
    past, ahead = b.mT @ v, a.mT @ g  # (G, f, d)
    da, db, dv = g @ past.mT, v @ ahead.mT, b @ ahead
    if h is not None:
        da += h[..., None] * b.sum(1, keepdim=True)
        db += h[:, None] @ a  # (G, 1, f)
    return da, db, dv


# ---- causal ----


class _Decay(NamedTuple):
    """Scales, chunk by chunk: every factor is at most 1."""

    inside: Tensor  # (G, N, c, c): e^(s_j - s_i)
    query: Tensor  # (G, N, c, 1): from the end of the chunk before to the query
    key: Tensor  # (G, N, c, 1): from the key to the end of its chunk
    step: Tensor  # (G, N, 1, 1): from the end of the chunk before to the end of this one

    @classmethod
    def of(cls, scales: Tensor) -> _Decay:
        """scales (G, N, c), never falling."""
        last = scales[..., -1:]  # (G, N, 1)
        before = torch.cat((scales[:, :1, :1], last[:, :-1]), 1)
        inside = (scales[:, :, None, :] - scales[..., None]).clamp_(max=0).exp_()
        return cls(
            inside,
            (before - scales).exp_()[..., None],
            (scales - last).exp_()[..., None],
            (before - last).exp_()[..., None],
        )


def causal_forward(a: Tensor, b: Tensor, v: Tensor, scales: Tensor | None, normalise: bool) -> tuple[Tensor, Tensor]:
    n, out, den = a.shape[1], torch.empty_like(v), v.new_ones(v.shape[:2])
    for rows in _slabs(a):
        x, y, z = (_chunked(t[rows]) for t in (a, b, v))  # (g, N, c, f) and (g, N, c, d)
        decay = None if scales is None else _Decay.of(_chunked_scales(scales[rows]))
        weights = _inside(x @ y.mT, decay)  # (g, N, c, c)
        sums = weights @ z  # (g, N, c, d)
        from_before = x if decay is None else x * decay.query
        to_end = y if decay is None else y * decay.key
        if x.shape[1] > 1:
            sums += from_before @ _before(to_end.mT @ z, decay)
        sums = sums.flatten(1, 2)[:, :n]
        if normalise:
            ones = weights.sum(-1)  # (g, N, c)
            ones += (from_before @ _before(to_end.sum(2)[..., None], decay))[..., 0]
            den[rows] = ones.flatten(1, 2)[:, :n]
            sums = divide(sums, den[rows])
        out[rows] = sums
    return out, den


def causal_backward(
    grad: Tensor, a: Tensor, b: Tensor, v: Tensor, scales: Tensor | None, out: Tensor, den: Tensor, normalise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    n, (da, db, dv) = a.shape[1], (torch.empty_like(t) for t in (a, b, v))
    for rows in _slabs(a):
        g, h = divided_gradients(grad[rows], out[rows], den[rows]) if normalise else (grad[rows], None)
        g = _chunked(g)
        x, y, z = (_chunked(t[rows]) for t in (a, b, v))
        decay = None if scales is None else _Decay.of(_chunked_scales(scales[rows]))
        from_before = x if decay is None else x * decay.query
        to_end = y if decay is None else y * decay.key
        weights, change = x @ y.mT, g @ z.mT  # (g, N, c, c)
        past = _before(to_end.mT @ z, decay)  # (g, N, f, d)
        ahead = _after(from_before.mT @ g, decay)
        dx, dy = g @ past.mT, z @ ahead.mT
        if h is not None:
            h = _chunked(h[..., None])  # (g, N, c, 1)
            change += h
            dx += h * _before(to_end.sum(2, keepdim=True), decay)  # (g, N, 1, f)
            dy += _after((from_before * h).sum(2, keepdim=True), decay)
        if decay is not None:
            dx *= decay.query
            dy *= decay.key
        weights, change = _inside(weights, decay), _inside(change, decay)
        dx += change @ y
        dy += change.mT @ x
        dz = weights.mT @ g
        dz += to_end @ ahead
        for whole, part in ((da, dx), (db, dy), (dv, dz)):
            whole[rows] = part.flatten(1, 2)[:, :n]
    return da, db, dv


def _inside(scores: Tensor, decay: _Decay | None) -> Tensor:
    return (scores if decay is None else scores.mul_(decay.inside)).tril_()


def _before(own: Tensor, decay: _Decay | None) -> Tensor:
    """(G, N, …): what the chunks hold → the sum of all chunks before each one, at the scale of the end of the last."""
    total = torch.zeros_like(own)
    for c in range(1, own.shape[1]):
        torch.add(
            own[:, c - 1], total[:, c - 1] if decay is None else total[:, c - 1] * decay.step[:, c - 1], out=total[:, c]
        )
    return total


def _after(own: Tensor, decay: _Decay | None) -> Tensor:
    """The sum of all chunks behind each one, at the scale of the end of this one."""
    total = torch.zeros_like(own)
    for c in range(own.shape[1] - 2, -1, -1):
        torch.add(
            own[:, c + 1], total[:, c + 1] if decay is None else total[:, c + 1] * decay.step[:, c + 1], out=total[:, c]
        )
    return total


def _slabs(a: Tensor) -> Iterator[slice]:
    """As many sequences at a time as fit."""
    step = max(1, SLAB // max(1, a.shape[1]))
    return (slice(g, min(g + step, len(a))) for g in range(0, len(a), step))


def _chunked(x: Tensor) -> Tensor:
    """(g, n, f) → (g, N, c, f), filled up with 0."""
    rest = -x.shape[1] % CHUNK
    return (F.pad(x, (0, 0, 0, rest)) if rest else x).unflatten(1, (-1, CHUNK))


def _chunked_scales(scales: Tensor) -> Tensor:
    """(g, n) → (g, N, c), filled up with the last."""
    rest = -scales.shape[1] % CHUNK
    last = scales[:, -1:].expand(-1, rest)
    return (torch.cat((scales, last), 1) if rest else scales).unflatten(1, (-1, CHUNK))
