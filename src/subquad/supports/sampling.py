"""Graphs sampled from a stochastic block model (SBM-Transformer, Cho et al. 2022, eq. 8 and algorithm 1).

    p_ij = Y_i B Z_jᵀ        Y (n, k), B (k, k), Z (m, k), all ≥ 0 and p ≤ 1; below W = Y·B

Three samplers, one graph per batch element and head, every edge independent:

    exact      P(M_ij = 1) = p_ij             at a cost linear in the edges
    fastrg     P(M_ij = 1) = 1 - exp(-p_ij)   algorithm 1: a Poisson number of edges, duplicates merged, linear too
    bernoulli  P(M_ij = 1) = p_ij             every pair is looked at: n·m·k

`exact` runs algorithm 1 at the rate c_i·p_ij, merges duplicates and keeps each edge with probability
p / (1 - exp(-c·p)); this is ≤ 1 as long as p is at most the bound b_i for which c_i = -ln(1 - b_i) / b_i. The bound
of row i is W_i · max_j Z_j, linear to compute. Where it nears 1, or the row is dense, c·p edges cost more than looking
at all of them: such a row is sampled as `bernoulli` does, and the statistics count it.

On CPU the edges are drawn row by row, which algorithm 1 allows: its Poisson number of edges over all rows is a sum of
independent Poisson numbers, one per row. The intensity of a row is laid out on a line, cluster after cluster and
key after key, and one unit-rate Poisson process walks along it: m of line 4, V of line 7 and J of line 9 from a
single random number per edge (U is summed out in W). A row uses the keys it may see and a random stream of its own,
so in causal mode later tokens cannot even change which of the equally likely graphs is drawn. Other devices run
algorithm 1 as printed.

Beside the model: exploration δ adds every edge independently with probability δ; `reach` pins the edges |i - j| ≤ reach
(0: the self-loop); causal keeps j ≤ i; keys outside the key mask have no edges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from subquad.kernels.edges import EdgeList
from subquad.kernels.gated import blocks, pack_mask, product, scratch
from subquad.supports import rowdraws

SAMPLERS = ("exact", "fastrg", "bernoulli")
SWITCH = 1 / 8  # more proposals than this share of the keys: looking at every key is cheaper (measured)
SMALL = 128  # up to so many keys a mask is never worse than a list
TABLE = 2**21  # entries of the search tables that are held at a time


@dataclass(frozen=True)
class Rules:
    """How graphs are drawn, beside the probabilities."""

    sampler: str = "exact"
    causal: bool = False
    exploration: float = 0.0
    reach: int = -1  # -1: no edge is pinned
    crossover: float = 2.0  # rows go to the mask where the expected density is above this; 2: never, -1: always

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, not {self.sampler!r}")
        if not 0 <= self.exploration < 1:
            raise ValueError(f"exploration must be a probability ≥ 0 and < 1, not {self.exploration!r}")


@dataclass(frozen=True, eq=False)
class Sample:
    """B·H sampled graphs; a row stands in the list or in the mask.

    All rows stand in the same, by the expected density of them all. In causal mode each row goes by its own, because it
    must not know what later tokens are, not even by the rounding of another path.
    `counts` (B·H, 2) are the statistics: rows that were sampled by looking at every key, and edges proposed in all
    other rows (before merging and thinning).
    """

    indptr: Tensor  # (B·H, n + 1) int64: CSR; rows of the mask are empty here
    indices: Tensor  # (E,) int32
    mask: Tensor  # (B·H·n·⌈m / 8⌉,) uint8, one bit per pair; rows of the list are 0; empty if all rows are listed
    degrees: Tensor  # (B·H, n) int64
    counts: Tensor  # (B·H, 2) int64


def sample_edges(
    y: Tensor,
    block: Tensor,
    z: Tensor,
    *,
    generator: torch.Generator | None = None,
    key_mask: Tensor | None = None,
    sampler: str = "exact",
    causal: bool = False,
    exploration: float = 0.0,
    self_loops: bool = False,
    window: int | None = None,
) -> tuple[EdgeList, dict[str, float]]:
    """Graphs from memberships y (B, H, n, k), z (B, H, m, k) and the block matrix (H, k, k), and their statistics."""
    rules = Rules(sampler, causal, exploration, pinned_reach(self_loops, window))
    with torch.no_grad():
        drawn = sample(y @ block, z, draw_seed(generator), key_mask, rules)
    return EdgeList(drawn.indptr, drawn.indices, z.shape[2]), statistics(drawn)


def statistics(drawn: Sample) -> dict[str, float]:
    """What the sampler did: edges, edges proposed, and the share of rows sampled by looking at every key."""
    dense, proposals = drawn.counts.sum(0).tolist()
    return {"edges": int(drawn.degrees.sum()), "proposals": proposals, "dense_rows": dense / drawn.degrees.numel()}


def pinned_reach(self_loops: bool, window: int | None) -> int:
    """A window of w keys reaches w // 2 to each side; a self-loop reaches 0; -1: nothing is pinned."""
    return window // 2 if window is not None else 0 if self_loops else -1


