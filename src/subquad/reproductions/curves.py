"""The pictures of results that are curves, for docs/images: one function per kind of figure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from subquad.core.numbers import possible_pairs
from subquad.reproductions import REPRODUCTIONS, sparse
from subquad.reproductions.earlier import file_name
from subquad.tasks import task as make_task

SELF_ATTENTION = {"causal-lm": (True,), "seq2seq": (False, True)}  # causal or not; of all other heads: not
COLOURS = {"STRIDED": "C0", "FIXED": "C1", "STAR": "C2", "RANDOM": "C3"}
MARKERS = "osD^v<>P"
PERIOD = 16  # of a dashed line, in widths of the line
DASHES = {"": "-", "UNION": "-", "MULTIHEAD": "--", "SEQUENTIAL": ":"}


class Point(NamedTuple):
    sparsity: float  # of 100 pairs
    score: float
    spread: float  # 0 = not known


def has_curves(result: dict[str, Any]) -> bool:
    return result["key"] in KINDS


def picture(result: dict[str, Any]) -> str:
    """The name of its file."""
    return Path(file_name(result["key"], result["scale"])).with_suffix(".png").name


def draw_curves(result: dict[str, Any], docs: Path) -> Path:
    path = docs / "images" / picture(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    KINDS[result["key"]](result).savefig(path, dpi=120)
    return path


def cost_over_length(result: dict[str, Any]) -> Any:
    """Combiner's figure 3."""
    figure, axes = sheet(2, width=11)
    for axis, (kind, title) in zip(axes, {"time": "seconds of a forward pass", "memory": "MiB"}.items(), strict=True):
        lengths = set[int]()
        for i, (name, row) in enumerate(result["ours"].items()):
            points = [(int(key.split(", ")[1]), cell["mean"]) for key, cell in row.items() if key.startswith(kind)]
            axis.plot(*zip(*points, strict=True), **layered(i, len(result["ours"])), label=name)
            lengths.update(n for n, _ in points)
        axis.set(title=title, xlabel="length", xscale="log", yscale="log")
        axis.set_xticks(sorted(lengths), [f"{n // 1024}k" for n in sorted(lengths)])
        axis.set_xticks([], minor=True)
    axes[0].legend(fontsize=7, handlelength=5)
    return figure


def layered(i: int, count: int) -> dict[str, Any]:
    """The look of the i-th of so many lines that may lie on one another: through the gaps in those above, and around
    their smaller markers, those below can be seen.
    """
    dashes: Any = (-PERIOD * i / count, (0.6 * PERIOD, 0.4 * PERIOD)) if i else "-"
    return {
        "marker": MARKERS[i % len(MARKERS)], "markerfacecolor": "none", "markersize": 3 + count - i,
        "linestyle": dashes, "linewidth": 1.6,
    }  # fmt: skip


def score_over_steps(result: dict[str, Any]) -> Any:
    """SBM's figure 4."""
    figure, (axis,) = sheet(1, width=7)
    for name, row in result["ours"].items():
        axis.plot(*zip(*row["accuracy"]["curve"], strict=True), marker=".", label=name)
    axis.set(title="validation accuracy, %", xlabel="step")
    axis.legend(fontsize=7)
    return figure


def score_over_sparsity(result: dict[str, Any]) -> Any:
    """Yun et al.'s figures 1 to 4: a curve per pattern, and the dense score as a line."""
    figure, axes = sheet(len(result["columns"]), width=3 + 4.5 * len(result["columns"]))
    for axis, column in zip(axes, result["columns"], strict=True):
        draw_dense(axis, result["ours"].get("dense", {}).get(column))
        for name, points in over_sparsity(result, column).items():
            pattern, _, heads = name.partition(" ")
            spreads = [point.spread for point in points]
            axis.errorbar(
                [point.sparsity for point in points], [point.score for point in points],
                yerr=spreads if any(spreads) else None,
                marker=".", color=COLOURS[pattern], linestyle=DASHES[heads], label=name,
            )  # fmt: skip
        axis.set(title=column, xlabel="pairs without a connection, %", ylabel=metric(result, column))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def sheet(count: int, width: float) -> tuple[Any, list[Any]]:
    """A figure, and so many axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def draw_dense(axis: Any, cell: dict[str, Any] | None) -> None:
    if cell is None:
        return
    axis.axhline(cell["mean"], color="black", linewidth=1, label="dense")
    if cell["sd"]:
        axis.axhspan(cell["mean"] - cell["sd"], cell["mean"] + cell["sd"], color="black", alpha=0.1, linewidth=0)


def over_sparsity(result: dict[str, Any], column: str) -> dict[str, list[Point]]:
    """The points of each pattern, from few missing connections to many."""
    task, curves = task_of(result, column), dict[str, list[Point]]()
    for name, row in result["ours"].items():
        if name != "dense" and column in row:
            away = 100 * sparsity(result["methods"][name]["spec"], task)
            point = Point(away, row[column]["mean"], row[column]["sd"] or 0.0)
            curves.setdefault(name.split(", ")[0], []).append(point)
    return {name: sorted(points) for name, points in curves.items()}


def sparsity(spec: str, task: Any) -> float:
    """Share of the pairs that the self-attention of a model does not connect at the length of its task: the mean over
    layers and heads, in an encoder–decoder over both sides.
    """
    from subquad.attention.registry import attention
    from subquad.models.config import SubquadConfig

    r = task.recipe
    config = SubquadConfig(
        attention=spec, hidden_size=r.width, num_attention_heads=r.heads, head_dim=r.head_dim,
        num_hidden_layers=r.layers, max_position_embeddings=r.length,
    )  # fmt: skip
    shares = []
    for causal in SELF_ATTENTION.get(task.head, (False,)):
        for index in range(r.layers):
            _, options = config.layer_options(index, causal=causal)
            made = attention(spec, num_heads=r.heads, head_dim=config.head_dim, **options)
            shares.append(made.connections(r.length) / possible_pairs(r.length, causal))
    return 1 - mean(shares)


def task_of(result: dict[str, Any], column: str) -> Any:
    about = result["columns"][column]
    return make_task(about["task"], about["recipe"], about["settings"])


def metric(result: dict[str, Any], column: str) -> str:
    declared = next(each for each in REPRODUCTIONS[result["key"]].columns if each.name == column)
    return (declared.metric or task_of(result, column).metric) + ", %" * (declared.factor == 100)


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "combiner-figure-3": cost_over_length,
    "sbm-figure-4": score_over_steps,
    **{each.key: score_over_sparsity for each in sparse.FIGURES},
}
