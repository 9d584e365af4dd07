"""Numbers that several parts need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import linear_regression


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The e of cost ≈ c·n^e: the slope of the least-squares line through (log n, log cost)."""
    return linear_regression([math.log(n) for n in sizes], [math.log(cost) for cost in costs]).slope
