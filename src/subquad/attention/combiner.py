"""Combiner: full attention by structured conditional expectation (Ren et al. 2021, section 3).

A plan (`supports.partitions`) divides the support of query i into a direct set Ω_i^0 and groups Ω_i^r. Each group
has one key k_Ω and one query q_Ω (`abstraction`); all logits share one normaliser (eq. 9), here with scale = 1/√d,

    Z_i = Σ_{j ∈ Ω_i^0} exp(q_i·k_j·scale) + Σ_r exp(q_i·k_{Ω_i^r}·scale)

and inside a group p(j|Ω) = softmax_{j ∈ Ω}(q_Ω·k_j·scale). The effective weights (eq. 8) are

    q(j|i) = exp(q_i·k_j·scale) / Z_i                 j ∈ Ω_i^0
           = p(j|Ω) · exp(q_i·k_Ω·scale) / Z_i        j ∈ Ω, a group of i

They are ≥ 0, sum to 1 and cover the whole support. A group's value is v_Ω = Σ_j p(j|Ω) v_j, the same for every query
that has the group: this is where the quadratic cost goes.

Padded tokens are members of nothing; a group of padding alone does not exist. Dropout acts on the terms of Z_i
(tokens and groups). Here are the pieces all plans share and the definition, dense, from the index sets alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Literal

import torch
from torch import Tensor

from subquad.abstraction import Abstraction
from subquad.attention.base import Attention
from subquad.core.options import Options, option
from subquad.probability import probability_map
from subquad.supports.partitions import POOLED, Group, Partition


@dataclass(frozen=True, kw_only=True)
class CombinerOptions(Options):
    abstraction: Literal["max", "mean", "deepsets-max", "deepsets-mean"] = option("max", "how a group is summarised")


class Combiner(Attention):
    """One plan, one abstraction. A subclass gives `partition` (the definition) and `combine` (the fast path)."""

    Options = CombinerOptions
    family = "combiner"
    paper = "Ren et al. 2021"

    def __init__(self, options: CombinerOptions) -> None:
        super().__init__(options)
        self.abstraction = Abstraction(options.abstraction, options.head_dim)

    @property
    def partition(self) -> Partition:
        """The plan as index sets."""
        raise TypeError(f"{type(self).__name__} leaves this to a subclass")

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """All plans that take part; more than one in a mixture."""
        return (self.partition,)

    def combine(self, q: Tensor, k: Tensor, v: Tensor, exists: Tensor | None) -> Tensor:
        """q, k, v (B, H, n, d) in float32 or float64; exists bool (B, 1, n) or None."""
        raise TypeError(f"{type(self).__name__} leaves this to a subclass")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return attend_in_float(self.combine, q, k, v, key_mask)

    def define(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        work = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(work), k.to(work)
        terms = Terms(self.partition, q, k, self.abstraction, key_mask, self.options.softmax_scale)
        return terms.weights()

    def picture(self, n: int) -> Tensor:
        return self.partition.picture(n)

    def cost_report(self, n: int) -> dict[str, int]:
        return cost_report(self.partitions, n)


def cost_report(plans: tuple[Partition, ...], n: int) -> dict[str, int]:
    """The three terms of section 3.1, summed over the plans."""
    costs = [partition.cost(n) for partition in plans]
    names = ("terms of all queries", "groups summarised", "members of these groups")
    return {name: sum(values) for name, values in zip(names, zip(*costs, strict=True), strict=True)}


def attend_in_float(combine: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """combine(q, k, v, exists) with half precision in float32: the pools and all statistics."""
    index(q.shape[2])  # plans are made of numbers: a compiled graph is one for this length
    work = torch.promote_types(q.dtype, torch.float32)
    exists = None if key_mask is None else key_mask[:, None]  # (B, 1, n)
    return combine(q.to(work), k.to(work), v.to(work), exists).to(v.dtype)


@lru_cache(maxsize=64)
def unique_groups(partition: Partition, n: int) -> tuple[dict[Group, int], Tensor, Tensor]:
    """Every group once, children before parents; which query uses which (n, U); the direct sets (n, n)."""
    number: dict[Group, int] = {}

    def add(group: Group) -> int:
        for child in group.children:
            add(child)
        return number.setdefault(group, len(number))

    rows = [[add(group) for group in partition.groups(n, i)] for i in range(n)]
    uses, direct = torch.zeros(n, len(number), dtype=torch.bool), torch.zeros(n, n, dtype=torch.bool)
    for i, row in enumerate(rows):
        uses[i, row] = True
        direct[i, list(partition.direct(n, i))] = True
    return number, uses, direct


class Terms:
    """The terms of eq. 9 under one plan, dense: logits of the tokens and of the groups, and p(j|Ω).

    Written from the definition, group by group, without a thought for speed.
    """

    def __init__(
        self, partition, q: Tensor, k: Tensor, abstraction: Abstraction, key_mask: Tensor | None, scale: float
    ):
        n = q.shape[2]
        self.softmax, self.scale, self.pool = probability_map("softmax"), scale, abstraction.pool
        self.q, self.k = q, k
        self.fq, self.fk = abstraction.features(q, k)
        exists = torch.ones(q.shape[0], n, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
        self.exists = exists[:, None]  # (B, 1, n)
        found, uses, direct = unique_groups(partition, n)
        self.summaries: dict[Group, tuple[Tensor, Tensor, Tensor]] = {}
        for group in found:
            self.summaries[group] = self.summarise(group)
        self.direct_logits = q @ k.mT * scale  # (B, H, n, n)
        self.direct = direct.to(q.device) & self.exists[:, :, None]  # (B, 1, n, n)
        if not found:
            self.group_logits, self.local = q.new_zeros(*q.shape[:3], 0), q.new_zeros(*q.shape[:2], 0, n)
            self.groups = self.direct[..., :0]
            return
        keys, local, alive = (torch.stack(part, 2) for part in zip(*self.summaries.values(), strict=True))
        self.local = local  # (B, H, U, n): p(j|Ω)
        self.group_logits = q @ keys.mT * scale  # (B, H, n, U)
        self.groups = uses.to(q.device) & alive[:, :, None]  # (B, 1, n, U)

    def summarise(self, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        """k_Ω (B, H, d), p(·|Ω) (B, H, n) and whether it exists (B, 1)."""
        members = list(group.members)
        real = self.exists[:, :, members]  # (B, 1, m)
        q = self.pooled(self.fq[:, :, members], real) if group.asker == POOLED else self.asker(group.asker)
        if group.children:
            keys, inner, alive = (
                torch.stack(part, 2) for part in zip(*map(self.summaries.get, group.children), strict=True)
            )
            p = self.softmax((keys * q[:, :, None]).sum(-1) * self.scale, alive.expand(keys.shape[:3]))  # (B, H, c)
            local = (p[..., None] * inner).sum(2)  # (B, H, n)
        else:
            scores = (self.k[:, :, members] * q[:, :, None]).sum(-1) * self.scale  # (B, H, m)
            p = self.softmax(scores, real.expand(scores.shape))
            local = torch.zeros_like(self.q[..., 0]).index_copy(2, torch.tensor(members, device=q.device), p)
        if group.asker != POOLED:
            return (local[..., None] * self.fk).sum(2), local, real.any(-1)
        return self.pooled(self.fk[:, :, members], real), local, real.any(-1)

    def asker(self, position: int) -> Tensor:
        """The query of a position; 0 where there is none, or padding."""
        if position >= self.q.shape[2]:
            return torch.zeros_like(self.q[:, :, 0])
        return self.fq[:, :, position].masked_fill(~self.exists[:, :, position, None], 0)

    def pooled(self, x: Tensor, real: Tensor) -> Tensor:
        """(B, H, m, d) → (B, H, d) over the members that are real; 0 when there is none."""
        if self.pool == "max":
            top = x.masked_fill(~real[..., None], -torch.inf).amax(2)
            return top.masked_fill(~real.any(-1, keepdim=True), 0)
        return x.masked_fill(~real[..., None], 0).sum(2) / real.sum(-1, keepdim=True).clamp(min=1)

    def weights(self) -> Tensor:
        """q(j|i) of eq. 8, (B, H, n, n)."""
        return joint_weights([self])


def joint_weights(plans: list[Terms]) -> Tensor:
    """q(j|i) of one softmax over the union of the plans' direct sets and all their groups, (B, H, n, n)."""
    first, n = plans[0], plans[0].q.shape[2]
    direct = torch.stack([terms.direct for terms in plans]).any(0)  # (B, 1, n, n)
    logits = torch.cat([first.direct_logits, *(terms.group_logits for terms in plans)], -1)  # (B, H, n, n + U)
    allowed = torch.cat([direct, *(terms.groups for terms in plans)], -1)
    p = first.softmax(logits, allowed.expand(logits.shape))
    return p[..., :n] + p[..., n:] @ torch.cat([terms.local for terms in plans], 2)
