"""Rows of similar length together: a padded batch is computed in groups, each cut at its longest row.

Only for what is computed row by row and does not depend on the number of slots: padding that is cut off is neither
projected nor attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.values import readable

GROUPS = 4  # at most
LEAST = 1 << 21  # numbers in a batch from which groups pay
SPARED = 0.1  # share of the slots that must be saved


class Group(NamedTuple):
    """Rows of a batch, (g,), and how many of their slots are in use."""

    rows: Tensor
    longest: int

    def cut(self, x: Tensor) -> Tensor:
        """Of x (B, n, …) the slots of the group, (g, longest, …)."""
        return x[self.rows, : self.longest]


def length_groups(lengths: Tensor | None, x: Tensor) -> list[Group]:
    """The groups of a batch x (B, n, E) whose rows have so many slots in use, (B,); [] where they would not pay, or
    where nobody may look at the lengths.
    """
    if lengths is None or not readable(lengths) or len(x) < 2 or x.numel() < LEAST:
        return []
    order = lengths.argsort(descending=True)
    size = -(-len(order) // GROUPS)
    groups = [Group(rows, max(1, int(lengths[rows[0]]))) for rows in order.split(size)]
    computed = sum(len(group.rows) * group.longest for group in groups)
    return groups if computed <= (1 - SPARED) * x.shape[0] * x.shape[1] else []


def put_together(pieces: Sequence[Tensor], groups: Sequence[Group], n: int) -> Tensor:
    """The rows of all groups, (g, longest, E) each, as a batch (B, n, E), 0 behind the end of a group."""
    order = torch.cat([group.rows for group in groups]).argsort().tolist()
    rows = [row for piece in pieces for row in piece.unbind()]
    zeros = pieces[0].new_zeros(n, pieces[0].shape[2])
    parts = [part for i in order for part in (rows[i], zeros[: n - len(rows[i])])]  # one after the other in memory
    return torch.cat(parts).view(len(rows), n, -1)
