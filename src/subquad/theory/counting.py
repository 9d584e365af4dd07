"""Counting: connections per layer and how they grow, and the blocks that section 4.1 asks for."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from subquad.core.numbers import growth_exponent, possible_pairs, steps_per_unit
from subquad.theory.sets import Support, read


def connections(support: Support) -> int | float:
    """Σ_k |A_k| per layer and head: the mean over the families that layers cycle through or heads share.

    An SBM counts the connections of its expected graph, a Combiner all pairs that it joins, through summaries or not.
    """
    total, p = sum(family.connections for family in support.heads), len(support.heads)
    return total // p if total % p == 0 else total / p


def sparsity(support: Support) -> float:
    """Share of the possible connections that are absent."""
    return 1 - connections(support) / possible_pairs(support.n, support.causal)


def growth(source: Any, n: int, *, causal: bool | None = None) -> float:
    """The exponent e of connections ~ n^e, fitted over n/4, n/2 and n. Sets of your own have one length: no growth."""
    sizes = sorted({max(2, n // 4), max(2, n // 2), n})
    if len(sizes) < 2:
        raise ValueError(f"n is {n}; a growth needs n ≥ 4")
    return growth_exponent(sizes, [connections(read(source, size, causal=causal)) for size in sizes])


@dataclass(frozen=True)
class Blocks:
    """Transformer blocks for quantisation (Lemma 6), contextual mapping (7) and value mapping (8)."""

    quantisation: int
    context: int
    values: int

    @property
    def total(self) -> int:
        return self.quantisation + self.context + self.values


def sparse_blocks(n: int, d: int, delta: Fraction | float | str, p: int, s: int) -> Blocks:
    """dn/δ, p(n-1)/δ^d + s, n/δ^{dn}: section 4.1, for p families and s hops."""
    m = steps_per_unit(delta)
    return Blocks(d * n * m, p * (n - 1) * m**d + s, n * m ** (d * n))


def dense_blocks(n: int, d: int, delta: Fraction | float | str) -> Blocks:
    """dn/δ, n/δ^d + 1, n/δ^{dn}: what the dense Transformer needs (Yun et al. 2020a)."""
    m = steps_per_unit(delta)
    return Blocks(d * n * m, n * m**d + 1, n * m ** (d * n))
