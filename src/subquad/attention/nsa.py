"""Native sparse attention (Yuan et al. 2025): compressed blocks, selected blocks and a window, each gated.

    out_i = Σ_c g_i^c · attention(q_i, K^c_i, V^c_i)          c: compressed, selected, window; g_i = σ(q_i W_g + b_g)

    compressed   k̃_t = MLP(k_{ts} … k_{ts+l-1}), ṽ_t alike: blocks of l = `compress` tokens, one every s = `stride`
    selected     `topk` blocks of `block` tokens: the first, the query's, the one before it, and those with the largest
                 sum of the compressed softmax over the compressed blocks that touch it
    window       the last `window` tokens
    O(n·(topk·block + window) + n²/stride)

Only complete compressed blocks are seen, and within the query's block only tokens up to i; it is causal only. The MLP
has one hidden layer of head_dim units, with positions inside a block added before it, shared by the heads. The choice
of blocks has no gradient.

Choices. The three branches share k and v (the paper gives each its own projections), and the gates are read from q, not
from the token. Every head chooses its own blocks; the paper lets the heads that share keys choose together. Padding is
0 for the MLP, and a compressed block without tokens does not exist. Dropout drops a key or a compressed block for all
queries of a head at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.base import Capabilities
from subquad.attention.call import Call
from subquad.attention.full import drop_keys
from subquad.attention.outputs import OutputAttention, within_rows
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option
from subquad.kernels.merge import merge_attention
from subquad.kernels.pools import spans_with_members
from subquad.kernels.runs import Runs, attend_runs
from subquad.kernels.runs.op import EVERYTHING
from subquad.kernels.selected import block_choice, selected_attention
from subquad.supports.patterns import Longformer
from subquad.supports.support import text_of


class BlockMLP(nn.Module):
    """Blocks of l vectors (…, l, d) → vectors (…, d)."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.hidden = nn.Linear(length * width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.positions.to(x.dtype)).flatten(-2)
        hidden = F.linear(x, self.hidden.weight.to(x.dtype), self.hidden.bias.to(x.dtype)).relu()
        return F.linear(hidden, self.out.weight.to(x.dtype), self.out.bias.to(x.dtype))


