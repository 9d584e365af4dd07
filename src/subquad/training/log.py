"""The log of a run: one JSON object per line, readable while it is written, whole after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from subquad.core.files import write_atomically

FILE = "log.jsonl"


def read(run: Path) -> list[dict[str, Any]]:
    """The records of a run; a last line that a kill cut short is left out."""
    path = run / FILE
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def rewind(run: Path, step: int) -> None:
    """Forget what was logged after `step`: training goes on from there and writes it again."""
    kept = [record for record in read(run) if record["step"] <= step]
    write_atomically(run / FILE, "".join(json.dumps(record) + "\n" for record in kept))


def append(run: Path, record: dict[str, Any]) -> None:
    with (run / FILE).open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """One of the JSON files of a run."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): get it back, or start anew with --overwrite") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: an object is expected, not {found!r:.40}")
    return found
