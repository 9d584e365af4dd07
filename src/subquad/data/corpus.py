"""Tokenised texts longer than memory: encoded once, document by document, into memory-mapped arrays in the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from subquad.data.cache import cache_directory, check_owner
from subquad.data.subwords import encode_all

BATCH = 1 << 20  # characters that are encoded at a time

Document = Iterable[str]  # its pieces (sentences, lines, …) one after another; an iterator may read them from a file


@dataclass(frozen=True)
class Corpus:
    """Documents of pieces of tokens. Piece i is tokens[pieces[i]:pieces[i + 1]], document j has the pieces
    documents[j] … documents[j + 1] - 1.
    """

    tokens: np.ndarray  # (N,) uint16 or uint32
    pieces: np.ndarray  # (P + 1,)
    documents: np.ndarray  # (D + 1,)

    @property
    def bounds(self) -> np.ndarray:
        """(D + 1,): the token that each document begins with."""
        return self.pieces[self.documents]


def tokenised(
    source: str, documents: Callable[[], Iterable[Document]], tokenizer: Tokenizer, around: Sequence[str] = ()
) -> Corpus:
    """The documents in tokens. `around` are two specials: that before the first piece and that after the last one.

    `source` says which text it is and how it is cut, for the name in the cache; `documents` is called only if the
    cache has not got it. The folder in the cache appears when it is complete, so a killed process leaves no half.
    """
    key = hashlib.sha256("\n".join((source, *around, tokenizer.to_str())).encode()).hexdigest()[:16]
    target = cache_directory() / f"corpus-{key}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=target.parent, prefix=".encoding-"))
        try:
            _write(part, documents(), tokenizer, around)
            os.rename(part, target)
        except FileNotFoundError:
            raise
        except OSError as error:
            if not target.exists():  # else another process was faster
                raise OSError(f"{target} cannot be written ({error}); set SUBQUAD_CACHE to another folder") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    check_owner(target)
    kind = _kind(tokenizer)
    size = (target / "tokens").stat().st_size
    tokens = np.memmap(target / "tokens", kind, "r") if size else np.zeros(0, kind)
    return Corpus(tokens, *(np.load(target / f"{name}.npy", mmap_mode="r") for name in ("pieces", "documents")))


def _kind(tokenizer: Tokenizer) -> type[np.generic]:
    return np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32


def _write(folder: Path, documents: Iterable[Document], tokenizer: Tokenizer, around: Sequence[str]) -> None:
    for word in around:
        if tokenizer.token_to_id(word) is None:
            raise ValueError(f"around: the tokenizer has no token {word!r}")
    pieces, starts = array("q", [0]), array("q", [0])
    with (folder / "tokens").open("wb") as file:
        for batch in batches(stream(documents, around)):
            encoded = iter(encode_all(tokenizer, [text for text in batch if text is not None]))
            ids: list[int] = []
            for text in batch:
                if text is None:
                    starts.append(len(pieces) - 1)
                else:
                    ids += (piece := next(encoded))
                    pieces.append(pieces[-1] + len(piece))
            np.asarray(ids, _kind(tokenizer)).tofile(file)
    np.save(folder / "pieces.npy", np.frombuffer(pieces, np.int64))
    np.save(folder / "documents.npy", np.frombuffer(starts, np.int64))


def stream(documents: Iterable[Document], around: Sequence[str]) -> Iterator[str | None]:
    """All pieces one after another; None ends a document."""
    for document in documents:
        yield from around[:1]
        yield from document
        yield from around[1:]
        yield None


def batches(texts: Iterable[str | None]) -> Iterator[list[str | None]]:
    """Lists of texts, each list of about BATCH characters: short documents share one, a long one has several."""
    batch: list[str | None] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text or "")
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def signature(paths: Iterable[Path]) -> str:
    """Names, sizes and times of files, as `source`: a file that has changed is encoded anew."""
    return "\n".join(f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths)
