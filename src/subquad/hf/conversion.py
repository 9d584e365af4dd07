"""`convert`: another attention in the layers of a pretrained transformers model, in place.

`from_pretrained` of a converted model: its mechanisms are made before the weights are loaded into them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from subquad.attention.base import Attention
from subquad.attention.registry import attention, mechanism
from subquad.core.options import split_spec
from subquad.hf.caching import install_states
from subquad.hf.heads import KEPT, check_heads, check_layers
from subquad.hf.layers import NAME, Layer, attention_layers, check_layer, check_model

Model = TypeVar("Model", bound=PreTrainedModel)
Specs = str | Mapping[int, str]


def convert(
    model: Model,
    spec: Specs,
    *,
    layers: Iterable[int] | None = None,
    full_heads: Mapping[int, Sequence[int]] | None = None,
    **options: Any,
) -> Model:
    """Replace the attention of the layers of a transformers model, in place, and return the model.

        convert(model, "combiner-window:span=32,window=256,sinks=4")
        convert(model, "combiner-window", span=32, window=256, layers=range(2, 28))    # the others keep their attention
        convert(model, {0: "full", 1: "combiner-fixed:span=64"})                       # a spec for each layer

    Layers are numbered in the order of `converted_layers`: self-attention only, an encoder's before a decoder's;
    cross-attention keeps its attention. `full_heads={15: [2], 17: [0, 1]}` names key/value heads of converted layers
    that keep full attention, with the query heads that share them. The model keeps its weights;
    parameters of the mechanism are new (`layer.subquad`), and are trained and saved with the model. The mechanism
    receives queries and keys as the layer computes them: projected, normalised, rotated. Causality, number and width of
    heads and dropout are those of the layer.

    What is not supported raises an error that names it, before anything is changed. The choice is recorded in the
    config, so that `from_pretrained` restores it when `subquad.hf` is imported. A model that was trained with full
    attention computes another function now: `subquad perplexity` measures what that costs, `subquad adapt` recovers
    part of it.
    """
    check_model(model)
    targets = self_attention(model)
    specs = _specs(spec, layers, len(targets))
    if not isinstance(full_heads, Mapping | None):
        raise TypeError(f"full_heads must be a dictionary from layers to lists of heads, or None, not {full_heads!r}")
    kept = {_number(i, len(targets)): heads for i, heads in (full_heads or {}).items()}
    made: dict[str, Attention] = {}
    record: dict[str, dict[str, Any]] = {}
    for number, chosen in specs.items():  # all are made first: an error changes nothing
        layer = targets[number]
        if split_spec(chosen)[0] == "full" and not options:
            continue  # full attention is what the layer has
        check_layer(layer)
        given = _given(chosen, options, number)
        made[layer.name] = make(layer, chosen, given, kept.get(number, ()))
        record[_base_name(model, layer.name)] = {"attention": chosen, "options": given}
        if kept.get(number):
            record[_base_name(model, layer.name)][KEPT] = list(kept[number])
    check_layers(kept, [number for number in specs if targets[number].name in made])
    if not made:
        raise ValueError("spec leaves every layer as it is: there is nothing to convert")
    revert(model)
    for name, module in made.items():
        attach(model.get_submodule(name), module)
    setattr(model.config, NAME, record)
    use_interface(model)
    return model


def converted_layers(model: PreTrainedModel) -> dict[str, Attention | None]:
    """The self-attention layers in the order of their numbers, each with its mechanism; None = its own attention."""
    return {layer.name: getattr(layer.module, NAME, None) for layer in self_attention(model)}


def revert(model: Model) -> Model:
    """Give every layer its own attention back, in place; parameters of the mechanisms are dropped."""
    owners = set()
    for part in model.modules():
        if isinstance(getattr(part, NAME, None), Attention):
            delattr(part, NAME)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and getattr(part.config, NAME, None) is not None:
            owners.add(part)
    for part in owners:
        setattr(part.config, NAME, None)
    if getattr(model.config, "_attn_implementation", None) == NAME:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    return model


def self_attention(model: PreTrainedModel) -> list[Layer]:
    return [layer for layer in attention_layers(model) if not layer.cross]


def make(layer: Layer, spec: str, options: Mapping[str, Any], kept: Sequence[int] = ()) -> Attention:
    """The mechanism of a layer, on the layer's device, in its precision; key/value heads `kept` are not its own."""
    name = split_spec(spec)[0]
    able = mechanism(name).capabilities
    where = f"{layer.name} ({type(layer.module).__name__})"
    if able.level == "layer":
        raise ValueError(
            f"{where}: {name} works on tokens and projects them itself; it cannot take a layer's q, k and v"
        )
    for key in ("num_heads", "head_dim"):
        if key in options:
            raise TypeError(f"{where}: {key} cannot be given: the layer's own is kept")
    given: dict[str, Any] = {"causal": layer.causal, "dropout": layer.dropout, **options}
    longest = getattr(getattr(layer.module, "config", None), "max_position_embeddings", None)
    if able.needs_max_length and "max_length" not in {*given, *split_spec(spec)[1]}:
        given["max_length"] = longest
    heads = check_heads(layer, kept)
    own = layer.num_heads - len(heads) * layer.num_heads // layer.key_heads
    try:
        made = attention(spec, num_heads=own, head_dim=layer.head_dim, **given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
    setattr(made, KEPT, heads)
    like = next(layer.module.parameters())
    made = made.to(dtype=like.dtype) if like.is_meta else made.to(device=like.device, dtype=like.dtype)
    return made.train(layer.module.training)


def attach(layer: nn.Module, made: Attention) -> None:
    layer.add_module(NAME, made)


def use_interface(model: PreTrainedModel) -> None:
    """Let the (sub)models that hold converted layers ask for our attention, and keep states where they decode."""
    owners = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    holders = [part for part in owners if any(isinstance(getattr(x, NAME, None), Attention) for x in part.modules())]
    for part in holders:
        part.config._attn_implementation_internal = NAME
    for part in model.modules():
        if isinstance(getattr(part, NAME, None), Attention) and getattr(part, "config", None) is not None:
            part.config._attn_implementation_internal = NAME
    inner = [part for part in holders if not any(x is not part and x in holders for x in part.modules())]
    for part in inner:
        install_states(part)


def _specs(spec: Specs, layers: Iterable[int] | None, count: int) -> dict[int, str]:
    if isinstance(layers, str) or not isinstance(layers, Iterable | None):
        raise TypeError(f"layers must be a list of integers from 0 to {count - 1}, or None for all, not {layers!r}")
    if isinstance(spec, str):
        numbers = range(count) if layers is None else layers
        specs = {_number(i, count): spec for i in numbers}
    elif isinstance(spec, Mapping):
        if layers is not None:
            raise ValueError("layers= goes with one spec for all; a dictionary names the layers itself")
        specs = {_number(i, count): one for i, one in spec.items()}
    else:
        raise TypeError(f"spec must be a text such as 'combiner-window:span=32' or a dictionary, not {spec!r}")
    if not specs:
        raise ValueError("layers is empty: there is nothing to convert")
    return specs


def _number(i: Any, count: int) -> int:
    if isinstance(i, bool) or not isinstance(i, int) or not -count <= i < count:
        raise ValueError(f"layers must be integers from 0 to {count - 1}, not {i!r}")
    return i % count


def _given(spec: str, options: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The options beside the spec; layers of patterns that take turns are numbered."""
    known = mechanism(split_spec(spec)[0]).Options.__dataclass_fields__
    turns = "layer_index" in known and "layer_index" not in {*options, *split_spec(spec)[1]}
    return {**options, **({"layer_index": number} if turns else {})}


def _base_name(model: PreTrainedModel, name: str) -> str:
    """The name inside the base model: what is saved with a head may be loaded without, and the reverse."""
    return name.removeprefix(f"{model.base_model_prefix}.") if model.base_model_prefix else name


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
