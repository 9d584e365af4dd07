"""Abstractions: how a group of tokens becomes one query and one key (Combiner, section 3.2).

    max             q_Ω = max_{j∈Ω} q_j          k_Ω = max_{j∈Ω} k_j          elementwise
    mean            the same with the mean
    deepsets-max    q_Ω = max_{j∈Ω} ReLU(q_j W_q)   k_Ω = max_{j∈Ω} ReLU(k_j W_k)
    deepsets-mean   the same with the mean          W_q, W_k (d, d), shared by the heads

How the members of all groups are pooled at once is the kernels' business (`kernels.pools`).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["max", "mean", "deepsets-max", "deepsets-mean"]


class Abstraction(nn.Module):
    """What is pooled (`features`) and how (`pool`); with DeepSets the two matrices are its parameters."""

    def __init__(self, kind: Kind, head_dim: int) -> None:
        super().__init__()
        self.kind = kind
        self.pool: Literal["max", "mean"] = "max" if kind.endswith("max") else "mean"
        if kind.startswith("deepsets"):
            self.query_weight = nn.Parameter(torch.empty(head_dim, head_dim))
            self.key_weight = nn.Parameter(torch.empty(head_dim, head_dim))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.parameters():
            nn.init.normal_(weight, std=(2 / len(weight)) ** 0.5)  # keeps the size of x through the ReLU

    @property
    def learns(self) -> bool:
        """DeepSets: what is pooled are features, not the queries and keys themselves."""
        return self.kind.startswith("deepsets")

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What the groups pool of the queries and of the keys, (B, H, n, d) each."""
        if not self.learns:
            return q, k
        return F.relu(q @ self.query_weight.to(q.dtype)), F.relu(k @ self.key_weight.to(k.dtype))

    def extra_repr(self) -> str:
        return self.kind
