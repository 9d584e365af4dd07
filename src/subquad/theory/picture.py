"""A picture of the hop sets growing: S^1, S^2, … until everyone sees everyone, or nothing changes any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from subquad.core.numbers import possible_pairs
from subquad.plots import COLOURS, Panel, Sheet, draw_sheet, rgb
from subquad.theory.assumptions import Verdict
from subquad.theory.hops import hop_sets, unpack

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = 8
CELLS = 256  # a longer sequence is drawn with several tokens to a cell
MEANING = {1: "seen before", 2: "new since the last panel", 0: "not seen"}


def draw_hops(verdict: Verdict, title: str = "") -> Figure:
    """One panel per number of layers; blue = seen before, orange = new since the panel before, grey = not seen."""
    support = verdict.support
    n, p = support.n, len(support.cycle)
    steps = verdict.hops.steps or p * n
    shown = sorted({1, steps, *(min(steps, 2**k if steps > PANELS else k + 1) for k in range(PANELS))})
    panels, before = [], np.zeros((n, n), dtype=bool)
    for t, bits in enumerate(hop_sets(support.cycle), 1):
        if t in shown:
            seen = unpack(bits, n)
            if verdict.hops.steps is None and t > p and (seen == before).all():
                break  # it will not grow any more
            share = seen.sum() / possible_pairs(n, support.causal)
            note = f"{share:.1%} of the {'earlier ' * support.causal}pairs"
            panels.append(Panel(_colours(before, seen), f"{t} layer{'s' * (t > 1)}", note))
            before = seen
        if t >= steps:
            break
    s = verdict.hops.steps
    pairs = "possible pairs, " if support.view == "other" else ""
    note = f"n = {n}, {pairs}" + (f"s = {s}" if s else verdict.hops.why(support.causal))
    legend = [(rgb(COLOURS[kind])[None, None], meaning) for kind, meaning in MEANING.items()]
    rows = [panels[i : i + 4] for i in range(0, len(panels), 4)]
    sheet = Sheet(rows, 400, title or f"{support.name}: who has been seen after t layers", note, legend)
    return draw_sheet(sheet, -(-n // _tokens_per_cell(n)))


def _colours(before: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """(cells, cells, 3); a cell of several tokens shows the newest thing in it."""
    kind = np.where(seen, np.where(before, 1, 2), 0)
    size = _tokens_per_cell(len(kind))
    whole = np.pad(kind, (0, -len(kind) % size))
    coarse = whole.reshape(len(whole) // size, size, -1, size).max((1, 3))
    return np.stack([rgb(colour) for colour in COLOURS])[coarse]


def _tokens_per_cell(n: int) -> int:
    return -(-n // CELLS)
