"""Data sets on disk: where they are looked for, what to do when they are missing, and reading packed files."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from subquad.core.spoken import argument

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
BROKEN = (EOFError, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, zlib.error, OSError, ValueError)
FREE, RATIO = 64 << 20, 200  # a packed file may unpack to FREE bytes, or to RATIO times its size; text packs 10 times


@dataclass(frozen=True)
class Source:
    """A public data set: its folder in the data directory, what a user has to get, and from where."""

    folder: str
    what: str  # «CIFAR-10, binary version: data_batch_1.bin … data_batch_5.bin, test_batch.bin»
    origin: str  # «the CIFAR-10 page of Alex Krizhevsky, University of Toronto»

    def in_folder(self, data: Path | None) -> Path:
        """The folder of this data set; a data directory without it has nothing of it, and is refused."""
        folder = data_directory(data) / self.folder
        if not folder.is_dir():
            raise FileNotFoundError(f"the folder {folder} does not exist: {self._advice()}")
        return folder

    def look(self, data: Path | None, *names: str) -> Path | None:
        """The first of the names that exists, plain or packed (.gz .xz .bz2); None if there is none."""
        folder = data_directory(data) / self.folder
        candidates = (folder / f"{name}{end}" for name in names for end in ("", *OPENERS))
        return next((path for path in candidates if path.exists()), None)

    def find(self, data: Path | None, *names: str) -> Path:
        """As `look`, but an error tells what to get."""
        path = self.look(data, *names)
        if path is not None:
            return path
        folder = data_directory(data) / self.folder
        raise FileNotFoundError(
            f"{' or '.join(names)} not found in {folder} (also looked for {' '.join(OPENERS)}): {self._advice()}"
        )

    def _advice(self) -> str:
        return (
            f"get {self.what} from {self.origin} and put it there; {argument('data')} or SUBQUAD_DATA names another "
            "data directory"
        )


def data_directory(data: Path | None) -> Path:
    """The directory of data sets: given, or $SUBQUAD_DATA, or ./data."""
    return Path(data or os.environ.get("SUBQUAD_DATA") or "data")


class Bounded(io.RawIOBase):
    """A file being unpacked, which ends in an error where it unpacks to far more than its size: a bomb."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file, self.left = path, file, most_unpacked(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self.file.read(len(buffer))
        buffer[: len(piece)] = piece
        self.left -= len(piece)
        if self.left < 0:
            raise too_much(self.path)
        return len(piece)


def most_unpacked(path: Path) -> int:
    """Bytes that a packed file may unpack to."""
    return FREE + RATIO * path.stat().st_size


def too_much(path: Path) -> ValueError:
    return ValueError(
        f"{path} cannot be read: it unpacks to more than {most_unpacked(path):,} bytes, {RATIO} times its size; "
        "it is damaged, or made to fill the memory"
    )


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file, unpacked on the way; a broken one is an error with its name."""
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield io.BufferedReader(Bounded(path, file), 1 << 20) if path.suffix in OPENERS else file  # type: ignore
    except FileNotFoundError:
        raise
    except BROKEN as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"{path} cannot be read: {error or type(error).__name__}; get it again") from error


def read_bytes(path: Path) -> bytes:
    with opened(path) as file:
        return file.read()


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line) from 1, without the line ends; only a newline ends a line. Bad UTF-8 is an error with its line."""
    with opened(path) as file:
        yield from decoded(str(path), file)


def decoded(name: str, lines: Iterable[bytes]) -> Iterator[tuple[int, str]]:
    """As `read_lines`, of lines from elsewhere; `name` is for the error."""
    for number, raw in enumerate(lines, 1):
        try:
            yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}, line {number}: not UTF-8 ({error.reason})") from None


def members(path: Path, wanted: Callable[[str], Any] = bool) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the wanted files in a folder (sorted), a tar (packed or not) or a zip (in its own order)."""
    try:
        if path.is_dir():
            yield from _in_folder(path, wanted)
        elif path.suffix == ".zip" or zipfile.is_zipfile(path):
            yield from _in_zip(path, wanted)
        else:
            yield from _in_tar(path, wanted)
    except FileNotFoundError:
        raise
    except (EOFError, lzma.LZMAError, OSError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__  # tarfile goes on with what it tried
        raise ValueError(f"{path} cannot be read: {reason}; get it again") from error


def _in_folder(path: Path, wanted: Callable[[str], Any]) -> Iterator[tuple[str, bytes]]:
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path.parent).as_posix()  # begins with the folder, as in an archive of it
        if file.is_file() and wanted(name):
            yield name, file.read_bytes()


def _in_zip(path: Path, wanted: Callable[[str], Any]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        chosen = [info for info in archive.infolist() if not info.is_dir() and wanted(info.filename)]
        if sum(info.file_size for info in chosen) > most_unpacked(path):
            raise too_much(path)
        for info in chosen:
            if info.flag_bits & 1:
                raise ValueError(f"{path}: {info.filename} is encrypted; unpack it with its password first")
            try:
                yield info.filename, archive.read(info)
            except NotImplementedError as error:
                raise ValueError(
                    f"{path}: {info.filename} is packed in an unknown way ({error}); unpack it first"
                ) from error


class _Entry(tarfile.TarInfo):
    """Notes whether a tar was read to its end: the block of zeros that tarfile itself does not miss."""

    @classmethod
    def fromtarfile(cls, archive: Any) -> Any:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            archive.complete = True
            raise


def _in_tar(path: Path, wanted: Callable[[str], Any]) -> Iterator[tuple[str, bytes]]:
    left = most_unpacked(path)
    with tarfile.open(path, tarinfo=_Entry) as archive:
        for entry in archive:
            if not entry.isfile() or not wanted(entry.name):
                continue
            left -= entry.size
            if left < 0:
                raise too_much(path)
            content = archive.extractfile(entry)
            assert content is not None
            yield entry.name, content.read()
        if not getattr(archive, "complete", False):
            raise tarfile.ReadError(
                f"it is damaged or incomplete, its end is missing after {len(archive.getmembers())} files"
            )


def member(path: Path, *ends: str) -> bytes:
    """The first file of an archive whose name ends in one of `ends`."""
    for name, content in members(path):
        if name.endswith(ends):
            return content
    raise ValueError(f"{path} holds no file named {' or '.join(ends)}")
