"""The parts of a plan in tiles of scores that stay in the first-level cache, with one running softmax per row.

A row's state is (largest score m, total l of exp(score - m), sum a of exp(score - m)·value). A band of rows goes
through all the parts that it has a share in, one after the other, before its state becomes (out, lse): nothing of the
size of the scores is ever written, and no part reads what another has written. Rules of positions say which keys a tile
can see at all: those it cannot are not multiplied. `cpu_program` makes bands and pieces of a plan.

Everything is given by addresses and strides in entries. A matrix is (address, stride of batch elements, of heads, of
places), a row of `sources` is the keys, the values, and which exist; a grid is (start, blocks, step, length, stride).
"""

from __future__ import annotations

import numpy as np

from subquad.core.hashing import chance, halves, stream
from subquad.kernels.parallel import exp as exp_one
from subquad.kernels.parallel import inline, pasted
from subquad.kernels.vector_rows import add_row, byte_at, exp_row, fill_row, gradient_row
from subquad.kernels.vectors import (
    BYTES,
    dot,
    largest,
    multiply,
    multiply_add,
    multiply_add_turned,
    scale_row,
    transpose,
)
from subquad.kernels.workers import Workers, following, keep

ROWS = 24  # of a tile: four times the rows of a product in registers
KEYS = 128  # of a tile
BAND = 192  # rows of a band at most: they share the transposed keys


START, BLOCKS, STEP, LENGTH, STRIDE = range(5)  # of a grid
LO, HI, XLO, XHI, SPAN, END = range(6)  # of a part's limits
# where a part has what: its grids, its limits, and single numbers
QUERIES, PLACES, POSITIONS, LIMITS, DRAWS, SOURCE, ORIGIN, NUMBERS, SELF, FIELDS = 0, 5, 10, 15, 21, 22, 23, 24, 27, 28
KEY, KEY_GRADIENT, EXISTS, GROUP, ENTRIES = 0, 8, 16, 18, 20  # where a source has what; values stand behind keys
PIECE_PART, PIECE_BLOCK, PIECE_ROW, PIECE_ROWS, PIECE_AT = range(5)
FIRST, BEHIND, PLACE, DOWN, COUNT, FRESH = range(6)  # of a band


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
def _grid(part, at):
    return part[at], part[at + 1], part[at + 2], part[at + 3], part[at + 4]


@inline
def _limits(part):
    at = LIMITS
    return part[at], part[at + 1], part[at + 2], part[at + 3], part[at + 4], part[at + 5]


