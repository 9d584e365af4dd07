"""The loops over rows of sampled graphs that come as bits, in Numba.

A task is a block of rows of one graph. A tile of scores is a small matrix product, all its pairs, while 64 keys are in
the cache; the numbers of its edges are then taken out and stand row after row, as in an edge list. So a softmax costs
what the edges cost, and so do the sums: only products that need all pairs are made of all pairs.

Arrays are (g, n, d) and contiguous, d a multiple of the lanes; `across` (g, tiles, d, 64) are keys tile by tile,
transposed; `words` (g, n, tiles) uint64 are the edges. `drop` is the tuple of the edge room.
"""

from __future__ import annotations

import numpy as np

from subquad.core.hashing import stream
from subquad.kernels.bits import VECTORS, gather_sum, lowest, ones, scatter_sum
from subquad.kernels.edges.loops import dropout_factors, multiply_by, softmax, softmax_backward
from subquad.kernels.parallel import Workers, inline
from subquad.kernels.vectors import BYTES, multiply

ROWS = 96  # of a block: they share a tile of keys and of its gradients while it is in the cache
KEYS = 64  # of a tile: the bits of a word


@inline
def _count(words, starts):
    """starts[r] = edges before row r of a block, words (rows, tiles); returns all of them."""
    starts[0] = 0
    for r in range(words.shape[0]):
        total = 0
        for c in range(words.shape[1]):
            total += ones(words[r, c])
        starts[r + 1] = starts[r] + total
    return starts[words.shape[0]]


@inline
def _edge_keys(words, keys):
    """The keys of a row, ascending."""
    e = 0
    for c in range(words.size):
        left = words[c]
        while left != 0:
            keys[e] = np.int32(c * KEYS + np.intp(lowest(left)))
            left &= left - np.uint64(1)
            e += 1


@inline
def _scores(x, across, words, starts, tile, scale, out):
    """out[e] = scale · x_i·y_j for the edges of a block."""
    kind, size, (rows, width) = x.dtype.type(0), x.itemsize, x.shape
    at = starts[:rows].copy()
    for c in range(words.shape[1]):
        some = np.uint64(0)
        for r in range(rows):
            some |= words[r, c]
        if some == 0:
            continue
        y = across.ctypes.data + c * width * KEYS * size
        multiply(kind, rows, KEYS, width, x.ctypes.data, width, y, KEYS, tile.ctypes.data, KEYS, size)
        for r in range(rows):
            e, left = at[r], words[r, c]
            while left != 0:
                out[e] = tile[r, lowest(left)] * scale
                left &= left - np.uint64(1)
                e += 1
            at[r] = e


@inline
def _row_sums(weights, starts, words, y, out):
    """out_i += Σ_e weights_e · y_j."""
    kind, size, (rows, width) = out.dtype.type(0), out.itemsize, out.shape
    at, step = np.empty(rows, np.int64), VECTORS * BYTES // size
    for first in range(0, width, step):
        vectors = min(step, width - first) * size // BYTES
        at[:] = starts[:rows]
        for c in range(words.shape[1]):
            keys = y.ctypes.data + (c * KEYS * width + first) * size
            for r in range(rows):
                if words[r, c] != 0:
                    own = weights.ctypes.data + at[r] * size
                    row = out.ctypes.data + (r * width + first) * size
                    gather_sum(kind, words[r, c], own, keys, width, row, vectors)
                    at[r] += ones(words[r, c])


@inline
def _key_sums(weights, starts, words, x, out):
    """out_j += Σ_e weights_e · x_i."""
    kind, size, (rows, width) = x.dtype.type(0), x.itemsize, x.shape
    at, step = np.empty(rows, np.int64), VECTORS * BYTES // size
    for first in range(0, width, step):
        vectors = min(step, width - first) * size // BYTES
        at[:] = starts[:rows]
        for c in range(words.shape[1]):
            keys = out.ctypes.data + (c * KEYS * width + first) * size
            for r in range(rows):
                if words[r, c] != 0:
                    own = weights.ctypes.data + at[r] * size
                    row = x.ctypes.data + (r * width + first) * size
                    scatter_sum(kind, words[r, c], own, row, keys, width, vectors)
                    at[r] += ones(words[r, c])


