"""The forward of a plan in tiles: bands of rows, each through all parts that it has a share in; see `cpu_tiles`."""

from __future__ import annotations

import numpy as np

from subquad.kernels.merge import cpu_tiles as tiles
from subquad.kernels.parallel import Workers, following, keep, pasted
from subquad.kernels.running_softmax import BAND, KEYS, ROWS, lay_row, softmax_tile, take_row, transpose_scaled
from subquad.kernels.vector_rows import add_row, byte_at, fill_row
from subquad.kernels.vectors import BYTES, dot, multiply, multiply_add


@pasted
def _forward_piece(
    like, size, width, part, piece, drawn, mask, source, b, h, q, place0, down, instance, scale, random,
    across, s, sums, top, total,
):  # fmt: skip
    """What one part adds to the state of some rows of a band."""
    seed, dropout, up, lanes = random[0], random[1], random[2], BYTES // size
    keys, positions = tiles.grid(part, tiles.PLACES), tiles.grid(part, tiles.POSITIONS)
    limits, draws = tiles.limits(part), part[tiles.DRAWS]
    stride, apart = keys[tiles.STRIDE], positions[tiles.STRIDE]
    block, rows = piece[tiles.PIECE_BLOCK], piece[tiles.PIECE_ROWS]
    (k, k_row), (v, v_row) = tiles.of_head(source, tiles.KEY, b, h, size)
    place = place0 + piece[tiles.PIECE_AT] * down
    where0, kt, st = place + part[tiles.ORIGIN], across.ctypes.data, s.ctypes.data
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
            height = tiles.height(limits, high - low, where + low * apart, apart, where0, where0 + (rows - 1) * down)
            for r0 in range(0, rows, height):
                many, query = min(height, rows - r0), where0 + r0 * down
                column, count = tiles.columns(limits, where, apart, query, down, many, low, high, lanes)
                if count <= 0:
                    continue
                key, padded, at = key0 + column * stride, -(-count // lanes) * lanes, low + column
                rows_q = (q[0] + (place + r0 * down) * q[1] * size, down * q[1])
                multiply(like[0], many, padded, width, *rows_q, kt + column * size, KEYS, st, KEYS, size)
                shape, real = (many, count, padded), exists + key if exists else 0
                tiles.mask_tile(s, size, *shape, limits, query, down, where + at * apart, apart,
                           tiles.mask_at(mask, block, piece[tiles.PIECE_ROW] + r0, offset + c + at, size),
                           real, stride)  # fmt: skip
                r = piece[tiles.PIECE_AT] + r0
                softmax_tile(like, size, width, s, *shape, top, total, sums, r)
                if dropout > 0:
                    number, step = tiles.number(part, block, offset + c + at, key)
                    for i in range(many):
                        tiles.drop(s[i], count, seed, instance, query + i * down, number, step, dropout, up)
                values, into = (v + key * v_row * size, stride * v_row), sums + r * width * size
                multiply_add(like[0], many, width, count, st, KEYS, *values, into, width, size)


@pasted
def _forward_selves(
    like, size, width, part, piece, source, b, h, q, place0, instance, scale, random, s, sums, top, total
):  # fmt: skip
    """Rows that see one key each: no products of matrices."""
    seed, dropout, up, lanes, nothing = random[0], random[1], random[2], BYTES // size, like.dtype.type(-np.inf)
    keys, st = tiles.grid(part, tiles.PLACES), s.ctypes.data
    (k, k_row), (v, v_row) = tiles.of_head(source, tiles.KEY, b, h, size)
    exists = source[tiles.EXISTS] + b * source[tiles.EXISTS + 1] if source[tiles.EXISTS] else 0
    for i in range(piece[tiles.PIECE_ROWS]):
        r, block = piece[tiles.PIECE_AT] + i * piece[tiles.PIECE_ROW], piece[tiles.PIECE_BLOCK] + i
        key = keys[tiles.START] + block * keys[tiles.STEP]
        if exists and byte_at(exists + key) == 0:
            continue
        fill_row(nothing, st, lanes)
        s[0, 0] = dot(like[0], q[0] + (place0 + r) * q[1] * size, k + key * k_row * size, width) * scale
        softmax_tile(like, size, width, s, 1, 1, lanes, top, total, sums, r)
        if dropout > 0:
            number, step = tiles.number(part, block, 0, key)
            tiles.drop(s[0], 1, seed, instance, place0 + r + part[tiles.ORIGIN], number, step, dropout, up)
        add_row(s[0, 0], sums + r * width * size, v + key * v_row * size, width)


@Workers
def forward(worker, workers, arguments):
    """out and lse of the bands in `tasks`, (instance, band); whole[b, source]: all keys exist.

    Where `follows` is set the rows do not begin with no key at all but with the state (before, before_lse).
    """
    (like, size, width, heads, tasks, bands, pieces, parts, drawn, queue, masks, sources, whole, q, out, lse,
     before, before_lse, follows, scale, random) = arguments[0]  # fmt: skip
    scale, random = like.dtype.type(scale), tiles.typed(like, random)
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
        q_, out_ = tiles.matrix(q, 0, 1, b, h, size), tiles.matrix(out, 0, 1, b, h, size)
        place, down, rows, begins = band[tiles.PLACE], band[tiles.DOWN], band[tiles.COUNT], band[tiles.FRESH] != 0
        from_ = tiles.matrix(before, 0, 1, b, h, size) if begins else out_
        known = before_lse[g] if begins else lse[g]
        for r in range(rows):
            at = place + r * down
            here = from_[0] + at * from_[1] * size
            take_row(like, size, width, here, known, at, begins and not follows, sums, r, top, total)
        for number in range(band[tiles.FIRST], band[tiles.BEHIND]):
            piece = pieces[number]
            part = parts[piece[tiles.PIECE_PART]]
            source = sources[whole[b, part[tiles.SOURCE]], part[tiles.SOURCE]]
            if part[tiles.SELF]:
                _forward_selves(like, size, width, part, piece, source, b, h, q_, place, g, scale, random,
                                s, sums, top, total)  # fmt: skip
            else:
                _forward_piece(like, size, width, part, piece, drawn, masks[piece[tiles.PIECE_PART]], source, b, h, q_,
                               place, down, g, scale, random, across, s, sums, top, total)  # fmt: skip
        for r in range(rows):
            at = place + r * down
            lay_row(like, size, width, out_[0] + at * out_[1] * size, lse[g], at, sums, r, top, total)
    keep(state)
