"""The kernels of the kernel sums on a CPU: a sequence after the other, a chunk of tokens at a time.

With S = Σ b_j v_jᵀ and z = Σ b_j over the keys that a query sees, out_i = a_i S / a_i·z. A chunk is copied to memory
that stays in the cache; with `elu` its features are made there, so that no tensor of features is ever written. The
formulas of the backward are those of `chunks`; S, z, T = Σ a_i g_iᵀ and t = Σ a_i h_i run along with the chunks.

A matrix is (address, stride of sequences, stride of rows) in entries; `like` holds the smallest denominator.
"""

from __future__ import annotations

import numpy as np

from subquad.kernels.parallel import Workers, inline
from subquad.kernels.vectors import (
    dot,
    elu_row,
    fetch_row,
    load_row,
    multiply,
    multiply_add,
    multiply_add_turned,
    scale_row,
    store_row,
    transpose,
)

CHUNK = 48  # tokens: eight times the rows that a product keeps in registers


# ---- a chunk ------------------------------------------------------------------------------------------------


@inline
def _address(matrix, g, row, size):
    return matrix[0] + (g * matrix[1] + row * matrix[2]) * size


@inline
def _addresses(matrix, g, row, ahead, size):
    """Of a row, and of one that is further on."""
    return _address(matrix, g, row, size), _address(matrix, g, row + ahead, size)


@inline
def _load(like, size, width, matrix, g, first, count, elu, into, ahead=CHUNK):
    """`count` rows into `into` (CHUNK, width), as features where they are to be made; rows behind them are 0. The rows
    of the next chunk, `ahead` of these, are fetched."""
    zero, one = like.dtype.type(0), like.dtype.type(1)
    for i in range(count):
        here = into.ctypes.data + i * width * size
        at, later = _addresses(matrix, g, first + i, ahead, size)
        load_row(one, here, at, later, width)
        if elu:
            elu_row(like[0], here, width)
    into[count:] = zero


@inline
def _store(like, size, width, rows, count, matrix, g, first, ahead=CHUNK):
    for i in range(count):
        here, later = _addresses(matrix, g, first + i, ahead, size)
        store_row(like.dtype.type(1), here, rows.ctypes.data + i * width * size, later, width)


@inline
def _through_map(rows, features, count, elu):
    """Gradients of features → of what they are made of: the derivative of elu(x) + 1 is min(elu(x) + 1, 1)."""
    if elu:
        one = rows.dtype.type(1)
        for i in range(count):
            for f in range(rows.shape[1]):
                x = features[i, f]
                rows[i, f] *= x if x < one else one


@inline
def _gather(like, size, x, rows_x, y, rows_y, depth, into):
    """into (x, y) += Σ_i x_i y_iᵀ over `depth` rows."""
    at, to = x.ctypes.data, into.ctypes.data
    multiply_add_turned(like[0], rows_x, rows_y, depth, at, rows_x, y.ctypes.data, rows_y, to, rows_y, size)


@inline
def _add_rows(rows, count, factors, total, weighted):
    """total += Σ_i rows_i, times factor i where they are weighted."""
    for i in range(count):
        if weighted:
            for f in range(len(total)):
                total[f] += rows[i, f] * factors[i]
        else:
            for f in range(len(total)):
                total[f] += rows[i, f]


@inline
def _divide(like, size, f, d, a, z, sums, count, den, first, normalise):
    """sums (CHUNK, d), and den the part of the chunk itself → out."""
    zero, one = like.dtype.type(0), like.dtype.type(1)
    if not normalise:
        return
    for i in range(count):
        den[first + i] += dot(like[0], a.ctypes.data + i * f * size, z.ctypes.data, f)
        here = sums.ctypes.data + i * d * size
        scale_row(zero if den[first + i] <= like[0] else one / den[first + i], here, here, d)


@inline
def _lower(s, count, den, first, summed):
    """Keeps the scores of a chunk with keys up to the query, and gives the denominators their sums."""
    zero = s.dtype.type(0)
    for i in range(count):
        for j in range(i + 1, s.shape[1]):
            s[i, j] = zero
        if summed:
            total = zero
            for j in range(i + 1):
                total += s[i, j]
            den[first + i] = total


@inline
def _divided(like, size, d, grad, out, den, g, first, count, rows, h, normalise, ahead=CHUNK):
    """γ / den into rows (CHUNK, d) and -γ·out / den into h, for `count` rows."""
    zero, one = like.dtype.type(0), like.dtype.type(1)
    for i in range(count):
        here, share = rows.ctypes.data + i * d * size, one
        if normalise:
            share = zero if den[first + i] <= like[0] else one / den[first + i]
        at, later = _addresses(grad, g, first + i, ahead, size)
        load_row(share, here, at, later, d)
        h[i] = zero
        if normalise:
            at, later = _addresses(out, g, first + i, ahead, size)
            h[i] = -dot(like[0], here, at, d)
            fetch_row(like[0], later, d)
    rows[count:] = zero
    h[count:] = zero


