"""Parallel Numba kernels beside torch: how many threads they use, and when they may be started.

Numba's threading layer is OpenMP or TBB where there is one, else its own work queue, which ends the process when two
threads start kernels at once: there launches wait for each other. After a fork, OpenMP would end the child: there a
launch raises an error that says what to do.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
import torch
from numba.core import event
from numba.extending import overload

from subquad.core.child import first_to_tell

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


event.register("numba:compile", Announcement())

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
