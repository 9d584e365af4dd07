"""The command `subquad`.

A module of this package is a group of commands: its `add_to(app)` registers them, and its name stands in
`MODULES`. Modules import torch inside their commands only, so that `subquad --help` answers at once.
"""

from __future__ import annotations

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

from subquad.cli.console import complain

MODULES = ("listing", "show", "plot", "bench", "train", "compare", "use", "sample", "study", "analyze", "prove")
UsageError: Any = typer.BadParameter.__base__  # click's; typer brings its own copy of click or uses the real one


class Commands(TyperGroup):
    """Every error of the user's making is one red line on stderr and exit code 2, without a traceback."""

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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
) -> None:
    """Full attention at sub-quadratic cost: look at the mechanisms, draw them, measure them.

    A SPEC names a mechanism with its options: fixed, fixed:w=8, bigbird:block=32,seed=1.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


for module in MODULES:
    import_module(f"subquad.cli.{module}").add_to(app)


def main() -> None:
    """The entry point."""
    app(prog_name="subquad")
