"""One part of a plan in tiles of scores that stay in the first-level cache, with one running softmax per row.

A row's state is (largest score m, total l of exp(score - m), sum a of exp(score - m)·value). A part takes it up where
the parts before it left off: (out, lse) of a row are the state (lse, 1, out). So parts merge as they are computed, and
nothing of the size of the scores is ever written. Rules of positions say which keys a tile can see at all: those it
cannot are not multiplied.

Everything is given by addresses and strides in entries. A matrix is (address, stride of instances, stride of places); a
grid is (start, blocks, step, length, stride) as in `supports.parts`.
"""

from __future__ import annotations

import numba
import numpy as np

from subquad.core.hashing import chance, halves, stream
from subquad.kernels.parallel import exp, inline, kernel
from subquad.kernels.vectors import BYTES, dot, largest, multiply, multiply_add, scale_row, transpose

ROWS = 24  # of a tile: four times the rows of a product in registers
KEYS = 128  # of a tile
TASK_ROWS = 192  # queries that share the transposed keys


LO, HI, XLO, XHI, SPAN, END = range(6)  # of a part's limits


@inline
def _from(limits, which, query):
    """The position at which an interval of a query begins."""
    at, span = query + limits[which], limits[SPAN]
    return at if span == 1 else at // span * span  # a division takes as long as a vector of products


@inline
def _to(limits, which, query):
    """The position at which it ends."""
    at, span = query + limits[which], limits[SPAN]
    return at if span == 1 else at // span * span + span - 1


