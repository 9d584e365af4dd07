"""The sampler in torch operators, on any device: the random numbers and the rules of the CPU, all rows at once.

A row walks along its intensity as on the CPU (see `cpu`): the points of its Poisson process are running sums of
exponential gaps, gap e from number e of the row's random stream. Nothing is drawn by a generator, so the graphs of a
seed are those of the CPU, but for random numbers that lie within rounding of a limit. Edges are numbers
(graph·n + row)·m + key. The host waits for the device where it reads how many there are. Where all rows go to the mask,
it does not: as many keys are drawn as a row may have at most, and those too many are nobody's edges. That goes some
rows at a time, so that beside the mask, of one bit per pair, memory does not grow with the pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from subquad.core.hashing import chances, ranks, streams, uniforms
from subquad.kernels import devices
from subquad.kernels.edges import EdgeList
from subquad.kernels.masks import blocks, pack_mask
from subquad.kernels.sampler import rules as limits
from subquad.kernels.sampler.rules import Rules, refuse
from subquad.kernels.values import require

HELD = 2**22  # numbers of one kind that are held at a time
PAIRS = 2**24  # pairs of a mask that are drawn at a time


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
    masked = limits.all_masked(rules.crossover, z.shape[2], devices.is_host(w))
    rows = _Rows.of(w, z, seed, key_mask, rules, masked)
    graphs, n, m = len(rows.z), w.shape[2], z.shape[2]
    if masked:
        nothing = (rows.place.new_zeros(graphs, n + 1), rows.place.new_empty(0, dtype=torch.int32))
        return *nothing, *_as_masks(rows, rules)
    proposed = torch.zeros_like(rows.place)
    found = _edges(rows, rules, proposed)
    edge = torch.unique(torch.cat([rows.place[:0], *found]))  # ascending: graph by graph, row by row
    ends = torch.searchsorted(edge, m * torch.arange(graphs * n + 1, device=edge.device))  # (g·n + 1,)
    at = n * torch.arange(graphs, device=edge.device)[:, None] + torch.arange(n + 1, device=edge.device)
    edges = EdgeList(ends[at], (edge % m).int(), m)
    counts = _counts(rows, proposed)
    masked = rows.masked(rules).view(graphs, n)
    if not bool(masked.any()):
        return edges.indptr, edges.indices, edges.indices.new_empty(0, dtype=torch.uint8), edges.degrees, counts
    seen = edges.to_mask()
    listed = EdgeList.from_mask(seen & ~masked[..., None])
    return listed.indptr, listed.indices, pack_mask(seen & masked[..., None]), edges.degrees, counts


def sample_rows(w: Tensor, z: Tensor, seed: Tensor, key_mask: Tensor | None, position: Tensor, rules: Rules) -> Tensor:
    """The rows at `position` (B, t) of graphs of m causal queries and keys, bool (B, H, t, m), without reading a value.

    w (B, H, t, k) are the memberships of these queries alone, z (B, H, m, k) those of all keys.
    """
    rows = _Rows.of(w, z, seed, key_mask, rules, True, position)
    seen = rows.real.new_empty(len(rows.z), w.shape[2], z.shape[2])
    for where, part, _ in _drawn(rows, rules):
        seen[where] = part
    return seen.unflatten(0, w.shape[:2])


def _edges(rows: _Rows, rules: Rules, proposed: Tensor) -> Iterator[Tensor]:
    return chain(
        _looked(rows, rules), _jumped(rows, rules, proposed), _walked(rows, rules, proposed), _pinned(rows, rules)
    )


def _drawn(rows: _Rows, rules: Rules) -> Iterator[tuple[tuple[slice, slice], Tensor, Tensor]]:
    """Which graphs and rows, their mask (graphs, rows, m), and how many edges were proposed (graphs, rows)."""
    graphs, m = rows.real.shape
    for t, some, _ in blocks(graphs, len(rows.w) // graphs, m, False, PAIRS):
        part = rows.part(t, some)
        seen, proposed = rows.real.new_zeros(len(part.w) * m + 1), torch.zeros_like(part.place)
        for edge in _edges(part, rules, proposed):
            seen.index_fill_(0, edge, True)  # the last one is nobody's
        yield (t, some), seen[:-1].view(len(part.z), -1, m), proposed.view(len(part.z), -1)


def _as_masks(rows: _Rows, rules: Rules) -> tuple[Tensor, Tensor, Tensor]:
    """The last three fields of a `Sample` in which all rows stand in the mask."""
    place, m = rows.place.unflatten(0, (len(rows.z), -1)), rows.real.shape[1]
    bits = torch.empty(*place.shape, -(-m // 8), dtype=torch.uint8, device=place.device)
    degrees, proposed = torch.empty_like(place), torch.empty_like(place)
    for where, seen, tried in _drawn(rows, rules):
        bits[where] = pack_mask(seen).view(*seen.shape[:2], -1)
        degrees[where], proposed[where] = seen.sum(-1), tried
    return bits.flatten(), degrees, _counts(rows, proposed)


def _counts(rows: _Rows, proposed: Tensor) -> Tensor:
    """The statistics of a `Sample`, (g, 2)."""
    return torch.stack([x.view(len(rows.z), -1).sum(1) for x in (rows.dense.long(), proposed)], 1)


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
    all_masked: bool  # nothing is counted, and no value is read

    @classmethod
    def of(
        cls,
        w: Tensor,
        z: Tensor,
        seed: Tensor,
        key_mask: Tensor | None,
        rules: Rules,
        masked: bool,
        position: Tensor | None = None,
    ) -> _Rows:
        """position (B, n): where the queries stand among the keys, in causal mode; None = at 0 … n-1."""
        (batch, heads, n), m, device = w.shape[:3], z.shape[2], w.device
        for side, x in (("q", w), ("k", z)):
            if masked:
                require(x.isfinite().all(), str(refuse(side)))
            elif not bool(x.isfinite().all()):
                raise refuse(side)
        numbers, rank = ranks(key_mask, batch, n if position is None else m, m, device)
        place = torch.arange(n, device=device).expand(batch, n)
        if position is not None:
            place = position.clamp(max=m - 1)
            numbers = numbers.gather(1, place)
        numbers, rank, place = (x.repeat_interleave(heads, 0) for x in (numbers, rank, place))  # (g, …)
        graph = torch.arange(batch * heads, device=device)[:, None]  # (g, 1)
        stream = streams(
            seed.to(device, non_blocking=True), graph % (heads if rules.alike else batch * heads), numbers
        )  # (g, n)
        real = torch.ones(batch, m, dtype=torch.bool, device=device) if key_mask is None else key_mask
        real = real.repeat_interleave(heads, 0)
        x, y = w.flatten(0, 1).double(), z.flatten(0, 1).double() * real[..., None]
        if rules.causal:
            upto, at = real.cumsum(1).gather(1, place), place[..., None].expand(-1, -1, y.shape[2])
            sums, tops = (t.gather(1, at) for t in (y.cumsum(1), y.cummax(1)[0]))
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
        return cls(x.flatten(0, 1), y, real, rank, *(t.flatten() for t in about), masked)

    def part(self, t: slice, some: slice) -> _Rows:
        """Some rows of some graphs, as graphs of their own."""
        graphs = len(self.z)
        own = {
            name: x.unflatten(0, (graphs, -1))[t, some].flatten(0, 1)
            for name, x in vars(self).items()
            if isinstance(x, Tensor) and name not in ("z", "real", "rank")
        }
        own["graph"] = own["graph"] - t.start
        return replace(self, **own, z=self.z[t], real=self.real[t], rank=self.rank[t])

    def masked(self, rules: Rules) -> Tensor:
        """(R,) bool: the rows that go to the mask where not all of them do; see `Sample`."""
        if rules.crossover >= 1:
            return torch.zeros_like(self.dense)
        if rules.causal:
            return self.expected > rules.crossover * self.visible
        return (self.expected.sum() > rules.crossover * self.visible.sum()).expand_as(self.dense)

    def chosen(self, flags: Tensor) -> Tensor:
        """The numbers of some rows (R,); of all rows where they are not counted, and `edges` leaves the others out."""
        return torch.arange(len(flags), device=flags.device) if self.all_masked else flags.nonzero()[:, 0]

    def entries(self, inside: Tensor) -> tuple[Tensor, Tensor]:
        """Where a table (r, most) has an entry, as rows and columns (P,); everywhere where they are not counted."""
        if not self.all_masked:
            return inside.nonzero(as_tuple=True)
        place = torch.arange(inside.numel(), device=inside.device)
        return place // inside.shape[1], place % inside.shape[1]

    def edges(self, row: Tensor, key: Tensor, keep: Tensor) -> Tensor:
        """The edges that are kept, of tables that broadcast; where they are not counted the others are nobody's."""
        m = self.z.shape[1]
        edge = (row * m + key).expand(keep.shape)
        return torch.where(keep, edge, len(self.w) * m).flatten() if self.all_masked else edge[keep]

    def bound(self, mean: Tensor, highest: float) -> int:
        """What no Poisson number of these means is above, twelve standard deviations; without reading them, from the
        highest that they can be.
        """
        if self.all_masked:
            return int(highest + 12 * highest**0.5 + 64)
        return int((mean + 12 * mean.sqrt() + 64).max())


