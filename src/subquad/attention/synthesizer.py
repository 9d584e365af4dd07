"""Synthesizer (Tay et al. 2021): weights that are not compared but made, from the query alone or from nothing.

    out_i = Σ_j softmax(B_i)_j v_j                                                O(n²)

    dense               B_i = W ReLU(q_i) + b            W (H, max_length, d): the layer's query projection is the first
                                                         of the two layers of the paper's MLP
    factorised-dense    B_ij = A_i[j mod a] C_i[⌊j/a⌋]   A_i and C_i made like that, of lengths a ≈ √max_length each
    random              B = R                            R (H, max_length, max_length), learned
    factorised-random   B = R₁ R₂ᵀ                       R₁, R₂ (H, max_length, rank)

Token j of a row is column j. Keys play no part, and with the random variants queries play none either. Causal, the
softmax of a query runs over the columns up to its own. `scale` has no meaning here and must be left open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subquad.attention.base import Attention, Capabilities
from subquad.attention.call import Call, repeat_heads
from subquad.attention.full import drop
from subquad.attention.linear import refuse_scale
from subquad.attention.outputs import within_rows
from subquad.attention.states.chosen import past
from subquad.attention.states.keys import Keys
from subquad.attention.states.state import Memory
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option
from subquad.kernels.values import as_queries_are
from subquad.supports.kept import EVERYTHING


class Synthesizer(Attention):
    __doc__ = __doc__

    capabilities = Capabilities(needs_max_length=True)
    family = "dense"
    theory_reason = "its weights are made without comparing queries with keys"
    paper = "Tay et al. 2021"
    cost = "n²"
    exponent = 2.0
    examples = (
        {},
        {"variant": "factorised-dense", "max_length": 80},
        {"variant": "random", "max_length": 80},
        {"variant": "factorised-random", "max_length": 80},
    )

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        variant: Literal["dense", "random", "factorised-dense", "factorised-random"] = option("dense", "who makes B")
        rank: int = option(8, "variant=factorised-random: width of the factors", ge=1)

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        refuse_scale(self.name, options)
        h, d, longest, rank = options.num_heads, options.head_dim, options.max_length, options.rank
        self.short = math.isqrt(longest - 1) + 1  # a
        self.long = -(-longest // self.short)  # c
        if options.variant == "random":
            self.table = nn.Parameter(torch.randn(h, longest, longest))
        elif options.variant == "factorised-random":
            self.left, self.right = (nn.Parameter(torch.randn(h, longest, rank) * rank**-0.25) for _ in range(2))
        else:
            width = longest if options.variant == "dense" else self.short + self.long
            bound = d**-0.5
            self.weight = nn.Parameter(torch.empty(h, width, d).uniform_(-bound, bound))
            self.bias = nn.Parameter(torch.zeros(h, width))

    is_torch_alone = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        work = torch.promote_types(q.dtype, torch.float32)
        weights = drop(self._weights(q.to(work), call), call)
        return within_rows(as_queries_are(weights @ v.to(work), q), call).to(q.dtype)

    def _weights(self, q: Tensor, call: Call) -> Tensor:
        """(B, H, n, n)."""
        scores, seen = self._scores(q), self._seen(q.shape[2], call, q.device)
        return scores.softmax(-1) if seen is None else _softmax(scores, seen)

    def _scores(self, q: Tensor) -> Tensor:
        """B of the docstring, (B or 1, H, n, n)."""
        n, variant = q.shape[2], self.options.variant
        if variant == "random":
            return self.table[:, :n, :n].to(q.dtype).expand(len(q), -1, -1, -1)
        if variant == "factorised-random":
            return (self.left[:, :n] @ self.right[:, :n].mT).to(q.dtype).expand(len(q), -1, -1, -1)
        return self._made(q, n)

    def _made(self, q: Tensor, n: int) -> Tensor:
        """The first n columns of what is made from queries (B, H, t, d)."""
        variant = self.options.variant
        rows = slice(0, n) if variant == "dense" else slice(None)
        made = q.relu() @ self.weight[:, rows].to(q.dtype).mT + self.bias[:, None, rows].to(q.dtype)
        if variant == "dense":
            return made
        short, long = made.split((self.short, self.long), -1)  # A (B, H, n, a), C (B, H, n, c)
        return (long[..., None] * short[..., None, :]).flatten(-2)[..., :n]

    def make_memory(self, margin: int) -> Memory:
        return Keys(EVERYTHING, [past], [0] * self.options.num_heads, margin)

    maps_by_softmax = False  # of scores that are made

    def attend_kept(self, q, k, v, seen, position, factors=None):
        work, m, o = torch.promote_types(q.dtype, torch.float32), k.shape[2], self.options
        if o.variant == "random":
            scores = self.table[:, position, :m].movedim(0, 1).to(work)  # (B, H, t, m)
        elif o.variant == "factorised-random":
            scores = (self.left[:, position].movedim(0, 1) @ self.right[:, :m].mT).to(work)
        else:
            scores = self._made(q.to(work), m)
        weights = _softmax(scores, seen)
        weights = weights if factors is None else weights * factors
        return as_queries_are(weights @ repeat_heads(v.to(work), q.shape[1]), q).to(q.dtype)

    def _seen(self, n: int, call: Call, device: torch.device) -> Tensor | None:
        past = torch.ones(n, n, dtype=torch.bool, device=device).tril() if self.options.causal else None
        if call.key_mask is None:
            return past
        real = call.key_mask[:, None, None]  # (B, 1, 1, n)
        return real if past is None else real & past

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        work, n = torch.promote_types(q.dtype, torch.float32), q.shape[2]
        columns, variant = torch.arange(n, device=q.device), self.options.variant
        if variant == "random":
            scores = self.table.to(work)[None, :, :n, :n]
        elif variant == "factorised-random":
            scores = torch.einsum("hir,hjr->hij", self.left[:, :n], self.right[:, :n]).to(work)[None]
        else:
            made = torch.einsum("bhid,hjd->bhij", q.to(work).relu(), self.weight.to(work)) + self.bias[:, None].to(work)
            if variant == "dense":
                scores = made[..., :n]
            else:
                scores = made[..., columns % self.short] * made[..., self.short + columns // self.short]
        allowed = self.support(n).to(q.device).expand(len(q), 1, n, n)
        allowed = allowed if call.key_mask is None else allowed & call.key_mask[:, None, None]
        return _softmax(scores.expand(*q.shape[:2], n, n), allowed)


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Over the columns that are seen; 0 where there is none."""
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
