"""The folder of a run: opened for one run at a time, continued only as what it was.

run.json       what was asked for, with which versions        log.jsonl    losses, metrics, speed, memory
checkpoints/   to resume from: the best and the newest        tensorboard/ the same curves
model/         the best model and its task, for eval, predict and generate
result.json    what came out; written last, so it says that the run is finished
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from subquad.core.files import write_atomically
from subquad.core.spoken import argument, given
from subquad.training import checkpoints, lock, log
from subquad.training.lock import Refused
from subquad.training.start import ERROR, FILES, FOLDERS, RUN, check_start


@contextlib.contextmanager
def opened(run: Any, about: dict[str, Any], *, resume: bool, overwrite: bool) -> Iterator[Path | None]:
    """Prepare the run's folder and hold its lock, in the first process; the checkpoint to resume from, or None. A
    failure inside leaves its reason in error.txt, for the comparison that asked for the run; a refusal leaves nothing.
    """
    check_start(run.out, resume=resume, overwrite=overwrite)
    known = (run.out / RUN).exists()
    run.out.mkdir(parents=True, exist_ok=True)
    with lock.locked(run.out):
        if overwrite:
            clear(run.out)
        elif known:
            check_same(run)
        try:
            (run.out / ERROR).unlink(missing_ok=True)
            if known and not overwrite:
                checkpoint = _continue(run, about)
            else:
                _begin(run, about)
                checkpoint = None
            yield checkpoint
        except Exception as error:
            with contextlib.suppress(OSError):  # the disk may be what is wrong
                (run.out / ERROR).write_text(" ".join(str(error).split()) or type(error).__name__)
            raise


def _begin(run: Any, about: dict[str, Any]) -> None:
    about = {"command": shlex.join(run.command), **about}
    write_atomically(run.out / RUN, json.dumps({**run.described(), **about}, indent=1))


def _continue(run: Any, about: dict[str, Any]) -> Path | None:
    """The newest intact checkpoint; the log is the one that belongs to it."""
    before = log.read_json(run.out / RUN)
    for what in ("threads", "versions"):  # the order of sums follows them
        if what in before and before[what] != about[what]:
            log.warn(
                f"this run was started with {what} {_text(before[what])}, not {_text(about[what])}: "
                "its last digits may differ from those of an uninterrupted run"
            )
    checkpoint, complaints = checkpoints.newest_good(run.out)
    for complaint in complaints:
        log.warn(complaint)
    log.write(run.out, [] if checkpoint is None else log.read(checkpoint))
    if complaints and checkpoint is None:
        log.warn("no intact checkpoint is left: training starts from the beginning")
    return checkpoint


def _text(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def clear(out: Path) -> None:
    """Delete what a run writes, and nothing else that lies in the folder."""
    for name in FOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)
    for name in FILES:
        (out / name).unlink(missing_ok=True)


# ---- the same run ---------------------------------------------------------------------------------------------


def check_same(run: Any) -> None:
    """A run continues only as what it was."""
    now = run.described()
    try:
        before = log.read_json(run.out / RUN)
        if not isinstance(before.get("settings"), dict):
            raise ValueError(f"{run.out / RUN} is damaged (it has no settings)")
    except ValueError as error:
        raise Refused(f"{error}: restore it, or start again with {given('overwrite')}") from error
    for key in ("task", "attention", "recipe", "seed"):
        _compare(key, before.get(key), now[key], run.out)
    for key, value in now["settings"].items():
        _compare(key, was(before["settings"], key, run.task.recipe), value, run.out)


def was(settings: dict[str, Any], key: str, recipe: Any) -> Any:
    """A setting of an older run; one that did not exist then had its default."""
    value = settings.get(key, getattr(type(recipe), key, None))
    return list(value) if isinstance(value, tuple) else value


def _compare(key: str, before: Any, now: Any, out: Path) -> None:
    if before != (list(now) if isinstance(now, tuple) else now):
        raise Refused(
            f"{out} cannot be resumed: {key} was {before!r} and is now {now!r}; choose another {argument('out')}"
        )
