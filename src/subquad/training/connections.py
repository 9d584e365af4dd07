"""How many scores a model computes: query–key pairs and query–summary pairs, per head and layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from subquad.attention.base import Attention
from subquad.attention.composite_slice import CompositeSlice
from subquad.attention.sbm import Sbm

COUNTED = 4096  # longer supports are not written out: the count of this length is scaled by the declared exponent


def connections(model: nn.Module, n: int) -> float:
    """Mean over the layers at length n (sampled graphs count the edges that random tokens would have)."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    return sum(of_mechanism(layer, n) for layer in layers) / max(len(layers), 1)


def of_mechanism(layer: Attention, n: int) -> float:
    if isinstance(layer, Sbm):
        return layer.connections(n)
    if isinstance(layer, CompositeSlice):
        return _slices(layer, n)
    if n > COUNTED:
        return of_mechanism(layer, COUNTED) * (n / COUNTED) ** layer.exponent
    report: Any = getattr(layer, "cost_report", None)
    if report is not None:  # a Combiner: tokens and summaries that the queries see, tokens in the summaries
        cost = report(n)
        return cost["terms of all queries"] + cost["members of these groups"]
    return layer.support(n).float().sum().item() / (layer.options.num_heads if layer.support(n).dim() == 3 else 1)


def _slices(layer: CompositeSlice, n: int) -> float:
    """n·αL at each scale, then all pairs of the coarsest; a causal layer computes about half of them."""
    total, o = 0.0, layer.options
    for _ in range(o.levels - 1):
        total += n * o.extension * min(o.slice_length, n)
        n = -(-n // o.slice_length)
    return (total + n * n) / (2 if o.causal else 1)
