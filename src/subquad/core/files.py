"""Files that are either whole or absent."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader, or the next start after a kill, finds the old content or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def model_folder(folder: Path) -> Path:
    """The folder of a trained model, given it or that of its run."""
    folder = folder / "model" if (folder / "model" / "task.json").exists() else folder
    if not (folder / "task.json").exists():
        raise FileNotFoundError(
            f"{folder} does not contain a model that subquad trained (no task.json, no model/task.json)"
        )
    return folder
