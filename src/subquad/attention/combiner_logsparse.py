"""Combiner-Logsparse (Ren et al. 2021, section 4.2 and appendix B): everything before i as O(log i) binary blocks.

    for every set bit l of i: block number (i>>l)-1 of size 2^l, one summary; i itself directly
    level 0 is a single token, hence exact; bidirectional: the mirror image as well, the same on n-1-i

Blocks with an even number are the only ones ever asked for. Of these exactly one ends with each token, so all
levels fit one array as long as the sequence, a Fenwick tree (`abstraction.binary_nodes`), and the blocks of i are
read off the bits of i:  i, then i without its lowest bit, and so on. In base 64 these are, per digit of i, some of
63 nodes: one masked block attention per digit, 64 queries × 63 nodes for the lowest (where all 64 queries have
the same nodes above), 4096 × 63 for the next. n·63 products per digit, hence

    O(n·log n) time, O(n) memory
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from subquad.abstraction import anyone, binary_nodes, pooled
from subquad.attention.combiner import Combiner
from subquad.kernels.blocks import MEMBERS, NODES, NODES_BACK, Part, part, plan
from subquad.kernels.merge import merge_attention
from subquad.supports.partitions import Logsparse, Partition

DIGIT = 6  # bits of a digit
RADIX = 1 << DIGIT


def _digits(n: int, source: int, back: bool) -> list[Part]:
    """Queries to nodes, one digit after the other; a last block that is not full is a part of its own.

    `back` mirrors it: blocks are counted from the end, and so are the nodes.
    """
    parts, unit = [], 1
    while unit < n:
        width = unit * RADIX
        full, rest = divmod(n, width)
        starts = (rest, 0) if back else (0, full * width)
        for start, blocks, rows in zip(starts, (full, 1), (width, rest), strict=True):
            nodes = (rows - 1) // unit  # of the block, at distances unit, 2·unit … from where it is counted
            if not blocks or nodes < 1:
                continue
            first = start + rows - nodes * unit if back else start + unit - 1
            rule = NODES_BACK if back else NODES
            parts.append(Part(start, blocks, width, rows, 1, first, width, nodes, unit, source, rule=rule))
        unit = width
    return parts


@lru_cache(maxsize=64)
def _query_plan(n: int, causal: bool) -> tuple[int, ...]:
    """Sources: 0 the tokens, 1 the nodes, 2 the mirrored nodes.

    An even token is a node and sees itself there, except a last one, whose node nobody else asks for.
    """
    parts = _digits(n, 1, False)
    if n > 1:
        parts.append(part((1, n // 2, 2, 1, 1), (1, 2, 1, 1)))
    if n % 2:
        parts.append(part((n - 1, 1, 1, 1, 1), (n - 1, 1, 1, 1)))
    return plan(parts if causal else parts + _digits(n, 2, True), n)


@lru_cache(maxsize=64)
def _member_plan(n: int) -> tuple[int, ...]:
    """Nodes to their tokens: those inside a block of 64 by one masked block, larger ones by one query each."""
    full, rest = divmod(n, RADIX)
    parts = []
    if full:
        parts.append(Part(0, full, RADIX, RADIX - 1, 1, 0, RADIX, RADIX - 1, 1, rule=MEMBERS))
    if rest:
        parts.append(Part(full * RADIX, 1, 0, rest, 1, full * RADIX, 0, rest, 1, rule=MEMBERS))
    size = RADIX
    while size <= n:
        count = (n // size + 1) // 2  # blocks of this size with an even number
        parts.append(Part(size - 1, count, 2 * size, 1, 1, 0, 2 * size, size, 1))
        size *= 2
    return plan(parts, n)


# A compiled graph takes these as constants of the length it was made for.
@torch.compiler.assume_constant_result
def _main(n: int, causal: bool) -> tuple[int, ...]:
    return _query_plan(n, causal)


@torch.compiler.assume_constant_result
def _members(n: int) -> tuple[int, ...]:
    return _member_plan(n)


class CombinerLogsparse(Combiner):
    __doc__ = __doc__
    cost = "n·log n"
    exponent = 1.0

    @property
    def partition(self) -> Partition:
        return Logsparse(causal=self.options.causal)

    def nodes(self, q: Tensor, k: Tensor, v: Tensor, exists: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of all binary blocks (B, H, n, d), and which exist (B, 1, n)."""
        members = None if exists is None else exists[..., None]  # (B, 1, n, 1)
        query, key = (pooled(x, self.abstraction.pool, members, binary_nodes) for x in self.abstraction.features(q, k))
        if self.abstraction.kind.startswith("deepsets"):  # a single token stands for itself
            single = torch.arange(k.shape[2], device=k.device)[:, None] % 2 == 0
            key = torch.where(single, k, key)
        plan_, scale = _members(k.shape[2]), self.options.softmax_scale
        value = merge_attention(query, [k], [v], plan_, scale=scale, valid=[exists])
        return key, value, None if members is None else anyone(members, binary_nodes)[..., 0]

    def combine(self, q, k, v, exists):
        found = [(k, v, exists), self.nodes(q, k, v, exists)]
        if not self.options.causal:
            mirrored = self.nodes(*(x if x is None else x.flip(2) for x in (q, k, v, exists)))
            found.append([x if x is None else x.flip(2) for x in mirrored])
        keys, values, alive = (list(x) for x in zip(*found, strict=True))
        main = _main(q.shape[2], self.options.causal)
        scale, drop = self.options.softmax_scale, self.drop
        return merge_attention(q, keys, values, main, scale=scale, valid=alive, dropout=drop)
