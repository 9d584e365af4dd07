"""Vector instructions for rows of scores: exponentials, their gradients, sums of rows.

Rows are given by the addresses of their first entries; `count` is a multiple of the lanes, as in `vectors`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from subquad.kernels.vectors import Emitter


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


@intrinsic
def gradient_row(typingctx, base, less, scale, s, ds, count) -> Any:
    """s = exp(s - base), the weights; ds = s·(ds - less)·scale, the gradients of the scores."""

    def emit(context, builder, signature, arguments):
        e = Emitter(context, builder, base)
        base_, less_, scale_ = (e.splat(x) for x in arguments[:3])
        s, ds, count = arguments[3:]

        def step(j, nothing):
            weight = e.exponential(builder.fsub(e.load(e.place(s, j)), base_))
            e.store(weight, e.place(s, j))
            change = builder.fsub(e.load(e.place(ds, j)), less_)
            e.store(builder.fmul(builder.fmul(weight, change), scale_), e.place(ds, j))
            return []

        e.loop(count, e.lanes, [], step)
        return context.get_dummy_value()

    return types.void(base, base, base, types.intp, types.intp, types.intp), emit


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


@intrinsic
def gradient_across(typingctx, kind, s, ds, base, less, count) -> Any:
    """As `gradient_row`, unscaled, where every entry has a base and a `less` of its own."""

    def emit(context, builder, signature, arguments):
        e = Emitter(context, builder, kind)
        _, s, ds, base, less, count = arguments

        def step(j, nothing):
            weight = e.exponential(builder.fsub(e.load(e.place(s, j)), e.load(e.place(base, j))))
            e.store(weight, e.place(s, j))
            change = builder.fsub(e.load(e.place(ds, j)), e.load(e.place(less, j)))
            e.store(builder.fmul(weight, change), e.place(ds, j))
            return []

        e.loop(count, e.lanes, [], step)
        return context.get_dummy_value()

    return types.void(kind, *[types.intp] * 5), emit


@intrinsic
def add_row(typingctx, factor, a, b, count) -> Any:
    """a += factor · b."""

    def emit(context, builder, signature, arguments):
        e = Emitter(context, builder, factor)
        by, a, b, count = e.splat(arguments[0]), *arguments[1:]

        def step(j, nothing):
            e.store(e.multiply_add(by, e.load(e.place(b, j)), e.load(e.place(a, j))), e.place(a, j))
            return []

        e.loop(count, e.lanes, [], step)
        return context.get_dummy_value()

    return types.void(factor, types.intp, types.intp, types.intp), emit


@intrinsic
def larger_row(typingctx, kind, a, b, count) -> Any:
    """a = max(a, b), NaN where one of them is."""

    def emit(context, builder, signature, arguments):
        e = Emitter(context, builder, kind)
        _, a, b, count = arguments

        def step(j, nothing):
            x, y = e.load(e.place(a, j)), e.load(e.place(b, j))
            wins = builder.or_(builder.fcmp_ordered(">", x, y), builder.fcmp_unordered("uno", x, x))
            e.store(builder.select(wins, x, y), e.place(a, j))
            return []

        e.loop(count, e.lanes, [], step)
        return context.get_dummy_value()

    return types.void(kind, types.intp, types.intp, types.intp), emit


@intrinsic
def fill_row(typingctx, value, a, count) -> Any:
    """a = value."""

    def emit(context, builder, signature, arguments):
        e = Emitter(context, builder, value)
        value_, a, count = e.splat(arguments[0]), *arguments[1:]

        def step(j, nothing):
            e.store(value_, e.place(a, j))
            return []

        e.loop(count, e.lanes, [], step)
        return context.get_dummy_value()

    return types.void(value, types.intp, types.intp), emit


@intrinsic
def byte_at(typingctx, address) -> Any:
    """The byte that stands at an address."""

    def emit(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        return builder.load(pointer)

    return types.uint8(types.intp), emit
