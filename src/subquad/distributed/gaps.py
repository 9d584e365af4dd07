"""Padding between the tokens of a row, in a model that is divided among processes.

A model closes such gaps before its attention sees the row, so a token may belong to another process than the one it was
given to. Tokens move once, before the model, and outputs move back behind it: in between rows are solid, and padding
stands at their end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from subquad.distributed import exchange
from subquad.distributed.layouts import Layout
from subquad.packing import closed_order, has_gaps


@dataclass(frozen=True, eq=False)
class Closing:
    """How the rows of a batch are closed and opened again."""

    layout: Layout  # the batch as it came
    order: Tensor  # int64 (B, n): the slot whose token stands at each place of a closed row

    @classmethod
    def of(cls, layout: Layout) -> Closing | None:
        """None where no row has a gap."""
        if layout.key_mask is None or not has_gaps(layout.key_mask):
            return None
        return cls(layout, closed_order(layout.key_mask))

    @property
    def inside(self) -> Layout:
        """The batch as the model sees it."""
        assert self.layout.key_mask is not None
        return replace(self.layout, key_mask=self.layout.key_mask.gather(1, self.order))

    def close(self, x: Any) -> Any:
        """This process's part of closed rows, from its slots (B, t, …); what is no such tensor stays as it is."""
        return self._moved(x, self.order)

    def open(self, x: Any) -> Any:
        """The slots of this process again, from its part of closed rows; also inside of tuples."""
        if isinstance(x, tuple):
            return tuple(self.open(each) for each in x)
        return self._moved(x, torch.argsort(self.order, dim=1)) if _has_width(x) else x

    def _moved(self, x: Any, order: Tensor) -> Any:
        if not isinstance(x, Tensor) or x.shape[:2] not in ((len(order), self.layout.length), (1, self.layout.length)):
            return x
        x = x.expand(len(order), *x.shape[1:])
        return exchange.reorder(self.layout.group, x, order.to(x.device), self.layout.slots(x.device))


def _has_width(x: Any) -> bool:
    """Is it one vector per token? Outputs (B, classes) are no tokens, whatever their sizes."""
    return isinstance(x, Tensor) and x.dim() > 2
