"""The kernel sums on a GPU: causal ones by Triton, the others as matrix products, as `devices.route` says."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.linear import chunks


def forward(a, b, v, scales, causal, normalise) -> tuple[Tensor, Tensor]:
    if causal:
        return _room(a, v).causal_forward(a, b, v, scales, normalise)
    return chunks.whole_forward(a, b, v, normalise)


def backward(grad, a, b, v, scales, out, den, causal, normalise) -> tuple[Tensor, Tensor, Tensor]:
    if causal:
        return _room(a, v).causal_backward(grad, a, b, v, scales, out, den, normalise)
    return chunks.whole_backward(grad, a, b, v, out, den, normalise)


def _room(a: Tensor, v: Tensor) -> Any:
    if devices.route("linear", v.dtype, max(a.shape[2], v.shape[2])).impl == "reference":
        return chunks
    from subquad.kernels.linear import gpu

    return gpu
