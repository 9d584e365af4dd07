"""Random rows of edges, in Numba: in parallel, each row from a random stream of its own."""

from __future__ import annotations

import math

import numba
import numpy as np

from subquad.core.hashing import GAMMA, chance, halves, mix
from subquad.kernels.bits import lowest
from subquad.kernels.gathers import fetch_ahead
from subquad.kernels.masks import pack
from subquad.kernels.parallel import FAST, launch, run

_inline = numba.njit(error_model="numpy")  # exact arithmetic: a mistake of one ulp could move an edge
_fast = numba.njit(error_model="numpy", fastmath=FAST)
_kernel = numba.njit(error_model="numpy", parallel=True, cache=True, fastmath=FAST)
_POINTS = 256  # points of a row that are settled together
_SLACK = 4e-6  # what rounding may add to a sum of products ≤ 1
_ROWS = 64  # rows of a task: enough for their edges to be predictable in number, few enough to balance the threads


# ---- random numbers -------------------------------------------------------------------------------------------------


@_inline
def _uniform(state):
    """In (0, 1], so that its logarithm is finite. The caller advances the state by GAMMA."""
    return (np.float64(mix(state) >> np.uint64(11)) + 1.0) * 2.0**-53


# ---- a set of keys that comes out ascending -------------------------------------------------------------------------


@_inline
def _lowest(x):
    """The number of the lowest bit that is set, read from the exponent of a float."""
    return (np.float64(x & (~x + np.uint64(1))).view(np.int64) >> 52) - 1023


@_inline
def _add(words, summary, j):
    words[j >> 6] |= np.uint64(1) << np.uint64(j & 63)
    summary[j >> 12] |= np.uint64(1) << np.uint64((j >> 6) & 63)


@_inline
def _empty(words, summary, out):
    """Take everything out, ascending; returns how many. Two levels: linear in what is inside for any real length."""
    count = 0
    for s in range(summary.size):
        while summary[s]:
            at = s * 64 + _lowest(summary[s])
            summary[s] &= summary[s] - np.uint64(1)
            bits, words[at] = words[at], np.uint64(0)
            while bits:
                out[count] = at * 64 + _lowest(bits)
                bits &= bits - np.uint64(1)
                count += 1
    return count


# ---- rows -----------------------------------------------------------------------------------------------------------


@_fast
def _dot(x, y):
    total = x.dtype.type(0)
    for v in range(x.size):
        total += x[v] * y[v]
    return total


# ---- most pairs are decided without their p -------------------------------------------------------------------------


@_inline
def _sift(w, z, bounds, real, rank, end, exploration, stream, marks, unsure):
    """marks[j] = 1 where key j < end is drawn, by the random numbers of `compare`.

    p_j = w·z_j is nearly a sum: w·z̄ + w̄·(z_j - z̄) ± |w - w̄|·|z_j - z̄|, by Cauchy and Schwarz. `bounds` are these four
    terms. A random number outside of them decides by itself; p is computed for the others alone.
    """
    middle, width, along, wide = bounds
    a, b = halves(stream)
    one, delta, slack = w.dtype.type(1), w.dtype.type(exploration), w.dtype.type(_SLACK)
    for j in range(end):
        u = chance(a, b, rank[j])
        p, error = middle + along[j], width * wide[j] + slack
        low, high = p - error, p + error
        yes = u < low + delta * (one - low)
        marks[j] = real[j] & yes
        unsure[j] = real[j] & (yes ^ (u < high + delta * (one - high)))
    some = unsure.view(np.uint64)
    for c in range(some.size):
        if some[c] != 0:
            for j in range(8 * c, 8 * c + 8):
                if unsure[j]:
                    p = _dot(w, z[j])
                    marks[j] = chance(a, b, rank[j]) < p + delta * (one - p)
                    unsure[j] = 0


