"""The pictures of results that are curves, for docs/images: one function per kind of figure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from subquad.reproductions.earlier import file_name


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
        for name, row in result["ours"].items():
            points = [(int(key.split(", ")[1]), cell["mean"]) for key, cell in row.items() if key.startswith(kind)]
            axis.plot(*zip(*points, strict=True), marker=".", label=name)
        axis.set(title=title, xlabel="length", xscale="log", yscale="log")
    axes[0].legend(fontsize=7)
    return figure


def score_over_steps(result: dict[str, Any]) -> Any:
    """SBM's figure 4."""
    figure, (axis,) = sheet(1, width=7)
    for name, row in result["ours"].items():
        axis.plot(*zip(*row["accuracy"]["curve"], strict=True), marker=".", label=name)
    axis.set(title="validation accuracy, %", xlabel="step")
    axis.legend(fontsize=7)
    return figure


def sheet(count: int, width: float) -> tuple[Any, list[Any]]:
    """A figure, and so many axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "combiner-figure-3": cost_over_length,
    "sbm-figure-4": score_over_steps,
}
