"""Attention to the own block and to a few chosen blocks of the past, under one softmax.

The own block, up to the query, runs through the merge kernel. The chosen ones run a block of keys at a time: all
queries that chose it are gathered, and what they get is merged by logsumexp. A backward with the merged output and
logsumexp is exact (see `kernels.merge`). There is no second derivative.
"""

from subquad.kernels.selected.op import selected_attention

__all__ = ["selected_attention"]
