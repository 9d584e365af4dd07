"""Which layers of a transformers model compute attention, what they compute, and what no mechanism can honour."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

NAME = "subquad"  # of three things: the attention function, the mechanism inside a layer, the record in the config


class Layer(NamedTuple):
    """An attention layer that calls transformers' AttentionInterface."""

    name: str  # inside the model
    module: nn.Module
    num_heads: int
    key_heads: int  # fewer where query heads share them
    head_dim: int
    causal: bool
    cross: bool
    dropout: float


def attention_layers(model: PreTrainedModel) -> list[Layer]:
    """Every attention layer of the model, in order."""
    found = [(name, part) for name, part in model.named_modules() if asks_interface(part)]
    return [_describe(model, name, part) for name, part in found]


def asks_interface(module: nn.Module) -> bool:
    """Does its forward look up the attention function by name?"""
    forward = inspect.unwrap(type(module).forward)
    return "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ())


def check_model(model: Any) -> None:
    """Refuse what would ignore the interface."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers model (PreTrainedModel), not {type(model).__name__}")
    if not model._can_set_attn_implementation() or not any(asks_interface(part) for part in model.modules()):
        raise ValueError(
            f"{type(model).__name__} does not ask transformers' AttentionInterface for its attention: another one "
            "would be ignored, so it cannot be converted"
        )


def check_layer(layer: Layer) -> None:
    """Refuse what a mechanism cannot honour: biases, caps, windows, unequal widths."""
    module, config = layer.module, getattr(layer.module, "config", None)
    where = f"{layer.name} ({type(module).__name__})"
    takes = inspect.signature(type(module).forward).parameters
    if "position_bias" in takes or getattr(module, "has_relative_attention_bias", False):
        raise ValueError(f"{where}: relative position biases are not supported by any mechanism")
    if (
        getattr(module, "rel_pos_h", None) is not None
        or getattr(module, "relative_position_bias_table", None) is not None
    ):
        raise ValueError(f"{where}: relative position biases are not supported by any mechanism")
    for name in ("attn_logit_softcapping", "softcap", "attn_logit_softcap"):
        if getattr(module, name, None) is not None or (
            name == "attn_logit_softcapping" and getattr(config, name, None)
        ):
            raise ValueError(f"{where}: a soft cap on the scores ({name}) is not supported by any mechanism")
    if getattr(module, "sinks", None) is not None:
        raise ValueError(f"{where}: learned sinks in the softmax (sinks) are not supported by any mechanism")
    window = getattr(module, "sliding_window", None)
    if not hasattr(module, "layer_type") and not hasattr(module, "is_sliding"):
        window = window or getattr(config, "sliding_window", None)  # Mistral hands on the config's
    if window is not None:
        raise ValueError(
            f"{where}: a sliding window ({window}) is not supported; keep the layer as it is with layers=, or set "
            "sliding_window=None in the config before the model is made"
        )
    if getattr(module, "v_head_dim", layer.head_dim) != layer.head_dim:
        raise ValueError(f"{where}: values of another width than the keys (v_head_dim) are not supported")


def _describe(model: PreTrainedModel, name: str, module: nn.Module) -> Layer:
    config = getattr(module, "config", model.config)
    heads = _first(module, ("num_heads", "num_attention_heads", "n_heads", "n_head"))
    heads = heads or _first(config, ("num_attention_heads", "n_head", "num_heads"))
    width = _first(module, ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim"))
    if not heads or not width:
        raise ValueError(f"{name} ({type(module).__name__}): the number or the width of its heads was not found")
    key_heads = _first(module, ("num_key_value_heads",)) or _first(config, ("num_key_value_heads",)) or heads
    kind = type(module).__name__.lower()
    last = name.rpartition(".")[2].lower()
    cross = bool(getattr(module, "is_cross_attention", False)) or "cross" in kind
    cross = cross or last in ("encoder_attn", "encdecattention", "crossattention", "cross_attn", "cross_attention")
    causal = bool(getattr(module, "is_causal", False)) and not cross
    return Layer(name, module, heads, key_heads, width, causal, cross, _dropout(module))


def _dropout(module: nn.Module) -> float:
    """The dropout that the layer hands to the attention function in training."""
    for name in ("attention_dropout", "attn_dropout", "dropout", "dropout_p", "dropout_prob"):
        found = getattr(module, name, None)
        if isinstance(found, nn.Dropout):
            return float(found.p)
        if isinstance(found, (int, float)) and not isinstance(found, bool):
            return float(found)
    return 0.0


def _first(holder: Any, names: tuple[str, ...]) -> int | None:
    return next((found for name in names if isinstance(found := getattr(holder, name, None), int)), None)
