"""Small sums that several rooms need."""

from __future__ import annotations

import math


def root(n: int) -> int:
    """⌈√n⌉: the block length that balances n/s blocks of s."""
    return math.isqrt(n - 1) + 1 if n > 1 else 1


def triangle(n: int) -> int:
    """1 + 2 + … + n: the pairs (i, j) with j ≤ i."""
    return n * (n + 1) // 2
