"""Unknown names: the error that suggests the nearest known ones."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a `name` that no `kind` has."""
    known = list(known)
    near = get_close_matches(name, known, 3, 0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}{hint} (available: {', '.join(known)})")
