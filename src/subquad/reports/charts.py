"""Small charts as inline SVG: lines, dots, bars. Text and colours come from the page's style sheet.

A chart is a string of SVG that needs nothing else: no script, no font, no network. Colour i is the class k{i}, which
the page defines for light and dark; everything that people wrote is escaped. Hovering shows the numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

WIDTH, HEIGHT = 440, 280  # of a chart, in units of its own; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 42
BAR, TEXT = 26, 14  # height of a bar without its name, and of a line of text
NAME, LABEL = 62, 26  # letters that fit in a line above a bar, and beside a dot
PLACES = ((10, 4, "start"), (-10, 4, "end"), (0, -11, "middle"), (0, 20, "middle"), (8, 18, "start"), (8, -9, "start"),
          (-8, 18, "end"), (-8, -9, "end"))  # of a name beside its dot, the best first  # fmt: skip
DOT = 5.5  # radius of a dot that stands for no size
WIDE_RANGE = 50  # largest / smallest from which an axis is logarithmic

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom


class Line(NamedTuple):
    """A curve. `faint` ones stand behind the others; `strength` in (0, 1] tells lines of one colour apart."""

    name: str
    colour: int
    points: Sequence[Point]
    faint: bool = False
    strength: float = 1.0
    dots: bool = False


class Dot(NamedTuple):
    """A named point; `spread` is drawn as a whisker of ± that much, `size` as the area of the circle."""

    name: str
    colour: int
    x: float
    y: float
    spread: float | None = None
    size: float | None = None


class Bar(NamedTuple):
    name: str
    colour: int
    value: float
    text: str


# ---- axes --------------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """Values lo … hi on pixels start … end."""

    lo: float
    hi: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        lo, hi, value = (math.log(x) for x in (self.lo, self.hi, value)) if self.log else (self.lo, self.hi, value)
        return self.start + (value - lo) / (hi - lo) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Numbers beside each other need more room than numbers above each other."""
        return log_ticks(self.lo, self.hi) if self.log else ticks(self.lo, self.hi, 6 if self.start < self.end else 8)


def axis(values: Sequence[float], start: float, end: float, *, tight: bool = False) -> Axis:
    """The axis that the values need: with a little room at both ends unless `tight`, logarithmic if they range far."""
    lo, hi = min(values, default=0.0), max(values, default=1.0)
    if lo > 0 and hi / lo > WIDE_RANGE:
        return Axis(lo / 1.1, hi * 1.1, start, end, True)
    if lo == hi:
        lo, hi = lo - (abs(lo) or 1.0) * 0.1, hi + (abs(hi) or 1.0) * 0.1
    room = 0.0 if tight else 0.06 * (hi - lo)
    return Axis(lo - room, hi + room, start, end, False)


def ticks(lo: float, hi: float, most: int) -> list[float]:
    """At most `most` round numbers (1, 2 or 5 times a power of ten apart) within lo … hi."""
    raw = (hi - lo) / (most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(lo / step - 1e-9)
    last = math.floor(hi / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(lo: float, hi: float) -> list[float]:
    """1, 2, 5 times the powers of ten; the powers alone where these are too many."""
    powers = range(math.floor(math.log10(lo)), math.ceil(math.log10(hi)) + 1)
    for factors in ((1, 2, 5), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors if lo <= factor * 10.0**power <= hi]
        if len(found) <= 6:
            break
    return found


def short(value: float) -> str:
    """A number for an axis: 0.25, 1,000, 20k, 3M."""
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:,.6g}{letter}"
    return f"{value:,.4g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.0e}"


# ---- elements ----------------------------------------------------------------------------------------------


def element(kind: str, *inside: str, **attributes: object) -> Markup:
    """<kind attribute="…">…</kind>, escaped; class_ is class, text_anchor is text-anchor, numbers have one decimal."""
    texts = [
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), f"{x:.1f}" if isinstance(x, float) else x)
        for key, x in attributes.items()
    ]
    return Markup("<{}{}>{}</{}>").format(kind, Markup("").join(texts), Markup("").join(inside), kind)


def _svg(label: str, inside: Sequence[Markup], height: float = HEIGHT) -> Markup:
    return element("svg", *inside, class_="chart", viewBox=f"0 0 {WIDTH} {height:.0f}", role="img", aria_label=label)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> Markup:
    return element("text", text, class_=kind, x=float(x), y=float(y), text_anchor=anchor)


