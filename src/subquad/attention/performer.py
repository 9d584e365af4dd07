"""Performer (Choromanski et al. 2021): softmax attention in expectation, through positive orthogonal random features.

    e^(q·k·scale) = E_ω[ φ(q)·φ(k) ]          φ(x)_f = e^(ω_f·x' - |x'|²/2) / √r,     x' = √scale · x

    out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)          O(n·d·r) with r features, causal too

    ω (r, d): Gaussian rows, orthogonal in blocks of d, each with the length of a Gaussian vector of its own

    kernel=relu (generalised attention):  φ(x)_f = ReLU(ω_f·x') + ε     weights of their own, no estimate of softmax

The r features are drawn when the module is made, from the option `draw`; `redraw(seed)` draws new ones. Nothing is ever
redrawn silently. They are a buffer, saved with the model.

Choices. Exponents are taken relative to a maximum. A query's own maximum cancels in the quotient. For the keys it is
M_j, the largest exponent of all keys; causal, of the keys up to j, so that no key learns of a later one, and the sums
carry e^(M_j - M_i). As in the paper's code ε is added to every feature, relative to that maximum; epsilon=0 is the
formula itself. Maxima have no gradient. √r cancels. With kernel=relu ε is added as it is (the paper's code has 10⁻³);
a query whose features are all 0 outputs 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from subquad.attention.base import Capabilities
from subquad.attention.call import Call
from subquad.attention.linear import Features, KernelAttention
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option

LOWEST = -1e30  # the maximum of no key: far below every exponent, and still a number


class Performer(KernelAttention):
    __doc__ = __doc__

    capabilities = Capabilities(cross=True)
    paper = "Choromanski et al. 2021"
    cost = "n·r"
    examples = ({}, {"features": 5, "orthogonal": False, "epsilon": 0.0}, {"kernel": "relu", "epsilon": 1e-3})

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        features: int | None = option(None, "random features r; None = ⌊d·ln d⌋", ge=1)
        orthogonal: bool = option(True, "features orthogonal in blocks of d, instead of independent")
        draw: int = option(0, "seed of the features", ge=0)
        epsilon: float = option(1e-4, "added to every feature, with softmax relative to the largest", ge=0, lt=1)
        kernel: Literal["softmax", "relu"] = option(
            "softmax", "what the features are of: softmax, or ReLU(ω·q)·ReLU(ω·k)"
        )

    projection: Tensor

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.register_buffer("projection", self._drawn(options.draw))

    @property
    def num_features(self) -> int:
        width = self.options.head_dim
        return self.options.features or max(1, int(width * math.log(width)))

    @property
    def kept_width(self) -> int:
        return self.num_features

    def redraw(self, seed: int) -> None:
        """New random features, in place."""
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be an integer ≥ 0, not {seed!r}")
        self.projection.copy_(self._drawn(seed))

    def _drawn(self, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        make = gaussian_orthogonal if self.options.orthogonal else gaussian
        return make(self.num_features, self.options.head_dim, draw).to(torch.empty(0))  # the default device

    def features(self, q: Tensor, k: Tensor, call: Call) -> Features:
        return self._features_behind(q, k, call.key_mask, None, call)

    def features_from(self, q, k, real, position, before):
        return self._features_behind(q, k, real, before)

    def _features_behind(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, before: Tensor | None, call: Call | None = None
    ) -> Features:
        """`before` (B, H, 1, 1): the largest exponent of the keys before these."""
        epsilon, real = self.options.epsilon, None if key_mask is None else key_mask[:, None, :, None]
        if self.options.kernel == "relu":
            a, b = (self._along(x).relu_() + epsilon for x in (q, k))  # (B, H, n, r), (B, H, m, r)
            return Features(a, b if real is None else b.masked_fill(~real, 0))
        own = self._along(q)  # (B, H, n, r); |q'|²/2 goes with the maximum
        a = own.sub_(own.detach().amax(-1, keepdim=True)).exp_() + epsilon
        other, half = self._along(k), k.square().sum(-1) * (self.options.softmax_scale / 2)  # (B, H, m, r), (B, H, m)
        top = other.detach().amax(-1) - half.detach()  # (B, H, m)
        top = top if real is None else top.masked_fill(~real[..., 0], LOWEST)
        top = top.clamp(min=LOWEST)
        top = top if before is None else top.maximum(before[..., 0])
        ends = None if call is None or call.shard is None else self._ends(top, call)
        top = self._running(top) if call is None or ends is None else self._running_from(top, ends, call)
        b = other.sub_((half + top)[..., None])
        b = b.exp_() if real is None else b.masked_fill_(~real, -torch.inf).exp_()
        b = b + (epsilon if real is None else epsilon * real.to(b.dtype))
        return Features(a, b, top if self.options.causal else None, ends)

    def _running(self, top: Tensor) -> Tensor:
        """The maximum of all keys, (B, H, 1); causal, of the keys up to each, (B, H, m)."""
        return top.cummax(-1).values if self.options.causal else top.amax(-1, keepdim=True)

    def _running_from(self, top: Tensor, ends: Tensor, call: Call) -> Tensor:
        """The same for the keys of one process, of a sequence that is divided."""
        if not self.options.causal:
            return ends[-1][..., None]
        own = self._running(top) if top.shape[-1] else top
        return own.maximum(ends[call.shard.rank - 1][..., None]) if call.shard.rank else own

    @staticmethod
    def _ends(top: Tensor, call: Call) -> Tensor:
        """The maximum of the keys up to the end of every process, (p, B, H); some may have no key."""
        own = torch.cat((top, top.new_full((*top.shape[:2], 1), LOWEST)), -1)
        return call.shard.told(own.amax(-1)).cummax(0).values

    def _along(self, x: Tensor) -> Tensor:
        """ω·x', (B, H, n, r): a new tensor, which may be changed in place."""
        return x @ (self.projection.to(x.dtype).mT * self.options.softmax_scale**0.5)

    def connections(self, n: int) -> float:
        return 2.0 * n * self.num_features


def gaussian(rows: int, width: int, draw: torch.Generator) -> Tensor:
    return torch.randn(rows, width, generator=draw, dtype=torch.float64, device="cpu")


def gaussian_orthogonal(rows: int, width: int, draw: torch.Generator) -> Tensor:
    """(rows, width): blocks of `width` orthogonal rows, uniform in direction, with the lengths of Gaussian vectors."""
    blocks = []
    for _ in range(-(-rows // width)):
        q, r = torch.linalg.qr(gaussian(width, width, draw))
        blocks.append((q * r.diagonal().sign()).mT)  # the signs make the directions uniform
    return torch.cat(blocks)[:rows] * gaussian(rows, width, draw).norm(dim=1, keepdim=True)
