"""Kernel sums: attention whose scores are products of features, so that sums stand in for the matrix of scores.

    out_i = Σ_j a_i·b_j e^(s_j - s_i) v_j / Σ_j a_i·b_j e^(s_j - s_i)          causal: over j ≤ i

a (B, H, n, f) and b (B, H, m, f) are the features of queries and keys, s (B, H, m) the logarithm of the scale of a key,
which never falls along the sequence (None = all 0; only for causal sums). A query whose denominator vanishes gets 0.

Without causality, Σ_j b_j v_jᵀ is one matrix for all queries. Causal sums run in chunks of tokens: inside a chunk as
masked matrix products, and from chunk to chunk through the running sum of b_j v_jᵀ. Time and memory are linear in n.

`op` holds the operators and their derivatives, `cpu` and `cpu_chunks` the kernels of a CPU (Numba), `gpu` and
`triton_walk` those of a GPU, `chunks` the computation in whole-tensor steps for every device, and `reference` the same
from the formula, with the whole matrix of scores. There is no second derivative.
"""

from subquad.kernels.linear.op import kernel_sums

__all__ = ["kernel_sums"]
