"""The kernels of the landmarks on a CPU: a sequence after the other, a chunk of tokens at a time.

A chunk is copied to memory that stays in the cache while the next one is fetched; scores are exponentiated there and
never written. The convolution of some rows is the product of a band matrix and the values around them.

A matrix is (address, stride of the batch, of heads, of rows) in entries; `like` holds 0 of its type.
"""

from __future__ import annotations

import numpy as np

from subquad.kernels.parallel import Workers, exp, inline, keep
from subquad.kernels.vector_rows import exp_row, larger_row
from subquad.kernels.vectors import (
    BYTES,
    dot,
    fetch_row,
    largest,
    load_row,
    multiply,
    multiply_add,
    multiply_add_turned,
    scale_row,
    store_row,
    transpose,
)

ROWS = 6  # that a product keeps in registers
CHUNK = 8 * ROWS  # tokens


@inline
def _address(matrix, b, h, row, size):
    return matrix[0] + (b * matrix[1] + h * matrix[2] + row * matrix[3]) * size


@inline
def _load(like, size, width, matrix, b, h, first, count, into):
    """`count` rows side by side, while those of the next chunk are fetched."""
    for i in range(count):
        here, later = into.ctypes.data + i * width * size, _address(matrix, b, h, first + i + CHUNK, size)
        load_row(like.dtype.type(1), here, _address(matrix, b, h, first + i, size), later, width)


@inline
def _store(like, size, width, rows, count, matrix, b, h, first):
    for i in range(count):
        here, later = rows.ctypes.data + i * width * size, _address(matrix, b, h, first + i + CHUNK, size)
        store_row(like.dtype.type(1), _address(matrix, b, h, first + i, size), here, later, width)


@inline
def _softmax_rows(like, size, m, s, count):
    one = like.dtype.type(1)
    for i in range(count):
        here = s.ctypes.data + i * m * size
        total = exp_row(largest(like[0], here, m), here, m)
        scale_row(one / total, here, here, m)


# ---- tokens to landmarks ------------------------------------------------------------------------------------


@Workers
def gather(worker, workers, arguments):
    """read (G, m, d) and lse (G, m): one softmax per landmark, over all tokens."""
    like, size, sizes, scores, v, read, lse = arguments[0]
    kind, (batch, heads, n, m, d) = like.dtype, sizes
    for g in range(worker, batch * heads, workers):
        b, h = g // heads, g % heads
        s, top, total = np.empty((CHUNK, m), kind), np.full(m, -np.inf, kind), np.zeros(m, kind)
        sums, values = np.zeros((m, d), kind), np.empty((CHUNK, d), kind)
        for i in range(n):
            larger_row(like[0], top.ctypes.data, _address(scores, b, h, i, size), m)
            fetch_row(like[0], _address(scores, b, h, i + CHUNK, size), m)
        for first in range(0, n, CHUNK):
            count = min(CHUNK, n - first)
            _load(like, size, m, scores, b, h, first, count, s)
            for i in range(count):
                row = s[i]
                for a in range(m):
                    row[a] = exp(row[a] - top[a])
                    total[a] += row[a]
            _load(like, size, d, v, b, h, first, count, values)
            multiply_add_turned(
                like[0], m, d, count, s.ctypes.data, m, values.ctypes.data, d, sums.ctypes.data, d, size
            )
        for a in range(m):
            lse[g, a] = top[a] + np.log(total[a])
            for e in range(d):
                read[g, a, e] = sums[a, e] / total[a]


@Workers
def gather_backward(worker, workers, arguments):
    """dscores and dv, given the gradient of read (G, m, d) and delta = grad·read (G, m)."""
    like, size, sizes, scores, v, grad, delta, lse, dscores, dv = arguments[0]
    kind, (batch, heads, n, m, d) = like.dtype, sizes
    for g in range(worker, batch * heads, workers):
        b, h = g // heads, g % heads
        s, ds, turned = np.empty((CHUNK, m), kind), np.empty((CHUNK, m), kind), np.empty((d, m), kind)
        less, base, rows, values = delta[g], lse[g], grad[g], np.empty((CHUNK, d), kind)
        transpose(like[0], m, d, rows.ctypes.data, d, turned.ctypes.data, m, size)
        for first in range(0, n, CHUNK):
            count = min(CHUNK, n - first)
            _load(like, size, m, scores, b, h, first, count, s)
            _load(like, size, d, v, b, h, first, count, values)
            at = values.ctypes.data
            multiply(like[0], count, m, d, at, d, turned.ctypes.data, m, ds.ctypes.data, m, size)
            for i in range(count):
                row, change = s[i], ds[i]
                for a in range(m):
                    row[a] = exp(row[a] - base[a])
                    change[a] = row[a] * (change[a] - less[a])
            _store(like, size, m, ds, count, dscores, b, h, first)
            multiply(like[0], count, d, m, s.ctypes.data, m, rows.ctypes.data, d, at, d, size)
            _store(like, size, d, values, count, dv, b, h, first)


