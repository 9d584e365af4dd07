"""`subquad train TASK`: train a model; `subquad tasks`: what there is to train on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from subquad.attention.registry import check_name
from subquad.cli.listing import table_of
from subquad.cli.tables import show_table
from subquad.core.console import out
from subquad.core.options import fields
from subquad.tasks import available, check_data, check_mechanisms, check_settings, describe, task_class
from subquad.tasks import task as make_task
from subquad.training.rates import take_rates
from subquad.training.start import check_start, slug

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe; may be repeated."),
]
Data = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of data sets. Default: $SUBQUAD_DATA, otherwise ./data.", show_default=False),
]
Recipe = Annotated[
    str,
    typer.Option(
        help="small: a meaningful result in minutes on a laptop; paper: the setting of the paper; some tasks have more."
    ),
]


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: subquad train listops --attention combiner-fixed --set steps=500")(train)
    app.command(epilog="Example: subquad tasks listops")(tasks)


def train(
    task: Annotated[str, typer.Argument(help="A task; subquad tasks lists them.")],
    attention: Annotated[
        str,
        typer.Option(help="A mechanism with its options; several, separated by |, are assigned to the layers in turn."),
    ] = "full",
    recipe: Recipe = "small",
    settings: Settings = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data, the model and the order of the examples.")] = 0,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the run. Default: out/train/TASK/ATTENTION/seedN.", show_default=False),
    ] = None,
    data: Data = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the folder.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run in the folder and start again.")
    ] = False,
) -> None:
    """Train one model and test it. Checkpoints, log.jsonl, TensorBoard curves and the best model go to a folder.

    The best checkpoint is the one with the best validation metric; the test set is read once, with that one.
    Under torchrun the batch is shared by the processes: torchrun --nproc-per-node 2 -m subquad train …
    """
    specs = split_attention(attention)
    check_name(attention)
    check_one_rate(task, attention, settings or ())
    check_settings(task, settings or (), recipe)
    check_mechanisms(task, specs, settings or (), recipe)
    where = folder or Path("out/train") / task / slug("+".join(specs)) / f"seed{seed}"
    if os.environ.get("WORLD_SIZE", "1") == "1":  # of several processes the first may have begun: it checks for all
        check_start(where, resume=resume, overwrite=overwrite)
    check_data(task, data, settings or (), recipe)
    run = make_run(task, specs, recipe, settings, seed, where, data)
    from subquad.training.run import main_process
    from subquad.training.run import train as start

    result = start(run, resume=resume, overwrite=overwrite)
    if main_process():
        show(result, run.out)


def split_attention(text: str) -> list[str]:
    specs = [piece.strip() for piece in text.split("|")]
    if not all(specs):
        raise typer.BadParameter(f"--attention must be a spec, or several separated by |, not {text!r}")
    return specs


def check_one_rate(task: str, attention: str, settings: Sequence[str]) -> None:
    rates = take_rates(settings)[1]
    if rates:
        command = f"subquad compare {task} --attention '{attention}' --rates {','.join(rates)}"
        raise typer.BadParameter(f"train takes one rate; to try several and keep the best on validation: {command}")


def make_run(task: str, specs: list[str], recipe: str, settings: Any, seed: int, folder: Path, data: Path | None):
    """Everything that can be wrong with a request is found here, before anything is loaded or written."""
    made = make_task(task, recipe, tuple(settings or ()), data, seed)
    from subquad.training.start import quiet

    quiet()
    from subquad.training.run import Run

    return Run(made, specs, folder, recipe, seed)


def show(result: dict[str, Any], folder: Path) -> None:
    console = out()
    numbers = "  ".join(f"{key} {value:.4f}" for key, value in result["test"].items())
    console.print(Text.assemble(("test", "bold"), f"  {numbers}"), soft_wrap=True)
    best = (
        f"best of {result['steps']} steps: {result['best_step']} (valid {result['metric']} {result['valid'] or 0:.4f})"
    )
    best = f"after {result['steps']} steps" if result["best_step"] is None else best
    console.print(
        f"{best}, "
        f"{result['parameters']:,} parameters, {1e3 * result['step_seconds']:.0f} ms/step, "
        f"{result['memory'] / 2**20:,.0f} MiB",
        soft_wrap=True,
    )
    console.print(f"model: {folder / 'model'}", soft_wrap=True)


def tasks(
    name: Annotated[str | None, typer.Argument(help="A task, to show its recipes.", show_default=False)] = None,
) -> None:
    """List the tasks, or the recipes of one task."""
    if name is None:
        found = [describe(each) for each in available()]
        rows = [[each["name"], each["title"], each["head"], each["metric"], _data(each)] for each in found]
        show_table(out(), table_of(("task", "description", "head", "metric", "data"), rows))
        return
    about, recipes = describe(name), task_class(name).recipes
    out().print(Text.assemble((name, "bold"), f": {about['title']}"), soft_wrap=True)
    out().print(f"metric: {about['metric']}; data: {_data(about)}\n", soft_wrap=True)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("setting", *recipes, "meaning"):
        table.add_column(title)
    for field in fields(type(next(iter(recipes.values())))):
        choices = f" ({field.allowed()})" if field.allowed().startswith("one of") else ""
        numbers = (str(getattr(each, field.name)) for each in recipes.values())
        table.add_row(field.name, *numbers, field.help + choices)
    show_table(out(), table)


def _data(task: dict[str, Any]) -> str:
    return "to download" if task["needs_data"] else "generated"
