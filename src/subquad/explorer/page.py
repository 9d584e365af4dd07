"""One HTML file from the parts in `assets`: nothing is loaded from anywhere when it is opened."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from subquad.core.files import write_atomically


def render(part: str, title: str, data: dict[str, Any]) -> str:
    """The page of a part, "patterns" or "trained", with its data inside."""
    parts = {
        "title": html.escape(title),
        "style": _asset("style.css"),
        "body": _asset(f"{part}.html"),
        "data": embedded(data),
        "script": f"{_asset('common.js')}\n{_asset(f'{part}.js')}",
    }
    page = _asset("page.html")
    for name, text in parts.items():
        before, found, after = page.partition(f"{{{{{name}}}}}")
        if not found:
            raise ValueError(f"page.html has no place for {name}")
        page = before + text + after
    return page


def embedded(data: dict[str, Any]) -> str:
    """JSON for a script element: with no < in it, no text can end the element or begin another one."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def check_output(path: Path) -> None:
    """Refuse a path that cannot be written before any work is done."""
    if path.is_dir():
        raise ValueError(f"--output must be a file, and {path} is a folder; give {path / 'explorer.html'}")
    if not path.parent.is_dir():
        raise ValueError(f"--output: the folder {path.parent} does not exist")


def read_text(path: Path) -> str:
    try:
        written = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text: {path} is not UTF-8 ({error.reason} at byte {error.start:,})") from None
    if not written.strip():
        raise ValueError(f"--text: {path} is empty")
    return written


def save(page: str, path: Path) -> None:
    write_atomically(path, page)


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
