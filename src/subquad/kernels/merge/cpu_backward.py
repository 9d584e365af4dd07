"""The backward of a plan in tiles: dq, dk and dv part by part, given a row's merged (out, lse); see `cpu_tiles`."""

from __future__ import annotations

import numpy as np

from subquad.kernels.merge import cpu_tiles as tiles
from subquad.kernels.parallel import Workers, following, inline, pasted
from subquad.kernels.running_softmax import BAND, KEYS, ROWS, transpose_scaled
from subquad.kernels.vector_rows import add_row, byte_at, fill_row, gradient_row
from subquad.kernels.vectors import BYTES, dot, multiply, multiply_add, multiply_add_turned

UNKNOWN, GIVEN, WANTED = range(3)  # dout·out of the rows: found here; found before; found here and kept


@inline
def _score_gradients(s, ds, size, many, count, padded, base, less, scale, instance, query, down, number, step, random):
    """s: scores → weights; ds: dout·v → gradients of the scores before scaling."""
    seed, dropout, up = random[0], random[1], random[2]
    for i in range(many):
        row = i * KEYS * size
        if dropout > 0:
            tiles.drop(ds[i], count, seed, instance, query + i * down, number, step, dropout, up)
        gradient_row(base[i], less[i], scale, s.ctypes.data + row, ds.ctypes.data + row, padded)
        if dropout > 0:
            tiles.drop(s[i], count, seed, instance, query + i * down, number, step, dropout, up)


