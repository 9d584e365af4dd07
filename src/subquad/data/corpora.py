"""Texts as they are published, as lines of words or as bytes: WikiText, the Penn Treebank, enwik8, PG-19, any file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np

from subquad.data.cache import mapped, pieces
from subquad.data.datasets import split_90_5_5
from subquad.data.files import OPENERS, Source, decoded, members, read_lines

END = "<eos>"  # behind the words of a line
MERITY = "the WikiText page of Salesforce Research (S. Merity)"
ENWIK8 = Source("enwik8", "enwik8.zip, packed or unpacked to enwik8", "http://mattmahoney.net/dc/textdata.html")
PG19 = Source(
    "pg19",
    "PG-19, its folders train, validation and test, or a tar of some of its books, books.tar",
    "https://github.com/google-deepmind/pg19",
)
SHAKESPEARE = Source(
    "shakespeare",
    "input.txt of tiny shakespeare",
    "https://github.com/karpathy/char-rnn/tree/master/data/tinyshakespeare",
)

# source → what to get, the names of its three files, where they may be: archives, folders, the files themselves
CORPORA = {
    "wikitext-2": (
        Source("wikitext-2", "wikitext-2-v1.zip, packed or unpacked to wikitext-2/", MERITY),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("wikitext-2-v1.zip", "wikitext-2", "wiki.train.tokens"),
    ),
    "wikitext-103": (
        Source("wikitext-103", "wikitext-103-v1.zip, packed or unpacked to wikitext-103/", MERITY),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("wikitext-103-v1.zip", "wikitext-103", "wiki.train.tokens", "wikitext-103-valid-test.zip"),
    ),
    "ptb": (
        Source("ptb", "simple-examples.tgz, or of it ptb.{train,valid,test}.txt", "the RNNLM page of Tomáš Mikolov"),
        ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        ("ptb.zip", "simple-examples.tgz", "simple-examples", "ptb.train.txt"),
    ),
}

# ---- words ----


class Lines:
    """A text as its lines, each a list of words that ends in <eos>; can be read again and again."""

    def __init__(self, name: str, content: bytes) -> None:
        if not content.strip():
            raise ValueError(f"{name} is empty")
        self.name, self.content = name, content

    def __iter__(self) -> Iterator[list[str]]:
        return ([*line.split(), END] for _, line in decoded(self.name, BytesIO(self.content)))


def read_corpus(source: str, data: Path | None) -> list[Lines]:
    """Training, validation and test text of a public data set."""
    where, files, places = CORPORA[source]
    path = where.find(data, *places)
    path = path.parent if path.name == files[0] else path  # unpacked without a folder of its own
    found = {PurePosixPath(name).name: Lines(f"{path}: {name}", content)
             for name, content in members(path, lambda name: PurePosixPath(name).name in files)}  # fmt: skip
    for part, file in zip(("training", "validation", "test"), files, strict=True):
        if file not in found:
            raise ValueError(
                f"{path} holds no {file}: the {part} text of {source} is missing; get {where.what} from {where.origin} "
                f"and put it in {path.parent}"
            )
    return [found[file] for file in files]


def read_file(path: Path) -> list[Sequence[list[str]]]:
    """Any text file, split by lines."""
    lines = [[*line.split(), END] for _, line in read_lines(path)]
    parts = split_90_5_5(lines)
    if not all(parts):
        raise ValueError(f"{path} has {len(lines)} lines, too few to be split into 90/5/5 % by lines")
    return list(parts)


# ---- bytes ----


def read_text(path: Path) -> np.ndarray:
    """Any file as bytes (N,), plain, packed, or the files of a zip one after another."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found" if not path.exists() else f"{path} is a folder, not a text file")
    if path.suffix == ".zip":
        return mapped(path, contents)
    return mapped(path, pieces if path.suffix in OPENERS else None)


def read_enwik8(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    text = read_text(path)
    if len(text) != 100_000_000:
        raise ValueError(f"{path} has {len(text):,} bytes; enwik8 has 100,000,000: get it again from {ENWIK8.origin}")
    return text[:90_000_000], text[90_000_000:95_000_000], text[95_000_000:]


def contents(path: Path) -> Iterator[bytes]:
    """The files of an archive, one after another."""
    return (content for _, content in members(path))


def read_books(path: Path) -> Iterator[bytes]:
    """The text files of a folder or an archive, one after another."""
    return (content for _, content in members(path, lambda name: name.endswith(".txt")))
