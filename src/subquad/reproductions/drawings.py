"""The figures that show matrices and costs. Each function draws one file. Those of trained models: sbm_trained.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from subquad.attention.base import Attention
from subquad.attention.registry import for_length
from subquad.plots import AXES, COLOURS, Panel, Sheet, cells, draw_sheet, rgb, save, swatch, swatches

QUERY = "#7b4fa3"  # the colour of the one query that a panel is about


def matrices(path: Path, title: str, specs: Sequence[tuple[str, str]], n: int, *, causal: bool) -> None:
    """Who attends to whom, a panel per (title, spec)."""
    panels = []
    for name, spec in specs:
        picture = one_head(spec, n, causal=causal).picture(n)
        panels.append(Panel(cells(picture[0] if picture.dim() == 3 else picture), name, spec))
    rows = [panels[first : first + 3] for first in range(0, len(panels), 3)]
    note = f"n = {n}, {'causal' if causal else 'bidirectional'}"
    save(draw_sheet(Sheet(rows, 320, title, note, swatches((1, 2))), n), path)


def one_head(spec: str, n: int, *, causal: bool) -> Attention:
    return for_length(spec, n, causal=causal, num_heads=1, head_dim=8)


def combiner_matrices(path: Path, plan: Any) -> None:
    pairs = (("Fixed", "fixed:w=4,heads=union", "combiner-fixed:span=4"),
             ("Logsparse", "logsparse:sets=suffix", "combiner-logsparse"),
             ("Axial", "axial:cols=4", "combiner-axial:cols=4"))  # fmt: skip
    specs = [*((x, spec) for x, spec, _ in pairs), *((f"Combiner-{x}", spec) for x, _, spec in pairs)]
    matrices(path, "Combiner, figure 1", specs, 16, causal=True)


def combiner_axial(path: Path, plan: Any) -> None:
    """Of each plan the matrix, and the picture of 3 × 4 as token 10 sees it; arrows join the members of a group."""
    n, cols, query, side = 12, 4, 10, 320
    specs = {name: f"combiner-axial:plan={name},cols={cols}" for name in ("vertical", "horizontal")}
    made = {name: one_head(spec, n, causal=True) for name, spec in specs.items()}
    grids = {name: cells(one.picture(n)[query].view(-1, cols)) for name, one in made.items()}  # (3, 4, 3)
    for grid in grids.values():
        grid[query // cols, query % cols] = rgb(QUERY)
    rows = [
        [Panel(cells(one.picture(n)), name) for name, one in made.items()],
        [Panel(grid, name, f"as token {query} sees it") for name, grid in grids.items()],
    ]
    title = "Combiner, figure 2: a picture of 3 × 4"
    legend = [*swatches((1, 2)), swatch(QUERY, "the query"), swatch(COLOURS[0], "later tokens")]
    caption = f"above, {AXES}; below, the picture itself:\narrows join the tokens of a summary"
    figure = draw_sheet(Sheet(rows, side, title, f"n = {n}, causal", legend, caption=caption), n)
    cell = round(side / n)
    for axes, one in zip(figure.axes[2:4], made.values(), strict=True):
        for ends in arrows(one, n, query):
            there, here = (((i % cols + 0.5) * cell, (i // cols + 0.5) * cell) for i in ends)
            axes.annotate("", here, there, arrowprops={"arrowstyle": "->"})
    save(figure, path)


def arrows(made: Attention, n: int, query: int) -> list[tuple[int, int]]:
    """From each member of a group of the query to the next."""
    sets, seen = made.summaries(n)
    return [pair for number in seen[query] for pair in pairwise(sorted(sets[number]))]


def combiner_bidirectional(path: Path, plan: Any) -> None:
    specs = [("Combiner-Logsparse", "combiner-logsparse"), ("Combiner-Learnable", "combiner-routing:clusters=4")]
    matrices(path, "Combiner, figure 4", specs, 16, causal=False)


def slice_costs(path: Path, plan: Any) -> None:
    from subquad.studies.slice_cost import draw_slice_cost

    draw_slice_cost(path)


def sbm_placements(path: Path, plan: Any) -> None:
    from subquad.studies.sbm_pictures import draw_placements

    draw_placements(path)


def sbm_patterns(path: Path, plan: Any) -> None:
    """Figure 6: the three patterns of Lemma 2, n = 16 and k = 4."""
    n, k = 16, 4
    i, j = torch.arange(n)[:, None], torch.arange(n)
    masks = (i * k // n == j * k // n, (i == j) | (j >= n - k), (i == j) | (i >= n - k))
    panels = [Panel(cells(mask.expand(n, n).int()), f"pattern {number}") for number, mask in enumerate(masks, 1)]
    save(draw_sheet(Sheet([panels], 320, "SBM-Transformer, figure 6", f"n = {n}, k = {k}", swatches((1,))), n), path)
