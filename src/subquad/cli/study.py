"""`subquad study NAME`: the measurements behind our claims. The commands are those of `cli/studies.py`."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from subquad.cli import Part, PlainHelp
from subquad.cli.studies import STUDIES
from subquad.core.names import unknown

EXAMPLES = {
    "conversion": "conversion model.gguf --text book.txt --out out/demo",
    "gpu-build": "gpu-build --targets sm_90 --widths 64",
    "gpu-time": "gpu-time combiner-fixed longformer:window=256",
}


def add_to(app: typer.Typer) -> None:
    group = Part(cls=Studies)
    group.callback(invoke_without_command=True)(study)
    for name, function in STUDIES.items():
        group.command(name, epilog=f"Example: subquad study {EXAMPLES.get(name, name)}")(function)
    app.add_typer(group, name="study")


def study(context: typer.Context) -> None:
    """Run a study: a measurement behind one of our claims, with a table and a plot."""
    if context.invoked_subcommand is None:
        print(context.get_help())


class Studies(PlainHelp, TyperGroup):
    """Refuses an unknown study with the nearest names."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in STUDIES:
            raise unknown("study", cmd_name, STUDIES)
        return super().get_command(ctx, cmd_name)
