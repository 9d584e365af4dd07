"""Vector instructions inside Numba kernels: small matrix products near the peak of a core, and what goes with them.

A kernel that walks tiles of scores multiplies matrices that fit the first-level cache. A call of a BLAS costs as much
as such a product, and the compiler does not keep the sums of a plain loop in registers: here the innermost loops are
written in LLVM's vector instructions, which every back end turns into its own (AVX2, AVX-512, NEON).

Matrices are given by the address of their first entry and by their strides in entries; the entries of a row stand side
by side, and rows of results are a multiple of LANES long. `kind` is a number of the matrices' type, float32 or float64.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature, signature
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from subquad.kernels.parallel import BYTES, called, inline

WORD = ir.IntType(64)


def fetch(builder: Any, address: Any, to_write: bool = False) -> None:
    """Ask for the cache line at an address that will soon be read or written; there need not be anything."""
    flag, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], fnty=kind)
    # into every cache, data
    builder.call(prefetch, [builder.inttoptr(address, pointer), flag(int(to_write)), flag(3), flag(1)])


class Emitter:
    """Loads, stores and arithmetic of vectors, at addresses."""

    def __init__(self, context: Any, builder: Any, kind: Any) -> None:
        self.builder, self.size = builder, kind.bitwidth // 8
        self.lanes = BYTES // self.size
        self.entry = context.get_value_type(kind)
        self.vector = ir.VectorType(self.entry, self.lanes)
        name = f"llvm.fmuladd.v{self.lanes}f{kind.bitwidth}"
        self._multiply_add = builder.module.declare_intrinsic(
            name, fnty=ir.FunctionType(self.vector, [self.vector] * 3)
        )

    def place(self, base: Any, offset: Any) -> Any:
        """base + offset entries"""
        return self.builder.add(base, self.builder.mul(offset, WORD(self.size)))

    def load(self, address: Any, type_: Any = None) -> Any:
        pointer = self.builder.inttoptr(address, (type_ or self.vector).as_pointer())
        return self.builder.load(pointer, align=self.size)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=self.size)

    def fetch(self, address: Any, to_write: bool = False) -> None:
        fetch(self.builder, address, to_write)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self._multiply_add, [a, b, c])

    def add(self, a: Any, b: Any) -> Any:
        """a + b, where it stands: a loop that adds is not unrolled to several sums, so that further terms of 0 change
        nothing. (A flag of its own keeps the instruction from being given those of FAST.)"""
        return self.builder.fadd(a, b, flags=["nsz"])

    def splat(self, value: Any) -> Any:
        """A vector of equal entries."""
        nothing = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.IntType(32)(0))
        return self.shuffle(first, nothing, [0] * self.lanes)

    def shuffle(self, a: Any, b: Any, picks: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), picks))

    def constant(self, value: float) -> Any:
        return ir.Constant(self.vector, [value] * self.lanes)

    def reduced(self, vector: Any, together: Callable[[Any, Any], Any]) -> Any:
        """All entries of a vector put together, half with half."""
        count = self.lanes
        while count > 1:
            count //= 2
            other = self.shuffle(vector, vector, [j + count if j < count else j for j in range(self.lanes)])
            vector = together(vector, other)
        return self.builder.extract_element(vector, ir.IntType(32)(0))

    def entries(self, vector: Any) -> list[Any]:
        return [self.builder.extract_element(vector, ir.IntType(32)(j)) for j in range(self.lanes)]

    def exponential(self, x: Any) -> Any:
        """e^x for x ≤ 0, entry by entry; 0 below e^-87 in float32. As `parallel.exp`, whose comments hold here."""
        builder = self.builder
        if self.size == 8:
            function = ir.FunctionType(self.vector, [self.vector])
            return builder.call(builder.module.declare_intrinsic(f"llvm.exp.v{self.lanes}f64", fnty=function), [x])
        low = self.constant(-87.0)
        tiny = builder.fcmp_ordered("<", x, low)
        y = builder.select(tiny, low, x)
        floor = builder.module.declare_intrinsic(
            f"llvm.floor.v{self.lanes}f32", fnty=ir.FunctionType(self.vector, [self.vector])
        )
        m = builder.call(floor, [self.multiply_add(y, self.constant(1.44269504), self.constant(0.5))])
        r = self.multiply_add(m, self.constant(-0.693359375), y)
        r = self.multiply_add(m, self.constant(2.12194440e-4), r)
        z = self.constant(1 / 5040)
        for divisor in (720, 120, 24, 6, 2, 1, 1):
            z = self.multiply_add(z, r, self.constant(1 / divisor))
        whole = ir.VectorType(ir.IntType(32), self.lanes)
        exponent = builder.add(builder.fptosi(m, whole), ir.Constant(whole, [127] * self.lanes))
        power = builder.bitcast(builder.shl(exponent, ir.Constant(whole, [23] * self.lanes)), self.vector)
        return builder.select(tiny, self.constant(0.0), builder.fmul(z, power))

    def loop(self, count: Any, step: int, start: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """values = body(index, values) for index = 0, step, 2·step … < count, at least once."""
        builder = self.builder
        before, inside, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(inside)
        builder.position_at_end(inside)
        index = builder.phi(WORD)
        index.add_incoming(WORD(0), before)
        values = [builder.phi(x.type) for x in start]
        for phi, x in zip(values, start, strict=True):
            phi.add_incoming(x, before)
        new = body(index, values)
        following = builder.add(index, WORD(step))
        index.add_incoming(following, builder.block)
        for phi, x in zip(values, new, strict=True):
            phi.add_incoming(x, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
        builder.position_at_end(after)
        return new


# ---- products -----------------------------------------------------------------------------------------------


def _tile(rows: int, vectors: int, add: bool) -> Any:
    """c (rows × vectors) = or += a (rows × depth) · b (depth × vectors), all sums in registers."""

    def emit(context, builder, signature, arguments):
        e = Emitter(context, builder, signature.args[0])
        a, row_a, step_a, b, row_b, c, row_c, depth = arguments[1:]
        a_rows = [e.place(a, builder.mul(WORD(r), row_a)) for r in range(rows)]

        def step(k, sums):
            right = e.place(b, builder.mul(k, row_b))
            columns = [e.load(builder.add(right, WORD(j * BYTES))) for j in range(vectors)]
            offset, new = builder.mul(k, step_a), []
            for r in range(rows):
                left = e.splat(e.load(e.place(a_rows[r], offset), e.entry))
                new += [e.multiply_add(left, columns[j], sums[r * vectors + j]) for j in range(vectors)]
            return new

        sums = e.loop(depth, 1, [e.constant(0.0)] * (rows * vectors), step)
        for at, value in enumerate(sums):
            row = e.place(c, builder.mul(WORD(at // vectors), row_c))
            address = builder.add(row, WORD(at % vectors * BYTES))
            e.store(builder.fadd(value, e.load(address)) if add else value, address)
        return context.get_dummy_value()

    @intrinsic
    def tile(typingctx, kind, a, row_a, step_a, b, row_b, c, row_c, depth) -> Any:
        return types.void(kind, *[types.intp] * 8), emit

    return tile


def _strip(vectors: int, add: bool) -> Any:
    """All rows of `vectors` vectors of c."""
    six, four, two, one = (_tile(rows, vectors, add) for rows in (6, 4, 2, 1))  # 12 sums in the 16 registers of AVX2

    @inline
    def strip(kind, m, a, row_a, step_a, b, row_b, c, row_c, depth, size):
        i, down_a, down_c = 0, row_a * size, row_c * size
        while m - i >= 6:
            six(kind, a + i * down_a, row_a, step_a, b, row_b, c + i * down_c, row_c, depth)
            i += 6
        if m - i >= 4:
            four(kind, a + i * down_a, row_a, step_a, b, row_b, c + i * down_c, row_c, depth)
            i += 4
        if m - i >= 2:
            two(kind, a + i * down_a, row_a, step_a, b, row_b, c + i * down_c, row_c, depth)
            i += 2
        if m - i >= 1:
            one(kind, a + i * down_a, row_a, step_a, b, row_b, c + i * down_c, row_c, depth)

    return strip


def _product(add: bool, turned: bool) -> Any:
    """A product of its own for each way in which a stands in memory: one step is 1, which the address then lacks."""
    two, one = _strip(2, add), _strip(1, add)

    @called
    def straight(kind, m, n, depth, a, row_a, b, row_b, c, row_c, size):
        wide, j = 2 * BYTES // size, 0
        while n - j >= wide:
            two(kind, m, a, row_a, 1, b + j * size, row_b, c + j * size, row_c, depth, size)
            j += wide
        if n > j:
            one(kind, m, a, row_a, 1, b + j * size, row_b, c + j * size, row_c, depth, size)

    @called
    def across(kind, m, n, depth, a, step_a, b, row_b, c, row_c, size):
        wide, j = 2 * BYTES // size, 0
        while n - j >= wide:
            two(kind, m, a, 1, step_a, b + j * size, row_b, c + j * size, row_c, depth, size)
            j += wide
        if n > j:
            one(kind, m, a, 1, step_a, b + j * size, row_b, c + j * size, row_c, depth, size)

    return across if turned else straight


# c (m × n) = or += a (m × depth) · b (depth × n), n a multiple of the lanes, depth ≥ 1; rows of a, or its columns when
# it is turned, stand side by side
multiply = _product(add=False, turned=False)
multiply_add = _product(add=True, turned=False)
multiply_turned = _product(add=False, turned=True)
multiply_add_turned = _product(add=True, turned=True)


# ---- rows ---------------------------------------------------------------------------------------------------


@intrinsic
def dot(typingctx, kind, a, b, count) -> Any:
    """Σ a·b over two rows of `count` entries, a multiple of the lanes."""

    def emit(context, builder, signature, arguments):
        e = Emitter(context, builder, kind)
        _, a, b, count = arguments

        def step(j, sums):
            return [e.multiply_add(e.load(e.place(a, j)), e.load(e.place(b, j)), sums[0])]

        (total,) = e.loop(count, e.lanes, [e.constant(0.0)], step)
        return e.reduced(total, e.add)

    return kind(kind, types.intp, types.intp, types.intp), emit


@intrinsic
def largest(typingctx, kind, a, count) -> Any:
    """The largest entry of a row of `count` entries, a multiple of the lanes; NaN counts as nothing."""

    def emit(context, builder, signature, arguments):
        e = Emitter(context, builder, kind)
        _, a, count = arguments

        def larger(x, y):
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        (most,) = e.loop(
            count, e.lanes, [e.constant(float("-inf"))], lambda j, top: [larger(e.load(e.place(a, j)), top[0])]
        )
        return e.reduced(most, larger)

    return kind(kind, types.intp, types.intp), emit


def each_vector(body: Callable[..., None]) -> Any:
    """An operation on rows of equal length, op(number, …, address, …, count), that goes on vector by vector.

    body(e, number, …, address, …) emits it for one vector of every row, given its address; a number, the first of the
    rows' type, is there as a vector of equal entries.
    """

    def emit(context, builder, kinds, arguments):
        e = Emitter(context, builder, kinds.args[0])
        numbers = [e.splat(x) for x, kind in zip(arguments, kinds.args, strict=True) if kind != types.intp]
        *rows, count = arguments[len(numbers) :]

        def step(j, nothing):
            body(e, *numbers, *(e.place(row, j) for row in rows))
            return []

        e.loop(count, e.lanes, [], step)
        return context.get_dummy_value()

    def operation(typingctx: Any, *kinds: Any) -> Any:
        return types.void(*(x if isinstance(x, types.Float) else types.intp for x in kinds)), emit

    context, *given = signature(body).parameters.values()
    names = [context, *given, context.replace(name="count")]
    operation.__signature__ = Signature(names)  # type: ignore[attr-defined]
    return intrinsic(operation)


@each_vector
def scale_row(e, factor, a, b):
    """a = factor · b."""
    e.store(e.builder.fmul(factor, e.load(b)), a)


@each_vector
def load_row(e, factor, a, b, later):
    """a = factor · b, while the row `later` is fetched: the rows of a head stand so far apart that no processor guesses
    which comes next."""
    e.store(e.builder.fmul(factor, e.load(b)), a)
    e.fetch(later)


@each_vector
def store_row(e, factor, a, b, later):
    """a = factor · b, while the row `later`, which will be written too, is fetched."""
    e.store(e.builder.fmul(factor, e.load(b)), a)
    e.fetch(later, to_write=True)


@each_vector
def fetch_row(e, kind, later):
    """A row that will soon be read."""
    e.fetch(later)


@each_vector
def elu_row(e, kind, a):
    """a = elu(a) + 1: e^a, or a + 1 where a is positive."""
    x, zero, b = e.load(a), e.constant(0.0), e.builder
    low = b.select(b.fcmp_ordered("<", x, zero), x, zero)
    e.store(b.fadd(e.exponential(low), b.fsub(x, low)), a)


def _store_turned(e: Emitter, rows: list[Any], b: Any, row_b: Any) -> None:
    """A square block of as many rows as a vector has lanes, transposed, to b."""
    step, every = 1, range(e.lanes)
    while step < e.lanes:  # swap the off-diagonal halves of blocks of 2·step
        for i in every:
            if not i & step:
                x, y = rows[i], rows[i | step]
                rows[i] = e.shuffle(x, y, [e.lanes + (j ^ step) if j & step else j for j in every])
                rows[i | step] = e.shuffle(x, y, [e.lanes + j if j & step else j | step for j in every])
        step *= 2
    for i, row in enumerate(rows):
        e.store(row, e.place(b, e.builder.mul(WORD(i), row_b)))


@intrinsic
def _transpose_block(typingctx, kind, a, row_a, b, row_b) -> Any:
    """b = aᵀ for a square block of as many rows as a vector has lanes."""

    def emit(context, builder, signature, arguments):
        e = Emitter(context, builder, kind)
        _, a, row_a, b, row_b = arguments
        _store_turned(e, [e.load(e.place(a, builder.mul(WORD(i), row_a))) for i in range(e.lanes)], b, row_b)
        return context.get_dummy_value()

    return types.void(kind, *[types.intp] * 4), emit


@intrinsic
def turn_block(typingctx, factor, count, a, row_a, b, row_b) -> Any:
    """b = factor · aᵀ for `count` rows, a whole vector of them or fewer: then the last one stands for the rest."""

    def emit(context, builder, signature, arguments):
        e = Emitter(context, builder, factor)
        by, count, a, row_a, b, row_b = e.splat(arguments[0]), *arguments[1:]
        last, rows = builder.sub(count, WORD(1)), []
        for i in map(WORD, range(e.lanes)):
            row = builder.select(builder.icmp_signed("<", i, count), i, last)
            rows.append(builder.fmul(by, e.load(e.place(a, builder.mul(row, row_a)))))
        _store_turned(e, rows, b, row_b)
        return context.get_dummy_value()

    return types.void(factor, *[types.intp] * 5), emit


@intrinsic
def _copy_entry(typingctx, kind, a, b) -> Any:
    """The entry at b = the entry at a."""

    def emit(context, builder, signature, arguments):
        e = Emitter(context, builder, kind)
        e.store(e.load(arguments[1], e.entry), arguments[2])
        return context.get_dummy_value()

    return types.void(kind, types.intp, types.intp), emit


@inline
def transpose(kind, count, width, a, row_a, b, row_b, size):
    """b (width × count) = aᵀ, a (count × width); `width` a multiple of the lanes."""
    lanes, j = BYTES // size, 0
    while count - j >= lanes:
        for t in range(0, width, lanes):
            _transpose_block(kind, a + (j * row_a + t) * size, row_a, b + (t * row_b + j) * size, row_b)
        j += lanes
    while j < count:
        for t in range(width):
            _copy_entry(kind, a + (j * row_a + t) * size, b + (t * row_b + j) * size)
        j += 1
