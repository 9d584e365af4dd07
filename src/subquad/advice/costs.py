"""The cost model: points of a calibration → time and memory of a layer of any size.

    time     = projections + attention, each with factors of its own for other sizes
    memory   = weights + [their gradients] + what the step adds at its peak, as `subquad bench` measures it

A layer without attention is measured like a mechanism: its products are large matrix products whose rate a machine has.
That much of a layer's time (times `share`, 1 for a mechanism on q, k, v, and counted where a mechanism projects tokens
itself) grows with the width like these, the rest is the attention's. The terms of a curve are those that the mechanism
declares: n and n^exponent (or its own formula for connections), and kept_keys(n) for a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from subquad.advice.curves import (
    ROW_SECONDS,
    Curve,
    Factors,
    Scaled,
    Term,
    along,
    bounded,
    equal_length,
    row_of,
    rows,
    scaled,
    varied,
)
from subquad.advice.measuring import ROOM, make
from subquad.advice.points import ALONE, BASE, Points, Shape, Subject
from subquad.attention.registry import for_length, mechanism
from subquad.core.options import split_spec

FLOAT = 4  # bytes of float32
MOST = 0.9  # of a layer's time: the projections take at most that
NOISE = 2**20  # bytes that the memory of a process is uncertain by
LINEAR = 0.12  # relative error up to which memory counts as linear in the length
COUNTED = 256  # tokens at which a mechanism's own projections are counted


class Size(NamedTuple):
    """The layer that is asked for."""

    n: int
    width: int
    heads: int
    batch: int = 1

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def weights(self) -> int:
        """Bytes of the projections and their biases."""
        return FLOAT * (4 * self.width**2 + 4 * self.width)

    @property
    def tokens(self) -> int:
        """Bytes of the tokens that come in, or go out."""
        return FLOAT * self.batch * self.n * self.width


class Costs:
    """What the layers of every measured mechanism cost."""

    def __init__(self, points: Points, memory: Points | None = None) -> None:
        """`memory` has the points of memory, where `points` has none of a subject."""
        self.points, self.memory = points, memory or points
        self._curves: dict[tuple[Subject, str], Scaled] = {}
        self._times: dict[tuple[Subject, str], LayerTime] = {}

    @cached_property
    def subjects(self) -> list[Subject]:
        """Those whose times are known."""
        return [subject for subject in self.points if self.points.of(subject, "forward")]

    def knows(self, subject: Subject, quantity: str) -> bool:
        return bool(self._points(subject, quantity))

    # ---- time ----

    def seconds(self, subject: Subject, size: Size, quantity: str) -> float:
        """Of one layer: "forward", or "train" for forward and backward."""
        key = subject, quantity
        if key not in self._times:
            projections = Projected(self._known(ALONE, quantity))
            curve = Curve(self._known(subject, quantity), work_terms(subject))
            self._times[key] = LayerTime(curve, projections, share(subject.spec), self._known(subject, quantity))
        return self._times[key](size)

    def decode_seconds(self, subject: Subject, size: Size) -> float:
        """Of one decode step of one layer, after n tokens."""
        return self._curve(subject, "decode")(size.n, size.heads, size.head_dim, size.batch)

    # ---- memory ----

    def peak(self, subject: Subject, size: Size, quantity: str) -> float:
        """Bytes by which a step of one layer raises the memory of a process: "forward" or "train"."""
        curve = self._curve(subject, f"{quantity} bytes")
        return curve(size.n, size.heads, size.head_dim, size.batch) + (size.weights if quantity == "train" else 0)

    def bytes(self, subject: Subject, size: Size, quantity: str, layers: int = 1) -> float:
        """All bytes of a stack of layers: weights, tokens, what a step adds, and what waits for the backward pass."""
        own = self._own_weights(subject, size)
        training = quantity == "train"
        whole = (
            layers * (size.weights + own) + size.tokens * (2 if training else 1) + self.peak(subject, size, quantity)
        )
        if training and layers > 1:
            kept = self._curve(subject, "kept bytes")(size.n, size.heads, size.head_dim, size.batch)
            whole += (layers - 1) * (kept + size.weights + own)
        return whole

    def state_bytes(self, subject: Subject, size: Size) -> float:
        """Of the state of one layer's attention, after n tokens."""
        return self._curve(subject, "state bytes")(size.n, size.heads, size.head_dim, size.batch)

    def _own_weights(self, subject: Subject, size: Size) -> float:
        if not self.knows(subject, "parameter bytes"):
            return 0.0
        return self._curve(subject, "parameter bytes")(size.n, size.heads, size.head_dim)

    # ---- curves ----

    def _points(self, subject: Subject, quantity: str) -> dict[Shape, float]:
        return self.points.of(subject, quantity) or self.memory.of(subject, quantity)

    def _known(self, subject: Subject, quantity: str) -> dict[Shape, float]:
        found = self._points(subject, quantity)
        if not found:
            raise ValueError(f"{subject.key} has not been measured ({quantity}): run `subquad calibrate`")
        return found

    def _curve(self, subject: Subject, quantity: str) -> Scaled:
        key = subject, quantity
        if key not in self._curves:
            self._curves[key] = self._fit(subject, quantity)
        return self._curves[key]

    def _fit(self, subject: Subject, quantity: str) -> Scaled:
        found = self._known(subject, quantity)
        if quantity in ("decode", "state bytes"):
            return Scaled(Curve(found, state_terms(subject)), found, tensors=False)
        if quantity == "parameter bytes":
            return Scaled(Curve(found, [lambda n: n, lambda n: n * n]), found, tensors=False)
        if quantity == "train bytes":  # the gradients of the weights grow with the square of the width: see `peak`
            found = {s: max(0.0, v - Size(s.n, s.width, s.heads).weights) for s, v in found.items()}
        return Scaled(memory_curve(found, work_terms(subject)), found)


