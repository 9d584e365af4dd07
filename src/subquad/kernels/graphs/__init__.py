"""Attention over sampled graphs M, with a straight-through gradient for the probabilities p_ij = w_i·z_j of the edges.

    s_ij = scale · q_i·k_j,   A_i = softmax of s_i over {j : M_ij = 1},   out_i = Σ_j drop_ij A_ij v_j

    pre          dL/dp_ij = dL/ds_ij · s_ij         where M_ij = 1, else 0   (SBM-Transformer eq. 9: M times the scores)
    published    dL/dp_ij = clip(dL/ds_ij, -1, 1)   where M_ij = 1, else 0: the authors' code. M multiplies the weights,
                 they are normalised again, and the gradient of M is clipped; before that it is
                 A_ij·(g_ij - Σ_k A_ik g_ik) = dL/ds_ij, g = dL/dA
    difference   dL/dp_ij = g_i·(out_i with the edge - out_i without it), g = dL/dout, for every pair, drawn or not:
                 to first order what the edge is worth. With r_ij = e^s_ij / Σ over edges of e^s:
                 M_ij = 1: r / (1 - r) · g_i·(v_j - out_i);   M_ij = 0: r / (1 + r) · g_i·(v_j - out_i)

Edges |i - j| ≤ reach are pinned: they are there whatever p is, so dL/dp_ij = 0 (reach = -1: none is).
p itself is never needed: the forward pass uses M alone. Rows that come as a list run through the loops of the edge
room, linear in the edges; rows that come as a mask run in tiles of 64 keys: all scores of a tile are one small matrix
product, softmax and sums are over the edges alone (`cpu`, with `tiles`). The gradient of `difference`, which every pair
has, takes whole blocks of rows. No n × m matrix is kept but the mask, one bit per pair. A row
without edges gives 0, so the two routes are added where there are both. The choice is made inside one operator: a
compiled graph holds all routes. On any of them the result of a row depends on nothing but the row.
"""

from subquad.kernels.graphs.op import graph_attention
from subquad.kernels.graphs.reference import MODES

__all__ = ["MODES", "graph_attention"]
