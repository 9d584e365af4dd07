"""Checkpoints that can be trusted: each has the SHA-256 digests of its files, and is believed only if they agree."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from subquad.core.files import write_atomically

FOLDER = "checkpoints"
DIGESTS = "digests.json"
NEEDED = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "log.jsonl")
UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, EOFError, SafetensorError)


def step_of(folder: Path) -> int:
    return int(folder.name.rsplit("-", 1)[1])


def all_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    found = (run / FOLDER).glob("checkpoint-*")
    return sorted((path for path in found if path.name.rsplit("-", 1)[1].isdigit()), key=step_of, reverse=True)


# ---- digests --------------------------------------------------------------------------------------------------


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def seal(folder: Path) -> None:
    """Write the digests of all files of a folder. This is the last step: a folder without them is not complete."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != DIGESTS)
    digests = {path.relative_to(folder).as_posix(): digest(path) for path in files}
    write_atomically(folder / DIGESTS, json.dumps(digests, indent=1))


def disagreement(folder: Path) -> str | None:
    """The first file of a sealed folder that is not what it was, in words; None if all are."""
    try:
        digests = json.loads((folder / DIGESTS).read_text())
        if not isinstance(digests, dict):
            return f"{DIGESTS} is damaged"
        for name, expected in digests.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if digest(path) != expected:
                return f"{name} does not agree with its digest"
    except FileNotFoundError:
        return f"{DIGESTS} is missing: it was not written completely"
    except (OSError, ValueError, RecursionError) as error:
        return f"{DIGESTS} cannot be read: {' '.join(str(error).split())[:80]}"
    return None


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None if training can resume from it."""
    wrong = disagreement(folder)
    if wrong is not None:
        return wrong
    for name in NEEDED:
        if not (folder / name).exists():
            return f"{name} is missing"
    if not processes(folder):
        return "rng_state.pth is missing"
    if read_state(folder).get("global_step") != step_of(folder):
        return f"trainer_state.json does not belong to step {step_of(folder)}"
    return None


def processes(folder: Path) -> int:
    """How many processes wrote a checkpoint: each has the state of its random numbers."""
    return len(list(folder.glob("rng_state*.pth")))


def read_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "trainer_state.json").read_text())


# ---- choosing, putting aside, deleting ------------------------------------------------------------------------


def newest_good(run: Path) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint of a run, and a line about each damaged one that was put aside on the way."""
    complaints: list[str] = []
    for folder in all_checkpoints(run):
        wrong = damage(folder)
        if wrong is None:
            return folder, complaints + check_best(folder)
        complaints.append(put_aside(folder, wrong))
    return None, complaints


def put_aside(folder: Path, wrong: str) -> str:
    aside = folder.with_name(f"damaged-{step_of(folder)}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    return f"{folder.name} is damaged ({wrong}) and was put aside as {aside.name}"


def check_best(newest: Path) -> list[str]:
    """The best checkpoint is read at the end of a run, so it must be whole too. A damaged one is put aside."""
    best = newest.with_name(f"checkpoint-{read_state(newest).get('best_global_step')}")
    wrong = damage(best) if best.exists() and best != newest else None
    if wrong is None:
        return []
    return [f"{put_aside(best, wrong)}; it was the best one, so the best from step {step_of(newest)} on is used"]


def forget_lost_best(newest: Path, state: Any) -> None:
    """If the best checkpoint was put aside, the best of those that follow counts. (One that was deleted because a newer
    one was better is no loss: training repeats that newer one.)
    """
    best = state.best_global_step
    if newest.with_name(f"damaged-{best}").exists() and not newest.with_name(f"checkpoint-{best}").exists():
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None


def rotate(run: Path, best: int | None) -> None:
    """Keep two checkpoints: the newest and the best, or the one before if the newest is the best. Age is counted in
    steps, because file times change in a copy.
    """
    older = all_checkpoints(run)[1:]
    kept = [folder for folder in older if step_of(folder) == best] or older[:1]
    for folder in older:
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)
