"""What the rows of the sampler are drawn from, in Numba: random streams, rates, search tables and bounds."""

from __future__ import annotations

import math

import numba
import numpy as np

from subquad.core.hashing import stream
from subquad.kernels.parallel import kernel, run


@kernel
def streams(seed, ids, heads, period, out):
    """The start of every row's stream, (B·H, n) uint64, from ids (B, n); graphs t and t + period share theirs."""
    for t in numba.prange(out.shape[0]):
        for i in range(out.shape[1]):
            out[t, i] = stream(seed, t % period, ids[t // heads, i])


@kernel
def rates(w, z, causal, rate, bound):
    """Σ_j p_ij and Σ_v W_iv max_j Z_jv ≥ max_j p_ij, over the keys that row i may see."""
    for t in numba.prange(w.shape[0]):
        total, top = np.zeros(w.shape[2]), np.zeros(w.shape[2])
        if not causal:
            for j in range(z.shape[1]):
                for v in range(w.shape[2]):
                    total[v] += z[t, j, v]
                    top[v] = max(top[v], z[t, j, v])
        for i in range(w.shape[1]):
            s = b = 0.0
            for v in range(w.shape[2]):
                if causal:
                    total[v] += z[t, i, v]
                    top[v] = max(top[v], z[t, i, v])
                s += w[t, i, v] * total[v]
                b += w[t, i, v] * top[v]
            rate[t, i], bound[t, i] = s, b


@kernel
def _tables(z, upto, guide, scale):
    """Prefix sums over the keys and where to start searching them; see `tables`."""
    (m, k), size = z.shape[1:], guide.shape[2]
    chunks = (k + 15) // 16  # clusters of a task: a cache line of z
    for task in numba.prange(z.shape[0] * chunks):
        t, first = task // chunks, task % chunks * 16
        last = min(k, first + 16)
        total = np.zeros(last - first)
        upto[t, first:last, 0] = 0
        for j in range(m):
            for v in range(first, last):
                total[v - first] += z[t, j, v]
                upto[t, v, j + 1] = total[v - first]
        for v in range(first, last):
            j, part = 0, total[v - first] / size
            scale[t, v] = 1 / part if part > 0 else 0.0
            for g in range(size):
                while j < m - 1 and upto[t, v, j + 1] <= part * g:
                    j += 1
                guide[t, v, g] = j


def tables(z: np.ndarray, needed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """To find the key at a place of a cluster: z (g, m, k) → upto (g, k, m + 1), guide (g, k, m), scale (g, k).

    Key j of cluster v has the places upto[v, j] ≤ x < upto[v, j + 1]; guide[v, int(x · scale[v])] is where to begin.
    The sums of some keys do not depend on later ones, so that in causal mode the found key does not either.
    """
    graphs, m, k = z.shape
    upto, guide, scale = np.empty((graphs, k, m + 1)), np.empty((graphs, k, m), np.int32), np.empty((graphs, k))
    if needed:
        run(_tables, z, upto, guide, scale)
    return upto, guide, scale


@kernel
def apart(x, centre, direction, along, distance):
    """x_i·direction and |x_i - centre| of every row: x (g, n, k), centre and direction (g, k) → (g, n)."""
    for t in numba.prange(x.shape[0]):
        for i in range(x.shape[1]):
            row, middle, towards = x[t, i], centre[t], direction[t]
            total = square = x.dtype.type(0)
            for v in range(row.size):
                total += row[v] * towards[v]
                square += (row[v] - middle[v]) * (row[v] - middle[v])
            along[t, i], distance[t, i] = total, math.sqrt(square)
