"""Assumption 1.3: after how many layers s does every token see every other, directly or not?

    S_k^1 = A_k^1,      S_k^t = ∪_{j ∈ A_k^{(t-1) mod p + 1}} S_j^{t-1},      s = min {u : S_k^u = [n] for all k}

Row k of a bit matrix is S_k^t, 64 tokens to a word; a layer is an OR of rows along the edges. No set is empty, so a
full matrix stays full and s is well defined. When is it never full? With self-loops in every family the sets only
grow: a round of p layers without change settles it. Causal sets ("every token reaches all earlier ones") repeat with
period p after p·n layers, because a path can wait only where all families have a loop. Sets without loops can go
round for very long; for them the question is decided on the graph of (family, token) pairs before the walk begins:
the matrices fill up exactly if the tokens lie in one strongly connected component whose cycle lengths have gcd p.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numba
import numpy as np

from subquad.theory.sets import Family


@dataclass(frozen=True)
class Hops:
    """s, or None with a witness: the smallest (k, j) such that j is in no S_k^t."""

    steps: int | None
    witness: tuple[int, int] | None = None

    def why(self, causal: bool) -> str:
        whom = "every earlier token" if causal else "every token"
        if self.steps is not None:
            return f"after {self.steps} layer{'s' * (self.steps > 1)} every token sees {whom}"
        if self.witness is not None:
            return "token {} never reaches token {}".format(*self.witness)
        return (
            f"each token sees {whom} at some depth, but at no depth do all of them: the hop sets go round in a circle"
        )


def hops(cycle: tuple[Family, ...], causal: bool = False) -> Hops:
    """The s of Assumption 1.3, or of its causal variant, for families that the layers cycle through."""
    n, p = cycle[0].n, len(cycle)
    grows = all(family.loops().all() for family in cycle)
    ends = grows or causal or _fills(cycle)
    target = _target(n, causal)
    ever, snapshot = np.zeros_like(target), None
    for t, reached in enumerate(hop_sets(cycle), 1):
        if ends and _covers(reached, target):
            return Hops(t)
        ever = reached if grows else ever | reached
        if t % p == 0:
            if snapshot is not None and np.array_equal(snapshot, reached):
                break
            snapshot = reached.copy()
        if t > p * (n + 2) and (causal or not ends):  # every pair that a path joins has been joined by now
            break
    missing = np.argwhere(~unpack(ever, n) & unpack(target, n))
    return Hops(None, (int(missing[0, 0]), int(missing[0, 1])) if len(missing) else None)


def hop_sets(cycle: tuple[Family, ...]) -> Iterator[np.ndarray]:
    """S^1, S^2, … as bits, (n, ⌈n/64⌉) uint64. A yielded array is overwritten by the second one after it."""
    before = pack(cycle[0])
    yield before
    after, t = np.empty_like(before), 1
    while True:
        family = cycle[t % len(cycle)]
        _step(family.indptr, family.indices, before, after)
        before, after, t = after, before, t + 1
        yield before


def pack(family: Family) -> np.ndarray:
    """The sets as bits, (n, ⌈n/64⌉) uint64."""
    bits = np.zeros((family.n, -(-family.n // 64)), np.uint64)
    _set_bits(family.indptr, family.indices, bits)
    return bits


def unpack(bits: np.ndarray, n: int) -> np.ndarray:
    """bool (n, n)."""
    return np.unpackbits(bits.astype("<u8").view(np.uint8), axis=1, bitorder="little", count=n).astype(bool)


def _target(n: int, causal: bool) -> np.ndarray:
    wanted = np.zeros((n, -(-n // 64) * 64), np.uint8)
    wanted[:, :n] = np.tri(n, dtype=np.uint8) if causal else 1
    return np.packbits(wanted, axis=1, bitorder="little").view("<u8").astype(np.uint64)


@numba.njit(cache=True)
def _set_bits(indptr, indices, bits):
    for k in range(len(indptr) - 1):
        for e in range(indptr[k], indptr[k + 1]):
            bits[k, indices[e] >> 6] |= np.uint64(1) << np.uint64(indices[e] & 63)


@numba.njit(cache=True)
def _step(indptr, indices, before, after):
    for k in range(len(indptr) - 1):
        after[k] = 0
        for e in range(indptr[k], indptr[k + 1]):
            row = before[indices[e]]
            for w in range(before.shape[1]):
                after[k, w] |= row[w]


@numba.njit(cache=True)
def _covers(reached, target):
    for k in range(target.shape[0]):
        for w in range(target.shape[1]):
            if target[k, w] & ~reached[k, w]:
                return False
    return True


def closure(family: Family) -> np.ndarray:
    """Everyone that a token reaches in any number of steps, itself included, as bits."""
    bits = pack(family)
    _set_bits(np.arange(family.n + 1), np.arange(family.n, dtype=np.int32), bits)
    while _sweep(family.indptr, family.indices, bits):
        pass
    return bits


@numba.njit(cache=True)
def _sweep(indptr, indices, bits):
    """In place, down and up again: chains along the sequence close in one sweep."""
    n, changed = len(indptr) - 1, False
    for turn in range(2 * n):
        k = turn if turn < n else 2 * n - 1 - turn
        for e in range(indptr[k], indptr[k + 1]):
            row = bits[indices[e]]
            for w in range(bits.shape[1]):
                more = bits[k, w] | row[w]
                changed |= more != bits[k, w]
                bits[k, w] = more
    return changed


# ---- sets without self-loops --------------------------------------------------------------------------------


def _fills(cycle: tuple[Family, ...]) -> bool:
    """Do the sets of a cycle without self-loops become full? Exact, linear in the edges.

    Node (l, k) is token k about to look with family l; its edges lead to (l-1 mod p, j), j in A_k^l. Paths of length
    t that end in (p-1, j) are the members of S^t, so the walk fills up if and only if the nodes (p-1, ·) are
    strongly connected and the lengths of their cycles have greatest common divisor p.
    """
    n, p = cycle[0].n, len(cycle)
    forward = [_layer_edges(cycle[f], n * f, n * ((f - 1) % p)) for f in range(p)]
    tails, heads = (np.concatenate(side) for side in zip(*forward, strict=True))
    root = n * (p - 1)
    ahead = _distances(_csr(tails, heads, n * p), root)
    behind = _distances(_csr(heads, tails, n * p), root)
    if (ahead[root:] < 0).any() or (behind[root:] < 0).any():
        return False
    inside = (ahead >= 0) & (behind >= 0)
    kept = inside[tails] & inside[heads]
    return int(np.gcd.reduce(ahead[tails[kept]] + 1 - ahead[heads[kept]])) == p


def _layer_edges(family: Family, from_: int, to: int) -> tuple[np.ndarray, np.ndarray]:
    return family.rows() + from_, family.indices.astype(np.int64) + to


def _csr(tails: np.ndarray, heads: np.ndarray, size: int) -> Family:
    order = np.argsort(tails, kind="stable")
    counts = np.bincount(tails, minlength=size)
    return Family(np.concatenate(([0], counts.cumsum())), heads[order].astype(np.int32))


def _distances(graph: Family, root: int) -> np.ndarray:
    return _breadth_first(graph.indptr, graph.indices, root)


@numba.njit(cache=True)
def _breadth_first(indptr, indices, root):
    """Number of edges from root to every node, -1 = out of reach."""
    far = np.full(len(indptr) - 1, -1, np.int64)
    queue = np.empty(len(indptr) - 1, np.int64)
    queue[0], far[root], first, last = root, 0, 0, 1
    while first < last:
        u = queue[first]
        first += 1
        for e in range(indptr[u], indptr[u + 1]):
            v = indices[e]
            if far[v] < 0:
                far[v] = far[u] + 1
                queue[last] = v
                last += 1
    return far
