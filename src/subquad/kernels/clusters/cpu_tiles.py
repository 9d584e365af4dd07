"""Attention in clusters on a CPU: tiles of scores in the first-level cache, over lists of queries and keys.

The building blocks are those of `running_softmax`; rows are gathered as they are needed. Key j is seen by query i when

    born[j] <= time[i] < end[j]    and, among summaries,    tag[j] != tag[i]

Causal, a token is born at its time and a summary ends when the next one of its cluster is born; otherwise everything
is there from the beginning. What does not exist is born at NEVER.
"""

from __future__ import annotations

import numpy as np

from subquad.kernels.parallel import Workers, inline, keep
from subquad.kernels.running_softmax import BAND, KEYS, ROWS, lay_row, softmax_tile, take_row, transpose_scaled
from subquad.kernels.vector_rows import add_row, fill_row, gradient_row
from subquad.kernels.vectors import BYTES, dot, multiply, multiply_add, multiply_add_turned, scale_row

NEVER = 1 << 30


@inline
def _gather(like, size, width, x, places, first, count, last, into):
    """Rows of x at some places, side by side; a place behind the last row is nobody's and has 0.

    Its weight is 0, but 0 times a NaN of whichever row stood in for it would be NaN.
    """
    for j in range(count):
        at, here = places[first + j], into + j * width * size
        if at > last:
            fill_row(like.dtype.type(0), here, width)
        else:
            scale_row(like.dtype.type(1), here, x + at * width * size, width)


@inline
def _times(about, places, first, count, now):
    """now = born, end and tag of some keys."""
    born, end, tag = about
    for j in range(count):
        at = places[first + j]
        now[0, j], now[1, j], now[2, j] = born[at], end[at], tag[at]


@inline
def _seen_by(now, count, last):
    """Of keys in the order of time, those behind the last one that is born by then are not multiplied."""
    while count > 0 and now[0, count - 1] > last:
        count -= 1
    return count


@inline
def _hide(s, many, count, padded, now, time, tag, rows, first, others):
    """-inf for what a query does not see."""
    nothing = s.dtype.type(-np.inf)
    for i in range(many):
        at = rows[first + i]
        t, own = time[at], tag[at]
        for j in range(count):
            hidden = now[0, j] > t or (others and (now[1, j] <= t or now[2, j] == own))
            s[i, j] = nothing if hidden else s[i, j]
        for j in range(count, padded):
            s[i, j] = nothing


