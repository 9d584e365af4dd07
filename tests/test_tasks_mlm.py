"""Subword tokenizers, masked language modelling, language modelling at length."""

from __future__ import annotations

import dataclasses
import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.data.corpus import Corpus, tokenised
from subquad.data.documents import BLOCK, blocks, plain, sentences
from subquad.data.subwords import SPECIALS, cached_tokenizer, encode_all, framed, load, save, text_of, train_tokenizer
from subquad.tasks import task
from subquad.tasks.base import IGNORED
from subquad.tasks.books import Books, DocumentWindows
from subquad.tasks.mlm import SPECIAL, Mlm, mask, windows

LINES = ["the cat sat on the mat .", "the dog sat on the log .", "a cat saw the dog ?", "Ünïcode, too ! 12 34"] * 3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES, 300)


# ---- tokenizers -----------------------------------------------------------------------------------------------


def test_specials_come_first_and_mean_themselves(tokenizer) -> None:
    assert [tokenizer.token_to_id(word) for word in SPECIALS] == [0, 1, 2, 3, 4]
    ids = encode_all(tokenizer, ["the [MASK] sat"])[0]
    assert ids.count(4) == 1
    assert len(ids) == 3 and text_of(tokenizer, [ids[0]]) == "the"  # one token each, no lone blank


@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=20))
def test_every_text_comes_back(tokenizer, text: str) -> None:
    import unicodedata

    text = unicodedata.normalize("NFC", text).strip()
    if not any(word in text for word in SPECIALS):
        assert text_of(tokenizer, encode_all(tokenizer, [text])[0]) == text


def test_a_vocabulary_without_room_for_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be ≥ 261"):
        train_tokenizer(LINES, 260)


def test_tokenizers_are_cached_by_their_text(cache: Path) -> None:
    first = cached_tokenizer(LINES, 300)
    assert cached_tokenizer(LINES, 300).to_str() == first.to_str()
    assert len(list(cache.glob("tokenizer-*/tokenizer.json"))) == 1
    cached_tokenizer(LINES, 300, lowercase=True)
    cached_tokenizer([*LINES, "more"], 300)
    assert len(list(cache.glob("tokenizer-*/tokenizer.json"))) == 3


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path: Path) -> None:
    save(tokenizer, tmp_path)
    assert load(tmp_path).to_str() == tokenizer.to_str()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="saved tokenizer"):
        load(tmp_path / "none")


def test_frames() -> None:
    pair = framed([7, 8], [9])
    assert pair["input_ids"].tolist() == [2, 7, 8, 3, 9, 3]
    assert pair["token_type_ids"].tolist() == [0, 0, 0, 0, 1, 1]
    assert framed([7])["input_ids"].tolist() == [2, 7, 3]


# ---- masking --------------------------------------------------------------------------------------------------


def test_masks_have_the_shares_of_bert() -> None:
    n, vocabulary = 400_000, 1000
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocabulary, n)
    hidden, labels = mask(ids, rng, vocabulary)
    chosen = labels != IGNORED

    def close(count: int, of: int, share: float) -> bool:
        return abs(count - of * share) < 5 * np.sqrt(of * share * (1 - share))

    assert not chosen[ids < SPECIAL].any()
    assert (hidden[~chosen] == ids[~chosen]).all() and (labels[chosen] == ids[chosen]).all()
    assert close(chosen.sum(), (ids >= SPECIAL).sum(), 0.15)
    after, before = hidden[chosen], ids[chosen]
    assert close((after == 4).sum(), len(after), 0.8)
    same = 1 / (vocabulary - SPECIAL)  # a drawn token may be the old one
    assert close((after == before).sum(), len(after), 0.1 + 0.1 * same)
    drawn = after[(after != 4) & (after != before)]
    assert drawn.min() >= SPECIAL and len(np.unique(drawn)) > 900


@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=4), st.integers(2, 40))
def test_windows_hold_each_token_once_and_never_two_documents(lengths: list[list[int]], room: int) -> None:
    pieces = np.cumsum([0, *(length for document in lengths for length in document)])
    documents = np.cumsum([0, *map(len, lengths)])
    corpus = Corpus(np.arange(pieces[-1]), pieces, documents)
    found = windows(corpus, room)
    assert (found[1:, 0] == found[:-1, 2]).all() and found[0, 0] == 0 and found[-1, 2] == pieces[-1]
    assert (found[:, 2] - found[:, 0] <= room).all() and (found[:, 0] < found[:, 1]).all()
    ends = corpus.bounds[1:]
    assert (np.searchsorted(ends, found[:, 0], "right") == np.searchsorted(ends, found[:, 2])).all()
    inner = found[found[:, 1] < found[:, 2], 1]
    assert np.isin(inner, pieces).all()  # A ends where a sentence does


