"""Full attention: everyone to everyone, the alternative that everything else is measured against.

    out_i = Σ_j ρ(q_i·k_j·scale)_j v_j          O(n²) time

With softmax it is `F.scaled_dot_product_attention`; another probability map ρ needs the whole row of scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.base import Attention, Capabilities
from subquad.core.options import Options, option
from subquad.probability import ProbabilityMap, probability_map


@dataclass(frozen=True, kw_only=True)
class MapOptions(Options):
    """Options of mechanisms whose scores may go through any probability map."""

    map: Literal["softmax", "topk", "sparselin-gen", "entmax", "hardmax"] = option("softmax", "scores to weights")
    topk: int = option(8, "map=topk: how many keys a query keeps", ge=1)
    lam: float = option(0.0, "map=sparselin-gen: λ; 0 is sparsemax", ge=0, lt=1)
    alpha: float | Literal["learn"] = option(1.5, "map=entmax: α, or learn (one per head)", ge=1)

    def probability_map(self, num_heads: int) -> ProbabilityMap:
        return probability_map(self.map, topk=self.topk, lam=self.lam, alpha=self.alpha, num_heads=num_heads)


class Full(Attention):
    """Full attention; see the module docstring."""

    Options = MapOptions
    capabilities = Capabilities(cross=True)
    family = "dense"
    paper = "Vaswani et al. 2017"
    cost = "n²"
    exponent = 2.0

    def __init__(self, options: MapOptions) -> None:
        super().__init__(options)
        self.map = options.probability_map(options.num_heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, seen: Tensor | None = None) -> Tensor:
        """`seen`, bool (n, m) or (B, H, n, m): who may see whom, beside causality and the key mask."""
        if self.options.map != "softmax":
            weights = F.dropout(self.define(q, k, key_mask, seen), self.drop)
            return weights.to(v.dtype) @ v
        causal, scale = self.options.causal, self.options.softmax_scale
        if key_mask is None and seen is None:
            return sdpa(q, k, v, None, causal=causal, scale=scale, drop=self.drop)
        mask = self._seen(q, k, seen)
        mask = mask if key_mask is None else mask & key_mask[:, None, None, :]
        return sdpa(q, k, v, mask, causal=False, scale=scale, drop=self.drop)

    def define(self, q: Tensor, k: Tensor, key_mask: Tensor | None, seen: Tensor | None = None) -> Tensor:
        return masked_map(self.map, q, k, self._seen(q, k, seen), key_mask, self.options.softmax_scale)

    def _seen(self, q: Tensor, k: Tensor, seen: Tensor | None) -> Tensor:
        full = torch.ones(q.shape[2] if self.options.causal else 1, k.shape[2], dtype=torch.bool, device=q.device)
        full = full.tril() if self.options.causal else full  # (n or 1, m)
        return full if seen is None else full & seen

    def attend_tokens(self, query, key, value, project, key_mask, seen=None):
        if seen is None:
            return super().attend_tokens(query, key, value, project, key_mask)
        q, k, v = project.together(query, key, value)  # (B, H, n, d)
        return self.attend(q, k, v, key_mask, seen).transpose(1, 2).flatten(2)

    def token_weights(self, query, key, project, key_mask, seen=None):
        return self.define(project.queries(query), project.keys(key), key_mask, seen)


def sdpa(q, k, v, mask: Tensor | None, *, causal: bool, scale: float, drop: float) -> Tensor:
    """torch's fused attention with our conventions: half precision on the CPU in float32, empty rows 0."""
    kind, empty = q.dtype, None
    if q.device.type == "cpu" and kind in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    if mask is not None:
        empty = ~mask.any(-1, keepdim=True)  # (…, n or 1, 1)
        mask = mask | empty  # a row with nothing to see runs over everything, and is erased below
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop, is_causal=causal, scale=scale)
    return (out if empty is None else out.masked_fill(empty, 0)).to(kind)


def masked_map(rho: ProbabilityMap, q, k, seen: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    """The definition of every pattern: ρ over the allowed keys. seen broadcasts to (B, H, n, m)."""
    if q.dtype in (torch.float16, torch.bfloat16):
        q, k = q.float(), k.float()
    allowed = seen if key_mask is None else seen & key_mask[:, None, None, :]
    return rho(q @ k.mT * scale, allowed)
