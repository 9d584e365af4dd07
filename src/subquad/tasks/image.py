"""Pictures as sequences of pixels: the Image task of the Long Range Arena (Tay et al. 2021) on CIFAR-10, and MNIST.

A picture is read row by row, one id 0 … 255 per value, and nothing says that it is flat: CIFAR-10 in gray has 1024
positions (32 rows of 32), in colour 3072 (32 rows of 32 pixels of R, G, B), MNIST 784 (28 rows of 28). The
rows are handed to mechanisms on a grid (`cols`), such as combiner-axial. Guessing is right in 10 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from subquad.core.options import option
from subquad.data.datasets import Examples, with_validation
from subquad.data.pictures import CIFAR10, MNIST, pixels, read_cifar10, read_mnist
from subquad.tasks.arena import CST, ArenaTask
from subquad.tasks.base import Example, Splits
from subquad.tasks.recipe import Recipe

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ROWS = {"cifar10": 32, "mnist": 28}
POSITIONS = {("cifar10", "gray"): 1024, ("cifar10", "rgb"): 3072, ("mnist", "gray"): 784}


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
            length=1024, width=64, layers=2, heads=2, feedforward=128, initial=0.125, steps=1500, batch=16, rate=2e-3,
            warmup=75, evaluate=250, eval_size=1000,
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
