"""How a run may start: in which folder, and in silence. Nothing here imports torch: the command line refuses a wrong
start at once.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path

from subquad.core.spoken import argument, given
from subquad.training import checkpoints, lock, log
from subquad.training.lock import Refused

RUN = "run.json"
ERROR = "error.txt"
FOLDERS = (checkpoints.FOLDER, "tensorboard", "model", ".model")
FILES = (RUN, log.FILE, log.RESULT, ERROR)


def check_start(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Only a run can be resumed, and it is not overwritten unless that is asked for."""
    if resume and overwrite:
        raise ValueError(f"{given('resume')} continues a run and {given('overwrite')} deletes it: choose one of them")
    check_out(out)
    if not (out / RUN).exists():
        _refuse_remains(out, overwrite=overwrite)
        if resume:
            raise Refused(f"{out} cannot be resumed: {_found(out)}; without {given('resume')} a new run starts")
    elif not resume and not overwrite:
        raise Refused(
            f"{out} already contains a run: {given('resume')} continues it, "
            f"{given('overwrite')} deletes it and starts again"
        )


def check_out(out: Path, name: str = "out") -> None:
    """Refuse what is no folder and cannot become one. Leaves no trace. `name` is what the argument is called."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{argument(name)} must be a folder, and {out} is a file")
    new = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    finally:
        with suppress(OSError):  # one that another process has begun to fill stays
            for folder in new:
                folder.rmdir()


def _refuse_remains(out: Path, *, overwrite: bool) -> None:
    """Without run.json nobody knows what the rest was made by: it is neither continued nor mixed with a new run."""
    remains = [name for name in (*FOLDERS, *FILES[:-1]) if (out / name).exists()]
    if not remains or (overwrite and log.FILE in remains):
        return
    raise Refused(
        f"{out} contains {remains[0]} but no {RUN}: if it is a damaged run, restore {RUN} or start again with "
        f"{given('overwrite')}; if not, choose another {argument('out')}"
    )


def _found(out: Path, most: int = 3) -> str:
    """What is in a folder that contains no run."""
    if not out.exists():
        return "the folder does not exist"
    names = sorted(path.name for path in out.iterdir() if path.name != lock.FILE)
    if not names:
        return "the folder is empty"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"the folder contains no run, but {', '.join(names[:most])}{more}"


def slug(spec: str) -> str:
    """A spec as a folder's name."""
    return "".join(letter if letter.isalnum() or letter in "-+=.," else "_" for letter in spec)


def quiet() -> None:
    """No log messages, progress bars or warnings about the future from transformers, accelerate and torch."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|accelerate|torch")
