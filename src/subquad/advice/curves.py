"""From measured points to a function of length, heads, width of a head and batch size.

At the base size, a sum of terms of the length that the mechanism declares, with coefficients ≥ 0:

    f(n) = c_0 + c_1·n + c_2·n^e + …         least squares of the relative errors

times what it misses at the measured lengths, log-linear between them and constant beyond: a measured length gives what
was measured, and one beyond them grows as declared. What the terms miss is the work of caches and of fresh memory,
which depends on the size of the tensors, B·n·E: a layer twice as wide meets it at half the length. Other sizes:

    f(n, H, d, B) = c_0 + (f(n) − c_0) · heads(H) · widths(d) · rows(B)        log-linear in log H and in log d

rows(1) = 1 and rows(B) = r·B: one row is often taken as it is where several are copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from subquad.advice.points import BASE, Shape

Term = Callable[[float], float]
Factors = list[tuple[float, float]]  # (log size, log factor), ascending


class Bounds(NamedTuple):
    """Between which powers of a size a factor lies; what is measured beyond them is noise."""

    low: float
    high: float


# Of heads and of their width, by their place in a shape. Work is proportional to the heads, and less than that where
# few heads leave cores idle.
BOUNDS = {1: Bounds(0.5, 1.05), 2: Bounds(0.0, 2.0)}


# Between which the cost of a row in a batch lies, in units of a row alone. What is measured beyond them is noise, which
# times have more of.
ROW, ROW_SECONDS = (0.5, 2.0), (0.7, 1.5)


class Curve:
    """One quantity of one subject at the base size."""

    def __init__(self, points: dict[Shape, float], terms: Sequence[Term], floor: float = 0.0) -> None:
        """`terms` follow the constant one. Values below `floor` count as `floor` where errors are weighed: there the
        measurement says little.
        """
        base = sorted((shape.n, value) for shape, value in points.items() if shape.is_base)
        if not base:
            raise ValueError("a curve needs a point at the base size")
        floor = floor or 1e-12
        self.terms: list[Term] = [lambda n: 1.0, *terms]
        lengths, values = [n for n, _ in base], np.array([value for _, value in base])
        self.coefficients = fitted([[term(n) for term in self.terms] for n in lengths], values, floor)
        self.logs = np.log(lengths)
        model = np.array([self._model(n) for n in lengths])
        self.missed = np.log(np.maximum(values, floor) / np.maximum(model, floor))
        self.constant = float(min(self.coefficients[0], values.min()))

    @property
    def largest_error(self) -> float:
        """How far the terms alone are off a measured point, relative to it."""
        return float(np.abs(np.expm1(-self.missed)).max())

    def at(self, n: float, tensors: float | None = None) -> float:
        """The value for n tokens; `tensors`: the length at which tensors of the base size are as large as those of the
        size that is asked for, n where it is not given.
        """
        missed = np.interp(np.log(n if tensors is None else tensors), self.logs, self.missed)
        return self._model(n) * float(np.exp(missed))

    def _model(self, n: float) -> float:
        return float(sum(c * term(n) for c, term in zip(self.coefficients, self.terms, strict=True) if c))


class Scaled:
    """A curve and how it changes with the size."""

    def __init__(self, curve: Curve, points: dict[Shape, float], *, tensors: bool = True) -> None:
        """`tensors`: what the terms miss depends on the size of the tensors, else on the length."""
        self.curve, self.tensors = curve, tensors
        self.factors = {place: self._factors(points, place) for place in BOUNDS}
        self.row = row_of([self._ratio(shape, value) for shape, value in points.items() if shape.batch > 1])

    def __call__(self, n: float, heads: float, head_dim: float, batch: float = 1) -> float:
        whole = self.curve.at(n, equal_length(n, heads, head_dim, batch) if self.tensors else None)
        scale = rows(batch, self.row) * along(heads, self.factors[1]) * along(head_dim, self.factors[2])
        return scaled(whole, self.curve.constant, scale)

    def _factors(self, points: dict[Shape, float], place: int) -> Factors:
        return bounded([(shape[place], self._ratio(shape, value)) for shape, value in varied(points, place)], place)

    def _ratio(self, shape: Shape, value: float) -> float:
        """Of what grows, to one row of the base size."""
        whole = self.curve.at(shape.n, equal_length(*shape) if self.tensors else None)
        return (value - self.curve.constant) / max(1e-12, whole - self.curve.constant) / shape.batch


def scaled(whole: float, constant: float, scale: float) -> float:
    """The constant stays, the rest grows."""
    return min(constant, whole) + max(0.0, whole - constant) * scale


def rows(batch: float, row: float) -> float:
    """How much more than one row alone a batch costs."""
    return batch * row if batch > 1 else batch


def row_of(found: Sequence[float], bounds: tuple[float, float] = ROW) -> float:
    """The measured cost of a row in a batch, in units of a row alone; 1 where it was not measured."""
    return min(max(found[0], bounds[0]), bounds[1]) if found else 1.0


def equal_length(n: float, heads: float, head_dim: float, batch: float = 1) -> float:
    """The length at which tensors of the base size are as large."""
    return n * batch * heads * head_dim / (BASE[0] * BASE[1])


def varied(points: dict[Shape, float], place: int) -> list[tuple[Shape, float]]:
    """The points in whose shape only what stands at `place` is not that of the base."""
    other = 3 - place
    alone = [shape for shape in points if shape.batch == 1 and shape[other] == BASE[other - 1]]
    return [(shape, points[shape]) for shape in alone if shape[place] != BASE[place - 1]]


def bounded(found: Sequence[tuple[float, float]], place: int, base: float | None = None) -> Factors:
    """[(size, factor)] as logarithms, with the base, each a power of the size within the bounds."""
    base, bounds = BASE[place - 1] if base is None else base, BOUNDS[place]
    result = [(float(np.log(base)), 0.0)]
    for size, factor in dict(found).items():
        ratio = float(np.log(size / base))
        low, high = sorted((bounds.low * ratio, bounds.high * ratio))
        result.append((float(np.log(size)), min(max(float(np.log(max(factor, 1e-12))), low), high)))
    return sorted(result)


def fitted(columns: Sequence[Sequence[float]], values: np.ndarray, floor: float = 1e-12) -> np.ndarray:
    """Coefficients ≥ 0 of the columns, (points, terms), with the least relative errors. There are few terms: all
    choices of those that are not 0 are tried.
    """
    weigh = 1 / np.maximum(values, floor)
    whole, wanted = np.array(columns) * weigh[:, None], values * weigh
    count = whole.shape[1]
    best, least = np.zeros(count), np.inf
    for size in range(1, min(len(values), count) + 1):
        for chosen in combinations(range(count), size):
            part = whole[:, chosen]
            scale = np.abs(part).max(0)
            if not scale.all():
                continue
            found = np.linalg.lstsq(part / scale, wanted, rcond=None)[0] / scale
            error = float(np.square(part @ found - wanted).sum())
            if (found >= 0).all() and error < least * 0.999:
                best, least = np.zeros(count), error
                best[list(chosen)] = found
    return best


def along(size: float, known: Factors) -> float:
    """The factor of a size: log-linear through the known ones, and beyond them as between the last two."""
    if len(known) == 1:
        return float(size / np.exp(known[0][0]))
    x = float(np.log(size))
    right = min(max(1, sum(each[0] <= x for each in known)), len(known) - 1)
    (x0, y0), (x1, y1) = known[right - 1], known[right]
    return float(np.exp(y0 + (x - x0) * (y1 - y0) / (x1 - x0)))
