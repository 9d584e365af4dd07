"""Sparse Sinkhorn attention (Tay et al. 2020): every block attends to itself and to one sorted block.

    out_i = attention over the query's block a and the sorted block K'_a, under one softmax
    K'_a[p] = Σ_c R_ac K_c[p], values alike                 R ≈ a permutation of the blocks

    R = Sinkhorn( W₂ ReLU(W₁ x_a) / temperature )           x_a = Σ of the keys of block a

    O(n·block) for the attention, n²/block for the sorting. R (N, N) says which of the N blocks go where; Sinkhorn's
    balancing normalises columns and rows in turn, rows last.

Causal, x_a = Σ of the keys up to the first of block a, R_ac = 0 for c ≥ a, and the sum of a column at
row a runs over the rows up to a: no block learns of a later one. The first block has only itself. With `sortcut=c` all
queries attend to the first c sorted blocks and to nothing else (SortCut); this has no causal form.

Choices. Keys stand for the tokens that the paper sums. What padding would contribute to a slot of a sorted block is
left out and the rest reweighted, so that weights sum to 1. The sorting is the relaxed one also in training, without
Gumbel noise. W₂ has a column per block of max_length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.base import Attention, Capabilities
from subquad.attention.call import Call
from subquad.attention.full import drop, masked_map, sdpa
from subquad.attention.outputs import within_rows
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option
from subquad.kernels.balancing import balance
from subquad.kernels.runs import Runs, attend_runs
from subquad.kernels.runs.op import EVERYTHING
from subquad.probability import Softmax

ABSENT = -1e30  # the logarithm of 0, as a number


class _Blocks(NamedTuple):
    """A sequence in blocks, and how they are sorted."""

    keys: Tensor  # (B, H, N, s, d)
    values: Tensor
    real: Tensor  # bool (B, 1, N, s)
    sorting: Tensor  # R (B, H, N, N)
    solid: bool  # known: there is no padding

    def sorted(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (B, H, N, s, d) of the sorted blocks, and which of their slots exist (B, H, N, s).

        None: without padding all of them do, where there is any block to sort.
        """
        if self.solid:
            keys, values = ((self.sorting @ x.flatten(3)).view_as(x) for x in (self.keys, self.values))
            return keys, values, None
        mass = self.sorting @ self.real.to(self.keys.dtype)  # (B, H, N, s)
        exist = mass > 0
        share = mass.masked_fill(~exist, 1)[..., None]
        keys, values = ((self.sorting @ x.flatten(3)).view_as(x) / share for x in (self.keys, self.values))
        return keys, values, exist


