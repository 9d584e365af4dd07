"""Combiner-Learnable (Ren et al. 2021, section 4.4 and appendix D): learned clusters in place of spans.

    bidirectional (eq. 11)  direct: the query's cluster;              groups: the other clusters
    causal (eq. 12)         direct: the query's cluster's tokens ≤ i; groups: the other clusters' tokens ≤ i

Clusters and centroids are those of `routing`. One softmax runs over the tokens of the query's cluster and a summary of
each other one: key k_Ω and query q_Ω by the abstraction, value v_Ω = Σ_{j ∈ Ω} softmax_j(q_Ω·k_j·scale) v_j (eqs. 8-9).

Tokens are sorted by cluster, in the order of time inside each: clusters are diagonal blocks of the sorted sequence.
Summaries stand at tokens: at token p the summary of p's cluster up to p. Their pools are one pass that carries the
state of every cluster, their values attend to the same diagonal blocks. Query i reads each other cluster where its
last token ≤ i (bidirectional: its last token) stands (`kernels.clusters`).

    O(n·clusters + n²/clusters) time; clusters ≈ √n balances the two. O(n) memory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from subquad.abstraction import Abstraction
from subquad.attention.call import Call
from subquad.attention.routing import Clusters, Routing, RoutingOptions
from subquad.attention.states.replay import Replay
from subquad.attention.states.state import Memory
from subquad.core.options import option
from subquad.kernels.clusters import cluster_attention, cluster_prefix
from subquad.probability import probability_map
from subquad.supports import partitions
from subquad.supports.partitions import Partition


class CombinerRouting(Routing):
    __doc__ = __doc__
    family = "combiner"
    paper = "Ren et al. 2021"
    sparse = False  # the summaries cover everybody
    examples: ClassVar = ({"clusters": 3}, {"abstraction": "deepsets-mean"})

    @dataclass(frozen=True, kw_only=True)
    class Options(RoutingOptions):
        abstraction: Literal["max", "mean", "deepsets-max", "deepsets-mean"] = option(
            "max", "how a group is summarised"
        )

    def __init__(self, options: CombinerRouting.Options) -> None:
        super().__init__(options)
        self.abstraction = Abstraction(options.abstraction, options.head_dim, options.num_heads)

    def make_memory(self, margin: int) -> Memory:
        return Replay()

    def combine(self, q: Tensor, k: Tensor, v: Tensor, clusters: Clusters, call: Call) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # as the running pools take them
        is_max, causal, scale = self.abstraction.pool == "max", self.options.causal, self.options.softmax_scale
        where = (clusters.cluster, clusters.real, self.clusters)
        query, key = (cluster_prefix(x, *where, is_max) for x in self.abstraction(q, k))  # (B·H, n, d)
        settings: dict[str, Any] = {"causal": causal, "scale": scale}
        value = cluster_attention(query, [k], [v], clusters, self.clusters, last_query_only=not causal, **settings)
        random: dict[str, Any] = {"dropout": call.dropout, "seed": call.seed}
        return cluster_attention(q, [k, key], [v, value], clusters, self.clusters, **settings, **random)

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """Cluster by cluster: who its members are, its summaries, its share of the one softmax."""
        work = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(work), k.to(work)
        scale, softmax, causal, n = (
            self.options.softmax_scale,
            probability_map("softmax"),
            self.options.causal,
            q.shape[2],
        )
        cluster, features = self.assign(q, k, call), self.abstraction(q, k)
        real = torch.ones_like(cluster, dtype=torch.bool) if call.exists is None else call.exists.expand(cluster.shape)
        time = torch.ones(n, n, dtype=torch.bool, device=q.device)
        time = time.tril() if causal else time  # (n, n): row i may see j
        logits, allowed, local = [q @ k.mT * scale], [self._own(cluster, call)], []
        for c in range(self.clusters):
            member = (cluster == c) & real  # (B, H, n)
            seen = member[:, :, None] & time  # (B, H, n, n): its members that row i may see
            query, key = (_pooled(x, member, self.abstraction.pool, causal) for x in features)  # (B, H, n, d)
            local.append(softmax(query @ k.mT * scale, seen))  # (B, H, n, n): p(j | its summary at time i)
            logits.append((q * key).sum(-1, keepdim=True) * scale)
            allowed.append((seen.any(-1) & (cluster != c))[..., None])
        p = softmax(torch.cat(logits, -1), torch.cat(allowed, -1))  # (B, H, n, n + C)
        return p[..., :n] + (p[..., n:, None] * torch.stack(local, 3)).sum(3)

    @property
    def partition(self) -> Partition:
        """For the theory: tokens dealt out to the clusters in turn. The real plan depends on q and k."""
        return partitions.Routing(causal=self.options.causal, dealt=self.clusters)

    def picture(self, n: int) -> Tensor:
        return self.support(n).int() * 2 - super().picture(n)

    def summaries(self, n: int) -> tuple[list[Sequence[int]], list[list[int]]]:
        return self.partition.summaries(n)

    def connections(self, n: int) -> float:
        """The tokens of the query's cluster, one summary for each other, and the tokens in the summaries."""
        c = min(n, self.clusters)
        return 2 * super().connections(n) + n * (c - 1) / (2 if self.options.causal else 1)


def _pooled(x: Tensor, member: Tensor, pool: str, causal: bool) -> Tensor:
    """The pool of the members of a cluster up to each token (not causal: of all of them), 0 where there is none."""
    inside = member[..., None]  # (B, H, n, 1)
    if pool == "max":
        top = x.masked_fill(~inside, -torch.inf).cummax(2).values
        out = top.masked_fill(top == -torch.inf, 0)
    else:
        out = x.masked_fill(~inside, 0).cumsum(2) / inside.cumsum(2).clamp(min=1)
    return out if causal else out[:, :, -1:].expand(x.shape)
