"""The causal kernel sums on a GPU: launches of the walk of `triton_walk`.

In the terms of `chunks`: out and den are the walk (a, b; v), ∂a is the walk (g, v; b) with h beside g; ∂b and ∂v are
the walks (v, g; a) and (b, a; g) that come from the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.linear import chunks

STAGES = 1  # a program waits for its state anyway


def padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


class Shape(NamedTuple):
    """Sizes of the walk for so many features, chosen so that nothing spills (`subquad study gpu-build`)."""

    chunk: int  # tokens
    columns: int  # of the values that one program takes
    block: int  # features that a product sums over at once
    warps: int


def shape(features: int, precision: str) -> Shape:
    """precision: ieee (multiply-adds, which take more registers than matrix instructions) or tf32."""
    if precision == "ieee":
        return Shape(16, 32, 16, 8)
    return Shape(32, 32, padded(features), 4) if features <= 64 else Shape(16, 32, padded(features), 8)


def constants(features: int, width: int, precision: str) -> dict[str, int]:
    """Sizes of the walk over z of this width."""
    chunk, columns, block, _ = shape(features, precision)
    blocks = padded(features) // block
    return {"F": features, "NB": blocks, "FB": block, "D": width, "BD": min(columns, padded(width)), "C": chunk}


def causal_forward(a: Tensor, b: Tensor, v: Tensor, scales: Tensor | None, normalise: bool) -> tuple[Tensor, Tensor]:
    out, den = _walk(a, b, v, scales, totals=normalise)
    return (chunks.divide(out, den), den) if normalise else (out, v.new_ones(v.shape[:2]))


def causal_backward(
    grad: Tensor, a: Tensor, b: Tensor, v: Tensor, scales: Tensor | None, out: Tensor, den: Tensor, normalise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    g, h = chunks.divided_gradients(grad, out, den) if normalise else (grad.contiguous(), None)
    ones = None if h is None else torch.ones_like(h)
    da, _ = _walk(g, v, b, scales, extra=(h, ones))
    db, _ = _walk(v, g, a, scales, extra=(ones, h), reverse=True)
    dv, _ = _walk(b, a, g, scales, reverse=True)
    return da, db, dv


def _walk(x, y, z, scales, extra=(None, None), *, reverse=False, totals=False) -> tuple[Tensor, Tensor]:
    """The sums of `triton_walk` for x, y (G, n, f) and z (G, n, d): (G, n, d), and the totals (G, n)."""
    from subquad.kernels.linear import triton_walk

    count, n, width = z.shape
    out, total = torch.empty_like(z), z.new_empty(z.shape[:2])
    precision = devices.precision(z)
    sizes = constants(x.shape[2], width, precision)
    warps = shape(x.shape[2], precision).warps
    launch = {"num_warps": warps, "num_stages": STAGES, **devices.launch_options(z.dtype, warps)}
    given = tuple(z if t is None else t.contiguous() for t in (scales, *extra))  # z stands for what is not there
    chosen = {"REVERSE": reverse, "SCALED": scales is not None, "EXTRA": extra[0] is not None, "TOTAL": totals}
    triton_walk.walk[(count, -(-width // sizes["BD"]))](
        x, y, z, *given, out, total, n, -(-n // sizes["C"]), **sizes, **chosen, PRECISION=precision, **launch
    )
    return out, total
