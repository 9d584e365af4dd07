"""What every mechanism costs beside full attention: time, memory and the length from which it is faster.

    subquad study speed --json docs/results/speed.json --write README.md --write docs/performance.md

Every mechanism with its default options, in every direction it has, forward and forward + backward, over the length.
Measured in pieces that `subquad bench` could measure too (a few mechanisms against full attention in one process), each
kept at once: run the same command again to continue. A piece that was measured on a busy machine is measured again.

Some mechanisms are measured as they are used, too: padded batches, dropout, and training steps of a whole model.

    break-even   the length from which a mechanism is faster than full attention at all longer lengths measured;
                 between two measured lengths, log(ratio) is taken to be linear in log(n)
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import subquad.bench_model  # noqa: F401  adds the level
from subquad import bench
from subquad.attention.registry import available, for_length
from subquad.bench import FULL, Setting
from subquad.studies import tables

LENGTHS = (512, 1024, 2048, 4096, 8192)
GROUP = 6  # mechanisms that share a piece
USED = ("combiner-fixed", "combiner-logsparse", "longformer", "composite-slice")  # measured as they are used, too
RAGGED = (("batch", 8), ("ragged", True))
DROPOUT = (("dropout", 0.1),)
MODEL = (("level", "model"),)


class Piece(NamedTuple):
    """What is measured in one go: some mechanisms against full attention at one length."""

    specs: tuple[str, ...]
    n: int
    causal: bool
    backward: bool
    memory: bool  # the memory of a step, else its time
    use: tuple[tuple[str, Any], ...] = ()  # what differs from the setting: padding, dropout, a whole model

    def parts(self) -> list[tuple]:
        return [(spec, self.n, self.causal, self.backward, self.use) for spec in self.specs]

    def __str__(self) -> str:
        way = f"{'causal' if self.causal else 'bidirectional'} {'forward + backward' if self.backward else 'forward'}"
        use = "".join(f", {key} {value}" for key, value in self.use)
        return f"{'memory' if self.memory else 'time'} at n = {self.n:,}, {way}{use}: {', '.join(self.specs)}"


def pieces(names: Sequence[str], lengths: Sequence[int]) -> Iterator[Piece]:
    """All of them: times at every length, the memory of forward + backward at the longest, and times in use."""
    for causal in (False, True):
        able = [name for name in names if name != FULL and _can(name, causal)]
        groups = [tuple(able[i : i + GROUP]) for i in range(0, len(able), GROUP)]
        for backward in (False, True):
            for n in lengths:
                yield from (Piece(group, n, causal, backward, False) for group in groups)
        yield from (Piece(group, max(lengths), causal, True, True) for group in groups)
    for spec in (name for name in USED if name in names):
        wanted = [(n, False, backward, RAGGED) for n in (1024, 4096) for backward in (False, True)]
        for n, causal, backward, use in [*wanted, (4096, False, True, DROPOUT), (8192, True, True, MODEL)]:
            if n in lengths:
                yield Piece((spec,), n, causal, backward, False, use)


def _can(name: str, causal: bool) -> bool:
    """Does it have this direction, and do without options?"""
    try:
        for_length(name, 64, causal=causal, num_heads=2, head_dim=8)
    except (TypeError, ValueError):
        return False
    return True


def measure(piece: Piece, setting: Setting, repeats: int, kept: dict[tuple, dict[str, Any]]) -> None:
    """Measure a piece into `kept`: (spec, n, causal, backward, use) → a row."""
    about = {"causal": piece.causal, "backward": piece.backward, **dict(piece.use)}
    now = Setting(**{**asdict(setting), **about})
    if not piece.memory:
        *_, rows = bench.measure(piece.specs, [piece.n], now, repeats=repeats, memory=False)
        why = bench.busy(rows)
        for row in rows:
            if row.spec != FULL:
                key = (row.spec, row.n, piece.causal, piece.backward, piece.use)
                old = kept.get(key, {})
                memory = {name: old.get(name) for name in ("memory", "full_memory")}
                kept[key] = {**asdict(row), **memory, **about, "busy": why}
        return
    full: dict[str, int] = {}
    for key in piece.parts():
        level = bench.level_of(key[0])
        if level not in full:
            full[level] = bench.peak_memory(FULL, level, piece.n, now)
        kept[key]["memory"] = bench.peak_memory(key[0], level, piece.n, now)
        kept[key]["full_memory"] = full[level]


def missing(piece: Piece, kept: dict[tuple, dict[str, Any]]) -> bool:
    rows = [kept.get(key) for key in piece.parts()]
    if piece.memory:
        return all(rows) and any(row and row["memory"] is None for row in rows)
    return any(row is None or row["busy"] for row in rows)


def _turn(piece: Piece, kept: dict[tuple, dict[str, Any]]) -> int:
    """Times that are not known yet come first, then memory, then times that were measured on a busy machine."""
    return 1 if piece.memory else 2 * all(key in kept for key in piece.parts())


def run(
    path: Path,
    setting: Setting,
    *,
    names: Sequence[str] | None = None,
    lengths: Sequence[int] = LENGTHS,
    repeats: int = 3,
    minutes: float = math.inf,
    tell: Callable[[str], None] = lambda text: None,
) -> bool:
    """Measure what the file does not have yet; True when nothing is missing. Stops after about `minutes`."""
    started = time.monotonic()
    kept = read(path, setting)
    todo = sorted(pieces(names or available(), lengths), key=lambda piece: _turn(piece, kept))
    for number, piece in enumerate(todo, 1):
        if not missing(piece, kept):
            continue
        if (time.monotonic() - started) / 60 > minutes:
            return False
        tell(f"{number}/{len(todo)}: {piece}")
        measure(piece, setting, repeats, kept)
        write(path, setting, kept)
    return not any(missing(piece, kept) for piece in todo)


def read(path: Path, setting: Setting) -> dict[tuple, dict[str, Any]]:
    """The rows of a file, which must be of this machine, these versions and this setting."""
    if not path.exists():
        return {}
    found, now = json.loads(path.read_text()), bench.report([], setting)
    for key in ("versions", "machine", "setting"):
        if found[key] != _shared(now)[key]:
            raise ValueError(f"{path} was measured with other {key} ({found[key]}): delete it to measure again")
    return {(row["spec"], row["n"], row["causal"], row["backward"], use_of(row)): row for row in found["rows"]}


def use_of(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What a row differs in from the setting of its file."""
    return next((use for use in (RAGGED, DROPOUT, MODEL) if all(row.get(key) == value for key, value in use)), ())


def write(path: Path, setting: Setting, kept: dict[tuple, dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    bench.write(path, {**_shared(bench.report([], setting)), "rows": list(kept.values())})


def _shared(report: dict[str, Any]) -> dict[str, Any]:
    """The circumstances that all rows share."""
    setting = {key: value for key, value in report["setting"].items() if key not in ("causal", "backward")}
    return {"versions": report["versions"], "machine": report["machine"], "setting": setting}


def show(
    path: Path, write: Sequence[Path], minutes: float, repeats: int, comparison: Path | None, measured: bool
) -> None:
    """The command `subquad study speed`."""
    if not measured:
        done = run(path, Setting(), repeats=repeats, minutes=minutes, tell=lambda text: print(text, flush=True))
        left = "all is measured" if done else "some is not measured yet, or was on a busy machine: run it again"
        print(f"results: {path} ({left})")
    if comparison is not None:
        tables.keep_comparison(comparison, path.parent)
    for each in write:
        tables.update(each, path.parent)
        print(f"tables: {each}")