@inline
def _factors(words, t, i, heads, drop, row):
    """What dropout multiplies a row's weights with; empty without dropout."""
    seed, rate, numbers, columns = drop
    if rate == 0:
        return row[:0]
    keys = np.empty(row.size, np.int32)
    _edge_keys(words, keys)
    b = t // heads
    return dropout_factors(keys, stream(seed, t, numbers[b, i]), rate, columns[b], row)


@Workers
def attention_kernel(worker, workers, arguments):
    tasks, q, across, v, words, heads, drop, scale, out = arguments[0]
    scale = q.dtype.type(scale)
    n = q.shape[1]
    blocks = (n + ROWS - 1) // ROWS
    tile, starts = np.empty((ROWS, KEYS), q.dtype), np.zeros(ROWS + 1, np.int64)
    for task in range(worker, tasks, workers):
        t, first = task // blocks, task % blocks * ROWS
        last = min(n, first + ROWS)
        edges = words[t, first:last]
        p = np.empty(_count(edges, starts), q.dtype)
        _scores(q[t, first:last], across[t], edges, starts, tile, scale, p)
        for r in range(last - first):
            row = p[starts[r] : starts[r + 1]]
            softmax(row)
            multiply_by(row, _factors(edges[r], t, first + r, heads, drop, row))
        out[t, first:last] = 0
        _row_sums(p, starts, edges, v[t], out[t, first:last])


@inline
def _without_pinned(credit, words, i, reach):
    """Edges |i - j| ≤ reach get no credit."""
    e = 0
    for c in range(words.size):
        left = words[c]
        if (c + 1) * KEYS <= i - reach or c * KEYS > i + reach:
            e += ones(left)
            continue
        while left != 0:
            if abs(c * KEYS + np.intp(lowest(left)) - i) <= reach:
                credit[e] = 0
            left &= left - np.uint64(1)
            e += 1


@Workers
def backward_kernel(worker, workers, arguments):
    """dq, dw (g, n, ·) are filled, dk, dv, dz (g·splits, m, ·) added to: a task has some rows and its own key sums."""
    tasks, splits, do, q, w, keys, words, heads, drop, scale, mode, reach, row_grads, key_grads = arguments[0]
    scale = q.dtype.type(scale)
    across_k, across_v, k, z = keys
    dq, dw = row_grads
    dk, dv, dz = key_grads
    n, one = q.shape[1], q.dtype.type(1)
    blocks = (n + ROWS - 1) // ROWS
    tile, starts = np.empty((ROWS, KEYS), q.dtype), np.zeros(ROWS + 1, np.int64)
    for task in range(worker, tasks, workers):
        t, part = task // splits, task % splits
        for block in range(blocks * part // splits, blocks * (part + 1) // splits):
            first, last = block * ROWS, min(n, block * ROWS + ROWS)
            edges, x, g = words[t, first:last], q[t, first:last], do[t, first:last]
            count = _count(edges, starts)
            s, dp = np.empty(count, q.dtype), np.empty(count, q.dtype)
            credit = np.empty(count if mode else 0, q.dtype)
            _scores(x, across_k[t], edges, starts, tile, scale, s)
            _scores(g, across_v[t], edges, starts, tile, one, dp)
            for r in range(last - first):
                low, high = starts[r], starts[r + 1]
                p, given = s[low:high].copy(), credit[low:high]
                softmax(p)
                factors = _factors(edges[r], t, first + r, heads, drop, p)
                softmax_backward(p, s[low:high], dp[low:high], factors, scale, mode, given)
                if mode and reach >= 0:
                    _without_pinned(given, edges[r], first + r, reach)
            dq[t, first:last] = 0
            _row_sums(s, starts, edges, k[t], dq[t, first:last])
            _key_sums(s, starts, edges, x, dk[task])
            _key_sums(dp, starts, edges, g, dv[task])
            if mode:
                dw[t, first:last] = 0
                _row_sums(credit, starts, edges, z[t], dw[t, first:last])
                _key_sums(credit, starts, edges, w[t, first:last], dz[task])
