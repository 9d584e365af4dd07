"""Assumption 1.2: an order γ of the tokens in which each one attends to the one before it.

A Hamiltonian path of the graph with an edge j → k for every j in ∪_l A_k^l. In general the question is NP-complete,
so the answer is one of three, and never a guess: *found*, with the path, checked edge by edge; *impossible*, with the
reason; *undecided*, when neither a path nor a proof turned up. In this order: the identity, which most patterns have;
for n ≤ 20 the exact dynamic programme of Held and Karp; two proofs of impossibility; heuristic search; one more proof.

The proofs are three reasons that are quick to check and easy to say: each function returns the reason as a sentence, or
None where it does not apply. What the heuristic search returns is a path; that it returns None says nothing. It is two
searches. Where every edge goes both ways: grow a path to the neighbour with the fewest free neighbours (Warnsdorff);
stuck, turn a piece of the path over to get another end (Pósa). For any graph: cover it with cycles by a matching, an
extra token joined to everyone making cycles of paths, and melt cycles together two at a time, exchanging a → a', b → b'
for a → b', b → a' (Karp's patching).
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from subquad.theory.hops import closure, pack, unpack
from subquad.theory.sets import Family

EXACT = 20  # 2^20 · 20 steps take milliseconds


@dataclass(frozen=True, eq=False)
class Path:
    """γ(0) → γ(1) → … if status is "found"; why says how it was found or why there is none."""

    status: str  # "found", "impossible" or "undecided"
    order: np.ndarray | None
    why: str

    @property
    def identity(self) -> bool:
        return self.order is not None and bool((self.order == np.arange(len(self.order))).all())


def hamiltonian_path(family: Family, seed: int = 0) -> Path:
    """γ for the union of the families, or why there is none, or that we do not know."""
    n = family.n
    if is_path(family, np.arange(n)):
        return Path("found", np.arange(n), "the identity: every token attends to the one before it")
    if n <= EXACT:
        order = exact(family)
        if order is None:
            return Path("impossible", None, "an exhaustive search (Held and Karp) finds no order")
        return Path("found", order, "by exhaustive search (Held and Karp)")
    reason = incomparable(family) or no_cover(family)
    if reason:
        return Path("impossible", None, reason)
    order = search(family, seed)
    if order is not None and is_path(family, order):
        return Path("found", order, "by heuristic search, then checked edge by edge")
    reason = cut_vertex(family)
    if reason:
        return Path("impossible", None, reason)
    return Path("undecided", None, "the search found no order and no proof rules one out")


def is_path(family: Family, order: np.ndarray) -> bool:
    """Is `order` a permutation in which every token attends to its predecessor?"""
    if not np.array_equal(np.sort(order), np.arange(family.n)):
        return False
    place = np.empty(family.n, np.int64)
    place[order] = np.arange(family.n)
    rows = family.rows()
    steps = place[rows] - place[family.indices] == 1
    return int(steps.sum()) == family.n - 1


def exact(family: Family) -> np.ndarray | None:
    """Held–Karp for n ≤ 20: ends[M] = the tokens in which a path through exactly the set M can end."""
    if family.n > EXACT:
        raise ValueError(f"the family has {family.n} tokens; the exact search takes at most {EXACT}")
    before = np.zeros(family.n, np.int64)
    np.bitwise_or.at(before, family.rows(), np.int64(1) << family.indices.astype(np.int64))
    ends = _path_ends(before)
    full = (1 << family.n) - 1
    if not ends[full]:
        return None
    order, tokens, last = [], full, int(ends[full])
    while tokens:
        token = (last & -last).bit_length() - 1
        order.append(token)
        tokens ^= 1 << token
        last = int(ends[tokens]) & int(before[token])
    return np.array(order[::-1])


@numba.njit(cache=True)
def _path_ends(before):
    n = len(before)
    ends = np.zeros(1 << n, np.int32)
    for tokens in range(1, 1 << n):
        for k in range(n):
            if (tokens >> k) & 1:
                rest = tokens ^ (1 << k)
                if rest == 0 or ends[rest] & before[k]:
                    ends[tokens] |= 1 << k
    return ends


# ---- proofs that there is none ------------------------------------------------------------------------------


def incomparable(family: Family) -> str | None:
    """Two tokens neither of which reaches the other stand on no common path."""
    reached = unpack(closure(family), family.n)
    apart = np.argwhere(~(reached | reached.T))
    if not len(apart):
        return None
    return "tokens {} and {} do not reach each other in either direction, so no path visits both".format(*apart[0])


def no_cover(family: Family) -> str | None:
    """A path gives all tokens but the first a predecessor of their own, and no token is the predecessor of two."""
    missing = family.n - 1 - int((matching(family)[:-1] < family.n).sum())
    if missing <= 0:
        return None
    return (
        f"a path needs {family.n - 1} edges with different ends and different starts, "
        f"and a maximum matching has only {family.n - 1 - missing}"
    )


def matching(family: Family, order: np.ndarray | None = None) -> np.ndarray:
    """before (n + 1,): for each token the predecessor that a maximum matching gives it; n = the extra token.

    The extra token n is joined to and from everyone and turns a path into a cycle; n + 1 says unmatched. Self-loops do
    not count. `order` is the order in which tokens are served.
    """
    rows = family.rows()
    kept = rows != family.indices
    counts = np.bincount(rows[kept], minlength=family.n)
    indptr = np.concatenate(([0], counts.cumsum()))
    return _match(indptr, family.indices[kept], np.arange(family.n + 1) if order is None else order)


@numba.njit(cache=True)
def _match(indptr, indices, order):
    """Augmenting paths, breadth first, one free token after the other."""
    n = len(indptr) - 1
    nobody = n + 1
    before = np.full(n + 1, nobody, np.int64)  # token -> predecessor
    after = np.full(n + 1, nobody, np.int64)  # predecessor -> token
    seen = np.full(n + 1, -1, np.int64)
    parent = np.empty(n + 1, np.int64)
    queue = np.empty(n + 1, np.int64)
    for start in order:
        queue[0], first, last, found = start, 0, 1, nobody
        while first < last and found == nobody:
            k = queue[first]
            first += 1
            low, high = (0, n) if k == n else (indptr[k], indptr[k + 1] + 1)
            for e in range(low, high):
                j = e if k == n else (n if e == high - 1 else indices[e])
                if seen[j] == start:
                    continue
                seen[j] = start
                parent[j] = k
                if after[j] == nobody:
                    found = j
                    break
                queue[last] = after[j]
                last += 1
        while found != nobody:  # turn the alternating path over
            k = parent[found]
            given = before[k]
            before[k], after[found] = found, k
            found = given if k != start else nobody
    return before


def cut_vertex(family: Family) -> str | None:
    """A path that loses one token falls into at most two pieces."""
    back = family.transposed()
    token = _shatters(family.indptr, family.indices, back.indptr, back.indices)
    if token < 0:
        return None
    return f"without token {token} the rest falls into three or more parts, and a path can join only two through it"


@numba.njit(cache=True)
def _shatters(indptr, indices, back_indptr, back_indices):
    n = len(indptr) - 1
    seen = np.full(n, -1, np.int64)
    queue = np.empty(n, np.int64)
    for cut in range(n):
        parts = 0
        seen[cut] = cut
        for root in range(n):
            if seen[root] == cut:
                continue
            parts += 1
            if parts == 3:
                return cut
            seen[root], queue[0], first, last = cut, root, 0, 1
            while first < last:
                u = queue[first]
                first += 1
                for side in range(2):
                    ptr, ids = (indptr, indices) if side == 0 else (back_indptr, back_indices)
                    for e in range(ptr[u], ptr[u + 1]):
                        if seen[ids[e]] != cut:
                            seen[ids[e]] = cut
                            queue[last] = ids[e]
                            last += 1
    return -1


# ---- heuristic search ---------------------------------------------------------------------------------------

RESTARTS = 12


def search(family: Family, seed: int = 0) -> np.ndarray | None:
    """A Hamiltonian path of the graph with edges j → k for j in A_k, or None."""
    n, generator = family.n, np.random.default_rng(seed)
    sees = unpack(pack(family), n)  # (n, n): row k = A_k
    np.fill_diagonal(sees, False)
    symmetric = bool((sees == sees.T).all())
    joined = np.ones((n + 1, n + 1), dtype=bool)  # joined[j, k]: the edge j → k, with the extra token n
    joined[:n, :n] = sees.T
    for _ in range(RESTARTS):
        if symmetric:
            order = _grow(family.indptr, family.indices, int(generator.integers(2**31)))
            if len(order) == n:
                return order
        before = matching(family, generator.permutation(n + 1))
        if (before > n).any():
            return None  # not even a cover by paths; `no_cover` says so
        order = _patch(joined, before)
        if len(order) == n:
            return order
    return None


@numba.njit(cache=True)
def _patch(joined, before):
    """Melt the cycles of a cover into one; the path that starts after the extra token, short if some cycles remain."""
    n = len(before) - 1
    after = np.empty(n + 1, np.int64)
    for k in range(n + 1):
        after[before[k]] = k
    label, cycles = np.full(n + 1, -1, np.int64), 0
    for k in range(n + 1):
        if label[k] < 0:
            u = k
            while label[u] < 0:
                label[u] = cycles
                u = after[u]
            cycles += 1
    changed = True
    while changed and cycles > 1:
        changed = False
        for a in range(n + 1):
            for b in range(n + 1):
                if label[a] != label[b] and joined[a, after[b]] and joined[b, after[a]]:
                    after[a], after[b] = after[b], after[a]
                    u, old = after[a], label[b]
                    while label[u] == old:  # the cycle of b now hangs behind a
                        label[u] = label[a]
                        u = after[u]
                    cycles -= 1
                    changed = True
    order = np.empty(n, np.int64)
    u, length = after[n], 0
    while u != n:
        order[length] = u
        length += 1
        u = after[u]
    return order[:length]


@numba.njit(cache=True)
def _grow(indptr, indices, seed):
    """Warnsdorff and Pósa on a symmetric graph; the longest path it got."""
    np.random.seed(seed)
    n = len(indptr) - 1
    path, place = np.empty(n, np.int64), np.full(n, -1, np.int64)
    free = indptr[1:] - indptr[:-1]
    length, end, stuck = 0, np.random.randint(n), 0
    while length < n and stuck < 20 * n:
        if place[end] < 0:
            path[length], place[end] = end, length
            length += 1
            for e in range(indptr[end], indptr[end + 1]):
                free[indices[e]] -= 1
        best, ties = -1, 0
        for e in range(indptr[end], indptr[end + 1]):
            j = indices[e]
            if place[j] < 0:
                if best < 0 or free[j] < free[best]:
                    best, ties = j, 1
                elif free[j] == free[best]:
                    ties += 1
                    if np.random.randint(ties) == 0:
                        best = j
        if best >= 0:
            end = best
            continue
        stuck += 1
        pivot = place[indices[np.random.randint(indptr[end], indptr[end + 1])]]
        if stuck % 8 == 0:
            pivot = -1  # the whole path over: grow at the other end
        low, high = pivot + 1, length - 1
        while low < high:
            path[low], path[high] = path[high], path[low]
            low, high = low + 1, high - 1
        for at in range(pivot + 1, length):
            place[path[at]] = at
        end = path[length - 1]
    return path[:length]
