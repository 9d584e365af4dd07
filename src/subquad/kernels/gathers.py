"""Rows fetched by a list of their numbers, inside Numba kernels and in vector instructions: dot products and sums.

Rows are given by addresses and strides in entries, as in `vectors`, and are a multiple of the lanes long; numbers are
int32. Rows of an array that does not fit the cache are fetched ahead of their turn: a list says who comes next, which
the processor cannot guess.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from subquad.kernels.parallel import inline
from subquad.kernels.vectors import BYTES, WORD, Emitter, fetch

AHEAD = 16  # rows: fewer come too late from behind the second-level cache, more do not fit the first
LINE = 64  # bytes
CACHE = 2**18  # bytes: larger arrays are asked for ahead
_NUMBER = ir.IntType(32)


@intrinsic
def fetch_ahead(typingctx, address) -> Any:
    """Ask for the cache line at an address that will soon be read."""

    def emit(context, builder, signature, arguments):
        fetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.intp), emit


class _Rows:
    """The rows of y that a list names."""

    def __init__(self, e: Emitter, vectors: int, far: bool, keys: Any, known: Any, y: Any, row_y: Any) -> None:
        self.e, self.vectors, self.far, self.keys, self.known, self.y = e, vectors, far, keys, known, y
        self.step = e.builder.mul(row_y, WORD(e.size))

    def load(self, index: Any) -> list[Any]:
        """The vectors of the row that stands at `index` of the list."""
        builder = self.e.builder
        if self.far:
            later = builder.add(index, WORD(AHEAD))
            last = builder.sub(self.known, WORD(1))
            self._ask(self._place(builder.select(builder.icmp_signed("<", later, last), later, last)))
        place = self._place(index)
        return [self.e.load(builder.add(place, WORD(j * BYTES))) for j in range(self.vectors)]

    def _place(self, index: Any) -> Any:
        builder = self.e.builder
        number = self.e.load(builder.add(self.keys, builder.mul(index, WORD(4))), _NUMBER)
        return builder.add(self.y, builder.mul(builder.sext(number, WORD), self.step))

    def _ask(self, place: Any) -> None:
        for offset in range(0, self.vectors * BYTES, LINE):
            self.e.fetch(self.e.builder.add(place, WORD(offset)))


def _dots(vectors: int, far: bool) -> Any:
    """out[i] += scale · x·y[keys[i]], x in registers."""

    @intrinsic
    def dots(typingctx, scale, count, x, keys, known, y, row_y, out) -> Any:
        def emit(context, builder, signature, arguments):
            e = Emitter(context, builder, scale)
            by, count, x, keys, known, y, row_y, out = arguments
            rows = _Rows(e, vectors, far, keys, known, y, row_y)
            own = [e.load(builder.add(x, WORD(j * BYTES))) for j in range(vectors)]

            def one(index, nothing):
                row, sums = rows.load(index), []
                for j in range(vectors):  # four independent sums: an addition waits for the one before
                    if j < 4:
                        sums.append(builder.fmul(own[j], row[j]))
                    else:
                        sums[j % 4] = e.multiply_add(own[j], row[j], sums[j % 4])
                while len(sums) > 1:
                    sums = [builder.fadd(a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
                total, half = sums[0], e.lanes // 2
                while half:
                    picks = [(j + half) % e.lanes for j in range(e.lanes)]
                    total, half = builder.fadd(total, e.shuffle(total, total, picks)), half // 2
                value = builder.fmul(by, builder.extract_element(total, ir.IntType(32)(0)))
                place = e.place(out, index)
                e.store(builder.fadd(value, e.load(place, e.entry)), place)
                return []

            e.loop(count, 1, [], one)
            return context.get_dummy_value()

        return types.void(scale, *[types.intp] * 7), emit

    return dots


def _sums(vectors: int, far: bool) -> Any:
    """out += Σ weights[i] · y[keys[i]], the sums in registers."""

    @intrinsic
    def sums(typingctx, kind, count, weights, keys, known, y, row_y, out) -> Any:
        def emit(context, builder, signature, arguments):
            e = Emitter(context, builder, kind)
            _, count, weights, keys, known, y, row_y, out = arguments
            rows = _Rows(e, vectors, far, keys, known, y, row_y)
            places = [builder.add(out, WORD(j * BYTES)) for j in range(vectors)]

            def one(index, totals):
                weight = e.splat(e.load(e.place(weights, index), e.entry))
                return [e.multiply_add(weight, x, total) for x, total in zip(rows.load(index), totals, strict=True)]

            for total, place in zip(e.loop(count, 1, [e.load(x) for x in places], one), places, strict=True):
                e.store(total, place)
            return context.get_dummy_value()

        return types.void(kind, *[types.intp] * 7), emit

    return sums


_dots8, _dots4, _dots2, _dots1 = (_dots(vectors, False) for vectors in (8, 4, 2, 1))
_sums8, _sums4, _sums2, _sums1 = (_sums(vectors, False) for vectors in (8, 4, 2, 1))
_far_dots8, _far_sums8 = _dots(8, True), _sums(8, True)


@inline
def dot_rows(scale, count, x, keys, known, y, row_y, out, vectors, far):
    """out[i] += scale · x·y[keys[i]] for i < count ≥ 1; numbers up to keys[known - 1] may be read."""
    at = 0
    while vectors - at >= 8:
        if far:
            _far_dots8(scale, count, x + at * BYTES, keys, known, y + at * BYTES, row_y, out)
        else:
            _dots8(scale, count, x + at * BYTES, keys, known, y + at * BYTES, row_y, out)
        at += 8
    if vectors - at >= 4:
        _dots4(scale, count, x + at * BYTES, keys, known, y + at * BYTES, row_y, out)
        at += 4
    if vectors - at >= 2:
        _dots2(scale, count, x + at * BYTES, keys, known, y + at * BYTES, row_y, out)
        at += 2
    if vectors - at >= 1:
        _dots1(scale, count, x + at * BYTES, keys, known, y + at * BYTES, row_y, out)


@inline
def sum_rows(kind, count, weights, keys, known, y, row_y, out, vectors, far):
    """out += Σ weights[i] · y[keys[i]] for i < count ≥ 1; numbers up to keys[known - 1] may be read."""
    at = 0
    while vectors - at >= 8:
        if far:
            _far_sums8(kind, count, weights, keys, known, y + at * BYTES, row_y, out + at * BYTES)
        else:
            _sums8(kind, count, weights, keys, known, y + at * BYTES, row_y, out + at * BYTES)
        at += 8
    if vectors - at >= 4:
        _sums4(kind, count, weights, keys, known, y + at * BYTES, row_y, out + at * BYTES)
        at += 4
    if vectors - at >= 2:
        _sums2(kind, count, weights, keys, known, y + at * BYTES, row_y, out + at * BYTES)
        at += 2
    if vectors - at >= 1:
        _sums1(kind, count, weights, keys, known, y + at * BYTES, row_y, out + at * BYTES)
