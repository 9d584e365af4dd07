"""Combiner: full attention by structured conditional expectation (Ren et al. 2021, section 3).

A partition (`supports.partitions`) divides the support of query i into a direct set Ω_i^0 and groups Ω_i^r. Each group
has one key k_Ω and one query q_Ω (`abstraction`); all logits share one normaliser (eq. 9), here with scale = 1/√d,

    Z_i = Σ_{j ∈ Ω_i^0} exp(q_i·k_j·scale) + Σ_r exp(q_i·k_{Ω_i^r}·scale)

and inside a group p(j|Ω) = softmax_{j ∈ Ω}(q_Ω·k_j·scale). The effective weights (eq. 8) are

    q(j|i) = exp(q_i·k_j·scale) / Z_i                 j ∈ Ω_i^0
           = p(j|Ω) · exp(q_i·k_Ω·scale) / Z_i        j ∈ Ω, a group of i

They are ≥ 0, sum to 1 and cover the whole support. A group's value is v_Ω = Σ_j p(j|Ω) v_j, the same for every query
that has the group: this is where the quadratic cost goes.

Padded tokens are members of nothing; a group of padding alone does not exist. Dropout acts on the terms of Z_i
(tokens and groups). One fast path serves every partition that is made of blocks: it pools the members of each kind of
groups, lets the summaries attend to their members, and the queries to tokens and summaries; the partition says where
the blocks are. `combiner_plans` has the partitions of the paper. The definition, `Terms`, is written group by group
from the index sets alone, without a thought for speed; the fast path is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from subquad.abstraction import Abstraction
from subquad.attention.call import Call
from subquad.attention.checks import check_inputs
from subquad.attention.sized import SizedAttention
from subquad.attention.states.state import Memory
from subquad.attention.states.summaries import Summaries
from subquad.attention.summaries import Tokens, summarise, summarise_shard
from subquad.core.numbers import is_symbolic
from subquad.core.options import Options, option
from subquad.kernels.merge import merge_attention
from subquad.probability import probability_map
from subquad.supports.partitions import POOLED, Group, GroupSet, Partition, group_sets_of
from subquad.supports.parts import FAR


@dataclass(frozen=True, kw_only=True)
class CombinerOptions(Options):
    abstraction: Literal["max", "mean", "deepsets-max", "deepsets-mean", "residual-max", "residual-mean"] = option(
        "max", "how a group is summarised"
    )


class Combiner(SizedAttention):
    """One partition, one abstraction. A subclass says which kind of partition, or makes it from its options."""

    Options = CombinerOptions
    family = "combiner"
    paper = "Ren et al. 2021"
    grouped = True
    kind: type[Partition]

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        sharpness, shared = getattr(options, "sharpness", 1.0), getattr(options, "shared_heads", 1)
        self.abstraction = Abstraction(options.abstraction, options.head_dim, options.num_heads, sharpness, shared)
        self.partition: Partition = self.with_sizes(self.make_partition(options))

    @property
    def stays_inside(self) -> bool:
        """Maps that learn see every slot: what stands in padding must be clean, or 0 · NaN reaches their gradients."""
        return not self.abstraction.learns

    def make_partition(self, options: Any) -> Any:
        """The partition that the options describe: its fields are options of the same names."""
        return self.kind(**{field.name: getattr(options, field.name) for field in fields(self.kind)})

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """All partitions that take part; more than one in a mixture."""
        return (self.partition,)

    def sized(self, n: int) -> Any:
        """The partition with every size decided, for a call of length n."""
        return self.partition if self._is_sized else self.partition.sized(n)

    def host_reads(self, padded: bool, dtype: torch.dtype = torch.float32, length: int | None = None) -> str:
        partition = self.sized(1)
        part = partition.within((partition.halves("main") or ("main",))[0], 1)
        return "" if not padded or part is not None else "the lengths of rows, which their blocks depend on"

    def described(self, slots: int, n: int) -> tuple[str, tuple[GroupSet, ...]]:
        """The text of that partition, and its group sets for rows of up to n tokens."""
        text = self.text_for(self.partition, slots)
        if self._is_sized:
            return text, self.partition.group_sets(FAR if is_symbolic(n) else n)
        return text, group_sets_of(text, index(n))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Summaries of every kind, then one softmax over tokens and summaries: (B, H, n, d)."""
        return self._merge(q, k, v, call)

    @torch.no_grad()
    def summary_mass(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """How much of each query's attention goes to summaries, (B, H, n): tokens are worth 0, groups 1."""
        check_inputs(self, q, k, k, key_mask)
        rows, q, k, v = self._begin(q, k, k, key_mask)
        mass = self._merge(q, k, v, self._call(rows, None, q.shape[2])._replace(dropout=0.0), mass=True)
        return rows.restore(mass)[..., 0]

    def _merge(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, mass: bool = False) -> Tensor:
        work = torch.promote_types(q.dtype, torch.float32)  # the pools and all statistics
        tokens, n = Tokens(q.to(work), k.to(work), v.to(work), call), q.shape[2]
        text, group_sets = self.described(call.slots, n)
        sources = [(tokens.k, tokens.v, call.exists)]
        for number, group_set in enumerate(group_sets, 1):
            sources.append(summarise(self, text, number, group_set, tokens, sources[group_set.below]))
        keys, values, valid = (list(x) for x in zip(*sources, strict=True))
        if mass:
            values = [torch.full_like(x, float(number > 0)) for number, x in enumerate(values)]
        about: dict[str, Any] = {"lengths": call.lengths, "valid": valid, "dropout": call.dropout, "seed": call.seed}
        scale = self.options.softmax_scale
        return merge_attention(tokens.q, keys, values, text, "main", n, scale=scale, **about).to(q.dtype)

    def make_memory(self, margin: int) -> Memory:
        if self.partition.kept(margin) is None:
            return super().make_memory(margin)
        return Summaries(self.partition, self.options.num_heads, margin, self.abstraction.shared_heads)

    def attend_shard(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """The same on a part of a sequence: a span that two processes share moves to one of them, then only summaries
        (and of a window its halo) travel.
        """
        work, shard, scale = torch.promote_types(q.dtype, torch.float32), call.shard, self.options.softmax_scale
        text, group_sets = self.described(call.slots, shard.n)
        cut = shard.aligned(group_sets[0].size if group_sets else 1)
        q_, k_, v_ = shard.move([x.to(work) for x in (q, k, v)], shard.cut, cut)
        sources = [(k_, v_, shard.exists, cut)]
        features = self.abstraction(q_, k_)
        for number, group_set in enumerate(group_sets, 1):
            sources.append(summarise_shard(self, text, number, group_set, features, cut, sources, call))
        out = shard.merge(q_, sources, text, "main", call, queries=cut, scale=scale)
        return shard.move([out.to(q.dtype)], cut, shard.cut)[0]

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return self.terms(q, k, call).weights()

    def terms(self, q: Tensor, k: Tensor, call: Call) -> Terms:
        work = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(work), k.to(work)
        return Terms(self.sized(call.slots), q, k, self.abstraction, call.key_mask, self.options.softmax_scale)

    def picture(self, n: int) -> Tensor:
        return self.sized(n).picture(n)

    def summaries(self, n: int) -> tuple[list[Sequence[int]], list[list[int]]]:
        return self.sized(n).summaries(n)

    def connections(self, n: int) -> float:
        """Tokens and summaries that the queries see, and tokens in the summaries."""
        return float(sum(value for key, value in self.cost_report(n).items() if key != "groups summarised"))

    def cost_report(self, n: int) -> dict[str, int]:
        """The three terms of section 3.1."""
        names = ("terms of all queries", "groups summarised", "members of these groups")
        return dict(zip(names, self.sized(n).cost(n), strict=True))


# ---- the definition ----


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
