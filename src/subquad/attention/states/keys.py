"""A state of keys: the tokens that a future query can name, in the slots that the support says (`supports.kept`).

One buffer of keys and one of values hold all rows of slots side by side, and behind them one slot for what does not
exist. New tokens are written first; then the new queries attend to the slots, under the mask of the definition: one
softmax, or any probability map (`attend_kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.states.state import Buffers, Chunk, Memory, State, grown, put, shifted, taken, write
from subquad.core.hashing import dropout_factors
from subquad.kernels.values import as_queries_are, readable
from subquad.supports.kept import EVERYTHING, Kept, Ranges

if TYPE_CHECKING:
    from subquad.attention.base import Attention


Map = Callable[[Tensor, Tensor], Tensor]


def attend_kept(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, factors: Tensor | None = None, rho: Map | None = None
) -> Tensor:
    """q (B, H, t, d), k and v (B, H or H/g, m, d), seen bool (B, H or 1, t, m) → (B, H, t, d).

    `factors` is what dropout multiplies the weights with, `rho` a map other than softmax. A query that sees nothing
    gives 0, one that is not a number NaN. Half precision is computed in float32.
    """
    kind, work = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(work), k.to(work), v.to(work)
    if factors is None and rho is None:
        return _fused(q, k, v, seen, scale).to(kind)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    scores = q @ k.mT * scale
    if rho is None:
        empty = ~seen.any(-1, keepdim=True)
        weights = scores.masked_fill(~(seen | empty), -torch.inf).softmax(-1).masked_fill(empty, 0)
    else:
        weights = rho(scores, seen)
    return ((weights if factors is None else weights * factors) @ v).to(kind)


def attend_runs(q: Tensor, k: Tensor, v: Tensor, runs: list[slice], scale: float) -> Tensor:
    """The same for queries (B, H, 1, d) that all see these runs of slots, softmax alone."""
    kind, work = q.dtype, torch.promote_types(q.dtype, torch.float32)
    first, stop = min(run.start for run in runs), max(run.stop for run in runs)
    q, k, v = q.to(work), k[:, :, first:stop].to(work), v[:, :, first:stop].to(work)
    mask = None
    if sum(run.stop - run.start for run in runs) < stop - first:
        mask = torch.full((1, 1, 1, stop - first), -torch.inf, dtype=work, device=q.device)
        for run in runs:
            mask[..., run.start - first : run.stop - first].zero_()
    grouped = {"enable_gqa": True} if k.shape[1] < q.shape[1] else {}
    return as_queries_are(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, **grouped), q).to(kind)


def _fused(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    grouped: dict[str, Any] = {"enable_gqa": True} if k.shape[1] < q.shape[1] else {}
    looks = readable(seen)
    if looks and bool(seen.all()):
        out = F.scaled_dot_product_attention(q, k, v, scale=scale, **grouped)
        return as_queries_are(out, q)
    empty = ~seen.any(-1, keepdim=True)  # (B, H or 1, t, 1)
    if looks and not bool(empty.any()):
        return as_queries_are(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, **grouped), q)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | empty, scale=scale, **grouped)
    return as_queries_are(out, q).masked_fill(empty, 0)


FIRST = 64  # slots of a new row of slots that grows
SOURCE = 1 << 26  # dropout counts the entries of source s from s·SOURCE on, as `kernels.merge` does

Sees = Callable[[int, Tensor, Tensor], Tensor]  # source, i, entry → bool


class Keys(Memory):
    """Tokens in slots. `sees` has the definition of every family of heads; `families` the family of every head."""

    def __init__(
        self,
        kept: Sequence[Kept],
        sees: Sequence[Sees],
        families: Sequence[int],
        margin: int,
        ranges: Callable[[int], Ranges | None] | None = None,
        begin: Callable[[int], int | None] | None = None,
    ) -> None:
        # what grows stands last, so that nothing moves when it does
        self.kept = tuple(sorted(kept, key=lambda one: one.size == 0))
        self.order = tuple(self.kept.index(one) for one in kept)  # who holds a token first
        self.sees, self.families, self.margin = tuple(sees), tuple(families), margin
        self.ranges = None if ranges is None or ranges(0) is None else ranges  # what one query sees, as runs
        self.begin = begin  # the first recent token that queries from i on see
        self.offsets = [sum(one.size for one in self.kept[:index]) for index in range(len(self.kept))]  # in the buffers

    # ---- slots ----

    def slots_for(self, n: int) -> int:
        """Slots that rows of up to n tokens fill."""
        last = self.kept[-1]
        return self.offsets[-1] + (last.size or last.used(n // last.unit))

    def reserve(self, buffers: Buffers, length: int) -> Buffers:
        wanted = self.slots_for(length) + 1
        if not buffers or buffers["k"].shape[2] >= wanted:
            return buffers
        return {
            name: grown(x, wanted, x.dim() // 2) if name in ("k", "v", "real") else x for name, x in buffers.items()
        }

    def room(self, buffers: Buffers) -> int | None:
        last = self.kept[-1]
        if last.size or not buffers:
            return None
        entries = last.start + last.step * (buffers["k"].shape[2] - 1 - self.offsets[-1])
        return (entries + 1) * last.unit - 1  # the next one is not complete

    def earliest(self, state: State) -> Tensor:
        found = torch.zeros_like(state.length)
        for one in self.kept:
            if one.ring:
                lost = state.high // one.unit - one.size  # entries before this one are overwritten
                found = torch.where(lost > 0, found.maximum((lost + one.reach) * one.unit), found)
        return found

    @property
    def forgets(self) -> bool:
        return any(one.ring for one in self.kept)

    def _holder(self, position: Tensor) -> list[Tensor]:
        """For each row of slots of tokens, which positions count in it."""
        taken, holds = torch.zeros_like(position, dtype=torch.bool), {}
        for index in self.order:
            if self.kept[index].source == 0:
                mine = self.kept[index].holds(position) & ~taken
                holds[index], taken = mine, taken | mine
        return [holds[index] if index in holds else taken[:0] for index in range(len(self.kept))]

    # ---- a chunk ----

    def extend(self, module: Attention, chunk: Chunk, state: State) -> tuple[Tensor, Buffers]:
        t, step, even = chunk.q.shape[2], self.margin, self._even(module, chunk, state)
        buffers, length = dict(state.buffers), state.length
        if not buffers:
            buffers = self.empty(chunk)
            if t > step:
                return self._whole(module, chunk, buffers, state.seed)
        if t == 1 and even is not None and self.ranges is not None:
            return self._one(module, chunk, buffers, length, even)
        if t > step and self.has_fast_path(module, chunk, state):
            return self.continued(module, chunk, buffers, first_length(chunk, state))
        return chunk.walked(step, buffers, length, lambda c, b, n: self._step(module, c, b, n, state.seed))

    # ---- rows of equal length, without padding and without gradients ----

    @staticmethod
    def _even(module: Any, chunk: Chunk, state: State) -> int | None:
        """The length of all rows, where what is new can be written in place and read in slices."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or chunk.real is not None:
            return None
        plain = not (module.training and module.options.dropout) and module.maps_by_softmax
        return state.even if plain else None

    def write_run(self, chunk: Chunk, buffers: Buffers, first: int) -> Buffers:
        """The tokens from position `first` on, written into their slots in slices."""
        stop = first + chunk.q.shape[2]
        buffers = self.reserve(buffers, stop)
        for one, start in zip(self.kept, self.offsets, strict=True):
            if one.source:
                continue
            begin, end = first, stop
            if one.ring:
                begin = max(first, stop - one.size)
            elif one.step > 1 or one.size:
                begin = max(one.start, one.start - (one.start - first) // one.step * one.step)
                end = min(stop, one.start + one.size * one.step) if one.size else stop
            entries = range(begin, end, one.step)
            if entries:
                runs, own = shifted(one.slices(entries), start), slice(begin - first, entries[-1] - first + 1, one.step)
                news = {"k": chunk.k[:, :, own], "v": chunk.v[:, :, own]}
                news["real"] = buffers["real"].new_ones(len(chunk.k), len(entries))
                buffers |= {name: put(buffers[name], runs, x) for name, x in news.items()}
        return buffers

    def _one(self, module: Any, chunk: Chunk, buffers: Buffers, length: Tensor, i: int) -> tuple[Tensor, Buffers]:
        """One token per row at position i: what it sees are a few runs of slots."""
        buffers = self.written_run(module, chunk, buffers, length, i)
        assert self.ranges is not None
        runs = []
        for number, entries in self.ranges(i) or []:
            index = self.order[number]
            start = self.offsets[index]
            runs += shifted(self.kept[index].slices(entries), start)
        return attend_runs(chunk.q, buffers["k"], buffers["v"], runs, module.options.softmax_scale), buffers

    def written_run(self, module: Any, chunk: Chunk, buffers: Buffers, length: Tensor, first: int) -> Buffers:
        return self.write_run(chunk, buffers, first)

    def has_fast_path(self, module: Any, chunk: Chunk, state: State) -> bool:
        """Can a long chunk go on from here through the kernels? Else it goes on a few tokens at a time."""
        if self.begin is None or chunk.real is not None or module.is_random:
            return False
        if torch.compiler.is_compiling() or (chunk.even is None and not readable(state.length)):
            return False
        begin = self.begin(first_length(chunk, state))
        return begin is not None and (chunk.even is not None or bool((state.length == state.length[0]).all()))

    def continued(self, module: Any, chunk: Chunk, buffers: Buffers, length: int) -> tuple[Tensor, Buffers]:
        """As one call does it for a sequence of what is kept and still seen, and the new tokens."""
        assert self.begin is not None
        begin = self.begin(length)
        assert begin is not None
        runs = []
        for one, start in zip(self.kept, self.offsets, strict=True):
            entries = range(begin, length) if one.ring else range(min(one.size, length))
            runs += shifted(one.slices(entries), start)
        k, v, real = (taken(buffers[name], runs) for name in ("k", "v", "real"))
        whole = chunk.even is not None or bool(real.all())
        out = module.attend_last(chunk.q, [chunk.k, k], [chunk.v, v], None if whole else real)
        return out, self.write_run(chunk, buffers, length)

    def empty(self, chunk: Chunk) -> Buffers:
        slots = self.offsets[-1] + (self.kept[-1].size or FIRST) + 1
        k, v = (x.new_zeros(*x.shape[:2], slots, x.shape[3]) for x in (chunk.k, chunk.v))
        return {"k": k, "v": v, "real": torch.ones(k.shape[0], slots, dtype=torch.bool, device=k.device)}

    def _whole(self, module: Attention, chunk: Chunk, buffers: Buffers, seed: Tensor | None) -> tuple[Tensor, Buffers]:
        """The first tokens, many of them: the mechanism's fast path, and what is kept of them."""
        length = torch.zeros_like(chunk.position[:, 0]) + chunk.added
        real = chunk.real if chunk.here is None or chunk.real is None else chunk.real & chunk.here
        out = module.attend_aligned(chunk.q, chunk.k, chunk.v, real, length, seed)
        if real is None and not torch.is_grad_enabled():
            return out, self.written_run(module, chunk, buffers, torch.zeros_like(length), 0)
        return out, self._written(module, chunk, buffers, torch.zeros_like(length), length)

    def _step(
        self, module: Attention, chunk: Chunk, buffers: Buffers, length: Tensor, seed: Tensor | None
    ) -> tuple[Tensor, Buffers]:
        after = length + chunk.added
        buffers = self._written(module, chunk, buffers, length, after)
        used = self._used(chunk, buffers, after)
        entries = self._entries(after, used)
        seen = self._seen(chunk.position, entries) & buffers["real"][:, None, None, :used]  # (B, H or 1, t, m)
        return self._attend(module, chunk, buffers, used, seen, entries, seed), buffers

    def _written(self, module: Attention, chunk: Chunk, buffers: Buffers, length: Tensor, after: Tensor) -> Buffers:
        """The buffers with the new tokens."""
        if not torch.compiler.is_compiling():
            buffers = self.reserve(buffers, chunk.longest(after))
        trash = buffers["k"].shape[2] - 1
        real = chunk.real if chunk.real is not None else torch.ones_like(chunk.position, dtype=torch.bool)
        for one, start, mine in zip(self.kept, self.offsets, self._holder(chunk.position), strict=True):
            if one.source:
                continue
            if one.ring:  # it has everything, for the summaries; of more than it holds the last
                mine = chunk.position >= (after - one.size)[:, None]
            mine = mine if chunk.here is None else mine & chunk.here
            slot = torch.where(mine, one.slots(chunk.position) + start, trash)
            for name, x in (("k", chunk.k), ("v", chunk.v), ("real", real)):
                buffers[name] = write(buffers[name], slot, x.to(buffers[name].dtype))
        return buffers

    def _used(self, chunk: Chunk, buffers: Buffers, after: Tensor) -> int:
        return buffers["k"].shape[2] - 1 if torch.compiler.is_compiling() else self.slots_for(chunk.longest(after))

    # ---- who sees what ----

    def seen(self, chunk: Chunk, buffers: Buffers, after: Tensor) -> Tensor:
        """Which slots the new queries see, bool (B, H or 1, t, slots)."""
        used = self._used(chunk, buffers, after)
        return self._seen(chunk.position, self._entries(after, used)) & buffers["real"][:, None, None, :used]

    def _entries(self, after: Tensor, used: int) -> list[Tensor]:
        """What the slots of each row hold, (B, slots), -1 = nothing that counts."""
        found = []
        for one, start in zip(self.kept, self.offsets, strict=True):
            found.append(one.entries(after // one.unit, one.size or max(0, used - start)))
        for index in self.order[1:]:
            if self.kept[index].source == 0:
                mine = self._holder(found[index])[index]
                found[index] = torch.where(mine, found[index], -1)
        return found

    def _seen(self, position: Tensor, entries: list[Tensor]) -> Tensor:
        """bool (B, families, t, slots) as heads have it: (B, H or 1, t, slots)."""
        i, masks = position[:, :, None], []
        for sees in self.sees:
            pieces = (
                sees(one.source, i, entry[:, None]) & (entry >= 0)[:, None]
                for one, entry in zip(self.kept, entries, strict=True)
            )
            masks.append(torch.cat(list(pieces), -1))  # (B, t, slots)
        if len(masks) == 1:
            return masks[0][:, None]
        return torch.stack(masks, 1)[:, list(self.families)]

    def _attend(
        self, module: Any, chunk: Chunk, buffers: Buffers, used: int, seen: Tensor, entries: list[Tensor], seed
    ) -> Tensor:
        k, v = (buffers[name][:, :, :used] for name in ("k", "v"))
        numbers = torch.cat([e + one.source * SOURCE for one, e in zip(self.kept, entries, strict=True)], -1)  # (B, m)
        if not module.maps_by_softmax and self.kept != EVERYTHING:  # of equal scores a map takes that of the first key
            order = numbers.argsort(-1)
            numbers, seen = numbers.gather(-1, order), seen.take_along_dim(order[:, None, None], -1)
            k, v = (x.take_along_dim(order[:, None, :, None], 2) for x in (k, v))
        factors = None
        if module.training and module.options.dropout:
            factors = self._factors(module, chunk, numbers[:, None, None], seed)
        return module.attend_kept(chunk.q, k, v, seen, chunk.position, factors)

    def _factors(self, module: Any, chunk: Chunk, columns: Tensor, seed: Tensor | None) -> Tensor:
        """What dropout multiplies the weights with: a weight is dropped for itself, by its query and its key."""
        return factors_of(module, chunk, chunk.position[:, None, :, None], columns, seed)


def first_length(chunk: Chunk, state: State) -> int:
    """The length of the first row, before the new tokens."""
    return int(state.length[0]) if chunk.even is None else chunk.even


def factors_of(module: Attention, chunk: Chunk, rows: Tensor, columns: Tensor, seed: Tensor | None) -> Tensor:
    """What dropout multiplies weights with, by the numbers of their rows and columns, broadcast to (B, H, t, m)."""
    assert seed is not None
    instance = module.instances(len(chunk.q), columns.device)[..., None, None]
    work = torch.promote_types(chunk.q.dtype, torch.float32)
    return dropout_factors(seed, module.options.dropout, instance, rows, columns, work)
