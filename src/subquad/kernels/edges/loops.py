"""The loops of attention over a CSR edge list, in Numba.

A task is a block of rows of one instance: all its scores, the softmax of each row, all its sums. The rows of a block
walk through their ascending keys side by side, so that a key fetched for one row is still in the cache for the next.

Arrays of queries are (B·H, n, d) and contiguous, those of keys and values (B·H/group, m, d), d a multiple of the lanes;
a number per edge and instance is (B·H // g, E). Tuples that the kernels take:

    graphs   indptr (g, n + 1), indices (E,), share: see `EdgeList`
    places   heads, group, the first instance (where arrays are a part of the batch), real (B, m) bool or (0, 0)
    drop     seed, rate (0 = no dropout), row numbers (B, n), column numbers (B, m)
"""

import numba
import numpy as np

from subquad.core.hashing import chance, halves, stream
from subquad.kernels.gathers import CACHE, dot_rows, sum_rows
from subquad.kernels.parallel import Workers, exp, inline, kernel
from subquad.kernels.vectors import BYTES

_SPAN = 64  # edges of a row before the next row's turn: 64 keys of 64 floats are 16 kB, half of a usual L1
PRE, PUBLISHED = 1, 2  # what `softmax_backward_kernel` credits edges with; 0: nothing


# ---- one row ----


@inline
def _hide(row, keys, real):
    """Scores of padded keys become -inf."""
    for e in range(row.size):
        if not real[keys[e]]:
            row[e] = -np.inf


@inline
def softmax(row):
    """In place. A row with nothing above -inf becomes 0."""
    top = row.dtype.type(-np.inf)
    for e in range(row.size):
        top = top if row[e] <= top else row[e]  # written so that a row of NaN does not look empty
    if top == -np.inf:
        row[:] = 0
        return
    for e in range(row.size):
        row[e] = exp(row[e] - top)
    total = row.dtype.type(0)
    for e in range(row.size):
        total += row[e]
    for e in range(row.size):
        row[e] /= total


@inline
def dropout_factors(keys, state, rate, columns, like):
    """What dropout multiplies the weights of these keys with; empty without dropout. `state`: the row's stream."""
    if rate == 0:
        return np.empty(0, like.dtype)
    a, b = halves(state)
    kept, nothing, limit = like.dtype.type(1 / (1 - rate)), like.dtype.type(0), np.float32(rate)
    numbers, factors = np.empty(keys.size, np.uint32), np.empty(keys.size, like.dtype)
    for e in range(keys.size):
        numbers[e] = columns[keys[e]]
    for e in range(keys.size):  # apart from the fetching, so that it is vectorised
        factors[e] = kept if chance(a, b, numbers[e]) >= limit else nothing
    return factors


@inline
def multiply_by(x, y):
    """In place; an empty y is 1."""
    for e in range(y.size):
        x[e] *= y[e]


@inline
def softmax_backward(p, s, dp, factors, scale, mode, credit):
    """p = the weights, dp = dout·v. s becomes dL/d(q·k), to sum dq and dk; dp becomes p · dropout, to sum dv."""
    multiply_by(dp, factors)
    mean = s.dtype.type(0)
    for e in range(s.size):
        mean += p[e] * dp[e]
    for e in range(s.size):
        dp[e] = p[e] * (dp[e] - mean)  # dL/ds_e
    if mode == PRE:
        for e in range(s.size):
            credit[e] = dp[e] * s[e]
    elif mode == PUBLISHED:
        one = s.dtype.type(1)
        for e in range(s.size):
            credit[e] = min(one, max(-one, dp[e]))
    for e in range(s.size):
        s[e] = dp[e] * scale
        dp[e] = p[e]
    multiply_by(dp, factors)


# ---- a block of rows ----


@inline
def _block(task, rows, n):
    """Number of a task → its instance, its rows."""
    blocks = (n + rows - 1) // rows
    first = task % blocks * rows
    return task // blocks, first, min(n, first + rows)


@inline
def _graph(t, graphs):
    """Instance → its graph, and its row in a tensor of numbers per edge."""
    number, share = graphs[0].shape[0], graphs[2]
    return t // share % number, t // (share * number) * share + t % share


@inline
def _part(ptr, i, part, parts):
    """Cut at multiples of eight edges: however sums are unrolled, a row does not depend on its neighbours' degrees."""
    degree = ptr[i + 1] - ptr[i]
    last = degree if part + 1 == parts else degree * (part + 1) // parts // 8 * 8
    return ptr[i] + degree * part // parts // 8 * 8, ptr[i] + last


