"""Which rows of a batch follow which plan, and blocks of a sequence as views."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from subquad.supports.parts import Grid, Plan
from subquad.supports.support import plan_of


def plans(batch: int, lengths: Tensor | None, support: str, which: str, n: int) -> Iterator[tuple[slice, Plan]]:
    """Consecutive batch elements of equal length, and the plan of that length; empty elements are left out."""
    if lengths is None:
        yield slice(0, batch), plan_of(support, n, which)
        return
    sizes, first = lengths.tolist(), 0
    for b in range(1, batch + 1):
        if b == batch or sizes[b] != sizes[first]:
            if sizes[first] > 0:
                yield slice(first, b), plan_of(support, sizes[first], which)
            first = b


def grid_view(x: Tensor, grid: Grid) -> Tensor:
    """The blocks of a sequence as a view: (G, n, d) → (G, blocks, length, d)."""
    group, place, feature = x.stride()
    return x.as_strided(
        (x.shape[0], grid.blocks, grid.length, x.shape[2]),
        (group, grid.step * place, grid.stride * place, feature),
        x.storage_offset() + grid.start * place,
    )
