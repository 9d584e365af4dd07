"""The query's cluster on a CPU: sorted by cluster, queries are tiles and keys are runs (see `kernels.runs`).

Without summaries and dropout, a query per token; `chunks`: how long they are, and whether a token avoids itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.clusters import tiles
from subquad.kernels.parallel import ready
from subquad.kernels.row_dots import row_dots
from subquad.kernels.runs import cpu
from subquad.kernels.runs.op import EVERYTHING

ROWS = 72  # queries of a tile: three times the rows of a product


def attention(q, keys, values, order, cluster, real, seed, clusters, causal, _one_query, scale, _dropout, *chunks):
    """As `tiles.attention`."""
    q, keys, values = ready(q), [ready(x) for x in keys], [ready(x) for x in values]
    out, lse = torch.empty_like(q), q.new_full(q.shape[:2], -torch.inf)  # every token is in a tile of each round
    bias = _bias(real, q)
    for number, (sort, tables) in enumerate(_rounds(order, cluster, real, clusters, causal, *chunks)):
        cpu.forward(q, keys, values, bias, (sort, sort), tables, scale, out, lse, number == 0)
    return (out.copy_(tiles.with_itself(out, lse, q, values[0], real)) if chunks[1] else out), lse


def attention_backward(
    grad, q, keys, values, out, lse, order, cluster, real, seed, clusters, causal, _one_query, scale, _dropout, *chunks
):
    """As `tiles.attention_backward`."""
    grad, q, keys, values = ready(grad), ready(q), [ready(x) for x in keys], [ready(x) for x in values]
    single = order.numel() == real.numel()  # one round: one tile per query
    found = [torch.empty_like(q) if single else torch.zeros_like(q), *(torch.zeros_like(x) for x in (*keys, *values))]
    alone = lse == -torch.inf
    delta = row_dots(grad, out).masked_fill_(alone, 0)  # (G, n)
    total = lse.masked_fill(alone, torch.inf)
    bias = _bias(real, q)
    for sort, tables in _rounds(order, cluster, real, clusters, causal, *chunks):
        cpu.backward(q, keys, values, bias, (sort, sort), tables, scale, grad, delta, total, found, single)
    if chunks[1]:  # who met nobody has its own value
        found[2] += grad * (alone & real)[..., None]
    return found


def _bias(real: Tensor, q: Tensor) -> Tensor | None:
    """(G, n): padding is no key."""
    if bool(real.all()):
        return None
    return q.new_zeros(real.shape).masked_fill_(~real, -torch.inf)


def _rounds(order: Tensor, cluster: Tensor, real: Tensor, *about: Any):
    """Per round where the tokens stand, (G, n), and the tables of the kernels."""
    g, n = real.shape
    first = torch.arange(g, device=order.device)[:, None] * n
    for sort, label in zip(order.view(-1, g, n), cluster.view(-1, g, n), strict=True):
        yield sort - first, _tables(label, *about)


def _tables(cluster: Tensor, clusters: int, causal: bool, chunk: int, avoid_self: bool):
    """Tiles (T, 2), spans (T, 1, 4) and starts (G + 1,): clusters, cut into chunks, cut into tiles."""
    g = len(cluster)
    label = (cluster + torch.arange(g, device=cluster.device)[:, None] * clusters).flatten()
    sizes = torch.bincount(label, minlength=g * clusters)
    begins = (sizes.view(g, -1).cumsum(1) - sizes.view(g, -1)).flatten()  # (G·C,): in the row of the sequence
    step = min(ROWS, chunk) if chunk else ROWS
    per_chunk = -(-chunk // step) if chunk else 1  # tiles of a chunk
    counts = _tiles_of(sizes, chunk, step, per_chunk)  # (G·C,)
    owner = torch.arange(len(sizes), device=sizes.device).repeat_interleave(counts)  # (T,)
    number = torch.arange(len(owner), device=sizes.device) - (counts.cumsum(0) - counts)[owner]
    size = sizes[owner]
    piece = number // per_chunk if chunk else torch.zeros_like(number)  # which chunk
    low = piece * chunk + number % per_chunk * step if chunk else number * step  # ranks in the cluster
    high = torch.minimum(low + step, size)
    first, stop = torch.zeros_like(low), size
    if chunk:
        high = torch.minimum(high, (piece + 1) * chunk)
        first, stop = (piece - 1).clamp(min=0) * chunk, torch.minimum(size, (piece + 1) * chunk)
    stop, back = high if causal else stop, low - first
    last = back if causal else torch.full_like(low, EVERYTHING)
    own = back if avoid_self else torch.full_like(low, -EVERYTHING)
    begin = begins[owner]
    spans = torch.stack((begin + first, stop - first, last, own), -1)[:, None]
    starts = torch.cat((counts.new_zeros(1), counts.view(g, -1).sum(1).cumsum(0)))
    return torch.stack((begin + low, high - low), -1), spans, starts, (0,)


def _tiles_of(sizes: Tensor, chunk: int, step: int, per_chunk: int) -> Tensor:
    """How many tiles the clusters have."""
    if not chunk:
        return -(-sizes // step)
    whole, rest = sizes // chunk, sizes % chunk
    return whole * per_chunk + -(-rest // step)
