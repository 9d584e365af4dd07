"""What a task is: data, the head it needs, a metric, recipes. One file per task, one line in the registry."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.data.datasets import IGNORED, Example, Splits
from subquad.data.files import Source
from subquad.tasks import scores
from subquad.tasks.recipe import Recipe

__all__ = ["IGNORED", "Example", "Splits", "Task", "collate"]


class Task:
    """A task, configured by a recipe.

    A subclass declares the class attributes, and writes `load` and `vocabulary`; what a head usually needs (scores,
    collation) is here. `head` is a name of `subquad.models.HEADS`.
    """

    name: ClassVar[str] = ""  # set by the registry
    title: ClassVar[str] = ""  # one line for `subquad tasks`
    paper: ClassVar[str] = ""  # where the task comes from
    head: ClassVar[str] = "sequence"
    metric: ClassVar[str] = "accuracy"  # the number that chooses checkpoints
    larger_is_better: ClassVar[bool] = True
    needs_data: ClassVar[bool] = False
    sources: ClassVar[dict[str, Source]] = {}  # the data sets by the recipe's `source`: a missing one is found at once
    recipes: ClassVar[dict[str, Any]] = {}

    def __init__(self, recipe: Recipe, data: Path | None = None, seed: int = 0) -> None:
        recipe.check()
        self.recipe: Any = recipe
        self.data = data  # the directory of data sets
        self.seed = seed  # of generated data and of drawn splits

    # ---- what a task writes ----

    def load(self) -> Splits:
        """Read or generate the data; every error in it is raised here, before training starts."""
        raise NotImplementedError

    def vocabulary(self) -> dict[str, Any]:
        """Keys of SubquadConfig that follow from the data: vocab_size, num_labels, pad_token_id … (after `load`)."""
        raise NotImplementedError

    def encode(self, text: str) -> Example:
        """One line of a user as model input, for `subquad predict` and `generate`."""
        raise ValueError(f"{self.name}: a line of text is not an input of this task")

    def answer(self, logits: Tensor) -> str:
        """The model's logits for one example, in words."""
        return str(int(logits.argmax(-1)))

    @torch.no_grad()
    def reply(self, model: Any, text: str) -> str:
        """A trained model's answer to one line of a user."""
        example, longest = self.encode(text), model.config.max_position_embeddings
        if len(example["input_ids"]) > longest:
            raise ValueError(f"the input has {len(example['input_ids'])} tokens, beyond the model's {longest}")
        inputs = {key: value[None] for key, value in example.items() if key != "labels"}
        return self.answer(model(**inputs).logits[0])

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text, for `subquad generate`."""
        raise ValueError(f"{self.name}: the tokens of this task are no text")

    def save(self, folder: Path) -> None:
        """Keep beside a trained model what `restore` needs to read new input, such as a vocabulary."""

    def restore(self, folder: Path) -> None:
        """Read what `save` kept, in place of `load`: a saved model answers without its training data."""

    def finish(self, model: Any, dataset: Dataset) -> dict[str, float]:
        """Further metrics of the best model, those that need more than logits: BLEU of translations."""
        return {}

    def plateau(self) -> tuple[float, float, str] | None:
        """What a model scores on the validation data before it uses its context, by how much a score must be better,
        and what the score is called (after `load`); None = the score of guessing.
        """
        return None

    def initialise(self, model: Any) -> None:
        """Change a fresh model before training, such as by the weights of another one."""

    # ---- what follows from the head ----

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the model is given."""
        return self.recipe.length

    def config(self) -> dict[str, Any]:
        """All keys of the model's configuration but the attention."""
        r = self.recipe
        model = {
            "hidden_size": r.width,
            "num_hidden_layers": r.layers,
            "num_attention_heads": r.heads,
            "head_dim": r.head_dim,
            "intermediate_size": r.feedforward,
            "max_position_embeddings": self.longest,
            "positions": r.positions,
            "norm": r.norm,
            "pooling": r.pooling,
            "classifier": r.classifier,
            "mlp": r.mlp,
            "initializer_range": r.initial,
            "dropout": r.dropout,
            "attention_dropout": r.attention_dropout,
            "tie_word_embeddings": r.tied,
            "density_weight": r.density,
            "label_smoothing": r.smoothing,
        }
        return {**model, **self.vocabulary()}

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Statistics of each example, (B, k): what `measure` needs; the logits of a test set would be too large."""
        return scores.SCORES[self.head](logits, labels)

    def measure(self, statistics: np.ndarray) -> dict[str, float]:
        """The metrics of a data set from the statistics of all its examples, (N, k)."""
        return scores.MEASURES[self.head](statistics)

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """A batch: padded on the right to its longest example, with a mask where something was padded."""
        pad = self.vocabulary().get("pad_token_id")
        return collate(examples, 0 if pad is None else pad)


def collate(examples: Sequence[Example], pad: int) -> dict[str, Tensor]:
    lengths = [len(example["input_ids"]) for example in examples]
    longest = max(lengths)
    fill = {"input_ids": pad, "labels": IGNORED, "token_type_ids": 0}
    batch = {}
    for key in examples[0]:
        columns = [torch.as_tensor(example[key]) for example in examples]
        if columns[0].dim():
            columns = [torch.nn.functional.pad(x, (0, longest - len(x)), value=fill.get(key, 0)) for x in columns]
        batch[key] = torch.stack(columns)
    if min(lengths) < longest:
        batch["attention_mask"] = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()  # (B, n)
    return batch
