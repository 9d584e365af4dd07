"""Long kernels, compiled once: Numba would compile the body of a `prange` four times, one wrapper inside the next.

A kernel is a function of (number of the worker, workers, pointer to its arguments). It is compiled on its own, for
every combination of types that it is called with; a loop of a few lines, the same for all, calls it by its address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from subquad.kernels.parallel import FAST, inline, kernel, launch


class Workers:
    """A kernel: `function(worker, workers, arguments)`, which begins with `first, second, … = arguments[0]`.

    Whole numbers arrive as int64 (np.uint64 as such), others as float64, tuples and arrays as they are; what is
    `Described` as if it stood there itself.
    """

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.compiled: dict[tuple, Any] = {}  # by the kinds of arguments
        self.__doc__ = function.__doc__

    def __call__(self, workers: int, *arguments: Any) -> None:
        """The function for each of the workers, side by side; what they are given must outlive the call."""
        kinds, words = _described(arguments)
        made = self.compiled.get(kinds)
        if made is None:
            made = self.compiled[kinds] = self._compile(kinds)
        _spread(workers, made.address, np.array(words, dtype=np.uint64))

    def run(self, *arguments: Any) -> None:
        """The call with as many workers as torch uses threads."""
        with launch() as workers:
            self(workers, *arguments)

    def _compile(self, kinds: tuple) -> Any:
        signature = types.void(types.intp, types.intp, types.CPointer(_type(kinds)))
        return numba.cfunc(signature, cache=True, fastmath=FAST, error_model="numpy")(self.function)


class Described(NamedTuple):
    """Arguments that many calls are given: looked at once."""

    kinds: tuple
    words: list[int]
    arguments: tuple  # they must not go before the last call

    @classmethod
    def of(cls, *arguments: Any) -> Described:
        return cls(*_described(arguments), arguments)


def _described(arguments: tuple) -> tuple[tuple, list[int]]:
    """The kinds of some arguments, and their words in memory."""
    kinds: list[Any] = []
    words: list[int] = []
    for x in arguments:
        if isinstance(x, Described):
            kinds += x.kinds
            words += x.words
        elif isinstance(x, np.ndarray):
            kinds.append((x.dtype, x.ndim, x.flags.c_contiguous))
            words += (0, 0, x.size, x.itemsize, x.ctypes.data, *x.shape, *x.strides)
        elif isinstance(x, tuple):
            inner, more = _described(x)
            kinds.append(inner)
            words += more
        elif isinstance(x, (float, np.floating)):
            kinds.append("float")
            words.append(int(np.float64(x).view(np.uint64)))
        else:
            kinds.append("word" if isinstance(x, np.uint64) else "whole")
            words.append(int(x) % (1 << 64))
    return tuple(kinds), words


def _type(kind: Any) -> Any:
    """Numba's type of an argument of some kind; each of its words has 8 bytes."""
    if isinstance(kind, str):
        return {"float": types.float64, "word": types.uint64, "whole": types.int64}[kind]
    if isinstance(kind[0], np.dtype):
        return types.Array(numba.from_dtype(kind[0]), kind[1], "C" if kind[2] else "A")
    return types.Tuple([_type(x) for x in kind])


@inline
def keep(*arrays):
    """At the end of a kernel that has used arrays by their addresses: Numba frees an array after its last use."""


def queue() -> np.ndarray:
    """The number of the next task, which the workers of one call share: who is done takes it, see `following`."""
    return np.zeros(1, dtype=np.int64)


@intrinsic
def following(typingctx, address) -> Any:
    """The number at the address of a queue, which is one larger from then on: no two workers get the same."""

    def emit(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, ir.IntType(64)(1), "monotonic")

    return types.int64(types.intp), emit


@intrinsic
def _call(typingctx, address, worker, workers, given) -> Any:
    """The function at an address."""

    def emit(context, builder, signature, arguments):
        address, worker, workers, given = arguments
        memory = ir.IntType(8).as_pointer()
        function = ir.FunctionType(ir.VoidType(), [worker.type, workers.type, memory])
        where = builder.inttoptr(address, function.as_pointer())
        builder.call(where, [worker, workers, builder.inttoptr(given, memory)])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), emit


@kernel
def _spread(workers, address, words):
    given = words.ctypes.data
    for worker in numba.prange(workers):
        _call(address, worker, workers, given)