def _across(y: float, kind: str) -> Markup:
    return element("line", class_=kind, x1=LEFT, x2=WIDTH - RIGHT, y1=float(y), y2=float(y))


def _upright(x: float, y1: float, y2: float, kind: str) -> Markup:
    return element("line", class_=kind, x1=float(x), x2=float(x), y1=float(y1), y2=float(y2))


def _frame(x: Axis, y: Axis, x_name: str, y_name: str) -> list[Markup]:
    """Grid lines, numbers, the names of the axes; a logarithmic one says so."""
    ground, middle = y.start, (y.start + y.end) / 2
    x_name, y_name = (name + (" (log)" if one.log else "") for name, one in ((x_name, x), (y_name, y)))
    parts = [_across(y(tick), "grid") for tick in y.ticks]
    parts += [_text(LEFT - 7, y(tick) + 4, short(tick), "end") for tick in y.ticks]
    parts += [_text(x(tick), ground + 18, short(tick), "middle") for tick in x.ticks]
    parts += [_across(ground, "base"), _text((x.start + x.end) / 2, ground + 36, x_name, "middle", "name")]
    turned = f"translate(12 {middle:.1f}) rotate(-90)"
    return [*parts, element("text", y_name, class_="name", text_anchor="middle", transform=turned)]


# ---- lines -------------------------------------------------------------------------------------------------


def line_chart(lines: Sequence[Line], *, x: str, y: str, from_zero: bool = False) -> Markup:
    """Curves over a common axis; `x` and `y` name the axes. Points that are not finite leave a gap."""
    known = [point for line in lines for point in _finite(line.points)]
    across = axis([px for px, _ in known] + [0.0], LEFT, WIDTH - RIGHT, tight=True)
    up = axis([py for _, py in known] + ([0.0] if from_zero else []), HEIGHT - BOTTOM, TOP)
    ordered = sorted(lines, key=lambda line: not line.faint)
    return _svg(f"{y} over {x}", [*_frame(across, up, x, y), *(_curve(line, across, up, x, y) for line in ordered)])


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _curve(line: Line, across: Axis, up: Axis, x: str, y: str) -> Markup:
    path, pen = [], "M"
    for px, py in line.points:
        known = math.isfinite(px) and math.isfinite(py)
        path += [f"{pen}{across(px):.1f} {up(py):.1f}"] if known else []
        pen = "L" if known else "M"
    dots = [
        element(
            "circle", element("title", f"{line.name}, {x} {short(px)}: {y} {py:.4g}"), cx=across(px), cy=up(py), r=2.6
        )
        for px, py in (_finite(line.points) if line.dots else [])
    ]
    kind = f"line k{line.colour}{' faint' if line.faint else ''}"
    drawn = element("path", d=" ".join(path))
    return element("g", element("title", line.name), drawn, *dots, class_=kind, opacity=f"{line.strength:.2f}")


# ---- dots --------------------------------------------------------------------------------------------------


def scatter_chart(
    dots: Sequence[Dot], *, x: str, y: str, marked: float | None = None, height: float = HEIGHT
) -> Markup:
    """Named points; a vertical line at x = `marked`."""
    across = axis([dot.x for dot in dots] + [0.0 if marked is None else marked], LEFT, WIDTH - RIGHT)
    ends = [dot.y + sign * (dot.spread or 0.0) for dot in dots for sign in (-1, 1)]
    up = axis(ends, height - BOTTOM, TOP)
    parts = _frame(across, up, x, y)
    if marked is not None:
        parts.append(_upright(across(marked), up.end, up.start, "mark"))
    places = [(across(dot.x), up(dot.y)) for dot in dots]
    reach = [abs(up(dot.y) - up(dot.y + (dot.spread or 0.0))) for dot in dots]  # of a whisker
    radii = _radii([dot.size for dot in dots])
    taken = [
        (px - r, py - max(r, far), px + r, py + max(r, far))
        for (px, py), far, r in zip(places, reach, radii, strict=True)
    ]
    for dot, (px, py), r in zip(dots, places, radii, strict=True):
        drawn = [element("title", f"{dot.name}: {x} {dot.x:.2f}, {y} {dot.y:.4g}")]
        drawn += [_upright(px, up(dot.y - dot.spread), up(dot.y + dot.spread), "spread")] if dot.spread else []
        drawn += [element("circle", cx=px, cy=py, r=r), _label(dot.name, (px, py, r), taken, up.start)]
        parts.append(element("g", *drawn, class_=f"dot k{dot.colour}"))
    return _svg(f"{y} against {x}", parts, height)