def test_sentences_and_the_marks_of_wikitext() -> None:
    assert list(sentences(["One . Two ! Three", "", " four "])) == ["One .", "Two !", "Three", "four"]
    assert plain("a well @-@ known <unk> , 1 @,@ 000") == "a well-known [UNK] , 1,000"


def wikitext(folder: Path, **parts: str) -> Path:
    (folder / "wikitext-2").mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "wikitext-2" / "wikitext-2-v1.zip", "w") as archive:
        for part, text in parts.items():
            archive.writestr(f"wikitext-2/wiki.{part}.tokens", text)
    return folder


ARTICLE = (
    " \n = Cats = \n \n The cat sat on the mat . The <unk> sat too . \n \n = = Dogs = = \n \n A dog . Two dogs . \n"
)


def test_mlm_examples(tmp_path: Path) -> None:
    folder = wikitext(tmp_path, train=ARTICLE * 4, valid=ARTICLE, test=ARTICLE)
    made = task("mlm", settings=("length=24", "subwords=300", "steps=10", "batch=2"), data=folder)
    splits = made.load()
    assert len(made.train[0].documents) == 1 + 4
    example = splits.train[0]
    assert example.keys() == {"input_ids", "token_type_ids", "labels"}
    assert all(torch.equal(example[key], splits.train[0][key]) for key in example)
    hidden = torch.cat([splits.train[i]["labels"] for i in range(len(splits.train))])
    assert IGNORED in hidden and (hidden != 1).all()  # an unknown word is nothing to guess
    distinct = len(made.train[1])
    assert len(splits.train) == min(10, -(-20 // distinct)) * distinct
    again = task("mlm", settings=("length=24", "subwords=300", "steps=10", "batch=2"), data=folder, seed=1)
    other = again.load()
    assert any(not torch.equal(splits.valid[i]["labels"], other.valid[i]["labels"]) for i in range(len(other.valid)))
    assert 1 < made.baselines()["unigram"] < 300
    made.save(tmp_path)
    fresh = Mlm(made.recipe)
    fresh.restore(tmp_path)
    assert fresh.vocabulary() == made.vocabulary()
    asked = fresh.encode("The [MASK] sat")["input_ids"]
    logits = torch.zeros(len(asked), fresh.vocabulary()["vocab_size"])
    logits[:, fresh.tokenizer.encode(" dog").ids[0]] = 1.0
    logits[:, 4] = 2.0  # a special fills nothing
    assert fresh.answer(logits) == "the dog sat"
    with pytest.raises(ValueError, match="has no \\[MASK\\] to be filled"):
        fresh.encode("The cat")


def test_copies_of_an_example_hide_other_tokens(tmp_path: Path) -> None:
    folder = wikitext(tmp_path, train=ARTICLE * 4, valid=ARTICLE, test=ARTICLE)
    made = task("mlm", settings=("length=60", "subwords=300", "steps=100", "batch=8"), data=folder)
    train, distinct = made.load().train, len(made.train[1])
    assert len(train) == 10 * distinct
    assert len({tuple(train[k * distinct]["labels"].tolist()) for k in range(10)}) > 1


def test_mlm_reads_any_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(LINES * 20))
    made = task("mlm", settings=(f"path={tmp_path / 'a.txt'}", "length=16", "subwords=300"))
    splits = made.load()
    sizes = [len(made.train[1]), len(splits.valid), len(splits.test)]
    assert sizes[0] > 8 * sizes[1] > 0 and sizes[2] > 0
    with pytest.raises(FileNotFoundError, match=r"b\.txt not found"):
        task("mlm", settings=(f"path={tmp_path / 'b.txt'}",)).load()
    (tmp_path / "a.txt").write_text("too short")
    with pytest.raises(ValueError, match=r"a\.txt gives 1 examples, too few"):
        task("mlm", settings=(f"path={tmp_path / 'a.txt'}", "subwords=300")).load()


def test_mlm_says_what_is_wrong_with_the_data(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"wikitext-2-v1\.zip.*`data`"):
        task("mlm", data=tmp_path).load()
    wikitext(tmp_path, train=ARTICLE, valid=ARTICLE)
    with pytest.raises(ValueError, match=r"holds no wiki\.test"):
        task("mlm", data=tmp_path).load()
    wikitext(tmp_path, train=ARTICLE, valid=" \n", test=ARTICLE)
    with pytest.raises(ValueError, match="the validation text is empty"):
        task("mlm", settings=("subwords=300",), data=tmp_path).load()
    (tmp_path / "wikitext-2" / "wikitext-2-v1.zip").write_bytes(b"PK no zip")
    with pytest.raises(ValueError, match=r"wikitext-2-v1\.zip cannot be read"):
        task("mlm", data=tmp_path).load()


# ---- books ----------------------------------------------------------------------------------------------------


def shelf(folder: Path, books: dict[str, str]) -> Path:
    (folder / "pg19").mkdir(parents=True)
    with tarfile.open(folder / "pg19" / "books.tar.xz", "w:xz") as archive:
        for name, text in books.items():
            info = tarfile.TarInfo(f"pg19/{name}.txt")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return folder


BOOKS = {str(k): f"Book {k}\n\n" + "\n".join(LINES * (k + 1)) for k in range(10)}


def test_books_are_whole_and_apart(tmp_path: Path) -> None:
    made = task("lm-books", settings=("length=32", "subwords=300", "stride=16", "eval_size=none"),
                data=shelf(tmp_path, BOOKS))  # fmt: skip
    splits = made.load()
    texts = [made.decode(part.tokens[a:b]) for part in (splits.train, splits.valid, splits.test)
             for a, b in zip(part.bounds[:-1], part.bounds[1:], strict=True)]  # fmt: skip
    assert sorted(texts) == sorted(BOOKS.values())
    assert len(splits.valid.last) == len(splits.test.last) == 1
    for i in range(len(splits.train)):
        ids = splits.train[i]["input_ids"].tolist()
        assert 1 not in ids[1:] and 2 not in ids[:-1]  # <s> first, </s> last or not at all
    assert made.vocabulary()["eos_token_id"] == made.tokenizer.token_to_id("</s>")


@given(st.lists(st.integers(2, 50), min_size=1, max_size=5), st.integers(2, 20), st.data())
def test_document_windows_predict_every_token_once(lengths: list[int], length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length - 1))
    total = sum(lengths)
    bounds = np.cumsum([0, *lengths])
    found = DocumentWindows(Corpus(np.arange(total), bounds, np.arange(len(bounds))), length, stride)
    predicted = [label for i in range(len(found)) for label in found[i]["labels"][1:].tolist() if label != IGNORED]
    assert sorted(predicted) == sorted(set(range(total)) - set(bounds.tolist()))
    some = DocumentWindows(Corpus(np.arange(total), bounds, np.arange(len(bounds))), length, stride, size=2)
    assert len(some) == min(2, len(found))


