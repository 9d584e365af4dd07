"""Low-rank updates of a layer's projections (Hu et al. 2021): W + B A, merged into W at the end.

And the original inside a converted model: the same weights with full attention, without a second copy of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from subquad.attention.base import Attention
from subquad.hf.layers import NAME

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


@contextmanager
def original(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what it computed before it was converted: full attention, no low-rank updates."""
    holders = [
        (part, part._modules[NAME]) for part in model.modules() if isinstance(part._modules.get(NAME), Attention)
    ]
    updates = [part for part in model.modules() if isinstance(part, LowRank)]
    for part, _ in holders:
        part._modules[NAME] = None
    for update in updates:
        update.active = False
    try:
        yield
    finally:
        for part, mechanism in holders:
            part._modules[NAME] = mechanism
        for update in updates:
            update.active = True