@inline
def _keys_in(first, last, first_key, key_stride):
    """The keys [low, high) that stand at positions in [first, last]."""
    low, high = first - first_key, last - first_key
    return (low, high + 1) if key_stride == 1 else (-(-low // key_stride), high // key_stride + 1)


@inline
def _seen(limits, first_key, key_stride, first, last):
    """The keys [low, high) that some query at a position in [first, last] may see."""
    end = min(_to(limits, HI, last), last + limits[END])
    return _keys_in(_from(limits, LO, first), end, first_key, key_stride)


@inline
def _everything(limits, count, first_key, key_stride, first, last):
    """Does every query at a position in [first, last] see all of the keys?"""
    last_key = first_key + (count - 1) * key_stride
    if _from(limits, LO, last) > first_key or min(_to(limits, HI, first), first + limits[END]) < last_key:
        return False
    return limits[XLO] > limits[XHI] or _to(limits, XHI, last) < first_key or _from(limits, XLO, first) > last_key


@inline
def _run(keys, drawn, draws, block, number):
    """Keys that stand in a row: (place of the first, how many, which key of the block the first is)."""
    if draws == 0:
        return keys[0] + block * keys[2], keys[3], 0
    size = keys[3] // draws
    return drawn[keys[0] + block * keys[2] + number] * size, size, number * size


@inline
def _mask_row(row, count, limits, query, first_key, key_stride):
    """-inf for keys that the query does not see by the interval rule."""
    nothing = row.dtype.type(-np.inf)
    low, high = _seen(limits, first_key, key_stride, query, query)
    for j in range(0, min(low, count)):
        row[j] = nothing
    for j in range(max(high, 0), count):
        row[j] = nothing
    if limits[XLO] <= limits[XHI]:
        low, high = _keys_in(_from(limits, XLO, query), _to(limits, XHI, query), first_key, key_stride)
        for j in range(max(low, 0), min(high, count)):
            row[j] = nothing


@inline
def _mask_tile(s, many, count, limits, query, query_step, first_key, key_stride, bias, block, row, column, exists, place, step):
    """The scores (many × count) of a tile: -inf where a key is not seen, by the interval, by a mask, or not there."""
    if not _everything(limits, count, first_key, key_stride, query, query + (many - 1) * query_step):
        for i in range(many):
            _mask_row(s[i], count, limits, query + i * query_step, first_key, key_stride)
    if bias.shape[2] > 0:
        mask = bias[block % bias.shape[0]]
        for i in range(many):
            for j in range(count):
                s[i, j] += mask[row + i, column + j]
    if exists.shape[0] > 0:
        nothing = s.dtype.type(-np.inf)
        for i in range(many):
            for j in range(count):
                s[i, j] = s[i, j] if exists[place + j * step] else nothing


@inline
def _drop(row, count, seed, instance, query, number, step, dropout, up):
    """Dropout by a hash of (seed, instance, query, key)."""
    low, high = halves(stream(seed, instance, query))
    zero = row.dtype.type(0)
    for j in range(count):
        row[j] *= up if chance(low, high, number + j * step) >= dropout else zero


@kernel
def forward(
    like, size, width, tasks, chunks, chunk_rows, q, k, v, out, lse, queries, keys, positions, limits, fresh,
    drawn, draws, bias, exists, instances, seed, scale, dropout, up, number,
):
    """out and lse of the queries of a part, merged into what is there; tasks = instances × blocks × chunks of rows."""
    kind = like.dtype.type
    nothing, zero, one = kind(-np.inf), kind(0), kind(1)
    lanes, blocks = BYTES // size, queries[1]
    for task in numba.prange(tasks):
        g, block, chunk = task // (blocks * chunks), task // chunks % blocks, task % chunks
        row0 = chunk * chunk_rows
        rows = min(chunk_rows, queries[3] - row0)
        across = np.empty((width, KEYS), like.dtype)  # keys, transposed
        s = np.empty((ROWS, KEYS), like.dtype)
        a = np.empty((rows, width), like.dtype)
        top, total = np.empty(rows, like.dtype), np.empty(rows, like.dtype)
        place0 = queries[0] + block * queries[2] + row0 * queries[4]  # of the first query
        out0 = out[0] + (g * out[1] + place0 * out[2]) * size
        for r in range(rows):
            top[r] = nothing if fresh else lse[g, place0 + r * queries[4]]
            empty = top[r] == nothing
            total[r] = zero if empty else one
            if empty:
                a[r] = zero
            else:
                scale_row(one, a.ctypes.data + r * width * size, out0 + r * queries[4] * out[2] * size, width)
        for number_of_run in range(max(draws, 1)):
            first, run, offset = _run(keys, drawn, draws, block, number_of_run)
            stride = keys[4]
            for c in range(0, run, KEYS):
                where = positions[0] + block * positions[2] + (offset + c) * positions[4]
                low, high = _seen(limits, where, positions[4], place0, place0 + (rows - 1) * queries[4])
                low, high = max(low, 0), min(high, run - c, KEYS)
                if low >= high:
                    continue
                kc = k[0] + (g * k[1] + (first + (c + low) * stride) * k[2]) * size
                vc = v[0] + (g * v[1] + (first + (c + low) * stride) * v[2]) * size
                transpose(like[0], high - low, width, kc, stride * k[2], across.ctypes.data, KEYS, size)
                across[:, : high - low] *= scale
                for r0 in range(0, rows, ROWS):
                    many = min(ROWS, rows - r0)
                    query = place0 + r0 * queries[4]
                    a0, a1 = _seen(limits, where, positions[4], query, query + (many - 1) * queries[4])
                    a0, a1 = max(a0 - low, 0) // lanes * lanes, min(a1, high) - low
                    count = a1 - a0
                    if count <= 0:
                        continue
                    padded = -(-count // lanes) * lanes
                    qt = q[0] + (g * q[1] + query * q[2]) * size
                    st, kt = s.ctypes.data, across.ctypes.data + a0 * size
                    multiply(like[0], many, padded, width, qt, queries[4] * q[2], 1, kt, KEYS, st, KEYS, size)
                    key = first + (c + low + a0) * stride
                    _mask_tile(s, many, count, limits, query, queries[4], where + (low + a0) * positions[4], positions[4],
                               bias, block, row0 + r0, offset + c + low + a0, exists[g % len(exists)], key, stride)  # fmt: skip
                    for i in range(many):
                        row, r = s[i], r0 + i
                        for j in range(count, padded):
                            row[j] = nothing
                        best = largest(like[0], st + i * KEYS * size, padded)
                        new = best if best > top[r] else top[r]
                        if new == nothing:  # no key, or nothing but NaN
                            for j in range(count):
                                total[r] += zero if row[j] == nothing else row[j]
                                row[j] = zero
                            continue
                        less = exp(top[r] - new) if total[r] != zero else zero
                        more = zero
                        for j in range(count):
                            weight = exp(row[j] - new)
                            row[j] = weight
                            more += weight
                        total[r] = total[r] * less + more
                        top[r] = new
                        if less != one:
                            here = a.ctypes.data + r * width * size
                            scale_row(less, here, here, width)
                        if dropout > 0:
                            _drop(row, count, seed, instances[g], query + i * queries[4], number + key, stride, dropout, up)
                    ac, vt = a.ctypes.data + r0 * width * size, vc + a0 * stride * v[2] * size
                    multiply_add(like[0], many, width, count, st, KEYS, 1, vt, stride * v[2], ac, width, size)
        for r in range(rows):
            share = one / total[r] if total[r] != zero else zero
            scale_row(share, out0 + r * queries[4] * out[2] * size, a.ctypes.data + r * width * size, width)
            lse[g, place0 + r * queries[4]] = top[r] + np.log(total[r]) if total[r] != zero else nothing


@kernel
def backward(
    like, size, width, work, g_out, q, k, v, out, lse, dq, dk, dv, queries, keys, positions, limits,
    drawn, draws, bias, exists, instances, seed, scale, dropout, up, number,
):
    """dq, dk and dv of a part += its share, given the merged (out, lse) of its queries.

    A row of `work` is a task: (instance, first block, behind the last, first row, behind the last, 0 or the number of
    its own dk and dv). No two tasks that run together add to the same keys or queries, so the sums have one order.
    """
    lanes = BYTES // size
    for task in numba.prange(len(work)):
        g, block0, block1, row0, row1, own = work[task]
        across, beyond = np.empty((width, KEYS), like.dtype), np.empty((width, KEYS), like.dtype)  # keys, values
        s, ds = np.empty((ROWS, KEYS), like.dtype), np.empty((ROWS, KEYS), like.dtype)
        delta = np.empty(TASK_ROWS, like.dtype)
        for block in range(block0, block1):
            for begin in range(row0, row1, TASK_ROWS):
                rows = min(TASK_ROWS, row1 - begin)
                place0 = queries[0] + block * queries[2] + begin * queries[4]
                down = queries[4]
                for r in range(rows):
                    at = place0 + r * down
                    delta[r] = dot(like[0], g_out[0] + (g * g_out[1] + at * g_out[2]) * size,
                                   out[0] + (g * out[1] + at * out[2]) * size, width)  # fmt: skip
                for number_of_run in range(max(draws, 1)):
                    first, run, offset = _run(keys, drawn, draws, block, number_of_run)
                    stride = keys[4]
                    for c in range(0, run, KEYS):
                        where = positions[0] + block * positions[2] + (offset + c) * positions[4]
                        low, high = _seen(limits, where, positions[4], place0, place0 + (rows - 1) * down)
                        low, high = max(low, 0), min(high, run - c, KEYS)
                        if low >= high:
                            continue
                        from_ = first + (c + low) * stride
                        kc, vc = k[0] + (g * k[1] + from_ * k[2]) * size, v[0] + (g * v[1] + from_ * v[2]) * size
                        transpose(like[0], high - low, width, kc, stride * k[2], across.ctypes.data, KEYS, size)
                        across[:, : high - low] *= scale
                        transpose(like[0], high - low, width, vc, stride * v[2], beyond.ctypes.data, KEYS, size)
                        if own >= 0:  # counted from the first key of the block
                            to = own * dk[1] + (offset + c + low) * dk[2]
                            apart = dk[2]
                        else:
                            to = g * dk[1] + from_ * dk[2]
                            apart = stride * dk[2]
                        dkc, dvc = dk[0] + to * size, dv[0] + to * size
                        for r0 in range(0, rows, ROWS):
                            many = min(ROWS, rows - r0)
                            query = place0 + r0 * down
                            a0, a1 = _seen(limits, where, positions[4], query, query + (many - 1) * down)
                            a0, a1 = max(a0 - low, 0) // lanes * lanes, min(a1, high) - low
                            count = a1 - a0
                            if count <= 0:
                                continue
                            padded = -(-count // lanes) * lanes
                            qt = q[0] + (g * q[1] + query * q[2]) * size
                            gt = g_out[0] + (g * g_out[1] + query * g_out[2]) * size
                            st, dst = s.ctypes.data, ds.ctypes.data
                            multiply(like[0], many, padded, width, qt, down * q[2], 1,
                                     across.ctypes.data + a0 * size, KEYS, st, KEYS, size)  # fmt: skip
                            multiply(like[0], many, padded, width, gt, down * g_out[2], 1,
                                     beyond.ctypes.data + a0 * size, KEYS, dst, KEYS, size)  # fmt: skip
                            key = first + (c + low + a0) * stride
                            _mask_tile(s, many, count, limits, query, down, where + (low + a0) * positions[4], positions[4],
                                       bias, block, begin + r0, offset + c + low + a0, exists[g % len(exists)], key, stride)  # fmt: skip
                            for i in range(many):
                                row, grad, at = s[i], ds[i], query + i * down
                                base, less = lse[g, at], delta[r0 + i]
                                for j in range(count):
                                    row[j] = exp(row[j] - base)
                                if dropout > 0:
                                    _drop(grad, count, seed, instances[g], at, number + key, stride, dropout, up)
                                for j in range(count):
                                    grad[j] = row[j] * (grad[j] - less) * scale
                                if dropout > 0:
                                    _drop(row, count, seed, instances[g], at, number + key, stride, dropout, up)
                            across_to = (a0 * apart) * size
                            multiply_add(like[0], many, width, count, dst, KEYS, 1, kc + a0 * stride * k[2] * size,
                                         stride * k[2], dq[0] + (g * dq[1] + query * dq[2]) * size, down * dq[2], size)  # fmt: skip
                            multiply_add(like[0], count, width, many, dst, 1, KEYS, qt, down * q[2],
                                         dkc + across_to, apart, size)  # fmt: skip
                            multiply_add(like[0], count, width, many, st, 1, KEYS, gt, down * g_out[2],
                                         dvc + across_to, apart, size)  # fmt: skip
