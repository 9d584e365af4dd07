"""Checkpoints that can be trusted: which is the newest one that is whole, and what is wrong with the others."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open

from subquad.core.files import write_atomically

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
        json.loads((folder / "config.json").read_text())
        if json.loads((folder / "trainer_state.json").read_text()).get("global_step") != step_of(folder):
            return f"trainer_state.json is not of step {step_of(folder)}"
        with safe_open(folder / "model.safetensors", "pt") as weights:
            for key in weights.keys():  # noqa: SIM118  (not a dict)
                weights.get_tensor(key)
        for name in ("optimizer.pt", "scheduler.pt"):
            torch.load(folder / name, map_location="cpu", weights_only=True)
        for path in folder.glob("rng_state*.pth"):
            if not is_zipfile(path):  # a torch file is one; its end is written last
                return f"{path.name} is not whole"
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
            return folder, complaints + check_best(folder)
        complaints.append(put_aside(folder, wrong))
    return None, complaints


def put_aside(folder: Path, wrong: str) -> str:
    aside = folder.with_name(f"damaged-{step_of(folder)}")
    if not aside.exists():
        folder.rename(aside)
    return f"{folder.name} is damaged ({wrong}): put aside as {aside.name}"


def check_best(newest: Path) -> list[str]:
    """The best checkpoint is read at the end of a run. If it is damaged, the best one from `newest` on is taken."""
    path = newest / "trainer_state.json"
    state = json.loads(path.read_text())
    best = newest.with_name(f"checkpoint-{state.get('best_global_step')}")
    wrong = damage(best) if best.exists() and best != newest else None
    if wrong is None:
        return []
    state.update(best_metric=None, best_global_step=None, best_model_checkpoint=None)
    write_atomically(path, json.dumps(state, indent=2))
    return [f"{put_aside(best, wrong)}; it was the best one, the best from step {step_of(newest)} on is taken"]