# ---- landmarks to tokens ------------------------------------------------------------------------------------


@inline
def _load_around(like, size, d, matrix, b, h, n, first, count, taps, into):
    """The rows that the filters of a chunk meet, from half a filter before it on; 0 where there is no token."""
    half = taps // 2
    low, high = max(0, half - first), min(count + 2 * half, n - first + half)
    into[:low] = 0
    into[high:] = 0
    _load(like, size, d, matrix, b, h, first - half + low, high - low, into[low:])


@inline
def _fill_band(band, filters, turned):
    """band (ROWS, ROWS + taps - 1): row i has the filter, or the filter backwards, from column i on."""
    taps = len(filters)
    band[:] = 0
    for i in range(ROWS):
        for t in range(taps):
            band[i, i + t] = filters[taps - 1 - t if turned else t]


@inline
def _convolve(like, size, d, taps, count, band, around, to):
    """to (count, d) += the filters on the rows around each, as products of the band and the rows around some."""
    wide, at, left = band.shape[1], around.ctypes.data, band.ctypes.data
    for i in range(0, count, ROWS):
        some = min(ROWS, count - i)
        multiply_add(like[0], some, d, some + taps - 1, left, wide, at + i * d * size, d, to + i * d * size, d, size)


@Workers
def spread(worker, workers, arguments):
    like, size, sizes, scores, read, v, filters, out = arguments[0]
    kind, (batch, heads, n, m, d) = like.dtype, sizes
    taps = filters.shape[1]
    for g in range(worker, batch * heads, workers):
        b, h = g // heads, g % heads
        s, rows, sums = np.empty((CHUNK, m), kind), read[g], np.empty((CHUNK, d), kind)
        band, around = np.empty((ROWS, ROWS + taps), kind), np.empty((CHUNK + taps, d), kind)
        _fill_band(band, filters[h], False)
        for first in range(0, n, CHUNK):
            count, to = min(CHUNK, n - first), sums.ctypes.data
            _load(like, size, m, scores, b, h, first, count, s)
            _softmax_rows(like, size, m, s, count)
            multiply(like[0], count, d, m, s.ctypes.data, m, rows.ctypes.data, d, to, d, size)
            if taps > 0:
                _load_around(like, size, d, v, b, h, n, first, count, taps, around)
                _convolve(like, size, d, taps, count, band, around, to)
            _store(like, size, d, sums, count, out, b, h, first)


