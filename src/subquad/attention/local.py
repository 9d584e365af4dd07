"""Local attention: a sliding window or blocks alone, the plainest of the baselines (Combiner, table 5).

out_i = Σ_{j ∈ A_i} ρ[ (q_i·k_j·scale)_{j ∈ A_i} ]_j v_j          O(n·window)

shape=window   A_i: `window` tokens around i, ⌈(window-1)/2⌉ to the left; causal: i and the window - 1 before it
shape=blocks   A_i: the block of `window` tokens that contains i; causal: up to i
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from subquad.attention.pattern_attention import PatternAttention, PatternOptions
from subquad.core.options import option
from subquad.supports.pattern import Pattern
from subquad.supports.patterns import Blocks, Longformer


class Local(PatternAttention):
    __doc__ = __doc__

    paper = "Ren et al. 2021, table 5"
    cost = "n·window"
    exponent = 1.0
    examples = ({"window": 8}, {"window": 5, "shape": "blocks"})
    gallery = {"window": 9}

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        window: int = option(128, "how many tokens a query sees, or tokens of a block", ge=1)
        shape: Literal["window", "blocks"] = option("window", "a window that slides, or blocks that do not overlap")

    def kept_keys(self, n: int) -> float:
        return float(self.options.window)

    def make_pattern(self, options: Any) -> Pattern:
        if options.shape == "blocks":
            return Blocks(causal=options.causal, size=options.window)
        reach = options.window - 1  # Longformer's window counts the neighbours, half of them to each side
        return Longformer(causal=options.causal, window=2 * reach if options.causal else reach)
