"""Image density: a causal model of all values of a picture, one after another; bits per dimension.

A picture is read row by row, R, G, B of a pixel side by side: 3072 values of CIFAR-10, 12,288 of 64 × 64 ImageNet. A
start token stands before them, and is never predicted: probabilities are over the 256 values, so a uniform model has 8
bits per dimension. Rows of 3 · 32 (3 · 64) tokens are handed to mechanisms on a grid (`cols`), such as combiner-axial.

`paper` is the ablation of Combiner (Ren et al. 2021, table 1 and appendix E.1; --set source=imagenet64 for E.2): six
layers of 512, 8 heads, rate 1e-3, batch 32, 400,000 steps; the feed-forward width, the warm-up and the size of the
validation part are not said there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from subquad.core.options import option
from subquad.data.datasets import Examples, with_validation
from subquad.data.pictures import CIFAR10, IMAGENET64, pixels, planes_file, read_cifar10
from subquad.tasks import scores
from subquad.tasks.base import Splits, Task
from subquad.tasks.recipe import Recipe

VALUES, START = 256, 256
SIDES = {"cifar10": 32, "imagenet64": 64}


@dataclass(frozen=True, kw_only=True)
class DensityRecipe(Recipe):
    source: Literal["cifar10", "imagenet64"] = option("cifar10", "data set")
    valid: int = option(1000, "training pictures set aside for validation", ge=1)


class ImageDensity(Task):
    title = "model every value of a picture (CIFAR-10, ImageNet 64 × 64)"
    paper = "Ren et al. 2021, section 5.1.2"
    head = "causal-lm"
    metric = "bits_per_dim"
    larger_is_better = False
    needs_data = True
    sources = {"cifar10": CIFAR10, "imagenet64": IMAGENET64}
    recipes = {
        "small": DensityRecipe(
            length=3073, width=64, layers=2, heads=4, feedforward=128, positions="rotary-or-published", tied=False,
            steps=1000, batch=4, rate=3e-3, warmup=50, evaluate=250, eval_size=16,
        ),
        "paper": DensityRecipe(
            length=3073, width=512, layers=6, heads=8, feedforward=2048, tied=False, steps=400_000, batch=32, rate=1e-3,
            warmup=5000, evaluate=2000, valid=5000,
        ),
    }  # fmt: skip

    @property
    def side(self) -> int:
        return SIDES[self.recipe.source]

    def load(self) -> Splits:
        r, needed = self.recipe, 3 * self.side**2 + 1
        if r.length != needed:
            raise ValueError(
                f"image-density: {r.source} has {needed - 1} values and a start token: length={needed}, not {r.length}"
            )
        read = self._cifar10 if r.source == "cifar10" else self._imagenet64
        train, test = (self._examples(read(part)) for part in ("train", "test"))
        return with_validation(train, test, r.valid, self.seed, train_size=r.train_size, eval_size=r.eval_size)

    def _cifar10(self, part: str) -> np.ndarray:
        return pixels(read_cifar10(self.data, part)[0], "rgb")  # (N, 3072)

    def _imagenet64(self, part: str) -> np.ndarray:
        if part == "test":
            return planes_file(IMAGENET64.find(self.data, "val_data.npz"))
        found = [IMAGENET64.look(self.data, f"train_data_batch_{number}.npz") for number in range(1, 11)]
        paths = [path for path in found if path is not None]
        if not paths:
            IMAGENET64.find(self.data, "train_data_batch_1.npz")  # raises: says what to get
        return np.concatenate([planes_file(path) for path in paths])

    def _examples(self, pictures: np.ndarray) -> Examples:
        start = np.full((len(pictures), 1), START, dtype=np.int16)
        ids = list(np.concatenate([start, pictures.astype(np.int16)], 1))  # (N, 1 + 3·side²)
        return Examples(ids, [row.astype(np.int64) for row in ids])

    def vocabulary(self) -> dict[str, Any]:
        return {"vocab_size": VALUES + 1, "bos_token_id": START, "cols": 3 * self.side}

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        return scores.next_token_nll(logits[..., :VALUES], labels.masked_fill(labels == START, scores.IGNORED))

    def measure(self, statistics: np.ndarray) -> dict[str, float]:
        return {"bits_per_dim": scores.perplexity(statistics)["bits"]}

    def picture(self, ids: Sequence[int]) -> np.ndarray:
        """(side, side, 3), from the values of a sample without its start token."""
        return np.array(ids, dtype=np.uint8).reshape(self.side, self.side, 3)

    @torch.no_grad()
    def sample(
        self, model: Any, count: int, seed: int = 0, temperature: float = 1.0, tell: Any = None
    ) -> list[np.ndarray]:
        """Pictures drawn from a trained model, value by value, by transformers' `generate`."""
        from transformers import set_seed

        set_seed(seed)
        steps = self.recipe.length - 1
        ids = model.generate(
            torch.full((count, 1), START), min_new_tokens=steps, max_new_tokens=steps, do_sample=True, top_k=0,
            temperature=temperature, suppress_tokens=[START], streamer=None if tell is None else Counter(steps, tell),
        )  # (count, 1 + 3·side²)  # fmt: skip
        return [self.picture(row[1:].tolist()) for row in ids]


class Counter:
    """Counts the tokens that `generate` hands to its streamer; the first call brings the prompt."""

    def __init__(self, total: int, tell: Callable[[int, int], None]) -> None:
        self.done, self.total, self.tell = -1, total, tell

    def put(self, tokens: Tensor) -> None:
        self.done += 1
        self.tell(self.done, self.total)

    def end(self) -> None:
        """Nothing is left to do."""
