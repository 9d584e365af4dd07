"""Abstractions: how a group of tokens becomes one query and one key (Combiner, section 3.2).

    max             q_Ω = max_{j∈Ω} q_j          k_Ω = max_{j∈Ω} k_j          elementwise
    mean            the same with the mean
    deepsets-max    q_Ω = max_{j∈Ω} ReLU(q_j W_q)   k_Ω = max_{j∈Ω} ReLU(k_j W_k)
    deepsets-mean   the same with the mean          W_q, W_k (d, d), shared by the heads
    residual-max    q_Ω = max_{j∈Ω} (q_j + b + ReLU(q_j U) V)   for the keys alike; U, V (d, d) and b (d) per query head
    residual-mean   the same with the mean
    attended        q_Ω the mean, k_Ω = Σ_{j∈Ω} p(j|Ω) k_j: key and value are of the same tokens, those that q_Ω asks for
    residual-attended   the same, of q_j + b + ReLU(q_j U) V and k_j + …

The residual maps begin as the identity (V = 0, b = 0): a pretrained model that is given them computes what it computed
with max or mean, and learns from there. The offset of the keys is what lets a head lean on summaries more or less:
q_i·b is added to the logit of every group. Grouped keys become one summary per query head.

How the members of all groups are pooled at once is the kernels' business (`kernels.pools`).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["max", "mean", "deepsets-max", "deepsets-mean", "residual-max", "residual-mean"]
Attended = Literal["attended", "residual-attended"]


class Abstraction(nn.Module):
    """What is pooled (`features`) and how (`pool`); with DeepSets and residual maps these are its parameters."""

    def __init__(self, kind: Kind | Attended, head_dim: int, num_heads: int = 1) -> None:
        super().__init__()
        self.kind = kind
        self.pool: Literal["max", "mean"] = "max" if kind.endswith("max") else "mean"
        if kind.startswith("deepsets"):
            self.query_weight = nn.Parameter(torch.empty(head_dim, head_dim))
            self.key_weight = nn.Parameter(torch.empty(head_dim, head_dim))
        elif kind.startswith("residual"):
            self.query_map, self.key_map = Residual(num_heads, head_dim), Residual(num_heads, head_dim)
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
        return self.kind.startswith(("deepsets", "residual"))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What the groups pool of the queries and of the keys, (B, H, n, d) each."""
        if not self.learns:
            return q, k
        if self.kind.startswith("residual"):
            return self.query_map(q), self.key_map(k)
        return F.relu(q @ self.query_weight.to(q.dtype)), F.relu(k @ self.key_weight.to(k.dtype))

    def extra_repr(self) -> str:
        return self.kind


class Residual(nn.Module):
    """x + b + ReLU(x U) V with U, V and b of each head; fewer key heads are repeated: (B, H or H/g, n, d) → (B, H, n, d)."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        self.outer = nn.Parameter(torch.zeros(num_heads, head_dim, head_dim))
        self.offset = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.gain = nn.Parameter(torch.ones(num_heads))
        nn.init.normal_(self.inner, std=(2 / head_dim) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        heads = len(self.inner)
        x = x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
        inner, outer, offset = (w.to(x.dtype) for w in (self.inner, self.outer, self.offset))
        return self.gain[:, None, None].to(x.dtype) * x + offset[:, None] + F.relu(x @ inner) @ outer
