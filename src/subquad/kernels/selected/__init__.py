"""Attention to the query's block and to a few chosen blocks of the past, under one softmax.

The query's block, up to the query, runs through the merge kernel, and what the chosen ones give is merged by logsumexp.
A backward with the merged output and logsumexp is exact (see `kernels.merge`). On a CPU the chosen blocks run a block
of keys at a time, with all queries that chose it, as tiles of the kernels of `kernels.runs`; elsewhere the keys of
every query are gathered (`reference`). There is no second derivative. `choice` finds the blocks by the weights of
compressed ones, and who chose which.
"""

from subquad.kernels.selected.choice import block_choice
from subquad.kernels.selected.op import selected_attention

__all__ = ["block_choice", "selected_attention"]
