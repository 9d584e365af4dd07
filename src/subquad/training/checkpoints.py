"""Checkpoints that can be trusted: which is the newest one that is whole, and what is wrong with the others."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

FOLDER = "checkpoints"
UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, EOFError, SafetensorError)


def step_of(folder: Path) -> int:
    return int(folder.name.rsplit("-", 1)[1])


def all_checkpoints(run: Path) -> list[Path]:
    """Of a run, newest first."""
    found = (run / FOLDER).glob("checkpoint-*")
    return sorted((path for path in found if path.name.rsplit("-", 1)[1].isdigit()), key=step_of, reverse=True)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None if it can be resumed from. The state is written last."""
    try:
        for name in ("trainer_state.json", "config.json"):
            json.loads((folder / name).read_text())
        with safe_open(folder / "model.safetensors", "pt") as weights:
            for key in weights.keys():  # noqa: SIM118  (not a dict)
                weights.get_tensor(key)
        for name in ("optimizer.pt", "scheduler.pt"):
            torch.load(folder / name, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        return f"{Path(error.filename or str(error)).name} is missing"
    except UNREADABLE as error:
        return f"{' '.join(str(error).split())[:100] or type(error).__name__}"
    return None


def newest_good(run: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, and a line about each damaged one that was put aside on the way."""
    complaints: list[str] = []
    for folder in all_checkpoints(run):
        wrong = damage(folder)
        if wrong is None:
            return folder, complaints
        aside = folder.with_name(f"damaged-{step_of(folder)}")
        if not aside.exists():
            folder.rename(aside)
        complaints.append(f"{folder.name} is damaged ({wrong}): put aside as {aside.name}")
    return None, complaints
