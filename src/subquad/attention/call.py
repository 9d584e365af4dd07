"""One call of a mechanism: what belongs to it beside q, k and v, and what it tells beside its output."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    """What belongs to one call beside q, k and v. Nothing of it outlives the call."""

    key_mask: Tensor | None = None  # bool (B, m), True = a real token
    lengths: Tensor | None = None  # int64 (B,): the tokens of a row stand in its first slots; None = in all of them
    seed: Tensor | None = None  # int64 (): everything random follows from it; None where nothing is
    dropout: float = 0.0
    training: bool = False
    slots: int = 0  # the length of the batch: what sizes follow that are left open
    shard: Any = None  # this process's part of the rows (`distributed.across.Piece`); None = the rows are whole

    @property
    def exists(self) -> Tensor | None:
        """The key mask as it broadcasts over heads, (B, 1, m)."""
        return None if self.key_mask is None else self.key_mask[:, None]


class Record(NamedTuple):
    """What one call has to tell beside its output; a mechanism fills in what it has."""

    density: Tensor | None = None  # (H,): sampled edges / possible edges
    auxiliary_loss: Tensor | None = None  # a term of the loss that the mechanism asks for
    statistics: Tensor | None = None  # sums for running averages: hand them to `update` after the step
    path: str | None = None  # which kernel ran, where there is a choice


def draw_seed() -> Tensor:
    """One number from torch's global generator: everything random in a call follows from it."""
    return torch.randint(2**62, (), device="cpu")
