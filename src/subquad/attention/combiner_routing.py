"""Combiner-Learnable (Ren et al. 2021, section 4.4 and appendix D): learned clusters in place of spans.

    bidirectional (eq. 11)  direct: the own cluster;             groups: the other clusters
    causal (eq. 12)         direct: the own cluster's tokens ≤ i; groups: the other clusters' tokens ≤ i

A token belongs to the centroid nearest to q/|q| + k/|k|, by the cosine: to one cluster exactly, by the token alone,
so clusters are a partition and nothing of the future is in it. Centroids are unit vectors, one set per head, learned
by k-means: in training every call moves the centroid of each cluster that has tokens,

    c ← normalise(decay·c + (1-decay)·mean of its tokens' q/|q| + k/|k|)

They are buffers, saved in the state dict, and rest in evaluation. A call uses the centroids it found, then moves them.

Tokens are sorted by cluster, in the order of time inside each: own clusters are diagonal blocks of the sorted sequence.
Summaries stand at tokens: at token p the summary of p's cluster up to p. Their pools are one pass that carries the
state of every cluster, their values attend to the same diagonal blocks. Query i reads each other cluster where its
last token ≤ i (bidirectional: its last token) stands (`kernels.clusters`).

    O(n·clusters + n²/clusters) time; clusters ≈ √n balances the two. O(n) memory
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.combiner import Combiner, CombinerOptions, Terms
from subquad.core.options import option
from subquad.kernels.clusters import cluster_attention, cluster_prefix
from subquad.supports.partitions import Partition, Routing, root

AT_ONCE = 1 << 24  # products of tokens and centroids


class CombinerRouting(Combiner):
    __doc__ = __doc__
    cost = "n·clusters + n²/clusters"
    centroids: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Options(CombinerOptions):
        clusters: int | None = option(None, "number of clusters; None = ⌈√max_length⌉, or 64 without max_length", ge=1)
        decay: float = option(0.999, "how much of a centroid one training call keeps", ge=0, le=1)

    def __init__(self, options: CombinerRouting.Options) -> None:
        super().__init__(options)
        self.clusters = options.clusters or (64 if options.max_length is None else root(options.max_length))
        start = torch.randn(options.num_heads, self.clusters, options.head_dim)
        self.register_buffer("centroids", F.normalize(start, dim=-1))  # (H, C, d)

    @property
    def exponent(self) -> float:
        """1.5 when the number of clusters goes with the length; any fixed number makes clusters of n/C tokens."""
        return 1.5 if self.options.clusters is None and self.options.max_length is not None else 2.0

    @property
    def partition(self) -> Partition:
        """For pictures and counts: tokens dealt out to the clusters in turn. The real plan depends on q and k."""
        return Routing(causal=self.options.causal, dealt=self.clusters)

    def assign(self, q: Tensor, k: Tensor) -> Tensor:
        """The cluster of every token, int64 (B, H, n)."""
        centroids = self.centroids.to(q.dtype).mT  # (H, d, C)
        rows = max(1, AT_ONCE // (q.shape[0] * q.shape[1] * self.clusters))
        return torch.cat([(x @ centroids).argmax(-1) for x in _directions(q, k).split(rows, 2)], 2)

    @torch.no_grad()
    def learn(self, q: Tensor, k: Tensor, cluster: Tensor, exists: Tensor | None) -> None:
        """One step of k-means by moving averages."""
        x, heads = _directions(q, k), torch.arange(q.shape[1], device=q.device)[:, None]
        label = (cluster + heads * self.clusters).flatten()  # (B·H·n,): the clusters of all heads
        real = x.new_ones(1, 1, 1) if exists is None else exists.to(x.dtype)  # (B, 1, n)
        total = x.new_zeros(q.shape[1] * self.clusters, x.shape[3] + 1)  # sums, and behind them the counts
        total.index_add_(0, label, (F.pad(x, (0, 1), value=1.0) * real[..., None]).flatten(0, 2))
        total = total.unflatten(0, (-1, self.clusters))  # (H, C, d + 1)
        count, centroids = total[..., -1:], self.centroids.to(x.dtype)
        mean = total[..., :-1] / count.clamp(min=1)
        moved = F.normalize(self.options.decay * centroids + (1 - self.options.decay) * mean, dim=-1)
        self.centroids.copy_(torch.where(count > 0, moved, centroids))

    def combine(self, q, k, v, exists):
        b, h, n, _ = q.shape
        with torch.no_grad():
            cluster = self.assign(q, k)  # (B, H, n)
            if self.training:
                self.learn(q, k, cluster, exists)
            cluster = cluster.flatten(0, 1)  # (B·H, n)
            sequence = torch.arange(b * h, device=q.device)[:, None]
            order = (sequence * self.clusters + cluster).flatten().argsort(stable=True)  # (B·H·n,)
        real = torch.ones(b, h, n, dtype=torch.bool, device=q.device) if exists is None else exists.expand(b, h, n)
        real, is_max, causal = real.flatten(0, 1), self.abstraction.pool == "max", self.options.causal
        q, k, v = (x.flatten(0, 1).contiguous() for x in (q, k, v))  # (B·H, n, d)
        query, key = (cluster_prefix(x, cluster, real, self.clusters, is_max) for x in self.abstraction.features(q, k))
        seed = torch.randint(1 << 62, ()) if self.drop else torch.zeros((), dtype=torch.int64)
        where, scale = (order, cluster, real, seed.to(q.device), self.clusters, causal), self.options.softmax_scale
        value, _ = cluster_attention(query, [k], [v], *where, not causal, scale, 0.0)
        out, _ = cluster_attention(q, [k, key], [v, value], *where, False, scale, self.drop)
        return out.unflatten(0, (b, h))

    def define(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        work = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(work), k.to(work)
        cluster, rows = self.assign(q, k), []
        for b in range(q.shape[0]):
            mask = None if key_mask is None else key_mask[b : b + 1]
            for h in range(q.shape[1]):
                one = (slice(b, b + 1), slice(h, h + 1))
                partition = Routing(causal=self.options.causal, assignment=tuple(cluster[b, h].tolist()))
                terms = Terms(partition, q[one], k[one], self.abstraction, mask, self.options.softmax_scale)
                rows.append(terms.weights()[0, 0])
        return torch.stack(rows).unflatten(0, q.shape[:2])


def _directions(q: Tensor, k: Tensor) -> Tensor:
    return (F.normalize(q, dim=-1) + F.normalize(k, dim=-1)) / math.sqrt(2)  # (B, H, n, d)
