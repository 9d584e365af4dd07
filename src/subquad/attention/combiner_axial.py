"""Combiner-Axial (Ren et al. 2021, section 4.3 and appendix C): the sequence as a grid of rows × cols, row by row.

    vertical    direct: own row and own column; groups: every other column without the own row's element
    horizontal  direct: own row and own column; groups: every other row without the own column's element
    rowmajor    direct: own row; groups: every other row, asked by the token of that row in the own column

Causal: the row up to i, the column above, columns and rows above. A summary is pooled from its members (vertical:
prefix maxima down the columns; horizontal: the maximum of all others of the row), and its value is its members'
softmax with the pooled query. In rowmajor nothing is pooled: with q at (row, own column) as local query,
p(j|Ω) = softmax_j(q·k_j), the summary's key is Σ_j p(j|Ω) k_j, and DeepSets act on that q and these k_j; so
max and mean are the same there. A local query that does not exist (padding, or a last row too short) is 0.
`split` gives horizontal two groups per row, strictly left and strictly right of the own column.

    O(n·(rows + cols)), every step over strided blocks: a summary of vertical stands at the last token it holds
    (causal) or at the place it leaves out, one of horizontal and rowmajor at (row, asking column).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.abstraction import anyone, others, pooled, prefixes
from subquad.attention.combiner import Combiner, CombinerOptions
from subquad.core.options import option
from subquad.kernels.blocks import FAR, Part, diagonal, part, plan
from subquad.kernels.merge import merge_attention
from subquad.supports.partitions import AxialHorizontal, AxialRowmajor, AxialVertical, Partition, root

# A *kind* is one set of summaries: vertical, horizontal, left, right (the halves of a split horizontal), rowmajor.


# ---- plans: which blocks attend to which --------------------------------------------------------------------


def _shape(n: int, c: int) -> tuple[int, int]:
    """Rows of the grid, and how many tokens the last one has."""
    rows = -(-n // c)
    return rows, n - (rows - 1) * c


def _columns(
    n: int, c: int, causal: bool, *, source: int | None = None, first: int = 0, last: int | None = None
) -> list[Part]:
    """Each token to the other rows of its column (causal: above), for the columns first … last-1.

    To their tokens (source None) or to the summaries there, which without causality fill a whole last row.
    """
    rows, rest = _shape(n, c)
    last = c if last is None else last
    parts = []
    for low, high, length in ((first, min(rest, last), rows), (max(rest, first), last, rows - 1)):
        count, keys = high - low, length if causal or source is None else rows
        if count <= 0 or length < 1:
            continue
        if not causal:  # the own row is attended in the row
            where = {"p_start": low, "p_step": 1, "p_stride": c, "xlo": 0, "xhi": 0}
            parts.append(Part(low, count, 1, length, c, low, 1, keys, c, source or 0, **where))
        elif length > 1:  # row r sees rows 0 … r-1: counted from row 1, a triangle
            where = {"p_start": low + c, "p_step": 1, "p_stride": c, "hi": 0}
            parts.append(Part(low + c, count, 1, length - 1, c, low, 1, length - 1, c, source or 0, **where))
    return parts


def _across(n: int, c: int, causal: bool, source: int) -> list[Part]:
    """Vertical: each row to one row of summaries, its own or, causal, the one above; not to the own column's."""
    rows, rest = _shape(n, c)
    up = c if causal else 0
    rule = {"source": source, "p_step": c, "p_stride": 1, "xlo": -up, "xhi": -up}
    parts = []
    if rows - 1 > bool(causal):
        blocks = rows - 1 - bool(causal)
        parts.append(Part(up, blocks, c, c, 1, 0, c, c, 1, p_start=0, **rule))
    start = (rows - 1) * c
    return [*parts, Part(start, 1, 0, rest, 1, start - up, 0, c, 1, p_start=start - up, **rule)]


@lru_cache(maxsize=64)
def _main_plan(n: int, c: int, causal: bool, kinds: tuple[str, ...]) -> tuple[int, ...]:
    """Own row, own column (rowmajor alone has none), and the summaries of every kind, sources 1, 2, …"""
    rows, _ = _shape(n, c)
    parts = diagonal(0, n, c, causal=causal)
    if rows > 1 and set(kinds) != {"rowmajor"}:
        parts += _columns(n, c, causal)
    return plan(parts + _group_parts(n, c, causal, kinds, 1), n)


