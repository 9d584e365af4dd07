"""How many scores a model computes: query–key pairs and query–summary pairs, per head and layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from subquad.attention.base import Attention


def connections(model: nn.Module, n: int, density: Sequence[Sequence[float]] | None = None) -> float:
    """Mean over the layers at length n. `density` (layers, heads) is that of the layers that sample their graphs, as
    a training step reported it.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    sampled = [layer for layer in layers if layer.capabilities.stochastic]
    known = {}
    if density is not None and len(density) == len(sampled):
        known = {layer: sum(heads) / len(heads) for layer, heads in zip(sampled, density, strict=True)}
    return sum(of_mechanism(layer, n, known.get(layer)) for layer in layers) / max(len(layers), 1)


def of_mechanism(layer: Any, n: int, density: float | None = None) -> float:
    """As the mechanism counts them; beyond what it counts, scaled by its exponent."""
    if density is not None:
        return layer.connections(n, density=density)
    longest = layer.countable
    if longest is None or n <= longest:
        return layer.connections(n)
    return layer.connections(longest) * (n / longest) ** layer.exponent