# ---- everyone to everyone -----------------------------------------------------------------------------------


@Workers
def whole_forward(worker, workers, arguments):
    like, size, f, d, a, b, v, out, den, sizes, normalise, elu = arguments[0]
    normalise, elu = normalise != 0, elu != 0
    kind, (graphs, n, m) = like.dtype, sizes
    for g in range(worker, graphs, workers):
        x, y, values = np.empty((CHUNK, f), kind), np.empty((CHUNK, f), kind), np.empty((CHUNK, d), kind)
        s, z, none = np.zeros((f, d), kind), np.zeros(f, kind), np.empty(0, kind)
        for first in range(0, m, CHUNK):
            count = min(CHUNK, m - first)
            _load(like, size, f, b, g, first, count, elu, y)
            _load(like, size, d, v, g, first, count, False, values)
            _gather(like, size, y, f, values, d, count, s)
            _add_rows(y, count, none, z, False)
        for first in range(0, n, CHUNK):
            count = min(CHUNK, n - first)
            _load(like, size, f, a, g, first, count, elu, x)
            multiply(like[0], count, d, f, x.ctypes.data, f, s.ctypes.data, d, values.ctypes.data, d, size)
            if normalise:
                den[g, first : first + count] = 0
            _divide(like, size, f, d, x, z, values, count, den[g], first, normalise)
            _store(like, size, d, values, count, out, g, first)


@Workers
def whole_backward(worker, workers, arguments):
    like, size, f, d, grad, a, b, v, out, da, db, dv, den, sizes, normalise, elu = arguments[0]
    normalise, elu = normalise != 0, elu != 0
    kind, (graphs, n, m) = like.dtype, sizes
    for task in range(worker, graphs, workers):
        g = task
        x, change = np.empty((CHUNK, f), kind), np.empty((CHUNK, f), kind)
        values, rows, h = np.empty((CHUNK, d), kind), np.empty((CHUNK, d), kind), np.empty(CHUNK, kind)
        st, tt, t = np.zeros((d, f), kind), np.zeros((d, f), kind), np.empty((f, d), kind)  # Sᵀ, Tᵀ, T
        z, total, none = np.zeros(f, kind), np.zeros(f, kind), np.empty(0, kind)
        for first in range(0, m, CHUNK):
            count = min(CHUNK, m - first)
            _load(like, size, f, b, g, first, count, elu, x)
            _load(like, size, d, v, g, first, count, False, values)
            _gather(like, size, values, d, x, f, count, st)
            _add_rows(x, count, none, z, False)
        for first in range(0, n, CHUNK):
            count = min(CHUNK, n - first)
            _load(like, size, f, a, g, first, count, elu, x)
            _divided(like, size, d, grad, out, den[g], g, first, count, rows, h, normalise)
            _gather(like, size, rows, d, x, f, count, tt)
            _add_rows(x, count, h, total, True)
            multiply(like[0], count, f, d, rows.ctypes.data, d, st.ctypes.data, f, change.ctypes.data, f, size)
            for i in range(count):
                for e in range(f):
                    change[i, e] += h[i] * z[e]
            _through_map(change, x, count, elu)
            _store(like, size, f, change, count, da, g, first)
        transpose(like[0], d, f, tt.ctypes.data, f, t.ctypes.data, d, size)
        for first in range(0, m, CHUNK):
            count = min(CHUNK, m - first)
            _load(like, size, f, b, g, first, count, elu, x)
            _load(like, size, d, v, g, first, count, False, values)
            multiply(like[0], count, f, d, values.ctypes.data, d, tt.ctypes.data, f, change.ctypes.data, f, size)
            for i in range(count):
                for e in range(f):
                    change[i, e] += total[e]
            _through_map(change, x, count, elu)
            _store(like, size, f, change, count, db, g, first)
            multiply(like[0], count, d, f, x.ctypes.data, f, t.ctypes.data, d, rows.ctypes.data, d, size)
            _store(like, size, d, rows, count, dv, g, first)


# ---- causal -------------------------------------------------------------------------------------------------


@Workers
def causal_forward(worker, workers, arguments):
    like, size, f, d, a, b, v, out, den, sizes, normalise, elu = arguments[0]
    normalise, elu = normalise != 0, elu != 0
    kind, (graphs, n, _) = like.dtype, sizes
    for g in range(worker, graphs, workers):
        x, y, yt = np.empty((CHUNK, f), kind), np.empty((CHUNK, f), kind), np.empty((f, CHUNK), kind)
        values, sums, inside = np.empty((CHUNK, d), kind), np.empty((CHUNK, d), kind), np.empty((CHUNK, CHUNK), kind)
        s, z, none = np.zeros((f, d), kind), np.zeros(f, kind), np.empty(0, kind)
        for first in range(0, n, CHUNK):
            count = min(CHUNK, n - first)
            _load(like, size, f, a, g, first, count, elu, x)
            _load(like, size, f, b, g, first, count, elu, y)
            _load(like, size, d, v, g, first, count, False, values)
            transpose(like[0], CHUNK, f, y.ctypes.data, f, yt.ctypes.data, CHUNK, size)
            xt, it, to = x.ctypes.data, inside.ctypes.data, sums.ctypes.data
            multiply(like[0], count, CHUNK, f, xt, f, yt.ctypes.data, CHUNK, it, CHUNK, size)
            _lower(inside, count, den[g], first, normalise)
            multiply(like[0], count, d, f, xt, f, s.ctypes.data, d, to, d, size)
            multiply_add(like[0], count, d, count, it, CHUNK, values.ctypes.data, d, to, d, size)
            _divide(like, size, f, d, x, z, sums, count, den[g], first, normalise)
            _store(like, size, d, sums, count, out, g, first)
            _gather(like, size, y, f, values, d, count, s)
            _add_rows(y, count, none, z, False)


