"""A recipe: the numbers of a training run. Tasks extend it with the numbers of their data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from subquad.core.options import Checked, make, option, parse


@dataclass(frozen=True, kw_only=True)
class Recipe(Checked):
    """Model, training, data. Everything can be set from the command line: --set layers=4 --set rate=3e-4."""

    # model
    width: int = option(128, "width D of the model", ge=1)
    layers: int = option(2, "number of layers", ge=1)
    heads: int = option(4, "number of heads", ge=1)
    head_dim: int | None = option(None, "width of a head; None = width / heads", ge=1)
    feedforward: int = option(512, "width of the feed-forward layers", ge=1)
    positions: Literal["learned", "sinusoidal", "rotary", "own", "none", "published", "rotary-or-published"] = option(
        "published",
        "how positions are known; published: as in the paper of the attention, its own or learned; "
        "rotary-or-published: rotary, or published with attentions that work on tokens",
    )
    norm: Literal["pre", "post"] = option("pre", "where blocks are normalised")
    pooling: Literal["mean", "cls"] = option("mean", "how a sequence becomes one vector")
    classifier: Literal["linear", "mlp"] = option(
        "linear", "head of sequence classification: one linear map, or two; of pairs: three, or two"
    )
    mlp: Literal["every", "last"] = option("every", "which layers have a feed-forward layer")
    dropout: float = option(0.0, "dropout of the model", ge=0, lt=1)
    attention_dropout: float = option(0.0, "dropout of the attention weights", ge=0, lt=1)
    initial: float = option(0.02, "standard deviation of the embeddings and of the head at the start", gt=0)
    tied: bool = option(True, "output embeddings are the input embeddings")
    density: float = option(0.0, "λ of the density loss of SBM layers", ge=0)
    checkpointing: bool = option(False, "recompute activations in the backward pass, to save memory")
    # training
    steps: int = option(1000, "optimiser steps", ge=1)
    batch: int = option(32, "sequences per step, over all processes", ge=1)
    accumulate: int = option(1, "parts that a batch is computed in, one after another", ge=1)
    sequence_parallel: int = option(1, "processes that share each sequence (torchrun)", ge=1)
    rate: float = option(1e-3, "peak learning rate", gt=0)
    warmup: int = option(0, "steps of linear warm-up", ge=0)
    schedule: Literal["linear", "cosine", "constant", "sqrt"] = option("cosine", "learning rate after the warm-up")
    optimizer: Literal["adamw", "adafactor"] = option("adamw", "optimiser; Adafactor without a schedule of its own")
    decay: float = option(0.01, "weight decay", ge=0)
    beta2: float = option(0.999, "AdamW: decay of the mean of the squared gradients", gt=0, lt=1)
    clip: float = option(1.0, "largest norm of the gradient", gt=0)
    smoothing: float = option(0.0, "label smoothing", ge=0, lt=1)
    evaluate: int = option(100, "steps between two evaluations, each with a checkpoint", ge=1)
    patience: int | None = option(None, "evaluations without a gain before training stops; None = never", ge=1)
    enough: float | None = option(None, "validation score at which training stops; None = never")
    # data
    length: int = option(512, "longest sequence", ge=1)
    train_size: int | None = option(None, "training examples; None = all there are", ge=1)
    eval_size: int | None = option(None, "validation and test examples; None = all there are", ge=1)

    def changed(self, name: str, settings: Iterable[str]) -> Any:
        """This recipe with `key=value` texts applied; `name` is the task's, for the error."""
        texts: dict[str, str] = {}
        for setting in settings:
            key, equals, value = (piece.strip() for piece in setting.partition("="))
            if not equals or not key or not value:
                raise ValueError(f"the setting {setting!r} is not of the form key=value")
            texts[key] = value
        return make(type(self), name, {**self.asdict(), **parse(type(self), name, texts)})

    def check(self) -> None:
        """Refuse numbers that do not go together."""
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads={self.heads}, not {self.width}")
        if self.batch % self.accumulate:
            raise ValueError(f"batch must be a multiple of accumulate={self.accumulate}, not {self.batch}")
        self.check_task()

    def check_task(self) -> None:
        """Refuse numbers of a task's own that do not go together. Tasks write it; it is also run from their text."""

    def asdict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
