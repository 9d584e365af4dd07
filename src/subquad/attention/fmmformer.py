"""FMMformer (Nguyen et al. 2021): near tokens exactly, far ones by sums, as the fast multipole method does.

    out = (w_0 D + w_1 L_1 + … + w_r L_r) v                                       O(n·(bandwidth + r·d))

    D = softmax of q kᵀ · scale inside the band |i - j| ≤ bandwidth
    L_l = φ_l(q) φ_l(k)ᵀ, rows normalised        φ_1(x) = elu(x) + 1        φ_2(x) = elu(-x) + 1

Causal, all of them run over j ≤ i.

Choices. The blending weights are learned per head and are a softmax of free numbers, so that rows sum to 1: a common
factor would be absorbed by the output projection. They start equal. The paper's third feature map, tanh, is left out:
its scores have either sign, and a denominator may vanish. A padded query with nothing real in its band takes all from
the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.base import Attention
from subquad.attention.call import Call
from subquad.attention.full import drop_keys, masked_map
from subquad.attention.outputs import within_rows
from subquad.attention.pattern_attention import FamilySees
from subquad.attention.states.keys import Keys
from subquad.attention.states.several import NearAndFar
from subquad.attention.states.state import Memory
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option
from subquad.kernels.linear import kernel_sums
from subquad.kernels.linear.reference import elu_plus_one, kernel_weights, normalised
from subquad.kernels.merge import merge_attention
from subquad.probability import Softmax
from subquad.supports.patterns import Longformer
from subquad.supports.support import text_of


class FMMformer(Attention):
    __doc__ = __doc__

    family = "kernel"
    theory_reason = "its weights mix those of a softmax with products of features"
    paper = "Nguyen et al. 2021"
    cost = "n·(bandwidth + r·d)"
    exponent = 1.0
    examples = ({"bandwidth": 3}, {"rank": 2})

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        bandwidth: int = option(5, "tokens to each side that are seen exactly", ge=1)
        rank: int = option(1, "number r of feature maps: elu(x) + 1, then elu(-x) + 1", ge=1, le=2)

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.band = Longformer(causal=options.causal, window=2 * options.bandwidth)
        self.blend = nn.Parameter(torch.zeros(options.num_heads, 1 + options.rank))  # logits of w

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        kind, work, n = q.dtype, torch.promote_types(q.dtype, torch.float32), q.shape[2]
        q, k, v = q.to(work), k.to(work), v.to(work)
        about = {"lengths": call.lengths, "valid": [call.exists], "dropout": call.dropout, "seed": call.seed}
        text, scale = text_of(self.band), self.options.softmax_scale
        near = merge_attention(q, [k], [v], text, "union", n, scale=scale, **about)  # type: ignore[arg-type]
        first, *others = self._blend(q, call)  # (B or 1, H, n or 1, 1) each
        out, kept = near * first, drop_keys(v, call)
        for sign, weight in zip((1, -1), others, strict=False):
            a, b = self.features_of(q, k, sign, call.key_mask)
            out = out + weight * kernel_sums(a, b, kept, causal=self.options.causal)
        return within_rows(out, call).to(kind)

    def features_of(self, q: Tensor, k: Tensor, sign: int, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        b = elu_plus_one(sign * k)
        return elu_plus_one(sign * q), b if key_mask is None else b * key_mask[:, None, :, None]

    def _blend(self, q: Tensor, call: Call) -> list[Tensor]:
        """w_0 … w_r; where the band is empty the others have it all."""
        empty = None
        if call.key_mask is not None:
            reach = self.options.bandwidth
            before = F.pad(call.key_mask.cumsum(1), (1, 0))  # (B, n + 1): real tokens before each place
            i = torch.arange(q.shape[2], device=q.device)
            stop = (i + 1 if self.options.causal else i + reach + 1).clamp(max=q.shape[2])
            empty = before[:, stop] == before[:, (i - reach).clamp(min=0)]  # (B, n)
        return self.blended(q, empty)

    def blended(self, q: Tensor, empty: Tensor | None) -> list[Tensor]:
        """The same, given which bands are empty, bool (B, n)."""
        logits = self.blend.to(q.dtype)[None, :, None]  # (1, H, 1, 1 + r)
        if empty is not None:
            near = torch.arange(logits.shape[-1], device=q.device) == 0
            logits = logits.masked_fill(empty[:, None, :, None] & near, -torch.inf)
        return list(logits.softmax(-1).split(1, -1))

    def make_memory(self, margin: int) -> Memory:
        near = Keys(self.band.kept([None], margin), [FamilySees(self.band, None)], [0] * self.options.num_heads, margin)
        return NearAndFar(near, self.options.rank, margin)

    def kept_keys(self, n: int) -> float:
        return self.options.bandwidth + self.options.rank * (self.options.head_dim + 32.0)

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        work = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(work), k.to(work)
        seen = self.band.mask(q.shape[2]).to(q.device)[None]
        near = masked_map(Softmax(), q, k, seen, call.key_mask, self.options.softmax_scale)  # (B, H, n, n)
        far = [
            normalised(kernel_weights(*self.features_of(q, k, sign, call.key_mask), causal=self.options.causal))
            for sign in (1, -1)[: self.options.rank]
        ]
        blend = self.blend.to(work).softmax(-1)[None, :, None]  # (1, H, 1, 1 + r)
        total = sum(blend[..., m : m + 1] * weights for m, weights in enumerate((near, *far)))
        return torch.as_tensor(total) / torch.as_tensor(total).sum(-1, keepdim=True).clamp(min=1e-30)

    def connections(self, n: int) -> float:
        reach = 1 + self.options.bandwidth * (1 if self.options.causal else 2)
        return float(n * reach + 2 * n * self.options.rank * self.options.head_dim)
