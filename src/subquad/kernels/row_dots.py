"""Dot products of the rows of two tensors: what a softmax's backward takes from the gradients of all its weights."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from subquad.kernels.parallel import Workers, fits, matrix, ready
from subquad.kernels.vectors import dot

CHUNK = 64  # tokens of a task


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Σ a·b over the last dimension, (G, n, d) twice → (G, n), without a derivative; on a CPU the products are never
    written."""
    if not fits(a, b) or a.dtype != b.dtype or not a.numel():
        return (a * b).sum(-1)
    a, b = ready(a), ready(b)
    out = a.new_empty(a.shape[:2])
    _dots.run(np.zeros(1, a.numpy().dtype), a.element_size(), tuple(a.shape), matrix(a), matrix(b), out.numpy())
    return out


@Workers
def _dots(worker, workers, arguments):
    """Tokens first, then heads: in a layer the heads of a token stand side by side."""
    like, size, (graphs, n, d), a, b, out = arguments[0]
    for first in range(worker * CHUNK, n, workers * CHUNK):
        for i in range(first, min(n, first + CHUNK)):
            for g in range(graphs):
                at, other = a[0] + (g * a[1] + i * a[2]) * size, b[0] + (g * b[1] + i * b[2]) * size
                out[g, i] = dot(like[0], at, other, d)
