"""Retrieval and Pathfinder: labels checked by flooding the pictures, no shortcut, official formats, the pair head."""

from __future__ import annotations

import tarfile

import numpy as np
import pytest
import torch

from subquad import tasks
from subquad.models import HEADS, SubquadConfig
from subquad.tasks.contours import Style, picture

KINDS = [(16, 3, 1), (32, 9, 5), (32, 14, 2), (48, 9, 4), (64, 14, 4)]


# ---- Pathfinder: the pictures ----


def widened(mask: np.ndarray, reach: int) -> np.ndarray:
    """True within `reach` (largest of |Δx|, |Δy|) of a True pixel; (N, S, S)."""
    for axis in (1, 2):
        padded = np.pad(mask, [(0, 0)] + [(reach, reach) if axis == a else (0, 0) for a in (1, 2)])
        mask = np.any([np.take(padded, range(k, k + mask.shape[axis]), axis) for k in range(2 * reach + 1)], axis=0)
    return mask


def dot_places(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two places where 3 × 3 pixels are bright all over, which dashes never are; any others belong to them."""
    padded = np.pad(image / 255, 1)
    bright = sum(padded[i : i + len(image), j : j + len(image)] for i in range(3) for j in range(3))
    places = np.argwhere(bright > 5)  # of 9; a dash reaches 4
    first = places[bright[tuple(places.T)].argmax()]
    far = np.abs(places - first).max(1)
    second = places[far.argmax()]
    radius = Style(len(image)).radius
    assert far.max() > 2 * radius
    assert np.minimum(far, np.abs(places - second).max(1)).max() <= 2 * radius + 1
    return first, second


@pytest.mark.parametrize(("size", "contour", "distractors"), KINDS)
def test_a_flood_from_one_dot_reaches_the_other_exactly_when_they_are_joined(size, contour, distractors):
    count = 120 if size <= 32 else 40
    joined = np.arange(count) % 2 == 1
    images = np.stack(
        [picture(np.random.default_rng((7, i)), size, contour, distractors, joined[i]) for i in range(count)]
    )
    dots = [dot_places(image) for image in images]
    lit, reach = images >= 128, Style(size).reach
    flood = np.zeros_like(lit)
    for i, (first, _) in enumerate(dots):
        flood[i, first[0], first[1]] = True
    while True:
        grown = widened(flood, reach) & lit
        if (grown == flood & lit).all():
            break
        flood = grown
    near = widened(flood, 1)
    reached = np.array([near[i, second[0], second[1]] for i, (_, second) in enumerate(dots)])
    assert (reached == joined).all()


def test_the_classes_differ_in_nothing_but_the_label():
    images = {
        joined: np.stack([picture(np.random.default_rng((3, i)), 32, 9, 3, joined) for i in range(300)])
        for joined in (False, True)
    }
    dots = {joined: [dot_places(image) for image in images[joined]] for joined in images}
    statistics = {
        "brightness": lambda joined: images[joined].mean((1, 2)),
        "distance of the dots": lambda joined: np.array([np.hypot(*(a - b)) for a, b in dots[joined]]),
        "place of the dots": lambda joined: np.array([np.abs(np.stack(pair) - 15.5).max() for pair in dots[joined]]),
    }
    for name, of in statistics.items():
        apart, together = of(False), of(True)
        error = np.sqrt(apart.var() / len(apart) + together.var() / len(together))
        assert abs(apart.mean() - together.mean()) < 4 * error, name


def test_generated_pictures_are_balanced_and_follow_the_seed():
    def splits(seed):
        return tasks.task("pathfinder", "small", ("train_size=40", "eval_size=20"), seed=seed).load()

    one, again, other = splits(0), splits(0), splits(1)
    assert [len(part) for part in (one.train, one.valid, one.test)] == [40, 20, 20]
    assert sum(int(one.train[i]["labels"]) for i in range(40)) == 20
    assert torch.equal(one.train[5]["input_ids"], again.train[5]["input_ids"])
    assert torch.equal(one.train[5]["input_ids"], one.train[5]["input_ids"])
    assert not torch.equal(one.train[5]["input_ids"], other.train[5]["input_ids"])
    assert not torch.equal(one.train[5]["input_ids"], one.test[5]["input_ids"])
    with pytest.raises(IndexError):
        one.test[20]


def test_what_cannot_be_drawn_is_refused_before_training():
    with pytest.raises(ValueError, match=r"two contours of 30 dashes .* do not fit in a picture of size 16"):
        tasks.task("pathfinder", "small", ("contour=30",)).load()
    with pytest.raises(ValueError, match="length must be size² = 1024 at least, not 256"):
        tasks.task("pathfinder", "small", ("size=32",)).load()


# ---- Pathfinder: the official folders ----


@pytest.fixture
def official(tmp_path):
    """20 pictures in the layout of the release; the task that reads them."""
    from PIL import Image

    folder = tmp_path / "pathfinder" / "pathfinder16" / "curv_contour_length_4"
    (folder / "metadata").mkdir(parents=True)
    for k in range(2):
        (folder / "imgs" / str(k)).mkdir(parents=True)
        rows = []
        for i in range(10):
            image = picture(np.random.default_rng((k, i)), 16, 4, 0, i % 2 == 1)
            Image.fromarray(image).save(folder / "imgs" / str(k) / f"sample_{i}.png")
            rows.append(f"imgs/{k} sample_{i}.png {i} {i % 2} 1.0 4 1 6 2 0.5 1 2")
        (folder / "metadata" / f"{k}.npy").write_text("\n".join(rows) + "\n")
    return folder, tasks.task(
        "pathfinder", "small", ("source=file", "contour=4", "train_size=None", "eval_size=None"), tmp_path
    )


def test_official_folders_are_read_and_split(official):
    folder, task = official
    splits = task.load()
    assert [len(part) for part in (splits.train, splits.valid, splits.test)] == [16, 2, 2]
    found = [
        example for part in (splits.train, splits.valid, splits.test) for example in (part[i] for i in range(len(part)))
    ]
    drawn = {
        picture(np.random.default_rng((k, i)), 16, 4, 0, i % 2 == 1).tobytes(): i % 2
        for k in range(2)
        for i in range(10)
    }
    read = {bytes(example["input_ids"].to(torch.uint8).tolist()): int(example["labels"]) for example in found}
    assert read == drawn
    (folder / "imgs" / "0" / "sample_3.png").write_bytes(b"")  # the release has an empty file, which does not count
    splits = task.load()
    assert sum(len(part) for part in (splits.train, splits.valid, splits.test)) == 19


def test_what_is_wrong_in_official_folders_is_said_with_file_and_line(official):
    folder, task = official
    image, rows = folder / "imgs" / "1" / "sample_4.png", folder / "metadata" / "1.npy"
    text, pixels = rows.read_text(), image.read_bytes()
    for broken in (pixels[:60], b"no picture"):
        image.write_bytes(broken)
        with pytest.raises(ValueError, match=r"1\.npy, line 5: the picture .*sample_4\.png cannot be read"):
            task.load()
    image.write_bytes((folder / "imgs" / "1" / "sample_5.png").read_bytes())
    for change, message in [
        (("imgs/1 sample_2.png 2 0", "imgs/1 sample_2.png 2 7"), r"1\.npy, line 3: label '7', expected 0 or 1"),
        (("imgs/1 sample_2.png 2 0 1.0 4 1 6 2 0.5 1 2", "imgs/1 sample_2.png"), r"line 3: 2 columns, expected folder"),
        (("sample_2.png", "sample_99.png"), r"line 3: the picture .*sample_99\.png does not exist"),
    ]:
        rows.write_text(text.replace(*change))
        with pytest.raises(ValueError, match=message):
            task.load()
    rows.write_text(text)
    with pytest.raises(ValueError, match="has 16×16 pixels, not 32×32"):
        (folder.parent.parent / "pathfinder32").symlink_to(folder.parent)
        settings = ("source=file", "size=32", "contour=4", "length=1024", "train_size=None", "eval_size=None")
        tasks.task("pathfinder", "small", settings, folder.parents[2]).load()
    with pytest.raises(ValueError, match="train_size must be at most 16, what the data has, not 96000"):
        tasks.task("pathfinder", "small", ("source=file", "contour=4"), folder.parents[2]).load()
    with pytest.raises(FileNotFoundError, match=r"pathfinder16/curv_contour_length_9 or .* not found"):
        tasks.task("pathfinder", "small", ("source=file", "contour=9"), folder.parents[2]).load()


# ---- Retrieval ----

ROWS = ["1.0\tA1\tB1\tone paper\tanother", "0.0\tA2\tB2\tb'bytes\\n'\tst\u00fcck", "1.0\tA3\tB3\tx\ty"]


@pytest.fixture
def pairs(tmp_path):
    """A data directory with three tiny parts in the Arena's format, and the task that reads them."""
    folder = tmp_path / "retrieval"
    folder.mkdir()
    for part in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{part}.tsv").write_text("\n".join(ROWS) + "\n", encoding="utf-8")
    return folder, tasks.task("retrieval", "paper", ("length=8",), tmp_path)


def test_pairs_are_read_as_bytes(pairs):
    _, task = pairs
    splits = task.load()
    found = sorted((bytes(int(i) - 1 for i in example["pair_ids"]), int(example["labels"]))
                   for example in (splits.train[k] for k in range(3)))  # fmt: skip
    assert found == [(b"another", 1), ("st\u00fcck".encode(), 0), (b"y", 1)]
    firsts = {bytes(int(i) - 1 for i in splits.test[k]["input_ids"]) for k in range(3)}
    assert firsts == {b"one pape", b"b'bytes\\", b"x"}  # cut to 8 bytes, literals as they stand
    batch = task.collate([splits.valid[k] for k in range(3)])
    assert batch["input_ids"].shape == (3, 8) and batch["pair_ids"].shape == (3, 7) and batch["labels"].shape == (3,)
    assert sorted(batch["attention_mask"].sum(1).tolist()) == [1, 8, 8]
    assert sorted(batch["pair_mask"].sum(1).tolist()) == [1, 6, 7]
    line = task.encode("one paper\tanother")
    assert bytes(int(i) - 1 for i in line["input_ids"]) == b"one pape" and len(line["pair_ids"]) == 7
    with pytest.raises(ValueError, match="two texts with one tab"):
        task.encode("one paper")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1.0\tA\tB\tonly one text", r"train\.tsv, line 4: 4 columns, expected 5"),
        ("1.0\tA\tB\ta\tb\tc", r"train\.tsv, line 4: 6 columns, expected 5"),
        ("2.0\tA\tB\ta\tb", r"train\.tsv, line 4: label '2\.0', expected 1\.0 or 0\.0"),
        ("label\tid1\tid2\ttext1\ttext2", r"train\.tsv, line 4: label 'label'"),
        ("1.0\tA\tB\ta\t", r"train\.tsv, line 4: text 2 is empty"),
    ],
)
def test_a_bad_row_is_an_error_with_file_and_line(pairs, row, message):
    folder, task = pairs
    (folder / "new_aan_pairs.train.tsv").write_text("\n".join([*ROWS, row]), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        task.load()


def test_pairs_in_an_archive(pairs, tmp_path):
    folder, task = pairs
    (tmp_path / "acl-retrieval").mkdir()
    archive = tmp_path / "acl-retrieval" / "acl_pairs.tar.xz"
    with pytest.raises(FileNotFoundError, match=r"acl_pairs\.train\.tsv or acl_pairs\.tar not found"):
        tasks.task("retrieval", "paper", ("source=acl",), tmp_path).load()
    with tarfile.open(archive, "w:xz") as tar:
        for part in ("train", "eval"):
            tar.add(folder / f"new_aan_pairs.{part}.tsv", f"some/acl_pairs.{part}.tsv")
    packed = tasks.task("retrieval", "paper", ("source=acl", "length=8"), tmp_path)
    with pytest.raises(ValueError, match=r"holds no file named acl_pairs\.test\.tsv"):
        packed.load()
    with tarfile.open(archive, "w:xz") as tar:
        for part in ("train", "eval", "test"):
            tar.add(folder / f"new_aan_pairs.{part}.tsv", f"acl_pairs.{part}.tsv")
    assert [packed.load().train[k]["labels"] for k in range(3)] == [task.load().train[k]["labels"] for k in range(3)]
    with pytest.raises(ValueError, match="eval_size must be at most 3"):
        tasks.task("retrieval", "small", (), tmp_path).load()


def test_real_pairs(data):
    splits = tasks.task("retrieval", "small", ("eval_size=None",), data).load()
    assert [len(part) for part in (splits.train, splits.valid, splits.test)] == [4382, 547, 547]
    labels = [label for part in (splits.train, splits.valid, splits.test) for _, _, label in part.pairs]
    assert sum(labels) == len(labels) - sum(labels) == 2738


# ---- the pair head ----


def pair_model(attention: str = "full", **keys) -> torch.nn.Module:
    torch.manual_seed(0)
    config = SubquadConfig(
        attention=attention, hidden_size=16, num_attention_heads=2, intermediate_size=24, num_hidden_layers=1,
        vocab_size=40, max_position_embeddings=32, num_labels=2, **keys,
    )  # fmt: skip
    return HEADS["pair"](config).eval()


@pytest.mark.parametrize(("classifier", "hidden"), [("linear", [24, 12]), ("mlp", [24])])
def test_the_pair_head_has_the_arenas_hidden_layers_or_one(classifier, hidden):
    """Tay et al. 2021 have two, Xiong et al. 2021, whose set-up SBM and Composite Slice follow, one."""
    layers = [each for each in pair_model(classifier=classifier).classifier if isinstance(each, torch.nn.Linear)]
    assert [each.in_features for each in layers] == [64, *hidden]
    assert [each.out_features for each in layers] == [*hidden, 2]


def test_the_pair_head_compares_two_separate_encodings():
    model = pair_model()
    first, second = torch.randint(1, 40, (3, 9)), torch.randint(1, 40, (3, 12))
    logits = model(first, pair_ids=second).logits
    u, v = (model.encoder(x).last_hidden_state.mean(1) for x in (first, second))
    assert torch.allclose(logits, model.classifier(torch.cat([u, v, u * v, u - v], 1)), atol=1e-5)
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[:, 9:] = 0
    padded = torch.nn.functional.pad(first, (0, 2), value=5)
    assert torch.allclose(model(padded, mask, second).logits, logits, atol=1e-5)
    assert not torch.allclose(model(second, pair_ids=first).logits, logits, atol=1e-3)


def test_the_pair_head_is_saved_and_loaded(tmp_path):
    model = pair_model("composite-slice:slice_length=4", positions="own")
    model.save_pretrained(tmp_path)
    ids = torch.randint(1, 40, (2, 8))
    again = HEADS["pair"].from_pretrained(tmp_path).eval()
    assert torch.equal(model(ids, pair_ids=ids.flip(1)).logits, again(ids, pair_ids=ids.flip(1)).logits)


def test_the_pair_head_counts_the_density_of_both_texts():
    model = pair_model("sbm:clusters=4", density_weight=0.5).train()
    ids, labels = torch.randint(1, 40, (2, 8)), torch.tensor([0, 1])
    output = model(ids, pair_ids=ids.flip(1), labels=labels)
    plain = torch.nn.functional.cross_entropy(output.logits, labels)
    assert output.density.shape == (1, 2)
    assert torch.allclose(output.loss.double(), plain + 0.5 * output.auxiliary_loss.double())
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_pair_head_refuses_half_a_pair():
    model, ids = pair_model(), torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="pair_ids is missing"):
        model(ids)
    with pytest.raises(ValueError, match="2 input_ids and 1 pair_ids"):
        model(ids, pair_ids=ids[:1])
    with pytest.raises(ValueError, match="label 2 is out of range"):
        model(ids, pair_ids=ids, labels=torch.tensor([0, 2]))
