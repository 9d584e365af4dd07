"""Translation and image density: loaders, metrics, and what a model of each can do."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import sacrebleu
import torch

from subquad.data.pictures import planes_file
from subquad.models import HEADS, SubquadConfig, SubquadForConditionalGeneration
from subquad.tasks import density, task
from subquad.training import use
from subquad.training.run import Run, train

WORDS = {"a": "ein", "b": "zwei", "c": "drei", "d": "vier"}


def corpus(folder, rows=120, seed=0):
    """A made-up language pair: word for word."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for part, size in (("train", rows), ("valid", 8), ("test", 8)):
        lines = [" ".join(rng.choice(list(WORDS), rng.integers(2, 5))) for _ in range(size)]
        (folder / f"{part}.en").write_text("".join(line + "\n" for line in lines))
        translated = [" ".join(WORDS[word] for word in line.split()) for line in lines]
        (folder / f"{part}.de").write_text("".join(line + "\n" for line in translated))
    return folder


def tiny(folder, *settings):
    base = ("source=files", "subwords=300", "length=16", "width=32", "heads=2", "feedforward=32", "layers=1",
            "batch=16", "steps=4", "evaluate=4", "beams=2", "eval_size=8", "dropout=0", "warmup=0")  # fmt: skip
    return task("translation", settings=(*base, *settings), data=folder)


def test_translation_end_to_end(tmp_path):
    made = tiny(corpus(tmp_path / "data"))
    result = train(Run(made, ["combiner-fixed:span=4"], tmp_path / "run", command=["x"]))
    assert 0 <= result["test"]["bleu"] <= 100 and result["test"]["perplexity"] > 1
    model, again = use.load(tmp_path / "run")
    (answer,) = use.predict(model, again, ["a b c"])
    assert isinstance(answer, str)
    splits = made.load()
    translated = again.translate(model, [splits.test[i]["input_ids"] for i in range(8)])
    expected = sacrebleu.corpus_bleu(translated, [splits.test.references]).score
    assert result["test"]["bleu"] == pytest.approx(expected), "the order of sentences is kept"


