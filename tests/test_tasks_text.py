"""Text and image classification: official formats read, bad files refused by name."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from subquad.data.pictures import RECORD, pixels, read_cifar10, read_mnist
from subquad.models import HEADS, SubquadConfig
from subquad.tasks import task

REVIEWS = {
    f"aclImdb/{part}/{kind}/{number}_{rating}.txt": f"{part} {kind} {number} {'fine ' * number}".encode()
    for part in ("train", "test")
    for kind, rating in (("neg", 2), ("pos", 9))
    for number in range(6)
}
OTHERS = {"aclImdb/README": b"about", "aclImdb/train/unsup/0_0.txt": b"?", "aclImdb/train/urls_pos.txt": b"http"}


def make_tree(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def make_tar(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def small(name: str, data: Path, *settings: str, seed: int = 0):
    return task(name, "small", ("valid=2", "eval_size=none", *settings), data, seed)


def listed(split) -> list[tuple[list[int], int]]:
    return [(example["input_ids"].tolist(), int(example["labels"])) for example in split]


# ---- text ----


def test_text_tree_and_archives_give_the_same_splits(tmp_path):
    folders = [tmp_path / name for name in ("tree", "gz", "xz", "plain")]
    make_tree(folders[0] / "imdb", REVIEWS | OTHERS)
    backwards = dict(reversed(list((REVIEWS | OTHERS).items())))
    make_tar(folders[1] / "imdb/aclImdb_v1.tar.gz", backwards)
    make_tar(folders[2] / "imdb/aclImdb_v1_labeled.tar.xz", REVIEWS, "w:xz")
    make_tar(folders[3] / "imdb/aclImdb_v1.tar", REVIEWS, "w")
    seen = []
    for folder in folders:
        splits = small("text", folder).load()
        seen.append([listed(part) for part in (splits.train, splits.valid, splits.test)])
    assert all(other == seen[0] for other in seen)
    assert [len(part) for part in seen[0]] == [10, 2, 12]
    for part in seen[0]:
        for ids, label in part:
            text = bytes(token - 1 for token in ids).decode()
            assert (" pos " in text) == (label == 1)
    everything = sorted(seen[0][0] + seen[0][1])
    assert len({tuple(ids) for ids, _ in everything}) == 12  # nothing is in both training and validation


def test_text_validation_is_drawn_by_seed_and_length_cuts(tmp_path):
    make_tree(tmp_path / "imdb", REVIEWS)
    drawn = [listed(small("text", tmp_path, "length=9", seed=seed).load().valid) for seed in (0, 0, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2] or drawn[0] != drawn[3]
    assert {len(ids) for ids, _ in drawn[0]} == {9}


@pytest.mark.parametrize("settings, message", [
    (("valid=12",), "valid must be less than the 12 training examples, not 12"),
    (("train_size=11",), "train_size must be at most 10"),
    (("eval_size=3",), "eval_size must be at most 2"),
])  # fmt: skip
def test_text_sizes_that_the_data_has_not(tmp_path, settings, message):
    make_tree(tmp_path / "imdb", REVIEWS)
    with pytest.raises(ValueError, match=message):
        small("text", tmp_path, *settings).load()


def test_text_missing_truncated_incomplete(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"aclImdb.*not found in .*imdb.*aclImdb_v1\.tar\.gz.*stanford.*`data`"):
        small("text", tmp_path).load()
    whole = make_tar(tmp_path / "imdb/aclImdb_v1.tar.gz", REVIEWS)
    whole.write_bytes(whole.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"aclImdb_v1\.tar\.gz cannot be read.*get it again"):
        small("text", tmp_path).load()
    whole.write_bytes(b"this is no archive")
    with pytest.raises(ValueError, match=r"aclImdb_v1\.tar\.gz cannot be read"):
        small("text", tmp_path).load()
    make_tar(whole, {name: content for name, content in REVIEWS.items() if "test/pos" not in name})
    with pytest.raises(ValueError, match=r"holds no reviews test/pos/\*\.txt"):
        small("text", tmp_path).load()
    make_tar(whole, REVIEWS | {"aclImdb/train/pos/7_7.txt": b""})
    with pytest.raises(ValueError, match=r"the review aclImdb/train/pos/7_7\.txt is empty"):
        small("text", tmp_path).load()


def test_text_predicts(tmp_path):
    reviews = small("text", tmp_path, "length=8")
    ids = reviews.encode("é" + "x" * 20)["input_ids"]  # any length, any characters, no data needed
    assert ids.tolist() == [0xC3 + 1, 0xA9 + 1, *[ord("x") + 1] * 6]
    model = HEADS[reviews.head](SubquadConfig(attention="full", **reviews.config()))
    assert reviews.answer(model(ids[None]).logits[0]) in ("negative", "positive")
    assert reviews.answer(torch.tensor([0.0, 1.0])) == "positive"
    with pytest.raises(ValueError, match="empty"):
        reviews.encode("")


def test_text_reads_the_official_reviews(data):
    splits = task("text", "small", ("eval_size=none", "length=256"), data).load()
    assert [len(part) for part in (splits.train, splits.valid, splits.test)] == [22500, 2500, 25000]
    labels = [np.asarray(part.dataset.labels) for part in (splits.train, splits.test)]
    assert [np.bincount(part).tolist() for part in labels] == [[12500, 12500]] * 2
    assert 0.4 < np.mean([labels[0][i] for i in splits.valid.indices]) < 0.6
    assert set(splits.valid.indices).isdisjoint(splits.train.indices)


# ---- image: CIFAR-10 ----


def cifar_batch(seed: int, count: int = 5) -> bytes:
    rng = np.random.default_rng(seed)
    records = rng.integers(0, 256, (count, RECORD), dtype=np.uint8)
    records[:, 0] = np.arange(count) % 10
    return records.tobytes()


def test_cifar10_any_batches_any_packing(tmp_path):
    batches = {"data_batch_2.bin": cifar_batch(2), "data_batch_5.bin": cifar_batch(5), "test_batch.bin": cifar_batch(0)}
    make_tree(tmp_path / "loose/cifar10", {"data_batch_2.bin.gz": gzip.compress(batches["data_batch_2.bin"]),
                                           **{name: batches[name] for name in list(batches)[1:]}})  # fmt: skip
    make_tree(tmp_path / "folder/cifar10/cifar-10-batches-bin", batches)
    inside = {f"cifar-10-batches-bin/{name}": content for name, content in batches.items()}
    make_tar(tmp_path / "tar/cifar10/cifar-10-binary.tar.gz", inside)
    expected = np.frombuffer(batches["data_batch_2.bin"] + batches["data_batch_5.bin"], np.uint8).reshape(10, RECORD)
    for folder in ("loose", "folder", "tar"):
        planes, labels = read_cifar10(tmp_path / folder, "train")
        assert np.array_equal(planes.reshape(10, -1), expected[:, 1:])
        assert labels.tolist() == [0, 1, 2, 3, 4] * 2
        splits = small("image", tmp_path / folder).load()
        assert [len(part) for part in (splits.train, splits.valid, splits.test)] == [8, 2, 5]


def test_cifar10_pixels():
    planes = np.zeros((1, 3, 1024), np.uint8)
    planes[0, :, 0] = (10, 20, 30)
    planes[0, :, 33] = (255, 255, 255)
    gray, rgb = pixels(planes, "gray"), pixels(planes, "rgb")
    assert gray.shape == (1, 1024)
    assert gray[0, [0, 1, 33]].tolist() == [18, 0, 255]  # 0.299·10 + 0.587·20 + 0.114·30 = 18.15
    assert rgb.shape == (1, 3072)
    assert rgb[0, :4].tolist() == [10, 20, 30, 0]
    assert rgb[0, 99:102].tolist() == [255] * 3


@pytest.mark.parametrize("content, message", [
    (b"", "has 0 bytes"),
    (cifar_batch(1)[:-1], r"data_batch_1\.bin has 15364 bytes, which is not a multiple of a record of 3073"),
    (cifar_batch(1)[:RECORD] + b"\x0a" + cifar_batch(1)[1:RECORD], "record 1: label 10 is out of range: 0 to 9"),
])  # fmt: skip
def test_cifar10_bad_batches(tmp_path, content, message):
    make_tree(tmp_path / "cifar10", {"data_batch_1.bin": content, "test_batch.bin": cifar_batch(0)})
    with pytest.raises(ValueError, match=message):
        small("image", tmp_path).load()


def test_image_missing_and_impossible(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cifar-10-binary\.tar or data_batch_1\.bin not found.*toronto"):
        small("image", tmp_path).load()
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte.*not found in .*mnist.*get MNIST"):
        small("image", tmp_path, "source=mnist").load()
    with pytest.raises(ValueError, match="colour must be gray for mnist, not rgb"):
        small("image", tmp_path, "source=mnist", "colour=rgb", "length=3072").load()
    with pytest.raises(ValueError, match="a rgb picture of cifar10 has 3072 positions: set length"):
        small("image", tmp_path, "colour=rgb").load()
    with pytest.raises(ValueError, match="source must be one of cifar10, mnist, not 'svhn'"):
        small("image", tmp_path, "source=svhn")
    make_tar(tmp_path / "cifar10/cifar-10-binary.tar.gz", {"cifar-10-batches-bin/batches.meta.txt": b"airplane"})
    with pytest.raises(ValueError, match=r"holds no data_batch_1\.bin or"):
        small("image", tmp_path).load()


def test_cifar10_official_batches(data):
    counts = {"train": [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981], "test": [1000] * 10}
    corner = {"train": [59, 62, 63], "test": [158, 112, 49]}
    for part in ("train", "test"):
        planes, labels = read_cifar10(data, part)
        if len(labels) == 10000:  # only the first of the training batches
            assert np.bincount(labels).tolist() == counts[part]
        assert planes.shape == (len(labels), 3, 1024)
        assert planes[0, :, 0].tolist() == corner[part]


# ---- image: MNIST ----


def idx(values: np.ndarray, magic: int | None = None) -> bytes:
    head = [0x0800 + values.ndim if magic is None else magic, *values.shape]
    return np.array(head, ">u4").tobytes() + values.tobytes()


def mnist(count: int = 8) -> dict[str, bytes]:
    x = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    y = np.arange(count, dtype=np.uint8) % 10
    return {f"{stem}-{kind}": idx(values) for stem in ("train", "t10k")
            for kind, values in (("images-idx3-ubyte", x), ("labels-idx1-ubyte", y))}  # fmt: skip


def test_mnist_reads_and_predicts(tmp_path):
    files = mnist()
    files["t10k-images.idx3-ubyte"] = files.pop("t10k-images-idx3-ubyte")  # as some tools unpack it
    files["train-images-idx3-ubyte.gz"] = gzip.compress(files.pop("train-images-idx3-ubyte"))
    make_tree(tmp_path / "mnist", files)
    digits = small("image", tmp_path, "source=mnist")
    splits = digits.load()
    assert [len(part) for part in (splits.train, splits.valid, splits.test)] == [6, 2, 8]
    assert splits.train[0]["input_ids"].shape == (784,)
    line = " ".join(str(token) for token in splits.train[0]["input_ids"].tolist())
    assert torch.equal(digits.encode(line)["input_ids"], splits.train[0]["input_ids"])
    assert digits.answer(torch.eye(10)[7]) == "7"
    assert small("image", tmp_path).answer(torch.eye(10)[7]) == "horse"
    with pytest.raises(ValueError, match="a picture is 784 values in one line, not 2"):
        digits.encode("1 2")
    with pytest.raises(ValueError, match="value 1 must be an integer from 0 to 255, not '256'"):
        digits.encode(line.replace(line.split()[0], "256", 1))


@pytest.mark.parametrize("name, change, message", [
    ("train-images-idx3-ubyte", lambda raw: b"\0\0\x08\x01" + raw[4:], "its magic number is 2049, not 2051"),
    ("train-images-idx3-ubyte", lambda raw: raw[:10], "is not an IDX file"),
    ("train-images-idx3-ubyte", lambda raw: b"", "is not an IDX file"),
    ("train-images-idx3-ubyte", lambda raw: raw[:-1], r"8×28×28 values and has 6271; get it again"),
    ("train-images-idx3-ubyte", lambda raw: idx(np.zeros((8, 14, 56), np.uint8)), "pictures of 14×56 pixels"),
    ("t10k-labels-idx1-ubyte", lambda raw: idx(np.zeros(7, np.uint8)), "8 pictures and .* 7 labels"),
    ("t10k-labels-idx1-ubyte", lambda raw: raw[:-1] + b"\x63", "record 7: label 99 is out of range"),
])  # fmt: skip
def test_mnist_bad_files(tmp_path, name, change, message):
    files = mnist()
    make_tree(tmp_path / "mnist", files | {name: change(files[name])})
    with pytest.raises(ValueError, match=message):
        small("image", tmp_path, "source=mnist").load()


def test_mnist_truncated_packing(tmp_path):
    files = mnist()
    packed = gzip.compress(files.pop("train-labels-idx1-ubyte"))
    make_tree(tmp_path / "mnist", files | {"train-labels-idx1-ubyte.gz": packed[:-9]})
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte\.gz cannot be read.*get it again"):
        small("image", tmp_path, "source=mnist").load()


def test_mnist_official_files(data):
    x, y = read_mnist(data, "test")
    assert x.shape == (10000, 784)
    assert np.bincount(y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert len(read_mnist(data, "train")[1]) == 60000
