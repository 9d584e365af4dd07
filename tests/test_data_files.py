"""Data sets on disk: damaged, encrypted and hostile files end in one clear error, never in fewer examples."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from subquad.data import cache, files
from subquad.data.files import members, read_bytes, read_lines


def make_tar(path: Path, count: int = 20, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for number in range(count):
            entry = tarfile.TarInfo(f"book{number:02}.txt")
            entry.size = 700
            archive.addfile(entry, io.BytesIO(bytes([65 + number]) * 700))
    return path


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_a_whole_tar_is_read(tmp_path, mode):
    found = dict(members(make_tar(tmp_path / "a.tar", mode=mode)))
    assert len(found) == 20 and found["book19.txt"] == b"T" * 700


@pytest.mark.parametrize("damage", ["header", "cut between files", "cut inside a file", "no end"])
def test_a_damaged_tar_is_refused_not_shortened(tmp_path, damage):
    path = make_tar(tmp_path / "a.tar")
    whole = path.read_bytes()
    block = 3 * 512  # a header and two blocks of content
    if damage == "header":
        path.write_bytes(whole[: 10 * block] + b"\xff" * 512 + whole[10 * block + 512 :])
    elif damage == "cut between files":
        path.write_bytes(whole[: 10 * block])
    elif damage == "cut inside a file":
        path.write_bytes(whole[: 10 * block + 600])
    else:
        path.write_bytes(whole[: 20 * block])
    with pytest.raises(ValueError, match=r"a\.tar cannot be read: .*get it again"):
        list(members(path))


def test_encrypted_and_unknown_zips_are_named(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("wiki.txt", "words " * 100)
    whole = bytearray(path.read_bytes())
    local, central = whole.index(b"PK\x03\x04"), whole.index(b"PK\x01\x02")
    locked = bytearray(whole)
    struct.pack_into("<H", locked, local + 6, 1)
    struct.pack_into("<H", locked, central + 8, 1)
    path.write_bytes(locked)
    with pytest.raises(ValueError, match=r"a\.zip: wiki\.txt is encrypted"):
        list(members(path))
    strange = bytearray(whole)
    struct.pack_into("<H", strange, local + 8, 77)
    struct.pack_into("<H", strange, central + 10, 77)
    path.write_bytes(strange)
    with pytest.raises(ValueError, match=r"a\.zip: wiki\.txt is packed in an unknown way"):
        list(members(path))


def test_bombs_are_refused_before_they_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FREE", 1 << 20)
    zeros = bytes(8 << 20)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros.txt", zeros)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(zeros))
    with tarfile.open(tmp_path / "a.tar.xz", "w:xz") as archive:
        entry = tarfile.TarInfo("zeros.txt")
        entry.size = len(zeros)
        archive.addfile(entry, io.BytesIO(zeros))
    for read in (
        lambda: list(members(tmp_path / "a.zip")),
        lambda: list(members(tmp_path / "a.tar.xz")),
        lambda: read_bytes(tmp_path / "a.txt.gz"),
        lambda: list(read_lines(tmp_path / "a.txt.gz")),
        lambda: list(cache.pieces(tmp_path / "a.txt.gz")),
    ):
        with pytest.raises(ValueError, match=r"unpacks to more than [\d,]+ bytes, 200 times its size"):
            read()


def test_packed_files_are_read_as_before(tmp_path):
    text = "".join(f"line {number} ÄÖ\n" for number in range(5000)).encode()
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text))
    assert read_bytes(tmp_path / "a.txt.gz") == text == b"".join(cache.pieces(tmp_path / "a.txt.gz"))
    assert [line for _, line in read_lines(tmp_path / "a.txt.gz")] == text.decode().splitlines()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner here")
def test_a_cached_file_of_another_user_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"some text"))
    assert bytes(cache.mapped(tmp_path / "a.gz", cache.pieces)) == b"some text"
    (kept,) = (tmp_path / "cache").iterdir()
    kept.chmod(0o666)
    with pytest.raises(PermissionError, match="can be changed by other users: delete it, or set SUBQUAD_CACHE"):
        cache.mapped(tmp_path / "a.gz", cache.pieces)
    kept.chmod(0o600)
    monkeypatch.setattr(os, "getuid", lambda: kept.stat().st_uid + 1)
    if kept.stat().st_uid:  # the superuser is believed
        with pytest.raises(PermissionError, match="belongs to another user"):
            cache.mapped(tmp_path / "a.gz", cache.pieces)
    kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        cache.mapped(tmp_path / "a.gz", cache.pieces)
