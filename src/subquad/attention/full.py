"""Full attention: everyone to everyone, the alternative that everything else is measured against.

    out_i = Σ_j ρ(q_i·k_j·scale)_j v_j          O(n²) time

With softmax it is `F.scaled_dot_product_attention`; another probability map ρ needs the whole row of scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import subquad.kernels.flash  # noqa: F401  (teaches the FLOP counter torch's own kernel)
from subquad.attention.base import Attention, Capabilities
from subquad.attention.call import Call, Record, repeat_heads
from subquad.attention.checks import check_inputs
from subquad.attention.states.chosen import all_before, past
from subquad.attention.states.keys import Keys, attend_kept
from subquad.attention.states.state import Memory
from subquad.core.hashing import dropout_factors, key_factors, ranks
from subquad.core.options import Options, option
from subquad.probability import ProbabilityMap, probability_map
from subquad.supports.kept import EVERYTHING


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
    __doc__ = __doc__

    Options = MapOptions
    capabilities = Capabilities(cross=True)
    family = "dense"
    paper = "Vaswani et al. 2017"
    cost = "n²"
    exponent = 2.0
    positional = False
    grouped = True
    examples = ({}, {"map": "entmax"}, {"map": "topk", "topk": 3}, {"map": "entmax", "alpha": "learn"})

    def __init__(self, options: MapOptions) -> None:
        super().__init__(options)
        self.map = options.probability_map(options.num_heads)

    @property
    def is_torch_alone(self) -> bool:
        return self.options.map in ("softmax", "topk", "hardmax")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, seen: Tensor | None = None) -> Tensor:
        """`seen`, bool (n, m) or (B, H, n, m): who may see whom, beside causality and the key mask."""
        if self.options.map != "softmax":
            k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
            weights = masked_map(self.map, q, k, self._seen(q, k, seen), call.key_mask, self.options.softmax_scale)
            return drop(weights, call).to(v.dtype) @ v
        mask = None if seen is None and call.key_mask is None else self._seen(q, k, seen)
        mask = mask if call.key_mask is None or mask is None else mask & call.key_mask[:, None, None, :]
        return sdpa(
            q, k, v, mask, causal=self.options.causal and mask is None, call=call, scale=self.options.softmax_scale
        )

    boundary = "all keys and values, round a ring"

    @property
    def divides(self) -> bool:
        return self.options.map == "softmax"

    def attend_shard(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return call.shard.ring(q, k, v, call, causal=self.options.causal, scale=self.options.softmax_scale)

    def define(self, q: Tensor, k: Tensor, call: Call, seen: Tensor | None = None) -> Tensor:
        return masked_map(self.map, q, k, self._seen(q, k, seen), call.key_mask, self.options.softmax_scale)

    def make_memory(self, margin: int) -> Memory:
        return Keys(EVERYTHING, [past], [0] * self.options.num_heads, margin, all_before)

    def attend_kept(self, q, k, v, seen, position, factors=None):
        rho = None if self.options.map == "softmax" else self.map
        return attend_kept(q, k, v, seen, self.options.softmax_scale, factors, rho)

    def _seen(self, q: Tensor, k: Tensor, seen: Tensor | None) -> Tensor:
        full = torch.ones(q.shape[2] if self.options.causal else 1, k.shape[2], dtype=torch.bool, device=q.device)
        full = full.tril() if self.options.causal else full  # (n or 1, m)
        return full if seen is None else full & seen

    def attend_tokens(self, query, key, value, project, key_mask, seed=None, *, want_record=False, seen=None):
        if seen is None:
            return super().attend_tokens(query, key, value, project, key_mask, seed, want_record=want_record)
        if self.across is not None:
            raise ValueError("attn_mask: a sequence that is divided among processes takes no mask of its own")
        q, k, v = project.together(query, key, value)  # (B, H, n, d)
        check_inputs(self, q, k, v, key_mask)
        rows, q, k, v = self._begin(q, k, v, key_mask)
        return self.attend(q, k, v, self._call(rows, seed, q.shape[2]), seen).transpose(1, 2).flatten(2), Record()

    def token_weights(self, query, key, project, key_mask, seed=None, seen=None):
        if seen is None:
            return super().token_weights(query, key, project, key_mask, seed)
        q, k = project.queries(query), project.keys(key)
        rows, q, k, _ = self._begin(q, k, k, key_mask)
        return self.define(q, repeat_heads(k, q.shape[1]), self._call(rows, seed, q.shape[2]), seen)


def sdpa(q, k, v, mask: Tensor | None, *, causal: bool, scale: float, call: Call) -> Tensor:
    """torch's fused attention with our conventions: half precision in float32, empty rows 0, dropout by the seed."""
    kind, empty, work = q.dtype, None, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(work), k.to(work), v.to(work)
    if mask is not None:
        empty = ~mask.any(-1, keepdim=True)  # (…, n or 1, 1)
        mask = mask | empty  # a row with nothing to see runs over everything, and is erased below
    if call.dropout:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        scores = q @ k.mT * scale
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril() if causal else mask
        weights = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
        out = drop(weights.softmax(-1), call) @ v
    else:
        grouped = {"enable_gqa": True} if k.shape[1] < q.shape[1] else {}
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, **grouped)
    lost = q.sum(-1, keepdim=True).isnan()  # the fused kernel may give 0 for a query that is not a number
    spoilt = torch.zeros_like(lost, dtype=out.dtype).masked_fill(lost, torch.nan)  # adding is faster than filling
    out = out + spoilt if out.requires_grad else out.add_(spoilt)
    return (out if empty is None else out.masked_fill(empty, 0)).to(kind)


def drop(weights: Tensor, call: Call, *, to_tokens: bool = True) -> Tensor:
    """Dropout on weights (B, H, n, m), by the seed of the call; `to_tokens`: the columns are tokens.

    Tokens count from the first real one of their row: leading padding moves no random number.
    """
    if not call.dropout:
        return weights
    assert call.seed is not None
    b, h, n, m = weights.shape
    instance = torch.arange(b * h, device=weights.device).view(b, h, 1, 1)
    row, column = torch.arange(n, device=weights.device)[:, None], torch.arange(m, device=weights.device)
    if call.key_mask is not None and call.lengths is None:  # rows that do not begin at slot 0
        first = call.key_mask.int().argmax(1).view(b, 1, 1, 1)
        row = row - first if n == call.key_mask.shape[1] else row
        column = column - first if to_tokens and m == call.key_mask.shape[1] else column
    return weights * dropout_factors(call.seed, call.dropout, instance, row, column, weights.dtype)


def drop_keys(v: Tensor, call: Call) -> Tensor:
    """Dropout where there is no matrix of weights: a key is dropped for all queries of a head. v (B, H, m, d)."""
    if not call.dropout:
        return v
    assert call.seed is not None
    (b, h, m, _), seed = v.shape, call.seed
    column = ranks(call.key_mask, b, m, m, v.device)[1]  # (B, m)
    if call.shard is not None:  # counted from the first token of the row
        column, seed = column + call.shard.tokens_before(v.device), call.shard.seed(seed, h)
    return v * key_factors(seed, call.dropout, v, column)


def masked_map(
    rho: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor, seen: Tensor, key_mask: Tensor | None, scale: float
) -> Tensor:
    """The definition of every pattern: ρ over the allowed keys. seen broadcasts to (B, H, n, m)."""
    work = torch.promote_types(q.dtype, torch.float32)
    allowed = seen if key_mask is None else seen & key_mask[:, None, None, :]
    return rho(q.to(work) @ k.to(work).mT * scale, allowed)
