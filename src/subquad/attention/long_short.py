"""Long-Short Transformer (Zhu et al. 2021): a window, and a projection of the whole sequence that depends on it.

    P = softmax over tokens of K W          K̄ = Pᵀ K, V̄ = Pᵀ V          W (H, d, rank): the dynamic projection

    out_i = attention over [LN₁(K near i), LN₂(K̄)] and [LN₁(V near i), LN₂(V̄)], under one softmax

Near i are its home segment of `window` tokens and window/2 tokens on either side. O(n·(window + rank)).

Causal, every segment of `segment` tokens is projected for itself, to `rank` rows; a query sees those of
the segments before its own, and near it are its home segment up to itself and the `window` tokens before that.
O(n·(window + rank·n/segment)).

The two LayerNorms (DualLN) give both kinds of keys and values the same scale; each runs over the features
of all heads of a token or row. Padding takes no part in the softmax over tokens.
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
from subquad.attention.outputs import OutputAttention
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option
from subquad.kernels.merge import merge_attention
from subquad.supports.longshort import LongShort as Sets
from subquad.supports.shards import in_blocks
from subquad.supports.support import text_of


class LongShort(OutputAttention):
    __doc__ = __doc__

    capabilities = Capabilities(weights=False)
    family = "low rank"
    theory_reason = "beyond its window it attends to projections of the sequence, not to tokens"
    paper = "Zhu et al. 2021"
    cost = "n·(window + rank)"  # causal: rank·n/segment in place of rank
    examples = ({"window": 4, "rank": 2, "segment": 6}, {"window": 5, "rank": 9, "segment": 4})
    gallery = {"window": 8, "segment": 8}

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        window: int = option(128, "tokens of a home segment", ge=1)
        rank: int | None = option(None, "rows of a projection; None = 32, causal 1", ge=1)
        segment: int = option(16, "causal: tokens that are projected together", ge=1)

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        h, d = options.num_heads, options.head_dim
        rank = options.rank or (1 if options.causal else 32)
        self.sets = Sets(causal=options.causal, window=options.window, rank=rank, segment=options.segment)
        self.weight = nn.Parameter(torch.randn(h, d, rank) * d**-0.5)  # W
        self.near_norm, self.far_norm = nn.LayerNorm(h * d), nn.LayerNorm(h * d)

    @property
    def exponent(self) -> float:
        return 2.0 if self.options.causal else 1.0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        kind, work = q.dtype, torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            return self._attend(q.to(work), k.to(work), v.to(work), call).to(kind)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        work, n = q.dtype, q.shape[2]
        size = self.options.segment if self.options.causal else n
        mask = call.key_mask if call.key_mask is not None or n % size == 0 else k.new_ones(len(k), n).bool()
        real = None if mask is None else F.pad(mask, (0, -n % size)).unflatten(1, (-1, size))[:, None]  # (B, 1, S, s)
        keys, values = (F.pad(x, (0, 0, 0, -n % size)).unflatten(2, (-1, size)) for x in (k, v))  # (B, H, S, s, d)
        scores = keys @ self.weight.to(work)[:, None]  # (B, H, S, s, r)
        if real is not None:
            scores = scores.masked_fill(~real[..., None], torch.finfo(work).min)
        pack = scores.softmax(3).mT  # (B, H, S, r, s)
        far = [normed((pack @ x).flatten(2, 3), self.far_norm) for x in (keys, values)]  # (B, H, S·r, d)
        near = [normed(x, self.near_norm) for x in (k, v)]
        exist = None if real is None else real.any(-1).repeat_interleave(self.sets.rank, 2)  # (B, 1, S·r)
        sources = ([near[0], far[0]], [near[1], far[1]], text_of(self.sets), "main", n)
        about = {"lengths": call.lengths, "valid": [call.exists, exist], "dropout": call.dropout, "seed": call.seed}
        return merge_attention(q, *sources, scale=self.options.softmax_scale, **about)  # type: ignore[arg-type]

    boundary = "the window's halo, summaries of segments and at most one partial segment; bidirectional: one projection"

    def attend_shard(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        kind, work, shard = q.dtype, torch.promote_types(q.dtype, torch.float32), call.shard
        q, k, v = q.to(work), k.to(work), v.to(work)
        far, exist, cut = self._segments(k, v, call) if self.options.causal else self._projected(k, v, call)
        far = [normed(x, self.far_norm) for x in far]
        near = [normed(x, self.near_norm) for x in (k, v)]
        sources = [(*near, shard.exists, shard.cut), (*far, exist, cut)]
        about = {"queries": shard.cut, "scale": self.options.softmax_scale}
        return shard.merge(q, sources, text_of(self.sets), "main", call, **about).to(kind)

    def _segments(self, k: Tensor, v: Tensor, call: Call):
        """Causal: the projections of the segments that this process has, (B, H, S·r, d), and who has which."""
        shard, size, r = call.shard, self.options.segment, self.sets.rank
        cut = shard.aligned(size)
        k, v = shard.move([k, v], shard.cut, cut)
        pad, count = -k.shape[2] % size, -(-k.shape[2] // size)
        real = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device)
        real = real if shard.key_mask is None else shard.masked(cut[shard.rank])
        real = F.pad(real, (0, pad)).unflatten(1, (count, size))[:, None]  # (B or 1, 1, S, s)
        keys, values = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (count, size)) for x in (k, v))
        scores = (keys @ self.weight.to(k.dtype)[:, None]).masked_fill(~real[..., None], torch.finfo(k.dtype).min)
        pack = scores.softmax(3).mT  # (B, H, S, r, s)
        exist = None
        if shard.key_mask is not None:
            whole = F.pad(shard.key_mask, (0, -shard.n % size)).unflatten(1, (-1, size))
            exist = whole.any(-1).repeat_interleave(r, 1)[:, None]  # (B, 1, S·r)
        owners = tuple((lo * r, hi * r) for lo, hi in in_blocks(cut, size))
        return [(pack @ x).flatten(2, 3) for x in (keys, values)], exist, owners

    def _projected(self, k: Tensor, v: Tensor, call: Call):
        """Bidirectional: one projection of all tokens, merged from those of the processes by their logsumexps."""
        shard, r = call.shard, self.sets.rank
        nothing = torch.finfo(k.dtype).min
        scores = k @ self.weight.to(k.dtype)  # (B, H, t, r)
        if call.key_mask is not None:
            scores = scores.masked_fill(~call.key_mask[:, None, :, None], nothing)
        scores = F.pad(scores, (0, 0, 0, 1), value=nothing)  # no process is without a token
        lse = scores.logsumexp(2)  # (B, H, r)
        pack = scores.softmax(2)[:, :, :-1].mT  # (B, H, r, t)
        every = shard.gather(torch.cat((pack @ k, pack @ v, lse[..., None]), -1))  # (p, B, H, r, 2d + 1)
        share = every[..., -1:].softmax(0)
        far = (every[..., :-1] * share).sum(0).chunk(2, -1)  # (B, H, r, d)
        exist = None if shard.key_mask is None else shard.key_mask.any(1)[:, None, None].expand(-1, 1, r)
        return list(far), exist, ((0, r),) * shard.group.size

    def define_output(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        n, b = q.shape[2], len(q)
        real = torch.ones(b, n, dtype=torch.bool, device=q.device) if call.key_mask is None else call.key_mask
        size = self.options.segment if self.options.causal else n
        keys, values, exist = [], [], []
        for start in range(0, n, size):
            own, there = slice(start, start + size), real[:, None, start : start + size, None]  # (B, 1, s, 1)
            scores = torch.einsum("bhsd,hdr->bhsr", k[:, :, own], self.weight.to(q.dtype))
            pack = scores.masked_fill(~there, torch.finfo(q.dtype).min).softmax(2)
            keys.append(torch.einsum("bhsr,bhsd->bhrd", pack, k[:, :, own]))
            values.append(torch.einsum("bhsr,bhsd->bhrd", pack, v[:, :, own]))
            exist.append(there[:, :, :, 0].any(-1, keepdim=True).expand(-1, -1, self.sets.rank))
        all_keys = torch.cat((normed(k, self.near_norm), normed(torch.cat(keys, 2), self.far_norm)), 2)
        all_values = torch.cat((normed(v, self.near_norm), normed(torch.cat(values, 2), self.far_norm)), 2)
        seen = torch.cat((self.sets.near(n), self.sets.far(n)), 1).to(q.device)
        seen = seen & torch.cat((real[:, None], *exist), 2)[:, :, None]  # (B, 1, n, n + summaries)
        scores = q @ all_keys.mT * self.options.softmax_scale
        return (scores.masked_fill(~seen, torch.finfo(q.dtype).min).softmax(-1) * seen) @ all_values

    def picture(self, n: int) -> Tensor:
        far = (self.support(n) if not self.options.causal else self._before(n)).int() * 2
        return torch.where(self.sets.near(n), 1, far)

    def _before(self, n: int) -> Tensor:
        place = torch.arange(n) // self.options.segment
        return place < place[:, None]

    def summaries(self, n: int) -> tuple[list[Sequence[int]], list[list[int]]]:
        """What is projected together: all tokens or, causal, the segments before the query's."""
        if not self.options.causal:
            return [range(n)], [[0] for _ in range(n)]
        size = self.options.segment
        segments = [range(first, min(n, first + size)) for first in range(0, n, size)]
        return list(segments), [list(range(i // size)) for i in range(n)]

    def connections(self, n: int) -> float:
        return float(self.sets.near(n).sum() + self.sets.far(n).sum())


def normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm over the features of all heads, (B, H, m, d)."""
    weight, bias = norm.weight.to(x.dtype), norm.bias.to(x.dtype)
    rows = F.layer_norm(x.transpose(1, 2).flatten(2), norm.normalized_shape, weight, bias, norm.eps)
    return rows.unflatten(2, (x.shape[1], -1)).transpose(1, 2)
