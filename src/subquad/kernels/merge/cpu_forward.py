"""The forward of a plan in tiles: bands of rows, each through all parts that it has a share in; see `cpu_tiles`."""

from __future__ import annotations

import numpy as np

from subquad.kernels.merge.cpu_tiles import (
    BAND,
    BEHIND,
    COUNT,
    DOWN,
    DRAWS,
    EXISTS,
    FIRST,
    FRESH,
    KEY,
    KEYS,
    ORIGIN,
    PIECE_AT,
    PIECE_BLOCK,
    PIECE_PART,
    PIECE_ROW,
    PIECE_ROWS,
    PLACE,
    PLACES,
    POSITIONS,
    ROWS,
    SELF,
    SOURCE,
    START,
    STEP,
    STRIDE,
    _columns,
    _drop,
    _grid,
    _height,
    _lay_row,
    _limits,
    _mask_at,
    _mask_tile,
    _matrix,
    _number,
    _of_head,
    _run,
    _seen,
    _softmax_tile,
    _take_row,
    _turned,
    _typed,
)
from subquad.kernels.parallel import pasted
from subquad.kernels.vector_rows import add_row, byte_at, fill_row
from subquad.kernels.vectors import BYTES, dot, multiply, multiply_add
from subquad.kernels.workers import Workers, following, keep


