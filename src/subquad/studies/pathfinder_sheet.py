"""A sheet of generated Pathfinder pictures, joined ones and others, of several sizes: what a model gets to see."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from subquad.plots import save
from subquad.tasks.contours import picture

# size, dashes of a long contour, distractors
KINDS = ((16, 3, 1), (32, 6, 5), (32, 9, 5), (32, 14, 3), (64, 14, 5), (128, 14, 5))


def draw_sheet(path: Path | str, kinds: Sequence[tuple[int, int, int]] = KINDS, each: int = 4, seed: int = 0) -> Path:
    """One row per kind, `each` joined pictures on the left and as many others on the right. Returns the PNG's path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 * 2 * each, 1.68 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), 2 * each, squeeze=False)
    for row, (size, contour, distractors) in zip(axes, kinds, strict=True):
        for column, axis in enumerate(row):
            joined = column < each
            rng = np.random.default_rng((seed, size, contour, column))
            image = picture(rng, size, contour, distractors, joined)
            axis.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.set_title("joined" if joined else "not joined", fontsize=8, color="C0" if joined else "C3")
        row[0].set_ylabel(f"{size} × {size}\n{contour} dashes, {distractors} others", fontsize=7)
    return save(figure, path, dpi=110)
