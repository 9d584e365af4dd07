"""Pictures: who attends to whom, with which weight, and what it costs.

Blue is attended directly, orange through a summary, light grey not at all. Rows are queries, columns keys.
Panels of cells are placed in whole pixels, so that every cell has the same size.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from subquad.attention.base import Attention
from subquad.attention.registry import available, for_length, mechanism
from subquad.bench import FULL, Row
from subquad.core.numbers import possible_pairs
from subquad.layers import MultiheadAttention

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("not attended", "direct", "through a summary")  # the meaning of 0, 1, 2 in `Attention.picture`
COLOURS = ("#eeeeee", "#1f4e9c", "#f0922b")
AXES = "rows are queries, columns are keys"
INK, FAINT = "#222222", "#777777"
LINES = ("#1f4e9c", "#f0922b", "#2a9d6f", "#b0413e", "#7a5ba6", "#0f9bb5", "#b58a0f", "#d16ba5")
DPI = 200


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that belongs to no window."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f'pictures need {missing.name}: pip install "subquad[train]"') from None
    return Figure(figsize=(width, height), dpi=DPI, facecolor="white")


def save(figure: Figure, path: str | Path, dpi: int = DPI) -> Path:
    """Write the figure, into a new folder if need be; the ending of the name (`files.PICTURES`) is the format."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    return path


# ---- cells -------------------------------------------------------------------------------------------------


def panels(picture: Tensor) -> list[tuple[str, Tensor]]:
    """(n, n) or (H, n, n) → for each set of equal heads its name ("" if all are equal) and picture (n, n)."""
    if picture.dim() == 2:
        return [("", picture)]
    groups: list[tuple[list[int], Tensor]] = []
    for head, one in enumerate(picture):
        same = [heads for heads, other in groups if torch.equal(one, other)]
        if same:
            same[0].append(head)
        else:
            groups.append(([head], one))
    return [("" if len(groups) == 1 else _heads(heads), one) for heads, one in groups]


def _heads(heads: list[int]) -> str:
    """[0] → «head 0»; [0, 1, 2] → «heads 0–2»; [0, 2] → «heads 0, 2»."""
    if len(heads) == 1:
        return f"head {heads[0]}"
    run = heads == list(range(heads[0], heads[-1] + 1))
    return f"heads {heads[0]}–{heads[-1]}" if run else "heads " + ", ".join(map(str, heads))


def tally(picture: Tensor) -> tuple[int, int]:
    """How many pairs are connected directly, and how many through a summary."""
    return int((picture == 1).sum()), int((picture == 2).sum())


def rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def cells(picture: Tensor) -> np.ndarray:
    """Colours of a picture, (n, n) → (n, n, 3)."""
    return np.stack([rgb(colour) for colour in COLOURS])[picture.numpy()]


def shades(weights: Tensor, picture: Tensor, top: float) -> np.ndarray:
    """Colours of weights, (n, n) → (n, n, 3): from pale to full as the weight goes from 0 to `top`.

    The square root keeps small weights visible: a row of m equal weights has weights 1/m.
    """
    strength = (weights / top).clamp(0, 1).sqrt().numpy()[..., None]  # (n, n, 1)
    absent, full = rgb(COLOURS[0]), cells(picture)
    return absent + (full - absent) * (0.12 + 0.88 * strength) * (weights.numpy()[..., None] > 0)


def _enlarged(colours: np.ndarray, size: int) -> np.ndarray:
    """Every cell as size × size pixels, with a white line between cells that are large enough to bear it."""
    image = colours.repeat(size, 0).repeat(size, 1)
    if size >= 8:
        image[::size] = 1
        image[:, ::size] = 1
    return image


def save_cells(picture: Tensor, path: str | Path, size: int = 4) -> None:
    """The cells of a picture (n, n) and nothing else, each of size × size pixels: a thumbnail."""
    from matplotlib.image import imsave

    imsave(path, _enlarged(cells(picture), size), format="png")


# ---- a sheet of panels -------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """One square: colours (n, n, 3), or None and the reason; title and note stand above it."""

    colours: np.ndarray | None
    title: str = ""
    note: str = ""
    reason: str = ""


class Sheet(NamedTuple):
    """Panels in rows, a title and a note above, the names of the rows on the left, a legend and a caption below."""

    rows: Sequence[Sequence[Panel]]
    side: int  # pixels of a panel, about
    title: str
    note: str
    legend: Sequence[tuple[np.ndarray, str]]  # colours (1, m, 3) of a swatch and their meaning
    labels: Sequence[str] = ()
    caption: str = AXES  # two lines at most


