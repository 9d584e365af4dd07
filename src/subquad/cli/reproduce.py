"""`subquad reproduce NAME`: a table or figure of one of the four papers, made again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from subquad.cli import given
from subquad.cli.compare import Jobs
from subquad.cli.tables import show_table
from subquad.cli.train import Data
from subquad.core.console import err, out
from subquad.reproductions import PAPERS, find
from subquad.reproductions.declare import SCALES, Reproduction, check_possible, limited
from subquad.tasks import check_data
from subquad.training.rates import parse_rates
from subquad.training.start import check_out

WORDS = {
    "trained": "trained",
    "measured": "measured",
    "drawn": "drawn",
    "same": "repeats another",
    "stated": "nothing to run",
}
TAKES = {  # what is not trained: the options that it reads, and why there are no others
    "measured": (("method", "column", "folder", "results"), "is counted and measured, not trained"),
    "drawn": (("folder",), "is drawn, and nothing is trained for it"),
    "sbm_trained": (("recipe", "folder", "data"), "is drawn from runs that are finished"),  # in that module
}


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: subquad reproduce combiner-table-1 --seeds 3 --column CIFAR-10")(reproduce)


def reproduce(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="A table or figure; without a name they are listed.")] = None,
    recipe: Annotated[
        str, typer.Option(help="small: scaled down for a laptop; paper: the size of the paper.")
    ] = "small",
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each method, each with its own seed.")] = 1,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Learning rates, comma-separated; the best on validation is used for each method. none: only that of "
            "the recipe. Default: those of the table; at full size few tables have any.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="Only this method of the table; may be repeated.")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option("--column", help="Only this column of the table; may be repeated.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder of the runs, which are shared between tables.")] = Path(
        "out/reproduce"
    ),
    results: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the result as JSON. If it has an earlier result, its runs are not repeated. "
            "Default: OUT/results.",
            show_default=False,
        ),
    ] = None,
    pages: Annotated[
        Path | None,
        typer.Option(
            help="Write the generated part of DOCS/experiments.md and its figures from DOCS/results, and stop."
        ),
    ] = None,
    jobs: Jobs = 1,
    data: Data = None,
) -> None:
    """Reproduce a table or figure of the four papers, and report whether it agrees with the paper.

    The scaled-down version is the default. Run the same command again to resume it, or with more seeds to add them. The
    result shows our numbers next to the paper's, the order of the methods in both, and every claim of the paper:
    whether it holds, fails, or cannot be decided within the spread of the seeds.
    """
    options = given(context)
    if pages is not None:
        _refuse(options, ("pages",), "--pages runs nothing")
        return _write_pages(pages)
    if name is None:
        if options:
            are = "is" if len(options) == 1 else "are"
            missing = f"NAME is missing: the table or figure that {' and '.join(options.values())} {are} for"
            raise typer.BadParameter(missing)
        return _list()
    if recipe not in SCALES:
        raise typer.BadParameter(f"--recipe must be one of {', '.join(SCALES)}, not {recipe!r}")
    whole = find(name)
    check_possible(whole, recipe)
    _check_options(whole, options)
    chosen = limited(whole, method or (), column or ())
    bracket = None if rates is None else () if rates == "none" else parse_rates(rates)
    results = results or folder / "results"
    check_out(folder)
    check_out(results, "results")
    _check_data(chosen, recipe, data)
    from subquad.training.start import quiet

    quiet()
    from subquad.reproductions.earlier import read_earlier
    from subquad.reproductions.runner import Plan

    earlier = read_earlier(results, chosen.key, recipe)
    before = earlier if chosen.kind == "trained" else {}  # what is measured is written anew
    if whole.key != name:
        err().print(f"{name} is part of {whole.key}, which is run", soft_wrap=True)
    _run(Plan(chosen, folder, recipe, seeds, bracket, data, before, jobs, results), results)


def _check_options(whole: Reproduction, options: dict[str, str]) -> None:
    """Refuse what a table or figure that is not trained would ignore."""
    module = whole.function.partition(":")[0].split(".")[-1]
    kind = module if module in TAKES else whole.kind
    if kind in TAKES:
        known, why = TAKES[kind]
        _refuse(options, ("name", *known), f"{whole.key} {why}")


def _refuse(options: dict[str, str], known: Sequence[str], why: str) -> None:
    """Refuse the options (by parameter: the flag) that are not known."""
    if flags := [flag for name, flag in options.items() if name not in known]:
        raise typer.BadParameter(f"{why}: leave out {' and '.join(flags)}")


def _check_data(chosen: Reproduction, recipe: str, data: Path | None) -> None:
    """Refuse a table if the data of all its columns are missing; if only some are, the others are run."""
    missing: dict[str, list[str]] = {}  # columns by what is missing
    for column in chosen.run_columns if chosen.kind == "trained" else ():
        scale = column.scale(recipe)
        try:
            if scale.begin is not None:
                check_data("mlm", data, scale.begin.settings, scale.begin.recipe)
            check_data(column.task, data, scale.settings, scale.recipe)
        except FileNotFoundError as error:
            missing.setdefault(str(error), []).append(column.name)
    if missing and sum(map(len, missing.values())) == len(chosen.run_columns):
        raise FileNotFoundError("; ".join(f"{', '.join(names)}: {error}" for error, names in missing.items()))


def _list() -> None:
    for paper, all_of in PAPERS.items():
        out().print(Text(paper, "bold"))
        table = Table(box=None, show_header=False, pad_edge=False)
        for each in all_of:
            table.add_row(f"  {each.key}", WORDS[each.kind] if not each.too_big else "paper's size only", each.title)
        out().print(table)
    out().print("subquad reproduce NAME runs the scaled-down version, --recipe paper the full size", style="dim")


def _write_pages(docs: Path) -> None:
    from subquad.reproductions.pages import write_pages

    for path in write_pages(docs):
        out().print(f"written: {path}", soft_wrap=True)


def _run(plan: Any, results: Path) -> None:
    from subquad.reproductions.runner import reproduce, so_far, write_result

    try:
        result = reproduce(plan, lambda text: err().print(text, style="bold", soft_wrap=True))
    except KeyboardInterrupt:
        if plan.reproduction.kind == "trained":
            partial = so_far(plan)
            if partial["ours"]:
                show(partial)
                write_result(results, partial)
        err().print("stopped; run the same command again to resume", soft_wrap=True)
        raise typer.Exit(130) from None
    if "picture" in result:
        out().print(f"drawn: {result['picture']}", soft_wrap=True)
        return
    show(result)
    out().print(f"result: {write_result(results, result)}", soft_wrap=True)


def show(result: dict[str, Any]) -> None:
    """Ours beside the paper's, the orders, the claims, the verdict."""
    from subquad.reproductions.pages import SIGNS, about_runs, cell, stated

    console = out()
    console.print(Text.assemble((result["place"], "bold"), f": {result['title']}"), soft_wrap=True)
    if result["differs"]:
        console.print(f"differs from the paper: {result['differs']}", style="dim", soft_wrap=True)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("ours (the paper's)")
    for name in result["columns"]:
        table.add_column(name, justify="right")
    for name in result["methods"]:
        table.add_row(name, *(cell(result, name, column) for column in result["columns"]))
    show_table(console, table)
    for name, column in result["columns"].items():
        if len(column["order"]) > 1:
            console.print(f"{name}, from best to worst: {', '.join(column['order'])}", soft_wrap=True, markup=False)
            if column["paper_order"]:
                order = ", ".join(column["paper_order"])
                console.print(f"{name}, in the paper:      {order}", soft_wrap=True, markup=False)
    for each in result["claims"]:
        larger = result["columns"][each["column"]]["larger_is_better"]
        what = f"{SIGNS[each['status']]} {stated(each, larger=larger)} ({each['column']})"
        console.print(f"{what}: {each['detail']}", soft_wrap=True, markup=False)
    for line in about_runs(result):
        console.print(line, style="dim", soft_wrap=True, markup=False)
    for note in result["notes"]:
        console.print(f"missing: {note}", style="dim", soft_wrap=True, markup=False)
    console.print(Text(result["sentence"], "bold"), soft_wrap=True)
