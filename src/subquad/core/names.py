"""Tables of names: a class imported when it is first asked for, and the error that suggests the nearest names."""

from __future__ import annotations

import sys
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
    """A module of the user's, from the working directory too, which comes last: it hides no installed package."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.split(".")[0] and error.name != name:
            raise
        raise ModuleNotFoundError(f"module {name!r} not found, neither installed nor in {here}", name=name) from None
