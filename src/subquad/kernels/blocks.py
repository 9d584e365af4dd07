"""Blocks: the regular pieces of which structured attention is made.

A structured support is a union of *parts*. A part is a grid of equal blocks: in block a, `q_len` queries
attend to `k_len` keys,

    query (a, r) stands at  q_start + a·q_step + r·q_stride
    key   (a, s) stands at  k_start + a·k_step + s·k_stride   of its source (the tokens, or summaries of them)

and may see it when the offset  position(key) - position(query)  lies in [lo, hi] and not in [xlo, xhi].
Sliding windows, diagonal blocks, grid columns and "everyone to these few" are all of this form. The grids are
strided *views* of the sequence, so no length needs padding and nothing is copied: what sticks out at either
end is a part of its own. A part is a tuple of integers, which is what lets a compiled graph carry it.

Where keys stand in no regular place, a part may *draw*: block a takes `draws` blocks of its source, each as long
as k_len / draws, whose numbers stand in the plan's list of drawn blocks from k_start + a·k_step on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

FAR = 1 << 40  # an offset that no sequence reaches: "no limit"
NODES, NODES_BACK, MEMBERS = 1, 2, 3  # relations of a binary tree: `Part.rule`
CHUNKS = 8  # a causal cross part is cut into this many row chunks, each with only the keys it can see


class Part(NamedTuple):
    """One grid of query blocks × key blocks; see the module docstring."""

    q_start: int
    blocks: int
    q_step: int
    q_len: int
    q_stride: int
    k_start: int
    k_step: int
    k_len: int
    k_stride: int
    source: int = 0  # which key set: 0 = the tokens
    p_start: int = 0  # position of key (a, s): p_start + a·p_step + s·p_stride (tokens: same as k_*)
    p_step: int = 0
    p_stride: int = 0
    lo: int = -FAR
    hi: int = FAR
    xlo: int = 1  # an empty interval: nothing excluded
    xhi: int = 0
    draws: int = 0  # > 0: the keys are that many drawn blocks of the source
    fresh: int = 0  # 1: no earlier part has touched these queries (set by `plan`)
    rule: int = 0  # 0: the intervals above; else a relation of a binary tree, see `_binary`

    @property
    def is_self(self) -> bool:
        """One key per query, its own: the product is elementwise, a matrix kernel would crawl."""
        return self.q_len == 1 and self.k_len == 1

    def offsets(self, device: torch.device | None = None) -> Tensor:
        """position(key) - position(query), (blocks or 1, q_len, k_len)."""
        same = self.q_step == self.p_step or self.blocks == 1  # every block has the same offsets
        block = torch.arange(1 if same else self.blocks, device=device)[:, None, None]  # (A, 1, 1)
        row = torch.arange(self.q_len, device=device)[:, None]  # (L, 1)
        key = torch.arange(self.k_len, device=device)  # (S,)
        drift = self.p_step - self.q_step
        return self.p_start - self.q_start + block * drift + key * self.p_stride - row * self.q_stride

    def allowed(self, device: torch.device | None = None) -> Tensor:
        """Who may see whom inside the blocks: bool (blocks or 1, q_len, k_len)."""
        if self.rule:
            return self._binary(device)
        offset = self.offsets(device)
        inside = (offset >= self.lo) & (offset <= self.hi)
        return inside & ~((offset >= self.xlo) & (offset <= self.xhi))

    def _binary(self, device: torch.device | None) -> Tensor:
        """Relations of a binary (Fenwick) tree, the same in every block: bool (1, q_len, k_len).

        Node m ≥ 1 holds the lowbit(m) tokens m - lowbit(m) … m-1 and stands at place m-1, relative to its block.
        NODES: query r sees the nodes whose tokens make up 0 … r-1, and itself where it is a node of its own.
        NODES_BACK: the mirror image of it, without itself. MEMBERS: node r+1 sees the tokens that it holds.
        """
        row = torch.arange(self.q_len, device=device)[:, None] * self.q_stride  # (L, 1)
        key = self.k_start - self.q_start + torch.arange(self.k_len, device=device) * self.k_stride  # (S,)
        if self.rule == MEMBERS:
            node = row + 1
            return ((key >= node - (node & -node)) & (key < node))[None]
        if self.rule == NODES_BACK:
            row, node = self.q_len - 1 - row, self.q_len - key
            return (row & -(node & -node) == node)[None]
        node = key + 1
        return ((row & -(node & -node) == node) | ((key == row) & (key % 2 == 0)))[None]

    def is_triangle(self) -> bool:
        """Row r sees exactly the keys 0..r of its block: the kernel's own causal flag does it."""
        aligned = self.p_start == self.q_start and (self.blocks == 1 or self.p_step == self.q_step)
        return (
            aligned
            and not self.rule
            and self.q_len == self.k_len
            and self.p_stride == self.q_stride > 0
            and self.hi == 0
            and self.lo <= -self.p_stride * (self.k_len - 1)
            and self.xlo > self.xhi
        )

    def extent(self) -> tuple[int, int]:
        """The smallest and the largest offset that occurs."""
        last = (self.blocks - 1) * (self.p_step - self.q_step)
        base = self.p_start - self.q_start
        rows, keys = (self.q_len - 1) * self.q_stride, (self.k_len - 1) * self.p_stride
        return base + min(0, last) - rows, base + max(0, last) + keys

    def sees_everything(self) -> bool:
        low, high = self.extent()
        return (
            not self.rule
            and self.lo <= low
            and high <= self.hi
            and (self.xlo > self.xhi or self.xhi < low or self.xlo > high)
        )