def memory_curve(points: dict[Shape, float], work: list[Term]) -> Curve:
    """Scores are not stored, so memory is linear in the length, unless the points say otherwise: what they are off a
    line by chance would grow to a large error at long lengths.
    """
    line = Curve(points, [lambda n: n], NOISE)
    return line if line.largest_error <= LINEAR else Curve(points, work, NOISE)


class Projected:
    """The time of the projections: products, which a factor scales to other widths, and what large tensors cost beyond
    them. Fresh memory costs by its size, not by the width it is multiplied with.

        f(n, E) = n · rate · factor(E) + extra(n·E)        rate: the least time of a token at the base width
    """

    def __init__(self, points: dict[Shape, float]) -> None:
        self.curve = Curve(points, [lambda n: n])
        self.rate = min(value / shape.n for shape, value in points.items() if shape.is_base)
        found = [(s.width / BASE[1], self._products(s, v)) for s, v in points.items() if not s.is_base]
        self.factors = bounded(found, 2, BASE[0])  # by the width, in units of a head

    def __call__(self, n: float, width: float) -> float:
        """Of n tokens, whatever the rows they are in."""
        return self.rate * n * along(width / BASE[1], self.factors) + self._extra(n, width)

    def base(self, n: float, large: float) -> float:
        """Of n tokens at the base width, with tensors as large as those of `large` tokens."""
        return self.rate * n + self._extra(large, BASE[0] * BASE[1]) * n / large

    def _products(self, shape: Shape, value: float) -> float:
        """Of a measured point, in units of those at the base width."""
        return (value - self._extra(shape.n, shape.width)) / (self.rate * shape.n)

    def _extra(self, n: float, width: float) -> float:
        equal = equal_length(n, width, 1)
        return max(0.0, self.curve.at(equal) - self.rate * equal)