class NSA(OutputAttention):
    __doc__ = __doc__

    capabilities = Capabilities(bidirectional=False, weights=False)
    family = "selected blocks"
    theory_reason = "it adds up three attentions, to compressed blocks, to blocks chosen by content and to a window"
    paper = "Yuan et al. 2025"
    cost = "n·(topk·block + window) + n²/stride"
    exponent = 2.0
    data_dependent = True
    sparse = True
    examples = (
        {"compress": 4, "stride": 2, "block": 4, "topk": 4, "window": 5},
        {"compress": 4, "stride": 4, "block": 8, "topk": 3, "window": 3},
    )
    gallery = {"compress": 4, "stride": 2, "block": 4, "topk": 4, "window": 9}
    picture_note = (
        "Drawn directly are the window, the first block and the last two. Further blocks are selected by their content."
    )

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        compress: int = option(32, "tokens of a compressed block, a multiple of stride", ge=1)
        stride: int = option(16, "tokens from one compressed block to the next", ge=1)
        block: int = option(64, "tokens of a selected block, a multiple of stride", ge=1)
        topk: int = option(16, "how many blocks a query selects, the first and the last two included", ge=1)
        window: int = option(512, "tokens of the window, the query included", ge=1)

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("compress", "block"):
                if getattr(self, name) % self.stride:
                    raise ValueError(f"{name} must be a multiple of stride={self.stride}, not {getattr(self, name)}")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        h, d = options.num_heads, options.head_dim
        self.compress_keys = BlockMLP(options.compress, d)
        self.compress_values = BlockMLP(options.compress, d)
        self.gates = nn.Parameter(torch.zeros(h, d, 3))
        self.gate_bias = nn.Parameter(torch.zeros(h, 3))
        self.sliding = text_of(Longformer(causal=True, window=2 * (options.window - 1)))

    # ---- the fast path ----

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        kind, work = q.dtype, torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            return self._attend(q.to(work), k.to(work), v.to(work), call).to(kind)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        o, work = self.options, q.dtype
        gates = (q @ self.gates.to(work) + self.gate_bias.to(work)[:, None]).sigmoid()  # (B, H, n, 3)
        coarse, chosen = self._compressed(q, k, v, call)
        v = drop_keys(v, call)
        about: dict[str, Any] = {"lengths": call.lengths, "scale": o.softmax_scale}
        fine = selected_attention(q, k, v, chosen, block=o.block, key_mask=call.key_mask, **about)
        near = merge_attention(q, [k], [v], self.sliding, "union", q.shape[2], valid=[call.exists], **about)
        out = gates[..., :1] * coarse + gates[..., 1:2] * fine + gates[..., 2:] * near
        return within_rows(out, call)

    def _compressed(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """The output of the compressed branch (B, H, n, d), and the blocks that are selected beside the query's,
        int64 (B, H, n, t), -1 = none."""
        o, (b, h, n, d) = self.options, q.shape
        count = max(0, (n - o.compress) // o.stride + 1)  # complete blocks
        keys, values = q.new_zeros(b, h, count, d), q.new_zeros(b, h, count, d)
        if count:
            keys, values = (
                mlp(x.unfold(2, o.compress, o.stride).mT)  # (B, H, T, l, d) → (B, H, T, d)
                for mlp, x in ((self.compress_keys, k), (self.compress_values, v))
            )
        if call.dropout:
            assert call.seed is not None
            values = drop_keys(values, call._replace(key_mask=None, seed=call.seed + 1))
        x, y, z = (t.flatten(0, 1) for t in (q, keys, values))  # (G, n, d), (G, T, d)
        there = None
        if call.key_mask is not None:  # bool (G, T)
            there = call.key_mask.unfold(1, o.compress, o.stride).any(-1) if count else call.key_mask[:, :0]
            there = there.repeat_interleave(h, 0)
        coarse = torch.zeros_like(q)
        if count:
            bias = None if there is None else torch.zeros_like(there, dtype=q.dtype).masked_fill_(~there, -torch.inf)
            runs = self._complete(n, count, q.device)
            coarse = attend_runs(x, [y], [z], runs, o.softmax_scale, bias)[0].unflatten(0, (b, h))
        return coarse, self._choose(x, y, there, call).unflatten(0, (b, h))

    def _complete(self, n: int, count: int, device: torch.device) -> Runs:
        """Stretches of `stride` queries and the compressed blocks that are complete before they end."""
        o, number = self.options, torch.arange(count, device=device)
        first = number * o.stride + o.compress - 1
        everything = torch.full_like(first, EVERYTHING)
        tiles = torch.stack((first, (n - first).clamp(max=o.stride)), -1)
        spans = torch.stack((torch.zeros_like(first), number + 1, everything, -everything), -1)
        return Runs(tiles, spans[:, None], (0,), n * count // 2, (o.stride, count))

    def _choose(self, q: Tensor, keys: Tensor, there: Tensor | None, call: Call) -> Tensor:
        """The blocks beside the query's, int64 (G, n, t), from q (G, n, d) and compressed keys (G, T, d)."""
        o, n, heads = self.options, q.shape[1], self.options.num_heads
        allowed = torch.ones(1, -(-n // o.block), dtype=torch.bool, device=q.device)
        if call.key_mask is not None:
            allowed = spans_with_members(call.key_mask, o.block)[:, 0, : allowed.shape[1]].repeat_interleave(heads, 0)
        sizes = (o.compress, o.stride, o.block, o.topk - 1)
        chosen = block_choice(q, keys, there, allowed.contiguous(), sizes, o.softmax_scale)
        if call.lengths is None:
            return chosen
        behind = torch.arange(n, device=q.device) >= call.lengths.repeat_interleave(heads)[:, None]  # (G, n)
        return chosen.masked_fill(behind[..., None], -1)

    @property
    def _forced(self) -> float:
        """The importance of a block that is always selected: more than all pieces of compressed blocks have."""
        return 2.0 * self.options.compress / self.options.stride

    # ---- the definition ----

    def define_output(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        n = q.shape[2]
        real = torch.ones(len(q), n, dtype=torch.bool, device=q.device) if call.key_mask is None else call.key_mask
        place = torch.arange(n, device=q.device)
        recent = (place <= place[:, None]) & (place > place[:, None] - self.options.window)
        logits = torch.einsum("bhnd,hdc->bhnc", q, self.gates.to(q.dtype)) + self.gate_bias.to(q.dtype)[:, None]
        rows = []
        for b, gates in enumerate(logits.sigmoid()):
            x = q[b] * self.options.softmax_scale
            coarse, seen = self._define_choice(x, k[b], v[b], real[b])
            branches = (coarse, _over(x, k[b], v[b], seen), _over(x, k[b], v[b], recent & real[b]))
            rows.append(torch.stack(branches, -1).mul(gates[:, :, None]).sum(-1))
        return torch.stack(rows)

    def _define_choice(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """The compressed branch (H, n, d) of one row, and who is in the selected blocks, bool (H, n, n)."""
        o, n = self.options, q.shape[1]
        starts = [t for t in range(0, n - o.compress + 1, o.stride) if real[t : t + o.compress].any()]
        weights, coarse = q.new_zeros(*q.shape[:2], 0), torch.zeros_like(q) * q
        if starts:
            keys = torch.stack([self.compress_keys(k[:, t : t + o.compress]) for t in starts], 1)  # (H, T, d)
            values = torch.stack([self.compress_values(v[:, t : t + o.compress]) for t in starts], 1)
            done = torch.tensor(starts, device=q.device) + o.compress <= torch.arange(n, device=q.device)[:, None] + 1
            coarse, weights = _over(q, keys, values, done), _weights(q, keys, done)
        touch = q.new_zeros(len(starts), -(-n // o.block))  # how many pieces of a compressed block are in a block
        for t, start in enumerate(starts):
            for piece in range(start, start + o.compress, o.stride):
                touch[t, piece // o.block] += 1
        importance = (weights.detach() @ touch).tolist()  # [H][n][N]
        seen = torch.zeros(len(q), n, n, dtype=torch.bool, device=q.device)
        for h, i in ((h, i) for h in range(len(q)) for i in range(n)):
            own, row = i // o.block, importance[h][i]
            earlier = [c for c in range(own) if real[c * o.block : (c + 1) * o.block].any()]
            value = {c: row[c] + self._forced * (c in (0, own - 1)) for c in earlier}
            for c in sorted(value, key=value.__getitem__, reverse=True)[: o.topk - 1]:
                seen[h, i, c * o.block : (c + 1) * o.block] = True
            seen[h, i, own * o.block : i + 1] = True
        return coarse, seen & real

    # ---- pictures and counts ----

    def picture(self, n: int) -> Tensor:
        """The window, the first block and the last two; the other selected blocks depend on q and k."""
        i, j, o = torch.arange(n)[:, None], torch.arange(n), self.options
        own = i // o.block
        direct = (i - j < o.window) | (j // o.block >= own - 1) | (j < o.block)
        return torch.where(direct, 1, 2) * self.support(n)

    def summaries(self, n: int) -> tuple[list[Sequence[int]], list[list[int]]]:
        """The compressed blocks that are complete."""
        o = self.options
        starts = range(0, n - o.compress + 1, o.stride)
        complete = [max(0, (i + 1 - o.compress) // o.stride + 1) for i in range(n)]
        return [range(start, start + o.compress) for start in starts], [list(range(count)) for count in complete]

    def connections(self, n: int) -> float:
        o = self.options
        fine = sum(min(o.topk - 1, i // o.block) * o.block + i % o.block + 1 for i in range(n))
        return float(fine + n * min(o.window, n) + n * (n // o.stride) / 2)


def _weights(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """q with its scale. Softmax over the keys that are seen, (H, n, m); 0 where none is."""
    scores = (q @ k.mT).masked_fill(~seen, torch.finfo(q.dtype).min)
    return scores.softmax(-1) * seen


def _over(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return _weights(q, k, seen) @ v