def part(queries: tuple[int, int, int, int, int], keys: tuple[int, int, int, int], **rules: int) -> Part:
    """A part over the tokens themselves: positions are where the keys are stored.

    queries = (start, blocks, step, length, stride), keys = (start, step, length, stride).
    """
    return Part(*queries, *keys, p_start=keys[0], p_step=keys[1], p_stride=keys[3], **rules)


def rows_to_keys(
    rows: range, keys: range, *, positions: range | None = None, source: int = 0, **rules: int
) -> list[Part]:
    """Every query of `rows` to every key of `keys` that the rules allow.

    Where the rules cut the keys to a triangle, the rows go in chunks and each chunk takes only the keys that
    some row of it can see: half of the work of the full rectangle.
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
        k, p = keys[first_key : max(0, last_key + 1)], where[first_key : max(0, last_key + 1)]
        if not k:
            continue
        queries = (chunk[0], 1, 0, len(chunk), chunk.step)
        parts.append(
            Part(*queries, k[0], 0, len(k), k.step, source, p_start=p[0], p_stride=p.step, **rules)  # one block
        )
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
    queries = (start + head, blocks, block, block, 1)
    parts.append(part(queries, (start + head - left, block, strip, 1), **rule))
    return parts + rows_to_keys(range(start + tail, stop), range(start + tail - left, stop), **rule)


def window_block(reach: int) -> int:
    """Queries per block for a window of `reach`: small blocks waste less of the strip, large ones run faster."""
    return 32 if reach <= 32 else 64 if reach <= 256 else 128


def diagonal(start: int, stop: int, size: int, *, causal: bool) -> list[Part]:
    """Diagonal blocks of `size`: every query sees its own block (up to itself when causal)."""
    hi = 0 if causal else FAR
    full, rest = divmod(stop - start, size)
    parts = []
    if full:
        parts.append(part((start, full, size, size, 1), (start, size, size, 1), hi=hi))
    if rest:
        first = start + full * size
        parts.append(part((first, 1, 0, rest, 1), (first, 0, rest, 1), hi=hi))
    return parts


def columns(n: int, stride: int, *, causal: bool, xlo: int = 1, xhi: int = 0) -> list[Part]:
    """Residue classes modulo `stride`: the columns of a row-major grid with `stride` columns.

    The columns that reach into the partial last row are one token longer, so they are a part of their own.
    """
    rows, rest = divmod(n, stride)
    rule = {"hi": 0 if causal else FAR, "xlo": xlo, "xhi": xhi}
    parts = []
    for first, count, length in ((0, rest, rows + 1), (rest, stride - rest, rows)):
        if count and length:
            parts.append(part((first, count, 1, length, stride), (first, 1, length, stride), **rule))
    return parts


def selves(n: int) -> list[Part]:
    """Every token sees itself."""
    return [part((0, n, 1, 1, 1), (0, 1, 1, 1))] if n else []


def plan(parts: Iterable[Part], n: int, drawn: Iterable[int] = ()) -> tuple[int, ...]:
    """Number of parts, the parts in order (each marked `fresh` when no earlier part touched its queries), the drawn
    blocks: a flat tuple of integers.
    """
    touched = torch.zeros(n, dtype=torch.bool)
    parts = list(parts)
    flat: list[int] = [len(parts)]
    for p in parts:
        view = touched.as_strided((p.blocks, p.q_len), (p.q_step, p.q_stride), p.q_start)
        flat.extend(p._replace(fresh=int(not view.any())))
        view.fill_(True)
    return (*flat, *drawn)


def unplan(flat: Sequence[int]) -> list[Part]:
    """The parts of a plan."""
    width = len(Part._fields)
    return [Part(*flat[1 + i * width : 1 + (i + 1) * width]) for i in range(flat[0])]


def drawn_blocks(flat: Sequence[int]) -> Sequence[int]:
    """The drawn blocks of a plan."""
    return flat[1 + flat[0] * len(Part._fields) :]
