"""What a page keeps of a layer's weights: per query the largest, to tokens and to summaries, and exact statistics.

The mass of a summary is the sum of the weights of its tokens, and what its tokens have of it is averaged over the
queries, weighted by their masses (for a Combiner every query has the same p(j|Ω), so the average is exact).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from subquad.explorer.page import Blob, progressions

ROWS = 256  # queries at a time
DEEPEST = 64  # most weights of a query that are kept
MEMBERS = 16  # the shares inside summaries are kept where these have at most MEMBERS·n tokens in all


@dataclass(eq=False)
class Groups:
    """The summaries of a layer; query i sees the tokens of sets[rows[i]] through them and all others directly."""

    sets: list[Sequence[int]]
    rows: list[list[int]]

    @classmethod
    def of(cls, attention: Any, n: int) -> Groups:
        """None are told apart where the summaries of a query overlap: a mixture adds them up."""
        sets, rows = attention.summaries(n)
        sizes = [len(members) for members in sets]
        disjoint = all(sum(sizes[g] for g in row) <= n for row in rows) and n + len(sets) < 2**16
        disjoint = disjoint and all(_disjoint([sets[g] for g in rows[i]], n) for i in (0, n // 2, n - 1))
        return cls(sets, rows) if disjoint else cls([], [[] for _ in range(n)])

    def labels(self, row: tuple[int, ...], n: int) -> np.ndarray:
        """0 for a token that is seen directly, else 1 + the place of its summary in the row, int64 (n,)."""
        label = np.zeros(n, np.int64)
        for place, number in enumerate(row, 1):
            label[_places(self.sets[number])] = place
        return label


def _places(members: Sequence[int]) -> Any:
    return slice(members.start, members.stop, members.step) if isinstance(members, range) else list(members)


def _disjoint(sets: list[Sequence[int]], n: int) -> bool:
    count = np.zeros(n, np.int64)
    for members in sets:
        count[_places(members)] += 1
    return bool((count <= 1).all())


@dataclass(eq=False)
class Head:
    """The rows of one head: index (n, k) of tokens, or n + number of a summary, and weight (n, k), largest first."""

    index: np.ndarray
    weight: np.ndarray
    entropy: np.ndarray  # (n,) bits
    distance: np.ndarray  # (n,) Σ_j q(j|i)·|i - j|
    mass: np.ndarray  # (n,) what goes to summaries
    received: np.ndarray  # (n,) Σ_i q(j|i)
    degree: np.ndarray  # (n,) keys with a weight > 0
    shares: np.ndarray | None  # (Σ sizes,) what each token of each summary has of it


def keep(weights: np.ndarray, groups: Groups, tell: Callable[[str], Any] = lambda what: None) -> list[Head]:
    """(H, n, n) → its heads."""
    heads, n = weights.shape[:2]
    sizes = np.array([len(members) for members in groups.sets], np.int64)
    offsets = np.concatenate(([0], sizes.cumsum())).astype(np.int64)
    shares = np.zeros((heads, offsets[-1])) if groups.sets and offsets[-1] <= MEMBERS * n else None
    parts: list[list[np.ndarray]] = []
    received = np.zeros((heads, n))
    for first in range(0, n, ROWS):
        tell(f"largest weights, {first:,} of {n:,} tokens")
        rows = range(first, min(n, first + ROWS))
        block = weights[:, rows.start : rows.stop].astype(np.float32)  # (H, r, n)
        received += block.sum(1)
        parts.append(_block(block, rows, groups, shares, offsets))
    index, weight, entropy, distance, mass, degree = (np.concatenate(part, 1) for part in zip(*parts, strict=True))
    if shares is not None:
        _normalise(shares, offsets)
    inside = [None] * heads if shares is None else list(shares)
    return [
        Head(index[h], weight[h], entropy[h], distance[h], mass[h], received[h], degree[h], inside[h])
        for h in range(heads)
    ]


def _block(
    block: np.ndarray, rows: range, groups: Groups, shares: np.ndarray | None, offsets: np.ndarray
) -> list[np.ndarray]:
    """index, weight, entropy, distance, mass and degree of some queries: (H, r, k) or (H, r)."""
    heads, _, n = block.shape
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(block > 0, block * np.log2(block), 0).sum(-1)
    away = np.abs(np.arange(n) - np.array(rows)[:, None])  # (r, n)
    distance, degree = (block * away).sum(-1), (block > 0).sum(-1)
    widest = max((len(groups.rows[i]) for i in rows), default=0)
    masses, numbers = np.zeros((heads, len(rows), widest), np.float32), np.zeros((len(rows), widest), np.int64)
    made: dict[tuple[int, ...], np.ndarray] = {}
    for at, i in enumerate(rows):
        row = tuple(groups.rows[i])
        if not row:
            continue
        label = made.setdefault(row, groups.labels(row, n)) if row not in made else made[row]
        numbers[at, : len(row)] = row
        for h in range(heads):
            masses[h, at, : len(row)] = np.bincount(label, block[h, at], len(row) + 1)[1:]
        if shares is not None:
            for number in row:
                shares[:, offsets[number] : offsets[number + 1]] += block[:, at, _places(groups.sets[number])]
        block[:, at, label > 0] = 0  # from here on, weights of tokens that are seen directly
    k = min(DEEPEST, n)
    weight, index = (x.numpy() for x in torch.from_numpy(block).topk(k, -1))
    if widest:
        weight = np.concatenate((weight, masses), -1)
        index = np.concatenate((index, np.broadcast_to(n + numbers, masses.shape)), -1)
        order = np.argsort(-weight, -1, kind="stable")[..., : min(DEEPEST, weight.shape[-1])]
        weight, index = (np.take_along_axis(x, order, -1) for x in (weight, index))
    deep = DEEPEST - weight.shape[-1]
    weight, index = (np.pad(x, ((0, 0), (0, 0), (0, deep))) for x in (weight, index))
    return [index, weight, entropy, distance, masses.sum(-1), degree]


def _normalise(shares: np.ndarray, offsets: np.ndarray) -> None:
    for first, last in pairwise(offsets):
        total = shares[:, first:last].sum(1, keepdims=True)
        shares[:, first:last] /= np.where(total > 0, total, 1)


# ---- encoding ----


def encode(head: Head, k: int, more: Sequence[np.ndarray] = ()) -> str:
    """A head with at most k weights per query, and further arrays of bytes.

    Chunks: how many each query has (uint8), their indices in ascending order as differences (uint16), and the roots of
    their weights (65535 = 1) as low and high bytes; then, as uint16, 4096·entropy, 4·distance, 65535·mass,
    65535·√(received/n) and degree; the shares inside summaries as roots (uint8, 255 = 1).
    """
    n, index = len(head.index), head.index[:, :k]
    code = _root(head.weight[:, :k], 65535)
    order = np.argsort(np.where(code > 0, index, 2**31), -1, kind="stable")
    index, code = (np.take_along_axis(x, order, -1) for x in (index, code))
    there = code > 0
    steps = np.diff(index, axis=1, prepend=0)[there].astype("<u2")
    columns = [there.sum(1).astype(np.uint8), steps, (code[there] & 255).astype(np.uint8)]
    columns.append((code[there] >> 8).astype(np.uint8))
    statistics = (4096 * head.entropy, 4 * head.distance, 65535 * head.mass, _root(head.received / n, 65535))
    columns += [np.clip(np.round(x), 0, 65535).astype("<u2") for x in (*statistics, head.degree)]
    columns.append(np.zeros(0, np.uint8) if head.shares is None else _root(head.shares, 255).astype(np.uint8))
    blob = Blob()
    blob.chunks = [column.tobytes() for column in (*columns, *more)]
    return blob.text()


def _root(x: np.ndarray, one: int) -> np.ndarray:
    """Small numbers keep their digits: √x, in steps of 1/one."""
    return np.round(np.sqrt(np.clip(x, 0, 1)) * one).astype(np.uint16)


def encode_groups(groups: Groups) -> str:
    """The tokens of every summary, as progressions."""
    blob = Blob()
    blob.add_json([progressions(members) for members in groups.sets])
    return blob.text()
