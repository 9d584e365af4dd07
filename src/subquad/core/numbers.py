"""Numbers that several parts need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from operator import index
from statistics import linear_regression


def root(n: int) -> int:
    """⌈√n⌉: the block length that balances n/s blocks of s."""
    return math.isqrt(n - 1) + 1 if n > 1 else 1


def possible_pairs(n: int, causal: bool) -> int:
    """All pairs (i, j) of n tokens: n²; causal, j ≤ i: n(n + 1)/2."""
    return n * (n + 1) // 2 if causal else n * n


def steps_per_unit(delta: Fraction | float | str) -> int:
    """1/δ as an integer; the lemmas of Yun et al. need δ = 1/2, 1/3, 1/4 …"""
    try:
        exact = Fraction(delta).limit_denominator(10**6)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"delta must be a fraction such as 1/2 or 0.5, not {delta!r}") from None
    if exact <= 0 or exact.numerator != 1 or exact.denominator < 2:
        raise ValueError(f"delta is {delta}; 1/delta must be an integer ≥ 2 (Lemma 7)")
    return exact.denominator


LARGEST_GRID = 4000  # columns that a proof is verified on: the value map has a layer for each of them


def check_grid(n: int, d: int, m: int) -> None:
    """Refuse a grid of n/δ^(dn) columns that is too large, δ = 1/m."""
    if d < 1:
        raise ValueError(f"d must be an integer ≥ 1, not {d}")
    digits = math.log10(n) + d * n * math.log10(m)  # the number itself may have millions of digits
    if digits < 6 and n * m ** (d * n) <= LARGEST_GRID:
        return
    columns = f"{n * m ** (d * n):,}" if digits < 6 else f"about 10^{digits:.0f}"
    raise ValueError(
        f"n = {n}, d = {d}, delta = 1/{m}: the grid has n/δ^(dn) = {columns} columns, and at most {LARGEST_GRID:,} can "
        "be verified: choose a smaller n or d, or a larger delta"
    )


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


def parse_lengths(text: str, flag: str = "--n", example: str = "1024,4096") -> list[int]:
    """`1024,4096` → [1024, 4096], ascending, each once; `flag` is that of the command line, for the error."""
    try:
        lengths = sorted({int(piece) for piece in text.split(",")})
    except ValueError:
        raise ValueError(f"{flag} must be comma-separated integers ≥ 1, such as {example}, not {text!r}") from None
    if lengths[0] < 1:
        raise ValueError(f"{flag} must be comma-separated integers ≥ 1, such as {example}, not {text!r}")
    return lengths
