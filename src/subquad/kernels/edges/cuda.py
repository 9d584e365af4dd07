"""The edge operators on a GPU: by Triton or in plain torch, as `devices.route` says."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.edges import reference


def sums(w, x, indptr, indices, share, heads, num_keys, transposed) -> Tensor:
    return _room(x).sums(w, x, indptr, indices, share, heads, num_keys, transposed)


def attention(q, k, v, *about) -> Tensor:
    return _room(q, v).attention(q, k, v, *about)


def attention_backward(dout, q, k, v, *about) -> tuple[Tensor, Tensor, Tensor]:
    return _room(q, v).attention_backward(dout, q, k, v, *about)


def _room(q: Tensor, v: Tensor | None = None) -> Any:
    if v is not None and v.shape[3] != q.shape[3]:  # the kernels have one width
        return reference
    if devices.route("edges", q.dtype, q.shape[3]).impl == "reference":
        return reference
    from subquad.kernels.edges import gpu

    return gpu
