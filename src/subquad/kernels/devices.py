"""Which implementation an operator runs on a device, and why.

On a GPU an operator has up to three: Triton kernels ("triton", the extra `gpu`), torch's own attention kernels ("aten")
and plain torch ("reference"). `use` chooses one for a while; "auto" takes the first that can do what is asked. What was
asked for by name and cannot run raises: only "auto" chooses for itself.

Some calls cost less if the host reads sizes from the device. Where it must not, inside `without_waiting` and while a
CUDA graph is captured, they look at all pairs, or make room for all that there can be.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

IMPLS = ("auto", "triton", "aten", "reference")
WAITS = ("auto", "never")
WIDEST = 256  # head width
FEW = 1024  # tokens of a short sequence
REGISTERS, MOST_REGISTERS = 248, 255  # of a thread: for float32, and all that there are
MISSING = 'triton is not installed: pip install "subquad[gpu]"'


class Route(NamedTuple):
    impl: str
    reason: str


class Operator(NamedTuple):
    """What an operator has for a GPU."""

    name: str
    impls: tuple[str, ...]  # in the order of preference; "reference" is always there
    does: str


OPERATORS = {
    operator.name: operator
    for operator in (
        Operator("merge", ("triton", "aten", "reference"), "one softmax over the parts of a plan"),
        Operator("edges", ("triton", "reference"), "softmax over a list of edges"),
        Operator("graphs", ("triton", "reference"), "sampled graphs: listed rows; masked rows in torch operators"),
        Operator("sampler", ("reference",), "graphs of a stochastic block model, in torch operators"),
        Operator("linear", ("triton", "reference"), "prefix sums of φ(k)vᵀ"),
        Operator("clusters", ("aten", "reference"), "tokens sorted by cluster: torch's kernels for whole clusters"),
        Operator("selected", ("reference",), "blocks chosen by their scores, in torch operators"),
        Operator("compressed", ("reference",), "a window and entries of the past, in torch operators"),
        Operator("runs", ("reference",), "blocks of queries to runs of keys, in torch operators"),
        Operator("maxima", ("reference",), "running maxima, in torch operators"),
    )
}
# Both of the process, not of a thread: the backward pass of a GPU runs in a thread of its own.
_chosen: dict[object, str] = {}  # what was asked for last stands last
_refused: list[bool] = []


@contextmanager
def use(impl: str) -> Iterator[None]:
    """Inside, operators run with one implementation, in any thread: "triton", "aten", "reference" or "auto"."""
    mine = object()
    _chosen[mine] = _checked(impl, "impl")
    try:
        yield
    finally:  # what another thread has asked for since stays
        del _chosen[mine]


def chosen() -> str:
    """What `use` or the environment variable SUBQUAD_IMPL asks for."""
    asked = list(_chosen.values())
    return asked[-1] if asked else _checked(os.environ.get("SUBQUAD_IMPL") or "auto", "SUBQUAD_IMPL")


def _checked(impl: str, what: str) -> str:
    if impl not in IMPLS:
        raise ValueError(f"{what} must be one of {', '.join(IMPLS)}, not {impl!r}")
    return impl


def is_host(x: torch.Tensor) -> bool:
    """Is x where the host reads it? Elsewhere it would wait for the device, so that nothing is decided by values."""
    return x.device.type == "cpu"


@contextmanager
def without_waiting() -> Iterator[None]:
    """Inside, the host never waits for a device, in any thread: what would be read is bounded instead, which can cost
    as much as full attention. The environment variable SUBQUAD_WAIT=never does the same for a whole process.
    """
    _refused.append(True)
    try:
        yield
    finally:
        _refused.pop()


def may_wait() -> bool:
    """May the host read from a device? While a CUDA graph is captured that is an error."""
    asked = os.environ.get("SUBQUAD_WAIT") or "auto"
    if asked not in WAITS:
        raise ValueError(f"SUBQUAD_WAIT must be one of {', '.join(WAITS)}, not {asked!r}")
    return not _refused and asked == "auto" and not _captures()


def _captures() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_short(length: int | None) -> bool:
    """Does a device rather compute all pairs of a sequence, masked, than let the host wait to learn which are needed?
    None: a sequence of any length.
    """
    return not may_wait() or (length is not None and length <= FEW)


def with_contents(device: torch.device) -> torch.device:
    """The device itself, or the CPU for "meta", whose tensors have no contents to send or to keep."""
    return torch.device("cpu") if device.type == "meta" else device


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None and find_spec("triton.language") is not None


def precision(x: torch.Tensor) -> str:
    """How float32 is multiplied: as torch multiplies its own matrices."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 and x.is_cuda else "ieee"


def launch_options(dtype: torch.dtype, warps: int = 4) -> dict[str, int]:
    """What the compiler is told of registers. By itself ptxas spills some of a kernel to get one more program onto a
    multiprocessor; with a limit named it does not. AMD's compiler knows no such option.
    """
    if torch.version.hip:
        return {}
    most = REGISTERS if dtype == torch.float32 else MOST_REGISTERS
    return {"maxnreg": min(most, 65536 // (32 * warps))}  # a program must fit onto a multiprocessor


def route(operator: str, dtype: torch.dtype, width: int, *, dropout: float = 0.0) -> Route:
    """The implementation for tensors on a GPU; raises where the one asked for by name cannot do it."""
    asked = chosen()
    for impl in OPERATORS[operator].impls if asked == "auto" else (asked,):
        problem = _problem(operator, impl, dtype, width, dropout)
        if problem is None:
            if asked == "auto" and impl != "triton" and "triton" in OPERATORS[operator].impls and not has_triton():
                _say_once(operator, impl)
            return Route(impl, "asked for" if asked != "auto" else _reason(operator, impl, dtype, width, dropout))
        if asked != "auto":
            raise ValueError(f"impl={asked!r} cannot run {operator}: {problem}")
    raise AssertionError("reference can do everything")


def _problem(operator: str, impl: str, dtype: torch.dtype, width: int, dropout: float) -> str | None:
    """Why an implementation cannot do it, or None."""
    if impl == "reference":
        return None
    if impl not in OPERATORS[operator].impls:
        return f"it has {', '.join(OPERATORS[operator].impls)} only"
    if dtype == torch.float64:
        return "float64 is computed in plain torch"
    if width > WIDEST:
        return f"heads are wider than {WIDEST}"
    if impl == "triton" and not has_triton():
        return MISSING
    if impl == "aten" and dropout:
        return "torch's kernels draw their own dropout, which no seed of ours decides"
    return None


def _reason(operator: str, impl: str, dtype: torch.dtype, width: int, dropout: float) -> str:
    """Why "auto" has passed over the implementations before this one."""
    if len(OPERATORS[operator].impls) == 1:
        return "there is no other"
    before = OPERATORS[operator].impls[: OPERATORS[operator].impls.index(impl)]
    problems = [_problem(operator, other, dtype, width, dropout) for other in before]
    return "; ".join(dict.fromkeys(str(x) for x in problems)) or "the first choice"


@cache
def _say_once(operator: str, impl: str) -> None:
    warnings.warn(f"{operator} runs on impl={impl!r}: {MISSING}", stacklevel=4)
