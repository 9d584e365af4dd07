"""What the tasks of the Long Range Arena share: the recipe of Composite Slice, and a CLS token for pooling=cls.

`paper` of these tasks is table 7 of SBM-Transformer, with the warm-up and the head of its source (Xiong et al. 2021:
two linear maps, a ReLU between them). `cst` is A.6.1 of Composite Slice: 2 layers, 4 heads, width 256, pre-norm, mean
pooling, the same head, AdamW without decay, linear warm-up and decay, early stopping. It searches the learning rate in
[l/2, l, 2l], as `subquad reproduce` does at full size; its table of further numbers is not at hand, so steps, batches,
warm-up and l are those of `paper`, and the feed-forward layers are twice as wide as the model, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from subquad.tasks.base import Example, Task

CST: dict[str, Any] = {
    "width": 256, "layers": 2, "heads": 4, "feedforward": 512, "dropout": 0.1, "attention_dropout": 0.1, "rate": 5e-4,
    "schedule": "linear", "decay": 0.0, "classifier": "mlp", "patience": 20,
}  # fmt: skip
TEXTS = ("input_ids", "pair_ids")


class ArenaTask(Task):
    """With pooling=cls every sequence gets a token of its own in front, the last of the vocabulary, and the answer is
    read there (Combiner, E.4 tries both). Positions and rows of a grid then count from that token.
    """

    @property
    def has_cls(self) -> bool:
        return self.recipe.pooling == "cls"

    @property
    def longest(self) -> int:
        return self.recipe.length + self.has_cls

    def config(self) -> dict[str, Any]:
        made = super().config()
        return {**made, "vocab_size": made["vocab_size"] + self.has_cls}

    def with_cls(self, example: Example) -> Example:
        """The example with the token in front of every text of it."""
        if not self.has_cls:
            return example
        token = torch.tensor([self.vocabulary()["vocab_size"]])
        return {
            key: torch.cat([token, torch.as_tensor(value).long()]) if key in TEXTS else value
            for key, value in example.items()
        }

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        return super().collate([self.with_cls(example) for example in examples])

    def encode(self, text: str) -> Example:
        return self.with_cls(self.read(text))

    def read(self, text: str) -> Example:
        """One line of a user, without the token."""
        return super().encode(text)


class ByteTask(ArenaTask):
    """Texts as their first `length` bytes, byte b as id b + 1 (0 is padding), and one of two classes."""

    classes: ClassVar[tuple[str, str]]

    def ids(self, content: bytes) -> np.ndarray:
        return np.frombuffer(content[: self.recipe.length], np.uint8).astype(np.uint16) + 1  # (≤ length,)

    def vocabulary(self) -> dict[str, Any]:
        return {"vocab_size": 257, "num_labels": 2, "pad_token_id": 0}

    def answer(self, logits: Tensor) -> str:
        return self.classes[int(logits.argmax(-1))]