class LayerTime:
    """The time of a layer: projections and attention."""

    def __init__(self, curve: Curve, projections: Projected, share: float, points: dict[Shape, float]) -> None:
        self.curve, self.projections, self.share = curve, projections, share
        self.factors: dict[int, Factors] = {}
        for place in (1, 2):
            found = [(shape[place], self._ratio(shape, value)) for shape, value in varied(points, place)]
            self.factors[place] = bounded(found, place)
        batched = [self._ratio(shape, value) for shape, value in points.items() if shape.batch > 1]
        self.row = row_of(batched, ROW_SECONDS)

    def _ratio(self, shape: Shape, value: float) -> float:
        """Of the attention that grows, to one row of the base size."""
        own, rest = self.parts(*shape)
        return (value - self.curve.constant - own) / max(1e-12, rest - self.curve.constant) / shape.batch

    def parts(self, n: float, heads: float, head_dim: float, batch: float = 1) -> tuple[float, float]:
        """The projections of all rows, and the attention of one row at the base size, with tensors of this size."""
        large = equal_length(n, heads, head_dim, batch)
        whole = self.curve.at(n, large)
        base = self.share * self.projections.base(n, large)
        own = self.share * self.projections(n * batch, heads * head_dim)
        return own * min(1.0, MOST * whole / base), whole - min(base, MOST * whole)

    def __call__(self, size: Size) -> float:
        own, rest = self.parts(size.n, size.heads, size.head_dim, size.batch)
        scale = rows(size.batch, self.row) * along(size.heads, self.factors[1]) * along(size.head_dim, self.factors[2])
        return own + scaled(rest, self.curve.constant, scale)


# ---- what a mechanism declares -------------------------------------------------------------------------------------


def work_terms(subject: Subject) -> list[Term]:
    """n, and how its work grows beyond that."""
    made = _made(subject, COUNTED)
    if made.countable is None:
        return [lambda n: n, lambda n: made.connections(int(n))]
    return [lambda n: n] if made.exponent == 1 else [lambda n: n, lambda n: n**made.exponent]


def exponent(subject: Subject) -> float:
    """How its work grows with the length: n^exponent, as it declares."""
    return float(_made(subject, COUNTED).exponent)


def state_terms(subject: Subject) -> list[Term]:
    """Where the tokens so far are kept: summaries grow as declared, the fallback keeps and calls on all of them."""
    work = work_terms(subject)
    return [lambda n: kept_keys(subject, int(n)), *work]


@lru_cache(maxsize=4096)
def kept_keys(subject: Subject, n: int) -> float:
    """How many keys, or summaries of them, a state has after n tokens."""
    return float(_made(subject, n, max_length=n + ROOM).kept_keys(n))


@lru_cache(maxsize=1024)
def share(spec: str) -> float:
    """A mechanism's own projections over those of a layer; 1 for one on q, k, v, which leaves them to the layer."""
    if mechanism(split_spec(spec)[0]).capabilities.level == "head":
        return 1.0
    able = mechanism(split_spec(spec)[0]).capabilities
    step = make(Subject(spec, not able.bidirectional), Shape(COUNTED, *BASE), backward=False)
    with FlopCounterMode(display=False) as counter:
        step()
    counts: dict[Any, int] = counter.get_flop_counts().get("Global", {})
    products = sum(count for op, count in counts.items() if op in (torch.ops.aten.addmm, torch.ops.aten.mm))
    return products / (8 * COUNTED * (BASE[0] * BASE[1]) ** 2)


def _made(subject: Subject, n: int, **options: Any) -> Any:
    """The mechanism at a length, without the numbers of its parameters: some have n of them."""
    with torch.device("meta"):
        return for_length(subject.spec, n, causal=subject.causal, num_heads=BASE[0], head_dim=BASE[1], **options)


def crossover(costs: Costs, subject: Subject, size: Size, quantity: str, lengths: Sequence[int]) -> int | None:
    """The length from which a layer is faster than full attention's at all longer `lengths`; None = at none of them."""
    full = Subject("full", subject.causal)

    def slower(n: int) -> bool:
        now = size._replace(n=n)
        return costs.seconds(subject, now, quantity) >= costs.seconds(full, now, quantity)

    last = next((i for i in reversed(range(len(lengths))) if slower(lengths[i])), None)
    if last is None:
        return lengths[0]
    if last == len(lengths) - 1:
        return None
    low, high = lengths[last], lengths[last + 1]
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if slower(middle) else (low, middle)
    return high
