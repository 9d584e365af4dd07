"""The loops of attention over a CSR edge list, in Numba.

A task is a block of rows of one instance: all its scores, the softmax of each row, all its sums. The rows of a block
walk through their ascending keys side by side, so that a key fetched for one row is still in the cache for the next.
Arrays are (B·H, n, d) and contiguous; a number per edge and instance is (B·H // g, E).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numba
import numpy as np
import torch
from numba.extending import overload

_FAST = {"reassoc", "contract", "arcp", "nsz"}  # without nnan and ninf: -inf and NaN keep their meaning
_inline = numba.njit(fastmath=_FAST, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
_kernel = numba.njit(fastmath=_FAST, error_model="numpy", parallel=True, cache=True)
_SPAN = 64  # edges of a row before the next row's turn: 64 keys of 64 floats are 16 kB, half of a usual L1


@contextmanager
def _threads() -> Iterator[int]:
    """As many Numba threads as torch uses."""
    before = numba.get_num_threads()
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(threads)
    try:
        yield threads
    finally:
        numba.set_num_threads(before)


def launch(kernel: Callable, shape: tuple[int, int, int], *arguments: object) -> None:
    """Run a kernel on (instances, n, ·) rows, in tasks of up to 64 rows of one instance."""
    instances, n, _ = shape
    with _threads() as workers:
        rows = max(1, min(64, instances * n // (4 * workers)))
        kernel(instances * -(-n // rows), rows, workers, *arguments)


def transpose(indptr: np.ndarray, indices: np.ndarray, num_keys: int) -> tuple[np.ndarray, ...]:
    """The list by key: offsets (g, m + 1), queries (E,), and where each edge of the list went (E,)."""
    offsets = np.zeros((len(indptr), num_keys + 1), np.int64)
    queries = np.empty_like(indices)
    slots = np.empty(indices.shape, np.int32 if len(indices) < 2**31 else np.int64)
    with _threads():
        transpose_kernel(indptr, indices, offsets, queries, slots)
    return offsets, queries, slots


def moved(weights: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Numbers per edge (u, E), in the order of the transposed list.

    Written to their slots as the rows go: all rows together write a few lines of cache per key. Reading them key after
    key would fetch a line per edge.
    """
    out = np.empty_like(weights)
    with _threads() as workers:
        move_kernel(workers, weights, slots, out)
    return out


# ---- one row, one block of rows, then the kernels ----


@_inline
def _dots(x, y, keys, scale, out):
    """out[e] = scale · x·y[keys[e]]. Four edges at a time: x is loaded once, four sums are independent."""
    whole = keys.size // 4 * 4
    for e in range(0, whole, 4):
        y0, y1, y2, y3 = y[keys[e]], y[keys[e + 1]], y[keys[e + 2]], y[keys[e + 3]]
        s0 = s1 = s2 = s3 = x.dtype.type(0)
        for c in range(x.size):
            s0 += x[c] * y0[c]
            s1 += x[c] * y1[c]
            s2 += x[c] * y2[c]
            s3 += x[c] * y3[c]
        out[e], out[e + 1], out[e + 2], out[e + 3] = s0 * scale, s1 * scale, s2 * scale, s3 * scale
    for e in range(whole, keys.size):
        y0, s0 = y[keys[e]], x.dtype.type(0)
        for c in range(x.size):
            s0 += x[c] * y0[c]
        out[e] = s0 * scale


@_inline
def _sums(weights, y, keys, out):
    """out += Σ_e weights[e] · y[keys[e]]. Eight edges at a time: out is loaded and stored once."""
    whole = keys.size // 8 * 8
    for e in range(0, whole, 8):
        y0, y1, y2, y3 = y[keys[e]], y[keys[e + 1]], y[keys[e + 2]], y[keys[e + 3]]
        y4, y5, y6, y7 = y[keys[e + 4]], y[keys[e + 5]], y[keys[e + 6]], y[keys[e + 7]]
        w0, w1, w2, w3 = weights[e], weights[e + 1], weights[e + 2], weights[e + 3]
        w4, w5, w6, w7 = weights[e + 4], weights[e + 5], weights[e + 6], weights[e + 7]
        for c in range(out.size):
            left = w0 * y0[c] + w1 * y1[c] + w2 * y2[c] + w3 * y3[c]
            out[c] += left + (w4 * y4[c] + w5 * y5[c] + w6 * y6[c] + w7 * y7[c])
    for e in range(whole, keys.size):
        y0, w0 = y[keys[e]], weights[e]
        for c in range(out.size):
            out[c] += w0 * y0[c]


def exp(x):
    """e^x for x <= 0; in float32 in a form that LLVM vectorises, which a call of the C library is not."""


@overload(exp, jit_options={"fastmath": _FAST})
def _(x):
    def polynomial(x):  # e^x = 2^m · e^r, r = x - m·ln 2 in [-ln 2 / 2, ln 2 / 2], with ln 2 as two floats
        y = np.float32(-87) if x < np.float32(-87) else x  # written so that NaN stays NaN
        m = np.floor(y * np.float32(1.44269504) + np.float32(0.5))
        r = (y - m * np.float32(0.693359375)) + m * np.float32(2.12194440e-4)
        z = np.float32(1 / 5040) * r + np.float32(1 / 720)
        z = ((z * r + np.float32(1 / 120)) * r + np.float32(1 / 24)) * r + np.float32(1 / 6)
        z = ((z * r + np.float32(0.5)) * r + np.float32(1)) * r + np.float32(1)
        z *= np.int32((np.int32(m) + np.int32(127)) << np.int32(23)).view(np.float32)
        return np.float32(0) if x < np.float32(-87) else z

    return polynomial if x == numba.float32 else lambda x: math.exp(x)


