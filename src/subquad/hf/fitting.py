"""The two losses of `adapt`.

fit     per layer: ‖o - t‖² / ‖t‖², o the converted layer's output and t the original's, both from the original's
        hidden states. One forward pass of the original serves a step of every layer.
tune    the whole model: cross-entropy of the text and the distillation KL(original ‖ converted), position by
        position, a block of positions at a time so that the logits of all of them never exist at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.hf.lowrank import original

BLOCK = 256  # positions whose logits exist at the same time


class Seen(NamedTuple):
    """What a layer of the original was given, and its output."""

    args: tuple[Any, ...]
    about: dict[str, Any]
    out: Tensor


@torch.no_grad()
def watch_original(model: nn.Module, layers: Mapping[str, nn.Module], ids: Tensor) -> dict[str, Seen]:
    """The inputs and outputs of the layers in a forward pass of the original."""
    seen: dict[str, Seen] = {}

    def keep(name: str):
        def hook(module: nn.Module, args: Any, about: Any, out: Any) -> None:
            about = {key: value for key, value in about.items() if "past" not in key}
            seen[name] = Seen(args, about, out[0])

        return hook

    handles = [layer.register_forward_hook(keep(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        with original(model):
            body(model)(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def fit_loss(layer: nn.Module, seen: Seen) -> Tensor:
    """The relative squared error of one converted layer."""
    out = layer(*seen.args, **seen.about)[0]
    return (out - seen.out).square().sum() / seen.out.square().sum()


def tune_backward(model: Any, ids: Tensor, distillation: float) -> tuple[float, float]:
    """Gradients of (1 - distillation)·cross-entropy + distillation·KL; returns both, in nats per token."""
    with torch.no_grad(), original(model):
        teacher = body(model)(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]  # (n-1, E)
    hidden = body(model)(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    own, labels, head = hidden.detach().requires_grad_(), ids[0, 1:], model.get_output_embeddings()
    entropy = divergence = 0.0
    for at in range(0, len(labels), BLOCK):
        part = slice(at, at + BLOCK)
        logits = head(own[part]).log_softmax(-1)  # (b, V)
        with torch.no_grad():
            wanted = head(teacher[part]).log_softmax(-1)
        ce = F.nll_loss(logits, labels[part], reduction="sum") / len(labels)
        kl = (wanted.exp() * (wanted - logits)).sum() / len(labels)
        ((1 - distillation) * ce + distillation * kl).backward()
        entropy, divergence = entropy + ce.item(), divergence + kl.item()
    assert own.grad is not None
    hidden.backward(own.grad)
    return entropy, divergence


def body(model: Any) -> Any:
    """The model without its head."""
    inner = getattr(model, model.base_model_prefix, None)
    if inner is None or model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} is not a language model with a head on a body")
    return inner
