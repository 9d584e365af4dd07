"""Many new tokens of Composite Slice attention at once, through the kernels of one call.

For rows that are equally long and were never padded: at every scale the new tokens are one run, and what they need of
the past is at the end of a ring, the part of a slice that is not complete and what an extended slice reaches back to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.call import repeat_heads
from subquad.attention.slicing import Composer, add_by_slice
from subquad.attention.states.keys import attend_kept
from subquad.attention.states.state import Buffers, put, taken
from subquad.kernels.merge import merge_attention
from subquad.supports.kept import Kept
from subquad.supports.shards import Tail
from subquad.supports.slices import slices_text

if TYPE_CHECKING:
    from subquad.attention.states.slices import Slices

ROWS = 256  # tokens of the coarsest scale that ask at a time, under a mask


class Run:
    """One call: a run of new tokens of a scale, and those of all coarser scales that follow from it."""

    def __init__(self, memory: Slices, module: Any) -> None:
        self.memory, self.module, self.options = memory, module, memory.options
        self.composer = Composer(module, module._call_of(None))

    def extend(self, scale: int, x: Tensor, first: int, project: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        """Tokens first … of a scale, x (B, t, E): what they are given, (B, t, E), and the buffers that have them."""
        if scale == self.memory.top:
            return self._coarsest(x, first, project, buffers)
        if self.options.composition == "local-global":
            fine, buffers = self._mix(scale, x, first, project, buffers)
            coarse, buffers = self._coarser(scale, fine, first, project, buffers)
            return self._added(fine, coarse, first), buffers
        coarse, buffers = self._coarser(scale, x, first, project, buffers)
        if self.options.composition == "global-local":
            x = self._added(x, coarse, first)
        fine, buffers = self._mix(scale, x, first, project, buffers)
        return self._added(fine, coarse, first), buffers

    def _added(self, x: Tensor, coarse: Tensor, first: int) -> Tensor:
        """To every token what its slice is given: coarse (B, slices, E), from the slice of token `first` on."""
        size, head = self.options.slice_length, -first % self.options.slice_length
        if not head:
            return add_by_slice(x, coarse[:, :, None], size)
        begun = x[:, :head] + coarse[:, :1]
        if x.shape[1] <= head:
            return begun
        return torch.cat((begun, add_by_slice(x[:, head:], coarse[:, 1:, None], size)), 1)

    # ---- coarser scales ----

    def _coarser(self, scale: int, x: Tensor, first: int, project: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        """What the coarser scale gives to the slices of the new tokens, (B, slices, E)."""
        size, name = self.options.slice_length, f"{scale}.given"
        begun, done = first // size, (first + x.shape[1]) // size  # slices that were complete, that now are
        given = Kept(size=buffers[name].shape[2] - 1, ring=True)
        series = torch.zeros_like(x[:, :1])
        if begun:
            series = taken(buffers[name], given.slices(range(begun - 1, begun)))[:, 0].clone()  # what is kept may move
        if done > begun:
            past = taken(buffers[f"{scale}.x"], self._ring(scale).slices(range(begun * size, first)))[:, 0]
            pooled = self._pooled(scale, past, x, done - begun)
            inner = project if self.options.share_weights else self.module.own[scale]
            found, buffers = self.extend(scale + 1, pooled, begun, inner, buffers)
            series = torch.cat((series, found), 1)
            buffers = _kept(buffers, name, given, begun, found[:, None])
        return series, _kept(buffers, f"{scale}.x", self._ring(scale), first, x[:, None])

    def _pooled(self, scale: int, past: Tensor, x: Tensor, count: int) -> Tensor:
        """The embeddings of `count` slices (B, count, E), the first of which has begun with the tokens `past`."""
        size, pool = self.options.slice_length, self.composer._pool
        if not past.shape[1]:
            return pool(x[:, : count * size], None, scale)
        head = size - past.shape[1]
        begun = pool(torch.cat((past, x[:, :head]), 1), None, scale)
        if count == 1:
            return begun
        return torch.cat((begun, pool(x[:, head : head + (count - 1) * size], None, scale)), 1)

    def _coarsest(self, x: Tensor, first: int, project: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        q, k, v = project.together(x, x, x)  # (B, H, t, d)
        stop = first + x.shape[1]
        for name, new in (("top.k", k), ("top.v", v)):
            buffers = buffers | {name: put(buffers[name], [slice(first, stop)], new)}
        outs = []
        for begin in range(first, stop, ROWS):
            end = min(stop, begin + ROWS)
            row, place = (torch.arange(a, b, device=x.device) for a, b in ((begin, end), (0, end)))
            keys, values = (buffers[name][:, :, :end] for name in ("top.k", "top.v"))
            seen = (place <= row[:, None])[None, None]  # (1, 1, rows, end)
            some = q[:, :, begin - first : end - first]
            outs.append(attend_kept(some, keys, values, seen, self.options.softmax_scale))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
        return out.transpose(1, 2).flatten(2), buffers

    # ---- inside a slice ----

    def _mix(self, scale: int, x: Tensor, first: int, project: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        if self.options.local == "mlp":
            return self._mlp(scale, x, first, project, buffers)
        q, k, v = project.together(x, x, x)  # (B, H, t, d)
        size, reach, ring = self.options.slice_length, self.options.reach, self._ring(scale)
        start = first // size * size
        begin = max(0, start - -(-reach // size) * size)  # the border of a slice: from here on slices are cut as ever
        text, keys, values = slices_text(True, size, reach, False), [k], [v]
        if begin < first:
            seen = range(max(0, start - reach), first)
            unseen = (0, 0, seen.start - begin, 0)
            for name, sources in (("k", keys), ("v", values)):
                kept = taken(buffers[f"{scale}.{name}"], ring.slices(seen)).to(k.dtype)
                sources.append(F.pad(kept, unseen) if seen.start > begin else kept)
            text = Tail(of=text, first=first - begin, sources=1).text
        n = first - begin + x.shape[1]
        out = merge_attention(q, keys, values, text, "main", n, scale=self.options.softmax_scale)
        for name, new in (("k", k), ("v", v)):
            buffers = _kept(buffers, f"{scale}.{name}", ring, first, new)
        return out.transpose(1, 2).flatten(2), buffers

    def _mlp(self, scale: int, x: Tensor, first: int, project: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        size, ring = self.options.slice_length, self._ring(scale)
        v = project.values(x)  # (B, H, t, d)
        past = taken(buffers[f"{scale}.v"], ring.slices(range(first // size * size, first))).to(v.dtype)
        begun = repeat_heads(torch.cat((past, v), 2), self.options.num_heads).transpose(1, 2).flatten(2)  # (B, n, E)
        whole = F.pad(begun, (0, 0, 0, -begun.shape[1] % size)).reshape(-1, size, x.shape[2])  # (B·m, L, E)
        mixed = self.module.mlps[scale](whole, self.composer.call).view(len(x), -1, x.shape[2])
        out = mixed[:, past.shape[2] : past.shape[2] + x.shape[1]]
        return out, _kept(buffers, f"{scale}.v", ring, first, v)

    def _ring(self, scale: int) -> Kept:
        return Kept(size=self.memory.rings[scale], ring=True)


def _kept(buffers: Buffers, name: str, ring: Kept, first: int, x: Tensor) -> Buffers:
    """The buffers with the entries first … of a ring, x (B, H, t, d): of more than it holds the last."""
    stop = first + x.shape[2]
    begin = max(first, stop - ring.size)
    return buffers | {name: put(buffers[name], ring.slices(range(begin, stop)), x[:, :, begin - first :])}