def _group_parts(n: int, c: int, causal: bool, kinds: tuple[str, ...], first: int) -> list[Part]:
    """The summaries of every kind, sources first, first + 1, …"""
    parts: list[Part] = []
    for source, kind in enumerate(kinds, first):
        if not has_groups(n, c, kind):
            continue
        if kind == "vertical":
            parts += _across(n, c, causal, source)
        else:
            ends = {"left": (1, c), "right": (0, c - 1)}.get(kind, (0, c))  # nothing left of the first column
            parts += _columns(n, c, causal, source=source, first=ends[0], last=ends[1])
    return parts


@lru_cache(maxsize=64)
def _mean_plans(n: int, c: int, causal: bool, kinds: tuple[tuple[str, ...], ...]) -> tuple[int, ...]:
    """For `mixture_merge`: own row and own column, then each component's summaries, every plan after its length."""
    plans = [_main_plan(n, c, causal, ())]
    plans += [plan(_group_parts(n, c, causal, own, 0), n) for own in kinds]
    return tuple(number for flat in plans for number in (len(flat), *flat))


@lru_cache(maxsize=64)
def _member_plan(n: int, c: int, causal: bool, kind: str) -> tuple[int, ...]:
    """How the summaries attend to their members; causal, only complete rows are ever summarised."""
    rows, rest = _shape(n, c)
    if kind == "vertical":
        if causal:
            return plan([part((0, c, 1, rows - 1, c), (0, 1, rows - 1, c), hi=0)], (rows - 1) * c)
        lengths = ((0, rest, rows), (rest, c - rest, rows - 1))
        parts = [part((a, m, 1, rows, c), (a, 1, size, c), xlo=0, xhi=0) for a, m, size in lengths if m and size]
        return plan(parts, rows * c)
    low, high = {"left": (-FAR, -1), "right": (1, FAR)}.get(kind, (-FAR, FAR))
    hole = {"xlo": 0, "xhi": 0} if kind == "horizontal" else {}
    parts = [part((0, rows - 1, c, c, 1), (0, c, c, 1), lo=low, hi=high, **hole)]
    if not causal:
        start = (rows - 1) * c
        parts.append(part((start, 1, 0, c, 1), (start, 0, rest, 1), lo=low, hi=high, **hole))
    return plan(parts, (rows - bool(causal)) * c)


def has_groups(n: int, c: int, kind: str) -> bool:
    """One row has no other rows; one column has no other columns."""
    return n > c and (c > 1 or kind == "rowmajor")


# A compiled graph takes these as constants of the length it was made for.
@torch.compiler.assume_constant_result
def _main(n: int, c: int, causal: bool, kinds: tuple[str, ...]) -> tuple[int, ...]:
    return _main_plan(n, c, causal, kinds)


@torch.compiler.assume_constant_result
def mean_plans(n: int, c: int, causal: bool, kinds: tuple[tuple[str, ...], ...]) -> tuple[int, ...]:
    return _mean_plans(n, c, causal, kinds)


@torch.compiler.assume_constant_result
def _members(n: int, c: int, causal: bool, kind: str) -> tuple[int, ...]:
    return _member_plan(n, c, causal, kind)


@torch.compiler.assume_constant_result
def default_cols(n: int) -> int:
    return root(n)


# ---- summaries ----------------------------------------------------------------------------------------------


def _grid(x: Tensor, rows: int, c: int) -> Tensor:
    """(B, H, n, …) → (B, H, rows, c, …), cut or filled up with zeros."""
    n, wanted = x.shape[2], rows * c
    if n < wanted:
        x = torch.cat((x, x.new_zeros(*x.shape[:2], wanted - n, *x.shape[3:])), 2)
    return x[:, :, :wanted].unflatten(2, (rows, c))


def _pools(kind: str, causal: bool):
    if kind == "vertical":
        return prefixes(2) if causal else others(2)
    return {"horizontal": others(3), "left": prefixes(3), "right": prefixes(3, backwards=True)}[kind]


def _place(x: Tensor, kind: str) -> Tensor:
    """To where it is asked for: what ends in a column is the left group of the next one, and the reverse."""
    if kind == "left":
        x = F.pad(x[:, :, :, :-1], (0, 0, 1, 0))
    elif kind == "right":
        x = F.pad(x[:, :, :, 1:], (0, 0, 0, 1))
    return x.flatten(2, 3)  # (B, H, rows·c, d)


