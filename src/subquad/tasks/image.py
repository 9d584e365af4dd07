"""Pictures as sequences of pixels: the Image task of the Long Range Arena (Tay et al. 2021) on CIFAR-10, and MNIST.

A picture is read row by row, one id 0 … 255 per value, and nothing says that it is flat: CIFAR-10 in gray has 1024
positions (32 rows of 32), in colour 3072 (32 rows of 32 pixels of R, G, B), MNIST 784 (28 rows of 28). The
rows are handed to mechanisms on a grid (`cols`), such as combiner-axial. Guessing is right in 10 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from subquad.core.options import option
from subquad.data.datasets import Examples, with_validation
from subquad.data.files import Source, members, read_bytes
from subquad.tasks.arena import CST, ArenaTask
from subquad.tasks.base import Example, Splits
from subquad.tasks.recipe import Recipe

CIFAR10 = Source(
    "cifar10",
    "CIFAR-10, binary version: cifar-10-binary.tar.gz, or of its files test_batch.bin and at least one of "
    "data_batch_1.bin … data_batch_5.bin,",
    "https://www.cs.toronto.edu/~kriz/cifar.html",
)
MNIST = Source(
    "mnist",
    "MNIST: {train,t10k}-{images-idx3,labels-idx1}-ubyte.gz",
    "http://yann.lecun.com/exdb/mnist/ or any of its mirrors",
)
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORD = 1 + 3 * 32 * 32  # a label byte, then the R, G and B planes
LUMA = (0.299, 0.587, 0.114)  # gray of R, G, B (ITU-R 601), as the Arena converts
ROWS = {"cifar10": 32, "mnist": 28}
POSITIONS = {("cifar10", "gray"): 1024, ("cifar10", "rgb"): 3072, ("mnist", "gray"): 784}

Pictures = tuple[np.ndarray, np.ndarray]  # values uint8 (N, …), labels int64 (N,)


@dataclass(frozen=True, kw_only=True)
class ImageRecipe(Recipe):
    source: Literal["cifar10", "mnist"] = option("cifar10", "data set")
    colour: Literal["gray", "rgb"] = option("gray", "one value a pixel, or three (CIFAR-10; needs length=3072)")
    valid: int = option(1000, "training pictures set aside for validation, drawn by seed", ge=1)

    def check_task(self) -> None:
        if (self.source, self.colour) not in POSITIONS:
            raise ValueError(f"colour must be gray for {self.source}, not {self.colour}")
        positions = POSITIONS[self.source, self.colour]
        if positions > self.length:
            raise ValueError(f"a {self.colour} picture of {self.source} has {positions} positions: set length to that")


class Image(ArenaTask):
    """Recipe `paper`: Table 7 of the SBM paper (column IMAGE), 5000 pictures for validation as in the Arena.

    The paper builds on the Nyströmformer's implementation of the Arena; what its table leaves out is from there:
    175 warm-up steps, then linear decay, no weight decay.
    """

    title = "classes of pictures, pixel by pixel (CIFAR-10, MNIST; Long Range Arena: Image)"
    paper = "Tay et al. 2021; SBM, Table 7; Composite Slice, A.6.1; Combiner, Table 5"
    head = "sequence"
    needs_data = True
    sources = {"cifar10": CIFAR10, "mnist": MNIST}
    recipes = {
        "small": ImageRecipe(
            length=1024, width=64, layers=2, heads=2, feedforward=128, steps=1000, batch=8, rate=1e-3, warmup=50,
            evaluate=250, eval_size=500,
        ),
        "paper": ImageRecipe(
            length=1024, width=64, layers=2, heads=2, feedforward=128, dropout=0.1, attention_dropout=0.1,
            steps=35000, batch=1024, rate=5e-4, warmup=175, schedule="linear", decay=0.0, evaluate=350, valid=5000,
            classifier="mlp",
        ),
        "cst": ImageRecipe(length=1024, **CST, steps=35000, batch=1024, warmup=175, evaluate=350, valid=5000),
    }  # fmt: skip

    def load(self) -> Splits:
        r = self.recipe
        read = read_cifar10 if r.source == "cifar10" else read_mnist
        train, test = (self._examples(*read(self.data, part)) for part in ("train", "test"))
        return with_validation(train, test, r.valid, self.seed, train_size=r.train_size, eval_size=r.eval_size)

    def _examples(self, pictures: np.ndarray, labels: np.ndarray) -> Examples:
        if self.recipe.source == "cifar10":
            pictures = pixels(pictures, self.recipe.colour)
        return Examples(list(pictures), labels.tolist())

    def positions(self) -> int:
        return POSITIONS[self.recipe.source, self.recipe.colour]

    def vocabulary(self) -> dict[str, Any]:
        return {"vocab_size": 256, "num_labels": 10, "cols": self.positions() // ROWS[self.recipe.source]}

    def read(self, text: str) -> Example:
        """A picture written as its values, 0 to 255, row by row, separated by blanks."""
        words = text.split()
        if len(words) != self.positions():
            raise ValueError(f"{self.name}: a picture is {self.positions()} values in one line, not {len(words)}")
        for place, word in enumerate(words, 1):
            if not (word.isdecimal() and int(word) <= 255):
                raise ValueError(f"{self.name}: value {place} must be an integer from 0 to 255, not {word!r}")
        return {"input_ids": torch.tensor([int(word) for word in words])}

    def answer(self, logits: Tensor) -> str:
        best = int(logits.argmax(-1))
        return CIFAR10_CLASSES[best] if self.recipe.source == "cifar10" else str(best)


def pixels(planes: np.ndarray, colour: str) -> np.ndarray:
    """(N, 3, 1024) planes → (N, 1024) gray, or (N, 3072) with R, G, B of a pixel side by side."""
    if colour == "rgb":
        return planes.transpose(0, 2, 1).reshape(len(planes), -1)
    red, green, blue = (weight * planes[:, plane].astype(np.float32) for plane, weight in enumerate(LUMA))
    return np.rint(red + green + blue).astype(np.uint8)


# ---- CIFAR-10, binary version ----


def read_cifar10(data: Path | None, part: str) -> Pictures:
    """All batches of the training part that are there, or the test batch: planes (N, 3, 1024) and labels (N,)."""
    batches = [f"data_batch_{number}.bin" for number in range(1, 6)] if part == "train" else ["test_batch.bin"]
    loose = [CIFAR10.look(data, batch, f"cifar-10-batches-bin/{batch}") for batch in batches]
    found = [(str(path), read_bytes(path)) for path in loose if path is not None]
    if not found:
        archive = CIFAR10.find(data, "cifar-10-binary.tar", batches[0])
        inside = members(archive, lambda name: PurePosixPath(name).name in batches)
        found = [(f"{archive}: {name}", content) for name, content in inside]
    if not found:
        raise ValueError(f"{archive} holds no {' or '.join(batches)}; get it again")
    records = np.concatenate([cifar10_records(name, content) for name, content in found])
    return records[:, 1:].reshape(-1, 3, 1024), records[:, 0].astype(np.int64)


def cifar10_records(name: str, content: bytes) -> np.ndarray:
    """(N, 3073): label, then pixels."""
    if not content or len(content) % RECORD:
        raise ValueError(
            f"{name} has {len(content)} bytes, which is not a multiple of a record of {RECORD}; get it again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    wrong = np.flatnonzero(records[:, 0] > 9)
    if len(wrong):
        raise ValueError(f"{name}, record {wrong[0]}: label {records[wrong[0], 0]} is out of range: 0 to 9")
    return records


# ---- MNIST, IDX ----


def read_mnist(data: Path | None, part: str) -> Pictures:
    stem = "train" if part == "train" else "t10k"
    images, labels = (
        MNIST.find(data, f"{stem}-{kind}-ubyte", f"{stem}-{kind.replace('-', '.')}-ubyte")
        for kind in ("images-idx3", "labels-idx1")
    )
    x, y = read_idx(images, 3), read_idx(labels, 1).astype(np.int64)  # (N, 28, 28), (N,)
    if x.shape[1:] != (28, 28):
        raise ValueError(f"{images} holds pictures of {x.shape[1]}×{x.shape[2]} pixels, not of 28×28")
    if len(x) != len(y):
        raise ValueError(f"{images} holds {len(x)} pictures and {labels} {len(y)} labels")
    wrong = np.flatnonzero(y > 9)
    if len(wrong):
        raise ValueError(f"{labels}, record {wrong[0]}: label {y[wrong[0]]} is out of range: 0 to 9")
    return x.reshape(len(x), -1), y


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An IDX file of bytes: magic number 0x08 and the number of dimensions, the sizes (big-endian), the values."""
    content = read_bytes(path)
    magic = int.from_bytes(content[:4], "big")
    if len(content) < 4 + 4 * dimensions or magic != 0x0800 + dimensions:
        raise ValueError(f"{path} is not an IDX file of {dimensions} dimensions: its magic number is {magic}, "
                         f"not {0x0800 + dimensions}")  # fmt: skip
    shape = np.frombuffer(content, ">u4", dimensions, 4).tolist()
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    if not len(values) or len(values) != np.prod(shape):
        raise ValueError(f"{path} says it holds {'×'.join(map(str, shape))} values and has {len(values)}; get it again")
    return values.reshape(shape)
