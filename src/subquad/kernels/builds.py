"""Every Triton kernel with the arguments that it is launched with, to compile it ahead of time.

Key masks, dropout and the rules of spans and trees are variants of a kernel. Grouped heads and strides are numbers of a
launch. Float32 has two: its products are those of float32, or TF32 where torch is allowed to use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from subquad.kernels import devices


class Launch(NamedTuple):
    function: Any
    signature: dict[str, Any]  # the types of its arguments, in order
    constants: dict[str, Any]
    warps: int
    stages: int
    tile: str
    options: dict[str, int]  # what a launch tells the compiler beside


class Kind(NamedTuple):
    """What the tensors are, and how they are multiplied."""

    triton: str  # Triton's name of the dtype
    dtype: torch.dtype
    precision: str = "ieee"  # of float32


KINDS = {
    "float16": Kind("fp16", torch.float16),
    "bfloat16": Kind("bf16", torch.bfloat16),
    "float32": Kind("fp32", torch.float32),
    "TF32": Kind("fp32", torch.float32, "tf32"),
}


class Entry(NamedTuple):
    name: str
    make: Callable[[Kind, int, bool], Launch]  # with the head width, and whether it is for AMD
    kinds: tuple[str, ...] = tuple(KINDS)
    multiplies: bool = True  # matrices, by the tensor cores


MERGE: dict[str, dict[str, Any]] = {  # variants: constants of the kernel
    "": {},
    ", mask, dropout, rules": {"VALID": True, "DROP": True, "RULES": 3},
}
EDGES: dict[str, dict[str, Any]] = {"": {}, ", mask, dropout": {"MASK": True, "DROP": True}}
LINEAR: dict[str, dict[str, Any]] = {"": {}, ", scales": {"SCALED": True}}


def entries() -> Iterator[Entry]:
    for variant, constants in MERGE.items():
        for name, kernel in (("forward", "forward"), ("dq", "query_gradient"), ("dk, dv", "key_gradient")):
            yield Entry(f"merge {name}{variant}", partial(_merge, kernel, constants))
    kinds = ("float16", "bfloat16", "float32")  # nothing is multiplied by tensor cores
    for variant, constants in EDGES.items():
        for name in ("edges forward", "edges backward"):
            yield Entry(f"{name}{variant}", partial(_edges, name, constants), kinds, multiplies=False)
    yield Entry("edges sums", partial(_edges, "edges sums", {}), kinds, multiplies=False)
    for variant, constants in LINEAR.items():  # half precision is made float32 before, with the features
        for name in ("forward", "da", "db", "dv"):
            yield Entry(f"linear {name}{variant}", partial(_walk, name, constants), ("float32", "TF32"))


def _merge(kernel: str, variant: dict[str, Any], kind: Kind, width: int, amd: bool) -> Launch:
    """Two sources, tokens and summaries: what a Combiner runs."""
    from subquad.kernels.merge import triton_tiles as tiles
    from subquad.kernels.merge.gpu import shapes

    shape, pointer = shapes(width, kind.dtype, kind.precision, amd)[kernel], f"*{kind.triton}"
    real = "*u8" if "VALID" in variant else pointer  # queries stand for a mask that is not there
    source = (pointer, "i64", "i64", "i64", pointer, "i64", "i64", "i64", real, "i32", "i32")
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
        "PRECISION": kind.precision,
        **variant,
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
    options = devices.launch_options(kind.dtype)
    return Launch(function, signature, constants, *shape[2:], f"{shape.queries}×{shape.keys}", options)


def _edges(name: str, variant: dict[str, Any], kind: Kind, width: int, amd: bool) -> Launch:
    """Lists of edges; the backward with the straight-through gradient of SBM."""
    from subquad.kernels.edges import gpu
    from subquad.kernels.edges import triton_rows as rows

    kernels: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
        "edges forward": (rows.attention_rows, ("Out",), ("n", "m", "heads", "group", "graphs", "share"), {}),
        "edges backward": (
            rows.gradient_rows,
            ("Grad", "Dq"),
            ("n", "m", "edges", "heads", "group", "graphs", "share", "reach"),
            {"MODE": gpu.MODES["pre"]},
        ),
        "edges sums": (rows.sum_rows, (), ("n", "m", "edges", "spread", "gather", "graphs", "share"), {"MOVED": True}),
    }
    function, outputs, numbers, constants = kernels[name]
    whole = dict.fromkeys(numbers, "i32")
    sizes, pointer, options = {**gpu.widths(width), **constants}, f"*{kind.triton}", devices.launch_options(kind.dtype)
    if name == "edges sums":
        given = {"W": "*fp32", "X": pointer, "Out": pointer} | {"indptr": "*i64", "places": "*i32", "slots": "*i64"}
        return Launch(function, given | whole, sizes, 4, 3, f"1×{gpu.EDGES}", options)
    given = {x: pointer for x in ("Q", "K", "V", *outputs)}
    given |= dict.fromkeys(("Ds", "P", "Credit") if "Grad" in outputs else (), "*fp32")  # numbers per edge
    given |= {"indptr": "*i64", "indices": "*i32"}
    drawn = {"real": "*u8", "numbers": "*i64", "columns": "*i64", "seed": "*i64"}
    given |= drawn if variant else dict.fromkeys(drawn, pointer)  # not there: queries stand for them
    real = dict.fromkeys(("scale", "rate", "up"), "fp32")
    constants = {**sizes, "MASK": False, "DROP": False, **variant}
    return Launch(function, given | whole | real, constants, 4, 3, f"1×{gpu.EDGES}", options)


def _walk(name: str, variant: dict[str, Any], kind: Kind, width: int, amd: bool) -> Launch:
    """As many features as the head is wide, and normalised."""
    from subquad.kernels.linear import gpu
    from subquad.kernels.linear.triton_walk import walk

    given = {x: f"*{kind.triton}" for x in ("X", "Y", "Z", "S", "P", "R", "Out", "Total")} | {
        "n": "i32",
        "chunks": "i32",
    }
    sizes = gpu.constants(width, width, kind.precision)
    chosen = {"REVERSE": name in ("db", "dv"), "EXTRA": name in ("da", "db"), "TOTAL": name == "forward"}
    constants = {**sizes, **chosen, "SCALED": False, "PRECISION": kind.precision, **variant}
    warps = gpu.shape(width, kind.precision).warps
    options = devices.launch_options(kind.dtype, warps)
    return Launch(walk, given, constants, warps, gpu.STAGES, f"{sizes['C']}×{sizes['BD']}", options)
