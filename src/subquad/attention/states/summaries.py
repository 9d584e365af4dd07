"""A state of tokens and summaries: Combiner over spans, a window over spans, or a tree of spans.

The tokens that are still seen directly are in a ring. A summary is made when its span is complete, from the ring or, in
a tree, from the summaries of the level below, and is never touched again. Until then the queries of its span are kept,
in a ring of their own that is as long as a span and what may be taken back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from subquad.attention.states.keys import Keys, first_length
from subquad.attention.states.state import Buffers, Chunk, put, read, shifted, taken, write
from subquad.attention.states.sums import every_head
from subquad.kernels.merge import merge_attention
from subquad.kernels.pools.summaries import span_summaries, takes
from subquad.supports.kept import Kept, recent
from subquad.supports.shards import Tail
from subquad.supports.spans import Fixed

if TYPE_CHECKING:
    from subquad.attention.base import Attention


class Summary(NamedTuple):
    """Summaries of some blocks."""

    query: Tensor  # (B, H, c, d)
    key: Tensor
    value: Tensor
    count: Tensor  # type: ignore[assignment]  # int64 (B, c): real tokens


class Summaries(Keys):
    """Keys, and summaries of all complete spans that are still seen, in float32 at least; keys and values of as many
    heads as have summaries of their own: every head, or one of those that share.
    """

    def __init__(self, partition: Any, heads: int, margin: int, shared_heads: int = 1) -> None:
        super().__init__(
            partition.kept(margin), [partition.sees], [0] * heads, margin, partition.ranges, partition.begin
        )
        self.partition = partition
        self.skip = getattr(partition, "sinks", 0)  # that many first tokens are in no span
        self.tokens = next(one for one in self.kept if one.source == 0 and one.ring)
        self.levels = sorted((one for one in self.kept if one.source), key=lambda one: one.source)
        self._branch = self.levels[0].unit  # blocks of a block of the next level
        self.queries = recent(self._branch - 1, margin)  # of the span that is not complete
        self.shared_heads = shared_heads

    def _start(self, one: Kept) -> int:
        return self.offsets[self.kept.index(one)]

    def empty(self, chunk: Chunk) -> Buffers:
        buffers = super().empty(self._with_heads(chunk))
        (b, h, _, d), place = buffers["k"].shape, buffers["k"].new_zeros
        buffers["q"] = place(b, chunk.q.shape[1] // self.shared_heads, self.queries.size + 1, d)
        for one in self.levels[:-1]:
            buffers[f"q{one.source}"] = place(b, h, one.size + 1, d)
            buffers[f"count{one.source}"] = torch.zeros(b, one.size + 1, dtype=torch.int64, device=chunk.q.device)
        return buffers

    def _written(self, module: Attention, chunk: Chunk, buffers: Buffers, length: Tensor, after: Tensor) -> Buffers:
        chunk = self._with_heads(chunk)
        buffers = self._tokens_written(module, chunk, buffers, length, after)
        return self._completed(module, chunk, buffers, length, after)

    def written_run(self, module: Any, chunk: Chunk, buffers: Buffers, length: Tensor, first: int) -> Buffers:
        """All of it, for rows of equal length."""
        chunk = self._with_heads(chunk)
        buffers = self._run_written(chunk, buffers, first)
        if (first + chunk.q.shape[2]) // self.levels[0].unit > first // self.levels[0].unit:
            buffers = self._completed(module, chunk, buffers, length, length + chunk.added)
        return buffers

    def _run_written(self, chunk: Chunk, buffers: Buffers, first: int) -> Buffers:
        buffers, stop, size = self.write_run(chunk, buffers, first), first + chunk.q.shape[2], self.queries.size
        begin = max(first, stop - size)
        q = self._mean_query(chunk.q[:, :, begin - first :])
        return buffers | {"q": put(buffers["q"], self.queries.slices(range(begin, stop)), q)}

    def _completed(self, module: Any, chunk: Chunk, buffers: Buffers, length: Tensor, after: Tensor) -> Buffers:
        """The buffers with the summaries of what is complete now."""
        below: Summary | None = None
        for one in self.levels:
            first, stop = length // one.unit, after // one.unit  # (B,): blocks that are complete by now
            many = chunk.q.shape[2] // one.unit + 1
            if not torch.compiler.is_compiling():
                many = chunk.completes(one.unit, length, after)
                if many == 0:
                    break
            block = first[:, None] + torch.arange(many, device=first.device)  # (B, c)
            if chunk.q.shape[2] > self.margin:  # the first tokens, more of them than the ring has
                found = self._of_all(module, chunk, one, below, many)
            else:
                found = self._of_kept(module, buffers, one, block)
            buffers, below = self._put(buffers, one, block, block < stop[:, None], stop, found), found
        return buffers

    def _tokens_written(self, module, chunk: Chunk, buffers: Buffers, length: Tensor, after: Tensor) -> Buffers:
        buffers, ring = super()._written(module, chunk, buffers, length, after), self.queries
        mine = chunk.position >= (after - ring.size)[:, None]
        mine = mine if chunk.here is None else mine & chunk.here
        slot = torch.where(mine, ring.slots(chunk.position), ring.size)
        buffers["q"] = write(buffers["q"], slot, self._mean_query(chunk.q))
        return buffers

    # ---- long chunks ----

    def has_fast_path(self, module, chunk, state):
        """Rows of equal length without padding, nothing dropped; sinks lie before the window."""
        fast = super().has_fast_path(module, chunk, state)
        return fast and self.partition.begin(first_length(chunk, state)) >= self.skip

    def continued(self, module, chunk, buffers, length):
        """As one call does it, without a copy of the new tokens: they attend to each other, to the tokens that are kept
        and still seen, of every level to the blocks still seen and those that are complete now, and to the sinks.
        """
        every, stop, begin = self._with_heads(chunk), length + chunk.q.shape[2], self.partition.begin(length)
        buffers = self.reserve(buffers, stop)
        sources, below = [(every.k, every.v, None)], None
        for one in self.levels:
            buffers, below = self._more_blocks(module, one, buffers, every, below, length, stop)
            sources.append((below.key, below.value, below.count > 0))
        runs = [[slice(0, self.skip)]] if self.skip else []  # the first row of slots
        runs.append(shifted(self.tokens.slices(range(begin, length)), self._start(self.tokens)))
        sources += [(taken(buffers["k"], x), taken(buffers["v"], x), taken(buffers["real"], x)) for x in runs]
        keys, values, alive = (list(x) for x in zip(*sources, strict=True))
        whole = chunk.even is not None or all(x is None or bool(x.all()) for x in alive)
        valid = [None if x is None or whole else x[:, None] for x in alive]  # (B, 1, m)
        support = Tail(of=self.partition.text, first=length - begin, sources=len(sources) - 1).text
        where = (support, f"from:{begin // self._branch}", stop - begin)
        out = merge_attention(every.q, keys, values, *where, scale=module.options.softmax_scale, valid=valid)
        return out.to(chunk.q.dtype), self._run_written(every, buffers, length)

    def _more_blocks(
        self, module: Any, one: Kept, buffers: Buffers, tokens: Chunk, below: Summary | None, length: int, stop: int
    ) -> tuple[Buffers, Summary]:
        """The buffers with the blocks of a level that tokens length … stop-1 complete, and all blocks still seen."""
        first, last = length // one.unit, stop // one.unit
        top, found = one is self.levels[-1], None
        if last > first and below is not None:
            found = self._of_all(module, tokens, one, below, last - first)
        elif last > first:
            found = self._of_run(module, buffers, tokens, length, first, last)
        seen = 0 if top else length // (one.unit * self._branch) * self._branch
        if found is None:
            return buffers, self._kept_blocks(buffers, one, seen, first)
        if top:  # nothing that is kept moves
            buffers = self._put_run(buffers, one, first, found)
            return buffers, self._kept_blocks(buffers, one, seen, last)
        series = _together([self._kept_blocks(buffers, one, seen, first), found])  # before the ring comes round
        return self._put_run(buffers, one, first, found), series

    def _of_run(self, module: Any, buffers: Buffers, tokens: Chunk, length: int, first: int, last: int) -> Summary:
        """The spans first … last-1, of which the first may have begun with tokens that are kept."""
        size, past = self._branch, range(first * self._branch, length)
        own = shifted(self.tokens.slices(past), self._start(self.tokens))
        real = taken(buffers["real"], own)
        query = self._every_query(taken(buffers["q"], self.queries.slices(past)))
        old = (query, taken(buffers["k"], own), taken(buffers["v"], own))
        if tokens.even is not None or bool(real.all()):
            return of_spans(module, old, tokens[:3], last - first, size)
        head = size - len(past)
        q, k, v = (torch.cat((x, y[:, :, :head]), 2)[:, :, None] for x, y in zip(old, tokens[:3], strict=True))
        begun = of_tokens(module, q, k, v, torch.cat((real, real.new_ones(len(real), head)), 1)[:, None])
        if last == first + 1:
            return begun
        rest = tokens.part(head, last * size - length)
        return _together([begun, of_spans(module, _nothing(rest), rest[:3], last - first - 1, size)])

    def _kept_blocks(self, buffers: Buffers, one: Kept, first: int, last: int) -> Summary:
        """The blocks first … last-1 of a level, as they are kept."""
        own, top = one.slices(range(first, last)), one is self.levels[-1]
        place = shifted(own, self._start(one))
        key, value, real = (taken(buffers[name], place) for name in ("k", "v", "real"))
        if top:
            return Summary(key, key, value, real)  # nothing is pooled from the top
        return Summary(taken(buffers[f"q{one.source}"], own), key, value, taken(buffers[f"count{one.source}"], own))

    # ---- summaries ----

    def _of_all(self, module: Any, chunk: Chunk, one: Kept, below: Summary | None, many: int) -> Summary:
        """All blocks of a level, from all tokens or all summaries below."""
        branch = one.unit // self._below(one)
        cut = many * branch
        if below is not None:
            query, key, value = (x[:, :, :cut].unflatten(2, (many, branch)) for x in below[:3])
            return of_summaries(module, query, key, value, below.count[:, :cut].unflatten(1, (many, branch)))
        if chunk.real is None and not self.skip:
            return of_spans(module, _nothing(chunk), chunk[:3], many, branch)
        q, k, v = (x[:, :, :cut].unflatten(2, (many, branch)) for x in chunk[:3])
        real = torch.ones_like(chunk.position, dtype=torch.bool) if chunk.real is None else chunk.real
        real = (real & (chunk.position >= self.skip))[:, :cut].unflatten(1, (many, branch))
        return of_tokens(module, q, k, v, real)

    def _of_kept(self, module: Any, buffers: Buffers, one: Kept, block: Tensor) -> Summary:
        """Blocks (B, c) of a level, from what is kept."""
        branch = one.unit // self._below(one)
        member = (block[..., None] * branch + torch.arange(branch, device=block.device)).flatten(1)  # (B, c·s)
        source = self.tokens if one.source == 1 else self.levels[one.source - 2]
        own = (self.queries if one.source == 1 else source).slots(member)
        place = self._start(source) + source.slots(member)
        shape = (block.shape[1], branch)
        key, value = (read(buffers[name], place).unflatten(2, shape) for name in ("k", "v"))
        query = read(buffers["q" if one.source == 1 else f"q{source.source}"], own).unflatten(2, shape)
        if one.source == 1:
            real = read(buffers["real"], place) & (member >= self.skip)
            return of_tokens(module, self._every_query(query), key, value, real.unflatten(1, shape))
        return of_summaries(module, query, key, value, read(buffers[f"count{source.source}"], own).unflatten(1, shape))

    def _with_heads(self, chunk: Chunk) -> Chunk:
        """With as many key heads as have summaries of their own."""
        heads, have = chunk.q.shape[1] // self.shared_heads, chunk.k.shape[1]
        q, k, v = every_head(chunk, heads if heads % have == 0 else None)
        return chunk._replace(q=q, k=k, v=v)

    def _mean_query(self, q: Tensor) -> Tensor:
        """What is kept of the queries (B, H, t, d): heads that share a summary ask with their mean."""
        return q if self.shared_heads == 1 else q.unflatten(1, (-1, self.shared_heads)).mean(2)

    def _every_query(self, q: Tensor) -> Tensor:
        """What is kept, for every head."""
        return q if self.shared_heads == 1 else q.repeat_interleave(self.shared_heads, 1)

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

    def _put_run(self, buffers: Buffers, one: Kept, first: int, found: Summary) -> Buffers:
        """The same for the blocks from number `first` on of all rows; of more than a ring holds the last."""
        top, stop = one is self.levels[-1], first + found.key.shape[2]
        begin = max(first, stop - one.size) if one.ring else first
        own, late = one.slices(range(begin, stop)), begin - first
        place = shifted(own, self._start(one))
        news = [("k", place, found.key), ("v", place, found.value), ("real", place, found.count > 0)]
        if not top:
            news += [(f"q{one.source}", own, found.query), (f"count{one.source}", own, found.count)]
        return buffers | {
            name: put(buffers[name], runs, x.narrow(x.dim() // 2, late, stop - begin)) for name, runs, x in news
        }


Three = tuple[Tensor, Tensor, Tensor]


def of_spans(module: Any, past: Three, new: Three, count: int, size: int) -> Summary:
    """The first `count` spans of `size` tokens, all of them real, of a sequence in two pieces, q, k and v (B, H, ·, d)
    of less than a span and of what follows.
    """
    plain = not module.abstraction.learns and module.abstraction.shared_heads == 1
    if plain and takes(*past, *new):
        found = span_summaries(past, new, count, size, module.abstraction.pool, module.options.softmax_scale)
        return Summary(*found, torch.full((len(new[0]), count), size, device=new[0].device))
    begun, before = list[Summary](), past[0].shape[2]
    if before:
        q, k, v = (torch.cat((x, y[:, :, : size - before]), 2)[:, :, None] for x, y in zip(past, new, strict=True))
        begun, count = [of_tokens(module, q, k, v, None)], count - 1
        new = tuple(x[:, :, size - before :] for x in new)  # type: ignore[assignment]
    if count:
        q, k, v = (x[:, :, : count * size] for x in new)
        begun.append(_of_whole_spans(module, q, k, v, size))
    return _together(begun)


def _of_whole_spans(module: Any, q: Tensor, k: Tensor, v: Tensor, size: int) -> Summary:
    """Spans of `size` tokens, (B, H, c·s, d), as one call makes their summaries."""
    n, features = q.shape[2], module.abstraction(q, k)
    support = Fixed(causal=True, span=size).text
    query, key = (_pools(x.unflatten(2, (-1, size)), module.abstraction.pool) for x in features)  # (B, H, c, d)

    def find(x: Tensor) -> Tensor:
        return merge_attention(query, [k], [x], support, "members:1", n, scale=module.options.softmax_scale)

    key = find(features[1]) if module.abstraction.attended else key
    return Summary(query, key, find(v), torch.full((len(q), n // size), size, device=q.device))


def _nothing(chunk: Chunk) -> Three:
    """No token, in the form of a chunk's."""
    return chunk.q[:, :, :0], chunk.k[:, :, :0], chunk.v[:, :, :0]


