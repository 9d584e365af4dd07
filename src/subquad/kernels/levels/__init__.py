"""Attention on several levels, coarser with the distance, under one softmax: see `attention.h_transformer`.

    out_i = Σ_l Σ_j exp(s_rj) c_j v̄_j / Z_i          s_rj = q̄_r·k̄_j·scale on level l, r the group of 2^l tokens of i

with means q̄, k̄, v̄ over groups, c_j the tokens of a group, and Z_i the sum of all weights. Forward, from the coarsest
level on: a group's (out, logsumexp) is where the running softmax of its two halves begins. Backward, from the finest
on: the tokens of a group share its scores, so that with L = log Z

    ds_rj = exp(s_rj - L_r) c_j (ḡ_r·v̄_j - δ̄_r),    L_r = min L_i,    ḡ_r = Σ_i exp(L_r - L_i) dout_i,    δ̄_r alike

over the tokens i of r: the gradient of a level is that of a softmax over its rows alone. No exponent is positive, as
Z_i contains exp(s_rj). Nothing of a level but the means outlives it, and those are computed again in the backward.

`op` has the operators, and who is on which level; attention inside a level is that of `kernels.runs`.
"""

from subquad.kernels.levels.op import attend_levels

__all__ = ["attend_levels"]
