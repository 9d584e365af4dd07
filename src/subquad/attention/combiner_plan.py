"""Combiner over a plan of your own (Ren et al. 2021, section 3.1), given as index sets.

    def halves(n):                                        # direct[i], groups[i] for every query i
        direct = [[i] for i in range(n)]
        groups = [[range(i), range(i + 1, n)] for i in range(n)]
        return direct, groups
    subquad.attention("combiner-plan", plan=halves, …)

`plan` is such a function of n, or a `supports.partitions.Partition` whose groups are plain sets. For every query the
sets must be a partition of its support; with causal=True each keeps its positions ≤ i. Any plan is exact; the cost is
the plan's own, Σ terms + Σ members, over edge lists instead of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.base import Call
from subquad.attention.combiner import Combiner, CombinerOptions
from subquad.core.hashing import seed_from
from subquad.core.numbers import settled
from subquad.core.options import option
from subquad.kernels.edges import EdgeList, edge_attention
from subquad.kernels.tables import group_count, partition_edges
from subquad.supports.partitions import IndexSets, Partition
from subquad.supports.support import text_of


def eights(n: int) -> tuple[Sequence, Sequence]:
    """An example of a plan: eight tokens directly, the other eights of the own 64, and the other 64s, as groups."""
    spans = [range(a, min(a + 8, n)) for a in range(0, n, 8)]
    near = [[s for a, s in enumerate(spans) if a != i // 8 and a // 8 == i // 64] for i in range(n)]
    far = [[range(b, min(b + 64, n)) for b in range(0, n, 64) if b // 64 != i // 64] for i in range(n)]
    return [spans[i // 8] for i in range(n)], [near[i] + far[i] for i in range(n)]


def nearby_and_sides(n: int) -> tuple[Sequence, Sequence]:
    """Another: four neighbours on each side directly, what is before and what is behind as two groups."""
    near = [range(max(0, i - 4), min(n, i + 5)) for i in range(n)]
    return near, [[range(keys.start), range(keys.stop, n)] for keys in near]


class CombinerPlan(Combiner):
    __doc__ = __doc__
    cost = "the plan's own"
    exponent = 2.0
    grouped = False
    data_dependent = True
    counting_range = (128, 512)
    examples = ({"plan": eights},)
    gallery = {"plan": nearby_and_sides}
    exceptions = {"compiles": "with key_mask every row has a plan of its own, which a compiled graph does not know"}

    @dataclass(frozen=True, kw_only=True)
    class Options(CombinerOptions):
        plan: Any = option(None, "a function n → (direct sets, groups), or a Partition")

    def make_partition(self, options: CombinerPlan.Options) -> Partition:
        given = options.plan
        if isinstance(given, Partition):
            if given.causal != options.causal:
                raise ValueError(
                    f"combiner-plan: plan has causal={given.causal}, the mechanism causal={options.causal}"
                )
            return given
        if callable(given):
            return IndexSets(sets=given, causal=options.causal)
        raise TypeError(f"combiner-plan: plan must be a function n → (direct, groups) or a Partition, not {given!r}")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Rows of equal length together: a plan of one's own may divide every length in another way."""
        if call.lengths is None:
            return self._attend(q, k, v, call)
        if torch.compiler.is_compiling():
            raise ValueError("combiner-plan: key_mask is not supported in a compiled graph; call it eagerly")
        rows = []
        for b, size in enumerate(call.lengths.tolist()):
            mask = None if call.key_mask is None else call.key_mask[b : b + 1, :size]
            seed = seed_from(call.seed, b * q.shape[1]) if call.dropout and call.seed is not None else None
            own = call._replace(key_mask=mask, lengths=None, seed=seed)
            x, y, z = (t[b : b + 1, :, :size] for t in (q, k, v))
            out = self._attend(x, y, z, own) if size else x
            rows.append(F.pad(out, (0, 0, 0, q.shape[2] - size)))
        return torch.cat(rows)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Over edge lists: summaries to their members, queries to tokens and summaries."""
        n = settled(q.shape[2], self.name, "a plan of one's own", "use another mechanism")
        scale = self.options.softmax_scale
        text = text_of(self.partition) if self._is_sized else text_of(self.partition, index(call.slots))
        groups = group_count(text, n)
        members, main = partition_edges(q, text, n, groups)
        work = torch.promote_types(q.dtype, torch.float32)
        x, y, z = (t.to(work) for t in (q, k, v))
        keys, values, alive = y, z, call.key_mask
        if groups:
            about: dict[str, Any] = {"is_max": self.abstraction.pool == "max", "key_mask": call.key_mask}
            query, key = (member_pool(t, members, **about) for t in self.abstraction(x, y))  # (B, H, U, d)
            value = edge_attention(query, y, z, members, scale=scale, key_mask=call.key_mask)
            keys, values = torch.cat((y, key), 2), torch.cat((z, value), 2)  # (B, H, n + U, d)
            alive = None if call.key_mask is None else torch.cat((call.key_mask, _alive(call.key_mask, members)), 1)
        more: dict[str, Any] = {"key_mask": alive, "dropout": call.dropout, "seed": call.seed}
        return edge_attention(x, keys, values, main, scale=scale, **more).to(q.dtype)


def member_pool(x: Tensor, members: EdgeList, *, is_max: bool, key_mask: Tensor | None) -> Tensor:
    """The pool of x (B, H, n, d) over each group's real members: (B, H, U, d), 0 where there is none."""
    row = members.rows
    if key_mask is not None:
        x = x.masked_fill(~key_mask[:, None, :, None], -torch.inf if is_max else 0)
    inside = x.index_select(2, members.indices.long())  # (B, H, E, d)
    shape = (*x.shape[:2], members.num_queries, x.shape[3])
    if is_max:
        top = inside.new_full(shape, -torch.inf).scatter_reduce(2, row[:, None].expand(inside.shape), inside, "amax")
        return top.masked_fill(top == -torch.inf, 0)
    total = inside.new_zeros(shape).index_add(2, row, inside)
    real = torch.ones_like(x[:, :1, :, 0]) if key_mask is None else key_mask[:, None].to(x.dtype)  # (B, 1, n)
    count = real.new_zeros(*real.shape[:2], members.num_queries).index_add(2, row, real[:, :, members.indices.long()])
    return total / count.clamp(min=1)[..., None]


def _alive(key_mask: Tensor, members: EdgeList) -> Tensor:
    """Which groups have a real member, (B, U)."""
    real = key_mask[:, members.indices.long()].float()  # (B, E)
    return real.new_zeros(len(real), members.num_queries).index_add(1, members.rows, real) > 0
