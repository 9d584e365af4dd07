"""The table of a comparison, as a terminal shows it."""

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
