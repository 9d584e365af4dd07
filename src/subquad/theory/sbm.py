"""Appendix A of the SBM-Transformer paper (Cho et al. 2022): its Lemmas 1 and 2, computed instead of believed.

Lemma 1. In a directed random graph G(n, p) the expected number of Hamiltonian cycles is p^n (n-1)!, at least 1 for
p = (e/n) n^{1/n} (where that is a probability, n ≥ 4; below, p = 1 does), with n²p = O(n) expected edges. What the
lemma does not say: an expectation of 1 is not a cycle. `lemma1` reports beside the mean how many graphs have one.

Lemma 2. Three patterns with k clusters. Positions are 0-based here, which also mends the printed off-by-one (1-based,
⌊ik/n⌋ puts token n into a cluster of its own):

    A^1_i = {j : ⌊jk/n⌋ = ⌊ik/n⌋}                       own cluster
    A^2_i = {i} ∪ {n-k … n-1}                           the k relays
    A^3_i = {i}, for the relays i ≥ n-k everyone        the relays gather

The printed "s = 3" holds when layers cycle through A^1, A^3, A^2 (cluster, gather, spread); in the printed order the
relays hand on what they have not gathered yet, and the checker finds s = 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np
import torch

from subquad.theory.sets import Support, read

LARGEST_N = 12  # counting cycles takes 2^n · n² steps per graph


@dataclass(frozen=True)
class Cycles:
    """Hamiltonian cycles in G(n, p): the formula and a simulation."""

    n: int
    p: float
    expected: float  # p^n (n-1)!
    mean: float  # over the simulated graphs
    error: float  # standard error of that mean
    share: float  # of the graphs that have a cycle at all
    edges: float  # expected number of edges without self-loops, n(n-1)p


def lemma1(n: int, p: float | None = None, *, samples: int = 2000, seed: int = 0) -> Cycles:
    """Expected number of Hamiltonian cycles against `samples` random graphs; p defaults to the lemma's."""
    if not 3 <= n <= LARGEST_N:
        raise ValueError(f"n is {n}; cycles are counted for 3 ≤ n ≤ {LARGEST_N}")
    p = min(1.0, math.e / n * n ** (1 / n)) if p is None else p
    if not 0 < p <= 1:
        raise ValueError(f"p is {p}; it must be a probability > 0")
    generator = np.random.default_rng(seed)
    counts = np.array([_count_cycles(generator.random((n, n)) < p) for _ in range(samples)], dtype=np.float64)
    return Cycles(
        n,
        p,
        p**n * math.factorial(n - 1),
        float(counts.mean()),
        float(counts.std(ddof=1) / math.sqrt(samples)),
        float((counts > 0).mean()),
        n * (n - 1) * p,
    )


@numba.njit(cache=True)
def _count_cycles(joined):
    """Number of directed Hamiltonian cycles, by the sets of tokens that paths from token 0 have visited."""
    n = len(joined)
    ways = np.zeros((1 << n, n), np.int64)
    ways[1, 0] = 1
    for tokens in range(1, 1 << n, 2):  # token 0 is in all of them
        for last in range(n):
            if ways[tokens, last]:
                for k in range(1, n):
                    if not (tokens >> k) & 1 and joined[last, k]:
                        ways[tokens | (1 << k), k] += ways[tokens, last]
    total = 0
    for last in range(1, n):
        if joined[last, 0]:
            total += ways[(1 << n) - 1, last]
    return total


def lemma2(n: int, k: int, *, order: tuple[int, int, int] = (1, 2, 3)) -> Support:
    """The three patterns of Lemma 2 in the given order of layers; the default is the printed one."""
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; it must be a number of clusters, 1 … n = {n}")
    if sorted(order) != [1, 2, 3]:
        raise ValueError(f"order is {order}; it must be an order of the patterns 1, 2, 3")
    i, j = torch.arange(n)[:, None], torch.arange(n)
    own = i == j
    patterns = {1: i * k // n == j * k // n, 2: own | (j >= n - k), 3: own | (i >= n - k)}
    return read(torch.stack([patterns[number].expand(n, n) for number in order]))
