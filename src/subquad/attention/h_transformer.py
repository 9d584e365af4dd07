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

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.base import Attention
from subquad.attention.call import Call
from subquad.attention.full import drop_keys
from subquad.attention.outputs import within_rows
from subquad.core.numbers import settled
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option
from subquad.kernels.levels import attend_levels
from subquad.kernels.levels.op import spans_of
from subquad.kernels.runs import Runs, attend_runs


class HTransformer(Attention):
    __doc__ = __doc__

    family = "hierarchical"
    theory_reason = "distant tokens are scored together, by their means"
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
        x, y, z = (t.to(work).flatten(0, 1) for t in (q, k, drop_keys(v, call)))  # (G, n, d)
        mask, scale = call.key_mask, self.options.softmax_scale
        real = None if mask is None else mask.to(work).repeat_interleave(q.shape[1], 0)  # (G, n)
        n = settled(q.shape[2], self.name, "the number of levels", "use another mechanism")
        with torch.autocast(q.device.type, enabled=False):
            if self.options.causal:
                out = self._causal(x, y, z, real, n)
            else:
                out = attend_levels(x, y, z, real, self.options.block, self.levels(n), scale)
        return within_rows(out.unflatten(0, q.shape[:2]), call).to(kind)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, n: int) -> Tensor:
        """Blocks of queries against the means of all levels, under one softmax. Sums of groups are sums of two sums."""
        real = q.new_ones(1, n) if real is None else real
        keys, values, bias, sums = [k], [v], [real.log()], [k, v]  # padding is 0 in k and v
        for _ in range(self.levels(n) - 1):
            real, *sums = (_pairs(x) for x in (real[..., None], *sums))
            real = real[..., 0]
            for found, x in zip((keys, values), sums, strict=True):
                found.append(x / real.clamp(min=1)[..., None])
            bias.append(real.log())
        runs = _causal_runs(n, self.options.block, len(keys), q.device)
        return attend_runs(q, keys, values, runs, self.options.softmax_scale, torch.cat(bias, 1))[0]

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


def _pairs(x: Tensor) -> Tensor:
    """Sums of two rows each, the last may be alone: (G, m, d) → (G, ⌈m/2⌉, d)."""
    x = F.pad(x, (0, 0, 0, 1)) if x.shape[1] % 2 else x
    left, right = x.unflatten(1, (-1, 2)).unbind(2)  # an addition: a reduction over two entries is far slower
    return left + right


# ---- who is on which level ----


def _causal_runs(n: int, size: int, levels: int, device: torch.device) -> Runs:
    """Blocks of queries: their own block up to themselves, the one before, and on every level the block before theirs,
    as far as no finer level has seen it."""
    first = torch.arange(0, n, size, device=device)
    rows, block = (n - first).clamp(max=size), first // size
    begin = (first - size).clamp(min=0)
    spans = [spans_of(begin, first + rows, n, first - begin)]
    m = n
    for number in range(1, levels):
        m, start = -(-m // 2), (block >> number) * size
        touches = (block >> (number - 1)) % 2 == 0  # the half of the block that touches the one before
        spans.append(spans_of(start - size, torch.where(touches, start - size // 2, start), m))
    pairs = n * (2 * size + 3 * size * (levels - 1) // 4)
    sizes = (size, 2 * size, *[size] * (levels - 1))
    return Runs(torch.stack((first, rows), -1), torch.stack(spans, 1), tuple(range(levels)), pairs, sizes)
