"""Compact data for a page: arrays of bytes, each stored once, deflated and written in base64."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


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
