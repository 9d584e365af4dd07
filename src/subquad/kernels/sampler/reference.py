"""The sampler in plain torch, on any device: algorithm 1 as printed, or every pair looked at."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from subquad.core.hashing import chances, ranks, streams
from subquad.kernels.edges import EdgeList
from subquad.kernels.masks import pack_mask
from subquad.kernels.sampler import rules as limits
from subquad.kernels.sampler.rules import Rules, refuse


def fastrg(
    y: Tensor, block: Tensor, z: Tensor, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 1 as printed, for g graphs at once: y (g, n, k), block (g, k, k), z (g, m, k).

    Returns graph, source and destination of every edge, duplicates not yet merged. D are the column sums.
    """
    k = block.shape[-1]
    d_y, d_z = y.sum(1), z.sum(1)  # (g, k): line 1; the normalisation of line 2 is in `_pick`
    rates = d_y[:, :, None] * block * d_z[:, None, :]  # (g, k, k): line 3
    m = torch.poisson(rates.double().sum((1, 2)), generator).long()  # (g,): line 4
    graph = torch.arange(len(y), device=y.device).repeat_interleave(m)  # (E,)
    pair = _pick(rates.flatten(1), graph, generator)  # line 7
    source = _pick(y.mT.flatten(0, 1), graph * k + pair // k, generator)  # line 8
    destination = _pick(z.mT.flatten(0, 1), graph * k + pair % k, generator)  # line 9
    return graph, source, destination


def _pick(weights: Tensor, rows: Tensor, generator: torch.Generator | None) -> Tensor:
    """For each entry of `rows` (E,) an index drawn in proportion to that row of weights (r, c): one search for all."""
    upto = weights.double().cumsum(1)
    upto = upto / upto[:, -1:].clamp_min(torch.finfo(torch.float64).tiny)  # a row of zeros is never asked for
    base = torch.arange(len(upto), device=rows.device)
    u = torch.rand(rows.shape, generator=generator, device=rows.device, dtype=torch.float64)
    found = torch.searchsorted((upto + base[:, None]).flatten(), u + rows, right=True)
    return (found - rows * weights.shape[1]).clamp(0, weights.shape[1] - 1)


def sample(
    w: Tensor,
    z: Tensor,
    seed: Tensor,
    key_mask: Tensor | None,
    sampler: str,
    causal: bool,
    exploration: float,
    reach: int,
    crossover: float,
    alike: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of a `Sample`."""
    rules = Rules(sampler, causal, exploration, reach, crossover, alike)
    (batch, heads, n, _), m = w.shape, z.shape[2]
    for side, x in (("q", w), ("k", z)):
        if not bool(x.isfinite().all()):
            raise refuse(side)
    numbers, columns = (x.repeat_interleave(heads, 0) for x in ranks(key_mask, batch, n, m, w.device))
    instance = torch.arange(batch * heads, device=w.device)[:, None] % (heads if alike else batch * heads)
    state = streams(seed.to(w.device), instance, numbers)  # (B·H, n): the random stream of each row
    real = torch.ones(batch, m, dtype=torch.bool, device=w.device) if key_mask is None else key_mask
    real = real.repeat_interleave(heads, 0)  # (B·H, m)
    w, z = w.flatten(0, 1).double(), z.flatten(0, 1).double() * real[..., None]
    generator = torch.Generator(w.device).manual_seed(int(seed))
    bound = (w * z.amax(1, keepdim=True)).sum(-1).clamp(1e-9, 1 - 1e-9)  # (B·H, n)
    boost = -torch.log1p(-bound) / bound if sampler == "exact" else torch.ones_like(bound)
    proposals = float((boost * (w * z.sum(1, keepdim=True)).sum(-1)).sum())
    if sampler == "bernoulli" or (sampler == "exact" and proposals > limits.SWITCH * len(w) * n * m):
        chance = chances(state[..., None], columns[:, None])  # (B·H, n, m)
        edges, counts = EdgeList.from_mask(_look(w, z, real, rules, chance)), w.new_tensor([n, 0]).repeat(len(w), 1)
    else:
        edges, counts = _propose(w, z, real, boost, rules, generator)
    masked = _masked(edges.degrees, real, rules)
    if not masked.any():
        return (
            edges.indptr,
            edges.indices.clone(),
            edges.indices.new_empty(0, dtype=torch.uint8),
            edges.degrees,
            counts.long(),
        )
    seen = edges.to_mask()
    listed = EdgeList.from_mask(seen & ~masked[..., None])
    return listed.indptr, listed.indices, pack_mask(seen & masked[..., None]), edges.degrees, counts.long()


def _masked(degrees: Tensor, real: Tensor, rules: Rules) -> Tensor:
    """(B·H, n) bool: the rows that go to the mask, as on a CPU but by the edges that were drawn."""
    if not 0 <= rules.crossover < 1:
        return torch.full_like(degrees, rules.crossover < 0, dtype=torch.bool)
    if rules.causal:
        return degrees > rules.crossover * real.cumsum(1)
    return (degrees.sum() > rules.crossover * degrees.shape[1] * real.sum()).expand_as(degrees)


def _look(w: Tensor, z: Tensor, real: Tensor, rules: Rules, chance: Tensor) -> Tensor:
    """Bernoulli(p) for every pair, (g, n, m) bool."""
    p = w @ z.mT
    p = p + rules.exploration * (1 - p)
    row, key = torch.arange(p.shape[1], device=p.device)[:, None], torch.arange(p.shape[2], device=p.device)
    mask = ((chance < p) | ((row - key).abs() <= rules.reach)) & real[:, None]
    return mask & (key <= row) if rules.causal else mask


def _propose(w, z, real, boost, rules: Rules, generator: torch.Generator) -> tuple[EdgeList, Tensor]:
    """Algorithm 1 at the rate c·p, duplicates merged, thinned if exact. Edge = number (graph·n + row)·m + key."""
    (graphs, n, k), m = w.shape, z.shape[1]
    eye = torch.eye(k, dtype=w.dtype, device=w.device).expand(graphs, k, k)  # (the block matrix is in W)
    graph, row, key = fastrg(w * boost[..., None], eye, z, generator)
    counts = torch.bincount(graph, minlength=graphs)[:, None] * torch.tensor([0, 1], device=w.device)
    edge = torch.unique((graph * n + row) * m + key)  # ascending: graph by graph, row by row
    if rules.sampler == "exact":
        graph, row, key = edge // (n * m), edge // m % n, edge % m
        p = (w[graph, row] * z[graph, key]).sum(-1)
        keep = p / -torch.expm1(-boost[graph, row] * p)
        edge = edge[torch.rand(p.shape, generator=generator, device=p.device, dtype=p.dtype) < keep]
    edge = torch.unique(torch.cat((edge, *_beside(graphs, n, m, rules.exploration, rules.reach, generator))))
    graph, row, key = edge // (n * m), edge // m % n, edge % m
    edge = edge[real[graph, key] & (key <= row)] if rules.causal else edge[real[graph, key]]
    ends = torch.searchsorted(edge, m * torch.arange(graphs * n + 1, device=edge.device))  # (g·n + 1,)
    rows = n * torch.arange(graphs, device=edge.device)[:, None] + torch.arange(n + 1, device=edge.device)
    return EdgeList(ends[rows], (edge % m).int(), m), counts


def _beside(graphs: int, n: int, m: int, exploration: float, reach: int, generator: torch.Generator) -> list[Tensor]:
    """Edges that do not come from the model: uniform ones (a Poisson number at rate -ln(1 - δ), merged: exactly δ)
    and the pinned ones."""
    edges, pairs = [], graphs * n * m
    if exploration:
        mean = torch.tensor(-math.log1p(-exploration) * pairs, dtype=torch.float64, device=generator.device)
        count = int(torch.poisson(mean, generator))
        edges.append(torch.randint(pairs, (count,), generator=generator, device=generator.device))
    if reach >= 0:
        row = torch.arange(graphs * n, device=generator.device)[:, None]
        key = row % n + torch.arange(-reach, reach + 1, device=generator.device)  # (B·H·n, 2·reach + 1)
        edges.append((row * m + key)[(key >= 0) & (key < m)])
    return edges