@Workers
def spread_backward(worker, workers, arguments):
    """dscores, dread (G, m, d), dv (of the convolution) and dfilters (G, taps)."""
    like, size, sizes, scores, read, v, filters, grad, dscores, dread, dv, dfilters = arguments[0]
    kind, (batch, heads, n, m, d) = like.dtype, sizes
    taps, lanes = filters.shape[1], BYTES // size
    half, wide = taps // 2, -(-(CHUNK + taps) // lanes) * lanes
    some = -(-(ROWS + taps) // lanes) * lanes  # columns that the filters of ROWS rows meet, in whole vectors
    for g in range(worker, batch * heads, workers):
        b, h = g // heads, g % heads
        s, ds, turned = np.empty((CHUNK, m), kind), np.empty((CHUNK, m), kind), np.empty((d, m), kind)
        band, dband = np.empty((ROWS, ROWS + taps), kind), np.zeros((ROWS, some), kind)
        around, across = np.empty((wide, d), kind), np.zeros((d, wide + some), kind)
        grads, change_v = np.empty((CHUNK + taps, d), kind), np.empty((CHUNK, d), kind)
        rows, sums, at = read[g], np.zeros((m, d), kind), grads.ctypes.data + half * d * size
        _fill_band(band, filters[h], True)
        transpose(like[0], m, d, rows.ctypes.data, d, turned.ctypes.data, m, size)
        for first in range(0, n, CHUNK):
            count = min(CHUNK, n - first)
            _load(like, size, m, scores, b, h, first, count, s)
            _softmax_rows(like, size, m, s, count)
            _load_around(like, size, d, grad, b, h, n, first, count, taps, grads)
            multiply(like[0], count, m, d, at, d, turned.ctypes.data, m, ds.ctypes.data, m, size)
            for i in range(count):
                row, change = s[i], ds[i]
                less = dot(like[0], s.ctypes.data + i * m * size, ds.ctypes.data + i * m * size, m)
                for a in range(m):
                    change[a] = row[a] * (change[a] - less)
            _store(like, size, m, ds, count, dscores, b, h, first)
            multiply_add_turned(like[0], m, d, count, s.ctypes.data, m, at, d, sums.ctypes.data, d, size)
            if taps > 0:
                change_v[:] = 0
                _convolve(like, size, d, taps, count, band, grads, change_v.ctypes.data)
                _store(like, size, d, change_v, count, dv, b, h, first)
                _load_around(like, size, d, v, b, h, n, first, count, taps, around)
                transpose(like[0], wide, d, around.ctypes.data, d, across.ctypes.data, wide + some, size)
                right, into = across.ctypes.data, dband.ctypes.data
                for i in range(0, count, ROWS):
                    multiply_add(
                        like[0], min(ROWS, count - i), some, d, at + i * d * size, d, right + i * size, wide + some,
                        into, some, size,
                    )  # fmt: skip
        dread[g] = sums
        for t in range(taps):
            total = like.dtype.type(0)
            for i in range(ROWS):
                total += dband[i, i + t]
            dfilters[g, t] = total


# ---- the pseudo-inverse -------------------------------------------------------------------------------------


@inline
def _less(factor, x, into):
    """into = factor·I - x, matrices."""
    for i in range(len(x)):
        for j in range(len(x)):
            into[i, j] = -x[i, j]
        into[i, i] += factor


@inline
def _times(like, x, y, into):
    m = len(x)
    multiply(like[0], m, m, m, x.ctypes.data, m, y.ctypes.data, m, into.ctypes.data, m, 8)


@Workers
def inverse(worker, workers, arguments):
    """steps (G, iterations + 1, m, m): the first guess is there, every further matrix is made from the one before."""
    like, a, steps = arguments[0]
    count, m = steps.shape[1], a.shape[1]
    for g in range(worker, len(a), workers):
        y, x, u = np.empty((m, m), a.dtype), np.empty((m, m), a.dtype), np.empty((m, m), a.dtype)
        for t in range(count - 1):
            z = steps[g, t]
            _times(like, a[g], z, y)
            _less(7.0, y, u)
            _times(like, y, u, x)
            _less(15.0, x, u)
            _times(like, y, u, x)
            _less(13.0, x, u)
            _times(like, z, u, x)
            steps[g, t + 1] = x / 4


@Workers
def inverse_backward(worker, workers, arguments):
    """da and dz (G, m, m): dz comes with the gradient of the last matrix and leaves with that of the first guess.

    y = a z,  u₁ = 7 I - y,  u₂ = 15 I - y u₁,  u₃ = 13 I - y u₂,  z' = z u₃ / 4
    """
    like, a, steps, da, dz = arguments[0]
    count, m = steps.shape[1], a.shape[1]
    for g in range(worker, len(a), workers):
        y, u1, u2, u3 = (
            np.empty((m, m), a.dtype), np.empty((m, m), a.dtype), np.empty((m, m), a.dtype), np.empty((m, m), a.dtype)
        )  # fmt: skip
        x, dy, du, turned = (
            np.empty((m, m), a.dtype), np.empty((m, m), a.dtype), np.empty((m, m), a.dtype), np.empty((m, m), a.dtype)
        )  # fmt: skip
        change, size = dz[g], 8
        to, at, yt, dt, st = x.ctypes.data, turned.ctypes.data, y.ctypes.data, du.ctypes.data, dy.ctypes.data
        da[g] = 0
        for t in range(count - 2, -1, -1):
            z = steps[g, t]
            zt, ct = z.ctypes.data, change.ctypes.data
            _times(like, a[g], z, y)
            _less(7.0, y, u1)
            _times(like, y, u1, x)
            _less(15.0, x, u2)
            _times(like, y, u2, x)
            _less(13.0, x, u3)
            change *= 0.25
            du[:] = 0
            multiply_add_turned(like[0], m, m, m, zt, m, ct, m, dt, m, size)  # du₃ = zᵀ dz' / 4
            transpose(like[0], m, m, u3.ctypes.data, m, at, m, size)
            multiply(like[0], m, m, m, ct, m, at, m, to, m, size)  # dz = dz' u₃ᵀ / 4
            change[:] = x
            transpose(like[0], m, m, u2.ctypes.data, m, at, m, size)
            multiply(like[0], m, m, m, dt, m, at, m, st, m, size)  # -dy = du₃ u₂ᵀ …
            x[:] = 0
            multiply_add_turned(like[0], m, m, m, yt, m, dt, m, to, m, size)  # -du₂ = yᵀ du₃
            for i in range(m):
                for j in range(m):
                    du[i, j] = -x[i, j]
            transpose(like[0], m, m, u1.ctypes.data, m, at, m, size)
            multiply_add(like[0], m, m, m, dt, m, at, m, st, m, size)  # … + du₂ u₁ᵀ …
            x[:] = 0
            multiply_add_turned(like[0], m, m, m, yt, m, dt, m, to, m, size)  # -du₁ = yᵀ du₂
            for i in range(m):
                for j in range(m):
                    dy[i, j] = x[i, j] - dy[i, j]  # dy = -(… + du₁)
            transpose(like[0], m, m, zt, m, at, m, size)
            multiply_add(like[0], m, m, m, st, m, at, m, da[g].ctypes.data, m, size)  # da += dy zᵀ
            multiply_add_turned(like[0], m, m, m, a[g].ctypes.data, m, st, m, ct, m, size)  # dz += aᵀ dy
        keep(x, y, du, dy, turned)