def test_blocks_lose_nothing() -> None:
    text = "\n".join(["word " * 3000] * 20)
    found = list(blocks(enumerate(text.split("\n"), 1)))
    assert "".join(found) == text and len(found) > 3 and all(len(block) < BLOCK + 20_000 for block in found)


def test_one_billion_words(tmp_path: Path) -> None:
    root = tmp_path / "lm1b" / "1-billion-word-language-modeling-benchmark-r13output"
    files = {
        "training-monolingual.tokenized.shuffled/news.en-00001-of-00100": LINES,
        "training-monolingual.tokenized.shuffled/news.en-00002-of-00100": [*LINES, ""],
        "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050": LINES[:3],
    }
    for name, lines in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("\n".join(lines))
    made = Books(dataclasses.replace(Books.recipes["lm1b"], subwords=300, length=64), tmp_path)
    with pytest.raises(FileNotFoundError, match="heldout-00001-of-00050"):
        made.load()
    (root / "heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050").write_text("\n".join(LINES[:2]))
    splits = made.load()
    assert [len(splits.train), len(splits.valid), len(splits.test)] == [24, 2, 3]
    assert made.decode(splits.test[1]["input_ids"].tolist()) == LINES[1]


def test_a_corpus_is_written_once_and_whole(tokenizer, cache: Path) -> None:
    def broken():
        yield ["one"]
        raise ValueError("bad line")

    with pytest.raises(ValueError, match="bad line"):
        tokenised("a", broken, tokenizer)
    assert not list(cache.iterdir())
    first = tokenised("a", lambda: [["one", "two"], [], ["three"]], tokenizer)
    again = tokenised("a", broken, tokenizer)  # not read again
    assert first.documents.tolist() == again.documents.tolist() == [0, 2, 2, 3]
    assert text_of(tokenizer, again.tokens[again.bounds[2] :].tolist()) == "three"


def test_books_say_what_is_wrong_with_the_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="path must be given with source=folder"):
        task("lm-books", settings=("source=folder",)).load()
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"holds 1 \.txt files; 3 at least"):
        task("lm-books", settings=("source=folder", f"path={tmp_path}")).load()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "c.txt").write_bytes(b"fine\nnot \xff fine")
    with pytest.raises(ValueError, match=r"c\.txt, line 2: not UTF-8"):
        task("lm-books", settings=("source=folder", f"path={tmp_path}", "subwords=300")).load()
