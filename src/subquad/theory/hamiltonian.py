"""Assumption 1.2: an order γ of the tokens in which each one attends to the one before it.

A Hamiltonian path of the graph with an edge j → k for every j in ∪_l A_k^l. In general the question is NP-complete,
so the answer is one of three, and never a guess: *found*, with the path, checked edge by edge; *impossible*, with the
reason; *undecided*, when neither a path nor a proof turned up. In this order: the identity, which most patterns have;
for n ≤ 20 the exact dynamic programme of Held and Karp; two proofs of impossibility; heuristic search; one more proof.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from subquad.theory import path_proofs
from subquad.theory.path_search import search
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
    reason = path_proofs.incomparable(family) or path_proofs.no_cover(family)
    if reason:
        return Path("impossible", None, reason)
    order = search(family, seed)
    if order is not None and is_path(family, order):
        return Path("found", order, "by heuristic search, then checked edge by edge")
    reason = path_proofs.cut_vertex(family)
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
