"""Tiles of queries against runs of keys, with one running softmax per row.

The keys of several short runs are gathered side by side, up to KEYS of them, so that one product gives the scores of
all: keys, values and queries of a tile are copied to memory that stays in the cache, from wherever `asks` (queries)
and `order` (keys) say that they stand. Scores are (keys × queries): then a vector holds one key's scores of several
queries, maxima, sums and rules need nothing across its lanes, and only the queries have to be transposed. A row's
state is (largest score m, total l of exp(score - m), sum of exp(score - m)·value); (out, lse) of a row are the state
(lse, 1, out), so that one launch goes on where another ended.

A matrix is (address, stride of instances, stride of rows) in entries. A row of `tiles` is (first query, how many,
`most` at most), a row of `spans` (first key, how many, last, self): query i of the tile sees key j of the run where
j ≤ i + last and j ≠ i + self.
"""

from __future__ import annotations

import numpy as np

from subquad.kernels.parallel import Workers, inline, keep
from subquad.kernels.vector_rows import absorb_columns, add_row, gradient_across
from subquad.kernels.vectors import (
    BYTES,
    multiply,
    multiply_add_turned,
    multiply_turned,
    scale_row,
    transpose,
)

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
def _turn(like, size, width, rows, padded, straight, turned):
    """turned (width × padded) = straightᵀ, whose rows behind the last become 0."""
    straight[rows:padded] = like.dtype.type(0)
    transpose(like[0], padded, width, straight.ctypes.data, width, turned.ctypes.data, turned.shape[1], size)


@inline
def _fill(like, size, width, spans, t, p, done, sources, keys, values, order, g, rows_k, rows_v, pieces):
    """Gathers keys of a tile, from key `done` of run p on, as many as there is room for.

    → the run and the key to go on with, how many keys there are, and how many pieces (run, first key, behind the last).
    """
    one, column, number = like.dtype.type(1), 0, 0
    while p < spans.shape[1] and column < KEYS:
        many = min(spans[t, p, COUNT] - done, KEYS - column)
        if many > 0:
            first, source, at = spans[t, p, FIRST] + done, sources[p], column * width * size
            _copy(like, size, width, keys[source], order, g, first, many, one, rows_k.ctypes.data + at)
            _copy(like, size, width, values[source], order, g, first, many, one, rows_v.ctypes.data + at)
            pieces[number, 0], pieces[number, 1], pieces[number, 2] = p, done, done + many
            number, column, done = number + 1, column + many, done + many
        if done >= spans[t, p, COUNT]:
            p, done = p + 1, 0
    return p, done, column, number


@inline
def _hide(s, padded, spans, t, p, begin, end, column, bias, shift, order, g):
    """Bias and rules for the rows of keys begin … end - 1 of run p."""
    nothing, last, own, first = s.dtype.type(-np.inf), spans[t, p, LAST], spans[t, p, SELF], spans[t, p, FIRST]
    for j in range(begin, end):
        row = s[column + j - begin]
        if bias.shape[1] > 0:
            more = bias[g % len(bias), shift + _row(order, g, first + j)]
            for i in range(padded):
                row[i] += more
        for i in range(min(j - last, padded)):
            row[i] = nothing
        if j >= own and j - own < padded:
            row[j - own] = nothing


@inline
def _scores(like, size, width, padded, columns, rows_k, qt, s, spans, t, pieces, number, bias, shifts, order, g):
    """The scores (columns × padded) of a tile; pieces (number, 3): run, its first key, behind its last."""
    down = qt.shape[1]
    multiply(like[0], columns, padded, width, rows_k.ctypes.data, width, qt.ctypes.data, down, s.ctypes.data, down,
             size)  # fmt: skip
    column = 0
    for c in range(number):
        p, begin, end = pieces[c]
        _hide(s, padded, spans, t, p, begin, end, column, bias, shifts[p], order, g)
        column += end - begin


