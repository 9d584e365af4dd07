"""Who chose which block: the queries of every block, as tiles for the kernels of `kernels.runs`."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.kernels.parallel import kernel, run
from subquad.kernels.runs.op import EVERYTHING

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