def draw_sheet(sheet: Sheet, n: int) -> Figure:
    """The figure, laid out in pixels."""
    size = max(1, round(sheet.side / n))  # pixels of a cell
    side, gap, left, right, top, bottom = size * n, 36, 72, 40, 100, 124
    heads = [84 if any(panel.title for panel in row) else 16 for row in sheet.rows]  # room above a row
    columns = max(len(row) for row in sheet.rows)
    width = max(left + columns * side + (columns - 1) * gap + right, 860)  # the legend needs that much
    height = top + sum(heads) + len(sheet.rows) * side + bottom
    figure = new_figure(width / DPI, height / DPI)
    room = (width - left - right) / (17.5 * max(1, len(sheet.title)))  # a long spec is set smaller, to fit
    figure.text(left / width, 1 - 34 / height, sheet.title, size=10 * min(1, room), weight="bold", color=INK, va="top")
    figure.text(left / width, 1 - 74 / height, sheet.note, size=7, color=FAINT, va="top")
    y = top
    for i, row in enumerate(sheet.rows):
        y += heads[i]
        for j, panel in enumerate(row):
            x = left + j * (side + gap)
            box = (x / width, 1 - (y + side) / height, side / width, side / height)
            _draw_panel(figure.add_axes(box), panel, size)
        if sheet.labels:
            at = ((left - 24) / width, 1 - (y + side / 2) / height)
            figure.text(*at, sheet.labels[i], size=7, color=FAINT, rotation=90, ha="center", va="center")
        y += side
    _draw_legend(figure, sheet, left, (width, height))
    return figure


def _draw_panel(axes: Axes, panel: Panel, size: int) -> None:
    axes.axis("off")
    if panel.colours is None:
        reason = textwrap.fill(panel.reason, 22)
        axes.text(0.5, 0.5, reason, size=7, color=FAINT, ha="center", va="center", transform=axes.transAxes)
    else:
        axes.imshow(_enlarged(panel.colours, size), interpolation="nearest", aspect="auto")
    above: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(panel.note, (0, 1), (0, 3.5), size=6, color=FAINT, **above)
    axes.annotate(panel.title, (0, 1), (0, 12 if panel.note else 4), size=8, weight="bold", color=INK, **above)


def _draw_legend(figure: Figure, sheet: Sheet, x: float, page: tuple[int, int]) -> None:
    width, height = page
    figure.text(x / width, 52 / height, sheet.caption, size=6.5, color=FAINT, va="top", linespacing=1.25)
    for colours, meaning in sheet.legend:
        long = 22 if colours.shape[1] == 1 else 110
        axes = figure.add_axes((x / width, 66 / height, long / width, 22 / height))
        axes.axis("off")
        axes.imshow(colours, interpolation="nearest", aspect="auto")
        figure.text((x + long + 12) / width, 76 / height, meaning, size=7, color=INK, va="center_baseline")
        x += long + 12 + 11.5 * len(meaning) + 30


def swatch(colour: str, meaning: str) -> tuple[np.ndarray, str]:
    """An entry of a legend."""
    return rgb(colour)[None, None], meaning


def swatches(kinds: Sequence[int]) -> list[tuple[np.ndarray, str]]:
    return [swatch(COLOURS[kind], KINDS[kind]) for kind in kinds]


# ---- one mechanism -----------------------------------------------------------------------------------------


def draw_support(attention: Attention, n: int, *, title: str = "") -> Figure:
    """Who attends to whom: a panel for each set of heads that differ."""
    parts = panels(attention.picture(n))
    squares = [Panel(cells(picture), heads, _counted(picture, attention)) for heads, picture in parts]
    kinds = [kind for kind in (1, 2, 0) if any((picture == kind).any() for _, picture in parts)]
    note = f"{_direction(attention)}, n = {n}" + (f", {squares[0].note}" if len(squares) == 1 else "")
    rows = _wrapped([squares[0]._replace(note="")] if len(squares) == 1 else squares, 4)
    return draw_sheet(Sheet(rows, 720 if len(squares) == 1 else 400, title or attention.name, note, swatches(kinds)), n)


def draw_weights(attention: Attention, n: int, *, title: str = "", seed: int = 0, most: int = 8) -> Figure:
    """The effective weights of the first `most` heads on random q and k (at level "layer": on random tokens)."""
    weights = random_weights(attention, n, seed)[:most]  # (h, n, n)
    picture = attention.picture(n).expand(attention.options.num_heads, n, n)[:most]
    picture = picture.where((picture > 0) | (weights == 0), 1)  # where tokens decide, the picture is only an example
    top = float(weights.max()) or 1.0
    squares = [
        Panel(shades(one, kind, top), f"head {head}")
        for head, (one, kind) in enumerate(zip(weights, picture, strict=True))
    ]
    ramp = torch.linspace(0, top, 64)[None]  # (1, 64)
    legend = [
        (shades(ramp, torch.full((1, 64), kind), top), f"0 … {top:.2g}, {KINDS[kind]}")
        for kind in (1, 2)
        if (picture == kind).any()
    ]
    note = f"effective weights on random q, k, {_direction(attention)}, n = {n}"
    if len(squares) < attention.options.num_heads:
        note += f", heads 0–{len(squares) - 1} of {attention.options.num_heads}"
    return draw_sheet(Sheet(_wrapped(squares, 4), 400, title or attention.name, note, legend), n)


