"""Vector instructions for rows of scores: exponentials, their gradients, sums of rows.

Rows are given by the addresses of their first entries; `count` is a multiple of the lanes, as in `vectors`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from subquad.kernels.vectors import Emitter, each_vector


@intrinsic
def exp_row(typingctx, base, a, count) -> Any:
    """a = exp(a - base), entries at most `base`; their sum."""

    def emit(context, builder, signature, arguments):
        e = Emitter(context, builder, base)
        less, a, count = e.splat(arguments[0]), arguments[1], arguments[2]

        def step(j, sums):
            weight = e.exponential(builder.fsub(e.load(e.place(a, j)), less))
            e.store(weight, e.place(a, j))
            return [e.add(sums[0], weight)]

        (total,) = e.loop(count, e.lanes, [e.constant(0.0)], step)
        return e.reduced(total, e.add)

    return base(base, types.intp, types.intp), emit


@each_vector
def gradient_row(e, base, less, scale, s, ds):
    """s = exp(s - base), the weights; ds = s·(ds - less)·scale, the gradients of the scores."""
    weight = e.exponential(e.builder.fsub(e.load(s), base))
    e.store(weight, s)
    change = e.builder.fsub(e.load(ds), less)
    e.store(e.builder.fmul(e.builder.fmul(weight, change), scale), ds)


@intrinsic
def absorb_columns(typingctx, kind, s, row_s, count, top, total, less) -> Any:
    """A vector of columns of scores, `count` rows, into the state of running softmaxes, one per lane.

    s = exp(s - the largest so far); `top`, the largest so far, and `total`, the sum of exponentials, are brought up to
    date, and `less` is what sums from before have to be multiplied by.
    """

    def emit(context, builder, signature, arguments):
        e = Emitter(context, builder, kind)
        _, s, row_s, count, top, total, less = arguments
        before = e.load(top)

        def larger(x, y):  # y where x is NaN
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        def row(k):
            return e.place(s, builder.mul(k, row_s))

        (new,) = e.loop(count, 1, [before], lambda k, best: [larger(e.load(row(k)), best[0])])
        none = builder.fcmp_ordered("==", new, e.constant(float("-inf")))  # no key, or nothing but NaN
        base = builder.select(none, e.constant(0.0), new)

        def step(k, sums):
            weight = e.exponential(builder.fsub(e.load(row(k)), base))
            e.store(weight, row(k))
            return [e.add(sums[0], weight)]

        (here,) = e.loop(count, 1, [e.constant(0.0)], step)
        factor = e.exponential(builder.fsub(before, base))
        e.store(e.multiply_add(e.load(total), factor, here), total)
        e.store(new, top)
        e.store(factor, less)
        return context.get_dummy_value()

    return types.void(kind, *[types.intp] * 6), emit


@each_vector
def gradient_across(e, kind, s, ds, base, less):
    """As `gradient_row`, unscaled, where every entry has a base and a `less` of its own."""
    weight = e.exponential(e.builder.fsub(e.load(s), e.load(base)))
    e.store(weight, s)
    e.store(e.builder.fmul(weight, e.builder.fsub(e.load(ds), e.load(less))), ds)


@each_vector
def add_row(e, factor, a, b):
    """a += factor · b."""
    e.store(e.multiply_add(factor, e.load(b), e.load(a)), a)


@each_vector
def larger_row(e, kind, a, b):
    """a = max(a, b), NaN where one of them is."""
    x, y = e.load(a), e.load(b)
    wins = e.builder.or_(e.builder.fcmp_ordered(">", x, y), e.builder.fcmp_unordered("uno", x, x))
    e.store(e.builder.select(wins, x, y), a)


@each_vector
def fill_row(e, value, a):
    """a = value."""
    e.store(value, a)


@intrinsic
def byte_at(typingctx, address) -> Any:
    """The byte that stands at an address."""

    def emit(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        return builder.load(pointer)

    return types.uint8(types.intp), emit
