"""Slices: a sequence in pieces of equal length, the last one shorter (Composite Slice attention, eqs. 8 and 11)."""

from __future__ import annotations

from dataclasses import dataclass

from subquad.supports.builders import strips
from subquad.supports.parts import make_plan
from subquad.supports.support import Support, Within, constant_of_graphs


@dataclass(frozen=True, kw_only=True)
class Slices(Support):
    """Every token sees its slice of `size` tokens, and `reach` tokens beyond (causal: to the left only, up to itself).

    size=0: the whole sequence is one slice. `placed`: keys carry their place in the extended slice, so those that reach
    in from the slice before are a source of their own (1), and those from the slice behind too (2).
    """

    size: int
    reach: int = 0
    placed: bool = False

    def plan(self, n, which):
        size, reach = self.size or n, self.reach
        if not self.placed or not reach:
            ahead = 0 if self.causal else reach
            return make_plan(strips(n, size, -reach, size + ahead, causal=self.causal), n)
        parts = strips(n, size, 0, size, causal=self.causal) + strips(n, size, -reach, 0, source=1)
        return make_plan(parts + ([] if self.causal else strips(n, size, size, size + reach, source=2)), n)

    def within(self, which, length):
        return Within(length, (length, length, length))  # every source has the tokens


@constant_of_graphs
def slices_text(causal: bool, size: int, reach: int, placed: bool) -> str:
    """The text of slices: a constant of a compiled graph."""
    return Slices(causal=causal, size=size, reach=reach, placed=placed).text
