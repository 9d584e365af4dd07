"""`subquad study NAME`: the measurements behind our claims.

A module of `subquad.studies` that has `add_to(app)` registers a command with it, whose name is that of the module: the
module of `subquad study gpu-time` is gpu_time. It is imported when its command is asked for, because it imports torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from subquad.core.names import unknown

PACKAGE = "subquad.studies"


def add_to(app: typer.Typer) -> None:
    studies = typer.Typer(cls=Studies)
    studies.callback(invoke_without_command=True)(study)
    app.add_typer(studies, name="study")


def study(context: typer.Context) -> None:
    """Run a study: a measurement behind one of our claims, with a table and a plot."""
    if context.invoked_subcommand is None:
        print(context.get_help())


class Studies(TyperGroup):
    """A group whose commands come from the modules of `subquad.studies`."""

    def list_commands(self, ctx: Any) -> list[str]:
        self._load(*modules())
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in modules():
            raise unknown("study", cmd_name, modules())
        self._load(cmd_name)
        return super().get_command(ctx, cmd_name)

    def _load(self, *names: str) -> None:
        for name in names:
            if name not in self.commands:
                studies = typer.Typer()
                import_module(modules()[name]).add_to(studies)
                self.commands.update(typer.main.get_group(studies).commands)


def modules() -> dict[str, str]:
    """The studies, and the modules that they are commands of; nothing is imported."""
    found = find_spec(PACKAGE)
    folders = [Path(place) for place in (found.submodule_search_locations or [])] if found is not None else []
    files = sorted(path for folder in folders for path in folder.glob("*.py"))
    has_command = [path.stem for path in files if "\ndef add_to(" in path.read_text(encoding="utf-8")]
    return {name.replace("_", "-"): f"{PACKAGE}.{name}" for name in has_command}