@pasted
def _backward_piece(
    like, size, width, part, piece, drawn, mask, source, b, h, own, q, dout, dq, place0, down, instance, scale, random,
    across, beyond, s, ds, base, delta,
):  # fmt: skip
    """dq, dk and dv of one part's share of some rows of a band, given the merged (out, lse)."""
    one, lanes = like.dtype.type(1), BYTES // size
    keys, positions = tiles.grid(part, tiles.PLACES), tiles.grid(part, tiles.POSITIONS)
    limits, draws = tiles.limits(part), part[tiles.DRAWS]
    stride, apart = keys[tiles.STRIDE], positions[tiles.STRIDE]
    block, rows = piece[tiles.PIECE_BLOCK], piece[tiles.PIECE_ROWS]
    (k, k_row), (v, v_row) = tiles.of_head(source, tiles.KEY, b, h, size)
    (dk, dk_row), (dv, dv_row) = tiles.of_head(source, tiles.KEY_GRADIENT, own, h, size)
    place = place0 + piece[tiles.PIECE_AT] * down
    where0, kt, vt = place + part[tiles.ORIGIN], across.ctypes.data, beyond.ctypes.data
    st, dst = s.ctypes.data, ds.ctypes.data
    exists = source[tiles.EXISTS] + b * source[tiles.EXISTS + 1] if source[tiles.EXISTS] else 0
    for run in range(max(draws, 1)):
        first, length, offset = tiles.run(keys, drawn, draws, block, run)
        for c in range(0, length, KEYS):
            where = positions[tiles.START] + block * positions[tiles.STEP] + (offset + c) * apart
            low, high = tiles.seen(limits, where, apart, where0, where0 + (rows - 1) * down)
            low, high = max(low, 0), min(high, length - c, KEYS)
            if low >= high:
                continue
            key0 = first + (c + low) * stride
            transpose_scaled(like, size, width, high - low, k + key0 * k_row * size, stride * k_row, kt, scale)
            transpose_scaled(like, size, width, high - low, v + key0 * v_row * size, stride * v_row, vt, one)
            height = tiles.height(limits, high - low, where + low * apart, apart, where0, where0 + (rows - 1) * down)
            for r0 in range(0, rows, height):
                many, query = min(height, rows - r0), where0 + r0 * down
                column, count = tiles.columns(limits, where, apart, query, down, many, low, high, lanes)
                if count <= 0:
                    continue
                key, padded, at = key0 + column * stride, -(-count // lanes) * lanes, low + column
                here = (place + r0 * down) * size
                qt, gt = q[0] + here * q[1], dout[0] + here * dout[1]
                tile, beside = (many, padded, width), column * size
                multiply(like[0], *tile, qt, down * q[1], kt + beside, KEYS, st, KEYS, size)
                multiply(like[0], *tile, gt, down * dout[1], vt + beside, KEYS, dst, KEYS, size)
                real = exists + key if exists else 0
                tiles.mask_tile(s, size, many, count, padded, limits, query, down, where + at * apart, apart,
                           tiles.mask_at(mask, block, piece[tiles.PIECE_ROW] + r0, offset + c + at, size),
                           real, stride)  # fmt: skip
                number, step = tiles.number(part, block, offset + c + at, key)
                r = piece[tiles.PIECE_AT] + r0
                _score_gradients(s, ds, size, many, count, padded, base[r:], delta[r:], scale, instance, query, down,
                                 number, step, random)  # fmt: skip
                # dq += ds·k, dk += dsᵀ·q, dv += wᵀ·dout
                right, dqt = (k + key * k_row * size, stride * k_row), dq[0] + here * dq[1]
                multiply_add(like[0], many, width, count, dst, KEYS, *right, dqt, down * dq[1], size)
                dkt, dvt, turned = dk + key * dk_row * size, dv + key * dv_row * size, (count, width, many)
                multiply_add_turned(like[0], *turned, dst, KEYS, qt, down * q[1], dkt, stride * dk_row, size)
                multiply_add_turned(like[0], *turned, st, KEYS, gt, down * dout[1], dvt, stride * dv_row, size)


@pasted
def _backward_selves(
    like, size, width, part, piece, source, b, h, own, q, dout, dq, place0, instance, scale, random, s, ds, base, delta
):  # fmt: skip
    """Rows that see one key each."""
    lanes, nothing, keys = BYTES // size, like.dtype.type(-np.inf), tiles.grid(part, tiles.PLACES)
    (k, k_row), (v, v_row) = tiles.of_head(source, tiles.KEY, b, h, size)
    (dk, dk_row), (dv, dv_row) = tiles.of_head(source, tiles.KEY_GRADIENT, own, h, size)
    exists = source[tiles.EXISTS] + b * source[tiles.EXISTS + 1] if source[tiles.EXISTS] else 0
    for i in range(piece[tiles.PIECE_ROWS]):
        r, block = piece[tiles.PIECE_AT] + i * piece[tiles.PIECE_ROW], piece[tiles.PIECE_BLOCK] + i
        key, here = keys[tiles.START] + block * keys[tiles.STEP], (place0 + r) * size
        if exists and byte_at(exists + key) == 0:
            continue
        fill_row(nothing, s.ctypes.data, lanes)
        qt, gt, kt = q[0] + here * q[1], dout[0] + here * dout[1], k + key * k_row * size
        s[0, 0] = dot(like[0], qt, kt, width) * scale
        ds[0, 0] = dot(like[0], gt, v + key * v_row * size, width)
        number, step = tiles.number(part, block, 0, key)
        _score_gradients(s, ds, size, 1, 1, lanes, base[r:], delta[r:], scale, instance,
                         place0 + r + part[tiles.ORIGIN], 1, number, step, random)  # fmt: skip
        add_row(ds[0, 0], dq[0] + here * dq[1], kt, width)
        add_row(ds[0, 0], dk + key * dk_row * size, qt, width)
        add_row(s[0, 0], dv + key * dv_row * size, gt, width)


@inline
def _prepare_rows(like, size, width, out, dout, dq, lse, known, deltas, place, down, rows, fresh, base, delta):
    """dout·out and the logsumexp of every row of a band; its dq is 0 when it is met for the first time."""
    nothing, zero = like.dtype.type(-np.inf), like.dtype.type(0)
    for r in range(rows):
        row = place + r * down
        at = row * size
        if fresh:
            fill_row(zero, dq[0] + at * dq[1], width)
        if known == GIVEN:
            delta[r] = deltas[row]
        else:
            delta[r] = dot(like[0], dout[0] + at * dout[1], out[0] + at * out[1], width)
        if known == WANTED:
            deltas[row] = delta[r]
        found = lse[row]
        base[r] = zero if found == nothing else found  # exp(-inf - 0) = 0: empty rows get no gradient


@inline
def _clear(like, size, width, sources, own, first, last):
    """dk and dv = 0 for the heads of a task."""
    for s in range(len(sources)):
        source = sources[s]
        for at in range(2):
            group = source[tiles.GROUP + at]
            for h in range(first // group * group, last, group):
                start, row = tiles.matrix(source, tiles.KEY_GRADIENT + 4 * at, group, own, h, size)
                for place in range(source[tiles.ENTRIES]):
                    fill_row(like.dtype.type(0), start + place * row * size, width)


@Workers
def backward(worker, workers, arguments):
    """dq = and dk, dv += the share of the tasks, (batch element, first head, behind the last, first band, behind the
    last, its dk and dv among those of all). Heads that share keys are in one task: no two tasks add to the same place.

    `deltas` (G, n) has dout·out: it is read, written or left alone, as `known` says. `clear`: dk and dv begin as 0;
    `follows`: dq does not, what it has is added to.
    """
    (like, size, width, heads, tasks, bands, pieces, parts, drawn, queue, masks, sources, whole,
     q, out, dout, dq, lse, deltas, known, follows, scale, random, clear) = arguments[0]  # fmt: skip
    scale, random = like.dtype.type(scale), tiles.typed(like, random)
    across, beyond = np.empty((width, KEYS), like.dtype), np.empty((width, KEYS), like.dtype)  # keys, values
    s, ds = np.empty((ROWS, KEYS), like.dtype), np.empty((ROWS, KEYS), like.dtype)
    base, delta = np.empty(BAND, like.dtype), np.empty(BAND, like.dtype)
    for _ in range(len(tasks)):
        task = following(queue.ctypes.data)
        if task >= len(tasks):
            break
        b, own = tasks[task, 0], tasks[task, 5]
        if clear:
            _clear(like, size, width, sources[0], own, tasks[task, 1], tasks[task, 2])
        for h in range(tasks[task, 1], tasks[task, 2]):
            g = b * heads + h
            q_, out_ = tiles.matrix(q, 0, 1, b, h, size), tiles.matrix(out, 0, 1, b, h, size)
            g_, dq_ = tiles.matrix(dout, 0, 1, b, h, size), tiles.matrix(dq, 0, 1, b, h, size)
            for at in range(tasks[task, 3], tasks[task, 4]):
                band = bands[at]
                place, down = band[tiles.PLACE], band[tiles.DOWN]
                fresh = band[tiles.FRESH] != 0 and not follows
                _prepare_rows(like, size, width, out_, g_, dq_, lse[g], known, deltas[g], place, down,
                              band[tiles.COUNT], fresh, base, delta)  # fmt: skip
                for number in range(band[tiles.FIRST], band[tiles.BEHIND]):
                    piece = pieces[number]
                    part = parts[piece[tiles.PIECE_PART]]
                    source = sources[whole[b, part[tiles.SOURCE]], part[tiles.SOURCE]]
                    if part[tiles.SELF]:
                        _backward_selves(like, size, width, part, piece, source, b, h, own, q_, g_, dq_, place,
                                         g, scale, random, s, ds, base, delta)  # fmt: skip
                    else:
                        _backward_piece(like, size, width, part, piece, drawn, masks[piece[tiles.PIECE_PART]], source,
                                        b, h, own, q_, g_, dq_, place, down, g, scale, random,
                                        across, beyond, s, ds, base, delta)  # fmt: skip
