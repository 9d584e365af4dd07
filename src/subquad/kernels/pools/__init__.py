"""Pools: the members of all groups of a kind at once, for Combiner's summaries.

`span_pool` is an operator over spans of a sequence, with rows of their own length; `groups` has the reductions over
grids and binary trees. On a CPU their maxima are kernels: `lines` for grids, `node_max` for trees.
"""

from subquad.kernels.pools.spans import span_pool, spans_with_members

__all__ = ["span_pool", "spans_with_members"]
