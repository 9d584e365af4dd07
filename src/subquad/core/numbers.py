"""Numbers that several parts need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import linear_regression


def root(n: int) -> int:
    """⌈√n⌉: the block length that balances n/s blocks of s."""
    return math.isqrt(n - 1) + 1 if n > 1 else 1


def triangle(n: int) -> int:
    """1 + 2 + … + n: the pairs (i, j) with j ≤ i."""
    return n * (n + 1) // 2


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The e of cost ≈ c·n^e: the slope of the least-squares line through (log n, log cost)."""
    return linear_regression([math.log(n) for n in sizes], [math.log(cost) for cost in costs]).slope
