"""Tiles of queries against runs of keys, with one running softmax per row.

The keys of several short runs are gathered side by side, up to KEYS of them, so that one product gives the scores of
all: the transposed keys, the values and the queries of a tile are copied to memory that stays in the cache, from
wherever `asks` (queries) and `order` (keys) say that they stand. A row's state is (largest score m, total l of
exp(score - m), sum of exp(score - m)·value); (out, lse) of a row are the state (lse, 1, out), so that one launch goes
on where another ended.

A matrix is (address, stride of instances, stride of rows) in entries. A row of `tiles` is (first query, how many,
`most` at most), a row of `spans` (first key, how many, last, self): query i of the tile sees key j of the run where
j ≤ i + last and j ≠ i + self.
"""

from __future__ import annotations

import numpy as np

from subquad.kernels.parallel import exp, inline
from subquad.kernels.vectors import (
    BYTES,
    exp_row,
    largest,
    multiply,
    multiply_add,
    multiply_add_turned,
    scale_row,
    transpose,
)
from subquad.kernels.workers import Workers

ROWS = 24  # of a product: four times the rows that it keeps in registers
KEYS = 128  # that are gathered together

FIRST, COUNT, LAST, SELF = range(4)  # of a span


@inline
def _address(matrix, instance, row, size):
    return matrix[0] + (instance * matrix[1] + row * matrix[2]) * size


@inline
def _row(order, instance, place):
    """Where a row stands."""
    return order[instance % len(order), place] if order.shape[1] > 0 else place


@inline
def _copy(like, size, width, matrix, order, g, first, count, factor, into):
    """`count` rows of a matrix, times a factor, side by side."""
    for i in range(count):
        scale_row(factor, into + i * width * size, _address(matrix, g, _row(order, g, first + i), size), width)


