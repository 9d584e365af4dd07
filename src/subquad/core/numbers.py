"""Numbers that several parts need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from statistics import linear_regression


def root(n: int) -> int:
    """⌈√n⌉: the block length that balances n/s blocks of s."""
    return math.isqrt(n - 1) + 1 if n > 1 else 1


def triangle(n: int) -> int:
    """1 + 2 + … + n: the pairs (i, j) with j ≤ i."""
    return n * (n + 1) // 2


def is_symbolic(n: int) -> bool:
    """Does a length stand for any length, as `torch.export` traces one that it is told is dynamic?"""
    return not isinstance(n, int)


def length_of(n: int) -> int:
    """A length that makes up a graph: a number, for which alone the graph is, or one that stands for any."""
    return n if is_symbolic(n) else index(n)


def settled(n: int, name: str, follows: str, advice: str) -> int:
    """A length that `follows` follows from: a number, for which alone a graph is traced."""
    if is_symbolic(n):
        raise ValueError(
            f"{name}: {follows} follows from the length of a call, so one graph cannot be traced for every length: "
            f"{advice}, or export it for one length, without dynamic_shapes for it"
        )
    return index(n)


def growth_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The e of cost ≈ c·n^e: the slope of the least-squares line through (log n, log cost)."""
    return linear_regression([math.log(n) for n in sizes], [math.log(cost) for cost in costs]).slope
