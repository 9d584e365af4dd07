"""Needles in a haystack: questions about a few facts that are scattered in a long text.

A text is n/16 sentences of 16 tokens in random order. Most are hay: random tokens that mean nothing. A few are facts:
a fact gives one value to one key, and says so in all its tokens. A few are questions: a question names a key, and the
label of its tokens is the value that the fact about this key gives, wherever it stands. So every question must find
one sentence among n/16 by its content. A model that sees only the token itself, or the mean of all tokens, cannot do
better than guessing among the values that occur; order carries no information, so there are no positions.
`small` states every fact eight times: it is learned in a hundred steps. No paper has this task; `paper` is a large one.
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

HAY = 16  # different hay tokens; 0 is padding


@dataclass(frozen=True, kw_only=True)
class NeedleRecipe(Recipe):
    sentence: int = option(16, "tokens of a sentence", ge=1)
    keys: int = option(4, "different facts in a text, each about its own key", ge=1)
    repeats: int = option(1, "sentences that state each fact", ge=1)
    values: int = option(8, "values that a fact can give", ge=2)
    questions: int = option(8, "questions in a text", ge=1)

    def check_task(self) -> None:
        needed = (self.keys * self.repeats + self.questions) * self.sentence
        if self.length % self.sentence or needed > self.length:
            raise ValueError(
                f"length must be a multiple of sentence={self.sentence} and at least {needed} for "
                f"keys={self.keys}, repeats={self.repeats} and questions={self.questions}, not {self.length}"
            )


class Needle(Task):
    title = "answer questions about facts scattered in a long text (generated)"
    head = "token"
    recipes = {
        "small": NeedleRecipe(
            length=2048, width=64, layers=2, heads=4, feedforward=128, positions="none", steps=100, batch=4, rate=5e-3,
            warmup=10, evaluate=25, eval_size=32, values=4, repeats=8, questions=32,
        ),
        "paper": NeedleRecipe(
            length=16384, width=128, layers=4, heads=8, positions="none", steps=5000, batch=32, rate=1e-3, warmup=200,
            eval_size=500, keys=64, values=32, questions=64, repeats=4, evaluate=250,
        ),
    }  # fmt: skip

    def load(self) -> Splits:
        r = self.recipe
        sizes = (r.train_size or r.steps * r.batch, r.eval_size or 500, r.eval_size or 500)
        return generated_splits(self.make, sizes, self.seed)

    def make(self, rng: np.random.Generator) -> Example:
        r = self.recipe
        ids = rng.integers(1, 1 + HAY, (r.length // r.sentence, r.sentence))  # (sentences, tokens)
        labels = np.full_like(ids, IGNORED)
        order = rng.permutation(len(ids))
        facts, questions = np.split(order, [r.keys * r.repeats])
        questions = questions[: r.questions]
        values = rng.integers(r.values, size=r.keys)  # of key 0, 1, …
        asked = rng.integers(r.keys, size=r.questions)
        key = np.arange(len(facts)) % r.keys  # of each fact
        ids[facts] = (1 + HAY + key * r.values + values[key])[:, None]
        ids[questions] = (1 + HAY + r.keys * r.values + asked)[:, None]
        labels[questions] = values[asked][:, None]
        return {"input_ids": torch.from_numpy(ids.ravel()), "labels": torch.from_numpy(labels.ravel())}

    def vocabulary(self) -> dict[str, Any]:
        r = self.recipe
        return {"vocab_size": 1 + HAY + r.keys * r.values + r.keys, "num_labels": r.values, "pad_token_id": 0}
