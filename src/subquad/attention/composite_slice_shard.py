"""Composite Slice attention on a part of a sequence that is divided among processes.

At every scale a slice that two processes share moves to one of them, so that local attention and pooling need nothing
of others but the halo of extended slices; the slices are then the tokens of the next scale, divided likewise. At the
coarsest scale the keys and values of all slices travel. Results go back to where their tokens are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.call import Call, repeat_heads
from subquad.attention.composite_slice import CompositeSlice
from subquad.attention.slicing import Composer, Tokens, add_by_slice, each, slices
from subquad.supports.shards import Cut, aligned, in_blocks
from subquad.supports.slices import slices_text


class ShardComposer(Composer):
    """The fast path of one call; `real` is the mask of the whole sequence at a scale, `cut` who has what of it."""

    def __init__(self, attention: CompositeSlice, call: Call) -> None:
        super().__init__(attention, call)
        self.shard = call.shard

    def compose_shard(self, tokens: Tokens, project: Any) -> Tensor:
        return self._scale(tokens, project, self.shard.key_mask, 0, self.shard.cut, self.shard.n)

    def _moved(self, tokens: Tokens, have: Cut, want: Cut) -> Tokens:
        """Tokens (b, t, E) of another range; one exchange for all that differ."""
        different = {id(x): x for x in tokens}
        found = self.shard.move([x[:, None] for x in different.values()], have, want)
        there = dict(zip(different, (x[:, 0] for x in found), strict=True))
        query, key, value = (there[id(x)] for x in tokens)
        return query, key, value

    def _scale(self, tokens: Tokens, project: Any, real: Tensor | None, scale: int, cut: Cut, n: int) -> Tensor:
        """The scale and all coarser ones: tokens (b, t, E) in `cut` of n → (b, t, E)."""
        order, size = self.options.composition, self.options.slice_length
        if scale == self.options.levels - 1:
            return self._attend_shard(tokens, project, real, scale, 0, 0, cut, n)
        whole = aligned(cut, size, n)
        tokens = self._moved(tokens, cut, whole)
        own = None if real is None else real[:, slice(*whole[self.shard.rank])]
        about = (project, real, scale, whole, n)
        if order == "local-global":
            fine = self._mix_shard(tokens, *about)
            pooled = (self._pooled(fine, own, scale),) * 3  # (b, m, E)
            out = self._added(fine, self._coarser_shard(pooled, *about))
        else:
            pooled = each(lambda x: self._pooled(x, own, scale), tokens)
            coarse = self._coarser_shard(pooled, *about)  # (b, m, 1, E)
            if order == "global-local":
                tokens = each(lambda x: self._added(x, coarse), tokens)
            out = self._added(self._mix_shard(tokens, *about), coarse)
        return self.shard.move([out[:, None]], whole, cut)[0][:, 0]

    def _pooled(self, x: Tensor, own: Tensor | None, scale: int) -> Tensor:
        return self._pool(x, own, scale) if x.shape[1] else x

    def _added(self, x: Tensor, coarse: Tensor) -> Tensor:
        if not x.shape[1]:
            return x + 0 * coarse.sum(1)  # (b, 0, E): keeps what is added in the graph, as in the other processes
        size = self.options.slice_length
        return add_by_slice(x, coarse, size) if coarse.shape[1] > 1 else x + coarse[:, 0]

    def _coarser_shard(self, pooled: Tokens, project: Any, real, scale: int, cut: Cut, n: int) -> Tensor:
        """What the next scale gives to the slices of this process, (b, m, 1, E); causal: to those before them."""
        size, causal, rank = self.options.slice_length, self.options.causal, self.shard.rank
        project = project if self.options.share_weights else self.attention.own[scale]
        blocks, m = in_blocks(cut, size), -(-n // size)
        if real is not None:
            real = torch.cat([x.any(2) for x in slices(real, size)], 1)  # (b, m)
        if not causal:
            return self._scale(pooled, project, real, scale + 1, blocks, m)[:, :, None]
        if m == 1:
            return pooled[0].new_zeros(pooled[0].shape[0], pooled[0].shape[1], 1, pooled[0].shape[2])
        earlier = tuple((min(lo, m - 1), min(hi, m - 1)) for lo, hi in blocks)  # the last slice is asked by nobody
        keep = earlier[rank][1] - earlier[rank][0]
        kept = each(lambda x: x[:, :keep], pooled)
        out = self._scale(kept, project, None if real is None else real[:, :-1], scale + 1, earlier, m - 1)
        before = tuple((max(lo - 1, 0), max(hi - 1, 0)) for lo, hi in blocks)
        out = self.shard.move([out[:, None]], earlier, before)[0][:, 0]
        lo, hi = blocks[rank]
        return F.pad(out, (0, 0, hi - lo - out.shape[1], 0))[:, :, None]  # slice 0 is given nothing

    def _mix_shard(self, tokens: Tokens, project: Any, real, scale: int, cut: Cut, n: int) -> Tensor:
        """Inside the slices: (b, t, E) → (b, t, E)."""
        size, rank = self.options.slice_length, self.shard.rank
        if self.options.local == "attention":
            return self._attend_shard(tokens, project, real, scale, size, self.options.reach, cut, n)
        v = repeat_heads(project.values(tokens[2]), self.options.num_heads).transpose(1, 2).flatten(2)  # (b, t, E)
        v = v if real is None else v.masked_fill(~real[:, slice(*cut[rank]), None], 0)
        batch, t, width = v.shape
        first, last = in_blocks(cut, size)[rank]
        whole = F.pad(v, (0, 0, 0, -t % size)).reshape(batch * (last - first), size, width)  # (b·m, L, E)
        slots = self.call.slots
        for _ in range(scale):
            slots = -(-slots // size) - self.options.causal
        row = (torch.arange(batch, device=v.device) + self.shard.first_row) * -(-slots // size)
        numbers = (row[:, None] + torch.arange(first, last, device=v.device)).flatten()
        return self.attention.mlps[scale](whole, self.call, numbers).view(batch, last * size - first * size, width)[
            :, :t
        ]

    def _attend_shard(self, tokens: Tokens, project: Any, real, scale: int, size: int, reach: int, cut: Cut, n: int):
        """Attention inside slices of `size`; size=0: the coarsest scale is one slice."""
        q, k, v = project.together(*tokens)  # (b, H, t, d)
        keys = [k]
        if self.attention.positions is not None:
            table = self.attention.positions(scale, n)
            table = table if size else table[slice(*cut[self.shard.rank])]
            q, keys = self._place_shard(q, k, project, table, size, reach)
        text = slices_text(self.options.causal, size, reach, self.attention.positions is not None)
        valid = None if real is None else real[:, None]
        sources = [(key, v, valid, cut) for key in keys]
        about: dict[str, Any] = {"queries": cut, "scale": self.options.softmax_scale, "n": n}
        out = self.shard.merge(q, sources, text, "main", self.call, **about)  # (b, H, t, d)
        return out.transpose(1, 2).flatten(2)

    def _place_shard(self, q: Tensor, k: Tensor, project: Any, table: Tensor, size: int, reach: int):
        """`_place`; where there is no token the positions stay in the graph, as in the other processes."""
        if q.shape[2]:
            return self._place(q, k, project, table, size or q.shape[2], reach)
        keys = 1 + (bool(reach) + (bool(reach) and not self.options.causal))
        return q + 0 * table.sum(), [k + 0 * table.sum()] * keys
