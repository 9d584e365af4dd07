"""`subquad compare TASK --attention A,B,C`: which attention wins, at what cost?"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from subquad.cli.console import err, out
from subquad.cli.train import Data, Recipe, Settings, quiet


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: subquad compare listops --attention full,combiner-fixed,sbm:clusters=32 --seeds 3")(
        compare
    )


def compare(
    task: Annotated[str, typer.Argument(help="A task, or lra for the five of the Long Range Arena.")],
    attention: Annotated[str, typer.Option(help="Mechanisms with their options, with commas between.")],
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each.")] = 1,
    recipe: Recipe = "small",
    settings: Settings = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Else out/compare/TASK.", show_default=False)] = None,
    data: Data = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the folder's comparison first.")] = False,
) -> None:
    """Train each attention under the same budget, print the table, write report.html and comparison.json.

    The same command again goes on where it was stopped, and adds attentions or seeds.
    """
    quiet()
    from subquad.training.compare import SUITES, Comparison, check, prepare, split_list

    specs, where = split_list(attention), folder or Path("out/compare") / task
    names = SUITES.get(task, (task,))
    comparisons = [
        Comparison(name, specs, where / name if task in SUITES else where, recipe, tuple(settings or ()), seeds, data)
        for name in names
    ]
    for each in comparisons:
        check(each)
    for each in comparisons:
        prepare(each, overwrite=overwrite)
    results = [_finish(each) for each in comparisons]
    if task in SUITES:
        out().print(suite_table(results))
    if any(row["error"] for result in results for row in result["rows"]):
        raise typer.Exit(1)


def _finish(comparison: Any) -> dict[str, Any]:
    """Train, tell, report: also when stopped on the way."""
    from subquad.training.compare import compare as start
    from subquad.training.compare import write
    from subquad.training.report import write_report

    title = f"{comparison.task}: which attention wins, at what cost?"
    try:
        result = start(comparison, lambda text: err().print(text, style="bold", soft_wrap=True))
    except KeyboardInterrupt:
        result = write(comparison)
        show(result)
        write_report(comparison.out / "report.html", result, title=title)
        err().print("stopped; the same command goes on from here", soft_wrap=True)
        raise typer.Exit(130) from None
    show(result)
    report = write_report(comparison.out / "report.html", result, title=title)
    out().print(f"open the report: [bold]{report}[/bold]", soft_wrap=True)
    return result


def show(result: dict[str, Any]) -> None:
    console = out()
    console.print(f"[bold]{result['task']}[/bold], recipe {result['recipe']}, length {result['settings']['length']:,}")
    console.print(table(result["rows"]))
    reference = result["rows"][0].get("reference")
    if reference and reference.split(":")[0] != "full":
        console.print(f"time/step relative to {reference}")


def table(rows: list[dict[str, Any]]) -> Table:
    """One line per attention."""
    metric = next((row["metric"] for row in rows if row["metric"]), "metric")
    result = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("attention", metric, "time/step", "memory", "parameters", "connections"):
        result.add_column(title, justify="left" if title == "attention" else "right", no_wrap=True)
    for row in rows:
        if row["mean"] is None:
            result.add_row(row["attention"], "failed" if row["error"] else "–", *["–"] * 4)
            continue
        relative = "–" if row["relative_time"] is None else f"× {row['relative_time']:.2f}"
        result.add_row(
            row["attention"], score(row), relative, f"{row['memory'] / 2**20:,.0f} MiB", f"{row['parameters']:,}",
            f"{row['connections']:,.0f}",
        )  # fmt: skip
    return result


def score(row: dict[str, Any]) -> str:
    spread = "" if row["sd"] is None else f" ± {row['sd']:.3f}"
    return f"{row['mean']:.3f}{spread}"


def suite_table(results: list[dict[str, Any]]) -> Table:
    """The papers' table: one column per task, in per cent, and the average."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("attention", *(result["task"] for result in results), "average"):
        table.add_column(title, justify="left" if title == "attention" else "right")
    for rows in zip(*(result["rows"] for result in results), strict=True):
        means = [row["mean"] for row in rows]
        cells = ["–" if mean is None else f"{100 * mean:.2f}" for mean in means]
        average = "–" if None in means else f"{100 * statistics.mean(means):.2f}"
        table.add_row(rows[0]["attention"], *cells, average)
    return table
