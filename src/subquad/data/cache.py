"""Long texts as memory-mapped bytes: packed data sets are unpacked once, into a cache."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from subquad.data.files import opened

PIECE = 1 << 22  # bytes read at a time


def cache_directory() -> Path:
    """Where unpacked data goes: $SUBQUAD_CACHE, or ~/.cache/subquad."""
    return Path(os.environ.get("SUBQUAD_CACHE") or Path.home() / ".cache" / "subquad")


def check_owner(path: Path) -> None:
    """Refuse a cached file that another user may have put there: names in a shared cache can be guessed."""
    about = path.lstat()
    if not hasattr(os, "getuid"):
        return
    foreign = about.st_uid not in (os.getuid(), 0)
    if foreign or stat.S_ISLNK(about.st_mode) or about.st_mode & stat.S_IWOTH:
        why = f"belongs to another user (uid {about.st_uid})" if foreign else "can be changed by other users"
        raise PermissionError(f"{path} {why}: delete it, or set SUBQUAD_CACHE to a folder of your own")


def pieces(path: Path) -> Iterator[bytes]:
    """A file, unpacked on the way, in pieces."""
    with opened(path) as file:
        while piece := file.read(PIECE):
            yield piece


def mapped(path: Path, unpack: Callable[[Path], Iterable[bytes]] | None = None) -> np.ndarray:
    """The bytes that `unpack` makes of a file, (N,) uint8, not in memory; without `unpack` those of the file itself.

    The cached file is named after the path, size and time of the packed one, so a newer file is unpacked anew, and
    appears only when it is complete: a killed process leaves no half of it to be believed.
    """
    found = path if unpack is None else _unpacked(path, unpack)
    if not found.stat().st_size:
        raise ValueError(f"{path} is empty")
    return np.memmap(found, np.uint8, "r")


def _unpacked(path: Path, unpack: Callable[[Path], Iterable[bytes]]) -> Path:
    about = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:16]
    target = cache_directory() / f"{path.name.partition('.')[0]}-{key}.bin"
    if target.exists():
        check_owner(target)
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".unpacking-", delete=False) as part:
            try:
                part.writelines(unpack(path))
                part.flush()
                os.replace(part.name, target)
            except BaseException:
                os.unlink(part.name)
                raise
    except OSError as error:
        where = f"into {target.parent} ({error}); set SUBQUAD_CACHE to another folder"
        raise OSError(f"{path} cannot be unpacked {where}") from error
    return target