class Sinkhorn(Attention):
    __doc__ = __doc__

    capabilities = Capabilities(needs_max_length=True)
    family = "sorted blocks"
    theory_reason = "it attends to blocks that are sorted by what they contain"
    paper = "Tay et al. 2020"
    cost = "n·block + n²/block"
    exponent = 2.0
    sparse = True  # a sorted block may not exist
    examples = ({"block": 4}, {"block": 4, "sortcut": 2, "causal": False})
    gallery = {"block": 8}
    picture_note = (
        "A block attends to itself and to the block that learned sorting puts beside it. Here the order is random, "
        "and nothing is mixed."
    )

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        block: int = option(64, "tokens of a block", ge=1)
        iterations: int = option(8, "rounds of Sinkhorn's balancing", ge=1)
        temperature: float = option(0.75, "the lower, the nearer to a permutation", gt=0)
        sortcut: int | None = option(None, "number of sorted blocks that all queries see, and nothing else", ge=1)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.sortcut is not None and self.causal:
                raise ValueError(f"sortcut must be None with causal=True, not {self.sortcut}: it has no causal form")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        h, d, blocks = options.num_heads, options.head_dim, -(-options.max_length // options.block)
        self.weight1 = nn.Parameter(torch.randn(h, d, d) * d**-0.5)  # W₁
        self.weight2 = nn.Parameter(torch.randn(h, blocks, d) * d**-0.5)  # W₂

    # ---- the fast path ----

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        kind, work, n = q.dtype, torch.promote_types(q.dtype, torch.float32), q.shape[2]
        with torch.autocast(q.device.type, enabled=False):
            out = self._attend(q.to(work), k.to(work), v.to(work), call)
        return within_rows(out[:, :, :n], call).to(kind)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        blocks = self._blocks(k, v, call)
        if self.options.sortcut:
            return self._cut(q, blocks, call)
        return self._dropping(q, blocks, call) if call.dropout else self._beside(q, k, v, blocks)

    def _beside(self, q: Tensor, k: Tensor, v: Tensor, blocks: _Blocks) -> Tensor:
        """The query's block and the sorted one."""
        size, n = self.options.block, q.shape[2]
        keys, values, exist = blocks.sorted()
        bias = None
        if exist is not None:
            own = blocks.real.flatten(2)[..., :n].expand(*exist.shape[:2], n)  # (B, H, n)
            both = torch.cat((own, exist.flatten(2)), 2).flatten(0, 1)  # (G, n + N·s)
            bias = torch.zeros_like(both, dtype=q.dtype).masked_fill_(~both, -torch.inf)
        pairs = ((k, keys.flatten(2, 3)), (v, values.flatten(2, 3)))
        sources = [[x.flatten(0, 1) for x in pair] for pair in pairs]  # (G, n, d) and (G, N·s, d)
        runs = _runs(n, size, self.options.causal, q.device)
        out, _ = attend_runs(q.flatten(0, 1), sources[0], sources[1], runs, self.options.softmax_scale, bias)
        return out.unflatten(0, q.shape[:2])

    def _dropping(self, q: Tensor, blocks: _Blocks, call: Call) -> Tensor:
        """The same with dropout, with the weights as a matrix."""
        size, (b, h, count) = self.options.block, blocks.keys.shape[:3]
        keys, values, exist = blocks.sorted()
        keys, values = torch.cat((blocks.keys, keys), 3), torch.cat((blocks.values, values), 3)  # (B, H, N, 2s, d)
        own = blocks.real[..., None, :].expand(b, h, count, size, size)
        own = own & self._past(q) if self.options.causal else own
        sorted_ = own.new_ones(1, 1, 1, 1) if exist is None else exist
        if self.options.causal:
            sorted_ = sorted_ & (torch.arange(count, device=q.device) > 0)[:, None]
        seen = torch.cat((own, sorted_[..., None, :].expand(own.shape)), -1)  # (B, H, N, s, 2s)
        weights = masked_map(Softmax(), _cut_up(q, size), keys, seen, None, self.options.softmax_scale)
        weights = drop(weights.flatten(2, 3), call).view_as(weights)  # a query counts by its position
        return (weights @ values).flatten(2, 3)

    def _cut(self, q: Tensor, blocks: _Blocks, call: Call) -> Tensor:
        """The first sorted blocks, for everyone."""
        keys, values, exist = (
            None if t is None else t[:, :, : self.options.sortcut].flatten(2, 3) for t in blocks.sorted()
        )
        mask = None if exist is None else exist[:, :, None]
        return sdpa(q, keys, values, mask, causal=False, scale=self.options.softmax_scale, call=call)

    def _past(self, q: Tensor) -> Tensor:
        return torch.ones(self.options.block, self.options.block, dtype=torch.bool, device=q.device).tril()

    def _blocks(self, k: Tensor, v: Tensor, call: Call) -> _Blocks:
        size, n = self.options.block, k.shape[2]
        mask = torch.ones(len(k), n, dtype=torch.bool, device=k.device) if call.key_mask is None else call.key_mask
        real = F.pad(mask, (0, -n % size)).unflatten(1, (-1, size))[:, None]  # (B, 1, N, s)
        keys, values = _cut_up(k, size), _cut_up(v, size)
        solid = call.key_mask is None and n % size == 0
        exist = None if call.key_mask is None else real.any(-1)
        return _Blocks(keys, values, real, self._sorting(keys, exist), solid)

    def _sorting(self, keys: Tensor, exist: Tensor | None) -> Tensor:
        """R (B, H, N, N) from keys (B, H, N, s, d), 0 at padding, and the blocks that exist, bool (B, 1, N), or all."""
        total = keys.sum(3)  # (B, H, N, d)
        if self.options.causal:
            total = F.pad(total.cumsum(2)[:, :, :-1], (0, 0, 1, 0)) + keys[:, :, :, 0]
        hidden = (total @ self.weight1.to(total.dtype).mT).relu()
        count = keys.shape[2]
        logits = hidden @ self.weight2[:, :count].to(total.dtype).mT / self.options.temperature  # (B, H, N, N)
        if exist is None and not self.options.causal:
            return balance(logits, self.options.iterations)
        some = torch.ones(1, 1, count, dtype=torch.bool, device=keys.device) if exist is None else exist
        allowed = some[..., None] & some[..., None, :]
        if self.options.causal:
            allowed = allowed & torch.ones(count, count, dtype=torch.bool, device=keys.device).tril(-1)
        never = ~allowed
        logits = logits.masked_fill(never, ABSENT)
        for _ in range(self.options.iterations):
            logits = logits - logits.logcumsumexp(2) if self.options.causal else logits.log_softmax(2)
            logits = logits.masked_fill(never, ABSENT).log_softmax(3).masked_fill(never, ABSENT)
        return logits.exp()

    # ---- the definition ----

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        work, n, size = torch.promote_types(q.dtype, torch.float32), q.shape[2], self.options.block
        q, k = q.to(work), k.to(work)
        blocks, rows = self._blocks(k, k, call), []
        real = blocks.real.flatten(2)[:, :, :n]  # (B, 1, n)
        place = torch.arange(n, device=q.device)
        for i in range(n):
            a = i // size
            block = place[a * size : (a + 1) * size, None]  # (s, 1)
            seen = real & (place <= i if self.options.causal else place >= 0)  # (B, 1, n)
            own = (block == place) & seen[:, :, None]  # (B, 1, s, n)
            choices = [] if self.options.sortcut else [own.expand(*q.shape[:2], -1, -1).to(work)]
            for c in range(min(self.options.sortcut, len(blocks.sorting[0, 0]))) if self.options.sortcut else (a,):
                spread = blocks.sorting[:, :, c][..., place // size] * real  # (B, H, n): the share of every token …
                slot = place % size == torch.arange(size, device=q.device)[:, None]  # … in its slot, (s, n)
                choices.append(spread[:, :, None] * slot)
            mixes = torch.cat(choices, 2)  # (B, H, choices, n): every key that is compared, as a mixture of tokens
            exist = mixes.sum(-1) > 0
            mixes = mixes / mixes.sum(-1, keepdim=True).masked_fill(~exist[..., None], 1)
            scores = ((mixes @ k) @ q[:, :, i, :, None])[..., 0] * self.options.softmax_scale
            weights = scores.masked_fill(~exist, torch.finfo(work).min).softmax(-1) * exist
            rows.append((weights[:, :, None] @ mixes)[:, :, 0])
        return torch.stack(rows, 2)

    def picture(self, n: int) -> Tensor:
        """Blocks in a random order; the real one is learned, follows from the keys, and may mix blocks."""
        block, draw = torch.arange(n, device="cpu") // self.options.block, torch.Generator().manual_seed(0)
        count = -(-n // self.options.block)
        order = torch.randperm(count, generator=draw, device="cpu")
        if self.options.sortcut:
            return torch.isin(block, order[: self.options.sortcut]).int().repeat(n, 1)
        if self.options.causal:  # an earlier block; the first one has only itself
            chances = torch.rand(count, generator=draw, device="cpu")
            order = (chances * torch.arange(count, device="cpu")).long()
        seen = ((block[:, None] == block) | (order[block][:, None] == block)).int()
        return seen.tril() if self.options.causal else seen

    def connections(self, n: int) -> float:
        blocks = -(-n // self.options.block)
        seen = (self.options.sortcut or 2) * self.options.block
        return float(n * seen + blocks * blocks)


def _runs(n: int, size: int, causal: bool, device: torch.device) -> Runs:
    """Blocks of queries: the query's block, causal up to the query, and the sorted one."""
    first = torch.arange(0, n, size, device=device)
    rows = (n - first).clamp(max=size)
    everything = torch.full_like(first, EVERYTHING)
    own = torch.stack((first, rows, torch.zeros_like(first) if causal else everything, -everything), -1)  # (N, 4)
    count = torch.where(first > 0, size, 0) if causal else torch.full_like(first, size)
    other = torch.stack((first, count, everything, -everything), -1)
    sizes = (size, size, size)
    return Runs(torch.stack((first, rows), -1), torch.stack((own, other), 1), (0, 1), 2 * n * size, sizes)


def _cut_up(x: Tensor, size: int) -> Tensor:
    """(B, H, n, d) → (B, H, N, s, d), filled up with 0."""
    rest = -x.shape[2] % size
    return (F.pad(x, (0, 0, 0, rest)) if rest else x).unflatten(2, (-1, size))
