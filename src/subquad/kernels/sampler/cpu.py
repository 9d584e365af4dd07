"""The sampler on a CPU: row by row, which algorithm 1 allows.

Its Poisson number of edges over all rows is a sum of independent Poisson numbers, one per row. The intensity of a row
is laid out on a line, cluster after cluster and key after key, and one unit-rate Poisson process walks along it: m of
line 4, V of line 7 and J of line 9 from a single random number per edge (U is summed out in W). A row uses the keys it
may see and a random stream of its own, so in causal mode later tokens cannot even change which of the equally likely
graphs is drawn. What rows are drawn from stands at the end: random streams, rates, search tables and bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.core.hashing import ranks, stream
from subquad.kernels.masks import blocks, product, scratch
from subquad.kernels.parallel import kernel, run
from subquad.kernels.sampler import rows as loops
from subquad.kernels.sampler import rules as limits
from subquad.kernels.sampler.rules import Rules, refuse

TABLE = 2**21  # entries of the search tables that are held at a time


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
    rules = Rules(sampler, causal, exploration, reach, crossover, alike)
    (batch, heads, n, _), m = w.shape, z.shape[2]
    real = w.new_ones(batch, m, dtype=torch.bool) if key_mask is None else key_mask
    z = z if key_mask is None else z * real[:, None, :, None]
    x, y = (a.flatten(0, 1).contiguous() for a in (w, z))  # (B·H, n, k), (B·H, m, k)
    keys = _Keys.of(real, heads, n, causal)
    plan = _Plan.of(x.numpy(), y.numpy(), keys, rules, int(seed))
    masked = plan.masked(keys, rules)
    degrees, mask = np.zeros((len(x), n), np.int64), np.empty(0, np.uint8)
    near = _Near.of(x, y, rules.causal, needed=bool((plan.dense | plan.jumped).any()))
    indices = _drawn_rows(x.numpy(), y.numpy(), keys, plan, near, rules, masked, degrees)
    if masked.any():
        mask = np.zeros((len(x), n, -(-m // 8)), np.uint8)
        run(loops.fill, _offsets(degrees), indices, masked, mask)
        indices = indices[:0] if masked.all() else indices[np.repeat(~masked.reshape(-1), degrees.reshape(-1))]
        _dense_rows(x, y, keys, plan, near, rules, masked, mask, degrees)
    counts = np.stack((plan.dense.sum(1), plan.proposed), 1)
    arrays = (_offsets(np.where(masked, 0, degrees)), indices, mask.reshape(-1), degrees, counts)
    return tuple(map(torch.from_numpy, arrays))


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
        upto = real.cumsum(1)  # (B, m)
        listed = (~real).byte().argsort(dim=1, stable=True)
        visible = upto if causal else upto[:, -1:].expand(-1, n)
        ids, rank = ranks(real, len(real), n, real.shape[1], real.device)
        arrays = (real, rank.int(), listed.int(), visible, ids)
        return cls(*(a.contiguous().numpy() for a in arrays), heads)


@dataclass(frozen=True)
class _Plan:
    """How each row is drawn; arrays are (B·H, n)."""

    boost: np.ndarray  # float64: c_i
    chance: np.ndarray  # float64: b_i, with exploration: what no edge of the row is more likely than
    expected: np.ndarray  # float64: edges to make room for, duplicates counted
    dense: np.ndarray  # bool: look at every key
    jumped: np.ndarray  # bool: jump from key to key by b_i
    streams: np.ndarray  # uint64: the random stream
    proposed: np.ndarray  # (B·H,) int64: filled in as rows are drawn

    @classmethod
    def of(cls, w: np.ndarray, z: np.ndarray, keys: _Keys, rules: Rules, seed: int) -> _Plan:
        rate, bound = (np.empty(w.shape[:2]) for _ in range(2))  # Σ_j p_ij, and what no p_ij is above
        run(_rates, w, z, rules.causal, rate, bound)
        if not np.isfinite(rate).all():
            raise refuse("k" if np.isfinite(w).all() else "q")
        visible = np.repeat(keys.visible, keys.heads, 0)  # (B·H, n)
        boost, dense = np.ones_like(rate), np.full(rate.shape, rules.sampler == "bernoulli")
        jumped, b = np.zeros(rate.shape, bool), np.clip(bound, 1e-9, 1 - 1e-9)
        chance = b + rules.exploration * (1 - b)
        if rules.sampler == "exact":
            boost = -np.log1p(-b) / b
            jumped = (chance <= limits.THIN) & (chance * visible <= limits.LOOSE * boost * rate)
            dense = ~jumped & (boost * rate > limits.SWITCH * visible)
        extra = rules.exploration * visible + np.minimum(visible, max(0, 2 * rules.reach + 1))
        expected = np.minimum(np.where(dense | jumped, 1.0, boost) * rate + extra, visible)
        streams = np.empty(rate.shape, np.uint64)
        period = keys.heads if rules.alike else len(w)
        run(_streams, np.uint64(seed % 2**64), keys.ids, keys.heads, period, streams)
        return cls(boost, chance, expected, dense, jumped, streams, np.zeros(len(w), np.int64))

    def masked(self, keys: _Keys, rules: Rules) -> np.ndarray:
        """(B·H, n) bool: the rows that go to the mask; see `Sample`."""
        if not 0 <= rules.crossover < 1 or keys.real.shape[1] <= limits.SMALL:
            return np.full(self.dense.shape, rules.crossover < 1)
        possible = np.repeat(keys.visible, keys.heads, 0)  # (B·H, n)
        if rules.causal:
            return self.expected > rules.crossover * possible
        return np.full(self.dense.shape, self.expected.sum() > rules.crossover * possible.sum())


class _Near(NamedTuple):
    """p is nearly a sum: the terms of `loops._sift`, (B·H, n) of the queries and (B·H, m) of the keys."""

    along_w: np.ndarray  # w_i·z̄
    apart_w: np.ndarray  # |w_i - w̄|
    along_z: np.ndarray  # w̄·(z_j - z̄)
    apart_z: np.ndarray  # |z_j - z̄|

    @classmethod
    def of(cls, w: Tensor, z: Tensor, causal: bool, *, needed: bool) -> _Near:
        """In causal mode a row must not know the means of all: its bounds say nothing, and every p is computed."""
        if causal or not needed:
            sizes = [x.shape[:2] if needed else (len(x), 0) for x in (w, w, z, z)]
            return cls(
                *(np.full(size, apart, w.numpy().dtype) for size, apart in zip(sizes, (0, 1e3, 0, 1), strict=True))
            )
        centres, terms = (w.mean(1), z.mean(1)), []  # (B·H, k): w̄, z̄
        for x, (own, other) in ((w, centres), (z, centres[::-1])):
            along, distance = (np.empty(x.shape[:2], x.numpy().dtype) for _ in range(2))
            run(_apart, x.numpy(), own.numpy(), other.numpy(), along, distance)
            terms += [along, distance]
        terms[2] -= (centres[0] * centres[1]).sum(1, keepdim=True).numpy()
        return cls(*terms)

    @property
    def open(self) -> float:
        """About the share of pairs that the bounds leave open."""
        return 2 * float((self.apart_w.mean(1) * self.apart_z.mean(1)).mean())


def _dense_rows(
    w: Tensor, z: Tensor, keys: _Keys, plan: _Plan, near: _Near, rules: Rules, masked, mask, degrees
) -> None:
    """The masked rows of `plan.dense` into the packed mask: by bounds, or whole blocks of p at a time."""
    every = plan.dense & masked
    if not every.any():
        return
    if near.open <= limits.OPEN:
        where = (keys.heads, rules.exploration, rules.reach)
        given = (w.numpy(), z.numpy(), tuple(near), every, plan.streams, keys.real, keys.rank)
        run(loops.sieve, *given, where, mask, degrees)
        return
    buffer = scratch(w, len(w), w.shape[1], z.shape[1])
    for t, rows, seen in blocks(len(w), w.shape[1], z.shape[1], rules.causal):
        flags = every[t, rows]
        if flags.any():
            p = product(w[t, rows], z[t, seen].mT, buffer).numpy()
            where = (t.start, keys.heads, rows.start, rules.causal, rules.exploration, rules.reach)
            drawn = mask[t, rows], degrees[t, rows]
            run(loops.compare, p, flags, plan.streams[t, rows], keys.real, keys.rank, where, *drawn)


def _drawn_rows(w, z, keys: _Keys, plan: _Plan, near: _Near, rules: Rules, masked, degrees: np.ndarray) -> np.ndarray:
    """All rows but those left to `_dense_rows`: keys (E,), row after row. Groups of graphs bound the search tables."""
    pieces = [np.empty(0, np.int32)]
    step = max(1, TABLE // (z.shape[1] * z.shape[2]))
    for t in range(0, len(w), step):
        group = slice(t, t + step)
        dense, jumped, left = plan.dense[group], plan.jumped[group], plan.dense[group] & masked[group]
        if not left.all():
            search = _tables(z[group], needed=not (dense | jumped).all())
            bounds, rates = tuple(x[group] for x in near), (plan.boost[group], plan.chance[group])
            chosen = (w[group], z[group], *search, rates, (dense, jumped, left), plan.streams[group], bounds)
            places = (keys.real, keys.rank, keys.listed, keys.visible)
            thin = rules.sampler == "exact"
            where = (t, keys.heads, rules.causal, rules.exploration, rules.reach, thin)
            expected = plan.expected[group] * ~left
            pieces.append(loops.draw(chosen, places, where, expected, degrees[group], plan.proposed[group]))
    return pieces[1] if len(pieces) == 2 else np.concatenate(pieces)


def _offsets(degrees: np.ndarray) -> np.ndarray:
    """(B·H, n) degrees → (B·H, n + 1) offsets into one list."""
    ends = np.cumsum(degrees).reshape(degrees.shape)
    return np.concatenate((ends[:, :1] - degrees[:, :1], ends), 1)


# ---- what rows are drawn from ---------------------------------------------------------------------------------


@kernel
def _streams(seed, ids, heads, period, out):
    """The start of every row's stream, (B·H, n) uint64, from ids (B, n); graphs t and t + period share theirs."""
    for t in numba.prange(out.shape[0]):
        for i in range(out.shape[1]):
            out[t, i] = stream(seed, t % period, ids[t // heads, i])


@kernel
def _rates(w, z, causal, rate, bound):
    """Σ_j p_ij and Σ_v W_iv max_j Z_jv ≥ max_j p_ij, over the keys that row i may see."""
    for t in numba.prange(w.shape[0]):
        total, top = np.zeros(w.shape[2]), np.zeros(w.shape[2])
        if not causal:
            for j in range(z.shape[1]):
                for v in range(w.shape[2]):
                    total[v] += z[t, j, v]
                    top[v] = max(top[v], z[t, j, v])
        for i in range(w.shape[1]):
            s = b = 0.0
            for v in range(w.shape[2]):
                if causal:
                    total[v] += z[t, i, v]
                    top[v] = max(top[v], z[t, i, v])
                s += w[t, i, v] * total[v]
                b += w[t, i, v] * top[v]
            rate[t, i], bound[t, i] = s, b


@kernel
def _fill_tables(z, upto, guide, scale):
    """Prefix sums over the keys and where to start searching them; see `_tables`."""
    (m, k), size = z.shape[1:], guide.shape[2]
    chunks = (k + 15) // 16  # clusters of a task: a cache line of z
    for task in numba.prange(z.shape[0] * chunks):
        t, first = task // chunks, task % chunks * 16
        last = min(k, first + 16)
        total = np.zeros(last - first)
        upto[t, first:last, 0] = 0
        for j in range(m):
            for v in range(first, last):
                total[v - first] += z[t, j, v]
                upto[t, v, j + 1] = total[v - first]
        for v in range(first, last):
            j, part = 0, total[v - first] / size
            scale[t, v] = 1 / part if part > 0 else 0.0
            for g in range(size):
                while j < m - 1 and upto[t, v, j + 1] <= part * g:
                    j += 1
                guide[t, v, g] = j


def _tables(z: np.ndarray, needed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """To find the key at a place of a cluster: z (g, m, k) → upto (g, k, m + 1), guide (g, k, m), scale (g, k).

    Key j of cluster v has the places upto[v, j] ≤ x < upto[v, j + 1]; guide[v, int(x · scale[v])] is where to begin.
    The sums of some keys do not depend on later ones, so that in causal mode the found key does not either.
    """
    graphs, m, k = z.shape
    upto, guide, scale = np.empty((graphs, k, m + 1)), np.empty((graphs, k, m), np.int32), np.empty((graphs, k))
    if needed:
        run(_fill_tables, z, upto, guide, scale)
    return upto, guide, scale


@kernel
def _apart(x, centre, direction, along, distance):
    """x_i·direction and |x_i - centre| of every row: x (g, n, k), centre and direction (g, k) → (g, n)."""
    for t in numba.prange(x.shape[0]):
        for i in range(x.shape[1]):
            row, middle, towards = x[t, i], centre[t], direction[t]
            total = square = x.dtype.type(0)
            for v in range(row.size):
                total += row[v] * towards[v]
                square += (row[v] - middle[v]) * (row[v] - middle[v])
            along[t, i], distance[t, i] = total, math.sqrt(square)
