"""Copying (Yun et al. 2020, sections 5 and G.1): 0s0s, where the second s is to be found from the first.

s has n/2 - 1 symbols from 0 to 127. `copying` is the bidirectional task of table 1: the second half is masked, every
masked token is predicted on its own, and the accuracy is that of the masked tokens. `copying-causal` is table 2: the
model sees everything before the token it predicts; only the second s counts. `paper`: n = 256, width 256, 4 heads of
64, one feed-forward layer of 512 behind all attention layers (mlp=last; section 5.1, G.1), AdamW at 1e-4 with 3000
steps of warm-up, 500,000 steps of 1024 sequences, 100,000 sequences to train on and 10,000 to test on. The number of
layers is what tables 1 and 2 vary: --set layers=1 … 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from subquad.core.options import option
from subquad.data.datasets import generated_splits
from subquad.tasks.base import IGNORED, Example, Splits, Task
from subquad.tasks.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class CopyingRecipe(Recipe):
    symbols: int = option(128, "different symbols", ge=2)

    def check_task(self) -> None:
        if self.length % 2 or self.length < 4:
            raise ValueError(f"length must be even and ≥ 4 (0s0s), not {self.length}")


SMALL = CopyingRecipe(
    length=64, symbols=16, width=64, layers=2, heads=4, feedforward=128, mlp="last", initial=0.125, steps=1500,
    batch=64, rate=2e-3, warmup=50, evaluate=150, train_size=50_000, eval_size=256,
)  # fmt: skip
PAPER = CopyingRecipe(
    length=256, symbols=128, width=256, layers=4, heads=4, feedforward=512, mlp="last", steps=500_000, batch=1024,
    rate=1e-4, warmup=3000, schedule="linear", evaluate=5000, train_size=100_000, eval_size=10_000,
)  # fmt: skip


class Copying(Task):
    title = "copy the first half of a sequence into its masked second half (generated)"
    paper = "Yun et al. 2020, table 1 and appendix G.1"
    head = "masked-lm"
    metric = "accuracy"
    recipes = {"small": SMALL, "paper": PAPER}

    def load(self) -> Splits:
        r = self.recipe
        sizes = (r.train_size or r.steps * r.batch, r.eval_size or 10_000, r.eval_size or 10_000)
        return generated_splits(self.make, sizes, self.seed)

    def sequence(self, rng: np.random.Generator) -> torch.Tensor:
        """0s0s, (n,)."""
        s = rng.integers(self.recipe.symbols, size=self.recipe.length // 2 - 1)
        return torch.from_numpy(np.concatenate([[0], s, [0], s]))

    def make(self, rng: np.random.Generator) -> Example:
        ids, half = self.sequence(rng), self.recipe.length // 2
        labels = torch.full_like(ids, IGNORED)
        labels[half:] = ids[half:]
        return {"input_ids": torch.where(labels == IGNORED, ids, self.mask), "labels": labels}

    @property
    def mask(self) -> int:
        return self.recipe.symbols  # the token after the symbols

    def vocabulary(self) -> dict[str, Any]:
        return {"vocab_size": self.recipe.symbols + 1}


class CausalCopying(Copying):
    title = "copy the first half of a sequence, one token after another (generated)"
    paper = "Yun et al. 2020, table 2 and appendix H.1"
    head = "causal-lm"

    def make(self, rng: np.random.Generator) -> Example:
        ids = self.sequence(rng)
        labels = ids.clone()
        labels[: self.recipe.length // 2 + 1] = IGNORED
        return {"input_ids": ids, "labels": labels}