@_inline
def _propose(w, z, upto, guide, scale, tops, end, rank, boost, state, thin, points, words, summary):
    """A unit-rate Poisson process along the row's intensity, cluster after cluster; returns state and number.

    `gap` is the way from the start of a cluster to the next point. Points are settled by the hundred.
    """
    cluster, place = points
    count, waiting, stream = 0, 0, state
    state += GAMMA
    gap = -math.log(_uniform(state))
    for v in range(w.size):
        slope = boost * w[v]
        length = slope * tops[v]
        while gap < length:
            if waiting == cluster.size:
                _settle(w, z, upto, guide, scale, end, rank, boost, stream, thin, cluster, place, words, summary)
                waiting = 0
            cluster[waiting], place[waiting] = v, gap / slope
            waiting += 1
            count += 1
            state += GAMMA
            gap -= math.log(_uniform(state))
        gap -= length
    cluster, place = cluster[:waiting], place[:waiting]
    _settle(w, z, upto, guide, scale, end, rank, boost, stream, thin, cluster, place, words, summary)
    return state, count


@_inline
def _settle(w, z, upto, guide, scale, end, rank, boost, stream, thin, cluster, place, words, summary):
    """Find the keys of some points and add those that stay: u ≤ p / (1 - exp(-c·p)).

    One thing at a time for all points, so that the processor waits for many cache lines at once. u belongs to the pair:
    the points of an edge agree, as if they had been merged before. The right side is ≥ 1 / c: p is seldom needed.
    """
    keys, size = np.empty(cluster.size, np.int32), guide.shape[1]
    for e in range(cluster.size):
        keys[e] = min(size - 1, int(place[e] * scale[cluster[e]]))
        fetch_ahead(guide.ctypes.data + (cluster[e] * size + keys[e]) * guide.itemsize)
    for e in range(cluster.size):
        keys[e] = guide[cluster[e], keys[e]]
        fetch_ahead(upto.ctypes.data + (cluster[e] * upto.shape[1] + keys[e]) * upto.itemsize)
    for e in range(cluster.size):
        v, j = cluster[e], min(keys[e], end - 1)
        while j > 0 and upto[v, j] > place[e]:
            j -= 1
        while j < end - 1 and upto[v, j + 1] <= place[e]:
            j += 1
        keys[e] = j if upto[v, j + 1] > upto[v, j] else -1  # (rounding could end on a last key that has no share)
    a, b = halves(stream)
    for e in range(cluster.size):
        if keys[e] < 0:
            continue
        u = np.float64(chance(a, b, rank[keys[e]])) if thin else 0.0
        if u * boost > 1.0:
            p = _dot(w, z[keys[e]])
            if u * -math.expm1(-boost * p) > p:
                continue
        _add(words, summary, keys[e])


@_inline
def _explore(listed, visible, exploration, state, words, summary):
    """Every visible key with probability δ: jump from one to the next."""
    stay, r = math.log1p(-exploration), 0.0
    while True:
        state += GAMMA
        r += math.floor(math.log(_uniform(state)) / stay)
        if r >= visible:
            return
        _add(words, summary, listed[int(r)])
        r += 1.0


@_inline
def _jump(w, z, bounds, rank, listed, visible, top, exploration, state, keys):
    """Every visible key with probability `top`, which no edge is above: jump from one to the next, and keep what is met
    with probability P(edge) / top. Fills in keys, ascending; returns how many, and how many were met.

    As in `_sift`, most are decided by the bounds of p.
    """
    (middle, width, along, wide), (a, b) = bounds, halves(state)
    stay, r, met, kept = math.log1p(-top), 0.0, 0, 0
    while True:
        state += GAMMA
        r += math.floor(math.log(_uniform(state)) / stay)
        if r >= visible:
            break
        keys[met] = listed[int(r)]
        met += 1
        r += 1.0
    for e in range(met):
        j = keys[e]
        u = np.float64(chance(a, b, rank[j])) * top
        p, error = np.float64(middle + along[j]), np.float64(width * wide[j]) + _SLACK
        low, high = p - error, p + error
        stays = u < low + exploration * (1 - low)
        if not stays and u < high + exploration * (1 - high):
            p = np.float64(_dot(w, z[j]))
            stays = u < p + exploration * (1 - p)
        if stays:
            keys[kept] = j
            kept += 1
    return kept, met


