"""`from_pretrained` of a converted model: its mechanisms are made before the weights are loaded into them."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel

from subquad.hf.conversion import attach, make, use_interface
from subquad.hf.heads import KEPT
from subquad.hf.layers import NAME, attention_layers


def restore_on_load() -> None:
    """transformers ends the construction of every model with `post_init`: there the record in the config is read."""
    original: Any = PreTrainedModel.post_init
    if getattr(original, "_subquad", False):
        return

    @wraps(original)
    def post_init(self: PreTrainedModel) -> None:
        restore(self)
        original(self)

    post_init._subquad = True  # type: ignore[attr-defined]
    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]


def restore(model: PreTrainedModel) -> None:
    """Make the mechanisms that the record names and the model does not hold yet."""
    record = getattr(model.config, NAME, None)
    if not record:
        return
    layers = {layer.name: layer for layer in attention_layers(model)}
    for name, choice in record.items():
        layer = layers.get(name) or layers.get(f"{model.base_model_prefix}.{name}")
        if layer is None or getattr(layer.module, NAME, None) is not None:
            continue  # an outer model: the inner one has made it
        with torch.device("cpu"):  # also while everything else waits on the meta device for its weights
            attach(layer.module, make(layer, choice["attention"], choice["options"], choice.get(KEPT, ())))
    if any(getattr(layer.module, NAME, None) is not None for layer in layers.values()):
        use_interface(model)
