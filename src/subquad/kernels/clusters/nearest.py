"""The cluster of every token: the centroid nearest to q/|q| + k/|k|, by the cosine.

On a CPU in one pass (Numba), a chunk of tokens at a time: directions and their products with the centroids stay in the
cache. Elsewhere in plain torch, some tokens at a time.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.kernels.parallel import Workers, fits, keep, matrix, ready
from subquad.kernels.vector_rows import add_row
from subquad.kernels.vectors import BYTES, dot, largest, load_row, multiply, scale_row

AT_ONCE = 1 << 24  # products of tokens and centroids
CHUNK = 48  # tokens: eight times the rows that a product keeps in registers
MOST = 1 << 12  # centroids whose products with a chunk stay in the cache
TINY = 1e-12  # no vector counts as shorter


def nearest_centroids(q: Tensor, k: Tensor, centroids: Tensor) -> Tensor:
    """q, k (B, H, n, d) and unit vectors (H, C, d) → int64 (B, H, n), without a gradient."""
    return nearest(ready(q.detach()), ready(k.detach()), centroids.to(q.dtype))


@torch.library.custom_op("subquad::nearest_centroids", mutates_args=())
def nearest(q: Tensor, k: Tensor, centroids: Tensor) -> Tensor:
    few = q.numel() > 0 and centroids.shape[1] <= MOST
    return _on_cpu(q, k, centroids) if few and fits(q, k) else _in_torch(q, k, centroids)


@nearest.register_fake
def _(q, k, centroids):
    return torch.empty(q.shape[:3], dtype=torch.int64, device=q.device)


@register_flop_formula(torch.ops.subquad.nearest_centroids)
def _flops(q_shape, k_shape, centroids_shape, *args, **kwargs) -> int:
    return 2 * q_shape.numel() * centroids_shape[1]


def _in_torch(q: Tensor, k: Tensor, centroids: Tensor) -> Tensor:
    rows = max(1, AT_ONCE // (q.shape[0] * q.shape[1] * centroids.shape[1]))
    a, b = (1 / x.norm(dim=-1, keepdim=True).clamp_(min=TINY) for x in (q, k))
    direction = torch.addcmul(q * a, k, b)  # √2 times the direction is as near to the same centroid
    return torch.cat([(x @ centroids.mT).argmax(-1) for x in direction.split(rows, 2)], 2)


def _on_cpu(q: Tensor, k: Tensor, centroids: Tensor) -> Tensor:
    found, lanes = q.new_empty(q.shape[:3], dtype=torch.int64), BYTES // q.element_size()
    columns = F.pad(centroids.mT, (0, -centroids.shape[1] % lanes)).contiguous()  # (H, d, C and more)
    like = np.array([TINY], dtype=q.numpy().dtype)
    sizes = (*q.shape, centroids.shape[1])
    _nearest.run(like, q.element_size(), sizes, matrix(q), matrix(k), columns.numpy(), found.numpy())
    return found


@Workers
def _nearest(worker, workers, arguments):
    """found (B, H, n); columns (H, d, C and more), of which those behind C do not count."""
    like, size, sizes, q, k, columns, found = arguments[0]
    kind, (batch, heads, n, d, clusters) = like.dtype, sizes
    one, wide, nothing = kind.type(1), columns.shape[2], kind.type(-np.inf)
    rows, other, s = np.empty((CHUNK, d), kind), np.empty(d, kind), np.empty((CHUNK, wide), kind)
    for g in range(worker, batch * heads, workers):
        b, h = g // heads, g % heads
        at_q, at_k = q[0] + (b * q[1] + h * q[2]) * size, k[0] + (b * k[1] + h * k[2]) * size
        for first in range(0, n, CHUNK):
            count = min(CHUNK, n - first)
            for i in range(count):
                here, there, row = rows.ctypes.data + i * d * size, other.ctypes.data, first + i
                down, across = at_q + row * q[3] * size, at_k + row * k[3] * size
                load_row(one, here, down, down + CHUNK * q[3] * size, d)
                load_row(one, there, across, across + CHUNK * k[3] * size, d)
                scale_row(one / max(np.sqrt(dot(like[0], here, here, d)), like[0]), here, here, d)
                add_row(one / max(np.sqrt(dot(like[0], there, there, d)), like[0]), here, there, d)
            multiply(
                like[0], count, wide, d, rows.ctypes.data, d, columns[h].ctypes.data, wide, s.ctypes.data, wide, size
            )
            for i in range(count):
                s[i, clusters:] = nothing
                best, j = largest(like[0], s.ctypes.data + i * wide * size, wide), 0
                while j < clusters - 1 and s[i, j] != best:
                    j += 1
                found[b, h, first + i] = 0 if best == nothing else j
    keep(rows, other, s)
