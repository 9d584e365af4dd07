"""CPU kernels beside torch: how many threads they use, when they may be started, and what they are given.

Numba's threading layer is OpenMP or TBB where there is one, else its own work queue, which ends the process when two
threads start kernels at once: there launches wait for each other. After a fork, OpenMP would end the child: there a
launch raises an error that says what to do.

Short kernels are loops with a `prange` (`kernel`). Long ones are compiled once (`Workers`): Numba would compile the
body of a `prange` four times, one wrapper inside the next. Such a kernel is a function of (number of the worker,
workers, pointer to its arguments). It is compiled on its own, for every combination of types that it is called with; a
loop of a few lines, the same for all, calls it by its address. Tensors are given to it by address and strides, with the
entries of a row side by side.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba.core import event, types
from numba.extending import intrinsic, overload
from torch import Tensor

from subquad.core.child import first_to_tell
from subquad.kernels import devices

BYTES = 32  # of a vector
FAST = {"reassoc", "contract", "arcp", "nsz"}  # without nnan and ninf: -inf and NaN keep their meaning
_INSIDE: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # only kernels call them
inline = numba.njit(fastmath=FAST, error_model="numpy", forceinline=True, **_INSIDE)
pasted = numba.njit(fastmath=FAST, error_model="numpy", inline="always", **_INSIDE)  # long functions, used once
called = numba.njit(fastmath=FAST, error_model="numpy", **_INSIDE)  # long functions, used often: compiled once
kernel = numba.njit(fastmath=FAST, error_model="numpy", parallel=True, cache=True)  # short ones, with a prange


class Announcement(event.Listener):
    """Says once that kernels are being compiled: the first call of a mechanism then takes seconds."""

    said = False

    def on_start(self, event: event.Event) -> None:
        if self.said or not event.data["dispatcher"].py_func.__module__.startswith("subquad."):
            return
        self.said = True
        if not first_to_tell("kernels"):
            return
        logging.getLogger("subquad").warning(
            "subquad compiles its CPU kernels for this machine, which takes some seconds; later runs load them from "
            "Numba's cache."
        )

    def on_end(self, event: event.Event) -> None:
        pass


_announcement = Announcement()
event.register("numba:compile", _announcement)


def has_compiled() -> bool:
    """Whether this process has compiled a kernel, instead of loading it."""
    return _announcement.said


_one_at_a_time = threading.RLock()
_state = {"layer": "", "forked": False}  # the threading layer is known once a kernel has run


def _in_child() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.RLock()  # another thread of the parent may have held it
    _state["forked"] = bool(_state["layer"])


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def launch() -> Iterator[int]:
    """Around every start of a kernel: gives the number of threads, as many as torch uses."""
    if _state["forked"] and _state["layer"] == "omp":
        raise RuntimeError(
            "this process was forked after subquad's CPU kernels had run on OpenMP, which cannot be used on both sides "
            "of a fork: start workers with multiprocessing_context='spawn', or set NUMBA_THREADING_LAYER=workqueue"
        )
    with _guard():
        before = numba.get_num_threads()
        threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
        numba.set_num_threads(threads)
        try:
            yield threads
        finally:
            numba.set_num_threads(before)
            if not _state["layer"]:
                _state["layer"] = _threading_layer()


@contextmanager
def _guard() -> Iterator[None]:
    if _state["layer"] in ("omp", "tbb"):
        yield
        return
    with _one_at_a_time:
        yield


def _threading_layer() -> str:
    try:
        return numba.threading_layer()
    except ValueError:  # no parallel kernel has run yet
        return ""


def run(function: Callable, *arguments: object) -> None:
    """function(*arguments), a kernel."""
    with launch():
        function(*arguments)


def run_rows(function: Callable, shape: tuple[int, ...], *arguments: object) -> None:
    """A kernel over (instances, n, ·) rows, in tasks of up to 64 rows of one instance."""
    instances, n = shape[:2]
    with launch() as workers:
        rows = max(1, min(64, instances * n // (4 * workers)))
        function(workers, instances * -(-n // rows), rows, *arguments)


def exp(x):
    """e^x for x <= 0; in float32 in a form that LLVM vectorises, which a call of the C library is not."""


@overload(exp, jit_options={"fastmath": FAST})
def _(x):
    def polynomial(x):  # e^x = 2^m · e^r, r = x - m·ln 2 in [-ln 2 / 2, ln 2 / 2], with ln 2 as two floats
        y = np.float32(-87) if x < np.float32(-87) else x  # written so that NaN stays NaN
        m = np.floor(y * np.float32(1.44269504) + np.float32(0.5))
        r = (y - m * np.float32(0.693359375)) + m * np.float32(2.12194440e-4)
        z = np.float32(1 / 5040) * r + np.float32(1 / 720)
        z = ((z * r + np.float32(1 / 120)) * r + np.float32(1 / 24)) * r + np.float32(1 / 6)
        z = ((z * r + np.float32(0.5)) * r + np.float32(1)) * r + np.float32(1)
        z *= np.int32((np.int32(m) + np.int32(127)) << np.int32(23)).view(np.float32)
        return np.float32(0) if x < np.float32(-87) else z

    return polynomial if x == numba.float32 else lambda x: math.exp(x)


# ---- long kernels, compiled once ----------------------------------------------------------------------------


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


# ---- tensors as kernels take them ---------------------------------------------------------------------------


def fits(*tensors: Tensor) -> bool:
    """On a CPU, of a type and a width that there are vectors of?"""
    kinds = (torch.float32, torch.float64)
    return all(devices.is_host(x) and x.dtype in kinds and x.shape[-1] * x.element_size() % BYTES == 0 for x in tensors)


def ready(x: Tensor) -> Tensor:
    """With the entries of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def filled(x: Tensor) -> Tensor:
    """The same, with rows that are filled up with zeros to whole vectors; `cut` is the inverse."""
    spare = -x.shape[-1] % (BYTES // x.element_size())
    return F.pad(x, (0, spare)) if spare else ready(x)


def cut(x: Tensor, width: int) -> Tensor:
    """The first entries of every row, one row behind the other in memory where others are left out."""
    return x if x.shape[-1] == width else x[..., :width].contiguous()


def matrix(x: Tensor) -> tuple[int, ...]:
    """The address, and the strides of all dimensions but the last."""
    assert x.stride(-1) == 1 and x.device.type == "cpu"  # a kernel follows the address
    return x.data_ptr(), *x.stride()[:-1]