def _looked(rows: _Rows, rules: Rules) -> Iterator[Tensor]:
    """Bernoulli(p) for every pair of a dense row."""
    if rules.sampler == "fastrg" or (not rows.all_masked and not bool(rows.dense.any())):
        return
    graphs, m = rows.real.shape
    w, stream, dense, end = (x.unflatten(0, (graphs, -1)) for x in (rows.w, rows.stream, rows.dense, rows.end))
    n, key, number = w.shape[1], torch.arange(m, device=w.device), torch.arange(len(rows.w), device=w.device)
    for t, some, seen in blocks(graphs, n, m, rules.causal and not rows.all_masked):
        p = w[t, some] @ rows.z[t, seen].mT  # (graphs, rows, keys) of the block
        u = chances(stream[t, some, None], rows.rank[t, None, seen])
        yes = (u < p + rules.exploration * (1 - p)) & dense[t, some, None] & rows.real[t, None, seen]
        row = number.view(graphs, n)[t, some, None]
        yield rows.edges(row, key[seen], yes & (key[seen] < end[t, some, None]))


def _jumped(rows: _Rows, rules: Rules, proposed: Tensor) -> Iterator[Tensor]:
    """Rows that jump from key to key by a bound of their probabilities."""
    chosen = rows.chosen(rows.jumped)
    if rules.sampler != "exact" or not len(chosen):
        return
    most = rows.bound(rows.chance[chosen] * rows.visible[chosen], limits.THIN * rows.z.shape[1])
    for some in chosen.split(max(1, HELD // max(most, rows.w.shape[1]))):
        row, key, met, count = _jumps(rows, some, rows.chance[some], 1, most)
        proposed[some] += count * rows.jumped[some]
        p = (rows.w[row] * rows.z[rows.graph[row], key]).sum(-1)
        u = chances(rows.stream[row], rows.rank[rows.graph[row], key]).double() * rows.chance[row]
        yield rows.edges(row, key, met & rows.jumped[row] & (u < p + rules.exploration * (1 - p)))


def _walked(rows: _Rows, rules: Rules, proposed: Tensor) -> Iterator[Tensor]:
    """The other rows: points of the walk, and exploration. Fills in `proposed` (R,)."""
    walks = ~rows.dense & ~rows.jumped
    chosen = rows.chosen(walks)
    if rules.sampler == "bernoulli" or not len(chosen):
        return
    m, upto = rows.z.shape[1], torch.nn.functional.pad(rows.z.mT.cumsum(2), (1, 0))  # (g, k, m + 1)
    most = rows.bound(rows.points[chosen], limits.SWITCH * m if rules.sampler == "exact" else m)
    mean = rules.exploration * rows.visible[chosen].double()
    explored = rows.bound(mean, rules.exploration * m) if rules.exploration else 0
    for some in chosen.split(max(1, HELD // max(most, explored, rows.w.shape[1]))):
        row, key, stays, count = _points(rows, rules, some, upto, most)
        proposed[some] += count * walks[some]
        yield rows.edges(row, key, stays & walks[row])
        if explored:  # with the random numbers behind the points
            chance = torch.full_like(rows.chance[some], rules.exploration)
            row, key, met, _ = _jumps(rows, some, chance, count[:, None] + 2, explored)
            yield rows.edges(row, key, met & walks[row])


def _pinned(rows: _Rows, rules: Rules) -> Iterator[Tensor]:
    """Edges |i - j| ≤ reach."""
    if rules.reach < 0:
        return
    steps = torch.arange(-rules.reach, rules.reach + 1, device=rows.place.device)
    for some in torch.arange(len(rows.w), device=steps.device).split(max(1, HELD // len(steps))):
        key = rows.place[some][:, None] + steps
        inside = (key >= 0) & (key < rows.end[some][:, None])
        key = key.clamp(0, rows.z.shape[1] - 1)
        yield rows.edges(some[:, None], key, inside & rows.real[rows.graph[some][:, None], key])


def _points(rows: _Rows, rules: Rules, some: Tensor, upto: Tensor, most: int) -> tuple[Tensor, ...]:
    """Rows and keys of the points and whether they stay, (P,) each, and how many points a row has, (r,)."""
    graph, end = rows.graph[some], rows.end[some]
    slope = rows.boost[some][:, None] * rows.w[some]  # (r, k)
    length = slope * upto[graph, :, end]  # (r, k): the cluster's share of the walk
    ends = length.cumsum(1)
    gaps = -torch.log(uniforms(rows.stream[some][:, None], torch.arange(1, most + 1, device=some.device)))
    at = gaps.cumsum(1)  # (r, most)
    inside = at < ends[:, -1:]
    r, e = rows.entries(inside)
    cluster = torch.searchsorted(ends, at, right=True)[r, e].clamp(max=slope.shape[1] - 1)  # (P,)
    x = (at[r, e] - ends[r, cluster] + length[r, cluster]) / slope[r, cluster]  # the place in the cluster
    sums, line = upto.flatten(0, 1), graph[r] * upto.shape[1] + cluster
    key = torch.minimum(_search(sums, line, x), end[r] - 1)
    stays = inside[r, e] & (sums[line, key + 1] > sums[line, key])  # (rounding could end on a key that has no share)
    if rules.sampler == "exact":  # u ≤ p / (1 - exp(-c·p)), u belongs to the pair
        p, boost = (rows.w[some[r]] * rows.z[graph[r], key]).sum(-1), rows.boost[some[r]]
        u = chances(rows.stream[some[r]], rows.rank[graph[r], key]).double()
        stays &= (u * boost <= 1) | (u * -torch.expm1(-boost * p) <= p)
    return some[r], key, stays, inside.sum(1)


def _search(sums: Tensor, line: Tensor, x: Tensor) -> Tensor:
    """The last place j with sums[line, j] ≤ x, before the end of the line; sums never fall. By halves."""
    last = sums.shape[1] - 2
    j = torch.zeros_like(line)
    for bit in reversed(range(max(1, last).bit_length())):
        further = (j + (1 << bit)).clamp(max=last)
        j = torch.where(sums[line, further] <= x, further, j)
    return j


def _jumps(rows: _Rows, some: Tensor, chance: Tensor, first: Tensor | int, most: int) -> tuple[Tensor, ...]:
    """Every visible key with a probability (r,): jumps from one to the next, with the random numbers from `first` on.

    Rows and keys, and whether they were met, (P,) each, and how many were met in a row, (r,).
    """
    step = torch.arange(most, device=some.device)
    u = uniforms(rows.stream[some][:, None], step + first)  # (r, most)
    number = (torch.log(u) / torch.log1p(-chance)[:, None]).floor().cumsum(1) + step  # of a visible key
    inside = number < rows.visible[some][:, None]
    r, e = rows.entries(inside)
    listed = (~rows.real).byte().argsort(dim=1, stable=True)  # (g, m): the real keys, ascending, then the others
    key = listed[rows.graph[some[r]], number[r, e].clamp(max=listed.shape[1] - 1).long()]
    return some[r], key, inside[r, e], inside.sum(1)
