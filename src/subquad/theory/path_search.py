"""Heuristic search for a Hamiltonian path. What it returns is a path; that it returns None says nothing.

Two searches. Where every edge goes both ways: grow a path to the neighbour with the fewest free neighbours
(Warnsdorff); stuck, turn a piece of the path over to get another end (Pósa). For any graph: cover it with cycles by a
matching, an extra token joined to everyone making cycles of paths, and melt cycles together two at a time,
exchanging a → a', b → b' for a → b', b → a' (Karp's patching).
"""

from __future__ import annotations

import numba
import numpy as np

from subquad.theory.hops import pack, unpack
from subquad.theory.path_proofs import matching
from subquad.theory.sets import Family

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
            return None  # not even a cover by paths; `path_proofs.no_cover` says so
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
