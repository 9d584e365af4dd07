"""GLUE: its files with all their quirks, its metrics, fine-tuning from a masked language model."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.data.subwords import save, train_tokenizer
from subquad.data.tables import read_rows
from subquad.models import HEADS, SubquadConfig
from subquad.tasks import scores, task
from subquad.tasks.glue import TABLE, shortened

SST2 = "sentence\tlabel\n" + "".join(f"a very {('bad', 'good')[k % 2]} film number {k} \t{k % 2}\n" for k in range(40))
TINY = ("length=16", "width=8", "heads=2", "layers=1", "feedforward=8", "subwords=300", "positions=learned")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))


def packed(folder: Path, name: str, **parts: str) -> Path:
    (folder / "glue").mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "glue" / f"{name}.zip", "w") as archive:
        for part, text in parts.items():
            archive.writestr(f"{name}/{part}.tsv", text)
    return folder


# ---- files ----------------------------------------------------------------------------------------------------

COUNTS = {  # train, dev, and how often each label is in dev
    "cola": (8551, 1043, [322, 721]),
    "mrpc": (3668, 408, [129, 279]),
    "rte": (2490, 277, [146, 131]),
    "sst2": (67_349, 872, [428, 444]),
    "stsb": (5749, 1500, None),
    "wnli": (635, 71, [40, 31]),
}


@pytest.mark.parametrize("name", COUNTS)
def test_official_files(name: str, data: Path) -> None:
    made = task(f"glue-{name}", data=data)
    train, dev, labels = COUNTS[name]
    rows = made.rows("dev")
    assert len(rows) == dev and len(made.rows("train")) == train == TABLE[name].rows
    assert all(a and bool(b) == (TABLE[name].second is not None) for a, b, _ in rows)
    if labels:
        assert np.bincount([int(row[2]) for row in rows]).tolist() == labels


def test_a_missing_training_file_is_an_error(data: Path) -> None:
    made = task("glue-qnli", data=data)
    assert np.bincount([int(row[2]) for row in made.rows("dev")]).tolist() == [2702, 2761]
    with pytest.raises(ValueError, match=r"holds no QNLI/train\.tsv, and glue-qnli cannot be trained"):
        made.load()
    with pytest.raises(FileNotFoundError, match=r"QQP\.zip or QQP not found.*gluebenchmark"):
        task("glue-qqp", data=data).load()


def read(name: str, text: str | bytes) -> list:
    return list(read_rows("file", text if isinstance(text, bytes) else text.encode(), TABLE[name]))


def test_quirks_of_the_files() -> None:
    assert read("cola", "gj04\t0\t*\tHim sleep.\n") == [("Him sleep.", "", 0)]
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    assert read("mrpc", header + '1\t1\t2\t"Yes, he said.\tHe said "yes.\r\n') == [
        ('"Yes, he said.', 'He said "yes.', 1)
    ]
    wide = "index\tsentence1\tsentence2\tlabel1\tlabel2\tgold_label\n0\ta\tb\tneutral\tentailment\tneutral\n"
    assert read("mnli", wide) == [("a", "b", 1)]
    torn = 'id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tWhy?\tHow?\t0\n1\t2\t3\t"Who\n"\tWho?\t1\n'
    with pytest.warns(UserWarning, match="2 lines"):
        assert read("qqp", torn) == [("Why?", "How?", 0)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("cola", "gj04\t1\tno mark\n", "file, line 1: 3 columns, and 4 are expected"),
        ("sst2", "sentence\tlabel\nfine\t1\nbad\t2\n", "file, line 3: label '2' is not one of 0, 1"),
        ("sst2", "text\tlabel\n", "file, line 1: the header has no column 'sentence'"),
        (
            "rte",
            "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tyes\n",
            "line 2: label 'yes' is not one of entailment",
        ),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\thigh\n", "line 2: score 'high' is not a number"),
        ("stsb", "sentence1\tsentence2\tscore\na\tb\t5.1\n", r"line 2: score 5\.1 is not between 0 and 5"),
        ("sst2", b"sentence\tlabel\nb\xffd\t1\n", "file, line 2: not UTF-8"),
    ],
)
def test_bad_rows_are_named(name: str, text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(name, text)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.tsv has no rows"):
        task("glue-sst2", data=packed(tmp_path, "SST-2", train="sentence\tlabel\n", dev=SST2)).load()


def test_a_broken_archive_is_named(tmp_path: Path) -> None:
    packed(tmp_path, "SST-2", train=SST2, dev=SST2)
    path = tmp_path / "glue" / "SST-2.zip"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"SST-2\.zip cannot be read"):
        task("glue-sst2", data=tmp_path).load()


# ---- examples -------------------------------------------------------------------------------------------------


def test_splits_are_drawn_from_train_and_dev_is_the_test(tmp_path: Path) -> None:
    made = task("glue-sst2", settings=TINY, data=packed(tmp_path, "SST-2", train=SST2, dev=SST2))
    splits = made.load()
    assert (len(splits.train), len(splits.valid)) == (36, 4)

    def texts(part) -> set[str]:
        return {made.tokenizer.decode(part[i]["input_ids"].tolist()) for i in range(len(part))}

    assert texts(splits.train).isdisjoint(texts(splits.valid))
    assert len(texts(splits.train) | texts(splits.valid)) == 40
    batch = made.collate([splits.test[i] for i in range(3)])
    assert batch["labels"].tolist() == [0, 1, 0]
    model = HEADS["sequence"](SubquadConfig(attention="full", **made.config()))
    assert torch.isfinite(model(**batch).loss)
    made.save(tmp_path)
    made.restore(tmp_path)
    assert made.answer(model(input_ids=made.encode("good")["input_ids"][None]).logits[0]) in ("0", "1")
    with pytest.raises(ValueError, match="a line is a sentence, not 2 parts"):
        made.encode("a\tb")


def test_a_score_is_a_regression(tmp_path: Path) -> None:
    rows = "sentence1\tsentence2\tscore\n" + "".join(f"one {k}\ttwo {k}\t{k / 10}\n" for k in range(30))
    made = task("glue-stsb", settings=TINY, data=packed(tmp_path, "STS-B", train=rows, dev=rows))
    splits = made.load()
    batch = made.collate([splits.test[i] for i in range(3)])
    assert batch["labels"].dtype == torch.float and batch["token_type_ids"].max() == 1
    model = HEADS["sequence"](SubquadConfig(attention="full", **made.config()))
    logits = model(**batch).logits
    assert logits.shape == (3, 1) and torch.isfinite(model(**batch).loss)
    assert made.measure(made.score(logits, batch["labels"]).detach().numpy()).keys() == {"pearson", "spearman"}


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 30))
def test_the_longer_sentence_is_shortened(a: int, b: int, room: int) -> None:
    x, y = shortened(list(range(a)), list(range(b)), room)
    assert (len(x), len(y)) == _by_one(a, b, room)
    assert x == list(range(len(x))) and y == list(range(len(y)))


def _by_one(a: int, b: int, room: int) -> tuple[int, int]:
    while a + b > room:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    return a, b


# ---- metrics --------------------------------------------------------------------------------------------------

pairs = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)
values = st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 5)), min_size=2, max_size=40)


@given(pairs)
def test_f1_and_matthews_are_those_of_scikit_learn(rows: list[tuple[int, int]]) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    statistics = np.array(rows, float)
    predicted, true = statistics.astype(int).T
    ours = {**scores.f1_and_accuracy(statistics), **scores.matthews(statistics)}
    assert ours["f1"] == pytest.approx(metrics.f1_score(true, predicted, zero_division=0))
    assert ours["accuracy"] == pytest.approx(metrics.accuracy_score(true, predicted))
    both = np.concatenate([true, predicted])
    theirs = (
        metrics.matthews_corrcoef(true, predicted) if np.ptp(both) else 0.0
    )  # one label alone: it warns, and says 0
    assert ours["matthews"] == pytest.approx(theirs, abs=1e-12)


@given(values)
def test_correlations_are_those_of_scipy(rows: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    statistics = np.array(rows, float) / 3
    ours = scores.correlations(statistics)
    predicted, true = statistics.T
    if np.ptp(predicted) == 0 or np.ptp(true) == 0:
        assert ours == {"pearson": 0.0, "spearman": 0.0}
        return
    assert ours["pearson"] == pytest.approx(stats.pearsonr(predicted, true).statistic, abs=1e-9)
    assert ours["spearman"] == pytest.approx(stats.spearmanr(predicted, true).statistic, abs=1e-9)


# ---- fine-tuning ----------------------------------------------------------------------------------------------


def saved_mlm(folder: Path, *, width: int = 8, length: int = 32, size: int = 300, attention: str = "full") -> Path:
    """A masked language model as a finished run leaves it."""
    tokenizer = train_tokenizer(SST2.split("\n"), size, lowercase=True)
    config = SubquadConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=width, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=length, type_vocab_size=2, pad_token_id=0, attention=attention,
    )  # fmt: skip
    HEADS["masked-lm"](config).save_pretrained(folder / "model")
    save(tokenizer, folder / "model")
    return folder


def fine_tuned(tmp_path: Path, folder: Path, *settings: str):
    from subquad.training.run import Run, make_model

    data = packed(tmp_path, "SST-2", train=SST2, dev=SST2)
    made = task("glue-sst2", settings=(*TINY, f"init={folder}", *settings), data=data)
    made.load()
    return made, make_model(Run(made, ["full"], tmp_path / "out"))


def test_a_masked_language_model_lends_its_encoder(tmp_path: Path) -> None:
    folder = saved_mlm(tmp_path / "mlm", length=32)
    made, model = fine_tuned(tmp_path, folder)
    before = HEADS["masked-lm"].from_pretrained(folder / "model").encoder.state_dict()
    after = model.encoder.state_dict()
    assert before.keys() == after.keys()
    for key, value in after.items():
        old = before[key][:16] if key == "embeddings.places.weight" else before[key]
        assert torch.equal(value, old), key
    assert made.tokenizer.to_str() == (folder / "model" / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ({"width": 16}, (), "its width is 16, here it is 8"),
        ({"length": 8}, (), "it knows 8 positions, length=16 needs more"),
        ({}, ("layers=2",), "its layers is 1, here it is 2"),
        ({"attention": "sbm:clusters=4"}, (), "its attention 'sbm:clusters=4' does not fit here"),
    ],
)
def test_an_encoder_that_does_not_fit_is_refused(tmp_path: Path, kind: dict, settings: tuple, message: str) -> None:
    folder = saved_mlm(tmp_path / "mlm", **kind)
    with pytest.raises(ValueError, match=message):
        fine_tuned(tmp_path, folder, *settings)


def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    from subquad.tasks.pretrained import copy_encoder

    folder = saved_mlm(tmp_path / "mlm", size=270)
    made = SubquadConfig(vocab_size=400, hidden_size=8, type_vocab_size=2)
    with pytest.raises(ValueError, match="its vocabulary is 270, here it is 400"):
        copy_encoder(HEADS["sequence"](made), folder)
    with pytest.raises(FileNotFoundError, match=r"config\.json not found; give the model folder"):
        copy_encoder(HEADS["sequence"](made), tmp_path / "nowhere")
