"""`swap`: put another attention into an existing model, in place of every `torch.nn.MultiheadAttention`."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import nn

from subquad.attention.registry import mechanism
from subquad.core.options import split_spec
from subquad.layers import MultiheadAttention


class Swapped(NamedTuple):
    """What `swap` did: the model, the names of the layers that it replaced, and the parameters that are new."""

    model: nn.Module
    replaced: tuple[str, ...]
    new_parameters: tuple[str, ...]
    kept: tuple[str, ...] = ()  # cross-attention of decoders, which the mechanism has no meaning for
    unnested: tuple[str, ...] = ()  # encoders whose nested tensors were turned off

    def __str__(self) -> str:
        layers = f"layers replaced: {', '.join(name or 'the module itself' for name in self.replaced)}"
        new = f"{len(self.new_parameters)} new parameters to train: {', '.join(self.new_parameters)}"
        left = f"\nleft as they are (cross-attention): {', '.join(self.kept)}" if self.kept else ""
        encoders = ", ".join(name or "the model itself" for name in self.unnested)
        off = f"\nnested tensors turned off (enable_nested_tensor=False): {encoders}" if encoders else ""
        return f"{layers}\n{new if self.new_parameters else 'no new parameters'}{left}{off}"

    def __repr__(self) -> str:  # what a notebook shows: the model itself would fill the screen
        return str(self)


def swap(
    model: nn.Module, spec: str, *, causal: bool = False, max_length: int | None = None, **options: Any
) -> Swapped:
    """Replace every `torch.nn.MultiheadAttention` of a model (or the layer itself) by ours, with the same weights.

        done = subquad.swap(model, "combiner-fixed:span=64", causal=True)
        print(done)                                     # which layers, and which parameters are new

    The model is changed in place; where it is itself such a layer, `done.model` is the new one. Projections, biases,
    dropout, device, dtype and training mode are kept. Nested tensors, to which `nn.TransformerEncoder` turns padded
    batches in evaluation, are turned off: they are for torch's own kernel. Call the layers with need_weights=False:
    weights cost n². A model that was trained with full attention computes another function now: train it after
    swapping.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(spec, str):
        raise TypeError(f"spec must be a text such as 'combiner-fixed:span=64', not {spec!r}")
    cls, given = mechanism(split_spec(spec)[0]), {*split_spec(spec)[1], *options}
    refuse_kept(cls.name, options)
    decoders = [part for part in model.modules() if isinstance(part, nn.TransformerDecoderLayer)]
    kept = set() if cls.capabilities.cross else {id(part.multihead_attn) for part in decoders}
    found = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.MultiheadAttention)]
    targets = [(name, layer) for name, layer in found if id(layer) not in kept]
    if not targets:
        swapped = any(isinstance(part, MultiheadAttention) for part in model.modules())
        why = ": its layers have been replaced already" if swapped else ""
        raise ValueError(f"{type(model).__name__} has no torch.nn.MultiheadAttention to replace{why}")
    made, new = {}, []
    for number, (name, layer) in enumerate(targets):  # all are made first: an error changes nothing
        own_options = dict(options, causal=causal, max_length=max_length)
        if "layer_index" in cls.Options.__dataclass_fields__ and "layer_index" not in given:
            own_options["layer_index"] = number  # layers that take turns
        try:
            made[name] = replacement(layer, spec, **own_options)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name or type(model).__name__}: {error}") from None
        own = dict(layer.named_parameters())
        new += [f"{name}.{key}".lstrip(".") for key, _ in made[name].named_parameters() if key not in own]
    for name, ours in made.items():
        parent, _, child = name.rpartition(".")
        if name:
            setattr(model.get_submodule(parent), child, ours)
        else:
            model = ours
    left = tuple(name for name, layer in found if id(layer) in kept)
    return Swapped(model, tuple(made), tuple(new), left, turn_nesting_off(model))


def refuse_kept(name: str, options: dict[str, Any]) -> None:
    """What a layer keeps cannot be given."""
    kept = set(inspect.signature(MultiheadAttention).parameters) - {"options"}
    for key in kept.intersection(options):
        raise TypeError(f"{key} cannot be given: that of the replaced layer is kept; what can be are options of {name}")


def turn_nesting_off(model: nn.Module) -> tuple[str, ...]:
    """The names of the encoders with our layers that would have handed nested tensors to them."""
    names = []
    encoders = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.TransformerEncoder)]
    for name, part in encoders:
        if part.use_nested_tensor and any(isinstance(inner, MultiheadAttention) for inner in part.modules()):
            part.enable_nested_tensor = part.use_nested_tensor = False
            names.append(name)
    return tuple(names)


def replacement(layer: nn.MultiheadAttention, spec: str, **options: Any) -> MultiheadAttention:
    """Our layer with the weights of torch's."""
    if layer.bias_k is not None or layer.add_zero_attn:
        raise ValueError("add_bias_kv and add_zero_attn are not supported: they must be False")
    weight = layer.out_proj.weight
    ours = MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        layer.dropout,
        layer.in_proj_bias is not None,
        kdim=layer.kdim,
        vdim=layer.vdim,
        batch_first=layer.batch_first,
        device=weight.device,
        dtype=weight.dtype,
        attention=spec,
        **options,
    )
    missing, unexpected = ours.load_state_dict(layer.state_dict(), strict=False)
    assert not unexpected and all(key.startswith("attention.") for key in missing)
    own = dict(ours.named_parameters())
    for name, parameter in layer.named_parameters():
        own[name].requires_grad_(parameter.requires_grad)
    return ours.train(layer.training)
