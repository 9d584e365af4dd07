"""A sliding window of tokens, some of a list of entries, and a sink, under one softmax per query.

    out_i = ( Σ_{j near i} e^(q_i·k_j·scale) v_j + Σ_{w seen by i} e^(q_i·c_w·scale) u_w ) / Z_i
    Z_i = the sum of all these exponentials + e^sink

The window runs through the merge kernel, the entries a block of queries at a time: on a CPU through torch's flash
attention with a mask, elsewhere as two matrix products. A backward with the merged output and logsumexp is exact (see
`kernels.merge`); a sink is a key whose value is 0. There is no second derivative. `index` finds the entries that a
query sees, where not all are seen.
"""

from subquad.kernels.compressed.index import index_choice
from subquad.kernels.compressed.op import compressed_attention

__all__ = ["compressed_attention", "index_choice"]
