"""Training: `subquad.train` and `subquad.compare`, and what they are made of.

    from subquad.training import load
    model, task = load("out/train/needle/full/seed0")           # a trained model and its task

`Run` and `train` are one training run with a task that you made yourself, `evaluate`, `predict` and `generate` use a
trained model, as `subquad eval`, `predict` and `generate` do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subquad.training.run import Run, train
    from subquad.training.use import evaluate, generate, load, predict

__all__ = ["Run", "evaluate", "generate", "load", "predict", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'subquad.training' has no attribute {name!r}")
    return getattr(import_module("subquad.training." + ("run" if name in ("Run", "train") else "use")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
