"""The operators of clusters on a CPU: running pools in one pass, and which kernels take a call of the attention."""

from __future__ import annotations

from types import ModuleType

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.kernels.clusters import cpu_attention, sorted_runs, tiles
from subquad.kernels.parallel import fits, kernel, run

# Arguments behind the tensors: seed, clusters, causal, last_query_only, scale, dropout, chunk, avoid_self
LAST_QUERY_ONLY, DROPOUT, CHUNK, AVOID_SELF = 3, 5, 6, 7


def attention(q, keys, values, order, *rest) -> tuple[Tensor, Tensor]:
    out, lse = room(q, keys, order, rest[2:]).attention(q, keys, values, order, *rest)
    return _like(out, q), lse


def attention_backward(grad, q, keys, values, out, lse, order, *rest) -> list[Tensor]:
    found = room(q, keys, order, rest[2:]).attention_backward(grad, q, keys, values, out, lse, order, *rest)
    return [_like(dx, x) for dx, x in zip(found, (q, *keys, *values), strict=True)]


def _like(found: Tensor, x: Tensor) -> Tensor:
    """In the order of the memory of x: a layer goes on without a copy."""
    laid = torch.empty_like(x)
    return found if found.stride() == laid.stride() else laid.copy_(found)


def room(q: Tensor, keys: list[Tensor], order: Tensor, about: tuple) -> ModuleType:
    """The query's cluster alone as runs of keys; whole clusters of one round in tiles of scores; others in products."""
    if about[DROPOUT] or not fits(q):
        return tiles
    if len(keys) == 1 and not about[LAST_QUERY_ONLY]:
        return sorted_runs
    return tiles if order.dim() > 1 or about[CHUNK] or about[AVOID_SELF] else cpu_attention


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
