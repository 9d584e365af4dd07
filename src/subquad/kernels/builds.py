"""Every Triton kernel with the arguments that it is launched with, to compile it ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from subquad.kernels import devices


class Made(NamedTuple):
    function: Any
    signature: dict[str, Any]  # the types of its arguments, in order
    constants: dict[str, Any]
    warps: int
    stages: int
    tile: str
    options: dict[str, int]  # what a launch tells the compiler beside


class Entry(NamedTuple):
    name: str
    make: Callable[[str, int, torch.dtype], Made]  # Triton's name of the dtype, head width, dtype
    dtypes: tuple[str, ...] = ()  # () = all
    multiplies: bool = True  # matrices, by the tensor cores


def entries() -> Iterator[Entry]:
    yield Entry("merge forward", lambda *about: _merge("forward", *about))
    yield Entry("merge dq", lambda *about: _merge("query_gradient", *about))
    yield Entry("merge dk, dv", lambda *about: _merge("key_gradient", *about))
    for name in ("edges forward", "edges backward", "edges sums"):  # half precision is made float32 before
        yield Entry(name, partial(_edges, name), ("float32",), multiplies=False)
    for name in ("linear forward", "linear da", "linear db"):
        yield Entry(name, partial(_walk, name), ("float32",))


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
    return Made(
        function, signature, constants, *shape[2:], f"{shape.queries}×{shape.keys}", devices.launch_options(dtype)
    )


def _edges(name: str, kind: str, width: int, dtype: torch.dtype) -> Made:
    """Lists without a key mask and without dropout; the backward with the straight-through gradient of SBM."""
    from subquad.kernels.edges import gpu, rows

    kernels: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
        "edges forward": (rows.attention_rows, ("Out",), ("n", "m", "heads", "group", "graphs", "share"), {}),
        "edges backward": (
            rows.gradient_rows,
            ("Grad", "Dq", "Ds", "P", "Credit"),
            ("n", "m", "edges", "heads", "group", "graphs", "share", "reach"),
            {"MODE": gpu.MODES["pre"]},
        ),
        "edges sums": (rows.sum_rows, (), ("n", "m", "edges", "spread", "gather", "graphs", "share"), {"MOVED": True}),
    }
    function, outputs, numbers, constants = kernels[name]
    whole = dict.fromkeys(numbers, "i32")
    sizes = {**gpu.widths(width), **constants}
    if name == "edges sums":
        given = {x: f"*{kind}" for x in ("W", "X", "Out")} | {"indptr": "*i64", "places": "*i32", "slots": "*i64"}
        return Made(function, given | whole, sizes, 4, 3, f"1×{gpu.EDGES}", devices.launch_options(dtype))
    given = {x: f"*{kind}" for x in ("Q", "K", "V", *outputs)} | {"indptr": "*i64", "indices": "*i32"}
    given |= {x: f"*{kind}" for x in ("real", "numbers", "columns", "seed")}  # not there: queries stand for them
    real = dict.fromkeys(("scale", "rate", "up"), "fp32")
    constants = {**sizes, "MASK": False, "DROP": False}
    return Made(function, given | whole | real, constants, 4, 3, f"1×{gpu.EDGES}", devices.launch_options(dtype))


def _walk(name: str, kind: str, width: int, dtype: torch.dtype) -> Made:
    """As many features as the head is wide; the gradient of b as that of v, with one number more per token."""
    from subquad.kernels.linear import gpu
    from subquad.kernels.linear.triton_walk import walk

    given = {x: f"*{kind}" for x in ("X", "Y", "Z", "S", "P", "R", "Out", "Total")} | {"n": "i32", "chunks": "i32"}
    sizes = gpu.constants(width, width)
    chosen = {"REVERSE": name == "linear db", "EXTRA": name != "linear forward", "TOTAL": name == "linear forward"}
    constants = {**sizes, **chosen, "SCALED": False, "PRECISION": "tf32"}
    return Made(walk, given, constants, gpu.shape(width).warps, gpu.STAGES, f"{sizes['C']}×{sizes['BD']}", {})
