"""The original inside a converted model: the same weights with full attention, without a second copy of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from subquad.attention.base import Attention
from subquad.hf.lowrank import LowRank
from subquad.hf.naming import NAME


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
