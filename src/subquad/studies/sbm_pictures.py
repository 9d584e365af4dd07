"""Pictures of SBM attention: where nodes and clusters make which mask, what is sampled, how dense each head is.

Figures 3, 5, 7 and 8 of Cho et al. 2022. Every function that draws writes one PNG and returns its path. `subquad study
sbm-pictures` trains a small encoder and draws what its heads have learned.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from subquad.attention.call import Call, Record
from subquad.attention.sbm import Sbm
from subquad.plots import save


class SampledCall(NamedTuple):
    """What one SBM layer was called with, and the record of the call."""

    layer: Sbm
    q: Tensor
    k: Tensor
    call: Call
    record: Record

    def mask(self) -> Tensor:
        """The graphs of this call, bool (B, H, n, m)."""
        return self.layer.graph(self.q, self.k, self.call.key_mask, self.call.seed)

    def expected(self) -> Tensor:
        """P(edge) in this call, (B, H, n, m)."""
        return self.layer.expected(self.q, self.k, self.call.key_mask)


@contextmanager
def watched(model: nn.Module) -> Iterator[list[SampledCall]]:
    """The calls of the model's SBM layers, in order, as long as the context lasts."""
    layers = [module for module in model.modules() if isinstance(module, Sbm)]
    if not layers:
        raise ValueError("model has no SBM attention: there is nothing to draw")
    calls: list[SampledCall] = []

    def watch(layer: Sbm) -> None:
        def attend_observed(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Record]:
            out, record = Sbm.attend_observed(layer, q, k, v, call)
            calls.append(SampledCall(layer, q, k, call, record))
            return out, record

        layer.__dict__["attend_observed"] = attend_observed
        layer.__dict__["attend"] = lambda *given: attend_observed(*given)[0]

    for layer in layers:
        watch(layer)
    try:
        yield calls
    finally:
        for layer in layers:
            del layer.__dict__["attend_observed"], layer.__dict__["attend"]


def _figure(columns: int, rows: int = 1, size: float = 2.6):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size * columns, size * rows + 0.3), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _show(axis, matrix: Tensor, title: str, **style) -> None:
    axis.imshow(matrix.detach().float().cpu().numpy(), cmap="Greys", vmin=0, vmax=1, interpolation="nearest", **style)
    axis.set(title=title, xticks=[], yticks=[])
    axis.title.set_fontsize(9)


# ---- figure 3: the geometry -----------------------------------------------------------------------------------------


def placements(nodes: int = 24, clusters: int = 3) -> dict[str, tuple[Tensor, Tensor]]:
    """Three placements of nodes (n, 2) and clusters (k, 2): together, in groups, far apart."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(nodes, 2, generator=draw)
    angle = torch.arange(clusters) * 2 * torch.pi / clusters
    corners = torch.stack((angle.cos(), angle.sin()), 1)  # (k, 2)
    corner = corners.repeat_interleave(nodes // clusters, 0)  # (n, 2)
    return {
        "together: dense": (torch.tensor([3.0, 3.0]) + 0.3 * noise, torch.tensor([2.0, 2.0]) + 0.1 * corners),
        "in groups: blocks": (6 * corner + 0.5 * noise, 3 * corners),
        "far apart: sparse": (torch.tensor([3.0, 3.0]) + 0.3 * noise, torch.tensor([-1.0, -1.0]) + 0.1 * corners),
    }


def block_model(nodes: Tensor, clusters: Tensor) -> Tensor:
    """E[M] = sigmoid(X Cᵀ) softmax(C Cᵀ) sigmoid(X Cᵀ)ᵀ, (n, n): equations 5-8 on given node embeddings."""
    member = torch.sigmoid(nodes @ clusters.mT)  # (n, k)
    block = torch.softmax((clusters @ clusters.mT).flatten(), 0).view(len(clusters), -1)  # (k, k)
    return member @ block @ member.mT


def draw_placements(path: Path) -> Path:
    """Figure 3: nodes and clusters in the plane, and below the expected mask, white = 0 … black = 1 in all of them."""
    cases = placements()
    figure, axes = _figure(len(cases), 2)
    for column, (title, (nodes, clusters)) in enumerate(cases.items()):
        axes[0][column].scatter(*nodes.T.numpy(), s=10, label="nodes")
        axes[0][column].scatter(*clusters.T.numpy(), s=40, marker="x", label="clusters")
        axes[0][column].set_title(title, fontsize=9)
        p = block_model(nodes, clusters)
        _show(axes[1][column], p, f"P(edge): mean {p.mean():.2f}, largest {p.max():.2f}")
    axes[0][0].legend(fontsize=7)
    return save(figure, path, dpi=130)


# ---- what a mechanism samples ---------------------------------------------------------------------------------------


@torch.no_grad()
def masks(attention: Sbm, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Expected and sampled masks, (B, H, n, m) each."""
    return attention.expected(q, k, key_mask), attention.graph(q, k, key_mask)


