"""Generated tasks: what they promise, and that a model learns what it should."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.tasks import _TASKS, available, task, task_class
from subquad.tasks.base import IGNORED
from subquad.tasks.guessing import guess
from subquad.tasks.listops import TOKENS, evaluate, read
from subquad.tasks.recipe import Recipe
from subquad.training.run import Run, train


@pytest.mark.parametrize("name", available())
def test_every_task_says_what_it_is(name):
    cls = task_class(name)
    assert cls.title and cls.metric and {"small", "paper"} <= set(cls.recipes)
    assert all(isinstance(recipe, Recipe) for recipe in cls.recipes.values())


@pytest.mark.parametrize("name", ["needle", "repeated-tokens", "copying", "copying-causal", "listops"])
def test_examples_are_drawn_by_their_number(name):
    settings = ("train_size=50", "eval_size=50")
    one, same, other = (task(name, settings=settings, seed=seed).load() for seed in (0, 0, 1))
    assert all(torch.equal(one.train[7][key], same.train[7][key]) for key in ("input_ids", "labels"))
    assert not torch.equal(one.train[7]["input_ids"], other.train[7]["input_ids"])
    assert not torch.equal(one.train[7]["input_ids"], one.test[7]["input_ids"]), "the parts differ"
    made = task(name, settings=settings)
    ids = torch.cat([one.train[i]["input_ids"] for i in range(20)])
    assert ids.min() >= 0 and ids.max() < made.vocabulary()["vocab_size"]


def test_needles_answer_their_questions():
    made = task("needle", settings=("length=256", "keys=4", "values=8", "questions=5", "repeats=2"))
    for index in range(20):
        example = made.load().train[index]
        ids, labels = example["input_ids"].view(-1, 16), example["labels"].view(-1, 16)
        facts = {int((x - 17) // 8): int((x - 17) % 8) for x in ids[:, 0] if 17 <= x < 17 + 32}
        asked = labels[:, 0] != IGNORED
        assert len(facts) == 4 and asked.sum() == 5
        for token, label in zip(ids[asked, 0], labels[asked, 0], strict=True):
            assert facts[int(token) - 17 - 32] == label
    with pytest.raises(
        ValueError, match=r"length must be a multiple of sentence=\d+ and at least \d+ for keys=.*, not 250"
    ):
        task("needle", settings=("length=250",)).load()


def test_repeated_tokens_are_those_that_repeat():
    example = task("repeated-tokens").load().train[0]
    ids = example["input_ids"].tolist()
    assert example["labels"].tolist() == [int(ids.count(token) > 1) for token in ids]


def test_copying_masks_the_second_half():
    made = task("copying", settings=("length=16",))
    example = made.load().train[0]
    ids, labels = example["input_ids"], example["labels"]
    assert (ids[8:] == made.mask).all() and (labels[:8] == IGNORED).all()
    assert ids[0] == 0 and torch.equal(labels[8:], torch.cat([torch.tensor([0]), ids[1:8]]))
    causal = task("copying-causal", settings=("length=16",)).load().train[0]
    assert torch.equal(causal["input_ids"][1:8], causal["input_ids"][9:])
    assert (causal["labels"] != IGNORED).sum() == 7, "only the second s counts"
    with pytest.raises(ValueError, match="length must be even"):
        task("copying", settings=("length=15",)).load()


@given(st.integers(0, 10**6))
def test_listops_stay_within_the_grammar_and_the_limits(seed):
    made = task(
        "listops", settings=("length=200", "max_length=120", "min_length=20", "max_depth=5", "max_args=6"), seed=seed
    )
    example = made.load().train[0]
    ids = example["input_ids"].tolist()
    assert 20 < len(ids) < 120 and evaluate(ids, "here") == int(example["labels"])
    depth = deepest = 0
    for token in ids:
        depth += (1 <= token <= 4) - (token == 5)
        deepest = max(deepest, depth)
    assert depth == 0 and deepest <= 4, "operators at depths 1 to max_depth - 1"


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9), ("[SM 9 9 9 ]", 7), ("[MED 1 2 8 9 ]", 5), ("( ( [MED 1 ) 4 ) ]", 2)],
)
def test_listops_values(text, value):
    words = [word for word in text.split() if word not in "()"]
    assert evaluate([TOKENS.index(word) for word in words], "here") == value


def test_listops_files(tmp_path):
    path = tmp_path / "listops"
    path.mkdir()
    (path / "basic_test.tsv").write_text("Source\tTarget\n( ( [MAX 2 ) 9 ) ]\t9\n")
    assert read(path / "basic_test.tsv", 10)[0][1] == 9
    for text, words in (
        ("9\t[MAX 2 9 ]\n3\n", "line 2: 1 columns, expected 2"),
        ("9\t[MAX 2 8 ]\n", "line 1: label 9, but the expression comes to 8"),
        ("9\t[MAX 2 9\n", "a bracket is open"),
        ("9\t[SUM 2 9 ]\n", "'\\[SUM' is not a token of ListOps \\([^;]*\\)$"),
        ("2\t[MAX 1 2]\n", "'2]' is not a token of ListOps \\(.*\\); separate tokens with spaces"),
        ("2\t[MAX 12 ]\n", "'12' is not a token of ListOps \\(.*\\); separate tokens with spaces"),
        ("x\t[MAX 2 9 ]\n", "label 'x'|expected a digit|is not a token"),
    ):
        (path / "bad.tsv").write_text(text)
        with pytest.raises(ValueError, match=words):
            read(path / "bad.tsv", 10)
    whole = gzip.compress(b"9\t[MAX 2 9 ]\n" * 100)
    (path / "cut.tsv.gz").write_bytes(whole[:-12])
    with pytest.raises(ValueError, match=r"cut\.tsv\.gz cannot be read"):
        read(path / "cut.tsv.gz", 10)
    with pytest.raises(FileNotFoundError, match=r"basic_train\.tsv .*get ListOps.* from the Long Range Arena"):
        task("listops", settings=("source=file",), data=tmp_path).load()


def test_the_original_listops_files(data):
    rows = read(data / "listops" / "test_d20s.tsv.gz", 2000)  # every label is checked against the value
    assert len(rows) == 10_000 and max(len(ids) for ids, _ in rows) == 939
    assert np.mean([len(ids) for ids, _ in rows]) == pytest.approx(43, abs=1)


GUESSED = [  # task, settings, what can be known without looking at the input
    ("needle", ("length=128", "sentence=4", "values=4", "repeats=1", "questions=8"), 0.25),
    ("repeated-tokens", ("length=16",), 1 - (15 / 16) ** 15),
    ("copying", ("length=32", "symbols=8"), 0.125),
    ("copying-causal", ("length=32", "symbols=8"), 0.125),
    ("pathfinder", ("length=256",), 0.5),
    ("pathfinder", ("length=256", "train_size=4000", "eval_size=4000"), 0.5),  # every other label is the same
]


@pytest.mark.parametrize(("name", "settings", "chance"), GUESSED)
def test_the_score_of_guessing_is_the_chance_level(name, settings, chance):
    made = task(name, settings=("train_size=400", "eval_size=400", *settings))
    found = guess(made, made.load())
    assert 0 <= found.error < 0.06 and abs(found.score - chance) < 0.06 + 2 * found.error


def test_language_models_are_guessed_by_frequencies(tmp_path):
    (tmp_path / "text").write_bytes(b"aaab" * 4000)
    made = task("lm-bytes", settings=("source=file", f"path={tmp_path / 'text'}", "length=64", "stride=none"))
    found = guess(made, made.load())
    assert found.score == pytest.approx(0.811, abs=0.05)  # the entropy of 3/4 and 1/4, in bits


@pytest.mark.slow
def test_the_task_of_the_documentation_is_learned(tmp_path, monkeypatch):
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
    code = next(block for block in page.split("```python\n")[1:] if "Majority" in block).split("```")[0]
    exec(compile(code, "majority.py", "exec"), {"__name__": "majority"})
    try:
        made = task("majority")
        result = train(Run(made, ["combiner-fixed"], tmp_path, command=["x"]))
        assert guess(made, made.load()).score < 0.6 and result["test"]["accuracy"] > 0.95
    finally:
        _TASKS.pop("majority")


def test_full_attention_finds_repeated_tokens(tmp_path):
    """The share of repeated tokens, 0.61, is all that a model without attention can know."""
    settings = ("length=8", "width=64", "feedforward=64", "steps=120", "batch=64", "evaluate=120", "eval_size=128",
                "rate=1e-2")  # fmt: skip
    result = train(Run(task("repeated-tokens", settings=settings), ["full"], tmp_path, command=["x"]))
    assert result["test"]["accuracy"] > 0.8


def needle_scores(tmp_path, settings: tuple[str, ...]) -> dict[str, float]:
    """Test accuracy with an attention that sees the whole text, and with one that sees its own token alone."""
    scores = {}
    for name, spec in (("combiner", "combiner-fixed:span=8"), ("alone", "random:density=0.0001")):
        result = train(Run(task("needle", settings=settings), [spec], tmp_path / name, command=["x"]))
        scores[name] = result["test"]["accuracy"]
    return scores


def test_needles_need_attention(tmp_path):
    """In small: half as many tokens, one layer."""
    settings = ("length=32", "sentence=2", "steps=60", "batch=16", "evaluate=60", "eval_size=64", "width=32",
                "feedforward=32", "layers=1", "heads=2", "keys=2", "values=4", "questions=4", "repeats=2",
                "rate=1e-2")  # fmt: skip
    scores = needle_scores(tmp_path, settings)
    assert scores["combiner"] > 0.9 and scores["alone"] < 0.5, scores


@pytest.mark.slow
def test_needles_need_attention_in_long_texts(tmp_path):
    settings = ("length=128", "sentence=8", "steps=80", "batch=8", "evaluate=80", "eval_size=32", "width=32", "keys=2",
                "values=4", "questions=4", "repeats=2", "rate=1e-2")  # fmt: skip
    scores = needle_scores(tmp_path, settings)
    assert scores["combiner"] > 0.9 and scores["alone"] < 0.5, scores
