"""The support of the Long-Short Transformer: home segments with margins, and summaries of all tokens or of segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad.supports.builders import rows_to_keys
from subquad.supports.parts import FAR, Grid, Part, Plan, make_plan
from subquad.supports.support import Support, Within


@dataclass(frozen=True, kw_only=True)
class LongShort(Support):
    """Query i sees the tokens of its home segment of `window` tokens and a margin on its sides (`margins`), and

    - bidirectional: `rank` summaries of all tokens
    - causal: nothing behind itself, and the `rank` summaries of every segment of `segment` tokens before its own
    """

    window: int
    rank: int
    segment: int

    @property
    def margins(self) -> tuple[int, int]:
        """Tokens before and behind the home segment."""
        return (self.window, 0) if self.causal else (self.window // 2, self.window // 2)

    def near(self, n: int) -> Tensor:
        """Which tokens are seen directly: bool (n, n)."""
        (left, right), i, j = self.margins, torch.arange(n)[:, None], torch.arange(n)
        home = i // self.window * self.window
        seen = (j >= home - left) & (j < home + self.window + right)
        return seen & (j <= i) if self.causal else seen

    def far(self, n: int) -> Tensor:
        """Which summaries are seen: bool (n, summaries)."""
        if not self.causal:
            return torch.ones(n, self.rank, dtype=torch.bool)
        summary = torch.arange(-(-n // self.segment) * self.rank)
        return summary // self.rank < torch.arange(n)[:, None] // self.segment

    def plan(self, n: int, which: str) -> Plan:
        return make_plan(self._homes(n) + self._summaries(n), n)

    def within(self, which: str, length: Any) -> Within:
        count = -(-length // self.segment) * self.rank if self.causal else length * 0 + self.rank
        return Within(length, (length, count))

    def _homes(self, n: int) -> list[Part]:
        (left, right), w = self.margins, self.window
        hi, count = 0 if self.causal else FAR, -(-n // w)
        first = min(count, -(-left // w))  # homes whose margin would begin before the first token …
        last = max(first, (n - right) // w)  # … and from here on, end behind the last
        parts = []
        if last > first:
            queries = Grid(first * w, last - first, w, w)
            parts.append(Part(queries, Grid(first * w - left, last - first, w, w + left + right), hi=hi))
        for a in (*range(first), *range(last, count)):
            stop = (a + 1) * w
            keys = range(max(0, a * w - left), min(n, stop + right))
            parts += rows_to_keys(range(a * w, min(n, stop)), keys, hi=hi)
        return parts

    def _summaries(self, n: int) -> list[Part]:
        r, size = self.rank, self.segment
        if not self.causal:
            return rows_to_keys(range(n), range(r), source=1)
        done = (n - 1) // size  # segments that some query lies behind
        if r <= done:  # few summaries each: the c-th of all segments at once, in place where it is complete
            where, behind = range(size, done * size + 1, size), range(size, n)
            columns = [range(c, done * r, r) for c in range(r)]
            return [part for keys in columns for part in rows_to_keys(behind, keys, positions=where, source=1, hi=0)]
        homes = ((a, range(a * size, min(n, (a + 1) * size))) for a in range(1, done + 1))
        return [part for a, rows in homes for part in rows_to_keys(rows, range(a * r), source=1)]
