"""Parts with dropout: scores of a few blocks at a time, which stay in the cache, and one pass of Numba over them.

A weight is dropped by a hash of (seed, instance, query, key), so that the backward pass, another batch or another
process drops the same ones; see `core.hashing`. The logsumexp is that of all keys: dropout comes after the softmax.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.core.hashing import chance, dropout_seed, halves, stream
from subquad.kernels.merge.reference import SOURCE, key_places
from subquad.kernels.merge.views import grid_view
from subquad.kernels.parallel import exp, kernel, run

BLOCK = 1 << 19  # scores at a time


class Settings(NamedTuple):
    """The dropout of one frame."""

    seed: int
    dropout: float
    scale: float
    instances: Tensor  # (G,)

    @classmethod
    def of(cls, seed: Tensor | None, dropout: float, scale: float, instances: Tensor) -> Settings | None:
        if not dropout:
            return None
        assert seed is not None
        return cls(int(dropout_seed(seed)) % (1 << 64), dropout, scale, instances)

    def attend(self, q: Tensor, views) -> tuple[Tensor, Tensor]:
        """Output (G, A, L, d), with weights dropped, and logsumexp (G, A, L), of all of them."""
        x = grid_view(q, views.part.queries)  # (G, A, L, d)
        out, lse = x.new_empty(x.shape[:3] + views.values.shape[3:]), x.new_empty(x.shape[:3])
        for a, where in self._chunks(views, x):
            s = x[:, a] @ views.keys[:, a].mT  # (G, a, L, S)
            total = s.new_empty(s.shape[:3])
            run(_forward, s.numpy(), *where, total.numpy(), *self._numbers(s))
            lse[:, a], out[:, a] = total, s @ views.values[:, a]
        return out, lse

    def backward(self, g: Tensor, q: Tensor, out: Tensor, lse: Tensor, views) -> tuple[Tensor, Tensor, Tensor]:
        dq = q.new_empty(q.shape)
        dk, dv = (x.new_empty(x.shape) for x in (views.keys, views.values))
        delta = (g * out).sum(-1)  # (G, A, L)
        for a, where in self._chunks(views, q):
            s, dp = q[:, a] @ views.keys[:, a].mT, g[:, a] @ views.values[:, a].mT  # (G, a, L, S)
            given = (x[:, a].contiguous().numpy() for x in (lse[..., 0], delta))
            run(_backward, s.numpy(), dp.numpy(), *where, *given, *self._numbers(s))
            dq[:, a] = s @ views.keys[:, a]
            dk[:, a], dv[:, a] = s.mT @ q[:, a], dp.mT @ g[:, a]
        return dq, dk, dv

    def _chunks(self, views, q: Tensor):
        """Some blocks at a time: which, and their (mask, instances, query places, key numbers)."""
        part, mask = views.part, views.mask
        if mask is None and part.is_triangle:
            rows = part.queries.length
            mask = q.new_full((rows, rows), -torch.inf).triu_(1)[None, None]
        mask = q.new_zeros(1, 1, 1, 1) if mask is None else mask  # (G or 1, A or 1, L or 1, S)
        mask = mask.expand(*mask.shape[:3], part.keys.length) if mask.shape[3] == 1 else mask
        numbers = key_places(part, views.plan).numpy() if part.numbers is None else part.numbers.places()  # (A, S)
        places, numbers = part.queries.places() + part.origin, numbers + part.source * SOURCE  # (A, L), (A, S)
        step = max(1, BLOCK // (q.shape[0] * part.queries.length * part.keys.length))
        for first in range(0, part.queries.blocks, step):
            a = slice(first, min(first + step, part.queries.blocks))
            bias = mask if mask.shape[1] == 1 else mask[:, a]
            yield a, (bias.contiguous().numpy(), self.instances.numpy(), places[a], numbers[a])

    def _numbers(self, s: Tensor):
        kind = s.numpy().dtype.type
        return np.uint64(self.seed), kind(self.scale), np.float32(self.dropout), kind(1 / (1 - self.dropout))


@kernel
def _forward(s, mask, instances, places, numbers, lse, seed, scale, dropout, up):
    """s: products → weights, dropped and scaled; lse: of the weights before dropout."""
    graphs, blocks, rows, keys = s.shape
    nothing = s.dtype.type(-np.inf)
    for task in numba.prange(graphs * blocks * rows):
        t, a, r = task // (blocks * rows), task // rows % blocks, task % rows
        row = s[t, a, r]
        bias = mask[t % mask.shape[0], a % mask.shape[1], r % mask.shape[2]]
        top, total = nothing, s.dtype.type(0)
        for j in range(keys):
            row[j] = row[j] * scale + bias[j]
        for j in range(keys):
            top = row[j] if row[j] > top or row[j] != row[j] else top  # NaN stays NaN
        if top == nothing:
            row[:] = 0
            lse[t, a, r] = nothing
            continue
        for j in range(keys):
            row[j] = exp(row[j] - top)
        for j in range(keys):
            total += row[j]
        lse[t, a, r] = top + np.log(total)
        share = up / total
        low, high = halves(stream(seed, instances[t], places[a, r]))
        for j in range(keys):
            row[j] = row[j] * share if chance(low, high, numbers[a, j]) >= dropout else s.dtype.type(0)


@kernel
def _backward(s, dp, mask, instances, places, numbers, lse, delta, seed, scale, dropout, up):
    """s: products → ds · scale; dp: dout·v → weights, dropped and scaled. lse and delta are those of the whole row."""
    graphs, blocks, rows, keys = s.shape
    zero = s.dtype.type(0)
    for task in numba.prange(graphs * blocks * rows):
        t, a, r = task // (blocks * rows), task // rows % blocks, task % rows
        row, grad = s[t, a, r], dp[t, a, r]
        bias = mask[t % mask.shape[0], a % mask.shape[1], r % mask.shape[2]]
        base, less = lse[t, a, r], delta[t, a, r]
        low, high = halves(stream(seed, instances[t], places[a, r]))
        for j in range(keys):
            row[j] = min(zero, row[j] * scale + bias[j] - base)  # rounding may lift it above 0
        for j in range(keys):
            row[j] = exp(row[j])
        for j in range(keys):
            kept = up if chance(low, high, numbers[a, j]) >= dropout else zero
            p = row[j]
            row[j] = p * (grad[j] * kept - less) * scale
            grad[j] = p * kept
