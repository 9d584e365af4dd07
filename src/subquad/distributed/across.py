"""A mechanism on a part of a sequence: `Across` takes the place of its fast path, `Piece` is what it is handed.

Rows of a padded batch begin and end in different slots. Each run of rows that agree is divided in its own coordinates:
a row has its first real token at place 0, wherever its slots lie, and processes that have none of it have an empty
range. So a row gives what it gives alone, on any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.base import Attention
from subquad.attention.call import Call, Record, clean, draw_seed, repeat_heads
from subquad.attention.checks import checked_seed
from subquad.core.hashing import seed_from
from subquad.distributed import exchange, merging, ring
from subquad.distributed.groups import Group
from subquad.distributed.layouts import Layout, agree, current
from subquad.supports import shards
from subquad.supports.shards import Cut

Source = tuple[
    Tensor, Tensor, Tensor | None, Cut
]  # own keys and values, which exist of the whole (B, 1, m), who has what


class Run(NamedTuple):
    """Consecutive rows of a batch that begin in the same slot; `length` tokens are divided by `cut`."""

    rows: slice
    length: int
    cut: Cut
    slots: slice  # where this process's part of the rows lies among its slots
    key_mask: Tensor | None  # (b, length) of the whole rows


@dataclass(frozen=True)
class Piece:
    """One process's part of some rows: what it has, and how it reaches the rest. Ranges are places in the rows."""

    group: Group
    layout: Layout
    n: int
    cut: Cut
    key_mask: Tensor | None  # (b, n) of the whole rows
    first_row: int

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def own(self) -> tuple[int, int]:
        return self.cut[self.rank]

    @property
    def exists(self) -> Tensor | None:
        """The key mask as it broadcasts over heads, (b, 1, n)."""
        return None if self.key_mask is None else self.key_mask[:, None]

    def masked(self, own: tuple[int, int]) -> Tensor | None:
        """The key mask of a range, (b, t)."""
        return None if self.key_mask is None else self.key_mask[:, slice(*own)]

    @property
    def lengths(self) -> Tensor | None:
        """Where the rows end, (b,); None = all in the last place."""
        if self.key_mask is None:
            return None
        place = torch.arange(self.n, device=self.key_mask.device)
        return ((place + 1) * self.key_mask).amax(1)

    def tokens_before(self, device: torch.device) -> Tensor | int:
        """Real tokens of the rows before this process, (b, 1)."""
        if self.key_mask is None:
            return self.own[0]
        return self.key_mask[:, : self.own[0]].sum(1).to(device)[:, None]

    def seed(self, seed: Tensor | None, heads: int) -> Tensor | None:
        """The seed with which these rows drop what they drop inside the batch."""
        return None if seed is None else seed_from(seed, self.first_row * heads)

    def aligned(self, size: int) -> Cut:
        """The cut with its ends at multiples of `size`: at most half a block moves at each."""
        return shards.aligned(self.cut, size, self.n)

    def move(self, xs: Sequence[Tensor], have: Cut, want: Cut) -> list[Tensor]:
        """Tensors (b, H, have, d) → (b, H, want, d)."""
        return exchange.move(self.group, xs, have, want)

    def gather(self, x: Tensor) -> Tensor:
        return exchange.gather(self.group, x)

    def total(self, x: Tensor) -> Tensor:
        return exchange.total(self.group, x)

    def earlier(self, x: Tensor) -> Tensor:
        return exchange.earlier(self.group, x)

    def told(self, x: Tensor) -> Tensor:
        """x of every process, (p, …), without gradient."""
        return self.group.gather(x.detach())

    def merge(
        self, q: Tensor, sources: Sequence[Source], text: str, which: str, call: Call, *, queries: Cut, scale: float,
        dropout: bool = True, n: int | None = None,
    ) -> Tensor:  # fmt: skip
        """`merge_attention` over the whole sequence, for the queries of this process: (b, H, r, d)."""
        n = self.n if n is None else n
        cuts = tuple(cut for *_, cut in sources)
        lists = merging.lists(text, which, n, queries, cuts, self.rank)
        own_valid: list[Tensor] = []
        their_valid: list[Tensor] = []
        if any(valid is not None for _, _, valid, _ in sources):
            for (k, _, valid, cut), needed in zip(sources, lists.needed, strict=True):
                whole = torch.ones(1, 1, cut[-1][1], dtype=torch.bool, device=k.device) if valid is None else valid
                own_valid.append(whole[:, :, slice(*cut[self.rank])])
                their_valid.append(whole[:, :, torch.from_numpy(needed).to(k.device)])
        drop = call.dropout if dropout else 0.0
        seed = self.seed(call.seed, q.shape[1]) if drop else None
        job = merging.Job(self.group, lists, which, n, scale, drop, seed, own_valid, their_valid)
        work = torch.promote_types(q.dtype, torch.float32)
        keys, values = [k.to(work) for k, *_ in sources], [v.to(work) for _, v, *_ in sources]
        return merging.attend(job, q.to(work), keys, values).to(q.dtype)

    def ring(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, causal: bool, scale: float) -> Tensor:
        """Everyone to everyone (or to what is before): keys and values go round."""
        seed = self.seed(call.seed, q.shape[1]) if call.dropout else None
        ranges = self.layout.ranges if self.layout.zigzag else tuple((own,) for own in self.cut)
        about = (ranges, self.exists, causal, scale, call.dropout, seed)
        work = torch.promote_types(q.dtype, torch.float32)
        return ring.attend(self.group, about, q.to(work), k.to(work), v.to(work)).to(q.dtype)


