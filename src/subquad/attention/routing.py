"""Routing attention (Roy et al. 2021): every token attends to the tokens of its own learned cluster.

    out_i = Σ_j softmax_j(q_i·k_j·scale) v_j      over the j (causal: j ≤ i) whose cluster is that of i

A token belongs to the centroid nearest to q/|q| + k/|k|, by the cosine: to one cluster exactly, by the token alone,
so clusters are a partition and nothing of the future is in it. Centroids are unit vectors, one set per head, learned
by k-means with moving averages: after a training step,

    c ← normalise(decay·c + (1-decay)·mean of its tokens' (q/|q| + k/|k|)/√2)     for every cluster that had tokens

They are buffers, saved in the state dict. A call never moves them: its record has the sums and counts of its tokens,
and `update` takes those of the whole step (micro-batches and processes added up).

This is the X of Combiner-X: `combiner-routing` adds a summary of every other cluster. Choice where the papers differ:
Roy et al. take the k tokens nearest to a centroid into its cluster; here every token is in exactly one.

    O(n·clusters + n²/clusters) time; clusters ≈ √n balances the two. O(n) memory
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.base import Attention
from subquad.attention.call import Call, Record, repeat_heads
from subquad.attention.states.chosen import Labelled
from subquad.attention.states.state import Memory
from subquad.core.options import Options, option
from subquad.kernels.clusters import cluster_attention, nearest_centroids, reads_sizes
from subquad.probability import probability_map


@dataclass(frozen=True, kw_only=True)
class RoutingOptions(Options):
    clusters: int | None = option(None, "number of clusters; None = ⌈√max_length⌉, or 64 without max_length", ge=1)
    decay: float = option(0.999, "how much of a centroid one training step keeps", ge=0, le=1)


class Clusters(NamedTuple):
    """The clusters of a call, as the kernels take them; G = B·H sequences."""

    order: Tensor  # (G·n,): all tokens by sequence, cluster and time
    cluster: Tensor  # int64 (G, n)
    real: Tensor  # bool (G, n)


class Routing(Attention):
    __doc__ = __doc__

    Options = RoutingOptions
    data_dependent = True
    family = "learned clusters"
    theory_reason = "whom a token attends to depends on what the tokens contain"
    paper = "Roy et al. 2021"
    cost = "n·clusters + n²/clusters"
    positional = False  # causality needs the order of the tokens alone
    sparse = True  # the weights do not cover the support: who shares a cluster is learned
    examples: ClassVar = ({"clusters": 3}, {})
    gallery: ClassVar = {"clusters": 8}
    picture_note = (
        "The clusters are learned, and follow from the tokens. Here the tokens are dealt out to them in turn."
    )
    centroids: Tensor

    def __init__(self, options: RoutingOptions) -> None:
        super().__init__(options)
        length = options.max_length
        self.clusters = options.clusters or (64 if length is None else math.isqrt(length - 1) + 1)
        start = torch.randn(options.num_heads, self.clusters, options.head_dim)
        self.register_buffer("centroids", F.normalize(start, dim=-1))  # (H, C, d)

    @property
    def exponent(self) -> float:
        """1.5 when the number of clusters goes with the length; any fixed number makes clusters of n/C tokens."""
        return 1.5 if self.options.clusters is None and self.options.max_length is not None else 2.0

    # ---- clusters ----

    @torch.no_grad()
    def assign(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """The cluster of every token, int64 (B, H, n). Padding is dealt out in turn: what stands there does not
        matter."""
        with torch.autocast(q.device.type, enabled=False):
            nearest = nearest_centroids(q, k, self.centroids)
        dealt = torch.arange(q.shape[2], device=q.device) % self.clusters
        return nearest if call.exists is None else torch.where(call.exists, nearest, dealt)

    @torch.no_grad()
    def _clusters(self, cluster: Tensor, call: Call) -> Clusters:
        """The tokens sorted by cluster, stably: in the order of time inside each."""
        b, h, n = cluster.shape
        cluster = cluster.flatten(0, 1)  # (B·H, n)
        sequence = torch.arange(b * h, device=cluster.device)[:, None]
        order = (sequence * self.clusters + cluster).flatten().argsort(stable=True)  # (B·H·n,)
        real = torch.ones_like(cluster, dtype=torch.bool)
        if call.exists is not None:
            real = call.exists.expand(b, h, n).flatten(0, 1)
        return Clusters(order, cluster, real)

    @torch.no_grad()
    def statistics(self, q: Tensor, k: Tensor, cluster: Tensor, call: Call) -> Tensor:
        """Per cluster the sum of its real tokens' directions, and behind it their number: (H, C, d + 1)."""
        x, heads = _directions(q, k), torch.arange(q.shape[1], device=q.device)[:, None]
        label = (cluster + heads * self.clusters).flatten()  # (B·H·n,): the clusters of all heads
        real = x.new_ones(1, 1, 1) if call.exists is None else call.exists.to(x.dtype)  # (B, 1, n)
        total = x.new_zeros(q.shape[1] * self.clusters, x.shape[3] + 1)
        total.index_add_(0, label, (F.pad(x, (0, 1), value=1.0) * real[..., None]).flatten(0, 2))
        return total.unflatten(0, (-1, self.clusters))

    @torch.no_grad()
    def update(self, statistics: Tensor) -> None:
        """One step of k-means by moving averages, from the statistics of a training step."""
        wanted = (*self.centroids.shape[:2], self.centroids.shape[2] + 1)
        if statistics.shape != wanted:
            raise ValueError(f"statistics must have shape (H, C, d + 1) = {wanted}, not {tuple(statistics.shape)}")
        count, centroids = statistics[..., -1:], self.centroids.to(statistics.dtype)
        mean = statistics[..., :-1] / count.clamp(min=1)
        moved = F.normalize(self.options.decay * centroids + (1 - self.options.decay) * mean, dim=-1)
        keep = (count == 0) | ~mean.isfinite().all(-1, keepdim=True)  # one NaN must not spoil a centroid for good
        self.centroids.copy_(torch.where(keep, centroids, moved))

    # ---- attention ----

    def host_reads(self, padded: bool, dtype: torch.dtype = torch.float32, length: int | None = None) -> str:
        """Torch's kernels take clusters of any sizes, but not float64, and draw dropout of their own."""
        work, dropout = torch.promote_types(dtype, torch.float32), self.options.dropout if self.training else 0.0
        return "the sizes of its clusters" if reads_sizes(work, self.options.head_dim, dropout, length) else ""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self._observed(q, k, v, call, observe=False)[0]

    def attend_observed(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Record]:
        return self._observed(q, k, v, call, observe=call.training)

    def _observed(self, q: Tensor, k: Tensor, v: Tensor, call: Call, observe: bool) -> tuple[Tensor, Record]:
        """The output in v's dtype, computed in float32 at least, and the record."""
        kind, work = v.dtype, torch.promote_types(q.dtype, torch.float32)
        q, k, v = q.to(work), k.to(work), v.to(work)
        cluster = self.assign(q, k, call)
        record = Record(statistics=self.statistics(q, k, cluster, call)) if observe else Record()
        with torch.autocast(q.device.type, enabled=False):
            a, b, c = (x.flatten(0, 1) for x in (q, k, v))  # (B·H, n, d)
            out = self.combine(a, b, c, self._clusters(cluster, call), call)
        return out.unflatten(0, q.shape[:2]).to(kind), record

    def make_memory(self, margin: int) -> Memory:
        return Labelled(self.options.num_heads, margin)

    def labels(self, q: Tensor, k: Tensor) -> Tensor:
        """The clusters of new tokens, (B, H, t, 1)."""
        work = torch.promote_types(q.dtype, torch.float32)
        return self.assign(q.to(work), repeat_heads(k, q.shape[1]).to(work), Call())[..., None]

    def token_clusters(self, q: Tensor, k: Tensor) -> Tensor:
        return self.labels(q, k)[..., 0]

    def combine(self, q: Tensor, k: Tensor, v: Tensor, clusters: Clusters, call: Call) -> Tensor:
        """q, k, v (B·H, n, d) → (B·H, n, d)."""
        o = self.options
        return cluster_attention(
            q, [k], [v], clusters, self.clusters,
            causal=o.causal, scale=o.softmax_scale, dropout=call.dropout, seed=call.seed,
        )  # fmt: skip

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        work = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(work), k.to(work)
        return probability_map("softmax")(
            q @ k.mT * self.options.softmax_scale, self._own(self.assign(q, k, call), call)
        )

    def _own(self, cluster: Tensor, call: Call) -> Tensor:
        """Who is in whose cluster, and may be seen: bool (B, H, n, n)."""
        own = cluster[..., :, None] == cluster[..., None, :]
        own = own.tril() if self.options.causal else own
        return own if call.key_mask is None else own & call.key_mask[:, None, None]

    # ---- for pictures and counts: tokens dealt out to the clusters in turn; the real clusters depend on q and k ----

    def picture(self, n: int) -> Tensor:
        dealt = torch.arange(n) % self.clusters
        own = (dealt[:, None] == dealt).int()
        return own.tril() if self.options.causal else own

    def connections(self, n: int) -> float:
        """n / C tokens of the query's cluster; the products with the centroids are not counted."""
        return n * n / min(n, self.clusters) / (2 if self.options.causal else 1)


def _directions(q: Tensor, k: Tensor) -> Tensor:
    return (F.normalize(q, dim=-1) + F.normalize(k, dim=-1)) / math.sqrt(2)  # (B, H, n, d)
