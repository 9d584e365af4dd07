"""SBM attention (Cho et al. 2022): every head samples its own graph, and attends over its edges.

    Ŝ = softmax(C Cᵀ)                   (k, k), over all k² entries; C (k, d) the cluster embeddings of a head   (5)
    Q̂ = sigmoid(MLP(Q) Cᵀ)              (n, k); MLP: d → d → d with ReLU, one per head, shared by queries and keys (6)
    K̂ = sigmoid(MLP(K) Cᵀ)              (m, k)                                                                    (7)
    M_ij ~ Bernoulli(p_ij),  p = Q̂ Ŝ K̂ᵀ                                                                           (8)
    A_i = softmax over {j : M_ij = 1} of q_i·k_j·scale,   out_i = Σ_j A_ij v_j;   no edge: out_i = 0              (3-4)
    dL/dp_ij = dL/ds_ij · s_ij,  s_ij = q_i·k_j·scale,  on sampled edges; 0 elsewhere                             (9)

Cost follows the density: below `CROSSOVER` the edges run through the edge kernel, above it a mask runs dense;
`last_path` says which. Choices where the paper is silent: exploration adds every edge independently with probability
δ, so P(M_ij = 1) = p + δ - p·δ in training; every edge that was drawn or explored takes part in eq. 9; self-loops and
the window pin their edges whatever p is, so these have no part in it; causal samples j ≤ i only; in cross-attention the
window compares positions counted from 0 on both sides.

Sampling is not switched off in evaluation. Each call draws one number from `generator` (a `torch.Generator`; None, the
default: torch's global one), and everything random follows from it. So two calls after the same `torch.manual_seed`
sample the same graphs, `forward`, `dense` and `weights` alike; `attention.generator = torch.Generator().manual_seed(0)`
makes one module repeatable on its own. In a compiled graph leave it None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.base import Attention, Capabilities
from subquad.core.options import Options, option
from subquad.kernels.edges import EdgeList
from subquad.kernels.gated import credited, graph_attention, settled_to_zero, unpack_mask
from subquad.supports.sampling import Rules, Sample, draw_seed, pinned_reach, sample, statistics

# Density from which a dense block is faster than its edges. Measured at n = 4096, d = 64, k = 128, CPU seconds on one
# thread: a training step at 0.11, a forward pass at 0.07.
CROSSOVER = 0.1


@dataclass(frozen=True, kw_only=True)
class SbmOptions(Options):
    clusters: int = option(128, "number k of clusters of a head", ge=1)
    sampler: Literal["exact", "fastrg", "bernoulli"] = option("exact", "how graphs are drawn")
    exploration: float = option(0.01, "δ: in training every edge is added with this probability", ge=0, lt=1)
    ste: Literal["pre", "post", "difference"] = option(
        "pre", "gradient of p: eq. 9, after the softmax, or of all pairs"
    )
    self_loops: bool = option(False, "every token attends to itself")
    window: int | None = option(None, "every token attends to so many neighbours, half to each side", ge=1)


class Sbm(Attention):
    """Attention over sampled graphs; see the module docstring.

    After a call: `last_density` (H,) sampled edges / possible edges per head, padding not counted; `last_path`
    "edges", "dense" or, causal, "both"; `last_statistics` of the sampler; `density_loss()`.
    """

    Options = SbmOptions
    capabilities = Capabilities(cross=True, stochastic=True)
    family = "sampled graph"
    paper = "Cho et al. 2022"
    cost = "edges = density·n²"
    exponent = 2.0  # the density is learned: at a constant degree the cost is linear

    def __init__(self, options: SbmOptions) -> None:
        super().__init__(options)
        heads, d, k = options.num_heads, options.head_dim, options.clusters
        self.generator: torch.Generator | None = None
        self.clusters = nn.Parameter(torch.empty(heads, k, d))
        self.mlp = nn.ParameterDict({"weight1": torch.empty(heads, d, d), "weight2": torch.empty(heads, d, d)})
        self.mlp.update({"bias1": torch.empty(heads, 1, d), "bias2": torch.empty(heads, 1, d)})
        self._sample: Sample | None = None
        self._memberships: tuple[Tensor, Tensor, Tensor | None] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Clusters kaiming normal (the density starts near 25 %), the MLP as nn.Linear."""
        for head in self.clusters:
            nn.init.kaiming_normal_(head)
        for x in self.mlp.values():
            nn.init.uniform_(x, -(self.options.head_dim**-0.5), self.options.head_dim**-0.5)

    # ---- the model ----

    def memberships(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Q̂ Ŝ (B, H, n, k) and K̂ (B, H, m, k); p is their product. At least float32."""
        work = torch.promote_types(q.dtype, torch.float32)
        c = self.clusters.to(work)  # (H, k, d)
        block = torch.softmax((c @ c.mT).flatten(1), -1).view(-1, c.shape[1], c.shape[1])  # (H, k, k)
        return self._nodes(q.to(work), c) @ block, self._nodes(k.to(work), c)

    def _nodes(self, x: Tensor, c: Tensor) -> Tensor:
        w1, w2, b1, b2 = (self.mlp[name].to(x.dtype) for name in ("weight1", "weight2", "bias1", "bias2"))
        return ((F.relu(x @ w1 + b1) @ w2 + b2) @ c.mT).sigmoid_()  # (B, H, n, k); in place: it is the largest

    def rules(self, crossover: float) -> Rules:
        o = self.options
        exploration = o.exploration if self.training else 0.0
        return Rules(o.sampler, o.causal, exploration, self.reach, crossover)

    @property
    def reach(self) -> int:
        """Edges |i - j| ≤ reach are pinned; -1: none."""
        return pinned_reach(self.options.self_loops, self.options.window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        w, z = self.memberships(q, k)
        seed = draw_seed(self.generator)
        credits_all = self.options.ste == "difference" and w.requires_grad and torch.is_grad_enabled()
        drawn = sample(w, z, seed, key_mask, self.rules(-1 if credits_all else CROSSOVER))
        self._sample, self._memberships = drawn, (w, z, key_mask)
        z = z * key_mask[:, None, :, None] if credits_all and key_mask is not None else z  # no credit for padding
        return graph_attention(
            q,
            k,
            v,
            w,
            z,
            (drawn.indptr, drawn.indices, drawn.mask),
            scale=self.options.softmax_scale,
            ste=self.options.ste,
            causal=self.options.causal,
            reach=self.reach,
            dropout=self.drop,
            seed=seed,
        )

    def define(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        """1 + (p - p.detach()) is the mask on its edges, and hands its gradient to p."""
        w, z = self.memberships(q, k)
        seen = self.draw_mask(w, z, key_mask)  # (B, H, n, m)
        p = settled_to_zero(
            w @ z.mT if key_mask is None else w @ (z * key_mask[:, None, :, None]).mT, self.options.causal, self.reach
        )
        gate = 1 + (p - p.detach())
        s = q.to(w.dtype) @ k.to(w.dtype).mT * self.options.softmax_scale
        s = s * gate if self.options.ste == "pre" else s
        top = s.detach().masked_fill(~seen, -torch.inf).amax(-1, keepdim=True).clamp_min(torch.finfo(s.dtype).min)
        e = (s - top).masked_fill(~seen, -torch.inf).exp()
        weights = e / e.sum(-1, keepdim=True).clamp_min(torch.finfo(s.dtype).tiny)
        if self.options.ste == "difference":
            return credited(weights, s, seen, p)
        return weights * gate if self.options.ste == "post" else weights

    def draw_mask(self, w: Tensor, z: Tensor, key_mask: Tensor | None) -> Tensor:
        """The graphs that a call of `forward` would sample now, as a mask (B, H, n, m)."""
        drawn = sample(w, z, draw_seed(self.generator), key_mask, self.rules(-1))
        return unpack_mask(drawn.mask, (*w.shape[:3], z.shape[2]))

    @torch.no_grad()
    def expected_mask(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """P(edge) under the model alone, E[M] = Q̂ Ŝ K̂ᵀ, (B, H, n, m)."""
        w, z = self.memberships(q, k)
        p = w @ z.mT
        seen = torch.ones(p.shape[-2:], dtype=torch.bool, device=p.device)
        seen = seen.tril() if self.options.causal else seen
        return p * (seen if key_mask is None else seen & key_mask[:, None, None, :])

    @torch.no_grad()
    def picture(self, n: int) -> Tensor:
        """A graph per head, (H, n, n), sampled for random tokens; the support itself is everybody."""
        draw, own = torch.Generator().manual_seed(0), self.generator
        q, k = torch.randn(2, 1, self.options.num_heads, n, self.options.head_dim, generator=draw)
        self.generator = draw
        try:
            return self.draw_mask(*self.memberships(q.to(self.clusters), k.to(self.clusters)), None)[0].int()
        finally:
            self.generator = own

    # ---- after a call ----

    @property
    def last_path(self) -> str:
        last = self._last
        return "edges" if not last.mask.numel() else "both" if last.indices.numel() else "dense"

    def last_mask(self) -> Tensor:
        """The graphs of the last call as a mask (B, H, n, m), for pictures: quadratic."""
        w, z, _ = self._memberships_of_last
        last, shape = self._last, (*w.shape[:3], z.shape[2])
        listed = EdgeList(last.indptr, last.indices, z.shape[2]).to_mask().view(shape)
        return listed | unpack_mask(last.mask, shape) if last.mask.numel() else listed

    def last_expected(self) -> Tensor:
        """P(edge) under the model for the last call, Q̂ Ŝ K̂ᵀ (B, H, n, m), for pictures: quadratic."""
        w, z, _ = self._memberships_of_last
        return (w @ z.mT).detach()

    @property
    def last_statistics(self) -> dict[str, float]:
        """Edges, edges proposed, and the share of rows that were sampled by looking at every key."""
        return statistics(self._last)

    @property
    def last_density(self) -> Tensor:
        """(H,): sampled edges / possible edges."""
        w, z, key_mask = self._memberships_of_last
        degrees = self._last.degrees.view(w.shape[:3])  # (B, H, n)
        edges = (degrees * _real_rows(w, z, key_mask)).sum((0, 2))  # (H,)
        return (edges / _possible(w, z, key_mask, self.options.causal).clamp_min(1)).float()

    def density_loss(self) -> Tensor:
        """Mean over heads of edges / possible edges of the last call; add λ times it to the loss.

        Its value counts the sampled edges, its gradient is that of their expected number Σ p: exact, over all pairs
        that could be drawn, in O(n·k). Pinned edges count but have no gradient: p has no part in them.
        """
        w, z, key_mask = self._memberships_of_last
        possible = _possible(w, z, key_mask, self.options.causal).clamp_min(1)
        expected = self._expected_edges(w, z, key_mask) / (possible * w.shape[1])
        return expected + (self.last_density.mean().to(expected) - expected.detach())

    def _expected_edges(self, w: Tensor, z: Tensor, key_mask: Tensor | None) -> Tensor:
        """Σ p over real queries and the keys that they may draw: prefix sums over the keys, no matrix n × m."""
        (n, m), o = (w.shape[2], z.shape[2]), self.options
        z = z if key_mask is None else z * key_mask[:, None, :, None]
        w = w * _real_rows(w, z, key_mask)[..., None]
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

    @property
    def _last(self) -> Sample:
        if self._sample is None:
            raise RuntimeError(f"{self.name} has not been called yet: nothing was sampled")
        return self._sample

    @property
    def _memberships_of_last(self) -> tuple[Tensor, Tensor, Tensor | None]:
        assert self._last is not None and self._memberships is not None
        return self._memberships

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts afresh: the last sample belongs to the graph of the call that made it."""
        return {**self.__dict__, "_sample": None, "_memberships": None}


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


def sbm_layers(model: nn.Module) -> list[Sbm]:
    """The SBM attentions of a model, in order."""
    return [module for module in model.modules() if isinstance(module, Sbm)]


def density_loss(model: nn.Module) -> Tensor:
    """The mean of `density_loss` over all SBM layers of a model: loss + λ · density_loss(model)."""
    layers = sbm_layers(model)
    if not layers:
        raise ValueError("model has no SBM attention: there is no density to regularise")
    return torch.stack([layer.density_loss() for layer in layers]).mean()
