"""FNet (Lee-Thorp et al. 2022): two Fourier transforms in the place of attention, no parameters.

    out = Re( F_n v F_E )        O(n·log n)        F: discrete Fourier transforms along the tokens and the features

v (n, E) are the values of all heads side by side, E = H·d. There is no causal form: every output mixes all tokens.

Choices. The paper transforms the tokens themselves; here it is the values, which is the same with an identity for the
value projection. Queries and keys play no part, except that a query that is not a number gives NaN as everywhere else.
Every row is transformed at its own length, so padding changes nothing. Nothing is normalised, as in the paper. Dropout
drops tokens of a head. `scale` has no meaning here and must be left open.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from subquad.attention.base import Capabilities
from subquad.attention.call import Call
from subquad.attention.full import drop_keys
from subquad.attention.linear import refuse_scale
from subquad.attention.outputs import OutputAttention, within_rows
from subquad.kernels.fourier import fourier_mix
from subquad.kernels.values import as_queries_are


class FNet(OutputAttention):
    __doc__ = __doc__

    capabilities = Capabilities(causal=False, streaming=False, weights=False)
    family = "fixed mixing"
    theory_reason = "it compares no queries with keys and has no probability map"
    paper = "Lee-Thorp et al. 2022"
    cost = "n·log n"
    exponent = 1.0

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        refuse_scale(self.name, options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        tokens = drop_keys(v, call).transpose(1, 2).flatten(2)  # (B, n, E)
        out = fourier_mix(tokens, call.lengths).unflatten(2, (v.shape[1], -1)).transpose(1, 2)  # (B, H, n, d)
        return within_rows(as_queries_are(out, q), call)

    def define_output(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        tokens = v.transpose(1, 2).flatten(2)  # (B, n, E)
        (cos_n, sin_n), (cos_e, sin_e) = (_waves(size, v) for size in tokens.shape[1:])
        out = cos_n @ tokens @ cos_e - sin_n @ tokens @ sin_e
        return as_queries_are(out.unflatten(2, (v.shape[1], -1)).transpose(1, 2), q)

    def connections(self, n: int) -> float:
        return n * math.log2(max(2, n))


def _waves(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of 2π·ij/size, (size, size)."""
    i = torch.arange(size, device=like.device)
    angle = (i[:, None] * i % size).to(torch.float64) * (2 * math.pi / size)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)
