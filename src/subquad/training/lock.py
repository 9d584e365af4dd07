"""One process at a time in a folder. The operating system releases the lock when its holder ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no lock, as before
    fcntl = None  # type: ignore[assignment]

FILE = ".lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # a file system without locks


class Refused(ValueError):
    """The folder belongs to somebody else: nothing in it was touched."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that exists."""
    path = folder / FILE
    handle = _open(path)
    try:
        while not _acquire(handle, folder):  # the previous holder deleted the file between our opening and locking it
            os.close(handle)
            handle = _open(path)
        os.truncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # while it is still ours
    finally:
        os.close(handle)


def holder(folder: Path) -> str | None:
    """The process that holds the lock of a folder, as text; None if nobody does."""
    path = folder / FILE
    if fcntl is None or not path.exists():
        return None
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "another one"
        except OSError:
            return None
    return None


def refusal(folder: Path, process: str) -> Refused:
    return Refused(f"{folder} is in use by process {process}: wait until it has finished, or stop it")


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise OSError(error.errno, f"this folder cannot be written to ({error.strerror})", str(path.parent)) from error


def _acquire(handle: int, folder: Path) -> bool:
    """Lock an open file; False if it is no longer the folder's lock file."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise refusal(folder, os.pread(handle, 20, 0).decode().strip() or "another one") from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return True
    try:
        return os.path.samestat(os.fstat(handle), (folder / FILE).stat())
    except FileNotFoundError:
        return False
