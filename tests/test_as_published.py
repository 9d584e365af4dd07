"""Details of the papers' set-ups: heads, positions, the copying model, data sets and metrics."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from subquad.data.documents import article
from subquad.models import HEADS, SubquadConfig
from subquad.models.heads import SubquadForMaskedLM, SubquadForSequenceClassification
from subquad.tasks import scores, task
from subquad.training.run import check_specs

SIZES = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 32}
NAMES = ("entailment", "neutral", "contradiction")


def config(**keys) -> SubquadConfig:
    return SubquadConfig(**{**SIZES, "num_hidden_layers": 3, **keys})


def test_one_feed_forward_layer_behind_all_attention_layers():
    torch.manual_seed(0)
    model = SubquadForMaskedLM(config(mlp="last")).eval()
    blocks = model.encoder.blocks
    assert [block.feedforward is not None for block in blocks] == [False, False, True]
    assert [len(block.norms) for block in blocks] == [1, 1, 2]
    x = torch.randn(2, 5, 8)
    for block in blocks[:2]:  # x + attention(norm(x)), and nothing else
        expected = x + block.attention(block.norms[0](x))[0]
        torch.testing.assert_close(block(x, None, None)[0], expected)
    assert task("copying", "paper").config()["mlp"] == task("copying-causal", "small").config()["mlp"] == "last"
    pair = HEADS["seq2seq"](config(mlp="last", num_hidden_layers=2, decoder_start_token_id=1, pad_token_id=0))
    assert pair(input_ids=torch.ones(1, 4).long(), labels=torch.ones(1, 3).long()).loss.isfinite()


def test_each_attention_has_the_positions_of_its_paper():
    assert config(positions="published").positions == "learned"
    assert config(positions="published", attention="composite-slice").positions == "own"
    assert config(positions="published", attention="composite-slice:positions=none").positions == "learned"
    assert config(positions="published", attention=["composite-slice", "full"]).positions == "learned"
    model = SubquadForMaskedLM(config(positions="published", attention="composite-slice:slice_length=4"))
    assert model.encoder.embeddings.places is None and model.attention_layers()[0].positions is not None


def test_rotary_where_the_attention_takes_it():
    """Recipes with rotary positions also train composite-slice, which works on tokens, with its published ones."""
    positions = "rotary-or-published"
    assert config(positions=positions).positions == "rotary"
    assert config(positions=positions, attention="composite-slice").positions == "own"
    assert config(positions=positions, attention="composite-slice:positions=none").positions == "learned"
    assert config(positions=positions, attention=["composite-slice", "full"]).positions == "learned"
    with pytest.raises(ValueError, match="needs heads of even width, not 5"):
        config(positions=positions, head_dim=5)
    assert config(positions=positions, head_dim=5, attention="composite-slice").positions == "own"


@pytest.mark.parametrize("name", ["mlm", "image-density", "glue-sst2", "xnli"])
def test_tasks_with_rotary_positions_compare_attentions_on_tokens(name):
    for spec, positions in (("full", "rotary"), ("composite-slice:slice_length=4", "own")):
        made = task(name)
        check_specs(made, [spec])
        assert config(positions=made.recipe.positions, attention=spec).positions == positions


def test_classification_heads_of_two_layers():
    linear, mlp = (
        SubquadForSequenceClassification(config(classifier=kind, num_labels=3)) for kind in ("linear", "mlp")
    )
    assert isinstance(linear.classifier, torch.nn.Linear)
    first, relu, second = mlp.classifier
    assert (first.out_features, second.in_features, second.out_features) == (12, 12, 3) and relu(
        torch.tensor(-1.0)
    ) == 0
    assert mlp(input_ids=torch.ones(2, 4).long(), labels=torch.tensor([0, 2])).loss.isfinite()
    with pytest.raises(ValueError, match="classifier must be one of linear, mlp, not 'cnn'"):
        config(classifier="cnn")
    for name in ("listops", "text", "retrieval", "image", "pathfinder"):
        assert {task(name, recipe).recipe.classifier for recipe in ("paper", "cst")} == {"mlp"}
        recipe = task(name, "cst").recipe
        assert (recipe.layers, recipe.heads, recipe.width, recipe.decay, recipe.schedule) == (2, 4, 256, 0.0, "linear")


def test_pooling_cls_puts_a_token_in_front():
    tiny = ("length=64", "max_length=60", "min_length=4", "width=8", "heads=2", "layers=1", "feedforward=8")
    listops = task("listops", "small", (*tiny, "pooling=cls"))
    example = listops.read("[MAX 1 2 ]")
    size = listops.vocabulary()["vocab_size"]
    batch = listops.collate([{**example, "labels": torch.tensor(2)}] * 2)
    assert batch["input_ids"][:, 0].tolist() == [size] * 2 and (batch["input_ids"][0, 1:] == example["input_ids"]).all()
    made = listops.config()
    assert made["vocab_size"] == size + 1 and made["max_position_embeddings"] == 65
    model = HEADS["sequence"](SubquadConfig(**made))
    assert listops.reply(model, "[MAX 1 2 ]") in "0123456789"
    plain = task("listops", "small", tiny)
    assert plain.config()["vocab_size"] == size and plain.encode("[MAX 1 2 ]")["input_ids"][0] != size
    pairs = task("retrieval", "small", ("pooling=cls",))
    texts = {"input_ids": torch.tensor([5, 6]), "pair_ids": torch.tensor([7]), "labels": torch.tensor(1)}
    joined, first = pairs.collate([texts]), pairs.vocabulary()["vocab_size"]
    assert joined["input_ids"].tolist() == [[first, 5, 6]] and joined["pair_ids"].tolist() == [[first, 7]]


def test_f1_of_several_classes():
    predicted, true = np.array([0, 1, 2, 2, 1]), np.array([0, 1, 1, 2, 0])
    found = scores.macro_f1_and_accuracy(np.stack([predicted, true], 1).astype(float))
    assert found["f1"] == pytest.approx((2 * 1 / 3 + 2 * 1 / 4 + 2 * 1 / 3) / 3) and found["accuracy"] == 0.6
    two = np.array([[1, 1], [1, 0], [0, 1], [1, 1]], float)
    assert task("glue-sst2").measure(two) == scores.f1_and_accuracy(two)
    assert set(task("glue-mnli").measure(two)) == set(task("xnli").measure(two)) == {"f1", "accuracy"}


def test_xnli(tmp_path):
    (tmp_path / "xnli").mkdir()
    dev = [f"premise {k}\thypothesis {k}\t{NAMES[k % 3]}" for k in range(30)]
    (tmp_path / "xnli" / "dev-de.tsv").write_text("\n".join(dev))
    settings = ("language=de", "source=dev", "subwords=300", "length=32")
    splits = task("xnli", "small", settings, tmp_path).load()
    assert [len(part) for part in (splits.train, splits.valid, splits.test)] == [24, 3, 3], "a tenth, twice"
    with pytest.raises(FileNotFoundError, match=r"multinli.train.de.tsv not found.*XNLI-MT-1.0"):
        task("xnli", "base", ("language=de",), tmp_path).load()
    rows = [f"a\tb\t{name}" for name in ("entailment", "neutral", "contradictory")] * 10
    (tmp_path / "xnli" / "multinli.train.de.tsv").write_text("\n".join(["premise\thypo\tlabel", *rows]))
    splits = task("xnli", "base", (*settings[::2], "length=32", "language=de"), tmp_path).load()
    assert len(splits.test) == 30 and {int(splits.train[i]["labels"]) for i in range(27)} == {0, 1, 2}
    with pytest.raises(ValueError, match="language must be one of ar, bg"):
        task("xnli", "small", ("language=xx",))
    (tmp_path / "xnli" / "dev-de.tsv").write_text("one\ttwo\tperhaps\n")
    with pytest.raises(ValueError, match="label 'perhaps' is not one of entailment"):
        task("xnli", "small", settings, tmp_path).load()


def test_xnli_as_it_is(data):
    splits = task("xnli", "small", ("subwords=300", "language=sw"), data).load()
    assert len(splits.train) + len(splits.valid) + len(splits.test) == 2490


def test_wiki_40b(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    text = "\n_START_ARTICLE_\nThe fox\n_START_SECTION_\nLife\n_START_PARAGRAPH_\nIt runs._NEWLINE_It sleeps."
    assert article("here", json.dumps({"text": text})) == "The fox\nLife\nIt runs.\nIt sleeps."
    for line in ("{", '{"title": "x"}', "[]", '{"text": 3}'):
        with pytest.raises(ValueError, match="here: "):
            article("here", line)
    settings = ("length=16", "stride=8", "subwords=300", "width=8", "heads=2", "layers=1")
    with pytest.raises(FileNotFoundError, match=r"en.train.jsonl not found.*wiki40b"):
        task("lm-books", "wiki40b", settings, tmp_path).load()
    (tmp_path / "wiki40b").mkdir()
    for part in ("train", "validation", "test"):
        (tmp_path / "wiki40b" / f"en.{part}.jsonl").write_text((json.dumps({"text": text}) + "\n") * 3)
    splits = task("lm-books", "wiki40b", settings, tmp_path).load()
    assert len(splits.train) >= 3 and len(splits.test) >= 3


def test_the_test_set_of_translation(tmp_path):
    (tmp_path / "wmt").mkdir()
    for name in ("train", "newstest2013", "newstest2015", "newstest2014"):
        for language in ("en", "cs"):
            (tmp_path / "wmt" / f"{name}.{language}").write_text(f"{name} a b c\n" * (2 if name[-1] == "5" else 3))
    sizes = ("length=32", "subwords=320")
    assert len(task("translation", "paper", sizes, tmp_path).load().test) == 2, "newstest2015"
    assert len(task("translation", "paper", (*sizes, "test=newstest2014"), tmp_path).load().test) == 3
    recipe = task("translation", "paper").recipe
    assert (recipe.optimizer, recipe.layers, recipe.steps) == ("adafactor", 6, 240_000), "G.3: as in language modelling"


def test_long_words():
    recipe = task("lm-words", "long").recipe
    assert (recipe.length, recipe.width, recipe.rate, recipe.steps, recipe.batch) == (1024, 512, 5e-4, 90_000, 32)
