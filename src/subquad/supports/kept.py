"""What streaming keeps: which tokens and summaries a query that is still to come can name, and in which slots they are.

A causal support names keys by the position of the query alone, so the keys that queries at positions ≥ L can still
name are known at L. They are kept in rows of slots, each for entries of one source: the tokens (source 0), or the
summaries of the spans of `unit` tokens. The entries of a row of length L are 0 … ⌊L/unit⌋ - 1.

    ring        slot j holds the newest entry e with e mod size = j: the last `size` entries
    otherwise   slot j holds entry start + j·step: the first ones, every w-th one, or all of them (size 0: it grows)

A token that several of them would hold counts in the first of these alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Kept(NamedTuple):
    """One row of slots; see above."""

    source: int = 0
    size: int = 0  # slots; 0 = it grows with the entries
    unit: int = 1  # tokens of an entry
    ring: bool = False
    reach: int = 0  # ring: how many entries before its newest one a query may name
    start: int = 0
    step: int = 1

    def holds(self, entry: Tensor) -> Tensor:
        """Which entries it would hold, of those that ever come."""
        if self.ring:
            return torch.ones_like(entry, dtype=torch.bool)
        inside = entry >= self.start if self.step == 1 else (entry - self.start) % self.step == 0
        return inside & (entry < self.start + self.size * self.step) if self.size else inside

    def slots(self, entry: Tensor) -> Tensor:
        """The slot of an entry that it holds."""
        return entry % self.size if self.ring else (entry - self.start) // self.step

    def entries(self, count: Tensor, slots: int) -> Tensor:
        """The entries in its first `slots` slots, for rows that have `count` (B,) entries: (B, slots), -1 = none."""
        slot, newest = torch.arange(slots, device=count.device), count[:, None] - 1
        if self.ring:
            return (newest - (newest - slot) % self.size).clamp(min=-1)
        entry = (self.start + slot * self.step).expand(len(count), slots)
        return torch.where(entry <= newest, entry, -1)

    def slices(self, entries: range) -> list[slice]:
        """The slots of a run of entries that it holds: one slice, or two where a ring comes round."""
        if not entries:
            return []
        if not self.ring:
            return [slice((entries[0] - self.start) // self.step, (entries[-1] - self.start) // self.step + 1)]
        first, stop = entries[0] % self.size, entries[-1] % self.size + 1
        return [slice(first, stop)] if first < stop else [slice(first, self.size), slice(0, stop)]

    def used(self, count: int) -> int:
        """How many slots `count` entries fill."""
        wanted = count if self.ring else max(0, -(-(count - self.start) // self.step))
        return min(wanted, self.size) if self.size else wanted


def recent(reach: int, margin: int, *, source: int = 0, unit: int = 1) -> Kept:
    """The newest entry, `reach` before it, and those of `margin` tokens more, so that these can be taken back."""
    return Kept(source, reach + 2 + -(-margin // unit) if unit > 1 else reach + 1 + margin, unit, True, reach)


def first_ones(size: int) -> Kept:
    return Kept(size=size)


EVERYTHING = (Kept(),)

Ranges = list[tuple[int, range]]  # what one query sees: runs of entries, each with the number of its row of slots
