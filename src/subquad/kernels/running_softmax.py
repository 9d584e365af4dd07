"""Tiles of scores that stay in the first-level cache, and one running softmax per row.

A row's state is (largest score m, total l of exp(score - m), sum a of exp(score - m)·value); it goes on from (out, lse)
and ends as them. Everything is given by addresses and strides in entries, `size` bytes each.
"""

from __future__ import annotations

import numpy as np

from subquad.kernels.parallel import exp as exp_one
from subquad.kernels.parallel import inline
from subquad.kernels.vector_rows import exp_row, fill_row
from subquad.kernels.vectors import BYTES, largest, scale_row, turn_block

ROWS = 24  # of a tile: four times the rows of a product in registers
KEYS = 128  # of a tile
BAND = 192  # rows of a band at most: they share the transposed keys


@inline
def transpose_scaled(like, size, width, count, a, row, into, scale):
    """scale · aᵀ: keys or values (count × width) as columns; up to a whole vector of them the last is repeated."""
    lanes = BYTES // size
    for j in range(0, count, lanes):
        for t in range(0, width, lanes):
            here, there = a + (j * row + t) * size, into + (t * KEYS + j) * size
            turn_block(scale, min(count - j, lanes), here, row, there, KEYS)


@inline
def take_row(like, size, width, out, lse, place, fresh, sums, r, top, total):
    """The state of row r, from what earlier parts have left in out and lse."""
    nothing, zero, one = like.dtype.type(-np.inf), like.dtype.type(0), like.dtype.type(1)
    top[r] = nothing if fresh else lse[place]
    total[r] = zero if top[r] == nothing else one
    if total[r] == zero:
        fill_row(zero, sums + r * width * size, width)
    else:
        scale_row(one, sums + r * width * size, out, width)


@inline
def lay_row(like, size, width, out, lse, place, sums, r, top, total):
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
def softmax_tile(like, size, width, s, many, count, padded, top, total, sums, r0):
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
