"""The datasets that tasks hand out: examples in memory, generated examples, windows over one long text; and splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

Example = dict[str, Tensor]  # input_ids (n,), labels (n,) or (), perhaps token_type_ids (n,)
IGNORED = -100  # the label of a token that is not predicted


@dataclass(frozen=True)
class Splits:
    """Three map-style datasets of examples. Checkpoints are chosen on `valid`; `test` is read once, at the end."""

    train: Dataset
    valid: Dataset
    test: Dataset


class Examples(Dataset):
    """Examples in memory: ids as arrays of any length (kept as they are, small types stay small) and their labels."""

    def __init__(self, ids: Sequence[np.ndarray], labels: Sequence) -> None:
        if len(ids) != len(labels):
            raise ValueError(f"{len(ids)} inputs and {len(labels)} labels")
        self.ids, self.labels = ids, labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Example:
        ids = torch.from_numpy(np.asarray(self.ids[index], dtype=np.int64))
        return {"input_ids": ids, "labels": torch.as_tensor(self.labels[index])}


class GeneratedDataset(Dataset):
    """Examples generated on demand: number i has its own seed, so order and restarts do not matter."""

    def __init__(self, make: Callable[[np.random.Generator], Example], size: int, seed: tuple[int, ...]) -> None:
        self.make, self.size, self.seed = make, size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.make(np.random.default_rng((*self.seed, index)))


class Windows(Dataset):
    """Windows over one long sequence of tokens (an array, also a memory-mapped one), for language models.

    Window w starts at w · stride, the last one may be shorter. With stride < length the windows overlap, and only
    the tokens that no window before has held count: sliding-window evaluation, every token but the first is predicted
    once, with at least length - stride tokens of context. With stride = length (training) the first token of each
    window is not predicted.
    """

    def __init__(self, tokens: np.ndarray, length: int, stride: int | None = None) -> None:
        if len(tokens) < 2:
            raise ValueError(f"a text of {len(tokens)} tokens is too short: a language model needs two at least")
        self.tokens, self.length, self.stride = tokens, length, length if stride is None else stride
        if not 1 <= self.stride <= length:
            raise ValueError(f"stride must be between 1 and length={length}, not {stride}")

    def __len__(self) -> int:
        return 1 + -(-max(len(self.tokens) - self.length, 0) // self.stride)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.stride
        ids = torch.from_numpy(np.asarray(self.tokens[start : start + self.length], dtype=np.int64))
        labels = ids.clone()
        if index:
            labels[: self.length - self.stride] = IGNORED
        return {"input_ids": ids, "labels": labels}


class PackedDocuments(Dataset):
    """Whole documents one after another, as many as fit into `length` tokens; none is cut that is not longer.

    `bounds` (D + 1,): the token that each document begins with, and the end. Positions restart at 0 in every document,
    by which a model knows that none sees another, and its first token is not predicted. `size` examples of all there
    are: the first ones, or evenly `spread`.
    """

    def __init__(
        self, tokens: np.ndarray, bounds: np.ndarray, length: int, size: int | None = None, *, spread: bool = False
    ) -> None:
        bounds = np.asarray(bounds, dtype=np.int64)
        longer = np.flatnonzero(np.diff(bounds) > length)
        inside = [np.arange(bounds[i] + length, bounds[i + 1], length) for i in longer]
        self.tokens, self.starts = tokens, np.unique(np.concatenate([bounds, *inside]))  # (P + 1,)
        cuts = [int(self.starts[0])]
        while cuts[-1] < self.starts[-1]:
            cuts.append(int(self.starts[np.searchsorted(self.starts, cuts[-1] + length, "right") - 1]))
        self.cuts, total = np.asarray(cuts), len(cuts) - 1
        size = total if size is None else min(size, total)
        self.chosen = np.arange(size) * total // max(size, 1) if spread else np.arange(size)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        a, b = self.cuts[self.chosen[index] : self.chosen[index] + 2]
        ids = torch.from_numpy(np.asarray(self.tokens[a:b], dtype=np.int64))  # (n,)
        first, last = np.searchsorted(self.starts, [a, b])
        starts = torch.from_numpy(self.starts[first:last] - a)
        labels = ids.clone()
        labels[starts] = IGNORED
        place = torch.arange(len(ids))
        begun = torch.zeros_like(place)
        begun[starts] = starts
        return {"input_ids": ids, "labels": labels, "position_ids": place - begun.cummax(0)[0]}


def generated_splits(make: Callable[[np.random.Generator], Example], sizes: tuple[int, int, int], seed: int) -> Splits:
    """Training, validation and test examples of a generated task, each part from its own seeds."""
    return Splits(*(GeneratedDataset(make, size, (seed, part)) for part, size in enumerate(sizes)))


def with_validation(
    train: Dataset, test: Dataset, valid: int, seed: int, *, train_size: int | None, eval_size: int | None
) -> Splits:
    """Splits of a labelled data set that has no validation part: `valid` training examples, drawn by seed, become one.

    `train_size` and `eval_size` take a part of each, drawn too: files are often sorted by class.
    """
    rng = np.random.default_rng(seed)
    order, tests = rng.permutation(len(train)).tolist(), rng.permutation(len(test)).tolist()  # type: ignore[arg-type]
    if valid >= len(order):
        raise ValueError(f"valid must be less than the {len(order)} training examples, not {valid}")
    parts = (
        ("train_size", train_size, order[valid:]),
        ("eval_size", eval_size, order[:valid]),
        ("eval_size", eval_size, tests),
    )
    for key, size, part in parts:
        if (size or 0) > len(part):
            raise ValueError(f"{key} must be at most {len(part)}, the number of examples there are, not {size}")
    chosen = [part[:size] for _, size, part in parts]
    return Splits(Subset(train, chosen[0]), Subset(train, chosen[1]), Subset(test, chosen[2]))


def split_90_5_5(items: Any) -> tuple[Any, Any, Any]:
    """90 % to train, 5 % to validate, 5 % to test, in this order, of anything that can be sliced."""
    a, b = len(items) * 90 // 100, len(items) * 95 // 100
    return items[:a], items[a:b], items[b:]
