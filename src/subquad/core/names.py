"""Tables of names: a class imported when it is first asked for, and the error that suggests the nearest names."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

SHOWN_BY = {"attention": "subquad list", "task": "subquad tasks"}  # too many to name in an error


def nearest(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """The known names most like `name`, whatever the case; a beginning counts too (w for width)."""
    by_lower = {each.lower(): each for each in known}
    lower = name.lower()
    found = get_close_matches(lower, by_lower, most, 0.5)
    found += [each for each in by_lower if lower.startswith(each) or each.startswith(lower)]
    return [by_lower[each] for each in dict.fromkeys(found)][:most]


def unknown(kind: str, name: Any, known: Iterable[str]) -> ValueError | TypeError:
    """The error for a `name` that no `kind` has: the nearest names, and all of them or the command that shows them."""
    known = list(known)
    if not isinstance(name, str):
        return TypeError(f"the name of the {kind} must be a string, not {name!r}")
    near = nearest(name, known, 3) if name else []
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    every = f"`{SHOWN_BY[kind]}` shows all {len(known)}" if kind in SHOWN_BY else f"available: {', '.join(known)}"
    return ValueError(
        f"unknown {kind} {name!r}{hint} ({every})" if name else f"the name of the {kind} is missing ({every})"
    )


def look_up(kind: str, name: str, table: dict[str, Any]) -> Any:
    """The class of a table whose entries are classes, or "module:Class" until they are first asked for."""
    if not isinstance(name, str) or name not in table:
        raise unknown(kind, name, table)
    entry = table[name]
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(import_module(module), attribute)
        entry.name = name
        table[name] = entry
    return entry


def import_user_module(name: str) -> Any:
    """A module of the user's, from the working directory too, which comes last: it hides no installed package.

    An error inside it is an ImportError that names its place.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    path = Path(name)
    if "/" in name or "\\" in name or (path.suffix == ".py" and path.is_file()):
        module = ".".join(part for part in path.with_suffix("").parts if part not in ("..", path.anchor))
        raise ValueError(f"{name} is a path, and the name of a module is needed: {module}, without .py or folders")
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.split(".")[0] or error.name == name:
            message = f"module {name!r} not found, neither installed nor in {here}"
            raise ModuleNotFoundError(message, name=name) from None
        raise _failed(name, error) from error
    except Exception as error:
        raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> ImportError:
    """What happened in a module, and where: in the last line that is neither ours nor of a library."""
    if isinstance(error, SyntaxError):
        place, what = f"{error.filename}, line {error.lineno}", error.msg
    else:
        ours, frames = str(Path(__file__).parents[1]), traceback.extract_tb(error.__traceback__)
        theirs = [one for one in frames if not one.filename.startswith((ours, "<", sys.base_prefix, sys.prefix))]
        last = (theirs or frames)[-1]
        place, what = f"{last.filename}, line {last.lineno}", str(error)
    text = " ".join(f"{type(error).__name__}: {what}".split())
    return ImportError(f"module {name!r} failed in {place}: {text} (--traceback shows all)")
