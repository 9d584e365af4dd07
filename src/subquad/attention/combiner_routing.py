"""Combiner-Learnable (Ren et al. 2021, section 4.4 and appendix D): learned clusters in place of spans.

    bidirectional (eq. 11)  direct: the own cluster;             groups: the other clusters
    causal (eq. 12)         direct: the own cluster's tokens ≤ i; groups: the other clusters' tokens ≤ i

A token belongs to the centroid nearest to q/|q| + k/|k|, by the cosine: to one cluster exactly, by the token alone,
so clusters are a partition and nothing of the future is in it. Centroids are unit vectors, one set per head, learned
by k-means: in training every call moves the centroid of each cluster that has tokens,

    c ← normalise(decay·c + (1-decay)·mean of its tokens' q/|q| + k/|k|)

They are buffers, saved in the state dict, and rest in evaluation. A call uses the centroids it found, then moves them.

Summaries stand at tokens: at token p the summary of p's cluster up to p, from one pass that carries the state of every
cluster. Query i reads each other cluster where its last token ≤ i (bidirectional: its last token) stands.

    O(n·clusters + n²/clusters) edges; clusters ≈ √n balances the two
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.combiner import Combiner, CombinerOptions, Terms
from subquad.attention.options import option
from subquad.kernels.clusters import cluster_edges, cluster_prefix
from subquad.kernels.edges import EdgeList, edge_attention
from subquad.supports.partitions import Partition, Routing, root


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
        return (_directions(q, k) @ self.centroids.to(q.dtype).mT).argmax(-1)

    @torch.no_grad()
    def learn(self, q: Tensor, k: Tensor, cluster: Tensor, exists: Tensor | None) -> None:
        """One step of k-means by moving averages."""
        x = _directions(q, k)  # (B, H, n, d)
        member = F.one_hot(cluster, self.clusters).to(x.dtype)  # (B, H, n, C)
        member = member if exists is None else member * exists[..., None]
        count = member.sum((0, 2))[..., None]  # (H, C, 1)
        mean = torch.einsum("bhnc,bhnd->hcd", member, x) / count.clamp(min=1)
        centroids = self.centroids.to(x.dtype)
        moved = F.normalize(self.options.decay * centroids + (1 - self.options.decay) * mean, dim=-1)
        self.centroids.copy_(torch.where(count > 0, moved, centroids))

    def combine(self, q, k, v, exists):
        (b, h, n, _), scale = q.shape, self.options.softmax_scale
        with torch.no_grad():
            cluster = self.assign(q, k)  # (B, H, n)
        real = torch.ones(b, h, n, dtype=torch.bool, device=q.device) if exists is None else exists.expand(b, h, n)
        flat, real = cluster.flatten(0, 1), real.flatten(0, 1)  # (B·H, n)
        summary, main = self._edges(flat, real)
        query, key = (self._prefix(x, flat, real) for x in self.abstraction.features(q, k))  # (B, H, n, d)
        value = edge_attention(query, k, v, summary, scale=scale)
        gate = F.dropout(q.new_ones(1, main.num_edges), self.drop) if self.drop else None
        keys, values = torch.cat((k, key), 2), torch.cat((v, value), 2)  # (B, H, 2n, d)
        out = edge_attention(q, keys, values, main, scale=scale, weight_gate=gate)
        if self.training:
            self.learn(q, k, cluster, exists)
        return out

    def _edges(self, cluster: Tensor, real: Tensor) -> tuple[EdgeList, EdgeList]:
        """Summaries to their members, and queries to tokens (0 … n-1) and summaries (n … 2n-1)."""
        n = cluster.shape[1]
        ptr, ids, main_ptr, main_ids = cluster_edges(cluster, real, self.clusters, self.options.causal)
        return EdgeList(ptr, ids, n), EdgeList(main_ptr, main_ids, 2 * n)

    def _prefix(self, x: Tensor, cluster: Tensor, real: Tensor) -> Tensor:
        pool = self.abstraction.pool
        out = cluster_prefix(x.flatten(0, 1), cluster, real, self.clusters, pool == "max")  # (B·H, n, d)
        return out.unflatten(0, x.shape[:2])

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
