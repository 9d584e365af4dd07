"""A bracket of learning rates for each attention: one rate for all of them misleads.

Every rate is tried with the first seed and the whole budget; the best validation score chooses the rate, and the other
seeds are run with that one. The test set has no part in the choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from subquad.core.spoken import argument


def parse_rates(text: str, name: str = "") -> tuple[str, ...]:
    """`3e-3,1e-3` → ("3e-3", "1e-3"): as they were written, for they name folders. `name` is what the caller calls
    them, --rates or `rates` by default.
    """
    name = name or argument("rates")
    rates = tuple(piece.strip() for piece in text.split(","))
    try:
        values = [float(rate) for rate in rates]
    except ValueError:
        values = [math.nan]
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"{name} must be comma-separated positive numbers, such as 3e-3,1e-3, not {text!r}")
    if len(set(values)) < len(values):
        raise ValueError(f"{name} must be learning rates that differ from each other; {text!r} names one twice")
    return rates


def multiples(rate: float, factors: Sequence[float]) -> tuple[str, ...]:
    """5e-4 times 0.5, 1, 2 → ("2.5e-4", "5e-4", "1e-3"): the rates of a bracket, written as one would."""
    parts = (f"{rate * factor:.6e}".split("e") for factor in factors)
    return tuple(f"{float(digits):g}e{int(exponent)}" for digits, exponent in parts)


def take_rates(settings: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`rate=3e-3,1e-3` among the settings is a bracket: the other settings, and the rates of it."""
    rest: list[str] = []
    rates: tuple[str, ...] = ()
    for setting in settings:
        key, _, value = setting.partition("=")
        if key.strip() == "rate" and "," in value:
            rates = parse_rates(value, "the setting rate")
        else:
            rest.append(setting)
    return tuple(rest), rates


def choose(results: Mapping[str, dict[str, Any]]) -> str | None:
    """The rate with the best validation score, the first of equals; `results` are those of the finished rates."""
    best, chosen = -math.inf, None
    for rate, result in results.items():
        score = result["valid"] if result["larger_is_better"] else -result["valid"]
        if chosen is None or score > best:  # a score that is no number is never better
            best, chosen = (score if math.isfinite(score) else -math.inf), rate
    return chosen