def summaries(module: Combiner, kind: str, q, k, v, exists, c: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values (B, H, m, d) of one kind's groups, and which exist, bool (B, 1, m) or None = all."""
    n, causal, scale = q.shape[2], module.options.causal, module.options.softmax_scale
    rows = -(-n // c) - causal
    members, valid = _members(n, c, causal, kind), [exists]
    real = exists
    if real is None and rows * c > n:  # a partial last row
        real = torch.ones(1, 1, n, dtype=torch.bool, device=q.device)
    real = None if real is None else _grid(real, rows, c)[..., None]  # (B, 1, rows, c, 1)
    fq, fk = module.abstraction.features(q, k)
    if kind == "rowmajor":
        query = _grid(fq, rows, c)
        query = (query if real is None else query.masked_fill(~real, 0)).flatten(2, 3)
        key = merge_attention(query, [k], [fk], members, scale=scale, valid=valid)
        value = merge_attention(query, [k], [v], members, scale=scale, valid=valid)
        alive = None if real is None else real.any(3, keepdim=True).expand(real.shape).flatten(2)
        return key, value, alive
    pools = _pools(kind, causal)
    query, key = (_place(pooled(_grid(x, rows, c), module.abstraction.pool, real, pools), kind) for x in (fq, fk))
    value = merge_attention(query, [k], [v], members, scale=scale, valid=valid)
    alive = None if real is None else _place(anyone(real, pools), kind)[..., 0]
    return key, value, alive


def all_summaries(sets: list[tuple[Combiner, str]], q, k, v, exists, c: int):
    """Keys, values and existence of every set, three lists; where the grid has no such groups, empty ones."""
    nothing = (k[:, :, :0], v[:, :, :0], None if exists is None else exists[:, :, :0])
    found = [
        summaries(maker, kind, q, k, v, exists, c) if has_groups(q.shape[2], c, kind) else nothing
        for maker, kind in sets
    ]
    keys, values, alive = (list(x) for x in zip(*found, strict=True))
    return keys, values, alive


def axial_attention(sets: list[tuple[Combiner, str]], q, k, v, exists, cols: int | None) -> Tensor:
    """One softmax over own row, own column and all sets of summaries, each a kind and the module that makes it."""
    n, module = q.shape[2], sets[0][0]
    c, causal = cols or default_cols(n), module.options.causal
    keys, values, alive = all_summaries(sets, q, k, v, exists, c)
    keys, values, alive = [k, *keys], [v, *values], [exists, *alive]
    main = _main(n, c, causal, tuple(kind for _, kind in sets))
    return merge_attention(q, keys, values, main, scale=module.options.softmax_scale, valid=alive, dropout=module.drop)


# ---- the mechanism ------------------------------------------------------------------------------------------


class CombinerAxial(Combiner):
    __doc__ = __doc__
    cost = "n·√n"

    @dataclass(frozen=True, kw_only=True)
    class Options(CombinerOptions):
        plan: Literal["vertical", "horizontal", "rowmajor"] = option("vertical", "what is summarised")
        cols: int | None = option(None, "columns of the grid; None = ⌈√n⌉", ge=1)
        split: bool = option(False, "plan=horizontal: left and right part of a row are groups of their own")

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.split and self.plan != "horizontal":
                raise ValueError(f"split=True belongs to plan=horizontal, not to plan={self.plan}")

    @property
    def exponent(self) -> float:
        return 1.5 if self.options.cols is None else 2.0  # a fixed width: n/cols rows for every query

    @property
    def partition(self) -> Partition:
        o = self.options
        if o.plan == "horizontal":
            return AxialHorizontal(causal=o.causal, cols=o.cols, split=o.split)
        return (AxialVertical if o.plan == "vertical" else AxialRowmajor)(causal=o.causal, cols=o.cols)

    def kinds(self) -> tuple[str, ...]:
        """Its sets of summaries."""
        return ("left", "right") if self.options.split else (self.options.plan,)

    def combine(self, q, k, v, exists):
        return axial_attention([(self, kind) for kind in self.kinds()], q, k, v, exists, self.options.cols)
