"""One HTML file from the parts in `assets`: nothing is loaded from anywhere when it is opened.

Its data are compact: arrays of bytes, each stored once, deflated and written in base64 (`Blob`).
"""

from __future__ import annotations

import base64
import html
import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

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


class Blob:
    """Chunks of bytes under numbers; equal chunks have one number."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self._number: dict[bytes, int] = {}

    def add(self, chunk: bytes) -> int:
        if chunk not in self._number:
            self._number[chunk] = len(self.chunks)
            self.chunks.append(chunk)
        return self._number[chunk]

    def add_json(self, value: Any) -> int:
        return self.add(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())

    def text(self) -> str:
        """Deflated, in base64: the number of chunks, their lengths (uint32, little-endian), the chunks."""
        lengths = [len(chunk) for chunk in self.chunks]
        whole = struct.pack(f"<{len(lengths) + 1}I", len(lengths), *lengths) + b"".join(self.chunks)
        return base64.b64encode(zlib.compress(whole, 9)).decode()


def pack_cells(cells: np.ndarray) -> bytes:
    """Values 0 … 3, four to a byte, the first in the lowest bits."""
    flat = cells.astype(np.uint8).ravel()
    fours = np.pad(flat, (0, -len(flat) % 4)).reshape(-1, 4)
    return (fours << np.array([0, 2, 4, 6], np.uint8)).sum(1, dtype=np.uint8).tobytes()


def pack_bits(mask: np.ndarray) -> bytes:
    """bool, eight to a byte, the first in the lowest bit."""
    return np.packbits(mask.ravel(), bitorder="little").tobytes()


def progressions(members: Iterable[int]) -> list[int]:
    """A set as start, count, step, start, count, step, …: arithmetic progressions, in order."""
    if isinstance(members, range):
        return [members.start, len(members), members.step] if len(members) else []
    values, found, at = sorted(members), [], 0
    while at < len(values):
        step, end = _progression(values, at)
        found += [values[at], end - at, step]
        at = end
    return found


def _progression(values: Sequence[int], at: int) -> tuple[int, int]:
    """The step of the progression that begins at place `at`, and where it ends; two numbers alone make none."""
    if at + 1 == len(values):
        return 1, at + 1
    step, end = values[at + 1] - values[at], at + 2
    while end < len(values) and values[end] - values[end - 1] == step:
        end += 1
    return (step, end) if step == 1 or end > at + 2 else (1, at + 1)