@inline
def _matrix(source, at, group, b, h, size):
    """The address of a head's first place, and the stride of places."""
    return source[at] + (b * source[at + 1] + h // group * source[at + 2]) * size, source[at + 3]


@inline
def _of_head(source, at, b, h, size):
    """Keys and values, or their gradients, of a head."""
    keys = _matrix(source, at, source[GROUP], b, h, size)
    return keys, _matrix(source, at + 4, source[GROUP + 1], b, h, size)


@inline
def _run(keys, drawn, draws, block, number):
    """Keys that stand in a row: (place of the first, how many, which key of the block the first is)."""
    if draws == 0:
        return keys[START] + block * keys[STEP], keys[LENGTH], 0
    size = keys[LENGTH] // draws
    return drawn[keys[START] + block * keys[STEP] + number] * size, size, number * size


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
def _mask_tile(s, size, many, count, padded, limits, query, step, first_key, key_stride, mask, exists, apart):
    """The scores (many × count) of a tile: -inf where a key is not seen, by the interval, by a mask, or not there.

    mask: address of its first entry (0 = none) and stride of rows; exists: address of its first byte (0 = all exist).
    """
    nothing = s.dtype.type(-np.inf)
    for i in range(many):
        for j in range(count, padded):
            s[i, j] = nothing
    if not _everything(limits, count, first_key, key_stride, query, query + (many - 1) * step):
        for i in range(many):
            _mask_row(s[i], count, limits, query + i * step, first_key, key_stride)
    if mask[0]:  # 0 or -inf, also behind its last entry
        for i in range(many):
            add_row(s.dtype.type(1), s.ctypes.data + i * KEYS * size, mask[0] + i * mask[1] * size, padded)
    if exists:
        for j in range(count):
            if byte_at(exists + j * apart) == 0:
                for i in range(many):
                    s[i, j] = nothing


@inline
def _drop(row, count, seed, instance, query, number, step, dropout, up):
    """Dropout by a hash of (seed, instance, query, key)."""
    low, high = halves(stream(seed, instance, query))
    zero = row.dtype.type(0)
    for j in range(count):
        row[j] *= up if chance(low, high, number + j * step) >= dropout else zero


@inline
def _turned(like, size, width, count, a, row, into, scale):
    """scale · aᵀ: keys or values (count × width) as columns."""
    transpose(like[0], count, width, a, row, into, KEYS, size)
    lanes = BYTES // size
    if scale != like.dtype.type(1):
        for t in range(width):
            at = into + t * KEYS * size
            scale_row(scale, at, at, -(-count // lanes) * lanes)


@inline
def _typed(like, random):
    """(seed, dropout, factor of what is kept) in the types that they are compared and multiplied with."""
    return random[0], np.float32(random[1]), like.dtype.type(random[2])


# ---- forward ------------------------------------------------------------------------------------------------


@inline
def _take_row(like, size, width, out, lse, place, fresh, sums, r, top, total):
    """The state of row r, from what earlier parts have left in out and lse."""
    nothing, zero, one = like.dtype.type(-np.inf), like.dtype.type(0), like.dtype.type(1)
    top[r] = nothing if fresh else lse[place]
    total[r] = zero if top[r] == nothing else one
    if total[r] == zero:
        fill_row(zero, sums + r * width * size, width)
    else:
        scale_row(one, sums + r * width * size, out, width)


@inline
def _lay_row(like, size, width, out, lse, place, sums, r, top, total):
    """The state of row r into out and lse."""
    nothing, zero, one = like.dtype.type(-np.inf), like.dtype.type(0), like.dtype.type(1)
    scale_row(one / total[r] if total[r] != zero else zero, out, sums + r * width * size, width)
    lse[place] = top[r] + np.log(total[r]) if total[r] != zero else nothing


@inline
def _exponentiate(like, row, address, count, padded, top, total):
    """Scores → exp(score - new top): the new (top, total), and by what the sums so far are multiplied."""
    nothing, zero, one = like.dtype.type(-np.inf), like.dtype.type(0), like.dtype.type(1)
    best = largest(like[0], address, padded)
    new = best if best > top else top
    if new == nothing:  # no key, or nothing but NaN
        for j in range(count):
            total += zero if row[j] == nothing else row[j]
            row[j] = zero
        return new, total, one
    less = one
    if new != top:
        less = exp_one(top - new) if total != zero else zero
    more = exp_row(new, address, padded)
    return new, total * less + more, less


@inline
def _softmax_tile(like, size, width, s, many, count, padded, top, total, sums, r0):
    """Scores of a tile → weights; the rows' sums so far follow their largest scores."""
    one = like.dtype.type(1)
    for i in range(many):
        r = r0 + i
        top[r], total[r], less = _exponentiate(
            like, s[i], s.ctypes.data + i * KEYS * size, count, padded, top[r], total[r]
        )
        if less != one:
            here = sums + r * width * size
            scale_row(less, here, here, width)


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
            for r0 in range(0, rows, ROWS):
                many, query = min(ROWS, rows - r0), where0 + r0 * down
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


@inline
def _mask_at(mask, block, row, column, size):
    """The entry of a part's mask, (address, blocks, stride of blocks, stride of rows), and the stride of rows."""
    if mask[0] == 0:
        return 0, 0
    return mask[0] + (block % mask[1] * mask[2] + row * mask[3] + column) * size, mask[3]


@inline
def _number(part, block, column, key):
    """What dropout counts a key by, and the step to the next."""
    if part[NUMBERS + 2] == 0:  # where it is stored
        return part[NUMBERS] + key, part[PLACES + STRIDE]
    return part[NUMBERS] + block * part[NUMBERS + 1] + column * part[NUMBERS + 2], part[NUMBERS + 2]


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
    """out and lse of the bands in `tasks`, (instance, band); whole[b, source]: all keys exist."""
    (like, size, width, heads, tasks, bands, pieces, parts, drawn, queue, masks, sources, whole, q, out, lse,
     scale, random) = arguments[0]  # fmt: skip
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
        place, down, rows = band[PLACE], band[DOWN], band[COUNT]
        for r in range(rows):
            at = place + r * down
            to = out_[0] + at * out_[1] * size
            _take_row(like, size, width, to, lse[g], at, band[FRESH], sums, r, top, total)
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


# ---- backward -----------------------------------------------------------------------------------------------


@inline
def _score_gradients(s, ds, size, many, count, padded, base, less, scale, instance, query, down, number, step, random):
    """s: scores → weights; ds: dout·v → gradients of the scores before scaling."""
    seed, dropout, up = random[0], random[1], random[2]
    for i in range(many):
        row = i * KEYS * size
        if dropout > 0:
            _drop(ds[i], count, seed, instance, query + i * down, number, step, dropout, up)
        gradient_row(base[i], less[i], scale, s.ctypes.data + row, ds.ctypes.data + row, padded)
        if dropout > 0:
            _drop(s[i], count, seed, instance, query + i * down, number, step, dropout, up)


@pasted
def _backward_piece(
    like, size, width, part, piece, drawn, mask, source, b, h, own, q, dout, dq, place0, down, instance, scale, random,
    across, beyond, s, ds, base, delta,
):  # fmt: skip
    """dq, dk and dv of one part's share of some rows of a band, given the merged (out, lse)."""
    one, lanes = like.dtype.type(1), BYTES // size
    keys, positions, limits, draws = _grid(part, PLACES), _grid(part, POSITIONS), _limits(part), part[DRAWS]
    stride, apart, block, rows = keys[STRIDE], positions[STRIDE], piece[PIECE_BLOCK], piece[PIECE_ROWS]
    (k, k_row), (v, v_row) = _of_head(source, KEY, b, h, size)
    (dk, dk_row), (dv, dv_row) = _of_head(source, KEY_GRADIENT, own, h, size)
    place = place0 + piece[PIECE_AT] * down
    where0, kt, vt, st, dst = (
        place + part[ORIGIN],
        across.ctypes.data,
        beyond.ctypes.data,
        s.ctypes.data,
        ds.ctypes.data,
    )
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
            _turned(like, size, width, high - low, v + key0 * v_row * size, stride * v_row, vt, one)
            for r0 in range(0, rows, ROWS):
                many, query = min(ROWS, rows - r0), where0 + r0 * down
                column, count = _columns(limits, where, apart, query, down, many, low, high, lanes)
                if count <= 0:
                    continue
                key, padded, at = key0 + column * stride, -(-count // lanes) * lanes, low + column
                here = (place + r0 * down) * size
                qt, gt = q[0] + here * q[1], dout[0] + here * dout[1]
                tile, beside = (many, padded, width), column * size
                multiply(like[0], *tile, qt, down * q[1], kt + beside, KEYS, st, KEYS, size)
                multiply(like[0], *tile, gt, down * dout[1], vt + beside, KEYS, dst, KEYS, size)
                real = exists + key if exists else 0
                _mask_tile(s, size, many, count, padded, limits, query, down, where + at * apart, apart,
                           _mask_at(mask, block, piece[PIECE_ROW] + r0, offset + c + at, size),
                           real, stride)  # fmt: skip
                number, step = _number(part, block, offset + c + at, key)
                r = piece[PIECE_AT] + r0
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
    lanes, nothing, keys = BYTES // size, like.dtype.type(-np.inf), _grid(part, PLACES)
    (k, k_row), (v, v_row) = _of_head(source, KEY, b, h, size)
    (dk, dk_row), (dv, dv_row) = _of_head(source, KEY_GRADIENT, own, h, size)
    exists = source[EXISTS] + b * source[EXISTS + 1] if source[EXISTS] else 0
    for i in range(piece[PIECE_ROWS]):
        r, block = piece[PIECE_AT] + i * piece[PIECE_ROW], piece[PIECE_BLOCK] + i
        key, here = keys[START] + block * keys[STEP], (place0 + r) * size
        if exists and byte_at(exists + key) == 0:
            continue
        fill_row(nothing, s.ctypes.data, lanes)
        qt, gt, kt = q[0] + here * q[1], dout[0] + here * dout[1], k + key * k_row * size
        s[0, 0] = dot(like[0], qt, kt, width) * scale
        ds[0, 0] = dot(like[0], gt, v + key * v_row * size, width)
        number, step = _number(part, block, 0, key)
        _score_gradients(s, ds, size, 1, 1, lanes, base[r:], delta[r:], scale, instance,
                         place0 + r + part[ORIGIN], 1, number, step, random)  # fmt: skip
        add_row(ds[0, 0], dq[0] + here * dq[1], kt, width)
        add_row(ds[0, 0], dk + key * dk_row * size, qt, width)
        add_row(s[0, 0], dv + key * dv_row * size, gt, width)


@inline
def _prepare_rows(like, size, width, out, dout, dq, lse, place, down, rows, fresh, base, delta):
    """dout·out and the logsumexp of every row of a band; its dq is 0 when it is met for the first time."""
    nothing, zero = like.dtype.type(-np.inf), like.dtype.type(0)
    for r in range(rows):
        at = (place + r * down) * size
        if fresh:
            fill_row(zero, dq[0] + at * dq[1], width)
        delta[r] = dot(like[0], dout[0] + at * dout[1], out[0] + at * out[1], width)
        found = lse[place + r * down]
        base[r] = zero if found == nothing else found  # exp(-inf - 0) = 0: empty rows get no gradient


@inline
def _clear(like, size, width, sources, own, first, last):
    """dk and dv = 0 for the heads of a task."""
    for s in range(len(sources)):
        source = sources[s]
        for at in range(2):
            group = source[GROUP + at]
            for h in range(first // group * group, last, group):
                start, row = _matrix(source, KEY_GRADIENT + 4 * at, group, own, h, size)
                for place in range(source[ENTRIES]):
                    fill_row(like.dtype.type(0), start + place * row * size, width)


@Workers
def backward(worker, workers, arguments):
    """dq = and dk, dv += the share of the tasks, (batch element, first head, behind the last, first band, behind the
    last, its dk and dv among those of all). Heads that share keys are in one task: no two tasks add to the same place.
    """
    (like, size, width, heads, tasks, bands, pieces, parts, drawn, queue, masks, sources, whole,
     q, out, dout, dq, lse, scale, random, clear) = arguments[0]  # fmt: skip
    scale, random = like.dtype.type(scale), _typed(like, random)
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
            q_, out_ = _matrix(q, 0, 1, b, h, size), _matrix(out, 0, 1, b, h, size)
            g_, dq_ = _matrix(dout, 0, 1, b, h, size), _matrix(dq, 0, 1, b, h, size)
            for at in range(tasks[task, 3], tasks[task, 4]):
                band = bands[at]
                place, down = band[PLACE], band[DOWN]
                _prepare_rows(like, size, width, out_, g_, dq_, lse[g], place, down, band[COUNT], band[FRESH],
                              base, delta)  # fmt: skip
                for number in range(band[FIRST], band[BEHIND]):
                    piece = pieces[number]
                    part = parts[piece[PIECE_PART]]
                    source = sources[whole[b, part[SOURCE]], part[SOURCE]]
                    if part[SELF]:
                        _backward_selves(like, size, width, part, piece, source, b, h, own, q_, g_, dq_, place,
                                         g, scale, random, s, ds, base, delta)  # fmt: skip
                    else:
                        _backward_piece(like, size, width, part, piece, drawn, masks[piece[PIECE_PART]], source,
                                        b, h, own, q_, g_, dq_, place, down, g, scale, random,
                                        across, beyond, s, ds, base, delta)  # fmt: skip
