"""Files that are either whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")  # files that tokenizers are read from
PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp")
ENDINGS = f"{', '.join(PICTURES[:-1])} or {PICTURES[-1]}"


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader, or the next start after a kill, finds the old content or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def check_file(path: Path | None, option: str) -> None:
    """Find out before a long run whether its results can be kept. Leaves no trace."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} must be a file, and {path} is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"{option}: the folder {path.parent} does not exist")
    new = not path.exists()
    path.open("ab").close()
    if new:
        path.unlink()


def check_picture(path: Path | None, option: str) -> None:
    """Refuse a file that no picture can be drawn into."""
    if path is not None and not path.is_dir() and path.suffix.lower() not in PICTURES:
        raise ValueError(f"{option} must end in {ENDINGS}, not in {path.name!r}")
    check_file(path, option)


def check_pretrained(path: Path) -> None:
    """Refuse what is no language model of transformers."""
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
    elif not (path / "config.json").exists():
        raise ValueError(f"{path} is neither a folder of a transformers model (with config.json) nor a .gguf file")


def check_tokenizer(path: Path) -> None:
    """Refuse the folder of a model that cannot read a text; a .gguf file has its tokenizer inside."""
    if path.is_dir() and not any(found for pattern in TOKENIZERS for found in path.glob(pattern)):
        raise ValueError(
            f"{path} has no tokenizer (no {', '.join(TOKENIZERS)}): copy these files from the model that it comes from"
        )


def read_text(path: Path) -> str:
    """A text file that the option --text names."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"--text {path}: {error.strerror or error}") from None
    if not text.strip():
        raise ValueError(f"--text {path}: the file is empty")
    return text


def model_folder(folder: Path) -> Path:
    """The folder of a trained model, given it or that of its run."""
    if not folder.exists():
        raise FileNotFoundError(f"the folder {folder} does not exist")
    folder = folder / "model" if (folder / "model" / "task.json").exists() else folder
    if not (folder / "task.json").exists():
        raise FileNotFoundError(
            f"{folder} does not contain a model that subquad trained (no task.json, no model/task.json)"
        )
    return folder
