"""Why a graph has no Hamiltonian path: three reasons that are quick to check and easy to say.

Each function returns the reason as a sentence, or None where it does not apply. Edges j → k for j in A_k.
"""

from __future__ import annotations

import numba
import numpy as np

from subquad.theory.hops import closure, unpack
from subquad.theory.sets import Family


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
