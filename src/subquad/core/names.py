"""Tables of names: a class imported when it is first asked for, and the error that suggests the nearest names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a `name` that no `kind` has."""
    known = list(known)
    near = get_close_matches(name, known, 3, 0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}{hint} (available: {', '.join(known)})")


def look_up(kind: str, name: str, table: dict[str, Any]) -> Any:
    """The class of a table whose entries are classes, or "module:Class" until they are first asked for."""
    if name not in table:
        raise unknown(kind, name, table)
    entry = table[name]
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(import_module(module), attribute)
        entry.name = name
        table[name] = entry
    return entry
