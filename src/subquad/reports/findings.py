"""What a comparison found, in words: who is best, who is fastest, what is the best trade, and how far to trust it.

Nobody wins without beating guessing, and nobody wins alone whom the seeds cannot tell from another. Speed is a
finding only where it was measured side by side on a quiet machine (`subquad.training.speed`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from subquad.core.options import split_spec
from subquad.core.spoken import again, given
from subquad.reports.charts import breakable, element
from subquad.training.rates import at_the_edge, multiples

CLOSE = 0.02  # a metric is close to the best within 2 % of it, or within the spread of the seeds
ERRORS = 2  # standard errors of the test set within which scores are equal

Row = dict[str, Any]  # of comparison.json, with "colour": its place on the page


class Findings(NamedTuple):
    """The rows that stand out, and the metric they are judged by."""

    metric: str
    larger: bool
    best: Row
    level: list[Row]  # those that cannot be told from the best
    guessing: float | None  # the score of an answer that does not look at the input
    beats_guessing: bool
    fastest: Row | None  # None where no time can be trusted
    trade: Row | None  # the fastest of those close to the best
    plateau: bool  # no attention has left it, so none is ranked
    alone: bool  # the only one of several with a result so far

    @property
    def has_winner(self) -> bool:
        return self.beats_guessing and not self.plateau and not self.alone


def find(rows: Sequence[Row], guessing: dict[str, float] | None = None, *, busy: str | None = None) -> Findings | None:
    """None where nothing has finished. `busy` says why times are not to be trusted, if they are not."""
    done = finished(rows)
    alone = len(done) == 1 < len(rows)
    done = [row for row in done if not stuck(row)] or done
    if not done:
        return None
    larger = bool(done[0]["larger_is_better"])
    sign = -1 if larger else 1
    error = guessing["error"] if guessing else 0.0
    timed = [] if busy else [row for row in done if row.get("relative_time") and row.get("relative_quartiles")]
    best = min(
        done, key=lambda row: (sign * row["mean"], row.get("relative_time") or math.inf)
    )  # of equals the fastest
    near = [row for row in timed if row is best or close(row, best)]
    gain = None if guessing is None else sign * (guessing["score"] - best["mean"])
    beats = gain is None or gain > max(ERRORS * error, best["sd"] or 0.0)
    return Findings(
        metric=done[0]["metric"],
        larger=larger,
        best=best,
        level=[row for row in done if row is not best and tied(row, best, error)],
        guessing=None if guessing is None else guessing["score"],
        beats_guessing=beats,
        fastest=min(timed, key=time_of, default=None),
        trade=min(near, key=time_of, default=None) if beats else None,
        plateau=all(map(stuck, done)),
        alone=alone,
    )


def finished(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["mean"] is not None and math.isfinite(row["mean"])]


def stuck(row: Row) -> bool:
    """Whether a run has not left the plateau: such an attention is marked, not ranked."""
    return None in row.get("left_plateau", ())


def time_of(row: Row) -> float:
    return row["relative_time"]


def reference(rows: Sequence[Row]) -> Row:
    """Whose time is 1: full attention, else the first."""
    return next((row for row in rows if split_spec(row["attention"])[0] == "full"), rows[0])


def spread(a: Row, b: Row) -> float:
    """The standard deviation of the difference of two attentions over seeds; 0 where it is unknown."""
    return math.hypot(a["sd"] or 0.0, b["sd"] or 0.0)


def close(row: Row, best: Row) -> bool:
    return abs(row["mean"] - best["mean"]) <= max(CLOSE * abs(best["mean"]), spread(row, best))


def tied(row: Row, best: Row, error: float) -> bool:
    """Equal as far as can be told: the seeds overlap, or the difference is within the noise of seeds or test set."""
    several = min(len(row["scores"]), len(best["scores"])) > 1
    overlap = max(min(row["scores"]), min(best["scores"])) <= min(max(row["scores"]), max(best["scores"]))
    return (several and overlap) or abs(row["mean"] - best["mean"]) <= max(spread(row, best), ERRORS * error)


def untrusted(comparison: dict[str, Any]) -> str | None:
    """Why the times of a comparison say nothing about speed; None if they do."""
    timing = comparison.get("timing")
    if timing is None:
        return "the relative cost has not been measured side by side, only in training runs minutes apart"
    return timing["busy"]


# ---- words -------------------------------------------------------------------------------------------------


def number(value: float, like: float | None = None) -> str:
    """A metric: 0.912, 23.41, 1,204; with as many decimals as `like` would have."""
    size = abs(value if like is None else like)
    decimals = 3 if size < 10 else 2 if size < 1000 else 0
    return f"{value:,.{decimals}f}" if math.isfinite(value) else str(value)


def score(row: Row) -> str:
    """mean ± sd; one seed has no ±."""
    return number(row["mean"]) + ("" if row["sd"] is None else f" ± {number(row['sd'], row['mean'])}")


def name(row: Row) -> Markup:
    return element("b", breakable(row["attention"]), class_=f"k{row['colour']}")


def names(rows: Sequence[Row]) -> Markup:
    """a; a and b; a, b and c."""
    found = [name(row) for row in rows]
    return found[0] if len(found) == 1 else Markup(", ").join(found[:-1]) + Markup(" and ") + found[-1]


def pace(ratio: float) -> str:
    """A ratio of times: «in 31 % of the time», «in the same time», «in 2.4 times the time»."""
    if 0.95 <= ratio <= 1.05:
        return "in the same time"
    return f"in {100 * ratio:.0f} % of the time" if ratio < 1 else f"in {ratio:.1f} times the time"


def headline(found: Findings | None) -> Markup:
    """The finding in one or two sentences."""
    if found is None:
        return Markup("No run has finished yet.")
    if found.alone:
        return Markup("Only {} has a result so far, {} {}.").format(
            name(found.best), found.metric, number(found.best["mean"])
        )
    if not found.beats_guessing:
        return Markup("No attention beats guessing, {} {}: this comparison has no winner.").format(
            found.metric, number(found.guessing or 0.0)
        )
    if found.plateau:
        return Markup("No attention has left the plateau in these steps: this comparison has no winner.")
    if found.level:
        who = names([found.best, *found.level])
        start = Markup("{} are level: the best {} is {}, and the differences are within the noise").format(
            who, found.metric, number(found.best["mean"])
        )
        return start + _speed_of_equals(found)
    start = Markup("{} has the best {}, {}").format(name(found.best), found.metric, number(found.best["mean"]))
    return start + _speed(found)


def _speed_of_equals(found: Findings) -> Markup:
    """Of those that are level, the fastest is what one wants to know."""
    equals = [found.best, *found.level]
    timed = [row for row in equals if row.get("relative_time")]
    if found.fastest is None or len(timed) < 2:
        return Markup(".")
    quick, slow = min(timed, key=time_of), max(timed, key=time_of)
    if quick["relative_time"] / slow["relative_time"] > 0.95:
        return Markup(", at the same cost.")
    ratio = quick["relative_time"] / slow["relative_time"]
    return Markup("; {} needs {} of the time of {}.").format(name(quick), f"{100 * ratio:.0f} %", name(slow))


def _speed(found: Findings) -> Markup:
    best, fastest, trade = found.best, found.fastest, found.trade
    if fastest is None or trade is None:
        return Markup(".")
    if fastest is best:
        return Markup(", and is the fastest.")
    ratio = fastest["relative_time"] / best["relative_time"] if best.get("relative_time") else None
    if trade is fastest:
        when = "" if ratio is None else " " + pace(ratio)
        return Markup("; {} comes close{}.").format(name(trade), when)
    lost = abs(fastest["mean"] - best["mean"])
    quick = Markup("{} is the fastest, but {} {}.").format(
        name(fastest), number(lost), "lower" if found.larger else "higher"
    )
    if trade is best:
        return Markup("; ") + quick
    middle = Markup("; {} comes close {}; ").format(name(trade), pace(trade["relative_time"] / best["relative_time"]))
    return middle + quick


class Card(NamedTuple):
    """One answer: whose, the number, and what it means."""

    title: str
    row: Row
    number: str
    detail: Markup
    level: Sequence[Row] = ()  # those that share the place


def cards(rows: Sequence[Row], found: Findings | None) -> list[Card]:
    """Best, fastest, best trade: those that can be told."""
    if found is None or not found.has_winner:
        return []
    best = found.best
    detail = Markup("the highest {}" if found.larger else "the lowest {}").format(found.metric)
    if found.guessing is not None:
        detail += f"; guessing has {number(found.guessing, best['mean'])}"
    if found.level:
        detail += "; level: the differences are within the noise"
    made = [Card(f"Best {found.metric}", best, score(best), detail, found.level)]
    if found.fastest is None or found.trade is None:
        return made
    fast, trade = found.fastest, found.trade
    value = element("span", f"{found.metric} {score(fast)}", class_="whole")
    detail = Markup("the time per step of {}; {}").format(name(reference(rows)), value)
    made.append(Card("Fastest", fast, relative(fast), detail))
    near = f"the fastest within {100 * CLOSE:.0f} % of the best {found.metric}, or within the spread of the seeds"
    shown = f"{number(trade['mean'])} at {relative(trade)}"
    return [*made, Card("Best trade", trade, shown, Markup("{}").format(near))]


def relative(row: Row, *, trusted: bool = True) -> str:
    """The time of a step: × 0.50; ≈ 0.50 where it was not measured side by side, or on a busy machine."""
    return f"{'×' if trusted and row.get('relative_quartiles') else '≈'} {row['relative_time']:.2f}"


def caution(comparison: dict[str, Any]) -> str:
    """How far the numbers can be trusted, and what to do about it."""
    rows, busy = comparison["rows"], untrusted(comparison)
    done = finished(rows)
    if not done:
        return ""
    said = [
        _unfinished(rows),
        over_seeds(comparison, done),
        over_rates(comparison.get("rates", ()), [comparison["settings"]["rate"]], done, alone=len(done) < 2),
        _on_plateau(comparison, [row for row in done if stuck(row)]),
    ]
    if busy and len(done) > 1:
        said.append(f"The times are not reliable: {busy}. To measure them again, {again()} on a quiet machine.")
    return " ".join(filter(None, said))


def _unfinished(rows: Sequence[Row]) -> str:
    """Which attentions have no result, and why not."""
    done = finished(rows)
    failed = [row["attention"] for row in rows if row not in done and (row["error"] or row["scores"])]
    waiting = [row["attention"] for row in rows if row not in done and not (row["error"] or row["scores"])]
    texts = {"failed": failed, "not finished": waiting}
    return " ".join(f"{listed(who)} {has(who)} {what}." for what, who in texts.items() if who)


def over_seeds(comparison: dict[str, Any], done: Sequence[Row]) -> str:
    """Over how many seeds the numbers are; more are advised where one was asked for and leaves something open."""
    counts, asked = sorted({len(row["scores"]) for row in done}), comparison.get("seeds", 1)
    if counts != [1]:
        seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return f"Mean ± standard deviation over {seeds} seeds."
    if asked > 1:
        return f"1 of {asked} seeds has finished."
    if len(done) < 2 or all(map(stuck, done)):
        return "One seed each."
    return f"One seed each: a difference may be luck; run the comparison with {given('seeds', 3)} to find out."


def over_rates(rates: Sequence[str], own: Iterable[float], done: Sequence[Row], *, alone: bool) -> str:
    """One learning rate for several attentions misleads, and so may the last one of those that were tried. `own` are
    the rates of the recipes; `alone` is an attention that there is nothing to compare with.
    """
    if len(rates) > 1:
        return at_the_edge((row["rate"], tuple(row["rates"])) for row in done if row.get("rate"))
    if alone:
        return ""
    known = sorted(map(float, rates or own))
    bracket = {**dict.fromkeys(multiples(known[0], (0.5, 1))), **dict.fromkeys(multiples(known[-1], (1, 2)))}
    several = f"{given('rates', tuple(bracket))} tries several for each"
    return f"All have the same learning rate, which may suit one better than another: {several}."


def _on_plateau(comparison: dict[str, Any], waiting: Sequence[Row]) -> str:
    """Who has learned nothing yet. The plateau is the score of guessing, or of the bigrams of a text."""
    if not waiting:
        return ""
    what = (comparison.get("plateau") or {}).get("what", "guessing")
    than = "guessing" if what == "guessing" else "a model that sees only the previous token"
    who = [row["attention"] for row in waiting]
    are = "is" if len(who) == 1 else "are"
    text = f"{listed(who)} {are} still on the plateau, no better than {than}, and {has(who)} no rank"
    return f"{text}: train for more steps."


def listed(words: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def has(words: Sequence[str]) -> str:
    return "has" if len(words) == 1 else "have"
