"""The pictures of a report: who may attend to whom, and what a trained model attends to on one example."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subquad.attention.registry import for_length
from subquad.models.attention import AttentionLayer, Projections
from subquad.models.blocks import Block
from subquad.plots import cells, panels, shades
from subquad.training.start import quiet
from subquad.training.use import load

PICTURE = 64  # tokens in the picture of a mechanism, more where its spans are longer than that
EXAMPLE = 128  # tokens of the example that a trained model reads
MOST_HEADS = 2  # different heads that are shown


def data_uri(colours: np.ndarray) -> str:
    """(n, m, 3) in [0, 1] → a PNG inside a URI, one pixel per cell."""
    from matplotlib.image import imsave

    file = io.BytesIO()
    imsave(file, np.ascontiguousarray(colours), format="png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def support_pictures(attention: str, *, causal: bool, heads: int, longest: int) -> list[dict[str, str]]:
    """One picture per mechanism (layers in turn have several) and per set of equal heads: caption and URI."""
    found = []
    specs = attention.split("|")
    for spec in specs:
        picture = telling_picture(spec, causal=causal, heads=heads, longest=longest)
        shown = panels(picture)
        for name, one in shown[:MOST_HEADS]:
            parts = (spec if len(specs) > 1 else "", name, f"n = {one.shape[-1]}")
            found.append({"caption": ", ".join(part for part in parts if part), "uri": data_uri(cells(one))})
        if len(shown) > MOST_HEADS:
            found[-1]["caption"] += f"; {len(shown) - MOST_HEADS} more heads"
    return found


def telling_picture(spec: str, *, causal: bool, heads: int, longest: int) -> Tensor:
    """The picture at n = PICTURE, twice, four or eight times that: the first with something not attended directly.

    A span of 64 tokens would show nothing but itself at 64.
    """
    picture = torch.empty(0)
    for n in (PICTURE, 2 * PICTURE, 4 * PICTURE, 8 * PICTURE):
        if n > PICTURE and n > longest:
            break
        picture = for_length(spec, n, causal=causal, num_heads=heads).picture(n)
        possible = torch.ones(n, n).tril() if causal else torch.ones(n, n)
        if bool((picture != possible).any()):
            return picture
    return picture[..., :PICTURE, :PICTURE]  # everybody attends to everybody, at any length


@torch.no_grad()
def trained_weights(model_folder: Path, input_ids: Tensor) -> list[tuple[Tensor, Tensor] | None]:
    """What each layer of a trained model attends to on one example.

    input_ids (n,) → for each layer its effective weights, mean over the heads, (n, n), and their kind, (n, n): 1 =
    direct, 2 = through a summary. None for a mechanism without weights over tokens (Composite Slice).
    """
    quiet()
    model, _ = load(model_folder)
    calls: list[tuple[AttentionLayer, tuple[Any, ...]]] = []
    hooks = [
        module.attention.register_forward_pre_hook(lambda layer, inputs: calls.append((layer, inputs)))
        for module in model.modules()
        if isinstance(module, Block)
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # sampled graphs: the same picture every time
        model(input_ids[None])
        for hook in hooks:
            hook.remove()
        return [_layer_weights(layer, *inputs) for layer, inputs in calls]


def _layer_weights(
    layer: AttentionLayer, x: Tensor, key_mask: Tensor | None, angles: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """x (1, n, D): what the attention of a block was given."""
    project = Projections(layer, angles)
    try:
        weights = layer.attention.token_weights(x, x, project, key_mask)[0]  # (H, n, n)
    except TypeError:  # the mechanism says that it has none
        return None
    picture = layer.attention.picture(x.shape[1]).expand_as(weights)  # (H, n, n)
    summary = (picture == 2).any(0) & ~(picture == 1).any(0)  # (n, n): direct where one head sees it directly
    return weights.mean(0).float(), torch.where(summary, 2, 1)


def weight_pictures(model_folder: Path, input_ids: Tensor) -> list[dict[str, str]]:
    """A picture per layer; [] for a mechanism without weights over tokens."""
    found = []
    for i, layer in enumerate(trained_weights(model_folder, input_ids)):
        if layer is not None:
            weights, kind = layer
            top = float(weights.max()) or 1.0
            caption = f"layer {i}, n = {len(weights)}, up to {top:.2g}"
            found.append({"caption": caption, "uri": data_uri(shades(weights, kind, top))})
    return found


def example_of(model_folder: Path, data: Path | None) -> Tensor:
    """The first test example of the task that a model was trained for, cut to EXAMPLE tokens: (n,)."""
    quiet()
    _, task = load(model_folder, data)
    ids = torch.as_tensor(task.load().test[0]["input_ids"])
    ids = ids if ids.dim() == 1 else ids[0]  # a task with two texts: the first
    return ids[:EXAMPLE]
