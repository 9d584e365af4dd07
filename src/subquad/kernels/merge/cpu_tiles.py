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


START, BLOCKS, STEP, LENGTH, STRIDE = range(5)  # of a grid
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
        return keys[START] + block * keys[STEP], keys[LENGTH], 0
    size = keys[LENGTH] // draws
    return drawn[keys[START] + block * keys[STEP] + number] * size, size, number * size


@inline
def _address(matrix, instance, place, size):
    return matrix[0] + (instance * matrix[1] + place * matrix[2]) * size


@inline
def _columns(limits, first_key, key_stride, query, step, many, low, high, lanes):
    """The keys that a tile of `many` queries sees of [low, high): the first, on a boundary of vectors, and how many."""
    first, last = _seen(limits, first_key, key_stride, query, query + (many - 1) * step)
    first = max(first - low, 0) // lanes * lanes
    return first, min(last, high) - low - first


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
def _mask_tile(s, many, count, limits, query, step, first_key, key_stride, mask, row, column, exists, place, apart):
    """The scores (many × count) of a tile: -inf where a key is not seen, by the interval, by a mask, or not there."""
    if not _everything(limits, count, first_key, key_stride, query, query + (many - 1) * step):
        for i in range(many):
            _mask_row(s[i], count, limits, query + i * step, first_key, key_stride)
    if mask.shape[1] > 0:
        for i in range(many):
            for j in range(count):
                s[i, j] += mask[row + i, column + j]
    if exists.shape[0] > 0:
        nothing = s.dtype.type(-np.inf)
        for i in range(many):
            for j in range(count):
                s[i, j] = s[i, j] if exists[place + j * apart] else nothing


@inline
def _drop(row, count, seed, instance, query, number, step, dropout, up):
    """Dropout by a hash of (seed, instance, query, key)."""
    low, high = halves(stream(seed, instance, query))
    zero = row.dtype.type(0)
    for j in range(count):
        row[j] *= up if chance(low, high, number + j * step) >= dropout else zero


# ---- forward ------------------------------------------------------------------------------------------------


@inline
def _take_up(like, size, width, out, lse, g, place, step, fresh, sums, top, total):
    """The state of the rows, from what earlier parts have left in out and lse."""
    nothing, zero, one = like.dtype.type(-np.inf), like.dtype.type(0), like.dtype.type(1)
    for r in range(len(top)):
        top[r] = nothing if fresh else lse[g, place + r * step]
        total[r] = zero if top[r] == nothing else one
        if total[r] == zero:
            sums[r] = zero
        else:
            scale_row(one, sums.ctypes.data + r * width * size, _address(out, g, place + r * step, size), width)


@inline
def _lay_down(like, size, width, out, lse, g, place, step, sums, top, total):
    """The state of the rows into out and lse."""
    nothing, zero, one = like.dtype.type(-np.inf), like.dtype.type(0), like.dtype.type(1)
    for r in range(len(top)):
        share = one / total[r] if total[r] != zero else zero
        scale_row(share, _address(out, g, place + r * step, size), sums.ctypes.data + r * width * size, width)
        lse[g, place + r * step] = top[r] + np.log(total[r]) if total[r] != zero else nothing


@inline
def _exponentiate(like, size, row, address, count, padded, top, total):
    """Scores → exp(score - new top): the new (top, total), and by what the sums so far are multiplied."""
    nothing, zero, one = like.dtype.type(-np.inf), like.dtype.type(0), like.dtype.type(1)
    for j in range(count, padded):
        row[j] = nothing
    best = largest(like[0], address, padded)
    new = best if best > top else top
    if new == nothing:  # no key, or nothing but NaN
        for j in range(count):
            total += zero if row[j] == nothing else row[j]
            row[j] = zero
        return new, total, one
    less = exp(top - new) if total != zero else zero
    more = zero
    for j in range(count):
        weight = exp(row[j] - new)
        row[j] = weight
        more += weight
    return new, total * less + more, less


