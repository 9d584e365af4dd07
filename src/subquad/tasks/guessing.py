"""The score of guessing, and the plateau: scores that a model must leave behind.

Guessing is what a task's metric is for an answer that does not look at the input. Every question gets the answer that
is most frequent in the training data; a language model predicts tokens by their frequencies there. A model that does
not beat this score has learned nothing about its input.

The plateau is the score of a model that does not use its context yet: the score of guessing, or what the task says that
a model reaches without attention (bytes of text: the bigram entropy). Every model begins there, and an attention that
has not left it by the end of its steps has not been compared with anything: it is marked instead of being ranked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from subquad.tasks.base import IGNORED, Splits, Task

COUNTED = 2000  # training examples whose labels are counted, and test examples that are scored
GROUPS = 10  # parts of the test set whose scores tell how far chance moves the score


@dataclass(frozen=True)
class Guess:
    """The score, and the standard error that the test set leaves it."""

    score: float
    error: float


def guess(task: Task, splits: Splits) -> Guess:
    """The score of guessing in the task's metric, on its test set (after `load`)."""
    train, test = labels(task, splits.train), labels(task, splits.test)
    statistics = STATISTICS[task.head](task, train, test)  # (N, k)
    groups = np.array_split(statistics, min(GROUPS, len(statistics)))
    scores = [task.measure(group)[task.metric] for group in groups]
    error = float(np.std(scores, ddof=1) / len(scores) ** 0.5) if len(scores) > 1 else 0.0
    return Guess(float(task.measure(statistics)[task.metric]), error)


def labels(task: Task, dataset) -> list[np.ndarray]:
    """The labels of some examples, each (m,); a causal model does not predict the first token. They are drawn, because
    data may be in an order: labels that alternate, say, or one class after the other.
    """
    chosen = np.random.default_rng(0).permutation(len(dataset))[:COUNTED]
    found = [np.atleast_1d(np.asarray(dataset[int(index)]["labels"])) for index in chosen]
    return [each[1:] for each in found] if task.head == "causal-lm" else found


def _answers(task: Task, train: list[np.ndarray], test: list[np.ndarray]) -> np.ndarray:
    """(predicted, true) of sequences: the most frequent class; of a regression the mean."""
    known, asked = np.concatenate(train), np.concatenate(test)
    one = known.mean() if np.issubdtype(known.dtype, np.floating) else np.bincount(known).argmax()
    return np.stack([np.full(len(asked), float(one)), asked.astype(float)], 1)


def _tokens(task: Task, train: list[np.ndarray], test: list[np.ndarray]) -> np.ndarray:
    """(right, counted) of each example."""
    known = np.concatenate(train)
    one = np.bincount(known[known != IGNORED]).argmax()
    return np.array([((each == one).sum(), (each != IGNORED).sum()) for each in test], float)


def _language(task: Task, train: list[np.ndarray], test: list[np.ndarray]) -> np.ndarray:
    """(nats, counted, right) of each example, under the frequencies of the training labels, each counted once more."""
    known = np.concatenate(train)
    counts = np.bincount(known[known != IGNORED], minlength=task.vocabulary()["vocab_size"]) + 1.0
    nats, likeliest = -np.log(counts / counts.sum()), counts.argmax()
    asked = [each[each != IGNORED] for each in test]
    return np.array([(nats[each].sum(), len(each), (each == likeliest).sum()) for each in asked], float)


STATISTICS = {
    "sequence": _answers,
    "pair": _answers,
    "token": _tokens,
    "causal-lm": _language,
    "masked-lm": _language,
    "seq2seq": _language,
}


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
