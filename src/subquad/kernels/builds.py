"""Every Triton kernel with the arguments that it is launched with, to compile it ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class Made(NamedTuple):
    function: Any
    signature: dict[str, Any]  # the types of its arguments, in order
    constants: dict[str, Any]
    warps: int
    stages: int
    tile: str


class Entry(NamedTuple):
    name: str
    make: Callable[[str, int, torch.dtype], Made]  # Triton's name of the dtype, head width, dtype
    dtypes: tuple[str, ...] = ()  # () = all


def entries() -> Iterator[Entry]:
    yield Entry("merge forward", lambda *about: _merge("forward", *about))
    yield Entry("merge dq", lambda *about: _merge("query_gradient", *about))
    yield Entry("merge dk, dv", lambda *about: _merge("key_gradient", *about))


def _merge(kernel: str, kind: str, width: int, dtype: torch.dtype) -> Made:
    """Two sources (tokens and summaries), no mask, no dropout: what a Combiner runs."""
    from subquad.kernels.merge import triton_tiles as tiles
    from subquad.kernels.merge.gpu import shapes

    shape, pointer = shapes(width, dtype)[kernel], f"*{kind}"
    source = (pointer, "i64", "i64", "i64", pointer, "i64", "i64", "i64", pointer, "i32", "i32")
    tables = {name: "*i32" for name in ("spans", "tiles", "starts", "rectangles")}
    strides = {f"{x}_{y}": "i64" for x in "qg" for y in ("batch", "head", "row")}
    numbers = {"heads": "i32", "rows": "i32", "span_step": "i32", "scale": "fp32", "rate": "fp32", "up": "fp32"}
    constants = {
        "D": width,
        "DP": max(16, 1 << (width - 1).bit_length()),
        "BM": shape.queries,
        "BN": shape.keys,
        "RULES": 0,
        "VALID": False,
        "DROP": False,
        "ADD": False,
        "PRECISION": "tf32",
    }
    given: dict[str, Any] = {"Q": pointer, "Grad": pointer, "Lse": "*fp32", "Delta": "*fp32"}
    if kernel == "forward":
        function = tiles.forward_tiles
        given = {"Q": pointer, "Out": pointer, "Lse": "*fp32", "sources": (source, source)}
        strides = {name: x for name, x in strides.items() if name[0] == "q"}
        constants = {"SOURCES": 2, **constants}
    elif kernel == "query_gradient":
        function = tiles.query_gradient_tiles
        given |= {"Dq": pointer, "sources": (source, source)}
        constants = {"SOURCES": 2, **constants}
    else:
        function = tiles.key_gradient_tiles
        given |= {"Dk": pointer, "Dv": pointer, "source": source}
        numbers = {"heads": "i32", "rows": "i32", "keys": "i32", **dict(list(numbers.items())[2:]), "before": "i32"}
    signature = {**given, **tables, "seed": "*i64", **strides, **numbers}
    return Made(function, signature, constants, shape.warps, shape.stages, f"{shape.queries}×{shape.keys}")
