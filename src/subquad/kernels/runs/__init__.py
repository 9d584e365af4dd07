"""Attention of tiles of queries to runs of keys: one softmax per query over all the runs of its tile.

    out_i = Σ_j w_ij v_j          w_ij = softmax_j(q_i·k_j·scale + bias_j)          over the keys j of i's runs

A tile is a run of queries. It has P runs of keys, each from one of several sources (tokens, means of tokens, sorted
blocks …), empty ones among them. What no tile has gets 0. The logsumexp of a row is a result with a gradient of its
own, so that results for other rows of queries can be merged with it.

`op` has the entrance, the schema and the derivatives, `cpu` the tables' way to the kernels of `tiles` (Numba), and
`reference` the same in plain torch, on any device. There is no second derivative.
"""

from subquad.kernels.runs.op import Runs, attend_runs

__all__ = ["Runs", "attend_runs"]
