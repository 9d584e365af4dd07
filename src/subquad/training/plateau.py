"""The plateau: the score of a model that does not use its context yet. When does a run leave it?

Every model begins there, and an attention that has not left it by the end of its steps has not been compared with
anything: it is marked instead of being ranked. The plateau is the score of guessing, or what the task says that a
model reaches without attention (bytes of text: the bigram entropy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from subquad.tasks.base import Task
from subquad.tasks.guessing import Guess

ERRORS = 3  # standard errors by which a score must be better than guessing


@dataclass(frozen=True)
class Plateau:
    score: float  # in the metric of the task
    margin: float  # by which a score must be better
    what: str  # "guessing", "bigram"

    def is_behind(self, score: float, *, larger_is_better: bool) -> bool:
        """Whether a score is clearly better."""
        gain = score - self.score if larger_is_better else self.score - score
        return gain > self.margin


def find_plateau(task: Task, guessing: Guess) -> Plateau:
    """After `load`."""
    known = task.plateau()
    return Plateau(guessing.score, ERRORS * guessing.error, "guessing") if known is None else Plateau(*known)


def left_at(records: Sequence[dict[str, Any]], metric: str, plateau: Plateau, *, larger_is_better: bool) -> int | None:
    """The step of the evaluation from which on all are better than the plateau; None if the last one is not."""
    step = None
    for record in records:
        score = record.get("valid", {}).get(metric)
        if score is None:
            continue
        if not plateau.is_behind(score, larger_is_better=larger_is_better):
            step = None
        elif step is None:
            step = record["step"]
    return step