@inline
def _absorb(like, size, width, rows, padded, columns, rows_v, s, sums, top, total, less, begun):
    """The scores of gathered keys into the state of all rows of a tile; not `begun`: there are no sums yet."""
    one, down = like.dtype.type(1), s.shape[1]
    for i in range(0, padded, BYTES // size):
        at = i * size
        absorb_columns(like[0], s.ctypes.data + at, down, columns, top.ctypes.data + at, total.ctypes.data + at,
                       less.ctypes.data + at)  # fmt: skip
    into = sums.ctypes.data
    if not begun:
        multiply_turned(
            like[0], rows, width, columns, s.ctypes.data, down, rows_v.ctypes.data, width, into, width, size
        )
        return
    for r in range(rows):
        if less[r] != one:
            scale_row(less[r], into + r * width * size, into + r * width * size, width)
    multiply_add_turned(
        like[0], rows, width, columns, s.ctypes.data, down, rows_v.ctypes.data, width, into, width, size
    )


@inline
def _start(like, size, width, asks, g, first, rows, padded, out, lse, fresh, sums, top, total):
    """The state of a tile's rows: nothing, or what is in (out, lse)."""
    nothing, zero, one = like.dtype.type(-np.inf), like.dtype.type(0), like.dtype.type(1)
    for r in range(padded):
        before = nothing if fresh or r >= rows else lse[g, _row(asks, g, first + r)]
        top[r], total[r] = before, zero if before == nothing else one
    if not fresh:
        _copy(like, size, width, out, asks, g, first, rows, one, sums.ctypes.data)


@Workers
def forward(worker, workers, arguments):
    """out and lse of the queries of all tiles; a row of `work` is a task: (instance, first tile, behind the last)."""
    (like, size, width, most, work, tiles, spans, sources, shifts, asks, order, q, keys, values, bias, out, lse,
     scale, fresh) = arguments[0]  # fmt: skip
    scale, lanes = like.dtype.type(scale), BYTES // size
    nothing, zero, one = like.dtype.type(-np.inf), like.dtype.type(0), like.dtype.type(1)
    wide = -(-most // lanes) * lanes
    rows_q, sums = np.empty((wide, width), like.dtype), np.empty((wide, width), like.dtype)
    top, total, less = np.empty(wide, like.dtype), np.empty(wide, like.dtype), np.empty(wide, like.dtype)
    rows_k, rows_v = np.empty((KEYS, width), like.dtype), np.empty((KEYS, width), like.dtype)
    qt, s = np.empty((width, wide), like.dtype), np.empty((KEYS, wide), like.dtype)
    pieces = np.empty((KEYS, 3), np.int64)
    for task in range(worker, len(work), workers):
        g, begin, end = work[task]
        for t in range(begin, end):
            first, rows = tiles[t, 0], tiles[t, 1]
            padded, begun, p, done = -(-rows // lanes) * lanes, not fresh, 0, 0
            _copy(like, size, width, q, asks, g, first, rows, scale, rows_q.ctypes.data)
            _turn(like, size, width, rows, padded, rows_q, qt)
            _start(like, size, width, asks, g, first, rows, padded, out, lse, fresh, sums, top, total)
            while p < spans.shape[1]:
                p, done, columns, number = _fill(like, size, width, spans, t, p, done, sources, keys, values, order, g,
                                                 rows_k, rows_v, pieces)  # fmt: skip
                if columns > 0:
                    _scores(like, size, width, padded, columns, rows_k, qt, s,
                            spans, t, pieces, number, bias, shifts, order, g)  # fmt: skip
                    _absorb(like, size, width, rows, padded, columns, rows_v, s, sums, top, total, less, begun)
                    begun = True
            if not begun:
                sums[:rows] = zero
            for r in range(rows):
                row, share = _row(asks, g, first + r), one / total[r] if total[r] != zero else zero
                scale_row(share, _address(out, g, row, size), sums.ctypes.data + r * width * size, width)
                lse[g, row] = top[r] + np.log(total[r]) if total[r] != zero else nothing
    keep(rows_q, sums, top, total, less, rows_k, rows_v, qt, s)


@inline
def _add_rows(like, size, width, spans, t, pieces, number, sources, matrices, order, g, change, once):
    """The rows of `change`, gathered as the keys were, are added to where they belong; `once`: written there."""
    one, column = like.dtype.type(1), 0
    for c in range(number):
        p, begin, end = pieces[c]
        for j in range(begin, end):
            row = _address(matrices[sources[p]], g, _row(order, g, spans[t, p, FIRST] + j), size)
            here = change.ctypes.data + (column + j - begin) * width * size
            if once:
                scale_row(one, row, here, width)
            else:
                add_row(one, row, here, width)
        column += end - begin


@inline
def _gradients(like, size, width, rows, padded, columns, rows_q, rows_g, rows_k, rows_v, gt, s, ds, base, less,
               sums, dk, dv, begun):  # fmt: skip
    """Of gathered keys, whose scores are s: dk and dv, and into `sums` their share of dq."""
    down, st, dst, into = s.shape[1], s.ctypes.data, ds.ctypes.data, sums.ctypes.data
    multiply(like[0], columns, padded, width, rows_v.ctypes.data, width, gt.ctypes.data, down, dst, down, size)
    for j in range(columns):
        at = j * down * size
        gradient_across(like[0], st + at, dst + at, base.ctypes.data, less.ctypes.data, padded)
    multiply(like[0], columns, width, rows, dst, down, rows_q.ctypes.data, width, dk.ctypes.data, width, size)
    multiply(like[0], columns, width, rows, st, down, rows_g.ctypes.data, width, dv.ctypes.data, width, size)
    if begun:
        multiply_add_turned(like[0], rows, width, columns, dst, down, rows_k.ctypes.data, width, into, width, size)
    else:
        multiply_turned(like[0], rows, width, columns, dst, down, rows_k.ctypes.data, width, into, width, size)


@Workers
def backward(worker, workers, arguments):
    """dq, dkeys and dvalues += the shares of all tiles, given lse (G, n), inf where a row saw nothing, and delta =
    dout·out - dlse; `fresh`: dq = the share of the one tile that a query is in, `once`: dkeys and dvalues = those of
    the one run that a key is in. No two tasks that run together may add to the same keys.
    """
    (like, size, width, most, work, tiles, spans, sources, shifts, asks, order, q, keys, values, bias, scale, dout,
     delta, lse, dq, dkeys, dvalues, fresh, once) = arguments[0]  # fmt: skip
    scale, lanes = like.dtype.type(scale), BYTES // size
    zero, one = like.dtype.type(0), like.dtype.type(1)
    wide = -(-most // lanes) * lanes
    rows_q, rows_g = np.empty((wide, width), like.dtype), np.empty((wide, width), like.dtype)
    sums, base, less = np.empty((wide, width), like.dtype), np.zeros(wide, like.dtype), np.zeros(wide, like.dtype)
    rows_k, rows_v = np.empty((KEYS, width), like.dtype), np.empty((KEYS, width), like.dtype)
    dk, dv = np.empty((KEYS, width), like.dtype), np.empty((KEYS, width), like.dtype)
    qt, gt = np.empty((width, wide), like.dtype), np.empty((width, wide), like.dtype)
    s, ds = np.empty((KEYS, wide), like.dtype), np.empty((KEYS, wide), like.dtype)
    pieces = np.empty((KEYS, 3), np.int64)
    for task in range(worker, len(work), workers):
        g, begin, end = work[task]
        for t in range(begin, end):
            first, rows = tiles[t, 0], tiles[t, 1]
            padded, begun, p, done = -(-rows // lanes) * lanes, False, 0, 0
            _copy(like, size, width, q, asks, g, first, rows, scale, rows_q.ctypes.data)
            _copy(like, size, width, dout, asks, g, first, rows, one, rows_g.ctypes.data)
            _turn(like, size, width, rows, padded, rows_q, qt)
            _turn(like, size, width, rows, padded, rows_g, gt)
            for r in range(rows):
                row = _row(asks, g, first + r)
                base[r], less[r] = lse[g, row], delta[g, row]
            while p < spans.shape[1]:
                p, done, columns, number = _fill(like, size, width, spans, t, p, done, sources, keys, values, order, g,
                                                 rows_k, rows_v, pieces)  # fmt: skip
                if columns > 0:
                    _scores(like, size, width, padded, columns, rows_k, qt, s,
                            spans, t, pieces, number, bias, shifts, order, g)  # fmt: skip
                    _gradients(like, size, width, rows, padded, columns, rows_q, rows_g, rows_k, rows_v, gt, s, ds,
                               base, less, sums, dk, dv, begun)  # fmt: skip
                    _add_rows(like, size, width, spans, t, pieces, number, sources, dkeys, order, g, dk, once)
                    _add_rows(like, size, width, spans, t, pieces, number, sources, dvalues, order, g, dv, once)
                    begun = True
            if not begun:
                sums[:rows] = zero
            for r in range(rows):
                row, here = _address(dq, g, _row(asks, g, first + r), size), sums.ctypes.data + r * width * size
                if fresh:
                    scale_row(scale, row, here, width)
                else:
                    add_row(scale, row, here, width)
    keep(rows_q, rows_g, sums, base, less, rows_k, rows_v, dk, dv, qt, gt, s, ds)