def draw_masks(attention: Sbm, q: Tensor, k: Tensor, path: Path, key_mask: Tensor | None = None) -> Path:
    """Expected mask above, sampled mask below, one column per head of the first sequence."""
    expected, drawn = masks(attention, q[:1], k[:1], None if key_mask is None else key_mask[:1])
    figure, axes = _figure(expected.shape[1], 2)
    for head in range(expected.shape[1]):
        p, mask = expected[0, head], drawn[0, head]
        _show(axes[0][head], p, f"head {head}: expected {p.mean():.2f}")
        _show(axes[1][head], mask, f"sampled {mask.float().mean():.2f}")
    return save(figure, path, dpi=130)


# ---- figure 5: densities of a trained model -----------------------------------------------------------------------


@torch.no_grad()
def densities(model: nn.Module, batches: Iterable[tuple]) -> Tensor:
    """Density per call, layer and head, (batches, L, H): `model(*batch)` is called once for each batch."""
    found = []
    for batch in batches:
        with watched(model) as calls:
            model(*batch)
        found.append(torch.stack([call.record.density for call in calls]))  # (L, H)
    if not found:
        raise ValueError("batches is empty: at least one batch is needed")
    return torch.stack(found)


def draw_densities(models: Mapping[str, Tensor | Mapping[str, Tensor | None]], path: Path, note: str = "") -> Path:
    """Figure 5: per layer the mean density over batches and heads, with its standard deviation.

    `models`: name → densities (batches, L, H) as `densities` returns them, or several of them by what is different
    between them, side by side, with room for one that is None. `note` is written below.
    """
    series = {name: {"": found} if isinstance(found, Tensor) else found for name, found in models.items()}
    kinds = list(dict.fromkeys(kind for each in series.values() for kind in each))
    figure, axes = _figure(len(series))
    for axis, (name, each) in zip(axes[0], series.items(), strict=True):
        for kind, found in each.items():
            if found is not None:
                _bars(axis, found, kinds.index(kind), kinds)
        axis.set(title=name, ylabel="mask density")
    top = max(axis.get_ylim()[1] for axis in axes[0])
    for axis in axes[0]:
        axis.set_ylim(0, min(1, top))
    if kinds != [""]:
        bars = {label: bar for axis in axes[0] for bar, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        drawn = [kind for kind in kinds if kind in bars]
        figure.legend([bars[kind] for kind in drawn], drawn, loc="outside upper center", ncols=len(drawn), fontsize=8)
    if note:
        figure.supxlabel(textwrap.fill(note, 52 * len(series)), fontsize=7)
    return save(figure, path, dpi=130)


def _bars(axis, found: Tensor, place: int, kinds: list[str]) -> None:
    """A bar for each layer, beside those of the other kinds."""
    per_layer = found.mean(2)  # (batches, L)
    spread = per_layer.std(0) if len(per_layer) > 1 else torch.zeros(per_layer.shape[1])
    layers, width = torch.arange(per_layer.shape[1]), 0.7 / len(kinds)
    x = layers + (place - (len(kinds) - 1) / 2) * width
    axis.bar(x.tolist(), per_layer.mean(0).tolist(), width, yerr=spread.tolist(), capsize=3, color=f"C{place}",
             label=kinds[place] or None)  # fmt: skip
    axis.set_xticks(layers.tolist(), [f"L{layer + 1}" for layer in layers.tolist()])
    axis.set_xlim(-0.5, len(layers) - 0.5)


@torch.no_grad()
def attended(model: nn.Module, batch: tuple) -> list[Tensor]:
    """How often each token is attended to, one (B, H, m) in [0, 1] per SBM layer, from one call of the model."""
    with watched(model) as calls:
        model(*batch)
    return [call.mask().float().mean(2) for call in calls]


def draw_attended(model: nn.Module, batch: tuple, path: Path, height: int, sequence: int = 0) -> Path:
    """Figure 7: the tokens of one sequence as an image of `height` rows, bright where many attend, per head."""
    layers = [x[sequence] for x in attended(model, batch)]  # (H, m) each
    figure, axes = _figure(layers[0].shape[0], len(layers))
    for row, heads in enumerate(layers):
        for column, share in enumerate(heads):
            if share.numel() % height:
                raise ValueError(f"height must divide the length {share.numel()}, not {height}")
            axes[row][column].imshow(share.view(height, -1).cpu().numpy(), cmap="viridis", interpolation="nearest")
            axes[row][column].set(xticks=[], yticks=[])
            axes[row][column].set_title(f"layer {row + 1}, head {column + 1}: {share.mean():.3f}", fontsize=9)
    return save(figure, path, dpi=130)


# ---- figures 7 and 8: what the heads attend to where the model is right ---------------------------------------------


class Seen(NamedTuple):
    """A picture, its label, and how often each of its pixels was attended to when the model classified it."""

    pixels: Tensor  # (m,)
    label: int
    shares: Tensor  # (L, H, m), in [0, 1]

    @property
    def density(self) -> float:
        return float(self.shares.mean())


@torch.no_grad()
def first_right(model: nn.Module, pictures: Iterable[tuple[Tensor, int]], most: int = 64) -> list[Seen]:
    """The first pictures (pixels (m,), label) that the model classifies rightly, `most` of them at most.

    Graphs are sampled, so a second call may give another answer: what is shown is the call that was right.
    """
    found: list[Seen] = []
    for pixels, label in pictures:
        with watched(model) as calls:
            answer = int(model(pixels[None]).logits.argmax(-1))
        if answer == label:
            found.append(Seen(pixels, label, torch.stack([call.mask()[0].float().mean(1) for call in calls])))
        if len(found) == most:
            break
    return found


def contrasted(found: Iterable[Seen], count: int) -> list[Seen]:
    """So many of them, the sparsest and the densest in turn, of classes as different as possible; sparsest first."""
    rest, chosen = sorted(found, key=lambda each: each.density), list[Seen]()
    while rest and len(chosen) < count:
        times = Counter(each.label for each in chosen)
        fewest = min(times[each.label] for each in rest)
        places = [i for i, each in enumerate(rest) if times[each.label] == fewest]
        chosen.append(rest.pop(places[-1 if len(chosen) % 2 else 0]))
    return sorted(chosen, key=lambda each: each.density)


SCALE = "above each head its density; the brighter a pixel, the more attend to it, each head on a scale of its own"


def draw_seen(shown: Sequence[Seen], names: Sequence[str], width: int, path: Path, title: str) -> Path:
    """Figures 7 and 8: a row for each picture of rows of `width` pixels: itself, under the name of its label, then each
    head of each layer, under its density.
    """
    layers, heads = shown[0].shares.shape[:2]
    figure, axes = _figure(1 + layers * heads, len(shown), 1.7)
    for row, each, name in zip(axes, shown, names, strict=True):
        row[0].imshow(each.pixels.view(-1, width).numpy(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        row[0].set_title(name, fontsize=8)
        for axis, share in zip(row[1:], each.shares.flatten(0, 1), strict=True):
            axis.imshow(share.view(-1, width).numpy(), cmap="viridis", interpolation="nearest")
            axis.set_title(f"{share.mean():.3f}", fontsize=8)
        for axis in row:
            axis.set(xticks=[], yticks=[])
    for i, axis in enumerate(axes[-1][1:]):
        axis.set_xlabel(f"layer {i // heads + 1}, head {i % heads + 1}", fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.supxlabel(SCALE, fontsize=7)
    return save(figure, path, dpi=130)


# ---- a small model, trained -----------------------------------------------------------------------------------------


def train_small(
    length: int = 32, batch: int = 32, steps: int = 1000, penalty: float = 0.02, seed: int = 0
) -> nn.Module:
    """An encoder of two layers and four heads that finds repeated tokens (section 5.1).

    In the second half of the steps penalty · density is added to the loss: edges must be worth it. From the start it
    would empty the masks before there is anything to lose.
    """
    from subquad.models import SubquadConfig, SubquadForTokenClassification

    torch.manual_seed(seed)
    config = SubquadConfig(
        vocab_size=length, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=length, positions="none", initializer_range=0.2,
        attention="sbm:clusters=32,ste=difference",
    )  # fmt: skip
    model, batches = SubquadForTokenClassification(config), sequences(batch, length, steps, seed)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step, (tokens, labels) in enumerate(batches):
        model.config.density_weight = penalty if 2 * step >= steps else 0.0
        optimizer.zero_grad(set_to_none=True)
        model(tokens, labels=labels).loss.backward()
        optimizer.step()
    return model.eval()


def sequences(batch: int, length: int, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """So many batches of tokens and labels, both (B, n), of the task `repeated-tokens`."""
    from subquad.tasks import task

    drawn = task("repeated-tokens", settings=(f"length={length}", f"train_size={batch * count}"), seed=seed).load()
    return [(part["input_ids"], part["labels"]) for part in DataLoader(drawn.train, batch_size=batch)]


@torch.no_grad()
def draw_trained(model: nn.Module, path: Path, length: int = 32, seed: int = 1) -> tuple[Path, float]:
    """Expected and sampled mask of every head on one sequence, its tokens in ascending order so that equal ones are
    neighbours, and the density per layer and head over 20 batches. Returns path and accuracy on these batches."""
    from matplotlib.figure import Figure

    batches = sequences(16, length, 20, seed)
    found = densities(model, [(tokens,) for tokens, _ in batches])  # (batches, L, H)
    right = torch.stack([(model(x).logits.argmax(-1) == labels).float().mean() for x, labels in batches]).mean()
    with watched(model) as calls:
        model(batches[0][0][:1].sort(1)[0])
    layers, heads = found.shape[1:]
    figure = Figure(figsize=(2.3 * heads + 3.2, 4.4 * layers + 0.3), layout="constrained")
    pictures, chart = figure.subfigures(1, 2, width_ratios=(2.3 * heads, 3.2))
    axes = pictures.subplots(2 * layers, heads, squeeze=False)
    for row, call in enumerate(calls):
        expected, sampled = call.expected()[0], call.mask()[0]  # (H, n, n)
        for head in range(heads):
            p, mask = expected[head], sampled[head]
            _show(axes[2 * row][head], p, f"layer {row + 1}, head {head + 1}: expected {p.mean():.2f}")
            _show(axes[2 * row + 1][head], mask, f"sampled {mask.float().mean():.2f}")
    for axis, layer_densities, row in zip(chart.subplots(layers, 1), found.unbind(1), range(layers), strict=True):
        spread = layer_densities.std(0).tolist()
        labels = [str(head + 1) for head in range(heads)]
        axis.bar(labels, layer_densities.mean(0).tolist(), yerr=spread, capsize=3, width=0.6)
        axis.set(title=f"layer {row + 1}: mean {layer_densities.mean():.2f}", ylabel="density", xlabel="head")
        axis.set_ylim(0, max(0.3, 1.1 * float(found.max())))
    return save(figure, path, dpi=110), float(right)
