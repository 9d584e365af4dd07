"""H-Transformer-1D (Zhu and Soricut 2021): attention as a hierarchical matrix, coarser with the distance.

    out_i = Σ_j softmax_j(S_ij) v_j          S_ij = q̃_l(i)·k̃_l(j)·scale on the level l of the pair

    l = the first level on which i and j are in the same block or in neighbouring ones; blocks of level l have
        block·2^l tokens
    q̃_l(i), k̃_l(j) = means over the 2^l tokens that i and j are in (q̃_0 = q, k̃_0 = k)

Every pair of tokens is on one level, so the weights cover everything and sum to 1. On each level there are
n/2^l rows with at most 3·block keys: O(n·block) in all.

Causal. A mean of queries would carry later queries into earlier rows, so every query is compared itself with the means
of the keys, which are complete before it: O(n·block·log n). Padding belongs to no mean, and a mean counts as many times
as it has tokens. Dropout drops a key for all queries of a head at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.base import Attention, Call
from subquad.attention.full import drop_keys
from subquad.attention.outputs import within_rows
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option

ABSENT = -1e30  # the logarithm of 0, as a number


class _Level(NamedTuple):
    """Means over groups of tokens."""

    q: Tensor  # (B, H, m, d), of the groups; causal always of the tokens
    k: Tensor
    v: Tensor
    sizes: Tensor  # (B or 1, 1, m): how many tokens a group has


class HTransformer(Attention):
    """H-Transformer-1D; see the module docstring."""

    family = "hierarchical"
    paper = "Zhu and Soricut 2021"
    cost = "n·block, causal n·block·log n"
    exponent = 1.0
    examples = ({}, {"block": 4})
    gallery = {"block": 4}

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        block: int = option(16, "tokens of a block on the finest level (even)", ge=2)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.block % 2:
                raise ValueError(f"block must be even, not {self.block}")

    def levels(self, n: int) -> int:
        """Levels until all tokens are neighbours."""
        count, blocks = 1, -(-n // self.options.block)
        while blocks > 2:
            count, blocks = count + 1, -(-blocks // 2)
        return count

    # ---- the fast path ----

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        kind, work = q.dtype, torch.promote_types(q.dtype, torch.float32)
        n = index(q.shape[2])  # the number of levels follows from it: a compiled graph is one for this length
        count = self.levels(n)
        rest = -n % (self.options.block << (count - 1))
        q, k, v = (F.pad(x.to(work), (0, 0, 0, rest)) for x in (q, k, drop_keys(v, call)))
        mask = torch.ones(1, n, dtype=torch.bool, device=q.device) if call.key_mask is None else call.key_mask
        real = F.pad(mask, (0, rest))[:, None].to(work)  # (B or 1, 1, m)
        levels = [_Level(q, k, v, real)]
        for _ in range(count - 1):
            levels.append(_coarser(levels[-1], move_queries=not self.options.causal))
        out, lse = self._on_level(levels[-1], count - 1)  # (B, H, rows, d), (B, H, rows)
        for number in reversed(range(count - 1)):
            out, lse = _merged((out, lse), self._on_level(levels[number], number))
        out = within_rows(out[:, :, :n], call)
        return (out if call.key_mask is None else out * self._someone(call.key_mask)[:, None, :, None]).to(kind)

    def _someone(self, mask: Tensor) -> Tensor:
        """Which queries see a real token, bool (B, n)."""
        return (mask.cumsum(1) > 0) if self.options.causal else mask.any(1, keepdim=True).expand_as(mask)

    def _on_level(self, level: _Level, number: int) -> tuple[Tensor, Tensor]:
        """Output and logsumexp of the pairs of one level; ABSENT where there are none."""
        size = self.options.block
        rows = size << number if self.options.causal else size  # rows of a block of queries
        sides = tuple(side for side in (-1, 0, 1) if (side or not number) and (side < 1 or not self.options.causal))
        q, k, v = (x.unflatten(2, (-1, length)) for x, length in zip(level[:3], (rows, size, size), strict=True))
        k, v = _neighbours(k * self.options.softmax_scale, sides), _neighbours(v, sides)  # (B, H, N, sides·block, d)
        count = _neighbours(level.sizes.unflatten(2, (-1, size))[..., None], sides)[..., 0]  # (B or 1, 1, N, keys)
        bias = torch.where(count > 0, count.clamp(min=1).log(), ABSENT)[..., None, :]
        bias = bias.masked_fill(~self._mask(rows, sides, number, q.device), ABSENT)  # (B or 1, 1, N, rows, keys)
        scores = q @ k.mT + bias  # (B, H, N, rows, keys)
        lse = scores.logsumexp(-1, keepdim=True)
        out = (scores - lse).exp() @ v  # what stands in a row without a key is merged with weight 0
        return out.flatten(2, 3), lse.flatten(2)

    def _mask(self, rows: int, sides: tuple[int, ...], number: int, device: torch.device) -> Tensor:
        """What a finer level has not seen, bool (rows, keys)."""
        size = self.options.block
        row = torch.arange(rows, device=device)[:, None]
        key = torch.arange(size, device=device)
        masks = []
        for side in sides:
            seen = torch.ones(rows, size, dtype=torch.bool, device=device)
            if number == 0 and side == 0 and self.options.causal:
                seen = key <= row
            elif number > 0:  # the halves that touch were neighbours before
                near_row = row < rows // 2 if side < 0 else row >= rows // 2
                near_key = key >= size // 2 if side < 0 else key < size // 2
                seen = ~(near_row & near_key)
            masks.append(seen)
        return torch.cat(masks, 1)

    # ---- the definition ----

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        work, n, size = torch.promote_types(q.dtype, torch.float32), q.shape[2], self.options.block
        q, k = q.to(work), k.to(work)
        real = torch.ones(len(q), n, dtype=torch.bool, device=q.device) if call.key_mask is None else call.key_mask
        place, scores = torch.arange(n, device=q.device), torch.zeros(*q.shape[:2], n, n, dtype=work, device=q.device)
        done = torch.zeros(n, n, dtype=torch.bool, device=q.device)
        for number in range(self.levels(n)):
            block, group = place // (size << number), place // (1 << number)
            own = (block[:, None] - block).abs() <= 1
            members = ((group[:, None] == group) & real[:, None]).to(work)[:, None]  # (B, 1, n, n)
            mean = members / members.sum(-1, keepdim=True).clamp(min=1)
            keys = mean @ k if number else k
            queries = mean @ q if number and not self.options.causal else q
            scores = torch.where(own & ~done, queries @ keys.mT * self.options.softmax_scale, scores)
            done = done | own
        seen = real[:, None, None] & (place <= place[:, None] if self.options.causal else done)
        return scores.masked_fill(~seen, torch.finfo(work).min).softmax(-1) * seen

    def picture(self, n: int) -> Tensor:
        block = torch.arange(n) // self.options.block
        near = (block[:, None] - block).abs() <= 1
        return torch.where(near, 1, 2) * self.support(n)

    def summaries(self, n: int) -> tuple[list[Sequence[int]], list[list[int]]]:
        """On level l the groups of 2^l tokens whose blocks have become neighbours, and were not on a finer level."""
        number: dict[range, int] = {}
        rows: list[list[int]] = []
        for i in range(n):
            row, stop = [], i + 1 if self.options.causal else n
            for level in range(1, self.levels(n)):
                wide, size = self.options.block << level, 1 << level
                for block in range(i // wide - 1, i // wide + 2):
                    for first in range(max(0, block) * wide, min(stop, (block + 1) * wide), size):
                        if abs(first // (wide // 2) - i // (wide // 2)) > 1:
                            row.append(number.setdefault(range(first, min(n, first + size)), len(number)))
            rows.append(row)
        return list(number), rows

    def connections(self, n: int) -> float:
        rows = n * self.levels(n) if self.options.causal else 2 * n
        return float(rows * self.options.block * (1 if self.options.causal else 2))


def _coarser(level: _Level, *, move_queries: bool) -> _Level:
    """Means over pairs of groups, weighted by what is in them."""
    count = level.sizes.unflatten(2, (-1, 2))  # (B or 1, 1, m/2, 2)
    total = count.sum(-1)
    share = (count / total.clamp(min=1)[..., None])[..., None]  # (B or 1, 1, m/2, 2, 1)
    q, k, v = ((x.unflatten(2, (-1, 2)) * share).sum(3) if i or move_queries else x for i, x in enumerate(level[:3]))
    return _Level(q, k, v, total)


def _merged(coarse: tuple[Tensor, Tensor], fine: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two levels under one softmax, (B, H, m or m/2, d) and (B, H, m, d): a coarse row stands for two fine ones."""
    (a, s), (b, t) = coarse, fine
    halved = a.shape[2] < b.shape[2]
    if halved:
        a, s, b, t = a[:, :, :, None], s[..., None], b.unflatten(2, (-1, 2)), t.unflatten(2, (-1, 2))
    out, lse = torch.lerp(a.expand_as(b), b, (t - s).sigmoid()[..., None]), torch.logaddexp(s, t)
    return (out.flatten(2, 3), lse.flatten(2)) if halved else (out, lse)


def _neighbours(x: Tensor, sides: tuple[int, ...]) -> Tensor:
    """(B, H, N, s, d) → (B, H, N, sides·s, d): the blocks at these distances, 0 where there is none."""
    padded, count = F.pad(x, (0, 0, 0, 0, 1, 1)), x.shape[2]
    return torch.cat([padded[:, :, 1 + side : 1 + side + count] for side in sides], 3)