@Workers
def forward(worker, workers, arguments):
    """out and lse of the tiles' queries; tiles (T, 4): first row, rows, first key, keys, of the lists of tokens."""
    like, size, width, tiles, rows, keys, time, about, others, fresh, q, k, v, out, lse, scale = arguments[0]
    scale = like.dtype.type(scale)
    last = len(time) - 1
    across, s = np.empty((width, KEYS), like.dtype), np.empty((ROWS, KEYS), like.dtype)
    near, values = np.empty((KEYS, width), like.dtype), np.empty((KEYS, width), like.dtype)
    asked, state = np.empty((BAND, width), like.dtype), np.empty((BAND, width), like.dtype)
    top, total = np.empty(BAND, like.dtype), np.empty(BAND, like.dtype)
    now, lanes = np.empty((3, KEYS), np.int32), BYTES // size
    kt, st, nt, vt, qt, at = (
        across.ctypes.data, s.ctypes.data, near.ctypes.data, values.ctypes.data, asked.ctypes.data,
        state.ctypes.data,
    )  # fmt: skip
    for task in range(worker, len(tiles), workers):
        row0, many_rows, key0, many_keys = tiles[task]
        _gather(like, size, width, q, rows, row0, many_rows, last, qt)
        for r in range(many_rows):
            place = rows[row0 + r]
            take_row(like, size, width, out + place * width * size, lse, place, fresh, at, r, top, total)
        latest = time[rows[row0 + many_rows - 1]]
        for c in range(0, many_keys, KEYS):
            count = min(KEYS, many_keys - c)
            _times(about, keys, key0 + c, count, now)
            count = _seen_by(now, count, latest)
            if count == 0:
                continue
            _gather(like, size, width, k, keys, key0 + c, count, last, nt)
            _gather(like, size, width, v, keys, key0 + c, count, last, vt)
            transpose_scaled(like, size, width, count, nt, width, kt, scale)
            for r0 in range(0, many_rows, ROWS):
                many = min(ROWS, many_rows - r0)
                some = _seen_by(now, count, time[rows[row0 + r0 + many - 1]])
                if some == 0:
                    continue
                padded = -(-some // lanes) * lanes
                multiply(like[0], many, padded, width, qt + r0 * width * size, width, kt, KEYS, st, KEYS, size)
                _hide(s, many, some, padded, now, time, about[2], rows, row0 + r0, others)
                softmax_tile(like, size, width, s, many, some, padded, top, total, at, r0)
                into = at + r0 * width * size
                multiply_add(like[0], many, width, some, st, KEYS, vt, width, into, width, size)
        for r in range(many_rows):
            place = rows[row0 + r]
            lay_row(like, size, width, out + place * width * size, lse, place, at, r, top, total)
    keep(across, near, values, asked, state)


@Workers
def backward(worker, workers, arguments):
    """dq, dk and dv += the tiles' share; sequence g has the tiles starts[g] … starts[g+1]-1, one after the other."""
    (like, size, width, starts, tiles, rows, keys, time, about, others, q, k, v, out, dout, dq, dk, dv, lse,
     scale) = arguments[0]  # fmt: skip
    scale = like.dtype.type(scale)
    last, zero = len(time) - 1, like.dtype.type(0)
    across, beyond = np.empty((width, KEYS), like.dtype), np.empty((width, KEYS), like.dtype)
    near, values = np.empty((KEYS, width), like.dtype), np.empty((KEYS, width), like.dtype)
    s, ds = np.empty((ROWS, KEYS), like.dtype), np.empty((ROWS, KEYS), like.dtype)
    asked, given = np.empty((BAND, width), like.dtype), np.empty((BAND, width), like.dtype)
    changed = np.empty((BAND, width), like.dtype)
    base, delta = np.empty(BAND, like.dtype), np.empty(BAND, like.dtype)
    now, lanes = np.empty((3, KEYS), np.int32), BYTES // size
    kt, bt, nt, vt = across.ctypes.data, beyond.ctypes.data, near.ctypes.data, values.ctypes.data
    st, dst, qt, gt, ct = (
        s.ctypes.data, ds.ctypes.data, asked.ctypes.data, given.ctypes.data, changed.ctypes.data
    )  # fmt: skip
    dkt, dvt = np.empty((KEYS, width), like.dtype), np.empty((KEYS, width), like.dtype)
    for g in range(worker, len(starts) - 1, workers):
        for task in range(starts[g], starts[g + 1]):
            row0, many_rows, key0, many_keys = tiles[task]
            _gather(like, size, width, q, rows, row0, many_rows, last, qt)
            _gather(like, size, width, dout, rows, row0, many_rows, last, gt)
            for r in range(many_rows):
                place = rows[row0 + r]
                delta[r] = dot(like[0], gt + r * width * size, out + place * width * size, width)
                base[r] = zero if lse[place] == -np.inf else lse[place]
                fill_row(zero, ct + r * width * size, width)
            latest = time[rows[row0 + many_rows - 1]]
            for c in range(0, many_keys, KEYS):
                count = min(KEYS, many_keys - c)
                _times(about, keys, key0 + c, count, now)
                count = _seen_by(now, count, latest)
                if count == 0:
                    continue
                _gather(like, size, width, k, keys, key0 + c, count, last, nt)
                _gather(like, size, width, v, keys, key0 + c, count, last, vt)
                transpose_scaled(like, size, width, count, nt, width, kt, scale)
                transpose_scaled(like, size, width, count, vt, width, bt, like.dtype.type(1))
                dkt[:count] = zero
                dvt[:count] = zero
                for r0 in range(0, many_rows, ROWS):
                    many, here = min(ROWS, many_rows - r0), r0 * width * size
                    some = _seen_by(now, count, time[rows[row0 + r0 + many - 1]])
                    if some == 0:
                        continue
                    padded, turned = -(-some // lanes) * lanes, (some, width, many)
                    multiply(like[0], many, padded, width, qt + here, width, kt, KEYS, st, KEYS, size)
                    multiply(like[0], many, padded, width, gt + here, width, bt, KEYS, dst, KEYS, size)
                    _hide(s, many, some, padded, now, time, about[2], rows, row0 + r0, others)
                    for i in range(many):
                        row = i * KEYS * size
                        gradient_row(base[r0 + i], delta[r0 + i], scale, st + row, dst + row, padded)
                    multiply_add(like[0], many, width, some, dst, KEYS, nt, width, ct + here, width, size)
                    multiply_add_turned(like[0], *turned, dst, KEYS, qt + here, width, dkt.ctypes.data, width, size)
                    multiply_add_turned(like[0], *turned, st, KEYS, gt + here, width, dvt.ctypes.data, width, size)
                for j in range(count):
                    if now[0, j] < NEVER:
                        at, own = keys[key0 + c + j] * width * size, j * width * size
                        add_row(like.dtype.type(1), dk + at, dkt.ctypes.data + own, width)
                        add_row(like.dtype.type(1), dv + at, dvt.ctypes.data + own, width)
            for r in range(many_rows):
                add_row(like.dtype.type(1), dq + rows[row0 + r] * width * size, ct + r * width * size, width)
    keep(across, beyond, near, values, ds, asked, given, changed)
