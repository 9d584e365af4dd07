"""Graphs sampled from a stochastic block model (SBM-Transformer, Cho et al. 2022, eq. 8 and algorithm 1).

    p_ij = Y_i B Z_jᵀ        Y (n, k), B (k, k), Z (m, k), all ≥ 0 and p ≤ 1; below W = Y·B

Three samplers, one graph per batch element and head, every edge independent:

    exact      P(M_ij = 1) = p_ij             at a cost linear in the edges
    fastrg     P(M_ij = 1) = 1 - exp(-p_ij)   algorithm 1: a Poisson number of edges, duplicates merged, linear too
    bernoulli  P(M_ij = 1) = p_ij             every pair is looked at: n·m·k

`exact` runs algorithm 1 at the rate c_i·p_ij, merges duplicates and keeps each edge with probability
p / (1 - exp(-c·p)); this is ≤ 1 as long as p is at most the bound b_i for which c_i = -ln(1 - b_i) / b_i. The bound
of row i is W_i · max_j Z_j, linear to compute. Where it nears 1, or the row is dense, c·p edges cost more than looking
at all of them: such a row is sampled as `bernoulli` does, most pairs by bounds of p alone, and the statistics count it.
Where b_i is small and not far above the row's mean, keys are met with probability b_i, by jumps from one to the next,
and kept with probability p / b_i: the same distribution, without search tables.

Beside the model: exploration δ adds every edge independently with probability δ; `reach` pins the edges |i - j| ≤ reach
(0: the self-loop); causal keeps j ≤ i; keys outside the key mask have no edges.

`cpu` draws row by row in Numba (`rows`); `reference` draws all rows at once in torch operators, on any device. Random
numbers are a hash of the seed, the row and a count, so both draw the same graphs for a seed, but for numbers within
rounding of a limit.
"""

from subquad.kernels.sampler.op import sample, sample_edges, statistics
from subquad.kernels.sampler.reference import sample_rows
from subquad.kernels.sampler.rules import SAMPLERS, Rules, Sample, all_masked, pinned_reach, rather_masked

__all__ = [
    "SAMPLERS", "Rules", "Sample", "all_masked", "pinned_reach", "rather_masked", "sample", "sample_edges",
    "sample_rows", "statistics",
]  # fmt: skip
