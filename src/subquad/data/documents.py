"""Texts of documents, which are read piece by piece: books, articles, sentences. A corpus of tokens is made of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np

from subquad.data import subwords
from subquad.data.corpus import Document, signature
from subquad.data.files import Source, decoded, members, read_lines

BLOCK = 1 << 16  # characters of a book that are encoded together
LM1B = Source(
    "lm1b",
    "1-billion-word-language-modeling-benchmark-r13output.tar.gz, unpacked",
    "https://www.statmt.org/lm-benchmark/",
)
WIKI40B = Source(
    "wiki40b",
    'Wiki-40B, English, as en.{train,validation,test}.jsonl, one {"text": …} a line',
    "wiki40b of TensorFlow Datasets or google/wiki40b of the Hugging Face hub",
)
WIKITEXT = Source(
    "wikitext-2", "wikitext-2-raw-v1.zip or wikitext-2-v1.zip", "the WikiText page of Salesforce Research (S. Merity)"
)
TEXTS = Source("texts", "a corpus as .txt files, each a document (Wikipedia and BooksCorpus, C4)", "its publisher")
MARKS = ("_START_ARTICLE_", "_START_SECTION_", "_START_PARAGRAPH_")
ROOT, TRAINING, HELDOUT = (
    "1-billion-word-language-modeling-benchmark-r13output",
    "training-monolingual.tokenized.shuffled",
    "heldout-monolingual.tokenized.shuffled",
)
SENTENCE = re.compile(r"(?<=[.!?])\s+")
TITLE = re.compile(r" = [^=].*[^=] = $")


@dataclass(frozen=True)
class Texts:
    """The documents of a part of the data, read anew at every call. `source` names them in the cache."""

    source: str
    documents: Callable[[], Iterable[Document]]


# ---- books ----


def whole(path: Path) -> Texts:
    """All books of a folder."""
    names = book_names(path)
    return Texts(f"{signature(path / name.partition('/')[2] for name in names)} books", lambda: books(path, set(names)))


def drawn(path: Path, seed: int) -> list[Texts]:
    """The books of a folder or an archive in three parts, drawn by the seed: 8/10, 1/10, 1/10, at least one each."""
    names = book_names(path)
    if len(names) < 3:
        raise ValueError(f"{path} holds {len(names)} .txt files; 3 at least are needed, to train, validate and test")
    order = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    tenth = max(1, len(names) // 10)
    parts = (order[2 * tenth :], order[:tenth], order[tenth : 2 * tenth])
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    return [Texts(f"{signature(files)} {sorted(part)} books", _reader(path, set(part))) for part in parts]


def _reader(path: Path, names: set[str]) -> Callable[[], Iterable[Document]]:
    return lambda: books(path, names)


def book_names(path: Path) -> list[str]:
    """Names as `members` gives them, sorted."""
    if not path.exists():
        raise FileNotFoundError(f"{path} not found: give a folder of .txt files")
    if path.is_dir():
        return sorted(file.relative_to(path.parent).as_posix() for file in path.rglob("*.txt"))
    return sorted(name for name, _ in members(path, lambda name: name.endswith(".txt")))


def books(path: Path, names: set[str]) -> Iterator[Document]:
    """The named books of a folder (read line by line) or of an archive (one by one)."""
    if path.is_dir():
        for name in sorted(names):
            yield blocks(read_lines(path.parent / name))
    else:
        for name, content in members(path, names.__contains__):
            yield blocks(decoded(f"{path}: {name}", BytesIO(content)))


def blocks(lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    """A text cut before some of its line ends, which are kept, into pieces that are encoded one by one."""
    block: list[str] = []
    size = 0
    for number, line in lines:
        if size >= BLOCK:
            yield "".join(block)
            block, size = [], 0
        block.append(line if number == 1 else f"\n{line}")
        size += len(line) + 1
    if block:
        yield "".join(block)


# ---- One Billion Words, Wiki-40B ----


def one_billion_words(data: Path | None) -> list[Texts]:
    """Every line of the training files; of held-out files 1 and 0 for validation and test."""
    folder = LM1B.find(data, f"{ROOT}/{TRAINING}", TRAINING)
    files = sorted(folder.glob("news.en-*-of-00100*"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no news.en-000xx-of-00100; get {LM1B.what} from {LM1B.origin}")
    near = f"{ROOT}/{HELDOUT}" if folder.parent.name == ROOT else HELDOUT
    valid, test = (LM1B.find(data, f"{near}/news.en.heldout-0000{k}-of-00050") for k in (1, 0))
    return [Texts(f"{signature(part)} lines", _lines(part)) for part in (files, [valid], [test])]


def _lines(files: Sequence[Path]) -> Callable[[], Iterable[Document]]:
    return lambda: ([line] for file in files for _, line in read_lines(file) if line.strip())


def wiki_40b(data: Path | None) -> list[Texts]:
    """The articles of the three official parts."""
    parts = [WIKI40B.find(data, f"en.{part}.jsonl") for part in ("train", "validation", "test")]
    return [Texts(f"{signature([part])} articles", _articles(part)) for part in parts]


def _articles(file: Path) -> Callable[[], Iterable[Document]]:
    return lambda: ([article(f"{file}, line {number}", line)] for number, line in read_lines(file) if line.strip())


def article(where: str, line: str) -> str:
    """The text of a JSON object {"text": …} without the marks of the release: _NEWLINE_ becomes a line end; those of
    articles, sections and paragraphs, each on a line of its own, are left out.
    """
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: a JSON object with the key text is expected, not {line[:60]!r}") from error
    if not isinstance(text, str):
        raise ValueError(f"{where}: text must be a string, not {text!r:.60}")
    lines = [each for each in text.split("\n") if each.strip() and each.strip() not in MARKS]
    return "\n".join(lines).replace("_NEWLINE_", "\n")


# ---- sentences of WikiText and of any texts ----


def sentences(lines: Iterable[str]) -> Iterator[str]:
    """Lines cut where a full stop, a question or an exclamation mark is followed by a blank."""
    for line in lines:
        yield from (piece for piece in SENTENCE.split(line.strip()) if piece)


def read_wikitext(data: Path | None) -> list[Texts]:
    """Training, validation and test text, raw or in tokens; an article is a document."""
    path = WIKITEXT.find(data, "wikitext-2-raw-v1.zip", "wikitext-2-raw", "wikitext-2-v1.zip", "wikitext-2")
    found = {PurePosixPath(name).stem: (name, content) for name, content in members(path)}
    for part in ("train", "valid", "test"):
        if f"wiki.{part}" not in found:
            raise ValueError(f"{path} holds no wiki.{part}.raw or .tokens; get {WIKITEXT.what} from {WIKITEXT.origin}")
    return [_wikitext(path, *found[f"wiki.{part}"]) for part in ("train", "valid", "test")]


def _wikitext(path: Path, name: str, content: bytes) -> Texts:
    def documents() -> Iterator[Iterable[str]]:
        lines: list[str] = []
        blank = True  # a title stands after a blank line
        for _, line in decoded(f"{path}: {name}", BytesIO(content)):
            if lines and blank and TITLE.match(line):
                yield sentences(lines)
                lines = []
            blank = not line.strip()
            lines += [] if blank else [plain(line)]
        if lines:
            yield sentences(lines)

    return Texts(f"{hashlib.sha256(content).hexdigest()} articles", documents)


def plain(line: str) -> str:
    """WikiText's marks undone: « @-@ » is a hyphen inside a word, <unk> the unknown token."""
    return re.sub(r" @([-,.])@ ", r"\1", line).replace("<unk>", subwords.UNK)


def read_path(path: Path) -> Texts:
    """A text file, or the .txt files of a folder; every file is a document."""
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files or not path.exists():
        raise FileNotFoundError(f"{path} not found" if not path.exists() else f"{path} holds no .txt file")
    return Texts(
        f"{signature(files)} files", lambda: (sentences(line for _, line in read_lines(file)) for file in files)
    )