def test_the_decoder_sees_no_later_word():
    keys = {"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2, "bos_token_id": 1}
    config = SubquadConfig(vocab_size=20, hidden_size=16, num_attention_heads=2, max_position_embeddings=20, **keys)
    model = SubquadForConditionalGeneration(config).eval()
    x, y = torch.randint(3, 20, (1, 7)), torch.randint(3, 20, (1, 9))
    other = y.clone()
    other[:, 5:] = 3
    one, two = (model(x, labels=labels).logits for labels in (y, other))
    torch.testing.assert_close(one[:, :6], two[:, :6])  # position 6 reads label 5
    padded = torch.cat([x, torch.zeros(1, 3, dtype=torch.long)], 1)
    mask = (torch.arange(10) < 7).long()[None]
    torch.testing.assert_close(one, model(padded, mask, y).logits, rtol=1e-4, atol=1e-5)


def test_beam_search_is_exact_when_the_beam_holds_every_beginning():
    torch.manual_seed(0)
    keys = {"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2, "bos_token_id": 1}
    config = SubquadConfig(vocab_size=8, hidden_size=16, num_attention_heads=2, max_position_embeddings=20, **keys)
    model = SubquadForConditionalGeneration(config).eval()
    x = torch.randint(3, 8, (1, 6))
    pairs = [(i, j) for i in range(8) for j in range(8) if 2 not in (i, j)]  # two words, neither of them the end
    starts = torch.tensor([[1, i] for i, _ in pairs])
    chances = model(x.expand(len(pairs), -1), decoder_input_ids=starts).logits.detach().log_softmax(-1)  # (pairs, 2, 8)
    totals = [float(c[0, i] + c[1, j]) for c, (i, j) in zip(chances, pairs, strict=True)]
    best = pairs[int(np.argmax(totals))]
    found = model.generate(
        input_ids=x, max_new_tokens=2, min_new_tokens=2, num_beams=8, do_sample=False, length_penalty=0.0
    )
    assert tuple(found[0, 1:3].tolist()) == best


def test_bad_parallel_files(tmp_path):
    folder = corpus(tmp_path / "data")
    (folder / "train.de").write_text("eins\n")
    with pytest.raises(ValueError, match=r"train\.en has 120 lines and .*train\.de 1: parallel files"):
        tiny(folder).load()
    (folder / "train.de").write_bytes(b"gut\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"train\.de, line 2: not UTF-8"):
        tiny(folder).load()
    (folder / "train.de").unlink()
    with pytest.raises(FileNotFoundError, match=r"train\.de not found"):
        tiny(folder).load()
    with pytest.raises(ValueError, match="origin and target are both 'en'"):
        tiny(folder, "target=en").load()


def test_multi30k(data):
    splits = task("translation", settings=("eval_size=1000", "length=200", "subwords=400"), data=data).load()
    assert (len(splits.train), len(splits.test)) == (29_000, 1_000)
    assert splits.test.references[0].startswith("Ein Mann mit einem orangefarbenen Hut")


def test_iwslt_and_wmt_say_what_is_missing(data):
    for source in ("wmt", "iwslt15"):
        with pytest.raises(FileNotFoundError, match=r"train\.en not found"):
            task("translation", settings=(f"source={source}",), data=data).load()


# ---- image density ----


def cifar(folder, pictures=8):
    rng = np.random.default_rng(0)
    (folder / "cifar10").mkdir(parents=True)
    for name in ("data_batch_1.bin", "test_batch.bin"):
        records = rng.integers(0, 256, (pictures, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / "cifar10" / f"{name}.gz").write_bytes(gzip.compress(records.tobytes()))
    return folder


def test_a_uniform_model_has_eight_bits_per_dimension(tmp_path):
    made = task("image-density", settings=("valid=2", "eval_size=2"), data=cifar(tmp_path))
    splits = made.load()
    batch = made.collate([splits.train[0], splits.train[1]])
    assert batch["input_ids"].shape == (2, 3073) and (batch["input_ids"][:, 0] == 256).all()
    statistics = made.score(torch.zeros(2, 3073, 257), batch["labels"]).numpy()
    assert statistics[:, 1].tolist() == [3072, 3072]
    assert made.measure(statistics)["bits_per_dim"] == pytest.approx(8, abs=1e-6)
    sure = torch.nn.functional.one_hot(batch["input_ids"][:, 1:], 257).float() * 100
    sure = torch.cat([sure, torch.zeros(2, 1, 257)], 1)
    assert made.measure(made.score(sure, batch["labels"]).numpy())["bits_per_dim"] == pytest.approx(0, abs=1e-6)


def test_pixels_and_grid(tmp_path):
    made = task("image-density", settings=("valid=2", "eval_size=2"), data=cifar(tmp_path))
    splits = made.load()
    ids = splits.test[0]["input_ids"][1:].tolist()
    assert made.picture(ids).shape == (32, 32, 3) and made.picture(ids)[0, 1].tolist() == ids[3:6]
    assert made.vocabulary()["cols"] == 96
    with pytest.raises(ValueError, match="length=3073, not 100"):
        task("image-density", settings=("length=100",), data=tmp_path).load()


def test_sampling_draws_from_the_model(tmp_path, monkeypatch):
    """Near temperature 0 the likeliest values are drawn, one after another, and never the start token."""
    monkeypatch.setitem(density.SIDES, "cifar10", 2)
    made = task(
        "image-density", settings=("length=13", "width=8", "heads=2", "feedforward=8", "initial=0.5"), data=tmp_path
    )
    torch.manual_seed(0)
    model = HEADS["causal-lm"](SubquadConfig(attention="full", **made.config())).eval()
    told = []
    (picture,) = made.sample(model, 1, temperature=1e-4, tell=lambda done, total: told.append((done, total)))
    ids = torch.tensor([[256]])
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, model(ids).logits[:, -1:, :256].argmax(-1)], 1)
    assert picture.shape == (2, 2, 3) and picture.ravel().tolist() == ids[0, 1:].tolist()
    assert told[-1] == (12, 12)
    first, second, other = (made.sample(model, 2, seed=seed, temperature=5.0) for seed in (1, 1, 2))
    assert np.array_equal(first, second) and not np.array_equal(first, other)


def test_imagenet_arrays(tmp_path, data):
    pictures = planes_file(data / "imagenet64-tiny" / "val_data.npz")
    assert pictures.shape == (600, 12_288) and pictures.dtype == np.uint8
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match=r"bad\.npz cannot be read"):
        planes_file(tmp_path / "bad.npz")
    np.savez(tmp_path / "small.npz", data=np.zeros((2, 10), np.uint8))
    with pytest.raises(ValueError, match="data must be uint8"):
        planes_file(tmp_path / "small.npz")
