"""The command `subquad`.

A module of this package is a group of commands: its `add_to(app)` registers them, and `COMMANDS` says which module has
which command. A module is imported when one of its commands is asked for, and imports torch inside its commands only:
`subquad --help`, `subquad list` and wrong arguments are answered at once.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from typing import Annotated, Any

try:
    import rich  # noqa: F401  (typer does without it, our tables do not)
    import typer
    from typer.core import TyperCommand, TyperGroup
except ModuleNotFoundError as missing:
    print(f'error: the command subquad needs {missing.name}: pip install "subquad[train]"', file=sys.stderr)
    raise SystemExit(2) from None

from subquad.core.child import IMPORTS
from subquad.core.console import complain
from subquad.core.names import import_user_module
from subquad.core.spoken import command_line

COMMANDS = {
    "list": "listing",
    "show": "show",
    "plot": "plot",
    "gallery": "plot",
    "explore": "explore",
    "bench": "bench",
    "advise": "advise",
    "calibrate": "advise",
    "tasks": "train",
    "train": "train",
    "compare": "compare",
    "reproduce": "reproduce",
    "eval": "use",
    "predict": "use",
    "generate": "use",
    "sample": "use",
    "study": "studies",
    "doctor": "doctor",
    "analyze": "analyze",
    "prove": "prove",
    "convert": "convert",
    "perplexity": "convert",
    "adapt": "convert",
    "passkey": "convert",
}
_GPU = ": a GPU is used where torch finds one; with CUDA_VISIBLE_DEVICES= before the command, the processor"
DEVICE = dict.fromkeys(("train", "compare", "reproduce"), _GPU)  # commands that choose the device themselves
VALUES = {"int": "INTEGER", "float": "NUMBER", "ath": "PATH"}  # part of the name of a type: what help calls it
UsageError: Any = typer.BadParameter.__base__  # click's; typer brings its own copy of click or uses the real one


class PlainHelp:
    """Help whose paragraphs fit the terminal, and which says in users' words what a parameter takes.

    --help is a flag that is False by default: of a None typer asks pydantic what it means, which costs 0.1 s.
    """

    help: str | None
    params: list[Any]

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.help = "\n\n".join(" ".join(part.split()) for part in (self.help or "").split("\n\n"))
        for param in self.params:
            name_values(param)

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None and option.default is None:
            option.default = False
        return name_values(option)


def name_values(param: Any) -> Any:
    """INTEGER and PATH where typer would show the types of Python; nothing for flags, whose `<bool>` would ask for a
    value. Arguments are names in capitals, in brackets if they can be left out.
    """
    if param is not None and param.param_type_name == "argument":
        param.metavar = param.metavar or param.name.upper()
        pieces = [(param.metavar if param.required else f"[{param.metavar}]") + "..." * (param.nargs != 1)]
        param.get_usage_pieces = lambda ctx: pieces
        param.display_type_rich = lambda ctx: None
    elif param is not None and param.metavar is None:
        given = getattr(param, "type_descriptor", None)  # of newer versions of typer; older ones have click's types
        kind = str(given.annotation) if given is not None else param.type.name
        value = next((word for part, word in VALUES.items() if part in kind), "TEXT")
        param.metavar = "" if param.is_flag else value
    return param


def given(context: typer.Context) -> dict[str, str]:
    """What the command line has, by the name of the parameter: its flag, or the value of an argument.

    Sources are told by their names: typer may bring its own copy of click, whose enumeration is another one.
    """
    sources = {param: context.get_parameter_source(param.name or "") for param in context.command.params}
    there = [param for param, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    return {
        str(param.name): str(context.params[param.name]) if param.param_type_name == "argument" else param.opts[0]
        for param in there
    }


class Command(PlainHelp, TyperCommand):
    pass


class Part(typer.Typer):
    """The commands of one module."""

    def command(self, *names: Any, **options: Any) -> Any:
        return super().command(*names, **{"cls": Command, **options})


class Commands(PlainHelp, TyperGroup):
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
            part = Part(callback=lambda: None, context_settings=app.info.context_settings)
            import_module(f"subquad.cli.{module}").add_to(part)
            self.commands.update(typer.main.get_group(part).commands)

    def main(self, args: Any = None, *rest: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        try:
            with command_line():
                code = super().main(import_modules(words), *rest, standalone_mode=False, **extra)
        except UsageError as error:
            code = complain(in_words(error, words))
        except (ValueError, TypeError, OSError, ImportError) as error:
            if "--traceback" in words:
                raise
            code = complain(describe(error))
        except (MemoryError, RuntimeError) as error:
            if "--traceback" in words or not is_out_of_memory(error):
                raise
            code = complain(out_of_memory(error))
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def import_modules(words: list[str]) -> list[str]:
    """Import what `--import MODULE` names before the command, here and in the processes that the command starts.
    Returns the other words.
    """
    rest, wanted = list(words), [*filter(None, os.environ.get(IMPORTS, "").split(","))]
    at = 0
    while at < len(rest) and rest[at].startswith("-"):
        option, equals, module = rest[at].partition("=")
        if option != "--import":
            at += 1
            continue
        module = module if equals else "".join(rest[at + 1 : at + 2])
        if not module or module.startswith("-"):
            raise typer.BadParameter("--import needs the name of a module")
        wanted.append(module)
        del rest[at : at + (1 if equals else 2)]
    for module in dict.fromkeys(wanted):
        import_user_module(module)
    if wanted:
        os.environ[IMPORTS] = ",".join(dict.fromkeys(wanted))
    return rest


def in_words(error: Any, words: list[str]) -> str:
    """The message of a usage error. Newer versions of typer do not name the value of an option: it is added."""
    suggested = "Did you mean" in error.message  # by typer; click 8.4 and newer would add the same words
    message, should = error.message if suggested else error.format_message(), "Input should be "
    command = getattr(error.ctx, "info_name", "")
    unknown = re.match(r"No such option:? '?--([\w-]+)", message)  # with or without the colon, as click has it
    if unknown and unknown[1] == "device":
        return f"No such option: --device{DEVICE.get(command, '')}"
    if unknown and command in ("train", "compare"):
        name = unknown[1].replace("-", "_")
        return f"{message.rstrip('.')}; a setting of the recipe is changed with --set, as in --set {name}=VALUE"
    option, _, rest = message.removeprefix("Invalid value for ").partition(": ")
    given = [word for word in words if word.split("=")[0] in option.replace("'", "").split(" / ")]
    if not rest.startswith(should) or not given:
        return message.removeprefix("Invalid value: ")
    name, equals, value = given[-1].partition("=")
    value = value if equals else "".join(words[words.index(name) + 1 :][:1])
    return f"{name} must be {rest.removeprefix(should).partition(',')[0]}, not {value!r}"


def describe(error: Exception) -> str:
    """An error in words, for one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def is_out_of_memory(error: Exception) -> bool:
    """torch's allocator of the CPU raises a RuntimeError, that of a GPU a class of its own."""
    return isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "allocate memory" in str(error)


def out_of_memory(error: Exception) -> str:
    asked = re.search(r"allocate (\d+) bytes", str(error))
    needed = f": one tensor would take {int(asked[1]) / 2**30:,.0f} GiB" if asked else ""
    return f"there is not enough memory{needed}; choose smaller sizes"


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
        bool,  # `import_modules` has taken it off the line: a list would make typer load pydantic for every command
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import a module first, so that the mechanisms and tasks it registers are available; may be repeated.",
        ),
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,
) -> None:
    """Full attention at sub-quadratic cost: choose, inspect, measure, train and compare attention mechanisms.

    A SPEC names a mechanism with its options: fixed, fixed:w=8, bigbird:block=32,seed=1.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
