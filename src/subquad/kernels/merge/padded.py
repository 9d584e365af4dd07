"""Padded batches on a GPU: rows of their own length under the plan of the whole batch.

The plan of a row depends on its length, and to read that the host would have to wait for the device. Most plans of
fewer tokens are the first queries and keys of the plan of more tokens (`Support.within`): there the whole batch follows
one plan, with masks that are made on the device. Mirror images (`Support.halves`) follow the plan of the whole batch
where rows end at the last slot (`mirrored`), and pairs of other places are put beside it (`Support.beside`). Where sets
depend on the length in any other way, the lengths are read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from subquad.supports.support import parse


class Padded(NamedTuple):
    """What takes the place of the lengths."""

    valid: list[Tensor]  # (B, 1, m) per source: the keys that exist
    behind: Tensor  # bool (B, 1, r): the queries behind the end of their row

    def cut(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Queries behind the end of a row see nothing."""
        return out.masked_fill(self.behind[..., None], 0), lse.masked_fill(self.behind, -torch.inf)

    def give_nothing(self, grad: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """They get no gradient: weights are exp(s - lse)."""
        return grad.masked_fill(self.behind[..., None], 0), lse.masked_fill(self.behind, torch.inf)


def padded(
    q: Tensor, keys: list[Tensor], valid: list[Tensor], lengths: Tensor, support: str, which: str
) -> Padded | None:
    """None where rows of their own length need plans of their own."""
    part = parse(support).within(which, lengths)
    if part is None:
        return None
    masks = []
    for source, x in enumerate(keys):
        exists = torch.arange(x.shape[2], device=q.device) < part.keys[source][:, None]  # (B, m)
        masks.append(exists[:, None] & valid[source] if valid else exists[:, None])
    return Padded(masks, (torch.arange(q.shape[2], device=q.device) >= part.rows[:, None])[:, None])
