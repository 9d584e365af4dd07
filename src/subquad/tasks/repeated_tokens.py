"""Finding repeated tokens (Cho et al. 2022, section 5.1): which tokens of a sequence occur more than once?

A sequence holds n tokens drawn uniformly from n; the label of a token is 1 if it occurs again somewhere. Every token
has to be held against every other: sparse attention must learn to be full. `paper` is table 7, column SYNTHETIC
(one layer, one head, width 32, 2000 steps: its «epochs» are steps), with fresh sequences at every step.
Embeddings start at 0.2, as 32 dimensions ask for: at 0.02, which suits wide models, full attention is at 80 % where it
is at 99 % now.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from subquad.data.datasets import generated_splits
from subquad.tasks.base import Example, Splits, Task
from subquad.tasks.recipe import Recipe


class RepeatedTokens(Task):
    title = "which tokens occur more than once? (generated)"
    paper = "Cho et al. 2022, section 5.1"
    head = "token"
    recipes = {
        "small": Recipe(
            length=64, width=32, layers=1, heads=1, feedforward=32, positions="none", initial=0.2, steps=600, batch=64,
            rate=3e-3, decay=0.0, warmup=20, evaluate=100, eval_size=256,
        ),
        "paper": Recipe(
            length=256, width=32, layers=1, heads=1, feedforward=32, positions="none", initial=0.2, steps=2000,
            batch=256, rate=1e-3, decay=0.0, schedule="constant", evaluate=100, eval_size=1024,
        ),
    }  # fmt: skip

    def load(self) -> Splits:
        r = self.recipe
        sizes = (r.train_size or r.steps * r.batch, r.eval_size or 1024, r.eval_size or 1024)
        return generated_splits(self.make, sizes, self.seed)

    def make(self, rng: np.random.Generator) -> Example:
        ids = rng.integers(self.recipe.length, size=self.recipe.length)
        repeated = np.bincount(ids, minlength=self.recipe.length)[ids] > 1
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(repeated.astype(np.int64))}

    def vocabulary(self) -> dict[str, Any]:
        return {"vocab_size": self.recipe.length, "num_labels": 2}
