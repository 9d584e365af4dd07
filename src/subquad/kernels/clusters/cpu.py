"""The running pools of clusters on a CPU: one pass that carries the state of every cluster."""

from __future__ import annotations

import numba
import numpy as np
from torch import Tensor

from subquad.kernels.parallel import kernel, run


def prefix(x: Tensor, cluster: Tensor, real: Tensor, clusters: int, is_max: bool) -> Tensor:
    out = x.new_empty(x.shape)
    run(_prefix, *_arrays(x, cluster, real), clusters, is_max, out.numpy())
    return out


def prefix_backward(
    grad: Tensor, x: Tensor, out: Tensor, cluster: Tensor, real: Tensor, clusters: int, is_max: bool
) -> Tensor:
    dx = x.new_empty(x.shape)
    run(_prefix_backward, *_arrays(grad, x, out, cluster, real), clusters, is_max, dx.numpy())
    return dx


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [t.detach().contiguous().numpy() for t in tensors]


@kernel
def _prefix(x, cluster, real, clusters, is_max, out):
    """out[i] = pool of the real tokens ≤ i of i's cluster; 0 when there is none."""
    graphs, n, d = x.shape
    for g in numba.prange(graphs):
        state, count = np.zeros((clusters, d), x.dtype), np.zeros(clusters, np.int64)
        for i in range(n):
            c = cluster[g, i]
            if real[g, i]:
                count[c] += 1
                for f in range(d):
                    if is_max:
                        top, here = state[c, f], x[g, i, f]
                        state[c, f] = top if count[c] > 1 and (here <= top or top != top) else here  # NaN stays
                    else:
                        state[c, f] += x[g, i, f]
            share = x.dtype.type(1 if is_max else max(1, count[c]))
            for f in range(d):
                out[g, i, f] = state[c, f] / share


@kernel
def _prefix_backward(grad, x, out, cluster, real, clusters, is_max, dx):
    """Backwards, with what later tokens of a cluster owe to earlier ones; a maximum pays the one that set it."""
    graphs, n, d = x.shape
    for g in numba.prange(graphs):
        owed, count = np.zeros((clusters, d), x.dtype), np.zeros(clusters, np.int64)
        for i in range(n):
            count[cluster[g, i]] += real[g, i]
        for i in range(n - 1, -1, -1):
            c = cluster[g, i]
            share = x.dtype.type(1 if is_max else max(1, count[c]))
            for f in range(d):
                owed[c, f] += grad[g, i, f] / share
                pays = real[g, i] and (not is_max or x[g, i, f] == out[g, i, f])
                dx[g, i, f] = owed[c, f] if pays else 0
                if pays and is_max:
                    owed[c, f] = 0
            count[c] -= real[g, i]
