"""The files of a run that hold numbers: log.jsonl, one JSON object per line, and result.json, which is written last."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subquad.core.files import write_atomically

FILE = "log.jsonl"
RESULT = "result.json"
NUMBERS = ("loss", "step_seconds")  # what every reader needs of a record of training steps


def read(run: Path) -> list[dict[str, Any]]:
    """The records of a run. A last line that a kill cut short is left out; so is a damaged one, with a warning."""
    path, records = run / FILE, []
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            warn(f"line {number} of {path} is damaged and was left out")
    return records


def _record(line: str) -> dict[str, Any] | None:
    """A line of the log, if it is one: the step, and either the numbers of training steps or an evaluation."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    if isinstance(record.get("valid"), dict):
        return record
    return record if all(isinstance(record.get(key), (int, float)) for key in NUMBERS) else None


def append(run: Path, record: dict[str, Any]) -> None:
    with (run / FILE).open("a") as file:
        file.write(json.dumps(record) + "\n")


def write(run: Path, records: Sequence[dict[str, Any]]) -> None:
    """The whole log at once."""
    write_atomically(run / FILE, _text(records))


def holds(run: Path, records: Sequence[dict[str, Any]]) -> bool:
    """Whether the file contains these records and nothing else. (Texts are compared, because NaN is not NaN.)"""
    path = run / FILE
    return path.exists() and path.read_text(errors="replace") == _text(records)


def _text(records: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def write_result(run: Path, result: dict[str, Any]) -> None:
    write_atomically(run / RESULT, json.dumps({**result, "sha256": _digest(result)}, indent=1))


def read_result(run: Path) -> dict[str, Any] | None:
    """The result of a finished run; None if there is none, or, with a warning, if it is damaged."""
    path = run / RESULT
    if not path.exists():
        return None
    try:
        result = read_json(path)
        expected = result.pop("sha256", None)
        if expected not in (None, _digest(result)):
            raise ValueError(f"{path} is damaged: it does not agree with its digest")
    except ValueError as error:
        warn(f"{error}; the test will be repeated")
        return None
    return result


def _digest(result: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """One of the JSON files of a run."""
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: a JSON object is expected, not {found!r:.40}")
    return found


@functools.cache  # once for each message
def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)
