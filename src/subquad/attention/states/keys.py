"""A state of keys: the tokens that a future query can name, in the slots that the support says (`supports.kept`).

One buffer of keys and one of values hold all rows of slots side by side, and behind them one slot for what does not
exist. New tokens are written first; then the new queries attend to the slots, under the mask of the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subquad.attention.states.state import Buffers, Chunk, Memory, State, grown, write
from subquad.core.hashing import dropout_factors
from subquad.supports.kept import Kept

if TYPE_CHECKING:
    from subquad.attention.base import Attention

FIRST = 64  # slots of a new row of slots that grows
SOURCE = 1 << 26  # dropout counts the entries of source s from s·SOURCE on, as `kernels.merge` does

Sees = Callable[[int, Tensor, Tensor], Tensor]  # source, i, entry → bool


class Keys(Memory):
    """Tokens in slots. `sees` has the definition of every family of heads; `families` the family of every head."""

    growth = "the keys that are still named"

    def __init__(self, kept: Sequence[Kept], sees: Sequence[Sees], families: Sequence[int], margin: int) -> None:
        # what grows stands last, so that nothing moves when it does
        self.kept = tuple(sorted(kept, key=lambda one: one.size == 0))
        self.order = tuple(self.kept.index(one) for one in kept)  # who holds a token first
        self.sees, self.families, self.margin = tuple(sees), tuple(families), margin
        self.compact = all(one.size or one.unit > 1 or one.step > 1 for one in kept)

    # ---- slots ----

    def starts(self) -> list[int]:
        """Where each row of slots begins."""
        return [sum(one.size for one in self.kept[:index]) for index in range(len(self.kept))]

    def slots_for(self, n: int) -> int:
        """Slots that rows of up to n tokens fill."""
        last = self.kept[-1]
        return self.starts()[-1] + (last.size or last.used(n // last.unit))

    def reserve(self, buffers: Buffers, length: int) -> Buffers:
        wanted = self.slots_for(length) + 1
        return {
            name: grown(x, wanted, x.dim() // 2) if name in ("k", "v", "real") else x for name, x in buffers.items()
        }

    def earliest(self, state: State) -> Tensor:
        found = torch.zeros_like(state.length)
        for one in self.kept:
            if one.ring:
                lost = state.high // one.unit - one.size  # entries before this one are overwritten
                found = torch.where(lost > 0, found.maximum((lost + one.reach) * one.unit), found)
        return found

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
        t, step = chunk.q.shape[2], self.margin
        buffers, length = dict(state.buffers), state.length
        if not buffers:
            buffers = self.empty(chunk)
            if t > step:
                return self._whole(module, chunk, buffers, state.seed)
        outs = []
        for first in range(0, t, step):
            piece = chunk if t <= step else chunk.part(first, first + step)
            out, buffers, length = self._step(module, piece, buffers, length, state.seed)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2), buffers

    def empty(self, chunk: Chunk) -> Buffers:
        slots = self.starts()[-1] + (self.kept[-1].size or FIRST) + 1
        k, v = (x.new_zeros(*x.shape[:2], slots, x.shape[3]) for x in (chunk.k, chunk.v))
        return {"k": k, "v": v, "real": torch.zeros(k.shape[0], slots, dtype=torch.bool, device=k.device)}

    def _whole(self, module: Attention, chunk: Chunk, buffers: Buffers, seed: Tensor | None) -> tuple[Tensor, Buffers]:
        """The first tokens, many of them: the mechanism's fast path, and what is kept of them."""
        length = torch.zeros_like(chunk.position[:, 0]) + chunk.added
        real = chunk.real if chunk.here is None or chunk.real is None else chunk.real & chunk.here
        out = module.attend_aligned(chunk.q, chunk.k, chunk.v, real, length, seed)
        return out, self._written(module, chunk, buffers, torch.zeros_like(length), length)

    def _step(
        self, module: Attention, chunk: Chunk, buffers: Buffers, length: Tensor, seed: Tensor | None
    ) -> tuple[Tensor, Buffers, Tensor]:
        after = length + chunk.added
        buffers = self._written(module, chunk, buffers, length, after)
        used = buffers["k"].shape[2] - 1 if torch.compiler.is_compiling() else self.slots_for(int(after.max()))
        entries = self._entries(after, used)
        seen = self._seen(chunk.position, entries) & buffers["real"][:, None, None, :used]  # (B, H or 1, t, m)
        out = self._attend(module, chunk, buffers, used, seen, entries, seed)
        return out, buffers, after

    def _written(self, module: Attention, chunk: Chunk, buffers: Buffers, length: Tensor, after: Tensor) -> Buffers:
        """The buffers with the new tokens."""
        if not torch.compiler.is_compiling():
            buffers = self.reserve(buffers, int(after.max()))
        trash = buffers["k"].shape[2] - 1
        real = chunk.real if chunk.real is not None else torch.ones_like(chunk.position, dtype=torch.bool)
        for one, start, mine in zip(self.kept, self.starts(), self._holder(chunk.position), strict=True):
            if one.source:
                continue
            if one.ring:  # it has everything, for the summaries; of more than it holds the last
                mine = chunk.position >= (after - one.size)[:, None]
            mine = mine if chunk.here is None else mine & chunk.here
            slot = torch.where(mine, one.slots(chunk.position) + start, trash)
            for name, x in (("k", chunk.k), ("v", chunk.v), ("real", real)):
                buffers[name] = write(buffers[name], slot, x.to(buffers[name].dtype))
        return buffers

    # ---- who sees what ----

    def _entries(self, after: Tensor, used: int) -> list[Tensor]:
        """What the slots of each row hold, (B, slots), -1 = nothing that counts."""
        found = []
        for one, start in zip(self.kept, self.starts(), strict=True):
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
        factors = None
        if module.training and module.options.dropout:
            columns = torch.cat(
                [e + one.source * SOURCE for one, e in zip(self.kept, entries, strict=True)], -1
            )  # (B, slots)
            factors = factors_of(module, chunk, columns, seed)
        return module.attend_kept(chunk.q, k, v, seen, factors)


def factors_of(module: Attention, chunk: Chunk, columns: Tensor, seed: Tensor | None) -> Tensor:
    """What dropout multiplies the weights with, (B, H, t, m): by positions, as in one call."""
    assert seed is not None
    b, h = chunk.q.shape[:2]
    instance = torch.arange(b * h, device=columns.device).view(b, h, 1, 1)
    where = (instance, chunk.position[:, None, :, None], columns[:, None, None])
    work = torch.promote_types(chunk.q.dtype, torch.float32)
    return dropout_factors(seed.to(columns.device), module.options.dropout, *where, work)
