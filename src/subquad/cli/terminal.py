"""A picture of who attends to whom, made of characters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.style import Style
from rich.text import Text
from torch import Tensor

from subquad.plots import COLOURS

SIGNS = "·█░"  # absent, direct, summary, where there are no colours


def draw(picture: Tensor, console: Console) -> Text:
    """Two rows of cells per line of half blocks in two colours; without colours a row per line, in signs."""
    cells, size = coarse(picture, console.width)
    if plain(console):
        text = Text("\n".join("".join(SIGNS[x] for x in row) for row in cells))
    else:
        text = Text("\n").join(_line(cells, i) for i in range(0, len(cells), 2))
    return text if size == 1 else text.append(f"\n({size} × {size} tokens per cell)")


def plain(console: Console) -> bool:
    """Are there no colours?"""
    return console.color_system is None or console.no_color


def coarse(picture: Tensor, width: int) -> tuple[list[list[int]], int]:
    """The picture in at most `width` columns, and how many tokens share the side of a cell.

    A cell shows the strongest thing in it: direct before summary before absent.
    """
    n = picture.shape[0]
    size = -(-n // width)
    strength = torch.tensor([0, 2, 1])[picture.long()]  # the map 0, 1, 2 → 0, 2, 1 is its own inverse
    whole = F.pad(strength, (0, -n % size, 0, -n % size)).unflatten(1, (-1, size)).unflatten(0, (-1, size))
    return torch.tensor([0, 2, 1])[whole.amax((1, 3))].tolist(), size  # (cells, size, cells, size) → (cells, cells)


def _line(cells: list[list[int]], i: int) -> Text:
    lower = cells[i + 1] if i + 1 < len(cells) else None
    line = Text()
    for j, upper in enumerate(cells[i]):
        line.append("▀", Style(color=COLOURS[upper], bgcolor=None if lower is None else COLOURS[lower[j]]))
    return line
