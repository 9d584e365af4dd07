"""Do our numbers and the paper's agree? Claim by claim, and pair by pair, within the spread of the seeds.

A difference counts if it is larger than the spread: its standard deviation over the seeds. Runs with the same seed have
the same data, which move the scores of all methods alike, so differences are taken seed by seed. A single seed has no
spread, so there the direction is all that can be said, and the verdict says that too. For times and memory it is the
noise of the measurement that counts. A run that has not left the plateau decides nothing, except that it does not reach
a number.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any, NamedTuple

from subquad.reproductions.declare import Claim, Column, Reproduction

Cells = Mapping[str, Mapping[str, Mapping[str, Any]]]  # method → column → {"mean", "sd", "scores", "left_plateau"}
AGREES, CONTRADICTS, OPEN, MISSING = "agrees", "contradicts", "open", "missing"


class Side(NamedTuple):
    """One side of a difference; a number of the paper has no seeds."""

    mean: float
    sd: float = 0.0
    scores: Mapping[int, float] = MappingProxyType({})  # by seed; none: a fixed number, or one that was counted


class Judgement(NamedTuple):
    claim: Claim
    column: str
    status: str
    detail: str


def judge(reproduction: Reproduction, cells: Cells) -> list[Judgement]:
    """Every claim in every column that it is about."""
    every = tuple(column.name for column in reproduction.run_columns)
    return [
        Judgement(claim, column.name, *_judge(claim, column, cells, reproduction.larger(column)))
        for claim in reproduction.claims
        for column in reproduction.columns
        if column.name in (claim.columns or every)
    ]


def _judge(claim: Claim, column: Column, cells: Cells, larger: bool) -> tuple[str, str]:
    better, worse = (side(each, column.name, cells) for each in (claim.better, claim.worse))
    if better is None or worse is None:
        return MISSING, "not run"
    waiting = [name for name in (claim.better, claim.worse) if on_plateau(name, column.name, cells)]
    fails = isinstance(claim.better, float | int)  # "this does not reach 99": one on the plateau does not
    if waiting and not fails:
        return OPEN, f"{waiting[0]} has not left the plateau"
    status, single = compare(better, worse, larger=larger, noise=column.noise)
    remarks = [text for text, said in (("one seed", single and status != OPEN), ("on the plateau", waiting)) if said]
    return status, _in_words(claim, column, status, better, worse) + (f" ({', '.join(remarks)})" if remarks else "")


def _in_words(claim: Claim, column: Column, status: str, better: Side, worse: Side) -> str:
    if status == AGREES:
        return "as the paper says"
    if status == OPEN:
        return "within the noise of the measurement" if column.noise else "within the spread of the seeds"
    if isinstance(claim.better, str) and isinstance(claim.worse, str):
        return "the other way round"
    return f"no, it is {(better if isinstance(claim.better, str) else worse).mean:.4g}"


def side(name: str | float, column: str, cells: Cells) -> Side | None:
    if not isinstance(name, str):
        return Side(float(name))
    cell = cells.get(name, {}).get(column)
    if cell is None or cell.get("mean") is None or not math.isfinite(cell["mean"]):
        return None
    scores = {} if cell.get("counted") else dict(zip(seeds_of(cell), cell["scores"], strict=True))
    return Side(cell["mean"], cell.get("sd") or 0.0, scores)


def seeds_of(cell: Mapping[str, Any]) -> Sequence[int]:
    return cell.get("seeds", range(len(cell["scores"])))


def on_plateau(name: str | float, column: str, cells: Cells) -> bool:
    return isinstance(name, str) and None in cells.get(name, {}).get(column, {}).get("left_plateau", ())


def compare(better: Side, worse: Side, *, larger: bool, noise: float = 0.0) -> tuple[str, bool]:
    """The status, and whether it rests on a single seed (whose spread nobody knows)."""
    gain, spread = difference(better, worse)
    spread = max(spread, noise * max(abs(better.mean), abs(worse.mean)))
    single = 1 in (len(better.scores), len(worse.scores))
    if gain == 0 or abs(gain) <= spread:
        return OPEN, single
    return (AGREES if (gain > 0) == larger else CONTRADICTS), single


def difference(one: Side, other: Side) -> tuple[float, float]:
    """one - other and its spread: seed by seed where both have two seeds or more in common."""
    shared = one.scores.keys() & other.scores.keys()
    if len(shared) < 2:
        return one.mean - other.mean, math.hypot(one.sd, other.sd)
    found = [one.scores[seed] - other.scores[seed] for seed in sorted(shared)]
    return statistics.mean(found), statistics.stdev(found)


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
            status, _ = compare(ours[0], ours[1], larger=larger, noise=column.noise)
            if theirs != OPEN:
                count[OPEN if status == OPEN else AGREES if status == theirs else CONTRADICTS] += 1
    return count


def _stated(reproduction: Reproduction, method: str, column: str) -> Side | None:
    number = reproduction.number(method, column)
    return None if number is None else Side(number, reproduction.spread(method, column) or 0.0)


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
        yield f"Agrees with the paper: {counted(count[AGREES], 'holds', 'hold', of=decided)}, none fails."
    elif word == CONTRADICTS:
        holding = counted(count[AGREES], "holds", "hold")
        yield f"Contradicts the paper in {count[CONTRADICTS]} of {claims(decided)}; {holding}."
    else:
        who = {1: "the only claim", 2: "neither of the 2 claims"}.get(decided, f"none of the {decided} claims")
        yield f"Open: {who} is {'not ' * (decided == 1)}decided."
    if count[OPEN] and word != OPEN:
        yield f"{counted(count[OPEN], 'is', 'are')} undecided."
    if decided < total:
        yield f"{counted(total - decided, 'has', 'have')} not been run."
    alone = sum("one seed" in each.detail for each in judgements)
    if alone:
        who = (
            "All of this rests" if alone == decided else f"Of those that were judged, {counted(alone, 'rests', 'rest')}"
        )
        yield f"{who} on a single seed: no spread is known, and a difference may be luck."


def counted(count: int, one: str, many: str, *, of: int | None = None) -> str:
    """1 has; 2 have; 1 of 2 claims holds."""
    return f"{count}{'' if of is None else f' of {claims(of)}'} {one if count == 1 else many}"


def claims(count: int) -> str:
    return f"{count} claim{'s' * (count != 1)}"