@inline
def _block_dots(x, y, ptr, indices, scale, out):
    rows, start, width, size = x.shape[0], ptr[0], x.shape[1], x.itemsize
    parts = max(1, (ptr[rows] - start) // (rows * _SPAN))
    out[:] = 0
    for part in range(parts):
        for i in range(rows):
            a, b = _part(ptr, i, part, parts)
            if b > a:
                keys = (indices.ctypes.data + a * indices.itemsize, indices.size - a, y.ctypes.data, width)
                into, far = out.ctypes.data + (a - start) * size, y.size * size > CACHE
                dot_rows(scale, b - a, x.ctypes.data + i * width * size, *keys, into, width * size // BYTES, far)


@inline
def _block_sums(weights, y, ptr, indices, out):
    """out += the sums."""
    rows, start, width, size = out.shape[0], ptr[0], out.shape[1], out.itemsize
    parts = max(1, (ptr[rows] - start) // (rows * _SPAN))
    for part in range(parts):
        for i in range(rows):
            a, b = _part(ptr, i, part, parts)
            if b > a:
                keys = (indices.ctypes.data + a * indices.itemsize, indices.size - a, y.ctypes.data, width)
                own, into = weights.ctypes.data + (a - start) * size, out.ctypes.data + i * width * size
                sum_rows(out.dtype.type(0), b - a, own, *keys, into, width * size // BYTES, y.size * size > CACHE)


# ---- kernels: tasks are dealt in turn, so that heads of unequal density balance ----


@Workers
def scores_kernel(worker, workers, arguments):
    tasks, rows, q, k, graphs, group, scale, out = arguments[0]
    scale = q.dtype.type(scale)
    indptr, indices, _ = graphs
    for task in range(worker, tasks, workers):
        t, first, last = _block(task, rows, q.shape[1])
        r, u = _graph(t, graphs)
        ptr = indptr[r, first : last + 1]
        _block_dots(q[t, first:last], k[t // group], ptr, indices, scale, out[u, ptr[0] : ptr[-1]])


@Workers
def sum_kernel(worker, workers, arguments):
    """out[t] = the sums of instances t·gather … of y: `spread` instances read one y, `gather` of them make one out."""
    tasks, rows, weights, y, graphs, spread, gather, out = arguments[0]
    indptr, indices, _ = graphs
    for task in range(worker, tasks, workers):
        t, first, last = _block(task, rows, out.shape[1])
        out[t, first:last] = 0
        for instance in range(t * gather, (t + 1) * gather):
            r, u = _graph(instance, graphs)
            ptr = indptr[r, first : last + 1]
            _block_sums(weights[u, ptr[0] : ptr[-1]], y[instance // spread], ptr, indices, out[t, first:last])


@Workers
def attention_kernel(worker, workers, arguments):
    tasks, rows, q, k, v, graphs, places, drop, scale, out = arguments[0]
    scale = q.dtype.type(scale)
    indptr, indices, _ = graphs
    heads, group, before, real = places
    seed, rate, numbers, columns = drop
    for task in range(worker, tasks, workers):
        t, first, last = _block(task, rows, q.shape[1])
        r, _u = _graph(t, graphs)
        ptr = indptr[r, first : last + 1]
        start, b = ptr[0], (before + t) // heads
        p = np.empty(ptr[-1] - start, q.dtype)
        _block_dots(q[t, first:last], k[t // group], ptr, indices, scale, p)
        for i in range(last - first):
            row, keys = p[ptr[i] - start : ptr[i + 1] - start], indices[ptr[i] : ptr[i + 1]]
            if real.size:
                _hide(row, keys, real[b])
            softmax(row)
            if rate > 0:
                state = stream(seed, before + t, numbers[b, first + i])
                multiply_by(row, dropout_factors(keys, state, rate, columns[b], row))
        out[t, first:last] = 0
        _block_sums(p, v[t // group], ptr, indices, out[t, first:last])


@Workers
def softmax_backward_kernel(worker, workers, arguments):
    """See `softmax_backward`; edges |i - j| ≤ reach get no credit."""
    tasks, rows, s, dp, graphs, n, places, drop, scale, mode, reach, credit = arguments[0]
    scale = s.dtype.type(scale)
    indptr, indices, _ = graphs
    heads, _group, before, real = places
    seed, rate, numbers, columns = drop
    for task in range(worker, tasks, workers):
        t, first, last = _block(task, rows, n)
        r, u = _graph(t, graphs)
        b = (before + t) // heads
        for i in range(first, last):
            start, stop = indptr[r, i], indptr[r, i + 1]
            keys, given = indices[start:stop], credit[u if mode else 0, start:stop]
            p = s[u, start:stop].copy()
            if real.size:
                _hide(p, keys, real[b])
            softmax(p)
            factors = p[:0]
            if rate > 0:
                factors = dropout_factors(keys, stream(seed, before + t, numbers[b, i]), rate, columns[b], p)
            softmax_backward(p, s[u, start:stop], dp[u, start:stop], factors, scale, mode, given)
            if mode and reach >= 0:
                for e in range(keys.size):
                    if abs(keys[e] - i) <= reach:
                        given[e] = 0


@kernel
def transpose_kernel(indptr, indices, offsets, queries, slots):
    """Counting sort of every graph by key; offsets start as zeros."""
    for r in numba.prange(indptr.shape[0]):
        for e in range(indptr[r, 0], indptr[r, -1]):
            offsets[r, indices[e] + 1] += 1
        offsets[r, 0] = indptr[r, 0]
        for j in range(offsets.shape[1] - 1):
            offsets[r, j + 1] += offsets[r, j]
        free = offsets[r].copy()
        for i in range(indptr.shape[1] - 1):
            for e in range(indptr[r, i], indptr[r, i + 1]):
                slot = free[indices[e]]
                queries[slot], slots[e] = i, slot
                free[indices[e]] += 1


@kernel
def move_kernel(workers, x, slots, out):
    """Numbers per edge in the order of the transposed list, written to their slots as the rows go.

    All rows together write a few lines of cache per key. Reading them key after key would fetch a line per edge.
    """
    for worker in numba.prange(workers):
        first, last = slots.size * worker // workers, slots.size * (worker + 1) // workers
        for u in range(x.shape[0]):
            for e in range(first, last):
                out[u, slots[e]] = x[u, e]
