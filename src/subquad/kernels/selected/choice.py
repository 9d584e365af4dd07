"""Which blocks suit a query, by the weights of compressed blocks: the operator `subquad::block_choice`.

Compressed blocks of `compress` tokens, one every `stride`, and selected blocks of `block` tokens are made of pieces of
`stride` tokens. A selected block is worth the softmax weights of the compressed blocks, once for every piece that they
share; the first block and the one before the query's are worth more than any other. It has no gradient.
`tables` has the queries that chose every block, as tiles for the kernels of `kernels.runs`.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.parallel import kernel, run
from subquad.kernels.runs.op import EVERYTHING

LOWEST = -1e30  # worth of a block that may not be chosen


def block_choice(
    q: Tensor, keys: Tensor, entries: Tensor | None, allowed: Tensor, sizes: tuple[int, int, int, int], scale: float
) -> Tensor:
    """q (G, n, d), compressed keys (G, T, d), which of them exist, bool (G or 1, T) or None, which blocks may be chosen
    at all, bool (G or 1, N); sizes: compress, stride, block and how many are chosen → int64 (G, n, t), -1 = none.
    """
    return choose(q.detach(), keys.detach(), entries, allowed, list(sizes), scale)


@torch.library.custom_op("subquad::block_choice", mutates_args=())
def choose(
    q: Tensor, keys: Tensor, entries: Tensor | None, allowed: Tensor, sizes: list[int], scale: float
) -> Tensor:  # fmt: skip
    compress, stride, block, most = sizes
    (g, n, _), blocks = q.shape, allowed.shape[1]
    found = torch.full((g, n, min(most, blocks)), -1, dtype=torch.int64, device=q.device)
    for number in range(g if found.shape[2] else 0):  # a sequence at a time: its weights stay in the cache
        there = None if entries is None else entries[number % len(entries)]
        weights = _weights(q[number], keys[number], there, compress, stride, scale)  # (n, T)
        may = allowed[number % len(allowed)]
        if q.device.type == "cpu":
            run(_pick, weights.numpy(), may.numpy(), compress // stride, block // stride, block, found[number].numpy())
        else:
            found[number] = _picked(weights, may, compress // stride, block // stride, block, found.shape[2])
    return found


@choose.register_fake
def _(q, keys, entries, allowed, sizes, scale):
    return torch.empty(*q.shape[:2], min(sizes[3], allowed.shape[1]), dtype=torch.int64, device=q.device)


def _weights(q: Tensor, keys: Tensor, there: Tensor | None, compress: int, stride: int, scale: float) -> Tensor:
    """(n, T): softmax over the complete compressed blocks, 0 where there is none."""
    end = torch.arange(len(keys), device=q.device) * stride + compress - 1
    seen = end <= torch.arange(len(q), device=q.device)[:, None]
    seen = seen if there is None else seen & there
    scores = torch.mm(q, keys.mT).mul_(scale).masked_fill_(~seen, torch.finfo(q.dtype).min)
    return scores.softmax(-1).mul_(seen)


def _picked(weights: Tensor, may: Tensor, pieces: int, ratio: int, block: int, most: int) -> Tensor:
    """(n, most): the blocks of the largest worth, in torch."""
    n, blocks = len(weights), len(may)
    total = torch.stack([F.pad(weights, (shift, pieces - 1 - shift)) for shift in range(pieces)]).sum(0)
    total = F.pad(total, (0, max(0, blocks * ratio - total.shape[1])))[:, : blocks * ratio]
    number, own = torch.arange(blocks, device=may.device), torch.arange(n, device=may.device)[:, None] // block
    worth = total.unflatten(1, (blocks, ratio)).sum(-1) + 2.0 * pieces * ((number == 0) | (number == own - 1))
    best = worth.masked_fill(~(may & (number < own)), LOWEST).topk(most, -1)
    return best.indices.masked_fill(best.values == LOWEST, -1)


@kernel
def _pick(weights, may, pieces, ratio, block, found):
    """The same by Numba, of equal worth the earlier."""
    n, count = weights.shape
    lowest = weights.dtype.type(LOWEST)
    for i in numba.prange(n):
        own = i // block
        worth = np.zeros(max(own, 1), weights.dtype)
        for t in range(count):
            for shift in range(pieces):
                b = (t + shift) // ratio
                if b < own:
                    worth[b] += weights[i, t]
        if own > 0:
            worth[0] += 2 * pieces
        if own > 1:
            worth[own - 1] += 2 * pieces
        for b in range(own):
            if not may[b]:
                worth[b] = lowest
        for c in range(min(found.shape[1], own)):
            best = 0
            for b in range(1, own):
                if worth[b] > worth[best]:
                    best = b
            if worth[best] > lowest:
                found[i, c] = best
                worth[best] = lowest


MOST = 192  # queries of a tile


@kernel
def _sort(chosen, asks, counts):
    """By block, and by query inside a block: chosen (G, n, t), -1 = none → asks (G, n·t), counts (G, N)."""
    graphs, n, t = chosen.shape
    for g in numba.prange(graphs):
        for i in range(n):
            for c in range(t):
                if chosen[g, i, c] >= 0:
                    counts[g, chosen[g, i, c]] += 1
        place, total = np.empty(counts.shape[1], np.int64), 0
        for b in range(counts.shape[1]):
            place[b] = total
            total += counts[g, b]
        for i in range(n):
            for c in range(t):
                b = chosen[g, i, c]
                if b >= 0:
                    asks[g, place[b]] = i
                    place[b] += 1


def tables(chosen: Tensor, block: int, n: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, tuple[int, ...]]]:
    """chosen int64 (G, n, t) → the order of the queries (G, n·t), and tiles, spans, starts, sources for `runs.cpu`."""
    g, blocks = len(chosen), -(-n // block)
    asks, counts = chosen.new_zeros(g, chosen[0].numel()), chosen.new_zeros(g, blocks)
    run(_sort, chosen.contiguous().numpy(), asks.numpy(), counts.numpy())
    flat = counts.flatten()  # (G·N,)
    begins = (counts.cumsum(1) - counts).flatten()
    many = -(-flat // MOST)  # tiles of a block
    owner = torch.arange(len(flat), device=flat.device).repeat_interleave(many)  # (T,)
    number = torch.arange(len(owner), device=flat.device) - (many.cumsum(0) - many)[owner]
    rows = (flat[owner] - number * MOST).clamp(max=MOST)
    first = owner % blocks * block  # its first key
    everything = torch.full_like(first, EVERYTHING)
    spans = torch.stack((first, (n - first).clamp(max=block), everything, -everything), -1)[:, None]
    starts = torch.cat((many.new_zeros(1), many.view(g, -1).sum(1).cumsum(0)))
    return asks, (torch.stack((begins[owner] + number * MOST, rows), -1), spans, starts, (0,))