@inline
def _fill(like, size, width, spans, t, p, done, sources, keys, values, order, g, rows_k, rows_v, kt, pieces):
    """Gathers keys of a tile, from key `done` of run p on, as many as there is room for.

    → the run and the key to go on with, how many columns there are, and how many pieces (run, first key, behind the
    last), each from a boundary of vectors on.
    """
    one, zero, lanes, column, number = like.dtype.type(1), like.dtype.type(0), BYTES // size, 0, 0
    while p < spans.shape[1] and column < KEYS:
        many = min(spans[t, p, COUNT] - done, KEYS - column)
        if many > 0:
            first, source, at = spans[t, p, FIRST] + done, sources[p], column * width * size
            _copy(like, size, width, keys[source], order, g, first, many, one, rows_k.ctypes.data + at)
            _copy(like, size, width, values[source], order, g, first, many, one, rows_v.ctypes.data + at)
            end = column + -(-many // lanes) * lanes
            rows_k[column + many : end] = zero
            rows_v[column + many : end] = zero
            pieces[number, 0], pieces[number, 1], pieces[number, 2] = p, done, done + many
            number, column, done = number + 1, end, done + many
        if done >= spans[t, p, COUNT]:
            p, done = p + 1, 0
    transpose(like[0], column, width, rows_k.ctypes.data, width, kt.ctypes.data, KEYS, size)
    return p, done, column, number


@inline
def _hide(s, many, r0, spans, t, p, begin, end, column, bias, shift, order, g):
    """Bias and rules for the columns of keys begin … end - 1 of run p; what stands behind them is nobody."""
    nothing, lanes = s.dtype.type(-np.inf), BYTES // s.itemsize
    count, last, own, first = end - begin, spans[t, p, LAST], spans[t, p, SELF], spans[t, p, FIRST] + begin
    padded = -(-count // lanes) * lanes
    for i in range(many):
        row = s[i]
        if bias.shape[1] > 0:
            for j in range(count):
                row[column + j] += bias[g % len(bias), shift + _row(order, g, first + j)]
        for j in range(max(0, r0 + i + last + 1 - begin), count):
            row[column + j] = nothing
        at = r0 + i + own - begin
        if at >= 0 and at < count:
            row[column + at] = nothing
        for j in range(count, padded):
            row[column + j] = nothing
    return column + padded


@inline
def _scores(like, size, width, many, r0, columns, rows_q, kt, s, spans, t, pieces, number, bias, shifts, order, g):
    """The scores (many × columns) of rows r0 … of a tile; pieces (number, 3): run, its first key, behind its last."""
    at = rows_q.ctypes.data + r0 * width * size
    multiply(like[0], many, columns, width, at, width, kt.ctypes.data, KEYS, s.ctypes.data, KEYS, size)
    column = 0
    for c in range(number):
        p, begin, end = pieces[c]
        column = _hide(s, many, r0, spans, t, p, begin, end, column, bias, shifts[p], order, g)


@inline
def _exponentiate(like, row, address, columns, top, total):
    """Scores → exp(score - new top): the new (top, total), and by what the sums so far are multiplied."""
    nothing, zero, one = like.dtype.type(-np.inf), like.dtype.type(0), like.dtype.type(1)
    best = largest(like[0], address, columns)
    new = best if best > top else top
    if new == nothing:  # no key, or nothing but NaN
        for j in range(columns):
            total += zero if row[j] == nothing else row[j]
            row[j] = zero
        return new, total, one
    less = exp(top - new) if total != zero else zero
    return new, total * less + exp_row(new, address, columns), less


@inline
def _absorb(like, size, width, rows, columns, rows_q, kt, rows_v, s, sums, top, total,
            spans, t, pieces, number, bias, shifts, order, g):  # fmt: skip
    """The gathered keys into the state of all rows of a tile."""
    one = like.dtype.type(1)
    for r0 in range(0, rows, ROWS):
        many = min(ROWS, rows - r0)
        _scores(like, size, width, many, r0, columns, rows_q, kt, s, spans, t, pieces, number, bias, shifts, order, g)
        for i in range(many):
            r = r0 + i
            top[r], total[r], less = _exponentiate(
                like, s[i], s.ctypes.data + i * KEYS * size, columns, top[r], total[r]
            )
            if less != one:
                here = sums.ctypes.data + r * width * size
                scale_row(less, here, here, width)
        into = sums.ctypes.data + r0 * width * size
        multiply_add(like[0], many, width, columns, s.ctypes.data, KEYS, rows_v.ctypes.data, width, into, width, size)


@Workers
def forward(worker, workers, arguments):
    """out and lse of the queries of all tiles; a row of `work` is a task: (instance, first tile, behind the last)."""
    (like, size, width, most, work, tiles, spans, sources, shifts, asks, order, q, keys, values, bias, out, lse,
     scale, fresh) = arguments[0]  # fmt: skip
    scale = like.dtype.type(scale)
    nothing, zero, one = like.dtype.type(-np.inf), like.dtype.type(0), like.dtype.type(1)
    for task in range(worker, len(work), workers):
        g, begin, end = work[task]
        rows_q, sums = np.empty((most, width), like.dtype), np.empty((most, width), like.dtype)
        top, total = np.empty(most, like.dtype), np.empty(most, like.dtype)
        rows_k, rows_v = np.empty((KEYS, width), like.dtype), np.empty((KEYS, width), like.dtype)
        kt, s = np.empty((width, KEYS), like.dtype), np.empty((ROWS, KEYS), like.dtype)
        pieces = np.empty((KEYS, 3), np.int64)
        for t in range(begin, end):
            first, rows = tiles[t, 0], tiles[t, 1]
            _copy(like, size, width, q, asks, g, first, rows, scale, rows_q.ctypes.data)
            for r in range(rows):
                before = nothing if fresh else lse[g, _row(asks, g, first + r)]
                top[r], total[r] = before, zero if before == nothing else one
            if fresh:
                sums[:rows] = zero
            else:
                _copy(like, size, width, out, asks, g, first, rows, one, sums.ctypes.data)
            p, done = 0, 0
            while p < spans.shape[1]:
                p, done, columns, number = _fill(like, size, width, spans, t, p, done, sources, keys, values, order, g,
                                                 rows_k, rows_v, kt, pieces)  # fmt: skip
                if columns > 0:
                    _absorb(like, size, width, rows, columns, rows_q, kt, rows_v, s, sums, top, total,
                            spans, t, pieces, number, bias, shifts, order, g)  # fmt: skip
            for r in range(rows):
                row, share = _row(asks, g, first + r), one / total[r] if total[r] != zero else zero
                scale_row(share, _address(out, g, row, size), sums.ctypes.data + r * width * size, width)
                lse[g, row] = top[r] + np.log(total[r]) if total[r] != zero else nothing


@inline
def _add_rows(like, size, width, spans, t, pieces, number, sources, matrices, order, g, change):
    """The rows of `change`, gathered as the keys were, are added to where they belong."""
    lanes, column = BYTES // size, 0
    for c in range(number):
        p, begin, end = pieces[c]
        for j in range(end - begin):
            row = _address(matrices[sources[p]], g, _row(order, g, spans[t, p, FIRST] + begin + j), size)
            here = change.ctypes.data + (column + j) * width * size
            multiply_add(like[0], 1, width, 1, like.ctypes.data, 1, here, width, row, width, size)
        column += -(-(end - begin) // lanes) * lanes


@Workers
def backward(worker, workers, arguments):
    """dq, dkeys and dvalues += the shares of all tiles, given lse (G, n), inf where a row saw nothing, and delta =
    dout·out - dlse. No two tasks that run together may add to the same keys. `like` holds 1.
    """
    (like, size, width, most, work, tiles, spans, sources, shifts, asks, order, q, keys, values, bias, scale, dout,
     delta, lse, dq, dkeys, dvalues) = arguments[0]  # fmt: skip
    scale = like.dtype.type(scale)
    zero, one = like.dtype.type(0), like.dtype.type(1)
    for task in range(worker, len(work), workers):
        g, begin, end = work[task]
        rows_q, rows_g = np.empty((most, width), like.dtype), np.empty((most, width), like.dtype)
        sums, base, less = np.empty((most, width), like.dtype), np.empty(most, like.dtype), np.empty(most, like.dtype)
        rows_k, rows_v = np.empty((KEYS, width), like.dtype), np.empty((KEYS, width), like.dtype)
        dk, dv = np.empty((KEYS, width), like.dtype), np.empty((KEYS, width), like.dtype)
        kt, vt = np.empty((width, KEYS), like.dtype), np.empty((width, KEYS), like.dtype)
        s, ds = np.empty((ROWS, KEYS), like.dtype), np.empty((ROWS, KEYS), like.dtype)
        pieces = np.empty((KEYS, 3), np.int64)
        st, dst = s.ctypes.data, ds.ctypes.data
        for t in range(begin, end):
            first, rows = tiles[t, 0], tiles[t, 1]
            _copy(like, size, width, q, asks, g, first, rows, scale, rows_q.ctypes.data)
            _copy(like, size, width, dout, asks, g, first, rows, one, rows_g.ctypes.data)
            for r in range(rows):
                row = _row(asks, g, first + r)
                base[r], less[r] = lse[g, row], delta[g, row]
            sums[:rows] = zero
            p, done = 0, 0
            while p < spans.shape[1]:
                p, done, columns, number = _fill(like, size, width, spans, t, p, done, sources, keys, values, order, g,
                                                 rows_k, rows_v, kt, pieces)  # fmt: skip
                if columns == 0:
                    continue
                transpose(like[0], columns, width, rows_v.ctypes.data, width, vt.ctypes.data, KEYS, size)
                dk[:columns] = zero
                dv[:columns] = zero
                for r0 in range(0, rows, ROWS):
                    many, at = min(ROWS, rows - r0), r0 * width * size
                    _scores(like, size, width, many, r0, columns, rows_q, kt, s,
                            spans, t, pieces, number, bias, shifts, order, g)  # fmt: skip
                    gt, qt = rows_g.ctypes.data + at, rows_q.ctypes.data + at
                    multiply(like[0], many, columns, width, gt, width, vt.ctypes.data, KEYS, dst, KEYS, size)
                    for i in range(many):
                        exp_row(base[r0 + i], st + i * KEYS * size, columns)
                        for j in range(columns):
                            ds[i, j] = s[i, j] * (ds[i, j] - less[r0 + i])
                    into = sums.ctypes.data + at
                    multiply_add(like[0], many, width, columns, dst, KEYS, rows_k.ctypes.data, width, into, width, size)
                    multiply_add_turned(
                        like[0], columns, width, many, dst, KEYS, qt, width, dk.ctypes.data, width, size
                    )
                    multiply_add_turned(like[0], columns, width, many, st, KEYS, gt, width, dv.ctypes.data, width, size)
                _add_rows(like, size, width, spans, t, pieces, number, sources, dkeys, order, g, dk)
                _add_rows(like, size, width, spans, t, pieces, number, sources, dvalues, order, g, dv)
            for r in range(rows):
                row = _address(dq, g, _row(asks, g, first + r), size)
                here = sums.ctypes.data + r * width * size
                scale_row(scale, here, here, width)
                multiply_add(like[0], 1, width, 1, like.ctypes.data, 1, here, width, row, width, size)
