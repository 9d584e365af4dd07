"""How many scores a head computes and how many keys a decoder keeps, from 64 tokens to a million.

Up to `COUNTED` tokens the mechanism counts its scores. Beyond, they follow a curve through counts like these,

    c(n) = a·n^e + b·n + c          e: the exponent that the mechanism declares; e = 1: a·n + b·n·log₂n + c

least squares of the relative errors. Mechanisms that have a formula (`countable = None`) are asked at every length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from subquad.attention.base import Attention

LENGTHS = tuple(2**power for power in range(6, 21))  # 64 … 1,048,576
COUNTED = 512
LINEAR = (128, 256, 512)  # what the curve goes through where e = 1: a logarithm is whole at these
SQUARES = (144, 256, 400, 576)  # and elsewhere: sizes that follow √n are whole at these


class Cost(NamedTuple):
    """Of one head, at each of `LENGTHS`."""

    connections: list[float]
    counted: int  # up to this length they are counted, beyond they are on the curve
    kept: list[float] | None  # keys and values, in tokens of one head, that streaming keeps; None = it cannot stream
    exponent: float


def cost(make: Callable[[int], Attention]) -> Cost:
    """`make` gives the mechanism for a length."""
    at = cache(make if make(64).capabilities.needs_max_length else lambda n: make(64))
    one = at(64)
    if one.countable is None:
        counts, counted = [one.connections(n) for n in LENGTHS], LENGTHS[-1]
    else:
        fitted = LINEAR if one.exponent == 1 else SQUARES
        known = {n: _at(at, n).connections(n) for n in sorted({*fitted, *(n for n in LENGTHS if n <= COUNTED)})}
        curve = fit(fitted, [known[n] for n in fitted], one.exponent)
        counts, counted = [known[n] if n <= COUNTED else curve(n) for n in LENGTHS], COUNTED
    return Cost([round(float(c), 1) for c in counts], counted, _kept(at), float(one.exponent))


def _at(at: Callable[[int], Attention], n: int) -> Attention:
    with torch.random.fork_rng(devices=[]):  # parameters play no part in counts, and a page must not depend on them
        torch.manual_seed(0)
        return at(n)


def _kept(at: Callable[[int], Attention]) -> list[float] | None:
    """A state has keys of `kept_width` numbers, or as wide as values: in units of a key and a value."""
    one = at(64)
    if not (one.capabilities.streaming and one.options.causal) or one.capabilities.needs_max_length:
        return None
    width = one.options.head_dim
    share = ((one.kept_width or width) + width) / (2 * width)
    return [round(one.kept_keys(n) * share, 1) for n in LENGTHS]


def fit(sizes: Sequence[int], counts: Sequence[float], exponent: float) -> Callable[[int], float]:
    """The curve of the module docstring through counts at these sizes."""
    c = np.asarray(counts, float)
    design = _terms(np.asarray(sizes, float), exponent)  # (sizes, 3)
    found = np.linalg.lstsq(design / c[:, None], np.ones(len(c)), rcond=None)[0]  # (3,)

    def curve(n: int) -> float:
        value = float((_terms(np.array([float(n)]), exponent) @ found)[0])
        return value if value > c[-1] else float(c[-1] * (n / sizes[-1]) ** exponent)

    return curve


def _terms(n: np.ndarray, exponent: float) -> np.ndarray:
    other = n * np.log2(n) if exponent == 1 else n
    return np.stack((n**exponent, other, np.ones_like(n)), 1)
