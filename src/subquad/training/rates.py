"""A bracket of learning rates for each attention: one rate for all of them misleads.

Every rate is tried with the first seed and the whole budget; the best validation score chooses the rate, and the other
seeds are run with that one. The test set has no part in the choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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


def at_the_edge(choices: Iterable[tuple[str, Sequence[str]]]) -> str:
    """How many of the choices, each the rate chosen and all that were tried, have others on one side only."""
    known = [(float(rate), sorted(map(float, tried))) for rate, tried in choices if len(tried) > 1]
    ends = {"largest": sum(rate == tried[-1] for rate, tried in known),
            "smallest": sum(rate == tried[0] for rate, tried in known)}  # fmt: skip
    said = " and ".join(f"the {end} tried in {count}" for end, count in ends.items() if count)
    cases = "1 case" if len(known) == 1 else f"{len(known)} cases"
    return f"The rate chosen is {said} of {cases}: a better one may lie outside." if said else ""
