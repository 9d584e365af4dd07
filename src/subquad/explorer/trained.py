"""The second part of the explorer: what a trained model attends to in a text, by layer, head and token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from subquad.core.files import model_folder
from subquad.core.numbers import possible_pairs
from subquad.explorer.effective import Watched, effective_weights, watched
from subquad.explorer.kept import DEEPEST, Groups, Head, encode, encode_groups, keep
from subquad.explorer.page import read_text, render
from subquad.training import use

LONGEST = 8192  # tokens
LARGEST = 8_000_000  # bytes of a page
DEPTHS = (DEEPEST, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)  # how many weights of a query are kept: the most that fit
EXACT, COARSE = 1024, 256  # a sampled graph of up to EXACT tokens is kept as it is, a longer one in COARSE² squares

Tell = Callable[[str], Any]


class Layer(NamedTuple):
    """What is kept of one layer."""

    number: int
    name: str
    causal: bool
    sampled: bool
    groups: Groups
    heads: list[Head]
    more: list[list[np.ndarray]]  # per head: clusters (uint16) and graph (uint8), empty where there is none


def read_run(run: Path, text: Path, layers: Sequence[int] | None = None, tell: Tell = lambda what: None) -> str:
    """The page of a run on the text of a file."""
    written = read_text(text)
    tell("loading the model")
    model, task = use.load(run)
    refuse_unsuited(model, task, layers)
    example = task.encode(written)
    n, longest = len(example["input_ids"]), model.config.max_position_embeddings
    if n > min(longest, LONGEST):
        most = f"the model reads at most {longest:,}" if longest <= LONGEST else f"a page shows at most {LONGEST:,}"
        raise ValueError(f"--text: {text} has {n:,} tokens, and {most}: give a shorter text")
    kept = read_layers(model, example, layers, tell)
    about = {
        "run": model_folder(run).resolve().parent.name if run.name == "model" else run.resolve().name,
        "task": task.name,
        "text": text.name,
        "tokens": labels(task, example["input_ids"].tolist(), written),
    }
    tell("writing")
    return page_of(kept, about, [a.name for a in model.attention_layers() if not a.capabilities.weights])


def refuse_unsuited(model: Any, task: Any, layers: Sequence[int] | None) -> None:
    """Say in one line why a run cannot be shown, before its weights are computed."""
    if task.head == "seq2seq":
        raise ValueError(f"{task.name} trains an encoder and a decoder; the explorer shows models of one stack")
    found = model.attention_layers()
    able = [number for number, one in enumerate(found) if one.capabilities.weights]
    if not able:
        names = ", ".join(dict.fromkeys(one.name for one in found))
        raise ValueError(f"the attention of this run, {names}, has no weights over tokens: there is nothing to show")
    for number in layers or ():
        if number not in able:
            raise ValueError(f"--layers: {number} is not one of this run's layers with weights, {_listed(able)}")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


@torch.no_grad()
def read_layers(model: Any, example: dict[str, Any], layers: Sequence[int] | None, tell: Tell) -> list[Layer]:
    """One call of the model on one text, and what its layers attend to."""
    inputs = {key: value[None] for key, value in example.items() if key != "labels"}
    if model.config.evaluation_seed is None:
        model.config.evaluation_seed = 0  # sampled graphs: the same in every page of a run
    tell("reading the text")
    with watched(model.attention_layers()) as calls:
        model(**inputs)
    wanted = [call for call in calls if call.attention.capabilities.weights and (not layers or call.number in layers)]
    return [read_layer(call, tell) for call in wanted]


def read_layer(call: Watched, tell: Tell = lambda what: None) -> Layer:
    attention, n = call.attention, call.q.shape[2]
    tell(f"layer {call.number}")
    groups = Groups.of(attention, n)
    weights = effective_weights(call, tell)  # (H, n, n)
    clusters, sampled = attention.token_clusters(call.q, call.k), attention.capabilities.stochastic
    more = []
    for head, matrix in enumerate(weights):
        own = np.zeros(0) if clusters is None else clusters[0, head].numpy()
        more.append([own.astype("<u2"), graph_of(matrix) if sampled else np.zeros(0, np.uint8)])
    heads = keep(weights, groups, lambda what: tell(f"layer {call.number}: {what}"))
    return Layer(call.number, attention.name, attention.options.causal, sampled, groups, heads, more)


def graph_of(weights: np.ndarray) -> np.ndarray:
    """Where edges were sampled, uint8 (side²): 0 or 255, or the share of the edges in each square."""
    n = len(weights)
    edges = weights > 0
    if n <= EXACT:
        return edges.astype(np.uint8).ravel() * 255
    cuts = np.arange(COARSE) * n // COARSE
    counts = np.add.reduceat(np.add.reduceat(edges.astype(np.int32), cuts, 0), cuts, 1)
    sizes = np.diff(np.append(cuts, n))
    return np.round(255 * counts / (sizes[:, None] * sizes)).astype(np.uint8).ravel()


# ---- the page ----


def page_of(layers: list[Layer], about: dict[str, Any], without: list[str]) -> str:
    """The page with as many weights of each query as fit into it."""
    for k in _depths(layers):
        page = render("trained", f"What {about['run']} attends to", data_of(layers, about, without, k))
        if len(page.encode()) <= LARGEST:
            return page
    raise ValueError(f"the page would be larger than {LARGEST / 1e6:.0f} MB even with one weight per query: "
                     "choose fewer layers with --layers, or a shorter text")  # fmt: skip


def _depths(layers: list[Layer]) -> list[int]:
    """The depths worth trying: what the first head takes says which are far too deep."""
    heads = sum(len(layer.heads) for layer in layers)
    first = layers[0]
    sizes = {k: len(encode(first.heads[0], k, first.more[0])) * heads for k in DEPTHS}
    likely = [k for k in DEPTHS if sizes[k] <= 1.15 * LARGEST]
    return likely or [DEPTHS[-1]]


def data_of(layers: list[Layer], about: dict[str, Any], without: list[str], k: int) -> dict[str, Any]:
    return {**about, "kept": k, "without": without, "layers": [_layer_data(layer, k) for layer in layers]}


def _layer_data(layer: Layer, k: int) -> dict[str, Any]:
    n = len(layer.heads[0].index)
    heads = []
    for head, more in zip(layer.heads, layer.more, strict=True):
        total = max(float(head.received.sum()), 1e-9)
        heads.append(
            {
                "entropy": float(head.entropy.mean()),
                "distance": float(head.distance.mean()),
                "summaries": float(head.mass.mean()),
                "density": float(head.degree.sum()) / possible_pairs(n, layer.causal),
                "kept": min(1.0, float(head.weight[:, :k].sum()) / total),
                "clustered": bool(len(more[0])),
                "blob": encode(head, k, more),
            }
        )
    graph = (n if n <= EXACT else COARSE) if layer.sampled else 0
    shared = any(head.shares is not None for head in layer.heads)
    return {
        "number": layer.number,
        "name": layer.name,
        "causal": layer.causal,
        "sampled": layer.sampled,
        "graph": graph,
        "shared": shared,
        "sets": encode_groups(layer.groups),
        "heads": heads,
    }


def labels(task: Any, ids: Sequence[int], text: str) -> list[str]:
    """Every token as text: as the task writes it or, where it cannot, from the bytes or words of the text."""
    try:
        return [task.decode([token]) for token in ids]
    except ValueError:
        pass
    for pieces in ([chr(byte) if byte < 128 else "·" for byte in text.encode()], text.split()):
        extra = len(ids) - len(pieces)
        if extra in (0, 1):  # one more: a CLS token in front
            return [*["[CLS]"] * extra, *pieces]
    return [f"#{token}" for token in ids]
