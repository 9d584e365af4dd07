"""MoBA (Lu et al. 2025): mixture of block attention, every query attends to the few blocks that suit it best.

    out_i = Σ_{j ∈ S_i} softmax(q_i·k_j·scale)_j v_j          O(n·topk·block) for the attention, n²/block for the gate

    S_i = the query's block up to i, and the topk - 1 earlier blocks b with the largest q_i·mean(k_j, j in b)

The gate has no gradient: who is chosen is not learned, except through the keys and queries themselves. It is causal
only: a block that contains later tokens could be chosen by what they say.

Choices. Padding belongs to no mean, and a block without tokens is never chosen. Dropout drops a key for all queries of
a head at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.base import Attention, Capabilities
from subquad.attention.call import Call, repeat_heads
from subquad.attention.full import drop_keys, masked_map
from subquad.attention.states.chosen import Chosen
from subquad.attention.states.state import Memory
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option
from subquad.kernels.pools import span_pool, spans_with_members
from subquad.kernels.selected import selected_attention
from subquad.probability import Softmax


class MoBA(Attention):
    __doc__ = __doc__

    capabilities = Capabilities(bidirectional=False)
    family = "selected blocks"
    theory_reason = "whom a token attends to depends on what the tokens contain"
    paper = "Lu et al. 2025"
    cost = "n·topk·block + n²/block"
    exponent = 2.0
    data_dependent = True
    sparse = True  # who is chosen depends on the content
    examples = ({"block": 4},)
    gallery = {"block": 8}
    picture_note = "A query chooses a few earlier blocks by their content. Here the tokens are random."

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        block: int = option(512, "tokens of a block", ge=1)
        topk: int = option(3, "how many blocks a query sees, its own included", ge=1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        about = {"key_mask": call.key_mask, "lengths": call.lengths}
        chosen = self._choose(q.detach(), k.detach(), call)
        scale, block = self.options.softmax_scale, self.options.block
        return selected_attention(q, k, drop_keys(v, call), chosen, block=block, scale=scale, **about)

    def _choose(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """The blocks beside the query's, int64 (B, H, n, t), -1 = none."""
        n, size = q.shape[2], self.options.block
        work = torch.promote_types(q.dtype, torch.float32)
        means = span_pool(k.to(work), size, pool="mean", key_mask=call.key_mask, lengths=call.lengths)
        count = means.shape[2]
        own = torch.arange(n, device=q.device)[:, None] // size
        allowed = torch.arange(count, device=q.device) < own  # (n, N)
        if call.key_mask is not None:
            allowed = allowed & spans_with_members(call.key_mask, size)[:, :, None]  # (B, 1, n, N)
        gate = (q.to(work) @ means.mT).masked_fill(~allowed, -torch.inf)
        chosen = self._best(gate)
        if call.lengths is None:
            return chosen
        behind = torch.arange(n, device=q.device) >= call.lengths[:, None]  # (B, n)
        return chosen.masked_fill(behind[:, None, :, None], -1)

    def _best(self, gate: Tensor) -> Tensor:
        """The blocks with the largest gates (B, H, n, N), among equal ones the first: int64 (B, H, n, t), -1 = none.

        `topk` leaves open which of equal ones it takes, and a query that is 0 would see other blocks in other batches.
        """
        gate, chosen = gate.clone(), []
        for _ in range(min(self.options.topk - 1, gate.shape[-1])):
            value, block = gate.max(-1, keepdim=True)
            chosen.append(block.masked_fill(value == -torch.inf, -1))
            gate = gate.scatter_(-1, block, -torch.inf)
        return torch.cat(chosen, -1) if chosen else gate.new_zeros(*gate.shape[:-1], 0, dtype=torch.int64)

    def make_memory(self, margin: int) -> Memory:
        return Chosen(self.options.num_heads, margin)

    def chosen(self, q: Tensor, k: Tensor, seen: Tensor, position: Tensor) -> Tensor:
        """Of the keys (B, H, m, d) that are seen, (B, 1, t, m), those of the query's block and of the best ones."""
        size, work, m = self.options.block, torch.promote_types(q.dtype, torch.float32), k.shape[2]
        own = position // size  # (B, t)
        real = F.pad(seen.any(2)[:, 0], (0, -m % size)).unflatten(1, (-1, size))[:, None]  # (B, 1, N, s)
        keys = F.pad(k.detach().to(work), (0, 0, 0, -m % size)).unflatten(2, (-1, size))  # (B, H, N, s, d)
        count = real.sum(-1, keepdim=True)  # (B, 1, N, 1)
        means = repeat_heads((keys * real[..., None]).sum(3) / count.clamp(min=1), q.shape[1])
        block = torch.arange(means.shape[2], device=q.device)
        allowed = (block < own[:, None, :, None]) & (count[..., 0] > 0)[:, :, None]  # (B, 1, t, N)
        gate = (q.detach().to(work) @ means.mT).masked_fill(~allowed, -torch.inf)  # (B, H, t, N)
        best = self._best(gate)
        picked = torch.zeros_like(F.pad(gate, (0, 1)), dtype=torch.bool).scatter(-1, best % (len(block) + 1), True)
        picked = picked[..., :-1] | (block == own[:, None, :, None])  # the last place is for none
        return seen & picked.repeat_interleave(size, -1)[..., :m]

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        (b, h, n, _), size = q.shape, self.options.block
        real = torch.ones(b, n, dtype=torch.bool, device=q.device) if call.key_mask is None else call.key_mask
        seen = torch.zeros(b, h, n, n, dtype=torch.bool, device=q.device)
        work = torch.promote_types(q.dtype, torch.float32)
        for row, head, i in ((row, head, i) for row in range(b) for head in range(h) for i in range(n)):
            first, gates = i // size * size, {}
            seen[row, head, i, first : i + 1] = True
            for start in range(0, first, size):
                members = real[row, start : start + size]
                if members.any():
                    mean = k[row, head, start : start + size][members].to(work).mean(0)
                    gates[start] = float(q[row, head, i].detach().to(work) @ mean.detach())
            for start in sorted(gates, key=lambda s: -gates[s])[: self.options.topk - 1]:
                seen[row, head, i, start : start + size] = True
        return masked_map(Softmax(), q, k, seen, call.key_mask, self.options.softmax_scale)

    @torch.no_grad()
    def picture(self, n: int) -> Tensor:
        """What random tokens choose; the support itself is every earlier token."""
        draw = torch.Generator().manual_seed(0)
        q, k = torch.randn(2, 1, 1, n, self.options.head_dim, generator=draw, device="cpu")
        past = torch.ones(1, 1, n, n, dtype=torch.bool, device="cpu").tril()
        return self.chosen(q, k, past, torch.arange(n, device="cpu")[None])[0, 0].int()

    def connections(self, n: int) -> float:
        size, more = self.options.block, self.options.topk - 1
        chosen = sum(min(more, i // size) * size + i % size + 1 for i in range(n))
        return float(chosen + n * (n // size) / 2)
