"""Do our numbers and the paper's agree? Claim by claim, and pair by pair, within the spread of the seeds.

A difference counts if it is larger than the spread: the standard deviation of the difference over the seeds. A single
seed has no spread, so there the direction is all that can be said, and the verdict says that too. A run that has not
left the plateau decides nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, NamedTuple

from subquad.reproductions.declare import Claim, Column, Reproduction

Cells = Mapping[str, Mapping[str, Mapping[str, Any]]]  # method → column → {"mean", "sd", "scores", "left_plateau"}
AGREES, CONTRADICTS, OPEN, MISSING = "agrees", "contradicts", "open", "missing"


class Side(NamedTuple):
    """One side of a difference; a number of the paper has no seeds and no spread."""

    mean: float
    sd: float
    seeds: int  # 0: a fixed number, or one that was counted


class Judgement(NamedTuple):
    claim: Claim
    column: str
    status: str
    detail: str


def judge(reproduction: Reproduction, cells: Cells) -> list[Judgement]:
    """Every claim in every column that it is about."""
    return [
        Judgement(claim, column.name, *_judge(claim, column, cells, reproduction.larger(column)))
        for claim in reproduction.claims
        for column in reproduction.columns
        if not claim.columns or column.name in claim.columns
    ]


def _judge(claim: Claim, column: Column, cells: Cells, larger: bool) -> tuple[str, str]:
    better, worse = (side(each, column.name, cells) for each in (claim.better, claim.worse))
    if better is None or worse is None:
        return MISSING, "not run"
    waiting = [name for name in (claim.better, claim.worse) if on_plateau(name, column.name, cells)]
    if waiting:
        return OPEN, f"{waiting[0]} has not left the plateau"
    status, single = compare(better, worse, larger=larger)
    words = {AGREES: "as the paper says", CONTRADICTS: "the other way round", OPEN: "within the spread of the seeds"}
    return status, words[status] + (" (one seed)" if single and status != OPEN else "")


def side(name: str | float, column: str, cells: Cells) -> Side | None:
    if not isinstance(name, str):
        return Side(float(name), 0.0, 0)
    cell = cells.get(name, {}).get(column)
    if cell is None or cell.get("mean") is None or not math.isfinite(cell["mean"]):
        return None
    return Side(cell["mean"], cell.get("sd") or 0.0, 0 if cell.get("counted") else len(cell["scores"]))


def on_plateau(name: str | float, column: str, cells: Cells) -> bool:
    return isinstance(name, str) and None in cells.get(name, {}).get(column, {}).get("left_plateau", ())


def compare(better: Side, worse: Side, *, larger: bool) -> tuple[str, bool]:
    """The status, and whether it rests on a single seed (whose spread nobody knows)."""
    gain = (better.mean - worse.mean) * (1 if larger else -1)
    single = 1 in (better.seeds, worse.seeds)
    if gain == 0 or abs(gain) <= math.hypot(better.sd, worse.sd):
        return OPEN, single
    return (AGREES if gain > 0 else CONTRADICTS), single


def pairs(reproduction: Reproduction, cells: Cells) -> Counter[str]:
    """Of all pairs that the paper orders (beyond its own spread), how many are ordered the same way here?"""
    count: Counter[str] = Counter()
    for column in reproduction.columns:
        larger = reproduction.larger(column)
        for first, second in combinations([method.name for method in reproduction.methods], 2):
            if any(on_plateau(name, column.name, cells) for name in (first, second)):
                continue
            stated = [x for name in (first, second) if (x := _stated(reproduction, name, column.name)) is not None]
            ours = [x for name in (first, second) if (x := side(name, column.name, cells)) is not None]
            if len(stated) < 2 or len(ours) < 2:
                continue
            theirs, _ = compare(stated[0], stated[1], larger=larger)
            status, _ = compare(ours[0], ours[1], larger=larger)
            if theirs != OPEN:
                count[OPEN if status == OPEN else AGREES if status == theirs else CONTRADICTS] += 1
    return count


def _stated(reproduction: Reproduction, method: str, column: str) -> Side | None:
    number = reproduction.number(method, column)
    return None if number is None else Side(number, reproduction.spread(method, column) or 0.0, 0)


def order(numbers: Mapping[str, float | None], *, larger: bool) -> list[str]:
    """Names from best to worst; those without a number are left out."""
    known = {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}
    return sorted(known, key=lambda name: -known[name] if larger else known[name])


def verdict(judgements: list[Judgement]) -> tuple[str, str]:
    """A word, and the sentence that explains it."""
    count = Counter(each.status for each in judgements)
    decided, total = count[AGREES] + count[CONTRADICTS] + count[OPEN], len(judgements)
    if not total:
        return MISSING, "The paper makes no claim about these numbers that could hold or fail."
    if not decided:
        return MISSING, "No claim of the paper can be judged yet: both methods of one have to be run."
    word = CONTRADICTS if count[CONTRADICTS] else AGREES if count[AGREES] else OPEN
    return word, " ".join(_sentences(word, count, decided, total, judgements))


def _sentences(word: str, count: Counter[str], decided: int, total: int, judgements: list[Judgement]) -> Iterator[str]:
    if word == AGREES:
        yield f"Agrees with the paper: {count[AGREES]} of {decided} claims hold, none fails."
    elif word == CONTRADICTS:
        yield f"Contradicts the paper in {count[CONTRADICTS]} of {decided} claims; {count[AGREES]} hold."
    else:
        yield f"Open: none of {decided} claims is decided."
    if count[OPEN] and word != OPEN:
        yield f"{count[OPEN]} {'is' if count[OPEN] == 1 else 'are'} undecided."
    if decided < total:
        yield f"{total - decided} {'has' if total - decided == 1 else 'have'} not been run."
    if any("one seed" in each.detail for each in judgements):
        yield "One seed: no spread is known, and a difference may be luck."
