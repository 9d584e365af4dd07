"""What a comparison found, in words: who is best, who is fastest, what is the best trade."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from subquad.core.options import split_spec
from subquad.training.charts import breakable, element

CLOSE = 0.02  # a metric is close to the best within 2 % of it, or within the spread of the seeds

Row = dict[str, Any]  # of comparison.json, with "colour": its place on the page


class Findings(NamedTuple):
    """The rows that stand out, and the metric they are judged by."""

    metric: str
    larger: bool
    best: Row
    fastest: Row | None  # None where no time is known
    trade: Row | None  # the fastest of those close to the best


def find(rows: Sequence[Row]) -> Findings | None:
    """None where nothing has finished."""
    done = finished(rows)
    if not done:
        return None
    larger = bool(done[0]["larger_is_better"])
    sign = -1 if larger else 1
    best = min(
        done, key=lambda row: (sign * row["mean"], row.get("relative_time") or math.inf)
    )  # of equals the fastest
    timed = [row for row in done if row.get("relative_time")]
    fastest = min(timed, key=time_of, default=None)
    near = [row for row in timed if row is best or close(row, best)]
    return Findings(done[0]["metric"], larger, best, fastest, min(near, key=time_of, default=None))


def finished(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["mean"] is not None and math.isfinite(row["mean"])]


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


def rivals(rows: Sequence[Row], best: Row) -> list[Row]:
    """Those that the seeds cannot tell from the best."""
    return [row for row in finished(rows) if row is not best and abs(row["mean"] - best["mean"]) <= spread(row, best)]


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
    """The finding in one sentence."""
    if found is None:
        return Markup("No run has finished yet.")
    best, fastest, trade = found.best, found.fastest, found.trade
    start = Markup("{} has the best {}, {}").format(name(best), found.metric, number(best["mean"]))
    if fastest is None or trade is None:
        return start + "."
    if fastest is best:
        return start + ", and is the fastest."
    ratio = fastest["relative_time"] / best["relative_time"] if best.get("relative_time") else None
    if trade is fastest:
        when = "" if ratio is None else " " + pace(ratio)
        return start + Markup("; {} comes close{}.").format(name(trade), when)
    lost = abs(fastest["mean"] - best["mean"])
    quick = Markup("{} is the fastest, but {} {}.").format(
        name(fastest), number(lost), "lower" if found.larger else "higher"
    )
    if trade is best:
        return start + "; " + quick
    middle = Markup("; {} comes close {}; ").format(name(trade), pace(trade["relative_time"] / best["relative_time"]))
    return start + middle + quick


class Card(NamedTuple):
    """One answer: whose, the number, and what it means."""

    title: str
    row: Row
    number: str
    detail: Markup


def cards(rows: Sequence[Row], found: Findings | None) -> list[Card]:
    """Best, fastest, best trade."""
    if found is None:
        return []
    best, equal = found.best, rivals(rows, found.best)
    detail = Markup("the highest {}" if found.larger else "the lowest {}").format(found.metric)
    if equal:
        detail += Markup("; level with {}").format(names(equal))
        detail += ", within the spread of the seeds" if best["sd"] is not None else ""
    made = [Card(f"Best {found.metric}", best, score(best), detail)]
    if found.fastest is None or found.trade is None:
        return made
    fast, trade = found.fastest, found.trade
    value = element("span", f"{found.metric} {score(fast)}", class_="whole")
    detail = Markup("the time per step of {}; {}").format(name(reference(rows)), value)
    made.append(Card("Fastest", fast, f"× {fast['relative_time']:.2f}", detail))
    near = f"the fastest within {100 * CLOSE:.0f} % of the best {found.metric}, or within the spread of the seeds"
    shown = f"{number(trade['mean'])} at × {trade['relative_time']:.2f}"
    return [*made, Card("Best trade", trade, shown, Markup("{}").format(near))]


def caution(rows: Sequence[Row]) -> str:
    """How far the numbers can be trusted."""
    counts = sorted({len(row["scores"]) for row in finished(rows)})
    if not counts:
        return ""
    if counts == [1]:
        return "One seed each: a difference may be luck; --seeds 3 would tell."
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"Mean ± standard deviation over {seeds} seeds."
