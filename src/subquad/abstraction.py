"""Abstractions: how a group of tokens becomes one query and one key (Combiner, section 3.2).

    max             q_Ω = max_{j∈Ω} q_j          k_Ω = max_{j∈Ω} k_j          elementwise
    mean            the same with the mean
    deepsets-max    q_Ω = max_{j∈Ω} ReLU(q_j W_q)   k_Ω = max_{j∈Ω} ReLU(k_j W_k)
    deepsets-mean   the same with the mean          W_q, W_k (d, d), shared by the heads
    residual-max    q_Ω = max_{j∈Ω} (g q_j + b + ReLU(q_j U) V)   keys alike; U, V (d, d), b (d) and g per query head
    residual-mean   the same with the mean
    attended        q_Ω = c·mean_{j∈Ω} q_j              k_Ω = Σ_{j∈Ω} p(j|Ω) k_j
    residual-attended   the same, of g q_j + b + ReLU(q_j U) V with g = c at first, and of k_j + …

A mean of 32 keys is close to none of them. With an attended abstraction the key and the value of a group are of the
same tokens, those that q_Ω asks for, and the sharper it asks (c, the option `sharpness`) the fewer: in the limit a
group stands for its most salient token. The residual maps begin as the identity (V = 0, b = 0, g = 1): a pretrained
model that is given them computes what it computed with max or mean, and learns from there. The offset of the keys lets
a head lean on summaries more or less: q_i·b is added to the logit of every group. `calibrate` makes the offset of the
queries what the head asks on average.

Grouped keys become one summary per query head, unless `shared_heads` neighbouring heads ask together, with the mean of
their queries: where they also share their key and value, one summary serves them all.

How the members of all groups are pooled at once is the kernels' business (`kernels.pools`).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["max", "mean", "deepsets-max", "deepsets-mean", "residual-max", "residual-mean"]
AnyKind = Literal[Kind, "attended", "residual-attended"]


class Abstraction(nn.Module):
    """What is pooled (`features`) and how (`pool`); with DeepSets and residual maps these are its parameters."""

    def __init__(
        self, kind: AnyKind, head_dim: int, num_heads: int = 1, sharpness: float = 1.0, shared_heads: int = 1
    ) -> None:
        super().__init__()
        if num_heads % shared_heads:
            raise ValueError(f"shared_heads must divide num_heads={num_heads}, not be {shared_heads}")
        self.shared_heads = shared_heads
        self.kind, self.sharpness = kind, sharpness if kind.endswith("attended") else 1.0
        self.pool: Literal["max", "mean"] = "max" if kind.endswith("max") else "mean"
        if kind.startswith("deepsets"):
            self.query_weight = nn.Parameter(torch.empty(head_dim, head_dim))
            self.key_weight = nn.Parameter(torch.empty(head_dim, head_dim))
        elif kind.startswith("residual"):
            self.query_map = Residual(num_heads // shared_heads, head_dim, self.sharpness)
            self.key_map = Residual(num_heads // shared_heads, head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.kind.startswith("deepsets"):
            for weight in self.parameters():
                nn.init.normal_(weight, std=(2 / len(weight)) ** 0.5)  # keeps the size of x through the ReLU

    @property
    def attended(self) -> bool:
        """Is the key of a group what its query finds among its members?"""
        return self.kind.endswith("attended")

    @property
    def learns(self) -> bool:
        """What is pooled are features, not the queries and keys themselves."""
        return self.kind != self.pool  # all but max and mean

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What the groups pool of the queries and of the keys, (B, H, n, d) each; H / shared_heads of them where so
        many heads share their keys.
        """
        q = self._together(q, k.shape[1])
        if not self.learns:
            return q, k
        if self.kind.startswith("residual"):
            return self.query_map(q), self.key_map(k)
        if self.attended:
            return q * self.sharpness, k
        return F.relu(q @ self.query_weight.to(q.dtype)), F.relu(k @ self.key_weight.to(k.dtype))

    def _together(self, q: Tensor, key_heads: int) -> Tensor:
        """The mean query of neighbouring heads, once where they share their keys, else for each of them."""
        if self.shared_heads == 1:
            return q
        mean = q.unflatten(1, (-1, self.shared_heads)).mean(2)
        return mean if mean.shape[1] % key_heads == 0 else mean.repeat_interleave(self.shared_heads, 1)

    @torch.no_grad()
    def calibrate(self, query: Tensor) -> None:
        """Ask what the head asks on average: `query` (H, d) is the mean of its queries over some text.

        Queries and keys that were rotated by their positions keep in this mean what does not depend on the distance.
        """
        if not (self.attended and self.learns and self.kind.startswith("residual")):
            raise ValueError(f"abstraction={self.kind} has nothing to calibrate: it must be residual-attended")
        self.query_map.offset.copy_(self.sharpness * query.unflatten(0, (-1, self.shared_heads)).mean(1))
        self.query_map.gain.fill_(1.0)

    def extra_repr(self) -> str:
        return self.kind


class Residual(nn.Module):
    """g x + b + ReLU(x U) V with g, b, U and V of each head, or of neighbouring ones, or several of each x:
    (B, h, …, d) → (B, max(h, H), …, d).
    """

    def __init__(self, num_heads: int, head_dim: int, gain: float = 1.0) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        self.outer = nn.Parameter(torch.zeros(num_heads, head_dim, head_dim))
        self.offset = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.gain = nn.Parameter(torch.full((num_heads,), float(gain)))
        nn.init.normal_(self.inner, std=(2 / head_dim) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        heads, between = max(len(self.inner), x.shape[1]), x.shape[2:-1]
        x = _heads(x, heads, 1).flatten(2, -2)  # (B, H, n, d)
        weights = (self.inner, self.outer, self.offset, self.gain)
        inner, outer, offset, gain = (_heads(w.to(x.dtype), heads, 0) for w in weights)
        out = gain[:, None, None] * x + offset[:, None] + F.relu(x @ inner) @ outer
        return out.unflatten(2, between)


def _heads(x: Tensor, heads: int, dim: int) -> Tensor:
    return x if x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)