@_inline
def _look(w, z, bounds, real, rank, i, end, exploration, reach, stream, marks, unsure, keys):
    """A dense row: every key, with the same random numbers as `compare`. Fills in keys, returns how many."""
    _sift(w, z, bounds, real, rank, end, exploration, stream, marks, unsure)
    for j in range(max(0, i - reach), min(end, i + reach + 1)):
        marks[j] = real[j]
    some, count = marks.view(np.uint64), 0
    for c in range(some.size):
        left = (some[c] * np.uint64(0x0102040810204080)) >> np.uint64(56)  # eight marks as bits, see `pack`
        while left != 0:
            keys[count] = np.int32(8 * c + np.intp(lowest(left)))
            left &= left - np.uint64(1)
            count += 1
    marks[:end] = 0
    return count


@_inline
def _pin(i, end, reach, real, words, summary):
    for j in range(max(0, i - reach), min(end, i + reach + 1)):
        if real[j]:
            _add(words, summary, j)


@_kernel
def _draw(tasks, workers, chosen, places, where, starts, buffer, degrees, proposed):
    w, z, upto, guide, scale, (boost, tops_of_p), (dense, jumped, left), streams_, near = chosen
    along_w, apart_w, along_z, apart_z = near
    real, rank, listed, visible = places
    first_graph, heads, causal, exploration, reach, thin = where
    n, m = w.shape[1], z.shape[1]
    blocks = (n + _ROWS - 1) // _ROWS
    for worker in numba.prange(workers):
        words, summary = np.zeros((m >> 6) + 1, np.uint64), np.zeros((m >> 12) + 1, np.uint64)
        keys, points = np.empty(m, np.int32), (np.empty(_POINTS, np.int32), np.empty(_POINTS))
        marks, unsure = np.zeros((m + 7) // 8 * 8, np.uint8), np.zeros((m + 7) // 8 * 8, np.uint8)
        for task in range(worker, tasks, workers):
            t, row = task // blocks, task % blocks * _ROWS
            u, at, tops = (first_graph + t) // heads, starts[task], upto[t, :, m].copy()
            for i in range(row, min(n, row + _ROWS)):
                if left[t, i]:
                    continue
                x, state, end = w[t, i], streams_[t, i], i + 1 if causal else m
                if jumped[t, i]:
                    bounds = (along_w[t, i], apart_w[t, i], along_z[t], apart_z[t])
                    seen = (rank[u], listed[u], visible[u, i], tops_of_p[t, i], exploration)
                    count, met = _jump(x, z[t], bounds, *seen, state, keys)
                    proposed[task] += met
                    if reach >= 0:
                        for e in range(count):
                            _add(words, summary, keys[e])
                        _pin(i, end, reach, real[u], words, summary)
                        count = _empty(words, summary, keys)
                elif dense[t, i]:
                    bounds = (along_w[t, i], apart_w[t, i], along_z[t], apart_z[t])
                    about = (i, end, exploration, reach, state, marks, unsure, keys)
                    count = _look(x, z[t], bounds, real[u], rank[u], *about)
                else:
                    if causal:
                        tops[:] = upto[t, :, end]
                    table = (z[t], upto[t], guide[t], scale[t], tops, end, rank[u])
                    state, count = _propose(x, *table, boost[t, i], state, thin, points, words, summary)
                    proposed[task] += count
                    if exploration > 0:
                        _explore(listed[u], visible[u, i], exploration, state, words, summary)
                    _pin(i, end, reach, real[u], words, summary)
                    count = _empty(words, summary, keys)
                degrees[t, i] = count
                room = min(count, starts[task + 1] - at)
                buffer[at : at + room] = keys[:room]
                at += count


@_kernel
def _join(starts, buffer, ends, out):
    for task in numba.prange(len(ends) - 1):
        size = ends[task + 1] - ends[task]
        out[ends[task] : ends[task + 1]] = buffer[starts[task] : starts[task] + size]


def draw(chosen, places, where, expected: np.ndarray, degrees: np.ndarray, proposed: np.ndarray) -> np.ndarray:
    """The edges of some graphs, row after row; fills in degrees (g, n) and proposed (g,), returns the keys (E,).

    A task's edges go to a buffer of their expected number and twelve standard deviations (never reached in practice,
    and checked), and from there to the list.
    """
    graphs, n = degrees.shape
    cuts = np.arange(0, n, _ROWS)
    mean = np.add.reduceat(expected, cuts, axis=1).reshape(-1)  # (tasks,)
    room = np.ceil(mean + 12 * np.sqrt(mean) + 64).astype(np.int64)
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(room)))
    buffer, counts = np.empty(starts[-1], np.int32), np.zeros(len(mean), np.int64)
    with launch() as workers:
        _draw(len(mean), workers, chosen, places, where, starts, buffer, degrees, counts)
    proposed += counts.reshape(graphs, -1).sum(1)
    sizes = np.add.reduceat(degrees, cuts, axis=1).reshape(-1)
    if (sizes > room).any():
        raise RuntimeError("more edges were sampled than twelve standard deviations allow: are w and z finite and ≥ 0?")
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    out = np.empty(ends[-1], np.int32)
    run(_join, starts, buffer, ends, out)
    return out


