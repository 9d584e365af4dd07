"""The gradient of `span_pool` on a CPU: two passes over each span while it is in the cache."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.kernels.parallel import kernel, run


def takes(x: Tensor) -> bool:
    """Numba has no half precision."""
    return x.dtype in (torch.float32, torch.float64)


def pool_backward(grad, x, out, key_mask, lengths, size, skip, is_max) -> Tensor:
    grad, x, out = (t.contiguous() for t in (grad, x, out))
    dx = torch.empty_like(x)
    ends = np.full(len(x), x.shape[2]) if lengths is None else lengths.numpy()
    real = np.zeros((1, 0), dtype=bool) if key_mask is None else key_mask.numpy()
    run(_pool_backward, grad.numpy(), x.numpy(), out.numpy(), dx.numpy(), real, ends, size, skip, is_max)
    return dx


@kernel
def _pool_backward(grad, x, out, dx, real, ends, size, skip, is_max):
    batch, heads, n, width = x.shape
    spans = -(-n // size)
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for task in numba.prange(batch * heads * spans):
        b, h, a = task // (heads * spans), task // spans % heads, task % spans
        count = np.zeros(width, x.dtype)  # who shares the gradient of a feature
        first, last = a * size, min(a * size + size, n)
        for i in range(first, last):
            if i >= skip and i < ends[b] and (real.shape[1] == 0 or real[b, i]):
                for t in range(width):
                    count[t] += one if not is_max or x[b, h, i, t] == out[b, h, a, t] else zero
        for t in range(width):
            count[t] = grad[b, h, a, t] / max(count[t], one)
        for i in range(first, last):
            if i >= skip and i < ends[b] and (real.shape[1] == 0 or real[b, i]):
                for t in range(width):
                    dx[b, h, i, t] = count[t] if not is_max or x[b, h, i, t] == out[b, h, a, t] else zero
            else:
                dx[b, h, i] = zero
