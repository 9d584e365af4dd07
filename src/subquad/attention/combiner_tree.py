"""Combiner over a partition tree: groups of groups (Ren et al. 2021, the remark in section 3.1).

Level t = 1 … depth has blocks of s^t tokens. Query i attends to its own block of s tokens directly, and at each
level to the summaries of the other blocks inside its own block of the next level (at the top: of all others);
causal: up to i, and blocks that lie before i.

    k_t, q_t = pools over the block's tokens        v_1 = Σ_j softmax_j(q_1·k_j) v_j over its tokens
                                                    v_t = Σ_c softmax_c(q_t·k_c) v_c over its blocks of level t-1

    s ≈ n^(1/(depth+1)):  O(n · (depth+1) · n^(1/(depth+1)));  depth=1 is Combiner-Fixed, depth=2 costs n·n^(1/3)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from subquad.abstraction import anyone, pooled, spans
from subquad.attention.combiner import Combiner, CombinerOptions
from subquad.core.options import option
from subquad.kernels.blocks import CHUNKS, Part, diagonal, plan, rows_to_keys
from subquad.kernels.merge import merge_attention
from subquad.supports.partitions import Partition, Tree, default_span


@lru_cache(maxsize=64)
def _tree_plan(n: int, s: int, depth: int, causal: bool) -> tuple[int, ...]:
    parts = diagonal(0, n, s, causal=causal)
    for level in range(1, depth + 1):
        size = s**level
        if level == depth or size * s >= n:
            last = range(size - 1, size * -(-n // size), size)  # a summary stands where its block ends
            rule = {"hi": -1} if causal else {"xlo": 0, "xhi": size - 1}
            parts += rows_to_keys(range(n), range(len(last)), positions=last, source=level, **rule)
            break
        parts += _inside(n, s, level, causal)
    return plan(parts, n)


def _inside(n: int, s: int, level: int, causal: bool) -> list[Part]:
    """Level t < depth: each block of s^(t+1) queries sees the s summaries inside it, except the own one.

    Causal, the rows of a block go in chunks that take only the summaries some row can see.
    """
    size, parent = s**level, s ** (level + 1)
    rule = {"hi": -1} if causal else {"xlo": 0, "xhi": size - 1}
    full, rest = divmod(n, parent)
    parts = []
    for first, blocks, rows in ((0, full, parent), (full * parent, 1, rest)):
        if not blocks or not rows:
            continue
        step = max(size, 128, -(-rows // CHUNKS // size) * size) if causal else rows
        for start in range(0, rows, step):
            chunk = min(step, rows - start)
            seen = -(-(start + chunk) // size) - 1 if causal else -(-rows // size)
            if seen > 0:
                queries, keys = (first + start, blocks, parent, chunk, 1), (first // size, s, seen, 1)
                where = {"p_start": first + size - 1, "p_step": parent, "p_stride": size}
                parts.append(Part(*queries, *keys, level, **where, **rule))
    return parts


@lru_cache(maxsize=64)
def _span_plan(n: int, s: int) -> tuple[int, ...]:
    """Summary a attends to its span of s keys (the last one may be shorter)."""
    full, rest = divmod(n, s)
    parts = [Part(0, full, 1, 1, 1, 0, s, s, 1)] if full else []
    if rest:
        parts.append(Part(full, 1, 0, 1, 1, full * s, 0, rest, 1))
    return plan(parts, full + bool(rest))


# A compiled graph takes these as constants of the length it was made for.
@torch.compiler.assume_constant_result
def _main(n: int, s: int, depth: int, causal: bool) -> tuple[int, ...]:
    return _tree_plan(n, s, depth, causal)


@torch.compiler.assume_constant_result
def _level(n: int, s: int) -> tuple[int, ...]:
    return _span_plan(n, s)


@torch.compiler.assume_constant_result
def _default(n: int, depth: int) -> int:
    return default_span(n, depth)


def tree_attention(
    module: Combiner, q: Tensor, k: Tensor, v: Tensor, exists: Tensor | None, span: int | None, depth: int
):
    """Summaries level by level, then one softmax over all of them. (B, H, n, d)."""
    n, scale, pool = q.shape[2], module.options.softmax_scale, module.abstraction.pool
    s = span or _default(n, depth)
    while depth > 1 and s ** (depth - 1) >= n:
        depth -= 1  # the tree is not that deep: all tokens are in the first block
    keys, values, alive = [k], [v], [exists]
    fq, fk = module.abstraction.features(q, k)
    members = None if exists is None else exists[..., None]  # (B, 1, n, 1)
    for level in range(1, depth + 1):
        blocks = spans(s**level)
        query, key = (pooled(x, pool, members, blocks) for x in (fq, fk))  # (B, H, m, d)
        below = _level(keys[-1].shape[2], s)
        value = merge_attention(query, keys[-1:], values[-1:], below, scale=scale, valid=alive[-1:])
        keys.append(key)
        values.append(value)
        alive.append(None if members is None else anyone(members, blocks)[..., 0])  # (B, 1, m)
    main = _main(n, s, depth, module.options.causal)
    return merge_attention(q, keys, values, main, scale=scale, valid=alive, dropout=module.drop)


class CombinerTree(Combiner):
    __doc__ = __doc__
    cost = "n·n^(1/(depth+1))"

    @dataclass(frozen=True, kw_only=True)
    class Options(CombinerOptions):
        depth: int = option(2, "levels of groups; 1 = Combiner-Fixed", ge=1, le=8)
        span: int | None = option(None, "s: tokens of a block, blocks of a block; None = ≈ n^(1/(depth+1))", ge=2)

    @property
    def exponent(self) -> float:
        return 1 + 1 / (self.options.depth + 1) if self.options.span is None else 2.0  # a fixed span: n/s^depth tops

    @property
    def partition(self) -> Partition:
        o = self.options
        return Tree(causal=o.causal, span=o.span, depth=o.depth)

    def combine(self, q, k, v, exists):
        return tree_attention(self, q, k, v, exists, self.options.span, self.options.depth)
