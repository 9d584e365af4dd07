"""Language modelling on bytes and words: official files read and counted, entropies, windows, the cache."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import math
import os
import tarfile
import zipfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.data.cache import mapped, pieces
from subquad.data.datasets import PackedDocuments
from subquad.models import HEADS, SubquadConfig
from subquad.tasks import language, task
from subquad.tasks.language import entropies, learned_bigram

TEXT = ("To be, or not to be: that is the question.\n" * 40).encode()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SUBQUAD_CACHE", str(folder))
    return folder


def small(name: str, data: Path | None, *settings: str):
    return task(name, "small", ("length=32", "stride=16", "eval_size=none", *settings), data)


def zipped(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


# ---- packing ----


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(2, 20))
def test_documents_are_packed_whole(lengths, length):
    """Every token once and in order; a document is cut only where it is longer than a window."""
    bounds = np.cumsum([0, *lengths])
    packed = PackedDocuments(np.arange(bounds[-1]), bounds, length)
    rows = [packed[i] for i in range(len(packed))]
    assert torch.cat([row["input_ids"] for row in rows]).tolist() == list(range(bounds[-1]))
    assert all(len(row["input_ids"]) <= length for row in rows)
    for row in rows:
        starts = row["position_ids"] == 0
        assert torch.equal(row["labels"] == -100, starts)
        assert (row["position_ids"].diff()[~starts[1:]] == 1).all() and starts[0]
        begun = set(row["input_ids"][starts].tolist()) - set(bounds.tolist())
        assert all(lengths[np.searchsorted(bounds, token, "right") - 1] > length for token in begun)
    for one, other in pairwise(rows):  # greedy: the first document of a row did not fit into the row before
        begin = torch.cat([other["position_ids"], torch.zeros(1, dtype=torch.long)])[1:].eq(0).int().argmax() + 1
        assert len(one["input_ids"]) + int(begin) > length


def test_packed_language_tasks(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"To be,\nor not.\n\nThat is\n\n" * 30)
    where = ("source=file", f"path={tmp_path / 't.txt'}", "pack=true")
    letters = small("lm-bytes", None, *where)
    row = letters.load().train[0]
    text = letters.decode(row["input_ids"].tolist())
    assert text == "To be,\nor not.\n\nThat is\n\n" and row["position_ids"].eq(0).nonzero().flatten().tolist() == [
        0,
        16,
    ]
    words = small("lm-words", None, *where, "length=7")
    row = words.load().train[0]
    assert words.decode(row["input_ids"].tolist()).split() == ["To", "be,", "or", "not."]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    batch = words.collate([words.load().train[i] for i in range(3)])
    model = HEADS["causal-lm"](SubquadConfig(**words.config(), attention="combiner-fixed"))
    model(**batch).loss.backward()
    assert words.score(model(**batch).logits, batch["labels"])[:, 1].sum() == (batch["labels"] != -100).sum()


# ---- entropies ----


def test_entropies_of_texts_with_known_ones():
    assert entropies(np.array([3, 3, 3, 3])) == (0.0, 0.0)
    unigram, bigram = entropies(np.frombuffer(b"abcd" * 200 + b"a", np.uint8))
    assert unigram == pytest.approx(2.0, abs=1e-3)
    assert bigram == pytest.approx(0.0, abs=1e-9)  # every letter determines the next
    coins = np.random.default_rng(0).integers(0, 2, 100_000)
    assert entropies(coins) == (pytest.approx(1.0, abs=1e-3), pytest.approx(1.0, abs=1e-3))


@given(st.lists(st.integers(0, 4), min_size=2, max_size=60))
def test_entropies_equal_the_likelihood_of_counted_models(tokens):
    """The bigram entropy is the mean surprise of a model that has counted the pairs of this very text."""
    pairs = list(pairwise(tokens))
    surprise = [-math.log2(pairs.count(pair) / tokens[:-1].count(pair[0])) for pair in pairs]
    single = [-math.log2(tokens.count(token) / len(tokens)) for token in tokens]
    expected = (sum(single) / len(tokens), sum(surprise) / len(pairs))
    assert entropies(np.array(tokens)) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=40), st.lists(st.integers(0, 5), min_size=2, max_size=20))
def test_what_pairs_of_another_text_teach(known, asked):
    """Pair by pair, as the formula is written; the probabilities of all next tokens sum to 1."""
    pairs = list(pairwise(known))

    def probability(one, other):
        alone = (known.count(other) + 1) / (len(known) + 6)
        kinds = len({b for a, b in pairs if a == one})
        counted = pairs.count((one, other)) + kinds * alone
        return counted / (sum(a == one for a, _ in pairs) + kinds) if kinds else alone

    expected = sum(-math.log2(probability(*pair)) for pair in pairwise(asked)) / (len(asked) - 1)
    assert learned_bigram(np.array(known), np.array(asked), 6) == pytest.approx(expected, abs=1e-9)
    assert sum(probability(asked[0], b) for b in range(6)) == pytest.approx(1)


def test_of_a_long_text_the_beginning_is_counted(monkeypatch):
    known, asked = np.array([0, 1] * 50 + [0, 2] * 50), np.array([0, 1, 0, 1, 0])
    whole = learned_bigram(known, asked, 3)
    monkeypatch.setattr(language, "COUNTED", 100)
    assert learned_bigram(known, asked, 3) == learned_bigram(known[:100], asked, 3) < whole
    assert learned_bigram(known[:100].astype(np.uint16), asked, 3) == learned_bigram(known[:100], asked, 3)


def test_the_plateau_of_a_language_model_is_what_pairs_teach(tmp_path):
    """A model that sees one word only cannot do better on this text than to know which one follows."""
    rng = np.random.default_rng(0)
    lines = (" ".join("abcdefgh"[i] for i in rng.integers(0, 8, 20)) for _ in range(400))
    (tmp_path / "random.txt").write_text("\n".join(lines) + "\n")
    words = small("lm-words", None, "source=file", f"path={tmp_path / 'random.txt'}")
    words.load()
    score, margin, what = words.plateau()
    assert (margin, what) == (0.0, "bigram") and 7 < score < 9, "8 words that do not depend on each other, and <eos>"
    (tmp_path / "books").mkdir()
    for i in range(30):
        (tmp_path / "books" / f"{i}.txt").write_bytes(b"abcd" * 200)
    books = small("lm-books", None, "source=folder", f"path={tmp_path / 'books'}", "subwords=259")
    books.load()
    score, _, what = books.plateau()
    assert what == "bigram" and score < 1.1 < 4 < books.baselines()["unigram"], "every letter determines the next"


@pytest.mark.parametrize("more", [(), ("pack=true", "stride=none")])
@pytest.mark.parametrize("name", ["lm-bytes", "lm-words"])
def test_the_plateau_is_that_of_the_validation_text(tmp_path, name, more):
    """With which the scores on the way are compared; the test text is another one here, of a word unseen before."""
    lines = [" ".join(letters) for letters in np.random.default_rng(0).choice(list("abcdefgh"), (950, 20))]
    (tmp_path / "text.txt").write_text("\n".join([*lines, *["x " * 20] * 50]) + "\n")
    task = small(name, None, "source=file", f"path={tmp_path / 'text.txt'}", *more)
    splits = task.load()
    own = {
        "lm-bytes": lambda text: entropies(text)[1],
        "lm-words": lambda text: 2 ** learned_bigram(task.train, text, 10),
    }
    known, asked = own[name](splits.valid.tokens), own[name](splits.test.tokens)
    assert task.plateau() == (pytest.approx(known, rel=0.02), 0.0, "bigram") and asked != pytest.approx(known, rel=0.3)


# ---- the cache ----


def test_cache_unpacks_once_and_again_when_the_file_changes(tmp_path, cache):
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"first"))
    assert bytes(mapped(path, pieces)) == b"first"
    os.utime(*[next(cache.iterdir())], (1, 1))
    assert bytes(mapped(path, pieces)) == b"first"
    assert [file.stat().st_mtime for file in cache.iterdir()] == [1]  # not written again
    path.write_bytes(gzip.compress(b"second text"))
    assert bytes(mapped(path, pieces)) == b"second text"
    assert not mapped(path, pieces).flags.writeable


def test_cache_keeps_nothing_of_a_broken_file(tmp_path, cache):
    path = tmp_path / "text.xz"
    path.write_bytes(lzma.compress(os.urandom(10_000))[:-50])
    with pytest.raises(ValueError, match=r"text\.xz cannot be read.*get it again"):
        mapped(path, pieces)
    assert list(cache.iterdir()) == []


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "file"))
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(OSError, match=r"cannot be unpacked into .*set SUBQUAD_CACHE to another folder"):
        mapped(tmp_path / "text.gz", pieces)


# ---- bytes ----


@pytest.mark.parametrize("name, pack", [
    ("t.txt", lambda x: x), ("t.gz", gzip.compress), ("t.xz", lzma.compress), ("t.zip", None),
])  # fmt: skip
def test_bytes_of_any_file(tmp_path, name, pack):
    path = tmp_path / name
    if pack is None:
        zipped(path, {"inner": TEXT})
    else:
        path.write_bytes(pack(TEXT))
    texts = small("lm-bytes", None, "source=file", f"path={path}").texts()
    assert b"".join(bytes(text) for text in texts) == TEXT
    assert [len(text) for text in texts] == [len(TEXT) * 90 // 100, len(TEXT) * 5 // 100, len(TEXT) * 5 // 100]


def test_bytes_windows_predict_every_byte_once(tmp_path):
    (tmp_path / "t.txt").write_bytes(TEXT)
    splits = small("lm-bytes", None, "source=file", f"path={tmp_path / 't.txt'}").load()
    assert splits.train.stride == 32
    assert splits.test.stride == 16
    predicted = sum(int((example["labels"][1:] != -100).sum()) for example in splits.test)
    assert predicted == len(splits.test.tokens) - 1
    few = small("lm-bytes", None, "source=file", f"path={tmp_path / 't.txt'}", "eval_size=2", "train_size=3").load()
    assert [len(part) for part in (few.train, few.valid, few.test)] == [3, 2, 2]
    assert bytes(few.test.tokens) == bytes(splits.test.tokens)[:48]


def test_bytes_measure_what_a_model_without_knowledge_needs(tmp_path):
    (tmp_path / "t.txt").write_bytes(TEXT)
    lm = small("lm-bytes", None, "source=file", f"path={tmp_path / 't.txt'}", "width=8", "heads=1", "feedforward=8")
    splits = lm.load()
    batch = lm.collate([splits.test[i] for i in range(len(splits.test))])
    statistics = lm.score(torch.zeros(*batch["labels"].shape, 256), batch["labels"])
    assert lm.measure(statistics.numpy())["bits_per_byte"] == pytest.approx(8.0)
    unigram, bigram = lm.baselines().values()
    assert 0 <= bigram < unigram < 8
    model = HEADS[lm.head](SubquadConfig(attention="combiner-fixed", **lm.config()))
    assert model(**batch).loss.isfinite()


def test_bytes_write_and_read_text(tmp_path):
    lm = small("lm-bytes", None)
    ids = lm.encode("naïve 🙂")["input_ids"]
    assert lm.decode(ids.tolist()) == "naïve 🙂"
    assert lm.decode([0x61, 0xFF]) == "a\N{REPLACEMENT CHARACTER}"
    assert lm.answer(torch.eye(256)[[3, ord("x")]]) == "x"
    with pytest.raises(ValueError, match="empty"):
        lm.encode("")


def test_pg19_folders_and_archive(tmp_path):
    books = {name: f"book {name} ".encode() * 20 for name in ("10", "9", "11")}
    for part in ("train", "validation", "test"):
        (tmp_path / "tree/pg19" / part).mkdir(parents=True)
        for name, text in books.items():
            (tmp_path / "tree/pg19" / part / f"{name}.txt").write_bytes(text + part.encode())
    texts = small("lm-bytes", tmp_path / "tree", "source=pg19").texts()
    assert [bytes(text).count(b"train") for text in texts] == [3, 0, 0]
    assert bytes(texts[2]) == b"".join(books[name] + b"test" for name in ("10", "11", "9"))
    (tmp_path / "packed/pg19").mkdir(parents=True)
    with tarfile.open(tmp_path / "packed/pg19/books.tar.xz", "w:xz") as archive:
        for name, text in {**{f"pg19/{key}.txt": text for key, text in books.items()}, "pg19/notes.csv": b"x"}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    texts = small("lm-bytes", tmp_path / "packed", "source=pg19").texts()
    assert b"".join(bytes(text) for text in texts) == b"".join(books.values())


@pytest.mark.parametrize(("name", "most"), [("lm-words", "length=64"), ("lm-bytes", "length=64"),
                                            ("lm-books", "length - 1 = 63")])  # fmt: skip
def test_no_token_lies_between_two_windows(name, most):
    with pytest.raises(ValueError, match=f"stride must be at most {most}, not 65; none: no overlap"):
        task(name, settings=("length=64", "stride=65"))
    assert task(name, settings=("length=64", "stride=65", "pack=true")).recipe.pack, "there is no stride"


def test_bytes_bad_input(tmp_path):
    for source, message in (("enwik8", "mattmahoney"), ("pg19", "pg19"), ("shakespeare", "char-rnn")):
        with pytest.raises(FileNotFoundError, match=f"not found in .*{source}.*get .*{message}.* put it there"):
            small("lm-bytes", tmp_path, f"source={source}").load()
    zipped(tmp_path / "enwik8/enwik8.zip", {"enwik8": TEXT})
    with pytest.raises(ValueError, match=r"enwik8\.zip has 1,720 bytes; enwik8 has 100,000,000"):
        small("lm-bytes", tmp_path, "source=enwik8").load()
    with pytest.raises(ValueError, match="path must be given with source=file, and only then"):
        small("lm-bytes", tmp_path, "source=file").load()
    with pytest.raises(ValueError, match="path must be given with source=file, and only then"):
        small("lm-bytes", tmp_path, "path=x").load()
    with pytest.raises(FileNotFoundError, match="nothing not found"):
        small("lm-bytes", tmp_path, "source=file", f"path={tmp_path / 'nothing'}").load()
    with pytest.raises(FileNotFoundError, match="is a folder"):
        small("lm-bytes", tmp_path, "source=file", f"path={tmp_path}").load()
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty is empty"):
        small("lm-bytes", tmp_path, "source=file", f"path={tmp_path / 'empty'}").load()
    (tmp_path / "short").write_bytes(b"0123456789")
    with pytest.raises(ValueError, match="the validation text has 0 tokens"):
        small("lm-bytes", tmp_path, "source=file", f"path={tmp_path / 'short'}").load()


def test_bytes_official_files(data):
    texts = small("lm-bytes", data, "source=enwik8").texts()
    assert [len(text) for text in texts] == [90_000_000, 5_000_000, 5_000_000]
    digest = hashlib.md5()
    for text in texts:
        digest.update(text)
    assert digest.hexdigest() == "a1fa5ffddb56f4953e226637dabbb36a"
    assert sum(len(text) for text in small("lm-bytes", data, "source=pg19").texts()) == 12_883_612
    shakespeare = small("lm-bytes", data)
    splits = shakespeare.load()
    assert sum(len(part.tokens) for part in (splits.train, splits.valid, splits.test)) == 1_115_394
    assert 3 < shakespeare.baselines()["bigram"] < shakespeare.baselines()["unigram"] < 5


# ---- words ----

LINES = {
    "train": " \n = Title = \n \n the cat sat on the <unk> \n the cat ran \n",
    "valid": " the cat flew \n",
    "test": " the <unk> sat \n \n",
}


def wikitext(**changed: str) -> dict[str, bytes]:
    return {f"wikitext-2/wiki.{part}.tokens": text.encode() for part, text in (LINES | changed).items()}


def test_words_vocabulary_and_places(tmp_path):
    zipped(tmp_path / "zip/wikitext-2/wikitext-2-v1.zip", wikitext())
    for name, content in wikitext().items():
        for root in ("unpacked/wikitext-2", "bare"):
            (tmp_path / root / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / root / name).write_bytes(content)
    for folder in ("zip", "unpacked", "bare"):
        lm = small("lm-words", tmp_path / folder, "source=wikitext-2")
        train, valid, test = lm.texts()
        assert lm.words[:4] == ["<unk>", "<eos>", "the", "="] or lm.words[2] == "the"
        assert sorted(lm.words) == sorted(["<unk>", "<eos>", "=", "Title", "the", "cat", "sat", "on", "ran"])
        assert lm.decode(train) == "\n = Title = \n \n the cat sat on the <unk> \n the cat ran \n"
        assert lm.decode(valid) == "the cat <unk> \n"  # flew is not in the training text
        assert lm.decode(test) == "the <unk> sat \n \n"
        assert lm.vocabulary() == {"vocab_size": 9}


def test_words_rare_ones_and_saving(tmp_path):
    (tmp_path / "t.txt").write_text("a a b ünï c\n" * 18 + "once b\n" + "a zzz\n" + "b\n" * 2, encoding="utf-8")
    lm = small("lm-words", None, "source=file", f"path={tmp_path / 't.txt'}", "rare=2")
    lm.load()
    assert set(lm.words) == {"<unk>", "<eos>", "a", "b", "c", "ünï"}
    lm.save(tmp_path)
    again = small("lm-words", None)
    again.restore(tmp_path)
    assert again.words == lm.words
    ids = again.encode("a ünï once\nb")["input_ids"]
    assert again.decode(ids.tolist()) == "a ünï <unk> \n b"
    assert again.answer(torch.eye(6)[[0, 2]]) == again.words[2]
    with pytest.raises(ValueError, match="empty"):
        again.encode("  ")


@pytest.mark.parametrize("files, message", [
    (wikitext(valid=""), r"wiki\.valid\.tokens is empty"),
    ({**wikitext(), "wikitext-2/wiki.test.tokens": b"fine\n\xff\xfe bad\n"}, r"wiki\.test\.tokens, line 2: not UTF-8"),
    ({"wikitext-2/wiki.test.tokens": b"a b"}, r"holds no wiki\.train\.tokens: the training text .* is missing"),
])  # fmt: skip
def test_words_bad_archives(tmp_path, files, message):
    zipped(tmp_path / "wikitext-2/wikitext-2-v1.zip", files)
    with pytest.raises(ValueError, match=message):
        small("lm-words", tmp_path, "source=wikitext-2").load()


def test_words_bad_input(tmp_path):
    for source, what in (
        ("wikitext-2", "wikitext-2-v1.zip"),
        ("ptb", "simple-examples.tgz"),
        ("wikitext-103", "v1.zip"),
    ):
        with pytest.raises(FileNotFoundError, match=f"not found in .*{source}.*get .*{what}.* put it there"):
            small("lm-words", tmp_path, f"source={source}").load()
    zipped(tmp_path / "ptb/ptb.zip", {"ptb.train.txt": b"a b\n" * 200})
    broken = (tmp_path / "ptb/ptb.zip").read_bytes()
    (tmp_path / "ptb/ptb.zip").write_bytes(broken[:60])
    with pytest.raises(ValueError, match=r"ptb\.zip cannot be read.*get it again"):
        small("lm-words", tmp_path).load()
    (tmp_path / "few.txt").write_text("one line\nand one\n")
    with pytest.raises(ValueError, match="has 2 lines, too few"):
        small("lm-words", None, "source=file", f"path={tmp_path / 'few.txt'}").load()
    (tmp_path / "latin.txt").write_bytes("caf\xe9\n".encode("latin-1") * 30)
    with pytest.raises(ValueError, match=r"latin\.txt, line 1: not UTF-8"):
        small("lm-words", None, "source=file", f"path={tmp_path / 'latin.txt'}").load()


def test_words_official_files(data):
    published = {"wikitext-2": ((2_088_628, 217_646, 245_569), 33_278), "ptb": ((929_589, 73_760, 82_430), 10_000)}
    for source, (counts, vocabulary) in published.items():
        lm = small("lm-words", data, f"source={source}")
        texts = lm.texts()
        assert tuple(len(text) for text in texts) == counts
        assert len(lm.words) == vocabulary
        assert all(int(text.max()) < vocabulary for text in texts)
    path = data / "wikitext-103" / "wikitext-103-v1.zip"
    if not path.exists():
        with pytest.raises(ValueError, match="the training text of wikitext-103 is missing"):
            small("lm-words", data, "source=wikitext-103").load()
