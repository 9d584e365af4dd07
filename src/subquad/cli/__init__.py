"""The command `subquad`.

A module of this package is a group of commands: its `add_to(app)` registers them, and `COMMANDS` says which module has
which command. A module is imported when one of its commands is asked for, and imports torch inside its commands only:
`subquad --help`, `subquad list` and wrong arguments are answered at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any

try:
    import rich  # noqa: F401  (typer does without it, our tables do not)
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError as missing:
    print(f'error: the command subquad needs {missing.name}: pip install "subquad[train]"', file=sys.stderr)
    raise SystemExit(2) from None

from subquad.core.console import complain
from subquad.core.names import import_user_module

COMMANDS = {
    "list": "listing",
    "show": "show",
    "plot": "plot",
    "gallery": "plot",
    "bench": "bench",
    "tasks": "train",
    "train": "train",
    "compare": "compare",
    "eval": "use",
    "predict": "use",
    "generate": "use",
    "sample": "sample",
    "study": "study",
    "analyze": "analyze",
    "prove": "prove",
}
IMPORTS = "SUBQUAD_IMPORT"  # modules of --import, for the processes that a command starts
UsageError: Any = typer.BadParameter.__base__  # click's; typer brings its own copy of click or uses the real one


class Commands(TyperGroup):
    """Imports commands when they are asked for. Every error of the user's making is one red line on stderr and exit
    code 2, without a traceback.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        self._load(*COMMANDS)
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._load(*([cmd_name] if cmd_name in COMMANDS else COMMANDS))  # all of them, to suggest the nearest
        return super().get_command(ctx, cmd_name)

    def _load(self, *names: str) -> None:
        for module in dict.fromkeys(COMMANDS[name] for name in names if name not in self.commands):
            part = typer.Typer(callback=lambda: None, context_settings=app.info.context_settings)
            import_module(f"subquad.cli.{module}").add_to(part)
            self.commands.update(typer.main.get_group(part).commands)

    def main(self, args: Any = None, *rest: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            code = super().main(args, *rest, standalone_mode=False, **extra)
        except UsageError as error:
            code = complain(error.format_message())
        except (ValueError, TypeError, OSError, ImportError) as error:
            if "--traceback" in (sys.argv if args is None else args):
                raise
            code = complain(describe(error))
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def describe(error: Exception) -> str:
    """An error in words, for one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: subquad show fixed:w=8 --causal",
)


def _version(wanted: bool) -> None:
    if wanted:
        from subquad import __version__

        print(f"subquad {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def subquad(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import a module first, so that the mechanisms and tasks it registers are known; may be repeated.",
        ),
    ] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,
) -> None:
    """Full attention at sub-quadratic cost: choose, inspect, measure, train and compare attention mechanisms.

    A SPEC names a mechanism with its options: fixed, fixed:w=8, bigbird:block=32,seed=1.
    """
    wanted = [*filter(None, os.environ.get(IMPORTS, "").split(",")), *(modules or ())]
    for module in dict.fromkeys(wanted):
        import_user_module(module)
    if wanted:
        os.environ[IMPORTS] = ",".join(dict.fromkeys(wanted))
    if context.invoked_subcommand is None:
        print(context.get_help())
