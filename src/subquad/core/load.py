"""Times that can be trusted: the load of other programs, and the spread of what was measured."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BUSY = 0.15  # share of the machine that other programs may use
WIDE = 1.5  # upper quartile / lower quartile of the ratios beyond which they say nothing


def quartiles(values: Sequence[float]) -> list[float] | None:
    """[lower quartile, median, upper quartile]; None without values."""
    if not values:
        return None
    return statistics.quantiles(values, method="inclusive") if len(values) > 1 else [float(values[0])] * 3


def why_busy(share: float | None, ratios: dict[str, Sequence[float]]) -> str | None:
    """Why times are not to be trusted, None if they are: the share of the machine that other programs used, and
    name → quartiles of its time relative to a reference.
    """
    if share is not None and share > BUSY:
        return f"other programs used {100 * share:.0f} % of the machine during the measurement"
    spreads = {name: high / low for name, (low, _, high) in ratios.items() if low > 0}
    name = max(spreads, key=lambda each: spreads[each], default=None)
    if name is not None and spreads[name] > WIDE:
        return f"the quartiles of {name}'s relative cost are a factor of {spreads[name]:.1f} apart"
    return None


class OtherLoad:
    """The share of all cores that other programs use meanwhile: so far, and after the end that of the whole block.

    `share` is None where the system does not tell.
    """

    ended: tuple[float, float, float] | None = None

    def __enter__(self) -> OtherLoad:
        self.started = self._now()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.ended = self._now()

    @property
    def share(self) -> float | None:
        until = self.ended or self._now()
        if self.started is None or until is None:
            return None
        busy, own, total = (after - before for after, before in zip(until, self.started, strict=True))
        return max(0.0, busy - own) / total if total > 0 else None

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """(busy seconds of all cores, of this process, all seconds of all cores), from /proc/stat."""
        try:
            numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        idle = numbers[3] + numbers[4]  # idle and waiting for a disk
        return (sum(numbers) - idle) / ticks, time.process_time(), sum(numbers) / ticks