class Across:
    """Stands in for the fast path of a mechanism, where a sequence is divided among processes."""

    def __init__(self, group: Group, zigzag: bool = False) -> None:
        self.group, self.zigzag = group, zigzag

    def layout(self, module: Attention, length: int, batch: int, key_mask: Tensor | None) -> Layout:
        known = current()
        if known is not None and known.group is self.group and known.length == length:
            return known
        seed = int(draw_seed()) if module.is_random else 0
        return agree(self.group, length, batch, key_mask, seed, self.zigzag)

    def attend(
        self, module: Attention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, seed: Tensor | int | None
    ) -> Tensor:
        """q, k, v (B, H, t, d) of this process → (B, H, t, d)."""
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"{module.name}: a divided sequence attends to itself; q has {q.shape[2]}, k {k.shape[2]}")
        layout = self.layout(module, q.shape[2], len(q), key_mask)
        call = self._call(module, layout, seed)
        q, k, v = clean(q, k, v, None if layout.key_mask is None else layout.take(layout.key_mask))
        if not module.grouped:
            k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])

        def one(run: Run, call: Call) -> Tensor:
            x, y, z = (t[run.rows, :, run.slots] for t in (q, k, v))
            return module.attend_shard(x, y, z, call)

        return self._by_rows(module, layout, call, q, one)

    def attend_tokens(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, project: Any, key_mask: Tensor | None,
        seed: Tensor | int | None,
    ) -> tuple[Tensor, Record]:  # fmt: skip
        """Tokens (B, t, E) of this process → heads side by side, (B, t, H·d)."""
        layout = self.layout(module, query.shape[1], len(query), key_mask)
        call = self._call(module, layout, seed)
        mask = None if layout.key_mask is None else ~layout.take(layout.key_mask)[..., None]
        clean = {id(x): x if mask is None else x.masked_fill(mask, 0) for x in (query, key, value)}
        tokens = [clean[id(x)] for x in (query, key, value)]

        def one(run: Run, call: Call) -> Tensor:
            part = {id(x): x[run.rows, run.slots] for x in tokens}
            return module.attend_tokens_shard(tuple(part[id(x)] for x in tokens), project, call)[:, None]

        out = self._by_rows(module, layout, call, query[:, None], one)[:, 0]
        return (out if mask is None else out.masked_fill(mask, 0)), Record()

    def _call(self, module: Attention, layout: Layout, seed: Tensor | int | None) -> Call:
        longest = module.options.max_length
        if longest is not None and layout.n > longest and not getattr(module.options, "interpolate", False):
            raise ValueError(f"{module.name}: length {layout.n} is beyond max_length={longest}")
        if seed is None and module.is_random:
            seed = torch.tensor(layout.seed) if current() is not layout else draw_seed()
        dropout = module.options.dropout if module.training else 0.0
        return Call(None, None, checked_seed(seed), dropout, module.training, layout.n)

    def _by_rows(self, module: Attention, layout: Layout, call: Call, like: Tensor, one: Any) -> Tensor:
        """The mechanism on every run of rows, put together: slots outside of a row give 0. `like` (B, H, t, d)."""
        pieces = []
        align = module.positional or (call.dropout > 0 and not layout.zigzag)  # dropout counts a row's own tokens
        for run in runs(layout, len(like), align=align, causal=module.options.causal):
            if not run.length:  # nothing but padding
                pieces.append(torch.zeros_like(like[run.rows]))
                continue
            piece = Piece(self.group, layout, run.length, run.cut, run.key_mask, run.rows.start)
            mine = piece.masked(piece.own)
            out = one(run, call._replace(shard=piece, key_mask=mine))  # (b, H, t', d)
            if mine is not None and module.positional and run.key_mask is not None:
                out = _within(out, run.key_mask, piece.own)
            around = (run.slots.start, layout.length - run.slots.stop)
            pieces.append(F.pad(out, (0, 0, *around)) if any(around) else out)  # padding by nothing is a copy
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _within(out: Tensor, key_mask: Tensor, own: tuple[int, int]) -> Tensor:
    """0 behind the last real token of a row."""
    place = torch.arange(key_mask.shape[1], device=out.device)
    end = ((place + 1) * key_mask).amax(1)  # (b,)
    behind = place[slice(*own)] >= end[:, None]  # (b, t)
    return out.masked_fill(behind[:, None, :, None], 0)


def runs(layout: Layout, batch: int, *, align: bool, causal: bool) -> Iterator[Run]:
    """Rows in their own coordinates. Causal sets do not depend on the length: such rows differ in their start only."""
    if layout.key_mask is None or not align:
        cut = ((0, 0),) * layout.group.size if layout.zigzag else layout.cut
        yield Run(slice(0, batch), layout.n, cut, slice(0, layout.length), layout.key_mask)
        return
    place = torch.arange(layout.n, device=layout.key_mask.device)
    ends = ((place + 1) * layout.key_mask).amax(1).tolist()
    starts = torch.where(layout.key_mask, place, layout.n).amin(1).tolist()
    spans = [(min(s, e), layout.n if causal and e else e) for s, e in zip(starts, ends, strict=True)]
    first, me = 0, layout.group.rank
    for b in range(1, batch + 1):
        if b < batch and spans[b] == spans[first]:
            continue
        rows, (start, end) = slice(first, b), spans[first]
        first = b
        cut = tuple((min(max(lo, start), end) - start, min(max(hi, start), end) - start) for lo, hi in layout.cut)
        begin = min(max(layout.cut[me][0], start), end) - layout.cut[me][0]
        begin = min(max(begin, 0), layout.length)
        slots = slice(begin, begin + cut[me][1] - cut[me][0])
        yield Run(rows, end - start, cut, slots, layout.key_mask[rows, start:end])
