"""Low-rank updates of a layer's projections (Hu et al. 2021): W + B A, merged into W at the end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "c_attn", "qkv_proj", "query_key_value")


class LowRank(nn.Module):
    """W (a, b) → W + B A with B (a, r) = 0 at first and A (r, b)."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.active = True
        self.down = nn.Parameter(torch.randn(rank, weight.shape[1]).to(weight) / weight.shape[1] ** 0.5)
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank).to(weight))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down if self.active else weight


def add_updates(layer: nn.Module, rank: int) -> list[nn.Parameter]:
    """Give the q, k and v projections of an attention layer an update each; returns what is to be trained."""
    trained = []
    for name in PROJECTIONS:
        part = getattr(layer, name, None)
        if isinstance(part, (nn.Linear, Conv1D)):
            part.weight.requires_grad_(False)
            update = LowRank(part.weight, rank)
            parametrize.register_parametrization(part, "weight", update, unsafe=True)
            trained += [update.down, update.up]
    if not trained:
        raise ValueError(f"{type(layer).__name__} has no projection called one of {', '.join(PROJECTIONS)}")
    return trained


def merge_updates(model: nn.Module) -> None:
    """Add every update to its weight: what is left is a plain model."""
    part: Any
    for part in list(model.modules()):
        added: Any = part.parametrizations if parametrize.is_parametrized(part, "weight") else None
        if added is not None and isinstance(added.weight[0], LowRank):
            parametrize.remove_parametrizations(part, "weight", leave_parametrized=True)
