"""Combiner-Fixed (Ren et al. 2021, section 4.1): the own span token by token, every other span as one summary.

    Ω_i^0 = {j : ⌊j/s⌋ = ⌊i/s⌋}  (causal: j ≤ i)      groups: the other spans (causal: the earlier, complete ones)
    k_a, q_a = pools over span a                     v_a = Σ_{j in a} softmax_j(q_a·k_j·scale) v_j

    O(n·(s + n/s)); s ≈ √n balances the two.

Eq. 10 counts from 1, writes "mod" for "div" and leaves out the first span; here all spans count.
"""

from __future__ import annotations

from dataclasses import dataclass

from subquad.attention.combiner import Combiner, CombinerOptions
from subquad.attention.combiner_tree import tree_attention
from subquad.core.options import option
from subquad.supports.partitions import Fixed, Partition


class CombinerFixed(Combiner):
    __doc__ = __doc__
    cost = "n·√n"

    @dataclass(frozen=True, kw_only=True)
    class Options(CombinerOptions):
        span: int | None = option(None, "tokens of a span; None = ≈ √n", ge=1)

    @property
    def exponent(self) -> float:
        return 1.5 if self.options.span is None else 2.0  # a fixed span: n/s summaries for every query

    @property
    def partition(self) -> Partition:
        return Fixed(causal=self.options.causal, span=self.options.span)

    def combine(self, q, k, v, exists):
        """A partition tree of one level."""
        return tree_attention(self, q, k, v, exists, self.options.span, 1)