@_kernel
def compare(p, flags, streams_, real, rank, where, bits, degrees):
    """Bernoulli(p) for a block of rows: p (g, rows, keys) → bits (g, rows, ⌈m / 8⌉), where flags (g, rows) says so."""
    first_graph, heads, first, causal, exploration, reach = where
    graphs, rows, width = p.shape
    one, delta = p.dtype.type(1), p.dtype.type(exploration)
    for task in numba.prange(graphs * rows):
        t, r = task // rows, task % rows
        if flags[t, r]:
            i, u = first + r, (first_graph + t) // heads
            end = i + 1 if causal else width
            a, b = halves(streams_[t, r])
            row, seen, place = p[t, r], real[u], rank[u]
            marks = np.zeros(8 * bits.shape[2], np.uint8)
            for j in range(end):
                marks[j] = seen[j] & (chance(a, b, place[j]) < row[j] + delta * (one - row[j]))
            for j in range(max(0, i - reach), min(end, i + reach + 1)):
                marks[j] = seen[j]
            pack(marks, bits[t, r])
            count = np.int32(0)
            for j in range(end):
                count += np.int32(marks[j])
            degrees[t, r] = count


@_kernel
def sieve(w, z, near, flags, streams_, real, rank, where, bits, degrees):
    """`compare` without p, by bounds (`_sift`): w (g, n, k) → bits (g, n, ⌈m / 8⌉), where flags (g, n) says so."""
    along_w, apart_w, along_z, apart_z = near
    heads, exploration, reach = where
    n, m = w.shape[1], z.shape[1]
    for task in numba.prange(w.shape[0] * n):
        t, i = task // n, task % n
        if flags[t, i]:
            seen, place = real[t // heads], rank[t // heads]
            marks, unsure = np.zeros(8 * bits.shape[2], np.uint8), np.zeros(8 * bits.shape[2], np.uint8)
            bounds = (along_w[t, i], apart_w[t, i], along_z[t], apart_z[t])
            _sift(w[t, i], z[t], bounds, seen, place, m, exploration, streams_[t, i], marks, unsure)
            for j in range(max(0, i - reach), min(m, i + reach + 1)):
                marks[j] = seen[j]
            pack(marks, bits[t, i])
            count = np.int32(0)
            for j in range(m):
                count += np.int32(marks[j])
            degrees[t, i] = count


@_kernel
def fill(indptr, indices, masked, bits):
    """Write the masked rows (g, n) of a list into packed masks (g, n, ⌈m / 8⌉)."""
    for t in numba.prange(bits.shape[0]):
        for i in range(bits.shape[1]):
            for e in range(indptr[t, i], indptr[t, i + 1] if masked[t, i] else indptr[t, i]):
                bits[t, i, indices[e] >> 3] |= np.uint8(1 << (indices[e] & 7))
