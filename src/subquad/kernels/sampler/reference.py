"""The sampler in torch operators, on any device: the random numbers and the rules of the CPU, all rows at once.

A row walks along its intensity as on the CPU (see `cpu`): the points of its Poisson process are running sums of
exponential gaps, gap e from number e of the row's random stream. Nothing is drawn by a generator, so the graphs of a
seed are those of the CPU, but for random numbers that lie within rounding of a limit. Edges are numbers
(graph·n + row)·m + key. The host waits for the device where it reads how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.core.hashing import chances, ranks, streams, uniforms
from subquad.kernels.edges import EdgeList
from subquad.kernels.masks import blocks, pack_mask
from subquad.kernels.sampler import rules as limits
from subquad.kernels.sampler.rules import Rules, refuse

HELD = 2**22  # numbers of one kind that are held at a time


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
    rows = _Rows.of(w, z, seed, key_mask, rules)
    graphs, n, m = len(rows.z), w.shape[2], z.shape[2]
    proposed = torch.zeros_like(rows.place)
    found = [*_looked(rows, rules), *_jumped(rows, rules, proposed), *_walked(rows, rules, proposed)]
    edge = torch.unique(torch.cat([rows.place[:0], *found]))  # ascending: graph by graph, row by row
    ends = torch.searchsorted(edge, m * torch.arange(graphs * n + 1, device=edge.device))  # (g·n + 1,)
    at = n * torch.arange(graphs, device=edge.device)[:, None] + torch.arange(n + 1, device=edge.device)
    edges = EdgeList(ends[at], (edge % m).int(), m)
    counts = torch.stack([x.view(graphs, n).sum(1) for x in (rows.dense.long(), proposed)], 1)  # (g, 2)
    masked = rows.masked(rules).view(graphs, n)
    if not bool(masked.any()):
        return edges.indptr, edges.indices, edges.indices.new_empty(0, dtype=torch.uint8), edges.degrees, counts
    seen = edges.to_mask()
    listed = EdgeList.from_mask(seen & ~masked[..., None])
    return listed.indptr, listed.indices, pack_mask(seen & masked[..., None]), edges.degrees, counts


@dataclass(frozen=True)
class _Rows:
    """What is known of every row before anything is drawn. R = g·n rows of g graphs; real numbers are float64."""

    w: Tensor  # (R, k)
    z: Tensor  # (g, m, k), 0 where a key is padding
    real: Tensor  # (g, m) bool
    rank: Tensor  # (g, m): real keys before this one
    graph: Tensor  # (R,)
    place: Tensor  # (R,): the number of the row in its graph
    end: Tensor  # (R,): its keys are those before this one
    visible: Tensor  # (R,): real keys among them
    stream: Tensor  # (R,)
    boost: Tensor  # (R,): c_i
    points: Tensor  # (R,): the mean number of points, c_i·Σ_j p_ij
    dense: Tensor  # (R,) bool: look at every key
    jumped: Tensor  # (R,) bool: jump from key to key by `chance`
    chance: Tensor  # (R,): b_i, with exploration: what no edge of the row is more likely than
    expected: Tensor  # (R,): edges, duplicates counted

    @classmethod
    def of(cls, w: Tensor, z: Tensor, seed: Tensor, key_mask: Tensor | None, rules: Rules) -> _Rows:
        (batch, heads, n), m, device = w.shape[:3], z.shape[2], w.device
        for side, x in (("q", w), ("k", z)):
            if not bool(x.isfinite().all()):
                raise refuse(side)
        numbers, rank = (x.repeat_interleave(heads, 0) for x in ranks(key_mask, batch, n, m, device))
        graph = torch.arange(batch * heads, device=device)[:, None]  # (g, 1)
        stream = streams(seed.to(device), graph % (heads if rules.alike else batch * heads), numbers)  # (g, n)
        real = torch.ones(batch, m, dtype=torch.bool, device=device) if key_mask is None else key_mask
        real = real.repeat_interleave(heads, 0)
        x, y = w.flatten(0, 1).double(), z.flatten(0, 1).double() * real[..., None]
        if rules.causal:
            sums, tops, upto = y.cumsum(1)[:, :n], y.cummax(1)[0][:, :n], real.cumsum(1)[:, :n]
        else:
            sums, tops, upto = y.sum(1, keepdim=True), y.amax(1, keepdim=True), real.sum(1, keepdim=True)
        rate, visible = (x * sums).sum(-1), upto.expand(-1, n)  # (g, n): Σ_j p_ij
        boost, dense = torch.ones_like(rate), torch.full_like(rate, rules.sampler == "bernoulli", dtype=torch.bool)
        jumped, bound = torch.zeros_like(dense), (x * tops).sum(-1).clamp(1e-9, 1 - 1e-9)  # no p_ij is above
        chance = bound + rules.exploration * (1 - bound)
        if rules.sampler == "exact":
            boost = -torch.log1p(-bound) / bound
            jumped = (chance <= limits.THIN) & (chance * visible <= limits.LOOSE * boost * rate)
            dense = ~jumped & (boost * rate > limits.SWITCH * visible)
        extra = rules.exploration * visible + visible.clamp(max=max(0, 2 * rules.reach + 1))
        expected = torch.minimum(torch.where(dense | jumped, 1.0, boost) * rate + extra, visible.double())
        place = torch.arange(n, device=device).expand_as(stream)
        end = place + 1 if rules.causal else torch.full_like(place, m)
        about = (
            graph.expand_as(place),
            place,
            end,
            visible,
            stream,
            boost,
            boost * rate,
            dense,
            jumped,
            chance,
            expected,
        )
        return cls(x.flatten(0, 1), y, real, rank, *(t.flatten() for t in about))

    def masked(self, rules: Rules) -> Tensor:
        """(R,) bool: the rows that go to the mask; see `Sample`."""
        if not 0 <= rules.crossover < 1 or self.z.shape[1] <= limits.SMALL:
            return torch.full_like(self.dense, rules.crossover < 1)
        if rules.causal:
            return self.expected > rules.crossover * self.visible
        return (self.expected.sum() > rules.crossover * self.visible.sum()).expand_as(self.dense)


def _looked(rows: _Rows, rules: Rules) -> Iterator[Tensor]:
    """Bernoulli(p) for every pair of a dense row."""
    if not bool(rows.dense.any()):
        return
    graphs, m = rows.real.shape
    w, stream, dense, place = (x.unflatten(0, (graphs, -1)) for x in (rows.w, rows.stream, rows.dense, rows.place))
    key = torch.arange(m, device=w.device)
    for t, some, seen in blocks(graphs, w.shape[1], m, rules.causal):
        p = w[t, some] @ rows.z[t, seen].mT  # (graphs, rows, keys) of the block
        u = chances(stream[t, some, None], rows.rank[t, None, seen])
        i, j = place[t, some, None], key[seen]
        yes = (u < p + rules.exploration * (1 - p)) | ((i - j).abs() <= rules.reach)
        yes &= dense[t, some, None] & rows.real[t, None, seen]
        graph, row, drawn = (yes & (j <= i) if rules.causal else yes).nonzero(as_tuple=True)
        yield ((graph + t.start) * w.shape[1] + row + some.start) * m + drawn + seen.start


def _jumped(rows: _Rows, rules: Rules, proposed: Tensor) -> Iterator[Tensor]:
    """Rows that jump from key to key by a bound of their probabilities, and what is pinned there."""
    chosen = rows.jumped.nonzero()[:, 0]
    if not len(chosen):
        return
    most = _bound(rows.chance[chosen] * rows.visible[chosen])
    for some in chosen.split(max(1, HELD // max(most, rows.w.shape[1]))):
        row, key, count = _jumps(rows, some, rows.chance[some], 1, most)
        proposed[some] = count
        p = (rows.w[row] * rows.z[rows.graph[row], key]).sum(-1)
        u = chances(rows.stream[row], rows.rank[rows.graph[row], key]).double() * rows.chance[row]
        yield (row * rows.z.shape[1] + key)[u < p + rules.exploration * (1 - p)]
        yield from _pinned(rows, rules, some)


def _walked(rows: _Rows, rules: Rules, proposed: Tensor) -> Iterator[Tensor]:
    """The other rows: points of the walk, exploration, and what is pinned. Fills in `proposed` (R,)."""
    chosen = (~rows.dense & ~rows.jumped).nonzero()[:, 0]
    if not len(chosen):
        return
    m, upto = rows.z.shape[1], torch.nn.functional.pad(rows.z.mT.cumsum(2), (1, 0))  # (g, k, m + 1)
    most = _bound(rows.points[chosen])
    explored = _bound(rules.exploration * rows.visible[chosen].double()) if rules.exploration else 0
    for some in chosen.split(max(1, HELD // max(most, explored, rows.w.shape[1]))):
        row, key, count = _points(rows, rules, some, upto, most)
        proposed[some] = count
        yield row * m + key
        if explored:  # with the random numbers behind the points
            chance = torch.full_like(rows.chance[some], rules.exploration)
            row, key, _ = _jumps(rows, some, chance, count[:, None] + 2, explored)
            yield row * m + key
        yield from _pinned(rows, rules, some)


def _pinned(rows: _Rows, rules: Rules, some: Tensor) -> Iterator[Tensor]:
    """Edges |i - j| ≤ reach of some rows."""
    if rules.reach < 0:
        return
    key = rows.place[some][:, None] + torch.arange(-rules.reach, rules.reach + 1, device=some.device)
    inside = (key >= 0) & (key < rows.end[some][:, None])
    row, key = some[:, None].expand_as(key)[inside], key[inside]
    yield (row * rows.z.shape[1] + key)[rows.real[rows.graph[row], key]]


def _bound(mean: Tensor) -> int:
    """What no Poisson number of these means is above: twelve standard deviations."""
    return int((mean + 12 * mean.sqrt() + 64).max())


def _points(rows: _Rows, rules: Rules, some: Tensor, upto: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and keys of the points that stay, and how many there were in each row, (r,)."""
    graph, end = rows.graph[some], rows.end[some]
    slope = rows.boost[some][:, None] * rows.w[some]  # (r, k)
    length = slope * upto[graph, :, end]  # (r, k): the cluster's share of the walk
    ends = length.cumsum(1)
    gaps = -torch.log(uniforms(rows.stream[some][:, None], torch.arange(1, most + 1, device=some.device)))
    at = gaps.cumsum(1)  # (r, most)
    inside = at < ends[:, -1:]
    cluster = torch.searchsorted(ends, at, right=True)[inside]  # (P,)
    r, x = inside.nonzero()[:, 0], at[inside]
    x = (x - ends[r, cluster] + length[r, cluster]) / slope[r, cluster]  # the place in the cluster
    sums, line = upto.flatten(0, 1), graph[r] * upto.shape[1] + cluster
    key = torch.minimum(_search(sums, line, x), end[r] - 1)
    stays = sums[line, key + 1] > sums[line, key]  # (rounding could end on a last key that has no share)
    if rules.sampler == "exact":  # u ≤ p / (1 - exp(-c·p)), u belongs to the pair
        p, boost = (rows.w[some[r]] * rows.z[graph[r], key]).sum(-1), rows.boost[some[r]]
        u = chances(rows.stream[some[r]], rows.rank[graph[r], key]).double()
        stays &= (u * boost <= 1) | (u * -torch.expm1(-boost * p) <= p)
    return some[r[stays]], key[stays], inside.sum(1)


def _search(sums: Tensor, line: Tensor, x: Tensor) -> Tensor:
    """The last place j with sums[line, j] ≤ x, before the end of the line; sums never fall. By halves."""
    last = sums.shape[1] - 2
    j = torch.zeros_like(line)
    for bit in reversed(range(max(1, last).bit_length())):
        further = (j + (1 << bit)).clamp(max=last)
        j = torch.where(sums[line, further] <= x, further, j)
    return j


def _jumps(rows: _Rows, some: Tensor, chance: Tensor, first: Tensor | int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every visible key with a probability (r,): jumps from one to the next, with the random numbers from `first` on.

    Rows and keys that were met, and how many there were in each row, (r,).
    """
    step = torch.arange(most, device=some.device)
    u = uniforms(rows.stream[some][:, None], step + first)  # (r, most)
    number = (torch.log(u) / torch.log1p(-chance)[:, None]).floor().cumsum(1) + step  # of a visible key
    inside = number < rows.visible[some][:, None]
    row = some[inside.nonzero()[:, 0]]
    listed = (~rows.real).byte().argsort(dim=1, stable=True)  # (g, m): the real keys, ascending, then the others
    return row, listed[rows.graph[row], number[inside].long()], inside.sum(1)
