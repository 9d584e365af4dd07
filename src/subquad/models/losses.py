"""The losses of the heads. Each gives the sum over the labels that count, and their number."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.values import readable

IGNORED = -100  # a label that does not count


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """logits (…, classes), integer labels (…)."""
    if labels.is_floating_point():
        raise TypeError(f"labels must be integers, one class each, not {labels.dtype}")
    check_labels(labels, logits.shape[-1])
    logits, labels = logits.flatten(0, -2).float(), labels.flatten()
    if len(logits) != len(labels):
        raise ValueError(f"labels: {len(labels)} of them for {len(logits)} answers")
    total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
    return total, (labels != IGNORED).sum()


def squared_error(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Regression: logits (B, labels); labels (B, labels), or (B,) for one of them."""
    labels = _same_shape(logits, labels)
    return F.mse_loss(logits.float(), labels, reduction="sum"), _number(labels)


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Several labels at once: logits and labels (B, labels), labels 0 or 1."""
    labels = _same_shape(logits, labels)
    return F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="sum"), _number(labels)


def average(total: Tensor, count: Tensor, num_items: Tensor | int | None) -> tuple[Tensor, Tensor | float]:
    """The loss, and the share of this batch in it.

    `num_items` is the number of labels in all batches that one optimizer step accumulates; without it the loss is the
    mean of this batch, 0 where no label counts, so that a batch of padding trains nothing.
    """
    if num_items is None:
        return total / count.clamp(min=1), 1.0
    num_items = num_items.to(total.device) if isinstance(num_items, Tensor) else num_items
    return total / num_items, count / num_items


def check_labels(labels: Tensor, classes: int) -> None:
    """torch aborts on a label out of range, or reads past the end: say which one it is. A GPU checks it by itself."""
    if not readable(labels):
        return
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= classes))
    if bool(wrong.any()):
        raise ValueError(f"label {labels[wrong][0].item()} is out of range: labels go from 0 to {classes - 1}")


def _same_shape(logits: Tensor, labels: Tensor) -> Tensor:
    if labels.dim() == 1 and logits.shape[-1] == 1:
        labels = labels[:, None]
    if labels.shape != logits.shape:
        raise ValueError(f"labels must have shape {tuple(logits.shape)}, not {tuple(labels.shape)}")
    return labels.float()


def _number(labels: Tensor) -> Tensor:
    return torch.full((), labels.numel(), device=labels.device)
