"""Masks of parts whose rule is no interval, kept between calls."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

import torch
from torch import Tensor

from subquad.supports.parts import Part

KEPT_BYTES = 1 << 26  # of the most recent masks
SLACK = 16  # entries behind the last one, which kernels may read: they go in whole vectors


class _MaskCache:
    """Masks of parts, the most recent ones, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes, self.lock = limit, 0, Lock()
        self.kept: OrderedDict[tuple[Part, torch.dtype], tuple[Tensor, Tensor | None]] = OrderedDict()

    def __call__(self, part: Part, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """What the part's rule adds to the scores, (A or 1, L, S), and which rows see nothing, (A or 1, L) or None."""
        with self.lock:
            found = self.kept.get((part, dtype))
            if found is not None:
                self.kept.move_to_end((part, dtype))
                return found
        found = self._make(part, dtype)
        size = found[0].numel() * found[0].element_size()
        with self.lock:
            if size <= self.limit // 8 and (part, dtype) not in self.kept:
                self.kept[part, dtype] = found
                self.bytes += size
            while self.bytes > self.limit:
                _, (mask, _) = self.kept.popitem(last=False)
                self.bytes -= mask.numel() * mask.element_size()
        return found

    @staticmethod
    def _make(part: Part, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        allowed = torch.from_numpy(part.allowed())  # (A or 1, L, S)
        empty = ~allowed.any(-1)  # (A or 1, L)
        room = allowed.new_zeros(allowed.numel() + SLACK, dtype=dtype)
        additive = room[: allowed.numel()].view(allowed.shape).masked_fill_(~allowed, -torch.inf)
        return additive, (empty if bool(empty.any()) else None)


kept_mask = _MaskCache(KEPT_BYTES)