def draw_seed(generator: torch.Generator | None) -> Tensor:
    """One number from torch's generator (the global one if None): everything else follows from it."""
    return torch.randint(2**62, (), generator=generator, device="cpu" if generator is None else generator.device)


def sample(w: Tensor, z: Tensor, seed: Tensor, key_mask: Tensor | None, rules: Rules) -> Sample:
    """Graphs of p = W·Zᵀ: w (B, H, n, k) = Y·B, z (B, H, m, k). The same seed draws the same graphs."""
    settings = (rules.sampler, rules.causal, rules.exploration, rules.reach, rules.crossover)
    op = _sample_op if w.device.type == "cpu" else _sample_torch
    return Sample(*op(w.detach(), z.detach(), seed, key_mask, *settings))


# ---- CPU: row by row ------------------------------------------------------------------------------------------------


@torch.library.custom_op("subquad::sample_graphs", mutates_args=(), device_types="cpu")
def _sample_op(
    w: Tensor,
    z: Tensor,
    seed: Tensor,
    key_mask: Tensor | None,
    sampler: str,
    causal: bool,
    exploration: float,
    reach: int,
    crossover: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rules = Rules(sampler, causal, exploration, reach, crossover)
    (batch, heads, n, _), m = w.shape, z.shape[2]
    real = torch.ones(batch, m, dtype=torch.bool) if key_mask is None else key_mask
    z = z if key_mask is None else z * real[:, None, :, None]
    x, y = (a.flatten(0, 1).contiguous() for a in (w, z))  # (B·H, n, k), (B·H, m, k)
    keys = _Keys.of(real, heads, n, causal)
    plan = _Plan.of(x.numpy(), y.numpy(), keys, rules, int(seed))
    masked = plan.masked(keys, rules)
    degrees, mask = np.zeros((len(x), n), np.int64), np.empty(0, np.uint8)
    indices = _drawn_rows(x.numpy(), y.numpy(), keys, plan, rules, masked, degrees)
    if masked.any():
        mask = np.zeros((len(x), n, -(-m // 8)), np.uint8)
        rowdraws.fill(_offsets(degrees), indices, masked, mask)
        indices = indices[:0] if masked.all() else indices[np.repeat(~masked.reshape(-1), degrees.reshape(-1))]
        _dense_rows(x, y, keys, plan, rules, masked, mask, degrees)
    counts = np.stack((plan.dense.sum(1), plan.proposed), 1)
    arrays = (_offsets(np.where(masked, 0, degrees)), indices, mask.reshape(-1), degrees, counts)
    return tuple(map(torch.from_numpy, arrays))


@_sample_op.register_fake
def _(w, z, seed, key_mask, sampler, causal, exploration, reach, crossover):
    graphs, n = w.shape[0] * w.shape[1], w.shape[2]
    sizes = [torch.library.get_ctx().new_dynamic_size() for _ in range(2)]
    return (
        w.new_empty(graphs, n + 1, dtype=torch.int64),
        w.new_empty(sizes[0], dtype=torch.int32),
        w.new_empty(sizes[1], dtype=torch.uint8),
        w.new_empty(graphs, n, dtype=torch.int64),
        w.new_empty(graphs, 2, dtype=torch.int64),
    )


@dataclass(frozen=True)
class _Keys:
    """Which keys exist. Random numbers go by the rank among real tokens, so padding never moves them."""

    real: np.ndarray  # (B, m) bool
    rank: np.ndarray  # (B, m) int32: real keys before this one
    listed: np.ndarray  # (B, m) int32: the real keys, ascending, then anything
    visible: np.ndarray  # (B, n) int64: real keys that row i may see; a prefix of `listed`
    ids: np.ndarray  # (B, n) int64: the name of row i's random stream
    heads: int

    @classmethod
    def of(cls, real: Tensor, heads: int, n: int, causal: bool) -> _Keys:
        m = real.shape[1]
        upto = real.cumsum(1)  # (B, m)
        rank = upto - real.long()
        listed = (~real).byte().argsort(dim=1, stable=True)
        visible = upto if causal else upto[:, -1:].expand(-1, n)
        place = torch.arange(n).expand(len(real), n)
        ids = torch.where(real, rank, m + place) if n == m else place  # a padded query has a stream of its own
        arrays = (real, rank.int(), listed.int(), visible, ids)
        return cls(*(a.contiguous().numpy() for a in arrays), heads)


@dataclass(frozen=True)
class _Plan:
    """How each row is drawn; arrays are (B·H, n)."""

    boost: np.ndarray  # float64: c_i
    expected: np.ndarray  # float64: edges to make room for, duplicates counted
    dense: np.ndarray  # bool: look at every key
    streams: np.ndarray  # uint64: the random stream
    proposed: np.ndarray  # (B·H,) int64: filled in as rows are drawn

    @classmethod
    def of(cls, w: np.ndarray, z: np.ndarray, keys: _Keys, rules: Rules, seed: int) -> _Plan:
        rate, bound = (np.empty(w.shape[:2]) for _ in range(2))  # Σ_j p_ij, and what no p_ij is above
        rowdraws.rates(w, z, rules.causal, rate, bound)
        visible = np.repeat(keys.visible, keys.heads, 0)  # (B·H, n)
        boost, dense = np.ones_like(rate), np.full(rate.shape, rules.sampler == "bernoulli")
        if rules.sampler == "exact":
            b = np.clip(bound, 1e-9, 1 - 1e-9)
            boost = -np.log1p(-b) / b
            dense = boost * rate > SWITCH * visible
        extra = rules.exploration * visible + np.minimum(visible, max(0, 2 * rules.reach + 1))
        expected = np.minimum(np.where(dense, 1.0, boost) * rate + extra, visible)
        streams = rowdraws.streams(seed, len(w), keys.ids, keys.heads)
        return cls(boost, expected, dense, streams, np.zeros(len(w), np.int64))

    def masked(self, keys: _Keys, rules: Rules) -> np.ndarray:
        """(B·H, n) bool: the rows that go to the mask; see `Sample`."""
        if not 0 <= rules.crossover < 1 or keys.real.shape[1] <= SMALL:
            return np.full(self.dense.shape, rules.crossover < 1)
        possible = np.repeat(keys.visible, keys.heads, 0)  # (B·H, n)
        if rules.causal:
            return self.expected > rules.crossover * possible
        return np.full(self.dense.shape, self.expected.sum() > rules.crossover * possible.sum())


def _dense_rows(w: Tensor, z: Tensor, keys: _Keys, plan: _Plan, rules: Rules, masked, mask, degrees) -> None:
    """The masked rows of `plan.dense`, whole blocks of p at a time, into the packed mask."""
    buffer = scratch(w, len(w), w.shape[1], z.shape[1])
    for t, rows, seen in blocks(len(w), w.shape[1], z.shape[1], rules.causal):
        flags = plan.dense[t, rows] & masked[t, rows]
        if flags.any():
            p = product(w[t, rows], z[t, seen].mT, buffer).numpy()
            where = (t.start, keys.heads, rows.start, rules.causal, rules.exploration, rules.reach)
            drawn = mask[t, rows], degrees[t, rows]
            rowdraws.compare(p, flags, plan.streams[t, rows], keys.real, keys.rank, where, *drawn)


def _drawn_rows(w, z, keys: _Keys, plan: _Plan, rules: Rules, masked: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """All rows but those left to `_dense_rows`: keys (E,), row after row. Groups of graphs bound the search tables."""
    pieces = [np.empty(0, np.int32)]
    step = max(1, TABLE // (z.shape[1] * z.shape[2]))
    for t in range(0, len(w), step):
        group = slice(t, t + step)
        dense, left = plan.dense[group], plan.dense[group] & masked[group]
        if not left.all():
            tables = rowdraws.tables(z[group], needed=not dense.all())
            chosen = (w[group], z[group], *tables, plan.boost[group], dense, left, plan.streams[group])
            places = (keys.real, keys.rank, keys.listed, keys.visible)
            thin = rules.sampler == "exact"
            where = (t, keys.heads, rules.causal, rules.exploration, rules.reach, thin)
            expected = plan.expected[group] * ~left
            pieces.append(rowdraws.draw(chosen, places, where, expected, degrees[group], plan.proposed[group]))
    return pieces[1] if len(pieces) == 2 else np.concatenate(pieces)


def _offsets(degrees: np.ndarray) -> np.ndarray:
    """(B·H, n) degrees → (B·H, n + 1) offsets into one list."""
    ends = np.cumsum(degrees).reshape(degrees.shape)
    return np.concatenate((ends[:, :1] - degrees[:, :1], ends), 1)


# ---- other devices: plain torch -------------------------------------------------------------------------------------


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


def _sample_torch(w, z, seed, key_mask, sampler, causal, exploration, reach, crossover):
    """The same graphs in distribution, on any device; takes and returns what `_sample_op` does."""
    rules = Rules(sampler, causal, exploration, reach, crossover)
    (batch, heads, n, _), m = w.shape, z.shape[2]
    real = torch.ones(batch, m, dtype=torch.bool, device=w.device) if key_mask is None else key_mask
    real = real.repeat_interleave(heads, 0)  # (B·H, m)
    w, z = w.flatten(0, 1).double(), z.flatten(0, 1).double() * real[..., None]
    generator = torch.Generator(w.device).manual_seed(int(seed))
    bound = (w * z.amax(1, keepdim=True)).sum(-1).clamp(1e-9, 1 - 1e-9)  # (B·H, n)
    boost = -torch.log1p(-bound) / bound if sampler == "exact" else torch.ones_like(bound)
    proposals = float((boost * (w * z.sum(1, keepdim=True)).sum(-1)).sum())
    if sampler == "bernoulli" or (sampler == "exact" and proposals > SWITCH * len(w) * n * m):
        edges, counts = EdgeList.from_mask(_look(w, z, real, rules, generator)), w.new_tensor([n, 0]).expand(len(w), 2)
    else:
        edges, counts = _propose(w, z, real, boost, rules, generator)
    masked = _masked(edges.degrees, real, rules)
    if not masked.any():
        return edges.indptr, edges.indices, edges.indices[:0].byte(), edges.degrees, counts.long()
    seen = edges.to_mask()
    listed = EdgeList.from_mask(seen & ~masked[..., None])
    return listed.indptr, listed.indices, pack_mask(seen & masked[..., None]), edges.degrees, counts.long()


def _masked(degrees: Tensor, real: Tensor, rules: Rules) -> Tensor:
    """(B·H, n) bool: the rows that go to the mask, as `_Plan.masked` but by the edges that were drawn."""
    if not 0 <= rules.crossover < 1:
        return torch.full_like(degrees, rules.crossover < 0, dtype=torch.bool)
    if rules.causal:
        return degrees > rules.crossover * real.cumsum(1)
    return (degrees.sum() > rules.crossover * degrees.shape[1] * real.sum()).expand_as(degrees)


def _look(w: Tensor, z: Tensor, real: Tensor, rules: Rules, generator: torch.Generator) -> Tensor:
    """Bernoulli(p) for every pair, (g, n, m) bool."""
    p = w @ z.mT
    p = p + rules.exploration * (1 - p)
    row, key = torch.arange(p.shape[1], device=p.device)[:, None], torch.arange(p.shape[2], device=p.device)
    mask = torch.rand(p.shape, generator=generator, device=p.device, dtype=p.dtype) < p
    mask = (mask | ((row - key).abs() <= rules.reach)) & real[:, None]
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
