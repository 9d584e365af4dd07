"""The kernel sums on a CPU, by the kernels of `cpu_chunks`: float32 or float64, and widths of whole vectors.

Sums have the inputs' type. Scales of keys, half precision and odd widths go the way of `chunks`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from subquad.kernels.linear import cpu_chunks as kernels
from subquad.kernels.linear.reference import smallest
from subquad.kernels.parallel import fits, matrix


def takes(a: Tensor, v: Tensor, scales: Tensor | None) -> bool:
    """Are there vectors of this type and these widths?"""
    return scales is None and fits(a, v)


def forward(a: Tensor, b: Tensor, v: Tensor, causal: bool, normalise: bool, elu: bool) -> tuple[Tensor, Tensor]:
    out, den = empty_output(a, v), v.new_ones(a.shape[:2])
    function = kernels.causal_forward if causal else kernels.whole_forward
    tensors = (matrix(x) for x in (a, b, v, out))
    function.run(*_about(a, v), *tensors, den.numpy(), _sizes(a, b), normalise, elu)
    return out, den


def backward(
    grad: Tensor, a: Tensor, b: Tensor, v: Tensor, out: Tensor, den: Tensor, causal: bool, normalise: bool, elu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    da, db, dv = (torch.empty_like(x) for x in (a, b, v))
    function = kernels.causal_backward if causal else kernels.whole_backward
    tensors = (matrix(x) for x in (grad, a, b, v, out, da, db, dv))
    function.run(*_about(a, v), *tensors, den.numpy(), _sizes(a, b), normalise, elu)
    return da, db, dv


def empty_output(a: Tensor, v: Tensor) -> Tensor:
    """(G, n, d), in the order of the values' memory where there are as many queries: a layer goes on without a copy."""
    return torch.empty_like(v) if a.shape[1] == v.shape[1] else v.new_empty(*a.shape[:2], v.shape[2])


def _about(a: Tensor, v: Tensor) -> tuple[np.ndarray, int, int, int]:
    """(the smallest denominator), bytes of an entry, features, width of the values"""
    like = np.array([smallest(a.dtype)], dtype=a.numpy().dtype)
    return like, a.element_size(), a.shape[2], v.shape[2]


def _sizes(a: Tensor, b: Tensor) -> tuple[int, int, int]:
    """Sequences, queries, keys."""
    return a.shape[0], a.shape[1], b.shape[1]