@pasted
def _forward_piece(
    like, size, width, part, piece, drawn, mask, source, b, h, q, place0, down, instance, scale, random,
    across, s, sums, top, total,
):  # fmt: skip
    """What one part adds to the state of some rows of a band."""
    seed, dropout, up, lanes = random[0], random[1], random[2], BYTES // size
    keys, positions, limits, draws = _grid(part, PLACES), _grid(part, POSITIONS), _limits(part), part[DRAWS]
    stride, apart, block, rows = keys[STRIDE], positions[STRIDE], piece[PIECE_BLOCK], piece[PIECE_ROWS]
    (k, k_row), (v, v_row) = _of_head(source, KEY, b, h, size)
    place = place0 + piece[PIECE_AT] * down
    where0, kt, st = place + part[ORIGIN], across.ctypes.data, s.ctypes.data
    exists = source[EXISTS] + b * source[EXISTS + 1] if source[EXISTS] else 0
    for run in range(max(draws, 1)):
        first, length, offset = _run(keys, drawn, draws, block, run)
        for c in range(0, length, KEYS):
            where = positions[START] + block * positions[STEP] + (offset + c) * apart
            low, high = _seen(limits, where, apart, where0, where0 + (rows - 1) * down)
            low, high = max(low, 0), min(high, length - c, KEYS)
            if low >= high:
                continue
            key0 = first + (c + low) * stride
            _turned(like, size, width, high - low, k + key0 * k_row * size, stride * k_row, kt, scale)
            height = _height(limits, high - low, where + low * apart, apart, where0, where0 + (rows - 1) * down)
            for r0 in range(0, rows, height):
                many, query = min(height, rows - r0), where0 + r0 * down
                column, count = _columns(limits, where, apart, query, down, many, low, high, lanes)
                if count <= 0:
                    continue
                key, padded, at = key0 + column * stride, -(-count // lanes) * lanes, low + column
                rows_q = (q[0] + (place + r0 * down) * q[1] * size, down * q[1])
                multiply(like[0], many, padded, width, *rows_q, kt + column * size, KEYS, st, KEYS, size)
                shape, real = (many, count, padded), exists + key if exists else 0
                _mask_tile(s, size, *shape, limits, query, down, where + at * apart, apart,
                           _mask_at(mask, block, piece[PIECE_ROW] + r0, offset + c + at, size),
                           real, stride)  # fmt: skip
                r = piece[PIECE_AT] + r0
                _softmax_tile(like, size, width, s, *shape, top, total, sums, r)
                if dropout > 0:
                    number, step = _number(part, block, offset + c + at, key)
                    for i in range(many):
                        _drop(s[i], count, seed, instance, query + i * down, number, step, dropout, up)
                values, into = (v + key * v_row * size, stride * v_row), sums + r * width * size
                multiply_add(like[0], many, width, count, st, KEYS, *values, into, width, size)


@pasted
def _forward_selves(
    like, size, width, part, piece, source, b, h, q, place0, instance, scale, random, s, sums, top, total
):  # fmt: skip
    """Rows that see one key each: no products of matrices."""
    seed, dropout, up, lanes, nothing = random[0], random[1], random[2], BYTES // size, like.dtype.type(-np.inf)
    keys, st = _grid(part, PLACES), s.ctypes.data
    (k, k_row), (v, v_row) = _of_head(source, KEY, b, h, size)
    exists = source[EXISTS] + b * source[EXISTS + 1] if source[EXISTS] else 0
    for i in range(piece[PIECE_ROWS]):
        r, block = piece[PIECE_AT] + i * piece[PIECE_ROW], piece[PIECE_BLOCK] + i
        key = keys[START] + block * keys[STEP]
        if exists and byte_at(exists + key) == 0:
            continue
        fill_row(nothing, st, lanes)
        s[0, 0] = dot(like[0], q[0] + (place0 + r) * q[1] * size, k + key * k_row * size, width) * scale
        _softmax_tile(like, size, width, s, 1, 1, lanes, top, total, sums, r)
        if dropout > 0:
            number, step = _number(part, block, 0, key)
            _drop(s[0], 1, seed, instance, place0 + r + part[ORIGIN], number, step, dropout, up)
        add_row(s[0, 0], sums + r * width * size, v + key * v_row * size, width)


@Workers
def forward(worker, workers, arguments):
    """out and lse of the bands in `tasks`, (instance, band); whole[b, source]: all keys exist.

    Where `follows` is set the rows do not begin with no key at all but with the state (before, before_lse).
    """
    (like, size, width, heads, tasks, bands, pieces, parts, drawn, queue, masks, sources, whole, q, out, lse,
     before, before_lse, follows, scale, random) = arguments[0]  # fmt: skip
    scale, random = like.dtype.type(scale), _typed(like, random)
    across, s = np.empty((width, KEYS), like.dtype), np.empty((ROWS, KEYS), like.dtype)  # keys transposed, scores
    state = np.empty((BAND, width), like.dtype)
    top, total = np.empty(BAND, like.dtype), np.empty(BAND, like.dtype)
    sums = state.ctypes.data
    for _ in range(len(tasks)):
        task = following(queue.ctypes.data)
        if task >= len(tasks):
            break
        g, band = tasks[task, 0], bands[tasks[task, 1]]
        b, h = g // heads, g % heads
        q_, out_ = _matrix(q, 0, 1, b, h, size), _matrix(out, 0, 1, b, h, size)
        place, down, rows, begins = band[PLACE], band[DOWN], band[COUNT], band[FRESH] != 0
        from_ = _matrix(before, 0, 1, b, h, size) if begins else out_
        known = before_lse[g] if begins else lse[g]
        for r in range(rows):
            at = place + r * down
            here = from_[0] + at * from_[1] * size
            _take_row(like, size, width, here, known, at, begins and not follows, sums, r, top, total)
        for number in range(band[FIRST], band[BEHIND]):
            piece = pieces[number]
            part = parts[piece[PIECE_PART]]
            source = sources[whole[b, part[SOURCE]], part[SOURCE]]
            if part[SELF]:
                _forward_selves(like, size, width, part, piece, source, b, h, q_, place, g, scale, random,
                                s, sums, top, total)  # fmt: skip
            else:
                _forward_piece(like, size, width, part, piece, drawn, masks[piece[PIECE_PART]], source, b, h, q_,
                               place, down, g, scale, random, across, s, sums, top, total)  # fmt: skip
        for r in range(rows):
            at = place + r * down
            _lay_row(like, size, width, out_[0] + at * out_[1] * size, lse[g], at, sums, r, top, total)
    keep(state)
