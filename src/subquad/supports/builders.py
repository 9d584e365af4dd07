"""Parts of the usual forms: rectangles, sliding windows, diagonal blocks, columns of a grid, slices."""

from __future__ import annotations

from typing import Any

from subquad.supports.parts import FAR, Grid, Part

CHUNKS = 8  # a causal cross part is cut into this many row chunks, each with only the keys it can see


def rows_to_keys(
    rows: range, keys: range, *, positions: range | None = None, source: int = 0, **rules: Any
) -> list[Part]:
    """Every query of `rows` to every key of `keys` that the rules allow.

    Where the rules cut the keys to a triangle, the rows go in chunks and each chunk takes only the keys that some row
    of it can see: half of the work of the full rectangle.
    """
    if not rows or not keys:
        return []
    where = keys if positions is None else positions
    limited = rules.get("hi", FAR) < where[-1] - rows[0] or rules.get("lo", -FAR) > where[0] - rows[-1]
    size = max(128, -(-len(rows) // CHUNKS)) if limited else len(rows)
    parts = []
    for first in range(0, len(rows), size):
        chunk = rows[first : first + size]
        low, high = chunk[0] + rules.get("lo", -FAR), chunk[-1] + rules.get("hi", FAR)
        first_key, last_key = max(0, -(-(low - where[0]) // where.step)), (high - where[0]) // where.step
        cut = slice(first_key, max(0, last_key + 1))
        if keys[cut]:
            parts.append(Part(Grid.of(chunk), Grid.of(keys[cut]), source, Grid.of(where[cut]), **rules))
    return parts


def windows(start: int, stop: int, left: int, right: int, *, block: int | None = None) -> list[Part]:
    """Sliding windows over the tokens [start, stop): query i sees i-left … i+right of them.

    Blocks of `block` queries share a strip of block+left+right keys; the strips overlap as views.
    """
    n = stop - start
    if n <= 0:
        return []
    left, right = min(left, n - 1), min(right, n - 1)
    block = block or window_block(left + right)
    head = -(-left // block) * block  # queries whose strip would begin before `start`
    tail = max(head, (n - right) // block * block)  # … would end behind `stop`
    if tail - head < 2 * block:  # hardly an interior: one rectangle
        return rows_to_keys(range(start, stop), range(start, stop), lo=-left, hi=right)
    rule: dict[str, Any] = {"lo": -left, "hi": right}
    parts = rows_to_keys(range(start, start + head), range(start, start + head + right), **rule)
    blocks, strip = (tail - head) // block, block + left + right
    queries = Grid(start + head, blocks, block, block)
    parts.append(Part(queries, Grid(start + head - left, blocks, block, strip), **rule))
    return parts + rows_to_keys(range(start + tail, stop), range(start + tail - left, stop), **rule)


def window_block(reach: int) -> int:
    """Queries per block for a window of `reach`: small blocks waste less of the strip, large ones run faster."""
    return 48 if reach <= 32 else 96 if reach <= 96 else 192


def diagonal(start: int, stop: int, size: int, *, causal: bool) -> list[Part]:
    """Diagonal blocks of `size`: every query sees its own block (up to itself when causal)."""
    hi = 0 if causal else FAR
    full, rest = divmod(stop - start, size)
    grids = [Grid(start, full, size, size)] if full else []
    grids += [Grid(start + full * size, 1, 0, rest)] if rest else []
    return [Part(grid, grid, hi=hi) for grid in grids]


def columns(n: int, stride: int, *, causal: bool, xlo: int = 1, xhi: int = 0) -> list[Part]:
    """Residue classes modulo `stride`: the columns of a row-major grid with `stride` columns.

    The columns that reach into the partial last row are one token longer, so they are a part of their own.
    """
    rows, rest = divmod(n, stride)
    rule: dict[str, Any] = {"hi": 0 if causal else FAR, "xlo": xlo, "xhi": xhi}
    grids = [Grid(0, rest, 1, rows + 1, stride), Grid(rest, stride - rest, 1, rows, stride)]
    return [Part(grid, grid, **rule) for grid in grids if grid.blocks and grid.length]


def selves(n: int) -> list[Part]:
    """Every token sees itself."""
    return [Part(Grid(0, n, 1), Grid(0, n, 1))] if n else []


def strips(n: int, size: int, lo: int, hi: int, *, source: int = 0, causal: bool = False) -> list[Part]:
    """Queries of slice t to the keys t·size+lo … t·size+hi-1 that exist: a part per run of equal slices."""
    runs: list[tuple[tuple[int, int, int], int, int]] = []  # (rows, low, high), first slice, slices
    for t in range(-(-n // size)):
        first = t * size
        shape = (min(size, n - first), max(lo, -first), min(hi, n - first))
        if runs and runs[-1][0] == shape:
            runs[-1] = (shape, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((shape, t, 1))
    return [
        Part(
            Grid(t * size, many, size, rows),
            Grid(t * size + low, many, size, high - low),
            source,
            hi=0 if causal else FAR,
        )
        for (rows, low, high), t, many in runs
        if low < high
    ]