@kernel
def forward(
    like, size, width, tasks, chunks, chunk_rows, q, k, v, out, lse, queries, keys, positions, limits, fresh,
    drawn, draws, bias, exists, instances, seed, scale, dropout, up, number,
):  # fmt: skip
    """out and lse of the queries of a part, merged into what is there; tasks = instances × blocks × chunks of rows."""
    one, lanes, blocks = like.dtype.type(1), BYTES // size, queries[BLOCKS]
    down, stride, apart = queries[STRIDE], keys[STRIDE], positions[STRIDE]
    for task in numba.prange(tasks):
        g, block, chunk = task // (blocks * chunks), task // chunks % blocks, task % chunks
        row0 = chunk * chunk_rows
        rows = min(chunk_rows, queries[LENGTH] - row0)
        across, s = np.empty((width, KEYS), like.dtype), np.empty((ROWS, KEYS), like.dtype)  # keys transposed, scores
        sums = np.empty((rows, width), like.dtype)
        top, total = np.empty(rows, like.dtype), np.empty(rows, like.dtype)
        place0 = queries[START] + block * queries[STEP] + row0 * down  # of the first query
        mask, real = bias[block % len(bias)], exists[g % len(exists)]
        _take_up(like, size, width, out, lse, g, place0, down, fresh, sums, top, total)
        for run in range(max(draws, 1)):
            first, length, offset = _run(keys, drawn, draws, block, run)
            for c in range(0, length, KEYS):
                where = positions[START] + block * positions[STEP] + (offset + c) * apart
                low, high = _seen(limits, where, apart, place0, place0 + (rows - 1) * down)
                low, high = max(low, 0), min(high, length - c, KEYS)
                if low >= high:
                    continue
                key0 = first + (c + low) * stride
                k0, kt, st = _address(k, g, key0, size), across.ctypes.data, s.ctypes.data
                transpose(like[0], high - low, width, k0, stride * k[2], kt, KEYS, size)
                across[:, : high - low] *= scale
                for r0 in range(0, rows, ROWS):
                    many, query = min(ROWS, rows - r0), place0 + r0 * down
                    column, count = _columns(limits, where, apart, query, down, many, low, high, lanes)
                    if count <= 0:
                        continue
                    key, padded = key0 + column * stride, -(-count // lanes) * lanes
                    rows_q = (_address(q, g, query, size), down * q[2], 1)
                    multiply(like[0], many, padded, width, *rows_q, kt + column * size, KEYS, st, KEYS, size)
                    at = low + column
                    _mask_tile(s, many, count, limits, query, down, where + at * apart, apart,
                               mask, row0 + r0, offset + c + at, real, key, stride)  # fmt: skip
                    for i in range(many):
                        r = r0 + i
                        top[r], total[r], less = _exponentiate(
                            like, size, s[i], st + i * KEYS * size, count, padded, top[r], total[r]
                        )
                        if less != one:
                            here = sums.ctypes.data + r * width * size
                            scale_row(less, here, here, width)
                        if dropout > 0:
                            where_q = query + i * down
                            _drop(s[i], count, seed, instances[g], where_q, number + key, stride, dropout, up)
                    values = (_address(v, g, key, size), stride * v[2])
                    into = sums.ctypes.data + r0 * width * size
                    multiply_add(like[0], many, width, count, st, KEYS, 1, *values, into, width, size)
        _lay_down(like, size, width, out, lse, g, place0, down, sums, top, total)


# ---- backward -----------------------------------------------------------------------------------------------


@inline
def _score_gradients(row, grad, count, base, less, scale, seed, instance, query, number, step, dropout, up):
    """row: scores → weights; grad: dout·v → gradients of the scores before scaling."""
    for j in range(count):
        row[j] = exp(row[j] - base)
    if dropout > 0:
        _drop(grad, count, seed, instance, query, number, step, dropout, up)
    for j in range(count):
        grad[j] = row[j] * (grad[j] - less) * scale
    if dropout > 0:
        _drop(row, count, seed, instance, query, number, step, dropout, up)


@kernel
def backward(
    like, size, width, work, dout, q, k, v, out, lse, dq, dk, dv, queries, keys, positions, limits,
    drawn, draws, bias, exists, instances, seed, scale, dropout, up, number,
):  # fmt: skip
    """dq, dk and dv of a part += its share, given the merged (out, lse) of its queries.

    A row of `work` is a task: (instance, first block, behind the last, first row, behind the last, -1 or the number of
    its own dk and dv). No two tasks that run together add to the same keys or queries, so the sums have one order.
    """
    lanes = BYTES // size
    down, stride, apart = queries[STRIDE], keys[STRIDE], positions[STRIDE]
    for task in numba.prange(len(work)):
        g, block0, block1, row0, row1, own = work[task]
        across, beyond = np.empty((width, KEYS), like.dtype), np.empty((width, KEYS), like.dtype)  # keys, values
        s, ds = np.empty((ROWS, KEYS), like.dtype), np.empty((ROWS, KEYS), like.dtype)
        kt, vt, st, dst = across.ctypes.data, beyond.ctypes.data, s.ctypes.data, ds.ctypes.data
        delta = np.empty(TASK_ROWS, like.dtype)  # dout·out of a row
        real = exists[g % len(exists)]
        for block in range(block0, block1):
            mask = bias[block % len(bias)]
            for begin in range(row0, row1, TASK_ROWS):
                rows = min(TASK_ROWS, row1 - begin)
                place0 = queries[START] + block * queries[STEP] + begin * down
                for r in range(rows):
                    at = place0 + r * down
                    delta[r] = dot(like[0], _address(dout, g, at, size), _address(out, g, at, size), width)
                for run in range(max(draws, 1)):
                    first, length, offset = _run(keys, drawn, draws, block, run)
                    for c in range(0, length, KEYS):
                        where = positions[START] + block * positions[STEP] + (offset + c) * apart
                        low, high = _seen(limits, where, apart, place0, place0 + (rows - 1) * down)
                        low, high = max(low, 0), min(high, length - c, KEYS)
                        if low >= high:
                            continue
                        key0 = first + (c + low) * stride
                        k0, v0 = _address(k, g, key0, size), _address(v, g, key0, size)
                        transpose(like[0], high - low, width, k0, stride * k[2], kt, KEYS, size)
                        transpose(like[0], high - low, width, v0, stride * v[2], vt, KEYS, size)
                        across[:, : high - low] *= scale
                        for r0 in range(0, rows, ROWS):
                            many, query = min(ROWS, rows - r0), place0 + r0 * down
                            column, count = _columns(limits, where, apart, query, down, many, low, high, lanes)
                            if count <= 0:
                                continue
                            key, padded, at = key0 + column * stride, -(-count // lanes) * lanes, low + column
                            qt, gt = _address(q, g, query, size), _address(dout, g, query, size)
                            tile, beside = (many, padded, width), column * size
                            multiply(like[0], *tile, qt, down * q[2], 1, kt + beside, KEYS, st, KEYS, size)
                            multiply(like[0], *tile, gt, down * dout[2], 1, vt + beside, KEYS, dst, KEYS, size)
                            _mask_tile(s, many, count, limits, query, down, where + at * apart, apart,
                                       mask, begin + r0, offset + c + at, real, key, stride)  # fmt: skip
                            for i in range(many):
                                place = query + i * down
                                _score_gradients(s[i], ds[i], count, lse[g, place], delta[r0 + i], scale, seed,
                                                 instances[g], place, number + key, stride, dropout, up)  # fmt: skip
                            # dq += ds·k, dk += dsᵀ·q, dv += wᵀ·dout
                            right = (_address(k, g, key, size), stride * k[2])
                            dqt = _address(dq, g, query, size)
                            multiply_add(like[0], many, width, count, dst, KEYS, 1, *right, dqt, down * dq[2], size)
                            instance, into, far = g, key, stride
                            if own >= 0:  # sums of its own, counted from the first key of the block
                                instance, into, far = own, offset + c + at, 1
                            dkt, dvt = _address(dk, instance, into, size), _address(dv, instance, into, size)
                            turned = (count, width, many)
                            multiply_add(like[0], *turned, dst, 1, KEYS, qt, down * q[2], dkt, far * dk[2], size)
                            multiply_add(like[0], *turned, st, 1, KEYS, gt, down * dout[2], dvt, far * dv[2], size)
