"""The table of every pattern in the library: universal? with how many connections? in how many hops?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from subquad.attention.registry import available, for_length, mechanism
from subquad.core.numbers import growth_exponent
from subquad.core.options import fields
from subquad.supports.pattern import Pattern
from subquad.theory.assumptions import Verdict, check
from subquad.theory.counting import connections, growth, sparsity
from subquad.theory.sbm import lemma2
from subquad.theory.sets import LAYOUTS

HEADERS = ("pattern", "universal", "loops", "path γ", "hops s", "connections", "~ n^e", "sparsity")


@dataclass(frozen=True, eq=False)
class Row:
    """One line of the table."""

    spec: str
    verdict: Verdict
    exponent: float

    def cells(self) -> list[str]:
        v = self.verdict
        loops = {True: "yes", False: "no", None: "–"}[v.self_loops]
        path = "–" if v.path is None else "identity" if v.path.identity else v.path.status
        hops = str(v.hops.steps) if v.hops.steps else v.hops.why(v.support.causal)
        counts = [f"{connections(v.support):,.0f}", f"{self.exponent:.2f}", f"{sparsity(v.support):.1%}"]
        return [self.spec, v.answer, loops, path, hops, *counts]


def survey(n: int, *, causal: bool = False) -> Iterator[Row]:
    """Every registered mechanism at length n, patterns with several families in every head layout."""
    for spec in specs(causal):
        yield Row(spec, check(spec, n, causal=causal), growth(spec, n, causal=causal))
    if not causal:
        sizes = [n // 4, n // 2, n]
        counts = [connections(lemma2(size, math.isqrt(size))) for size in sizes]
        yield Row("SBM Lemma 2, k = √n", check(lemma2(n, math.isqrt(n))), growth_exponent(sizes, counts))


def specs(causal: bool) -> list[str]:
    """The mechanisms that have this direction and can be made from text alone (`pattern` wants sets of your own)."""
    found = []
    for name in available():
        cls = mechanism(name)
        able = cls.capabilities.causal if causal else cls.capabilities.bidirectional
        if not able or any(field.type is Any for field in fields(cls.Options)):
            continue
        pattern = getattr(for_length(name, 4), "pattern", None)
        several = isinstance(pattern, Pattern) and pattern.families > 1
        found += [f"{name}:heads={layout}" for layout in LAYOUTS] if several else [name]
    return found


def markdown(rows: list[Row]) -> str:
    """The table for a page."""
    lines = [HEADERS, ["---"] * len(HEADERS), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
