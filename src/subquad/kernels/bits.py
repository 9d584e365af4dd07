"""Words of 64 bits inside Numba kernels, and sums of rows that a word picks, in vector instructions.

Bit b of a word says whether row b of 64 takes part; a number per set bit stands in an array, the lowest bit first.
Rows are given by addresses and strides in entries, as in `vectors`, and are a multiple of the lanes long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from subquad.kernels.parallel import inline
from subquad.kernels.vectors import BYTES, WORD, Emitter

VECTORS = 8  # of a row that are summed together: half of the 16 registers of AVX2


@intrinsic
def lowest(typingctx, word) -> Any:
    """The number of the lowest set bit of a word that is not 0."""

    def emit(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.uintp(types.uint64), emit


@intrinsic
def ones(typingctx, word) -> Any:
    """How many bits of a word are set."""

    def emit(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.intp(types.uint64), emit


def _each_bit(e: Emitter, word: Any, start: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """values = body(number, values) for every set bit of a word that is not 0, the lowest first."""
    builder = e.builder
    before, inside, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(inside)
    builder.position_at_end(inside)
    left = builder.phi(WORD)
    left.add_incoming(word, before)
    values = [builder.phi(x.type) for x in start]
    for phi, x in zip(values, start, strict=True):
        phi.add_incoming(x, before)
    new = body(builder.cttz(left, ir.IntType(1)(1)), values)
    rest = builder.and_(left, builder.sub(left, WORD(1)))
    left.add_incoming(rest, builder.block)
    for phi, x in zip(values, new, strict=True):
        phi.add_incoming(x, builder.block)
    builder.cbranch(builder.icmp_unsigned("!=", rest, WORD(0)), inside, after)
    builder.position_at_end(after)
    return new


def _gather(vectors: int) -> Any:
    """out += Σ_b weight_b · y_b, the sums in registers."""

    @intrinsic
    def gather(typingctx, kind, word, weights, y, row_y, out) -> Any:
        def emit(context, builder, signature, arguments):
            e = Emitter(context, builder, kind)
            _, word, weights, y, row_y, out = arguments
            step, places = builder.mul(row_y, WORD(e.size)), [builder.add(out, WORD(j * BYTES)) for j in range(vectors)]

            def add(number, values):
                at, *sums = values
                row, weight = builder.add(y, builder.mul(number, step)), e.splat(e.load(at, e.entry))
                rows = [e.load(builder.add(row, WORD(j * BYTES))) for j in range(vectors)]
                new = [e.multiply_add(weight, x, total) for x, total in zip(rows, sums, strict=True)]
                return [builder.add(at, WORD(e.size)), *new]

            _, *sums = _each_bit(e, word, [weights, *map(e.load, places)], add)
            for total, place in zip(sums, places, strict=True):
                e.store(total, place)
            return context.get_dummy_value()

        return types.void(kind, types.uint64, *[types.intp] * 4), emit

    return gather


def _scatter(vectors: int) -> Any:
    """out_b += weight_b · x, the row x in registers."""

    @intrinsic
    def scatter(typingctx, kind, word, weights, x, out, row_out) -> Any:
        def emit(context, builder, signature, arguments):
            e = Emitter(context, builder, kind)
            _, word, weights, x, out, row_out = arguments
            step = builder.mul(row_out, WORD(e.size))
            own = [e.load(builder.add(x, WORD(j * BYTES))) for j in range(vectors)]

            def add(number, values):
                row, weight = builder.add(out, builder.mul(number, step)), e.splat(e.load(values[0], e.entry))
                for j in range(vectors):
                    place = builder.add(row, WORD(j * BYTES))
                    e.store(e.multiply_add(weight, own[j], e.load(place)), place)
                return [builder.add(values[0], WORD(e.size))]

            _each_bit(e, word, [weights], add)
            return context.get_dummy_value()

        return types.void(kind, types.uint64, *[types.intp] * 4), emit

    return scatter


_gathers = tuple(_gather(vectors) for vectors in (8, 4, 2, 1))
_scatters = tuple(_scatter(vectors) for vectors in (8, 4, 2, 1))
_gather8, _gather4, _gather2, _gather1 = _gathers
_scatter8, _scatter4, _scatter2, _scatter1 = _scatters


@inline
def gather_sum(kind, word, weights, y, row_y, out, vectors):
    """out += Σ over the set bits b of a word that is not 0 of weight_b · y_b: rows of up to 8 vectors."""
    at = 0
    if vectors >= 8:
        _gather8(kind, word, weights, y, row_y, out)
        at += 8
    if vectors - at >= 4:
        _gather4(kind, word, weights, y + at * BYTES, row_y, out + at * BYTES)
        at += 4
    if vectors - at >= 2:
        _gather2(kind, word, weights, y + at * BYTES, row_y, out + at * BYTES)
        at += 2
    if vectors - at >= 1:
        _gather1(kind, word, weights, y + at * BYTES, row_y, out + at * BYTES)


@inline
def scatter_sum(kind, word, weights, x, out, row_out, vectors):
    """out_b += weight_b · x for the set bits b of a word that is not 0: rows of up to 8 vectors."""
    at = 0
    if vectors >= 8:
        _scatter8(kind, word, weights, x, out, row_out)
        at += 8
    if vectors - at >= 4:
        _scatter4(kind, word, weights, x + at * BYTES, out + at * BYTES, row_out)
        at += 4
    if vectors - at >= 2:
        _scatter2(kind, word, weights, x + at * BYTES, out + at * BYTES, row_out)
        at += 2
    if vectors - at >= 1:
        _scatter1(kind, word, weights, x + at * BYTES, out + at * BYTES, row_out)
