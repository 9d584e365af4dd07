"""A sparsity pattern of one's own, given as masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from subquad.supports.pattern import Pattern
from subquad.supports.support import GivenSupport


@dataclass(frozen=True, kw_only=True, eq=False)
class Custom(GivenSupport, Pattern):
    """A user's own sets: `masks(n)` gives the p masks of length n, bool (p, n, n). A function of one's own may look at
    the length: who does not says so by `nested`.
    """

    masks: Callable[[int], Tensor]
    families: int = 1
    nested: bool = False

    @property
    def is_nested(self):
        return self.nested

    @property
    def longest(self):
        return getattr(self.masks, "length", None)

    def named(self, family, i):
        """From the sets of the one length that they are given for, or of one that seldom changes."""
        n = self.longest or 1 << int(i.max()).bit_length()
        if int(i.max()) >= n:
            raise ValueError(f"pattern: sets are for {n} tokens, position {int(i.max())} is beyond")
        return self._named(family, i, n)

    def rows(self, n, family, first, last):
        seen = self.masks(n)[:, first:last].cpu().numpy()  # (p, rows, n)
        seen = seen.any(0) if family is None else seen[family]
        return seen & (np.arange(n) <= np.arange(first, last)[:, None]) if self.causal else seen