def of_tokens(module: Any, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Summary:
    """Blocks of tokens (B, H, c, s, d), real (B, c, s) or all: pooled queries and keys, and what the query finds."""
    features, scale, pool = module.abstraction(q, k), module.options.softmax_scale, module.abstraction.pool
    if real is None:
        count = torch.full((q.shape[0], q.shape[2]), q.shape[3], device=q.device)
        query, key = (_pools(x, pool) for x in features)
    else:
        count = real.sum(-1)  # (B, c)
        query, key = (_pooled(x, real.to(q.dtype), count, pool) for x in features)
    if module.abstraction.attended:
        key = _found(query, k, features[1], real, scale)
    return Summary(query, key, _found(query, k, v, real, scale), count)


def of_summaries(module: Any, query: Tensor, key: Tensor, value: Tensor, counts: Tensor) -> Summary:
    """Blocks of summaries (B, H, c, s, d) of `counts` (B, c, s) tokens: their pools are pools of pools."""
    count = counts.sum(-1)
    q, k = (_pooled(x, counts.to(x.dtype), count, module.abstraction.pool) for x in (query, key))
    return Summary(q, k, _found(q, key, value, counts > 0, module.options.softmax_scale), count)


def _pools(x: Tensor, pool: str) -> Tensor:
    """(B, H, c, s, d) → (B, H, c, d)."""
    return x.amax(3) if pool == "max" else x.mean(3)


def _pooled(x: Tensor, share: Tensor, count: Tensor, pool: str) -> Tensor:
    """(B, H, c, s, d) → (B, H, c, d), members by their share (B, c, s); 0 where there is none."""
    if pool == "max":
        top = x.masked_fill((share == 0)[:, None, ..., None], -torch.inf).amax(3)
        return top.masked_fill((count == 0)[:, None, :, None], 0)
    return (x * share[:, None, ..., None]).sum(3) / count.clamp(min=1)[:, None, :, None]


def _found(query: Tensor, k: Tensor, v: Tensor, real: Tensor | None, scale: float) -> Tensor:
    """What each pooled query finds among its members, (B, H, c, d)."""
    scores = (k @ query[..., None])[..., 0] * scale  # (B, H, c, s)
    if real is None:
        weights = scores.softmax(-1)
    else:
        allowed = real[:, None]
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1) * allowed
    return (weights[..., None, :] @ v)[..., 0, :]


def _together(summaries: list[Summary]) -> Summary:
    if len(summaries) == 1:
        return summaries[0]
    return Summary(*(torch.cat(xs, min(2, xs[0].dim() - 1)) for xs in zip(*summaries, strict=True)))
