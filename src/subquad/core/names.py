"""Tables of names: a class imported when it is first asked for, and the error that suggests the nearest names."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

SHOWN_BY = {
    "attention": "subquad list",
    "task": "subquad tasks",
    "table or figure": "subquad reproduce",
}  # too many to name in an error


def nearest(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """The known names that may have been meant: one that differs in case or hyphens only, else those that begin with
    `name` or are a typing error away, and those of which one begins (w for width) or ends with the other. No name is
    better than a far-fetched one.
    """
    by_plain = {_plain(each): each for each in known}
    plain = _plain(name)
    if plain in by_plain or not plain:
        return [by_plain[plain]] if plain else []
    found = [each for each in by_plain if each.startswith(plain)]
    found += get_close_matches(plain, by_plain, most, 0.8)
    found += [each for each in by_plain if plain.startswith(each) or _ends(plain, each) or _ends(each, plain)]
    found = found or get_close_matches(plain, by_plain, most, 0.65)
    return [by_plain[each] for each in dict.fromkeys(found)][:most]


def _ends(long: str, short: str) -> bool:
    return len(short) > 3 and long.endswith(short)  # rate for learning_rate, logsparse for sparse


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in "-_ ")


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
