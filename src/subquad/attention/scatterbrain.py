"""Scatterbrain (Chen et al. 2021): random features for all pairs, exact scores for those that hashing brings together.

    A_ij = e^(q_i·k_j·scale)       where h(q_i) = h(k_j)                       the sparse part
    A_ij = φ(q_i)·φ(k_j)           elsewhere                                   the low-rank part, as in `performer`

    out_i = Σ_j A_ij v_j / Σ_j A_ij          O(n·r·d + n²/buckets)

It is computed as the paper's low-rank product of all pairs plus a sparse correction, S_ij = e^(q_i·k_j·scale) -
φ(q_i)·φ(k_j) on the pairs that meet: the features fit the many small scores, the sparse part the few large ones.

    h(x) = argmax [xR ; -xR], R (d, buckets/2) Gaussian, the same for queries and keys

Rotations and features are drawn when the module is made, from the option `draw`, saved with it, and redrawn by
`redraw(seed)` alone. The causal form takes j ≤ i in both parts. Dropout drops a key for all queries of a head at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad.attention.base import Attention
from subquad.attention.call import Call
from subquad.attention.full import drop_keys
from subquad.attention.performer import LOWEST, gaussian, gaussian_orthogonal
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option
from subquad.kernels import devices
from subquad.kernels.clusters import met_sums
from subquad.kernels.linear import kernel_sums
from subquad.kernels.linear.reference import kernel_weights

ROUNDING = 32  # the rounding of a sum, in units of its last digit


class Scatterbrain(Attention):
    __doc__ = __doc__

    family = "kernel"
    theory_reason = "its weights are products of features, except where hashing brings two tokens together"
    paper = "Chen et al. 2021"
    cost = "n·r + n²/buckets"
    exponent = 2.0
    positional = False
    data_dependent = True
    examples = ({"buckets": 4}, {"buckets": 2, "features": 12})
    gallery = {"buckets": 8}
    picture_note = (
        "Who meets whom exactly follows from hashes of the tokens. Here the tokens are dealt out to the buckets; "
        "all others are seen through random features."
    )

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        buckets: int = option(64, "buckets that queries and keys are hashed to, even", ge=2)
        features: int | None = option(None, "random features r; None = head_dim", ge=1)
        draw: int = option(0, "seed of features and rotations", ge=0)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.buckets % 2:
                raise ValueError(f"buckets must be even, not {self.buckets}")

    projection: Tensor
    rotation: Tensor

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.num_features = options.features or options.head_dim
        projection, rotation = self._drawn(options.draw)
        self.register_buffer("projection", projection)  # (r, d)
        self.register_buffer("rotation", rotation)  # (d, buckets/2)

    def _drawn(self, seed: int) -> tuple[Tensor, Tensor]:
        draw, width = torch.Generator().manual_seed(seed), self.options.head_dim
        kind = torch.empty(0)  # of the default type, on the default device
        projection = gaussian_orthogonal(self.num_features, width, draw).to(kind)
        return projection, gaussian(width, self.options.buckets // 2, draw).to(kind)

    def redraw(self, seed: int) -> None:
        """New random features and rotations, in place."""
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be an integer ≥ 0, not {seed!r}")
        for mine, new in zip((self.projection, self.rotation), self._drawn(seed), strict=True):
            mine.copy_(new)

    # ---- both parts ----

    @torch.no_grad()
    def hashes(self, x: Tensor) -> Tensor:
        """The bucket of every query or key, int64 (B, H, n)."""
        along = x @ self.rotation.to(x.dtype)  # (B, H, n, buckets/2)
        nearest = along.abs().argmax(-1)
        return nearest + self.rotation.shape[1] * (along.gather(-1, nearest[..., None])[..., 0] < 0)

    def _exponents(self, x: Tensor) -> Tensor:
        """ω·x' - |x'|²/2 with x' = √scale · x, (B, H, n, r)."""
        x = x * self.options.softmax_scale**0.5
        return x @ self.projection.to(x.dtype).mT - x.square().sum(-1, keepdim=True) / 2

    def _features(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """a (B, H, n, r), b (B, H, n, r) and scales of queries (B, H, n) and keys (B, H, n, or 1 for one and all):

        φ(q_i)·φ(k_j) = a_i·b_j e^(s_i + t_j), with the largest entries near 1. Maxima have no gradient: they cancel.
        """
        own, other = self._exponents(q), self._exponents(k)
        high = own.detach().amax(-1)
        if call.exists is not None:
            other = other.masked_fill(~call.exists[..., None], -torch.inf)
        top = other.detach().amax(-1).clamp(min=LOWEST)
        top = top.cummax(-1).values if self.options.causal else top.amax(-1, keepdim=True)
        b = (other - top[..., None]).exp()
        return (own - high[..., None]).exp() / self.num_features, b, high, top

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        kind, work, causal = q.dtype, torch.promote_types(q.dtype, torch.float32), self.options.causal
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = q.to(work), k.to(work), drop_keys(v.to(work), call)
            a, b, high, top = self._features(q, k, call)
            values = torch.cat((v, _ones(v, call)), -1)  # (B, H, n, d + 1): the last column counts the weight
            scales = top if causal else None
            rough = kernel_sums(a, b, values, scales, causal=causal, normalise=False)
            where = (self.hashes(q), self.hashes(k), _real(k, call), self.options.buckets)
            exact, lse, over = met_sums(
                q, k, values, a, b, scales, where, causal=causal, scale=self.options.softmax_scale
            )  # (B, H, n, d + 1), (B, H, n), (B, H, n, d + 1)
            return _merged(exact, lse, _difference(rough, over), high + top).to(kind)

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        work = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(work), k.to(work)
        a, b, high, top = self._features(q, k, call)
        rough = kernel_weights(a, b, top if self.options.causal else None, causal=self.options.causal)
        met = self.hashes(q)[..., None] == self.hashes(k)[..., None, :]  # (B, H, n, n)
        seen = self.support(q.shape[2]).to(q.device) & _real(k, call)[:, None, None]
        scores = (q @ k.mT * self.options.softmax_scale).masked_fill(~(met & seen), -torch.inf)
        top_score = torch.maximum(scores.detach().amax(-1), high + top)[..., None]  # what both parts are relative to
        far = rough * ((high + top)[..., None] - top_score).exp()
        weights = torch.where(met, (scores - top_score).exp(), far) * seen
        return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(work).tiny)

    # ---- pictures and counts ----

    def host_reads(self, padded: bool, dtype: torch.dtype = torch.float32, length: int | None = None) -> str:
        """Who meets is all that bounds the work of the sparse part: up to n² pairs, as a rule n²/buckets."""
        return "" if devices.is_short(length) else "how many queries and keys every bucket has"

    def picture(self, n: int) -> Tensor:
        """Queries and keys dealt out to the buckets; the real ones depend on q and k."""
        place = torch.arange(n)
        met = (place * 7 // 3 % self.options.buckets)[:, None] == place * 5 // 2 % self.options.buckets
        return torch.where(met, 1, 2) * self.support(n)

    def summaries(self, n: int) -> tuple[list[Sequence[int]], list[list[int]]]:
        """The random features sum over everybody whom the query does not meet."""
        far = self.picture(n) == 2
        sets, which = far.unique(dim=0, return_inverse=True)
        numbers = [[number] if far[i].any() else [] for i, number in enumerate(which.tolist())]
        return [row.nonzero()[:, 0].tolist() for row in sets], numbers

    def connections(self, n: int) -> float:
        return 2.0 * n * self.num_features + n * n / self.options.buckets / (2 if self.options.causal else 1)


def _real(k: Tensor, call: Call) -> Tensor:
    """Which keys exist, bool (B, n)."""
    everyone = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    return everyone if call.key_mask is None else call.key_mask


def _ones(v: Tensor, call: Call) -> Tensor:
    return _real(v, call)[:, None, :, None].to(v.dtype).expand(*v.shape[:3], 1)


def _difference(rough: Tensor, over: Tensor) -> Tensor:
    """What the features give to the pairs that do not meet, (B, H, n, d + 1); the last column counts the weight.

    Where nearly all of it belongs to pairs that meet, what is left is rounding: it becomes 0, or it would outweigh
    exact scores that the features overestimate.
    """
    rest, kind = rough - over, torch.finfo(rough.dtype)
    noise = (ROUNDING * kind.eps * rough[..., -1:].detach()).clamp(min=kind.tiny**0.5)  # gradients stay finite
    return rest.masked_fill(rest[..., -1:].detach() <= noise, 0)


def _merged(exact: Tensor, lse: Tensor, rest: Tensor, scales: Tensor) -> Tensor:
    """The quotient of the sums: exact (normalised, with its logsumexp) and rest · e^scales; the last column counts."""
    top = torch.maximum(lse.detach(), scales + rest[..., -1].detach().log())  # (B, H, n): the larger part has weight 1
    empty = (top == -torch.inf)[..., None]
    top = top.masked_fill(top == -torch.inf, 0)
    behind = (scales - top).masked_fill(rest[..., -1] == 0, 0)  # of 0 any number of times: it may be large
    total = exact * (lse - top).exp()[..., None] + rest * behind.exp()[..., None]
    return (total[..., :-1] / total[..., -1:].masked_fill(empty, 1)).masked_fill(empty, 0)