def random_weights(attention: Attention, n: int, seed: int) -> Tensor:
    """(H, n, n)."""
    heads, width = attention.options.num_heads, attention.options.head_dim
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        if attention.capabilities.level == "head":
            return attention.weights(*torch.randn(2, 1, heads, n, width))[0]
        layer = MultiheadAttention(heads * width, heads, batch_first=True, causal=attention.options.causal)
        layer.attention = attention
        tokens = torch.randn(1, n, heads * width)
        return layer(tokens, tokens, tokens, average_attn_weights=False)[1][0]


def _wrapped(squares: Sequence[Panel], columns: int) -> list[Sequence[Panel]]:
    return [squares[i : i + columns] for i in range(0, len(squares), columns)]


def _direction(attention: Attention) -> str:
    return "causal" if attention.options.causal else "bidirectional"


def _counted(picture: Tensor, attention: Attention) -> str:
    n, (direct, summary) = picture.shape[0], tally(picture)
    return f"{direct + summary:,} of {possible_pairs(n, attention.options.causal):,} connections"


# ---- the gallery -------------------------------------------------------------------------------------------


def draw_gallery(names: Sequence[str] | None = None, n: int = 64, columns: int = 6) -> Figure:
    """Every mechanism, bidirectional above causal."""
    names = available() if names is None else names
    rows, labels = [], []
    for first in range(0, len(names), columns):
        band = names[first : first + columns]
        for causal in (False, True):
            rows.append([_gallery_panel(name, n, causal) for name in band])
            labels.append("causal" if causal else "bidirectional")
    note = f"n = {n}, bidirectional above causal; options chosen to fit the picture"
    if any(mechanism(name).picture_note for name in names):
        note += "; where tokens decide who attends to whom, an example"
    kinds = [kind for kind in (1, 2, 0) if any(_shows(panel, kind) for row in rows for panel in row)]
    return draw_sheet(Sheet(rows, 320, "Who attends to whom", note, swatches(kinds), labels), n)


def _shows(panel: Panel, kind: int) -> bool:
    return panel.colours is not None and bool((panel.colours == rgb(COLOURS[kind])).all(-1).any())


def _gallery_panel(name: str, n: int, causal: bool) -> Panel:
    cls = mechanism(name)
    title, cost = ("", "") if causal else (name, f"cost {cls.cost}")
    if not (cls.capabilities.causal if causal else cls.capabilities.bidirectional):
        return Panel(None, title, cost, "not causal" if causal else "causal only")
    try:
        picture = for_length(name, n, causal=causal, **cls.gallery).picture(n)
    except (ValueError, TypeError) as error:  # it needs options that nobody gave: the panel says so
        return Panel(None, title, cost, str(error))
    picture = picture[0] if picture.dim() == 3 else picture
    return Panel(cells(picture), title, cost)


# ---- measurements ------------------------------------------------------------------------------------------


def draw_bench(rows: Sequence[Row], *, title: str) -> Figure:
    """Time and memory of a step over the length, on logarithmic axes."""
    figure = new_figure(7.2, 3.6)
    series = list(dict.fromkeys((row.spec, row.level) for row in rows))
    colours = iter(LINES * len(series))
    axes = figure.subplots(1, 2)
    for spec, level in series:
        own = [row for row in rows if (row.spec, row.level) == (spec, level)]
        look: dict[str, Any] = {"marker": "o", "ms": 3.5, "lw": 1.4}
        if spec == FULL:
            look |= {"color": FAINT, "ls": "--" if level == "head" else ":", "zorder": 2}
        else:
            look |= {"color": next(colours), "zorder": 3}
        label = spec if level == "head" else f"{spec} ({level})"
        axes[0].plot([row.n for row in own], [row.seconds for row in own], label=label, **look)
        known = [(row.n, row.memory / 2**20) for row in own if row.memory]
        axes[1].plot([n for n, _ in known], [mib for _, mib in known], **look)
    for one, name in zip(axes, ("time of a step, seconds", "peak memory of a step, MiB"), strict=True):
        _dress(one, name, sorted({row.n for row in rows}))
    figure.suptitle(title, x=0.02, ha="left", size=9, weight="bold", color=INK)
    figure.legend(loc="lower left", bbox_to_anchor=(0.01, 0), ncols=4, frameon=False, fontsize=7, handlelength=2.6)
    figure.tight_layout(rect=(0, 0.06 + 0.05 * ((len(series) - 1) // 4), 1, 1))
    return figure


def _dress(axes: Axes, name: str, lengths: list[int]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=7, color="#bbbbbb", labelcolor=INK)
    axes.set_title(name, size=8, color=INK, loc="left")
    axes.set_xlabel("length n", size=7.5, color=FAINT)
    axes.set_axisbelow(True)
    axes.grid(True, color="#e6e6e6", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
