"""Combiner from its definition: the terms of eq. 9 under one partition, dense, from the index sets alone.

Written group by group, without a thought for speed; the fast path is compared with it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from subquad.abstraction import Abstraction
from subquad.probability import probability_map
from subquad.supports.partitions import POOLED, Group, Partition


@lru_cache(maxsize=64)
def unique_groups(partition: Partition, n: int) -> tuple[list[Group], Tensor, Tensor]:
    """Every group once, children before parents; which query uses which (n, U); the direct sets (n, n)."""
    groups, rows = partition.unique_groups(n)
    uses, direct = torch.zeros(n, len(groups), dtype=torch.bool), torch.zeros(n, n, dtype=torch.bool)
    for i, row in enumerate(rows):
        uses[i, row] = True
        direct[i, list(partition.direct(n, i))] = True
    return groups, uses, direct


class Terms:
    """The logits of the tokens and of the groups, and p(j|Ω)."""

    def __init__(
        self, partition, q: Tensor, k: Tensor, abstraction: Abstraction, key_mask: Tensor | None, scale: float
    ):
        n = q.shape[2]
        self.softmax, self.scale, self.pool = probability_map("softmax"), scale, abstraction.pool
        self.attended = abstraction.attended
        self.q, self.k = q, k
        self.fq, self.fk = abstraction(q, k)
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
        q = (
            self.pooled(self.fq[:, :, members], real)
            if group.query_position == POOLED
            else self.query_at(group.query_position)
        )
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
        if group.query_position != POOLED or self.attended:
            return (local[..., None] * self.fk).sum(2), local, real.any(-1)
        return self.pooled(self.fk[:, :, members], real), local, real.any(-1)

    def query_at(self, position: int) -> Tensor:
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