def _radii(sizes: Sequence[float | None]) -> list[float]:
    """Circles whose areas are as the sizes, the largest of 14 pixels; where one is not known, all are alike."""
    known = [size for size in sizes if size]
    if len(known) < len(sizes):
        return [DOT] * len(sizes)
    return [max(3.0, 14 * math.sqrt(size / max(known))) for size in known]


def _label(name: str, circle: tuple[float, float, float], taken: list[Box], ground: float) -> Markup:
    """The name beside its point, where it covers nothing; without such a place none (the legend and hovering tell)."""
    x, y, radius = circle
    lines = folded(name, LABEL)
    long = 8.0 * max(map(len, lines))  # as wide as it may get in a narrow window
    for dx, dy, anchor in _places(radius):
        left = x + dx - {"start": 0, "end": long, "middle": long / 2}[anchor]
        rise = TEXT * (len(lines) - 1) if dy < 0 else 0  # a name above its point grows upwards
        box = (left, y + dy - 11 - rise, left + long, y + dy + 3 - rise + TEXT * (len(lines) - 1))
        inside = box[0] >= LEFT and box[2] <= WIDTH and box[1] >= 0 and box[3] <= ground
        if inside and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            return _lines(x + dx, y + dy - rise, lines, anchor)
    return Markup("")


def _places(radius: float) -> list[tuple[float, float, str]]:
    """PLACES, further off where the circle is larger than a dot."""
    more = max(0.0, radius - DOT)
    return [
        (dx + math.copysign(more, dx) * (dx != 0), dy + math.copysign(more, dy) * (dx == 0), anchor)
        for dx, dy, anchor in PLACES
    ]


def _lines(x: float, y: float, lines: Sequence[str], anchor: str) -> Markup:
    """Text in several lines, the first at y."""
    return Markup("").join(_text(x, y + TEXT * i, line, anchor, "label") for i, line in enumerate(lines))


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


# ---- bars --------------------------------------------------------------------------------------------------


def bar_chart(bars: Sequence[Bar], *, label: str, marked: float | None = None) -> Markup:
    """Horizontal bars from 0, each under its name; a vertical line at `marked`."""
    top = max([bar.value for bar in bars] + ([] if marked is None else [marked])) or 1.0
    room, y = WIDTH - 96.0, 0.0  # the number stands behind the longest bar
    parts = []
    for bar in bars:
        lines, long = folded(bar.name, NAME), max(room * bar.value / top, 1.5)
        under = y + TEXT * len(lines)
        drawn = [
            element("title", f"{bar.name}: {bar.text}"),
            _lines(0, y + 13, lines, "start"),
            element("rect", x=0, y=under + 5, width=float(long), height=13, rx=2),
            _text(long + 8, under + 16, bar.text, "start"),
        ]
        parts.append(element("g", *drawn, class_=f"bar k{bar.colour}"))
        y = under + BAR
    mark = [] if marked is None else [_upright(room * marked / top, 0, y, "mark")]
    return _svg(label, [*mark, *parts], y)


# ---- names -------------------------------------------------------------------------------------------------


def pieces(spec: str) -> list[str]:
    """A spec cut where a line may end: after : , |."""
    return [piece for piece in re.findall(r"[^:,|]*[:,|]?", spec) if piece]


def folded(spec: str, most: int) -> list[str]:
    """A spec in lines of at most `most` letters, whole: broken after : , | where possible."""
    lines = [""]
    for piece in pieces(spec):
        if lines[-1] and len(lines[-1]) + len(piece) > most:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1]) > most:
            lines[-1:] = [lines[-1][:most], lines[-1][most:]]
    return lines


def breakable(spec: str) -> Markup:
    """A spec that a line may end in after : , | but not within a name or an option, unless these are very long."""
    return Markup("<wbr>").join(
        element("span", piece, class_="whole") if len(piece) <= 28 else Markup("{}").format(piece)
        for piece in pieces(spec)
    )


def legend(names: Sequence[tuple[str, int]]) -> Markup:
    """Names and their colours, as a list that wraps; "" without names."""
    items = [element("li", element("i"), breakable(name), class_=f"k{colour}") for name, colour in names]
    return element("ul", *items, class_="legend") if items else Markup("")
