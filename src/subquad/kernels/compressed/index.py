"""The choice of entries by a small index: the operator `subquad::index_choice`.

    I_iw = Σ_h g_ih ReLU(u_ih·s_w)          query i sees the `count` possible entries w with the largest I_iw

Of entries with equal I, earlier ones are preferred. On a CPU (Numba) a tile of queries is scored, head by head, and
chosen from while its scores are in the cache; elsewhere the scores of some queries at a time are tensors. It has no
gradient.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.parallel import inline, kernel, run
from subquad.kernels.vectors import BYTES, multiply

AT_ONCE = 1 << 24  # scores at a time
ROWS = 24  # queries of a tile


def index_choice(u: Tensor, gates: Tensor, small: Tensor, possible: Tensor, count: int) -> Tensor:
    """u (B, h, n, c), gates g (B, h, n), small entries s (B, m, c), possible bool (B, n, m) → bool (B, n, m)."""
    return choose(u.detach(), gates.detach(), small.detach(), possible, count)


@torch.library.custom_op("subquad::index_choice", mutates_args=())
def choose(u: Tensor, gates: Tensor, small: Tensor, possible: Tensor, count: int) -> Tensor:
    if u.device.type == "cpu" and u.dtype in (torch.float32, torch.float64):
        lanes = BYTES // u.element_size()
        across = F.pad(small.mT, (0, -small.shape[1] % lanes)).contiguous()  # (B, c, M)
        u, gates, chosen = u.contiguous(), gates.contiguous(), possible.new_zeros(possible.shape)
        run(
            _choose, np.zeros(1, u.numpy().dtype), u.element_size(), u.numpy(), gates.numpy(), across.numpy(),
            possible.numpy(), count, chosen.numpy(),
        )  # fmt: skip
        return chosen
    step, found = max(1, AT_ONCE // (u.shape[0] * u.shape[1] * small.shape[1])), []
    for first in range(0, u.shape[2], step):
        rows = slice(first, first + step)
        scores = ((u[:, :, rows] @ small[:, None].mT).relu_() * gates[:, :, rows, None]).sum(1)  # (B, r, m)
        found.append(best(scores, possible[:, rows], count))
    return torch.cat(found, 1)


@choose.register_fake
def _(u, gates, small, possible, count):
    return possible.new_empty(possible.shape)


def best(scores: Tensor, possible: Tensor, count: int) -> Tensor:
    """The `count` best of the possible entries, bool (B, r, m); of equal ones the earlier."""
    scores = scores.masked_fill(~possible, -torch.inf)
    last = scores.topk(count, -1).values[..., -1:]  # (B, r, 1)
    better, equal = scores > last, scores == last
    room = count - better.sum(-1, keepdim=True)
    return (better | (equal & (equal.cumsum(-1) <= room))) & possible


@inline
def _rank(row, size, number):
    """The number-th largest of the first `size` entries of a row (1 = the largest), which are reordered."""
    low, high, want = 0, size - 1, number - 1
    while low < high:
        pivot, i, j = row[(low + high) // 2], low, high
        while i <= j:
            while row[i] > pivot:
                i += 1
            while row[j] < pivot:
                j -= 1
            if i <= j:
                row[i], row[j] = row[j], row[i]
                i, j = i + 1, j - 1
        if want <= j:
            high = j
        elif want >= i:
            low = i
        else:
            break
    return row[want]


@inline
def _mark(scores, possible, scratch, count, chosen):
    """The best of the possible entries of one query."""
    size = 0
    for w in range(len(possible)):
        if possible[w]:
            x = scores[w]
            scratch[size] = x if x == x else -np.inf  # NaN ranks last
            size += 1
    if size <= count:
        for w in range(len(possible)):
            chosen[w] = possible[w]
        return
    last, room = _rank(scratch, size, count), count
    for w in range(len(possible)):
        if possible[w] and scores[w] > last:
            chosen[w] = True
            room -= 1
    for w in range(len(possible)):
        if room > 0 and possible[w] and scores[w] == last:
            chosen[w] = True
            room -= 1


@kernel
def _choose(like, size, u, gates, across, possible, count, chosen):
    (batch, heads, n, c), columns, m = u.shape, across.shape[2], possible.shape[2]
    tiles = -(-n // ROWS)
    zero = like.dtype.type(0)
    for task in numba.prange(batch * tiles):
        b, first = task // tiles, task % tiles * ROWS
        many = min(ROWS, n - first)
        part, total = np.empty((ROWS, columns), like.dtype), np.zeros((ROWS, columns), like.dtype)
        scratch = np.empty(columns, like.dtype)
        width = 0  # up to the last entry that a query of the tile may see
        for i in range(many):
            end = m
            while end > width and not possible[b, first + i, end - 1]:
                end -= 1
            width = end
        width = -(-width * size // BYTES) * BYTES // size
        for h in range(heads if width > 0 else 0):
            left, right, to = u[b, h, first].ctypes.data, across[b].ctypes.data, part.ctypes.data
            multiply(like[0], many, width, c, left, c, right, columns, to, columns, size)
            for i in range(many):
                gate = gates[b, h, first + i]
                for w in range(width):
                    x = part[i, w]
                    total[i, w] += gate * (x if x > zero else zero)
        for i in range(many):
            _mark(total[i], possible[b, first + i], scratch, count, chosen[b, first + i])
