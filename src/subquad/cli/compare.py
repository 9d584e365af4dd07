"""`subquad compare TASK --attention A,B,C`: which attention wins, at what cost?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from subquad.attention.registry import check_name
from subquad.cli.tables import show_table
from subquad.cli.train import Data, Recipe, Settings
from subquad.core.console import err, out
from subquad.core.options import split_list
from subquad.tasks import SUITES, check_data, check_mechanisms, check_settings
from subquad.training.rates import parse_rates, take_rates
from subquad.training.start import check_out

Jobs = Annotated[int, typer.Option(min=1, help="Number of runs at a time, each with its share of the cores.")]


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: subquad compare listops --attention full,combiner-fixed,sbm:clusters=32 --seeds 3")(
        compare
    )


def compare(
    task: Annotated[str, typer.Argument(help="A task, or lra for the five tasks of the Long Range Arena.")],
    attention: Annotated[str, typer.Option(help="Mechanisms with their options, comma-separated.")],
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each attention, each with its own seed.")] = 1,
    recipe: Recipe = "small",
    settings: Settings = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the comparison. Default: out/compare/TASK.", show_default=False),
    ] = None,
    data: Data = None,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Learning rates, comma-separated: each attention is trained with every one of them, and the best on "
            "validation is used (the same as --set rate=A,B,C). Default: that of the recipe.",
            show_default=False,
        ),
    ] = None,
    jobs: Jobs = 1,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the comparison in the folder and start again.")
    ] = False,
) -> None:
    """Train each attention under the same budget, print a table, and write report.html and comparison.json; of lra,
    for each task, and report.html and suite.json of all of them.

    Run the same command again to resume it, or with more attentions or seeds to add them.
    """
    specs = split_list(attention)
    names = SUITES.get(task, (task,))
    chosen, bracket = take_rates(settings or ())
    if bracket and rates is not None:
        raise typer.BadParameter("--rates and several rates in --set rate=… mean the same: give one of them")
    bracket = bracket if rates is None else parse_rates(rates)
    for spec in specs:  # what is wrong is refused at once, before torch is imported
        check_name(spec)
    where = folder or Path("out/compare") / task
    check_out(where)
    for name in names:
        check_settings(name, chosen, recipe)
        check_mechanisms(name, [one for spec in specs for one in spec.split("|")], chosen, recipe)
        check_data(name, data, chosen, recipe)
    from subquad.training.start import quiet

    quiet()
    from subquad.training.compare import Comparison, check, prepare

    folders = {name: where / name if task in SUITES else where for name in names}
    comparisons = [
        Comparison(name, specs, own, recipe, chosen, seeds, data, rates=bracket, jobs=jobs)
        for name, own in folders.items()
    ]
    for each in comparisons:
        check(each)
    if task in SUITES:
        from subquad.reports.suite import check_folder

        check_folder(where, overwrite=overwrite)
    for each in comparisons:
        prepare(each, overwrite=overwrite)
    results = _finish_suite(task, where, comparisons) if task in SUITES else [_finish(each) for each in comparisons]
    if any(row["error"] for result in results for row in result["rows"]):
        raise typer.Exit(1)


def _finish_suite(name: str, folder: Path, comparisons: list[Any]) -> list[dict[str, Any]]:
    """Task by task; what they have in common is shown and reported, also when stopped on the way."""
    from subquad.reports.suite import write_standing

    try:
        return [_finish(each) for each in comparisons]
    finally:
        show_suite(write_standing(folder, name, [each.out for each in comparisons]))
        out().print(Text.assemble("report: ", (str(folder / "report.html"), "bold")), soft_wrap=True)


def _finish(comparison: Any) -> dict[str, Any]:
    """Train, show and report, also when stopped on the way."""
    from subquad.reports.report import write_report
    from subquad.training.compare import compare as start
    from subquad.training.compare import write

    title = f"{comparison.task}: which attention wins, at what cost?"
    try:
        result = start(comparison, lambda text: err().print(text, style="bold", soft_wrap=True))
    except KeyboardInterrupt:
        result = write(comparison)
        show(result)
        write_report(comparison.out / "report.html", result, title=title)
        err().print("stopped; run the same command again to resume", soft_wrap=True)
        raise typer.Exit(130) from None
    show(result)
    report = write_report(comparison.out / "report.html", result, title=title)
    out().print(Text.assemble("report: ", (str(report), "bold")), soft_wrap=True)
    return result


def show(result: dict[str, Any]) -> None:
    """The table, and below it what qualifies its numbers."""
    from subquad.reports import findings
    from subquad.reports.scores import table

    console, rows = out(), result["rows"]
    about = f", recipe {result['recipe']}, length {result['settings']['length']:,}"
    console.print(Text.assemble((result["task"], "bold"), about), soft_wrap=True)
    busy = findings.untrusted(result)
    show_table(console, table(rows, result.get("guessing"), trusted=busy is None))
    found = findings.find([{**row, "colour": 0} for row in rows], result.get("guessing"), busy=busy)
    if found is None:
        return
    console.print(Text(findings.headline(found).striptags()), soft_wrap=True)
    console.print(Text(findings.caution(result)), soft_wrap=True)


def show_suite(suite: dict[str, Any]) -> None:
    """The papers' table, and below it what qualifies its numbers."""
    from subquad.reports.scores import suite_table
    from subquad.reports.suite import caution, find, headline

    console = out()
    about = f", recipe {suite['recipe']}, {len(suite['tasks'])} tasks, accuracy in per cent"
    console.print(Text.assemble((suite["suite"], "bold"), about), soft_wrap=True)
    show_table(console, suite_table(suite))
    console.print(Text(headline(find(suite)).striptags()), soft_wrap=True)
    console.print(Text(caution(suite)), soft_wrap=True)
