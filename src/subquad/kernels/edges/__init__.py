"""Attention over a CSR edge list: time and memory linear in the number of edges.

    s_e = scale · q_i·k_j                           for every edge e = (i, j), j a real key
    p_e = exp(s_e) / Σ_{e' of row i} exp(s_e')      a row without edges has output 0 and gradient 0
    out_i = Σ_{e of row i} drop_e · p_e · v_j       drop_e = 0 or 1 / (1 - dropout), by the seed

`op` has the entrances, schemas and derivatives, `reference` the operators in plain torch for any device, `cpu` those in
Numba (`loops`). torch.library picks by device.
"""

from subquad.kernels.edges.lists import Buckets, EdgeList, rows_of
from subquad.kernels.edges.op import edge_attention, edge_map, edge_mapped_attention, edge_scores, edge_sum

__all__ = [
    "Buckets", "EdgeList", "edge_attention", "edge_map", "edge_mapped_attention", "edge_scores", "edge_sum", "rows_of",
]  # fmt: skip
