"""Vector instructions for maxima over tokens, feature by feature, and for their gradients.

A row is the features of one token, or a running value of each of them, given by the address of its first entry; `count`
is their number, a multiple of the lanes, as in `vectors`. Comparisons are written so that NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.extending import intrinsic

from subquad.kernels.vectors import WORD, Emitter


class _Place:
    """Where the rows stand, and the entry of each that is worked on."""

    def __init__(self, e: Emitter, addresses: tuple, count: Any, j: Any) -> None:
        self.e, self.addresses, self.count, self.j = e, addresses, count, j

    def _at(self, row: int, behind: int) -> Any:
        shift = self.e.builder.mul(self.count, WORD(behind))
        return self.e.place(self.addresses[row], self.e.builder.add(self.j, shift))

    def load(self, row: int, behind: int = 0) -> Any:
        """A vector of a row, or of one of the rows that stand directly behind it."""
        return self.e.load(self._at(row, behind))

    def store(self, value: Any, row: int, behind: int = 0) -> None:
        self.e.store(value, self._at(row, behind))


def _each(body: Callable[[Emitter, _Place, Any], None]) -> Any:
    """An operation on the rows at five addresses, vector by vector; it is given a number of their type, too."""

    def emit(context, builder, signature, arguments):
        e = Emitter(context, builder, signature.args[0])
        number, *addresses, count = arguments

        def step(j, nothing):
            body(e, _Place(e, tuple(addresses), count, j), e.splat(number))
            return []

        e.loop(count, e.lanes, [], step)
        return context.get_dummy_value()

    @intrinsic
    def rows(typingctx, number, a, b, c, d, f, count) -> Any:
        return types.void(number, *[types.intp] * 6), emit

    return rows


def _larger(e: Emitter, x: Any, y: Any) -> Any:
    wins = e.builder.or_(e.builder.fcmp_ordered(">", x, y), e.builder.fcmp_unordered("uno", x, x))
    return e.builder.select(wins, x, y)


def _smaller(e: Emitter, x: Any, y: Any) -> Any:
    wins = e.builder.or_(e.builder.fcmp_ordered("<", x, y), e.builder.fcmp_unordered("uno", x, x))
    return e.builder.select(wins, x, y)


def _known(e: Emitter, value: Any, nobody: Any) -> Any:
    """The value, or `nobody` where it is the maximum of no one."""
    return e.builder.select(e.builder.fcmp_ordered("==", value, e.constant(float("-inf"))), nobody, value)


@_each
def running_row(e, at, nobody):
    """(so far, x, out): so far = max(so far, x) = out."""
    value = _larger(e, at.load(1), at.load(0))
    at.store(value, 0)
    at.store(_known(e, value, nobody), 2)


@_each
def running_gradient(e, at, nothing):
    """(owed, grad, x, out, dx): what later maxima owe is paid to the token that has the maximum."""
    zero = e.constant(0.0)
    owed = e.builder.fadd(at.load(0), at.load(1))
    here = e.builder.fcmp_ordered("==", at.load(2), at.load(3))
    at.store(e.builder.select(here, owed, zero), 4)
    at.store(e.builder.select(here, zero, owed), 0)


@_each
def two_largest(e, at, nothing):
    """(first and behind it second, x): the two largest values so far, counted twice if equal."""
    x, first = at.load(1), at.load(0)
    at.store(_larger(e, _smaller(e, x, first), at.load(0, 1)), 0, 1)
    at.store(_larger(e, x, first), 0)


@_each
def others_row(e, at, nobody):
    """(first and second, x, out): the largest of all others."""
    first, second = at.load(0), at.load(0, 1)
    value = e.builder.select(e.builder.fcmp_ordered("==", at.load(1), first), second, first)
    at.store(_known(e, value, nobody), 2)


@_each
def gather_shares(e, at, nothing):
    """(first and second, x, grad, sums): sums of the gradients for the first and for the second, and of their numbers.

    Everyone's gradient goes to the first, that of the first to the second.
    """
    b, zero, one, grad = e.builder, e.constant(0.0), e.constant(1.0), at.load(2)
    is_first, is_second = (b.fcmp_ordered("==", at.load(1), at.load(0, behind)) for behind in range(2))
    terms = (b.select(is_first, zero, grad), b.select(is_first, grad, zero))
    terms += (b.select(is_first, one, zero), b.select(is_second, one, zero))
    for behind, term in enumerate(terms):
        at.store(b.fadd(at.load(3, behind), term), 3, behind)


@_each
def pay_shares(e, at, nothing):
    """(first and second, x, sums, dx): those who are equal share."""
    b, zero, one, found = e.builder, e.constant(0.0), e.constant(1.0), []
    for behind in range(2):
        number = at.load(2, 2 + behind)
        share = b.fdiv(at.load(2, behind), b.select(b.fcmp_ordered(">", number, one), number, one))
        found.append(b.select(b.fcmp_ordered("==", at.load(1), at.load(0, behind)), share, zero))
    at.store(b.fadd(*found), 3)


@_each
def larger_of(e, at, nothing):
    """(x, y, out): out = max(x, y)."""
    at.store(_larger(e, at.load(0), at.load(1)), 2)


@_each
def pay_half(e, at, nothing):
    """(left, right, dx of the left, dx): what is owed goes to the larger half, in equal parts where they are equal."""
    b, zero, left, right, owed = e.builder, e.constant(0.0), at.load(0), at.load(1), at.load(3)
    share = b.select(b.fcmp_ordered(">", left, right), owed, zero)
    share = b.select(b.fcmp_ordered("==", left, right), b.fmul(owed, e.constant(0.5)), share)
    at.store(b.fadd(at.load(2), share), 2)
    at.store(b.fsub(owed, share), 3)
