"""A state of tokens and summaries: Combiner over spans, a window over spans, or a tree of spans.

The tokens that are still seen directly are in a ring, with the queries that summaries are pooled from. A summary is
made when its span is complete, from the ring or, in a tree, from the summaries of the level below, and is never
touched again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from subquad.attention.states.keys import Keys
from subquad.attention.states.state import Buffers, Chunk, read, write
from subquad.attention.states.sums import every_head
from subquad.supports.kept import Kept

if TYPE_CHECKING:
    from subquad.attention.base import Attention


class Summary(NamedTuple):
    """Summaries of some blocks."""

    query: Tensor  # (B, H, c, d)
    key: Tensor
    value: Tensor
    count: Tensor  # int64 (B, c): real tokens


class Summaries(Keys):
    """Keys, and summaries of all complete spans that are still seen. Heads are all there, in float32 at least."""

    growth = "s + n/s"

    def __init__(self, kept, sees, heads: int, margin: int, skip: int = 0) -> None:
        super().__init__(kept, [sees], [0] * heads, margin)
        self.skip = skip  # that many first tokens are in no span
        self.tokens = next(one for one in self.kept if one.source == 0 and one.ring)
        self.levels = sorted((one for one in self.kept if one.source), key=lambda one: one.source)

    def _start(self, one: Kept) -> int:
        return self.starts()[self.kept.index(one)]

    def empty(self, chunk: Chunk) -> Buffers:
        buffers = super().empty(_every_head(chunk))
        b, h, _, d = chunk.q.shape
        place = buffers["k"].new_zeros
        buffers["q"] = place(b, h, self.tokens.size + 1, d)
        for one in self.levels[:-1]:
            buffers[f"q{one.source}"] = place(b, h, one.size + 1, d)
            buffers[f"count{one.source}"] = torch.zeros(b, one.size + 1, dtype=torch.int64, device=chunk.q.device)
        return buffers

    def _written(self, module: Attention, chunk: Chunk, buffers: Buffers, length: Tensor, after: Tensor) -> Buffers:
        chunk = _every_head(chunk)
        buffers = super()._written(module, chunk, buffers, length, after)
        ring = self.tokens
        mine = chunk.position >= (after - ring.size)[:, None]
        mine = mine if chunk.here is None else mine & chunk.here
        buffers["q"] = write(buffers["q"], torch.where(mine, ring.slots(chunk.position), ring.size), chunk.q)
        below: Summary | None = None
        for one in self.levels:
            first, stop = length // one.unit, after // one.unit  # (B,): blocks that are complete by now
            many = chunk.q.shape[2] // one.unit + 1
            if not torch.compiler.is_compiling():
                many = int((stop - first).max())
                if many == 0:
                    break
            block = first[:, None] + torch.arange(many, device=first.device)  # (B, c)
            if chunk.q.shape[2] > self.margin:  # the first tokens, more of them than the ring has
                found = self._of_all(module, chunk, one, below, many)
            else:
                found = self._of_kept(module, buffers, one, block)
            buffers, below = self._put(buffers, one, block, block < stop[:, None], stop, found), found
        return buffers

    def _of_all(self, module: Any, chunk: Chunk, one: Kept, below: Summary | None, many: int) -> Summary:
        """All blocks of a level, from all tokens or all summaries below."""
        branch = one.unit // self._below(one)
        cut = many * branch
        if below is not None:
            query, key, value = (x[:, :, :cut].unflatten(2, (many, branch)) for x in below[:3])
            return of_summaries(module, query, key, value, below.count[:, :cut].unflatten(1, (many, branch)))
        q, k, v = (x[:, :, :cut].unflatten(2, (many, branch)) for x in (chunk.q, chunk.k, chunk.v))
        real = torch.ones_like(chunk.position, dtype=torch.bool) if chunk.real is None else chunk.real
        real = (real & (chunk.position >= self.skip))[:, :cut].unflatten(1, (many, branch))
        return of_tokens(module, q, k, v, real)

    def _of_kept(self, module: Any, buffers: Buffers, one: Kept, block: Tensor) -> Summary:
        """Blocks (B, c) of a level, from what is kept."""
        branch = one.unit // self._below(one)
        member = (block[..., None] * branch + torch.arange(branch, device=block.device)).flatten(1)  # (B, c·s)
        source = self.tokens if one.source == 1 else self.levels[one.source - 2]
        own = source.slots(member)
        place = self._start(source) + own
        shape = (block.shape[1], branch)
        key, value = (read(buffers[name], place).unflatten(2, shape) for name in ("k", "v"))
        query = read(buffers["q" if one.source == 1 else f"q{source.source}"], own).unflatten(2, shape)
        if one.source == 1:
            real = read(buffers["real"], place) & (member >= self.skip)
            return of_tokens(module, query, key, value, real.unflatten(1, shape))
        return of_summaries(module, query, key, value, read(buffers[f"count{source.source}"], own).unflatten(1, shape))

    def _below(self, one: Kept) -> int:
        return 1 if one.source == 1 else self.levels[one.source - 2].unit

    def _put(self, buffers: Buffers, one: Kept, block: Tensor, done: Tensor, stop: Tensor, found: Summary) -> Buffers:
        buffers, trash = dict(buffers), buffers["k"].shape[2] - 1
        if one.ring:
            done = done & (block >= (stop - one.size)[:, None])
        slot = torch.where(done, one.slots(block) + self._start(one), trash)
        news = {"k": found.key, "v": found.value, "real": found.count > 0}
        buffers |= {name: write(buffers[name], slot, x) for name, x in news.items()}
        if one is not self.levels[-1]:
            slot = torch.where(done, one.slots(block), one.size)
            news = {f"q{one.source}": found.query, f"count{one.source}": found.count}
            buffers |= {name: write(buffers[name], slot, x) for name, x in news.items()}
        return buffers


def of_tokens(module: Any, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Summary:
    """Blocks of tokens (B, H, c, s, d), real (B, c, s): pooled queries and keys, and what the query finds."""
    fq, fk = module.abstraction(q, k)
    count = real.sum(-1)  # (B, c)
    share = real.to(q.dtype)
    query = _pooled(fq, share, count, module.abstraction.pool)
    scale = module.options.softmax_scale
    attended = module.abstraction.attended
    key = _found(query, k, fk, real, scale) if attended else _pooled(fk, share, count, module.abstraction.pool)
    return Summary(query, key, _found(query, k, v, real, scale), count)


def of_summaries(module: Any, query: Tensor, key: Tensor, value: Tensor, counts: Tensor) -> Summary:
    """Blocks of summaries (B, H, c, s, d) of `counts` (B, c, s) tokens: their pools are pools of pools."""
    count = counts.sum(-1)
    q, k = (_pooled(x, counts.to(x.dtype), count, module.abstraction.pool) for x in (query, key))
    return Summary(q, k, _found(q, key, value, counts > 0, module.options.softmax_scale), count)


def _pooled(x: Tensor, share: Tensor, count: Tensor, pool: str) -> Tensor:
    """(B, H, c, s, d) → (B, H, c, d), members by their share (B, c, s); 0 where there is none."""
    if pool == "max":
        top = x.masked_fill((share == 0)[:, None, ..., None], -torch.inf).amax(3)
        return top.masked_fill((count == 0)[:, None, :, None], 0)
    return (x * share[:, None, ..., None]).sum(3) / count.clamp(min=1)[:, None, :, None]


def _found(query: Tensor, k: Tensor, v: Tensor, real: Tensor, scale: float) -> Tensor:
    """What each pooled query finds among its members, (B, H, c, d)."""
    scores = (k @ query[..., None])[..., 0] * scale  # (B, H, c, s)
    allowed = real[:, None]
    weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1) * allowed
    return (weights[..., None, :] @ v)[..., 0, :]


def _every_head(chunk: Chunk) -> Chunk:
    """With as many key heads as query heads: summaries belong to a query head."""
    q, k, v = every_head(chunk)
    return chunk._replace(q=q, k=k, v=v)
