"""`subquad study NAME`: the measurements behind our claims.

Each module of `subquad.studies` registers its commands with `add_to(app)`. They are imported when the group
is first asked for, because they import torch.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperGroup

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
        self._load()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._load()
        return super().get_command(ctx, cmd_name)

    def _load(self) -> None:
        if self.commands:
            return
        studies = typer.Typer()
        for module in modules():
            if hasattr(module, "add_to"):
                module.add_to(studies)
        self.commands = dict(typer.main.get_group(studies).commands)


def modules() -> list[Any]:
    """The modules of the package of studies."""
    found = find_spec(PACKAGE)
    places = found.submodule_search_locations if found is not None else None
    return [import_module(f"{PACKAGE}.{entry.name}") for entry in pkgutil.iter_modules(places or [])]
