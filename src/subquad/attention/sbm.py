"""SBM attention (Cho et al. 2022): every head samples its own graph, and attends over its edges.

    Ŝ = softmax(C Cᵀ)                   (k, k), over all k² entries; C (k, d) the cluster embeddings of a head   (5)
    Q̂ = sigmoid(MLP(Q) Cᵀ)              (n, k); MLP: d → d → d with ReLU, one per head, shared by queries and keys (6)
    K̂ = sigmoid(MLP(K) Cᵀ)              (m, k)                                                                    (7)
    M_ij ~ Bernoulli(p_ij),  p = Q̂ Ŝ K̂ᵀ                                                                           (8)
    A_i = softmax over {j : M_ij = 1} of q_i·k_j·scale,   out_i = Σ_j A_ij v_j;   no edge: out_i = 0              (3-4)
    dL/dp_ij = dL/ds_ij · s_ij,  s_ij = q_i·k_j·scale,  on sampled edges; 0 elsewhere                             (9)

Cost follows the density: below about 10 % the edges run through the edge kernel, above it a mask runs dense; the
record of a call says which. Choices where the paper is silent: exploration adds every edge independently with
probability δ, so P(M_ij = 1) = p + δ - p·δ in training; every edge that was drawn or explored takes part in eq. 9;
self-loops and the window pin their edges whatever p is, so these have no part in it; causal samples j ≤ i only; in
cross-attention the window compares positions counted from 0 on both sides.

Sampling is not switched off in evaluation: everything random follows from the seed of the call. The random numbers of a
pair depend on the ranks of its tokens among the real tokens of their row, so padding never moves them. In evaluation
they do not depend on the place of the row in its batch: a row gives the same result as on its own, so beam search may
reorder rows. In training every row of a batch has random numbers of its own.

The record of a call has `density` (H,), sampled edges / possible edges per head, padding not counted; `path` "edges",
"dense" or, causal, "both"; in training `auxiliary_loss`, the density loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.base import Attention, Capabilities
from subquad.attention.call import Call, Record, draw_seed, repeat_heads
from subquad.attention.checks import checked_seed
from subquad.attention.states.graphs import Graphs
from subquad.attention.states.state import Memory
from subquad.core.numbers import possible_pairs
from subquad.core.options import Options, option
from subquad.kernels.graphs import graph_attention
from subquad.kernels.graphs.memberships import memberships
from subquad.kernels.graphs.reference import gated_weights, settled_to_zero
from subquad.kernels.masks import unpack_mask
from subquad.kernels.sampler import Rules, Sample, all_masked, pinned_reach, sample

# Density from which a dense block is faster than its edges. Measured at n = 4096, d = 64, k = 128, CPU seconds on one
# thread: a training step at 0.11, a forward pass at 0.07.
CROSSOVER = 0.1


@dataclass(frozen=True, kw_only=True)
class SbmOptions(Options):
    clusters: int = option(128, "number k of clusters of a head", ge=1)
    sampler: Literal["exact", "fastrg", "bernoulli"] = option("exact", "how graphs are drawn")
    exploration: float = option(0.01, "δ: in training every edge is added with this probability", ge=0, lt=1)
    ste: Literal["pre", "published", "difference"] = option(
        "pre", "gradient of p: eq. 9, that of the authors' code, or one for all pairs"
    )
    self_loops: bool = option(False, "every token attends to itself")
    window: int | None = option(None, "every token attends to this many neighbours, half on each side", ge=1)
    cluster_init: Literal["per-head", "published"] = option(
        "per-head", "kaiming normal for each head, or for all heads at once as in the authors' code"
    )


class Sbm(Attention):
    __doc__ = __doc__

    Options = SbmOptions
    capabilities = Capabilities(cross=True, stochastic=True)
    data_dependent = True
    family = "sampled graph"
    paper = "Cho et al. 2022"
    cost = "edges = density·n²"
    exponent = 2.0  # the density is learned: at a constant degree the cost is linear
    positional = False  # the window and causality need the order of the tokens alone
    examples: ClassVar = ({}, {"ste": "difference", "window": 5}, {"ste": "published", "self_loops": True})
    gallery: ClassVar = {"clusters": 16}
    picture_note = "Every call samples its own graph. This one was sampled for random tokens by an untrained layer."

    def __init__(self, options: SbmOptions) -> None:
        super().__init__(options)
        heads, d, k = options.num_heads, options.head_dim, options.clusters
        self.clusters = nn.Parameter(torch.empty(heads, k, d))
        self.mlp = nn.ParameterDict({"weight1": torch.empty(heads, d, d), "weight2": torch.empty(heads, d, d)})
        self.mlp.update({"bias1": torch.empty(heads, 1, d), "bias2": torch.empty(heads, 1, d)})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Clusters kaiming normal (the density starts near 25 %), the MLP as nn.Linear.

        The authors initialise the tensor (H, k, d) at once, which makes the clusters √k smaller.
        """
        for clusters in self.clusters if self.options.cluster_init == "per-head" else (self.clusters,):
            nn.init.kaiming_normal_(clusters)
        for x in self.mlp.values():
            nn.init.uniform_(x, -(self.options.head_dim**-0.5), self.options.head_dim**-0.5)

    # ---- the model ----

    def memberships(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Q̂ Ŝ (B, H, n, k) and K̂ (B, H, m, k); p is their product. At least float32, also under autocast."""
        work = torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            c = self.clusters.to(work)  # (H, k, d)
            block = torch.softmax((c @ c.mT).flatten(1), -1).view(-1, c.shape[1], c.shape[1])  # (H, k, k)
            w1, w2, b1, b2 = (self.mlp[name].to(work) for name in ("weight1", "weight2", "bias1", "bias2"))
            layers = w1, b1, w2 @ c.mT, b2 @ c.mT  # the second layer and the clusters in one: (H, d, k), (H, 1, k)
            return memberships(q.to(work), *layers, block), memberships(k.to(work), *layers)

    def rules(self, training: bool, crossover: float) -> Rules:
        o = self.options
        return Rules(o.sampler, o.causal, o.exploration if training else 0.0, self.reach, crossover, not training)

    @property
    def reach(self) -> int:
        """Edges |i - j| ≤ reach are pinned; -1: none."""
        return pinned_reach(self.options.self_loops, self.options.window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        w, z = self.memberships(q, k)
        return self._attend(q, k, v, w, z, self._draw(w, z, call), call)

    def attend_observed(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Record]:
        w, z = self.memberships(q, k)
        drawn = self._draw(w, z, call)
        out = self._attend(q, k, v, w, z, drawn, call)
        density = self._density(drawn, w, z, call.key_mask)
        loss = self._density_loss(density, w, z, call.key_mask) if call.training else None
        path = None if torch.compiler.is_compiling() else drawn.path
        return out, Record(density=density, auxiliary_loss=loss, path=path)

    def _draw(self, w: Tensor, z: Tensor, call: Call) -> Sample:
        credits_all = self.options.ste == "difference" and w.requires_grad and torch.is_grad_enabled()
        rules = self.rules(call.training, -1.0 if credits_all else CROSSOVER)
        return sample(w, z, _seed(call), call.key_mask, rules)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, z: Tensor, drawn: Sample, call: Call) -> Tensor:
        return graph_attention(
            q,
            k,
            v,
            w,
            z,
            drawn,
            scale=self.options.softmax_scale,
            ste=self.options.ste,
            causal=self.options.causal,
            reach=self.reach,
            key_mask=call.key_mask,
            dropout=call.dropout,
            seed=call.seed,
        )

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        w, z = self.memberships(q, k)
        seen = self._mask(w, z, call)  # (B, H, n, m)
        with torch.autocast(q.device.type, enabled=False):
            real = z if call.key_mask is None else z * call.key_mask[:, None, :, None]
            p = settled_to_zero(w @ real.mT, self.options.causal, self.reach)
            s = q.to(w.dtype) @ k.to(w.dtype).mT * self.options.softmax_scale
            return gated_weights(s, seen, p, self.options.ste)

    def _mask(self, w: Tensor, z: Tensor, call: Call) -> Tensor:
        drawn = sample(w, z, _seed(call), call.key_mask, self.rules(call.training, -1.0))
        return unpack_mask(drawn.mask, (*w.shape[:3], z.shape[2]))

    def make_memory(self, margin: int) -> Memory:
        return Graphs()

    @property
    def kept_width(self) -> int:
        return self.options.head_dim + self.options.clusters

    # ---- for pictures and counts ----

    @torch.no_grad()
    def graph(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None, seed: Tensor | int | None = None) -> Tensor:
        """The graphs that a call with this seed samples, bool (B, H, n, m): quadratic."""
        drawn = draw_seed() if seed is None else checked_seed(seed)
        return self._mask(*self.memberships(q, k), Call(key_mask, seed=drawn, training=self.training))

    @torch.no_grad()
    def expected(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """P(edge) under the model alone, E[M] = Q̂ Ŝ K̂ᵀ, (B, H, n, m): quadratic."""
        w, z = self.memberships(q, k)
        p = w @ z.mT
        seen = torch.ones(p.shape[-2:], dtype=torch.bool, device=p.device)
        seen = seen.tril() if self.options.causal else seen
        return p * (seen if key_mask is None else seen & key_mask[:, None, None, :])

    @torch.no_grad()
    def token_clusters(self, q: Tensor, k: Tensor) -> Tensor:
        """As a key, the cluster of its largest membership: argmax of K̂."""
        return self.memberships(q, repeat_heads(k, q.shape[1]))[1].argmax(-1)

    def picture(self, n: int) -> Tensor:
        """A graph per head, (H, n, n), sampled for random tokens; the support itself is everybody."""
        q, k = self._random_tokens(n)
        return self.graph(q, k, seed=torch.tensor(0, device="cpu"))[0].int()

    @torch.no_grad()
    def connections(self, n: int, density: float | None = None) -> float:
        """The expected edges of a head at length n; without a density as seen, for random tokens."""
        if density is None:
            density = float(self.expected(*self._random_tokens(min(n, 512))).sum((-1, -2)).mean())
            density /= possible_pairs(min(n, 512), self.options.causal)
        return density * possible_pairs(n, self.options.causal)

    def _random_tokens(self, n: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        shape = (2, 1, self.options.num_heads, n, self.options.head_dim)
        q, k = torch.randn(shape, generator=draw, device="cpu").to(self.clusters)
        return q, k

    def host_reads(self, padded: bool, dtype: torch.dtype = torch.float32, length: int | None = None) -> str:
        """Up to n² edges can be drawn: lists with room for all of them would cost what full attention costs. Short
        sequences, and ste=difference in training, go by masks, and nobody counts their edges.
        """
        credits_all = self.options.ste == "difference" and self.training
        masked = all_masked(-1.0 if credits_all else CROSSOVER, length, on_host=False)
        return "" if masked else "how many edges it has drawn"

    # ---- density ----

    def _density(self, drawn: Sample, w: Tensor, z: Tensor, key_mask: Tensor | None) -> Tensor:
        """(H,): sampled edges / possible edges."""
        degrees = drawn.degrees.view(w.shape[:3])  # (B, H, n)
        edges = (degrees * _real_rows(w, z, key_mask)).sum((0, 2))  # (H,)
        return (edges / _possible(w, z, key_mask, self.options.causal).clamp_min(1)).float()

    def _density_loss(self, density: Tensor, w: Tensor, z: Tensor, key_mask: Tensor | None) -> Tensor:
        """Mean over heads of edges / possible edges; add λ times it to the loss.

        Its value counts the sampled edges, its gradient is that of their expected number Σ p: exact, over all pairs
        that could be drawn, in O(n·k). Pinned edges count but have no gradient: p has no part in them.
        """
        possible = _possible(w, z, key_mask, self.options.causal).clamp_min(1)
        expected = (self._expected_edges(w, z, key_mask) / (possible * w.shape[1])).to(w.dtype)
        return expected + (density.mean().to(expected) - expected.detach())

    def _expected_edges(self, w: Tensor, z: Tensor, key_mask: Tensor | None) -> Tensor:
        """Σ p over real queries and the keys that they may draw: prefix sums over the keys, no matrix n × m."""
        (n, m), o = (w.shape[2], z.shape[2]), self.options
        if key_mask is not None:
            z, w = z * key_mask[:, None, :, None], w * _real_rows(w, z, key_mask)[..., None]
        reach = self.reach
        if not o.causal and reach < 0:
            return (w.sum(2) * z.sum(2)).sum()
        upto = F.pad(z.cumsum(2), (0, 0, 1, 0))  # (B, H, m + 1, k)
        row = torch.arange(n, device=w.device)
        end = row + 1 if o.causal else torch.full_like(row, m)
        drawn = upto[:, :, end]  # (B, H, n, k)
        if reach >= 0:
            drawn = (
                drawn - upto[:, :, (row + reach + 1).minimum(end)] + upto[:, :, (row - reach).clamp_min(0).minimum(end)]
            )
        return (w * drawn).sum()


def _seed(call: Call) -> Tensor:
    if call.seed is None:
        raise ValueError("seed must be given: sbm samples its graphs from it")
    return call.seed


def _real_rows(w: Tensor, z: Tensor, key_mask: Tensor | None) -> Tensor:
    """(B, 1, n) or (1, 1, 1): queries that count. Where lengths are equal the key mask speaks of the queries too."""
    if key_mask is None or w.shape[2] != z.shape[2]:
        return torch.ones(1, 1, 1, dtype=torch.bool, device=w.device)
    return key_mask[:, None]


def _possible(w: Tensor, z: Tensor, key_mask: Tensor | None, causal: bool) -> Tensor:
    """Pairs that could have an edge, padding not counted, summed over the batch: a number per head."""
    (batch, _, n, _), m = w.shape, z.shape[2]
    real = torch.ones(batch, m, device=w.device) if key_mask is None else key_mask.float()
    rows = _real_rows(w, z, key_mask)[:, 0].expand(batch, n).to(real)
    keys = real.double().cumsum(1) if causal else real.double().sum(1, keepdim=True).expand(-1, n)  # (B, n)
    return (rows * keys).sum()
