"""Layers in which some key/value heads keep full attention: their query heads do not go through the mechanism.

A pretrained model finds single tokens far back with a few heads of a few layers. Kept full, they cost a fraction of a
layer's cache each, and the mechanism has the other heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.attention.base import Attention
from subquad.hf.layers import Layer

KEPT = "full_heads"  # of a mechanism: the key/value heads that it does not have


def full_heads(mechanism: Attention) -> tuple[int, ...]:
    return getattr(mechanism, KEPT, ())


def check_heads(layer: Layer, heads: Sequence[Any]) -> tuple[int, ...]:
    """The key/value heads of a layer that stay full, in order."""
    known = [head for head in heads if isinstance(head, int) and 0 <= head < layer.key_heads]
    if len(known) < len(heads) or len(set(heads)) < len(heads):
        raise ValueError(
            f"{layer.name}: full_heads must be different key/value heads from 0 to {layer.key_heads - 1}, not {heads}"
        )
    if len(heads) == layer.key_heads:
        raise ValueError(f"{layer.name}: full_heads names every key/value head; leave the layer out with layers=")
    return tuple(sorted(known))


def check_layers(chosen: Mapping[int, Any], converted: Sequence[int]) -> None:
    """Only layers that are converted have heads that are not."""
    for number in chosen:
        if number not in converted:
            raise ValueError(f"full_heads: layer {number} is not converted, all of its heads are full")


def split(x: Tensor, key_heads: int, kept: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Queries, keys or values (B, H, n, d) of the mechanism's heads, and of the key/value heads that are kept full."""
    rest = [head for head in range(key_heads) if head not in kept]
    groups = x.unflatten(1, (key_heads, -1))  # (B, key heads, query heads of each, n, d)
    return groups[:, rest].flatten(1, 2), groups[:, list(kept)].flatten(1, 2)


def joined(rest: Tensor, full: Tensor, key_heads: int, kept: Sequence[int]) -> Tensor:
    """The inverse of `split`."""
    order = [head for head in range(key_heads) if head not in kept] + list(kept)
    groups = torch.cat((rest, full), 1).unflatten(1, (key_heads, -1))
    return groups[:, [order.index(head) for head in range(key_heads)]].flatten(1, 2)
