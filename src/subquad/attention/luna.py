"""Luna (Ma et al. 2021): the sequence is packed into a learned memory of l rows, and unpacked by the queries.

    packed = softmax(P kᵀ · scale) [k, v]          out = softmax(q packed_kᵀ · scale) packed_v          O(n·l)

P (H, l, d) is learned. Causal, with ω = softplus or elu + 1 and t the number of tokens so far,

    c_j = ω(P k_j · scale)      u_t = softmax( scale/t · Σ_{j≤t} q_t·k_j c_j )      out_t = 1/t · Σ_{j≤t} u_t·c_j v_j

where both sums are prefix sums of products: nothing is normalised over tokens that a query may not see.

Choices. The memory packs keys and values, which is the paper's with the tokens themselves as the values of the packing,
and the layer's projections shared by both attentions. The packed memory is not handed on to the next layer: a
mechanism's output is its only result. Softplus has base 2, as in the paper's code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.base import Capabilities
from subquad.attention.call import Call
from subquad.attention.full import drop, sdpa
from subquad.attention.outputs import OutputAttention
from subquad.attention.states.several import Packed
from subquad.attention.states.state import Memory
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option
from subquad.kernels.linear import kernel_sums
from subquad.kernels.linear.reference import elu_plus_one


class Luna(OutputAttention):
    __doc__ = __doc__

    capabilities = Capabilities(weights=False)
    family = "memory"
    theory_reason = "tokens are reached through a memory that packs them"
    paper = "Ma et al. 2021"
    cost = "n·l"
    exponent = 1.0
    positional = False
    examples = ({"memory": 4},)

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        memory: int = option(16, "rows l of the memory", ge=1)
        activation: Literal["softplus", "elu"] = option("softplus", "ω of the causal form")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        shape = (options.num_heads, options.memory, options.head_dim)
        self.memory = nn.Parameter(torch.randn(shape) * options.head_dim**-0.5)  # P (H, l, d)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        kind, work = q.dtype, torch.promote_types(q.dtype, torch.float32)
        q, k, v = q.to(work), k.to(work), v.to(work)
        scores = k @ self.memory.to(work).mT * self.options.softmax_scale  # (B, H, n, l)
        return (self._causal if self.options.causal else self._both_ways)(q, k, v, scores, call).to(kind)

    def _both_ways(self, q: Tensor, k: Tensor, v: Tensor, scores: Tensor, call: Call) -> Tensor:
        real = None if call.key_mask is None else call.key_mask[:, None, :, None]  # (B, 1, n, 1)
        if real is not None:
            scores = scores.masked_fill(~real, torch.finfo(scores.dtype).min)
        pack = scores.softmax(2).mT  # (B, H, l, n)
        keys, values = pack @ k, pack @ v  # (B, H, l, d): padded keys and values are 0
        return sdpa(q, keys, values, None, causal=False, scale=self.options.softmax_scale, call=call)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, scores: Tensor, call: Call) -> Tensor:
        pack, count = self._packing(scores, call)  # (B, H, n, l), (B or 1, 1, n, 1)
        found = kernel_sums(q * self.options.softmax_scale, k, pack, causal=True, normalise=False) / count
        return (
            kernel_sums(drop(found.softmax(-1), call, to_tokens=False), pack, v, causal=True, normalise=False) / count
        )

    def _packing(self, scores: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """c of the docstring, 0 at padding, and t."""
        pack = self._activated(scores)
        if call.key_mask is None:
            return pack, torch.arange(1, scores.shape[2] + 1, device=scores.device).view(1, 1, -1, 1)
        return pack * call.key_mask[:, None, :, None], call.key_mask.cumsum(1).clamp(min=1)[:, None, :, None]

    def _activated(self, scores: Tensor) -> Tensor:
        soft = self.options.activation == "softplus"
        return F.softplus(scores, beta=math.log(2)) if soft else elu_plus_one(scores)

    def make_memory(self, margin: int) -> Memory:
        return Packed(margin)

    def kept_keys(self, n: int) -> float:
        return float(2 * self.options.memory)

    def packing(self, k: Tensor) -> Tensor:
        """c of new keys (B, H, t, d): (B, H, t, l)."""
        return self._activated(k @ self.memory.to(k.dtype).mT * self.options.softmax_scale)

    def define_output(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        scale, memory = self.options.softmax_scale, self.memory.to(q.dtype)
        scores = torch.einsum("hld,bhnd->bhln", memory, k) * scale  # (B, H, l, n)
        if self.options.causal:
            pack, count = self._packing(scores.mT, call)
            found = (q @ k.mT).tril() @ pack * scale / count
            return (found.softmax(-1) @ pack.mT).tril() @ v / count
        if call.key_mask is not None:
            scores = scores.masked_fill(~call.key_mask[:, None, None], torch.finfo(scores.dtype).min)
        pack = scores.softmax(-1)
        return (q @ (pack @ k).mT * scale).softmax(-1) @ (pack @ v)

    def connections(self, n: int) -> float:
        return 2.0 * n * self.options.memory