@Workers
def causal_backward(worker, workers, arguments):
    """Forwards with S for da, backwards with T for db and dv."""
    like, size, f, d, grad, a, b, v, out, da, db, dv, den, sizes, normalise, elu = arguments[0]
    normalise, elu = normalise != 0, elu != 0
    kind, (graphs, n, _) = like.dtype, sizes
    for task in range(worker, graphs, workers):
        g = task
        x, y, change = np.empty((CHUNK, f), kind), np.empty((CHUNK, f), kind), np.empty((CHUNK, f), kind)
        values, rows, h = np.empty((CHUNK, d), kind), np.empty((CHUNK, d), kind), np.empty(CHUNK, kind)
        more, yt, vt = np.empty((CHUNK, d), kind), np.empty((f, CHUNK), kind), np.empty((d, CHUNK), kind)
        inside, weights = np.empty((CHUNK, CHUNK), kind), np.empty((CHUNK, CHUNK), kind)
        st, tt, t = np.zeros((d, f), kind), np.zeros((d, f), kind), np.empty((f, d), kind)  # Sᵀ, Tᵀ, T
        z, total, none = np.zeros(f, kind), np.zeros(f, kind), np.empty(0, kind)
        xt, bt, ct, gt = x.ctypes.data, y.ctypes.data, change.ctypes.data, rows.ctypes.data
        it, wt = inside.ctypes.data, weights.ctypes.data
        chunks = -(-n // CHUNK)
        for turn in range(2 * chunks):
            back = turn >= chunks
            first = (2 * chunks - 1 - turn if back else turn) * CHUNK
            count, ahead = min(CHUNK, n - first), -CHUNK if back else CHUNK
            _load(like, size, f, a, g, first, count, elu, x, ahead)
            _load(like, size, f, b, g, first, count, elu, y, ahead)
            _load(like, size, d, v, g, first, count, False, values, ahead)
            _divided(like, size, d, grad, out, den[g], g, first, count, rows, h, normalise, ahead)
            transpose(like[0], CHUNK, d, values.ctypes.data, d, vt.ctypes.data, CHUNK, size)
            multiply(like[0], count, CHUNK, d, gt, d, vt.ctypes.data, CHUNK, it, CHUNK, size)  # g·v …
            for i in range(count):
                for j in range(CHUNK):
                    inside[i, j] += h[i]  # … + h
            _lower(inside, count, none, first, False)
            if not back:
                multiply(like[0], count, f, d, gt, d, st.ctypes.data, f, ct, f, size)
                multiply_add(like[0], count, f, count, it, CHUNK, bt, f, ct, f, size)
                for i in range(count):
                    for e in range(f):
                        change[i, e] += h[i] * z[e]
                _through_map(change, x, count, elu)
                _store(like, size, f, change, count, da, g, first, ahead)
                _gather(like, size, values, d, y, f, count, st)
                _add_rows(y, count, none, z, False)
                continue
            transpose(like[0], CHUNK, f, bt, f, yt.ctypes.data, CHUNK, size)
            multiply(like[0], count, CHUNK, f, xt, f, yt.ctypes.data, CHUNK, wt, CHUNK, size)
            _lower(weights, count, none, first, False)
            transpose(like[0], d, f, tt.ctypes.data, f, t.ctypes.data, d, size)
            multiply(like[0], count, f, d, values.ctypes.data, d, tt.ctypes.data, f, ct, f, size)
            multiply_add_turned(like[0], count, f, count, it, CHUNK, xt, f, ct, f, size)
            for i in range(count):
                for e in range(f):
                    change[i, e] += total[e]
            _through_map(change, y, count, elu)
            _store(like, size, f, change, count, db, g, first, ahead)
            multiply(like[0], count, d, f, bt, f, t.ctypes.data, d, more.ctypes.data, d, size)
            multiply_add_turned(like[0], count, d, count, wt, CHUNK, gt, d, more.ctypes.data, d, size)
            _store(like, size, d, more, count, dv, g, first, ahead)
            _gather(like, size, rows, d, x, f, count, tt)
            _add_rows(x, count, h, total, True)
