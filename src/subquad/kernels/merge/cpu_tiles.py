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
from subquad.kernels.parallel import inline
from subquad.kernels.running_softmax import KEYS, ROWS
from subquad.kernels.vector_rows import add_row, byte_at

EDGE = 12  # of a tile in which some rows see fewer keys than others: less is computed for nothing


START, BLOCKS, STEP, LENGTH, STRIDE = range(5)  # of a grid
LO, HI, XLO, XHI, SPAN, END = range(6)  # of a part's limits
# where a part has what: its grids, its limits, and single numbers
QUERIES, PLACES, POSITIONS, LIMITS, DRAWS, SOURCE, ORIGIN, NUMBERS, SELF, FIELDS = 0, 5, 10, 15, 21, 22, 23, 24, 27, 28
KEY, KEY_GRADIENT, EXISTS, GROUP, ENTRIES = 0, 8, 16, 18, 20  # where a source has what; values stand behind keys
PIECE_PART, PIECE_BLOCK, PIECE_ROW, PIECE_ROWS, PIECE_AT = range(5)
FIRST, BEHIND, PLACE, DOWN, COUNT, FRESH = range(6)  # of a band


@inline
def begin_of(limits, which, query):
    """The position at which an interval of a query begins."""
    at, span = query + limits[which], limits[SPAN]
    return at if span == 1 else at // span * span  # a division takes as long as a vector of products


@inline
def end_of(limits, which, query):
    """The position at which it ends."""
    at, span = query + limits[which], limits[SPAN]
    return at if span == 1 else at // span * span + span - 1


@inline
def keys_in(first, last, first_key, key_stride):
    """The keys [low, high) that stand at positions in [first, last]."""
    low, high = first - first_key, last - first_key
    return (low, high + 1) if key_stride == 1 else (-(-low // key_stride), high // key_stride + 1)


@inline
def seen(limits, first_key, key_stride, first, last):
    """The keys [low, high) that some query at a position in [first, last] may see."""
    end = min(end_of(limits, HI, last), last + limits[END])
    return keys_in(begin_of(limits, LO, first), end, first_key, key_stride)


@inline
def everything(limits, count, first_key, key_stride, first, last):
    """Does every query at a position in [first, last] see all of the keys?"""
    last_key = first_key + (count - 1) * key_stride
    if begin_of(limits, LO, last) > first_key or min(end_of(limits, HI, first), first + limits[END]) < last_key:
        return False
    return limits[XLO] > limits[XHI] or end_of(limits, XHI, last) < first_key or begin_of(limits, XLO, first) > last_key


@inline
def height(limits, count, first_key, key_stride, first, last):
    """The rows of a tile, for queries at positions in [first, last]."""
    return ROWS if everything(limits, count, first_key, key_stride, first, last) else EDGE


@inline
def grid(part, at):
    return part[at], part[at + 1], part[at + 2], part[at + 3], part[at + 4]


@inline
def limits(part):
    at = LIMITS
    return part[at], part[at + 1], part[at + 2], part[at + 3], part[at + 4], part[at + 5]


@inline
def matrix(source, at, group, b, h, size):
    """The address of a head's first place, and the stride of places."""
    return source[at] + (b * source[at + 1] + h // group * source[at + 2]) * size, source[at + 3]


@inline
def of_head(source, at, b, h, size):
    """Keys and values, or their gradients, of a head."""
    keys = matrix(source, at, source[GROUP], b, h, size)
    return keys, matrix(source, at + 4, source[GROUP + 1], b, h, size)


@inline
def run(keys, drawn, draws, block, number):
    """Keys that stand in a row: (place of the first, how many, which key of the block the first is)."""
    if draws == 0:
        return keys[START] + block * keys[STEP], keys[LENGTH], 0
    size = keys[LENGTH] // draws
    return drawn[keys[START] + block * keys[STEP] + number] * size, size, number * size


@inline
def columns(limits, first_key, key_stride, query, step, many, low, high, lanes):
    """The keys that a tile of `many` queries sees of [low, high): the first, on a boundary of vectors, and how many."""
    first, last = seen(limits, first_key, key_stride, query, query + (many - 1) * step)
    first = max(first - low, 0) // lanes * lanes
    return first, min(last, high) - low - first


@inline
def mask_row(row, count, limits, query, first_key, key_stride):
    """-inf for keys that the query does not see by the interval rule."""
    nothing = row.dtype.type(-np.inf)
    low, high = seen(limits, first_key, key_stride, query, query)
    for j in range(0, min(low, count)):
        row[j] = nothing
    for j in range(max(high, 0), count):
        row[j] = nothing
    if limits[XLO] <= limits[XHI]:
        low, high = keys_in(begin_of(limits, XLO, query), end_of(limits, XHI, query), first_key, key_stride)
        for j in range(max(low, 0), min(high, count)):
            row[j] = nothing


@inline
def mask_tile(s, size, many, count, padded, limits, query, step, first_key, key_stride, mask, exists, apart):
    """The scores (many × count) of a tile: -inf where a key is not seen, by the interval, by a mask, or not there.

    mask: address of its first entry (0 = none) and stride of rows; exists: address of its first byte (0 = all exist).
    """
    nothing = s.dtype.type(-np.inf)
    for i in range(many):
        for j in range(count, padded):
            s[i, j] = nothing
    if not everything(limits, count, first_key, key_stride, query, query + (many - 1) * step):
        for i in range(many):
            mask_row(s[i], count, limits, query + i * step, first_key, key_stride)
    if mask[0]:  # 0 or -inf, also behind its last entry
        for i in range(many):
            add_row(s.dtype.type(1), s.ctypes.data + i * KEYS * size, mask[0] + i * mask[1] * size, padded)
    if exists:
        for j in range(count):
            if byte_at(exists + j * apart) == 0:
                for i in range(many):
                    s[i, j] = nothing


@inline
def drop(row, count, seed, instance, query, number, step, dropout, up):
    """Dropout by a hash of (seed, instance, query, key)."""
    low, high = halves(stream(seed, instance, query))
    zero = row.dtype.type(0)
    for j in range(count):
        row[j] *= up if chance(low, high, number + j * step) >= dropout else zero


@inline
def typed(like, random):
    """(seed, dropout, factor of what is kept) in the types that they are compared and multiplied with."""
    return random[0], np.float32(random[1]), like.dtype.type(random[2])


@inline
def mask_at(mask, block, row, column, size):
    """The entry of a part's mask, (address, blocks, stride of blocks, stride of rows), and the stride of rows."""
    if mask[0] == 0:
        return 0, 0
    return mask[0] + (block % mask[1] * mask[2] + row * mask[3] + column) * size, mask[3]


@inline
def number(part, block, column, key):
    """What dropout counts a key by, and the step to the next."""
    if part[NUMBERS + 2] == 0:  # where it is stored
        return part[NUMBERS] + key, part[PLACES + STRIDE]
    return part[NUMBERS] + block * part[NUMBERS + 1] + column * part[NUMBERS + 2], part[NUMBERS + 2]
