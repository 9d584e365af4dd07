"""The tables of a comparison and of a suite, as a terminal shows them."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from subquad.reports import findings
from subquad.reports.report import duration


def table(rows: list[dict[str, Any]], guessing: dict[str, float] | None = None, *, trusted: bool = True) -> Table:
    """One line per attention, and one for guessing."""
    metric = next((row["metric"] for row in rows if row["metric"]), "metric")
    result = Table(box=None, header_style="bold", pad_edge=False)
    reference = rows[0].get("reference") or "full"
    titles = ["attention", metric, f"time ({reference} = 1)", "training", "memory", "parameters", "connections"]
    rated = any(row.get("rate") for row in rows)
    titles[2:2] = ["rate", "left plateau"] if rated else []
    for title in titles:
        left = title == "attention"
        result.add_column(title, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    for row in rows:
        if row["mean"] is None:
            result.add_row(row["attention"], "failed" if row["error"] else "–", *["–"] * (len(titles) - 2))
            continue
        chosen = [row["rate"] or "–", plateau(row)] if rated else []
        result.add_row(
            row["attention"], score(row), *chosen, relative(row, trusted), total(row),
            f"{row['memory'] / 2**20:,.0f} MiB", f"{row['parameters']:,}", f"{row['connections']:,.0f}",
        )  # fmt: skip
    if guessing is not None:
        result.add_row("guessing", f"{guessing['score']:.3f}", *[""] * (len(titles) - 2), style="dim")
    return result


def suite_table(suite: dict[str, Any]) -> Table:
    """The papers' table: one column per task, in per cent, and the average; * is a run on the plateau."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("attention", *(each["task"] for each in suite["tasks"]), "average"):
        left = title == "attention"
        table.add_column(title, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    for row in suite["rows"]:
        cells = [percent(each["mean"], each["sd"]) + "*" * findings.stuck(each) for each in row["tasks"].values()]
        table.add_row(row["attention"], *cells, percent(row["average"], row["sd"]))
    chances = [*(each["guessing"] for each in suite["tasks"]), suite["guessing"]]
    if any(chances):
        table.add_row("guessing", *(percent(each and each["score"]) for each in chances), style="dim")
    return table


def percent(mean: float | None, sd: float | None = None) -> str:
    """62.31 ± 0.42; – where it is not known."""
    return "–" if mean is None else f"{100 * mean:.2f}" + ("" if sd is None else f" ± {100 * sd:.2f}")


def score(row: dict[str, Any]) -> str:
    spread = "" if row["sd"] is None else f" ± {row['sd']:.3f}"
    return f"{row['mean']:.3f}{spread}{' (plateau)' if None in row.get('left_plateau', ()) else ''}"


def plateau(row: dict[str, Any]) -> str:
    """At which step the runs left the plateau."""
    steps = ["no" if step is None else str(step) for step in row.get("left_plateau", ())]
    return "step " + ", ".join(steps) if steps and steps != ["no"] else "no" if steps else "–"


def relative(row: dict[str, Any], trusted: bool = True) -> str:
    """The time of a step beside the reference's, with its quartiles, as in the report."""
    if row["relative_time"] is None:
        return "–"
    low, _, high = row.get("relative_quartiles") or (None, None, None)
    return findings.relative(row, trusted=trusted) + ("" if low is None else f" ({low:.2f} to {high:.2f})")


def total(row: dict[str, Any]) -> str:
    return "–" if row.get("total_seconds") is None else duration(row["total_seconds"])
