"""Scores: statistics of each example, small enough to gather over a whole test set, and the metrics made of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.data.datasets import IGNORED


def predictions(logits: Tensor, labels: Tensor) -> Tensor:
    """One answer per sequence: (predicted, true), (B, 2); a regression keeps its value."""
    predicted = logits[:, 0] if logits.shape[-1] == 1 else logits.argmax(-1)
    return torch.stack([predicted.double(), labels.double()], 1)


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """One answer per token: (right, counted), (B, 2)."""
    counted = labels != IGNORED
    right = (logits.argmax(-1) == labels) & counted
    return torch.stack([right.sum(1), counted.sum(1)], 1).double()


def token_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood in nats and the tokens it is of, with the hits: (nll, counted, right), (B, 3)."""
    counted = labels != IGNORED
    nll = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    right = (logits.argmax(-1) == labels) & counted
    return torch.stack([nll.view(labels.shape).double().sum(1), counted.sum(1).double(), right.sum(1).double()], 1)


def next_token_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """`token_nll` of a causal model: position i predicts token i + 1."""
    return token_nll(logits[:, :-1], labels[:, 1:])


def accuracy(statistics: np.ndarray) -> dict[str, float]:
    """Of `predictions`."""
    return {"accuracy": float((statistics[:, 0] == statistics[:, 1]).mean())}


def f1_and_accuracy(statistics: np.ndarray) -> dict[str, float]:
    """Of `predictions` of two classes: F1 of class 1 (0 where nothing is found or to be found), and accuracy."""
    predicted, true = statistics.T == 1
    found, named = (predicted & true).sum(), predicted.sum() + true.sum()
    return {"f1": float(2 * found / max(named, 1)), **accuracy(statistics)}


def macro_f1_and_accuracy(statistics: np.ndarray) -> dict[str, float]:
    """Of `predictions` of several classes: the mean of their F1, each class against the others, and accuracy."""
    classes = np.unique(statistics)
    each = [f1_and_accuracy((statistics == one).astype(float))["f1"] for one in classes]
    return {"f1": float(np.mean(each)), **accuracy(statistics)}


def matthews(statistics: np.ndarray) -> dict[str, float]:
    """Of `predictions` of two classes: Matthews' correlation, that of two binary variables."""
    return {"matthews": correlation(*statistics.T), **accuracy(statistics)}


def correlations(statistics: np.ndarray) -> dict[str, float]:
    """Of `predictions` of a regression: Pearson's correlation of the values, Spearman's, that of their ranks."""
    predicted, true = statistics.T
    return {"pearson": correlation(predicted, true), "spearman": correlation(ranks(predicted), ranks(true))}


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """cov(x, y) / √(var(x) var(y)); 0 where one of them is constant, so that a model that says nothing scores 0."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / math.sqrt((x @ x) * (y @ y)))


def ranks(values: np.ndarray) -> np.ndarray:
    """1 for the smallest; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place]


def token_accuracy(statistics: np.ndarray) -> dict[str, float]:
    """Of `hits`, pooled over all tokens."""
    right, counted = statistics.sum(0)
    return {"accuracy": float(right / max(counted, 1))}


def perplexity(statistics: np.ndarray) -> dict[str, float]:
    """Of `token_nll`: nats, bits and perplexity per token, pooled over all tokens, and accuracy."""
    nll, counted, right = statistics.sum(0)
    nats = float(nll / max(counted, 1))
    bits, accuracy = nats / math.log(2), float(right / max(counted, 1))
    return {"nats": nats, "bits": bits, "perplexity": math.exp(min(nats, 700)), "accuracy": accuracy}


# head → the usual statistics and what is made of them
SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sequence": predictions,
    "pair": predictions,
    "token": hits,
    "causal-lm": next_token_nll,
    "masked-lm": token_nll,
    "seq2seq": token_nll,
}
MEASURES: dict[str, Callable[[np.ndarray], dict[str, float]]] = {
    "sequence": accuracy,
    "pair": accuracy,
    "token": token_accuracy,
    "causal-lm": perplexity,
    "masked-lm": perplexity,
    "seq2seq": perplexity,
}