@_inline
def _softmax(row):
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


@_inline
def _softmax_backward(s, dp, gate, weight, scale, dgate, dweight):
    """s = scale · q·k becomes dL/d(q·k), to sum dq and dk; dp = dout·v becomes p · weight, to sum dv."""
    p = s.copy()
    if gate.size:
        _multiply(p, gate)
    _softmax(p)
    for e in range(dweight.size):
        dweight[e] = p[e] * dp[e]
    if weight.size:
        _multiply(dp, weight)
    mean = s.dtype.type(0)
    for e in range(s.size):
        mean += p[e] * dp[e]
    for e in range(s.size):
        dp[e] = p[e] * (dp[e] - mean)  # dL/ds_e
    for e in range(dgate.size):
        dgate[e] = dp[e] * s[e]
    for e in range(s.size):
        s[e] = dp[e] * scale
        dp[e] = p[e]
    if gate.size:
        _multiply(s, gate)
    if weight.size:
        _multiply(dp, weight)


@_inline
def _multiply(x, y):
    for e in range(x.size):
        x[e] *= y[e]


@_inline
def _block(task, indptr, rows):
    """Number of a task -> its instance, its copy of the graphs, its rows, their offsets."""
    graphs, n = indptr.shape[0], indptr.shape[1] - 1
    blocks = (n + rows - 1) // rows
    t, first = task // blocks, task % blocks * rows
    last = min(n, first + rows)
    return t, t // graphs, first, last, indptr[t % graphs, first : last + 1]


@_inline
def _part(ptr, i, part, parts):
    """Cut at multiples of eight edges, as `_sums` goes: a row's result does not depend on its neighbours' degrees."""
    degree = ptr[i + 1] - ptr[i]
    last = degree if part + 1 == parts else degree * (part + 1) // parts // 8 * 8
    return ptr[i] + degree * part // parts // 8 * 8, ptr[i] + last


@_inline
def _block_dots(x, y, ptr, indices, scale, out):
    rows, start = x.shape[0], ptr[0]
    parts = max(1, (ptr[rows] - start) // (rows * _SPAN))
    for part in range(parts):
        for i in range(rows):
            a, b = _part(ptr, i, part, parts)
            _dots(x[i], y, indices[a:b], scale, out[a - start : b - start])


@_inline
def _block_sums(weights, y, ptr, indices, out):
    rows, start = out.shape[0], ptr[0]
    parts = max(1, (ptr[rows] - start) // (rows * _SPAN))
    out[:] = 0
    for part in range(parts):
        for i in range(rows):
            a, b = _part(ptr, i, part, parts)
            _sums(weights[a - start : b - start], y, indices[a:b], out[i])


@_kernel
def scores_kernel(tasks, rows, workers, q, k, indptr, indices, scale, out):
    for worker in numba.prange(workers):  # tasks are dealt in turn, so that heads of unequal density balance
        for task in range(worker, tasks, workers):
            t, u, first, last, ptr = _block(task, indptr, rows)
            _block_dots(q[t, first:last], k[t], ptr, indices, scale, out[u, ptr[0] : ptr[-1]])


@_kernel
def sum_kernel(tasks, rows, workers, weights, y, indptr, indices, out):
    for worker in numba.prange(workers):
        for task in range(worker, tasks, workers):
            t, u, first, last, ptr = _block(task, indptr, rows)
            _block_sums(weights[u, ptr[0] : ptr[-1]], y[t], ptr, indices, out[t, first:last])


@_kernel
def attention_kernel(tasks, rows, workers, q, k, v, indptr, indices, gate, weight, scale, out):
    for worker in numba.prange(workers):
        for task in range(worker, tasks, workers):
            t, u, first, last, ptr = _block(task, indptr, rows)
            start, stop = ptr[0], ptr[-1]
            p = np.empty(stop - start, q.dtype)
            _block_dots(q[t, first:last], k[t], ptr, indices, scale, p)
            if gate.size:
                _multiply(p, gate[u, start:stop])
            for i in range(last - first):
                _softmax(p[ptr[i] - start : ptr[i + 1] - start])
            if weight.size:
                _multiply(p, weight[u, start:stop])
            _block_sums(p, v[t], ptr, indices, out[t, first:last])


@_kernel
def softmax_backward_kernel(tasks, rows, workers, s, dp, indptr, gate, weight, scale, dgate, dweight):
    for worker in numba.prange(workers):
        for task in range(worker, tasks, workers):
            _, u, first, last, ptr = _block(task, indptr, rows)
            for i in range(last - first):
                a, b = ptr[i], ptr[i + 1]
                g, w, dg, dw = gate[u, a:b], weight[u, a:b], dgate[u, a:b], dweight[u, a:b]
                _softmax_backward(s[u, a:b], dp[u, a:b], g, w, scale, dg, dw)


@_kernel
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


@_kernel
def move_kernel(workers, x, slots, out):
    for worker in numba.prange(workers):
        first, last = slots.size * worker // workers, slots.size * (worker + 1) // workers
        for u in range(x.shape[0]):
            for e in range(first, last):
                out[u, slots[e]] = x[u, e]
