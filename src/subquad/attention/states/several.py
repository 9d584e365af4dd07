"""Several memories beside each other: mixtures of mechanisms, and mechanisms that are made of several sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subquad.attention.states.keys import Keys
from subquad.attention.states.state import Buffers, Chunk, Memory, State, smallest_room
from subquad.attention.states.sums import SumsBeside, Terms, dropped, every_head, existing, quotient
from subquad.core.hashing import dropout_factors

if TYPE_CHECKING:
    from collections.abc import Sequence


def inner(buffers: Buffers, name: str) -> Buffers:
    """The buffers whose names begin with `name`."""
    return {key.removeprefix(name): x for key, x in buffers.items() if key.startswith(name)}


def outer(buffers: Buffers, name: str) -> Buffers:
    return {name + key: x for key, x in buffers.items()}


class Several(Memory):
    """The components of a mixture, each with a memory of its own; the output is the mean of theirs."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        self.memories = tuple(memories)

    def _states(self, state: State) -> list[State]:
        return [state.part(memory, inner(state.buffers, f"{m}.")) for m, memory in enumerate(self.memories)]

    def extend(self, module: Any, chunk: Chunk, state: State) -> tuple[Tensor, Buffers]:
        buffers: Buffers = {}
        total = None
        for m, (component, own) in enumerate(zip(module.components, self._states(state), strict=True)):
            out, found = own.memory.extend(component, chunk, own)
            buffers |= outer(found, f"{m}.")
            total = out if total is None else torch.lerp(total, out, 1 / (m + 1))
        assert total is not None
        return total, buffers

    def earliest(self, state: State) -> Tensor:
        return torch.stack([own.memory.earliest(own) for own in self._states(state)]).amax(0)

    @property
    def forgets(self) -> bool:
        return any(memory.forgets for memory in self.memories)

    def reserve(self, buffers: Buffers, length: int) -> Buffers:
        pairs = ((f"{m}.", memory) for m, memory in enumerate(self.memories))
        found = (outer(memory.reserve(inner(buffers, name), length), name) for name, memory in pairs)
        return {key: x for one in found for key, x in one.items()}

    def room(self, buffers: Buffers) -> int | None:
        return smallest_room(memory.room(inner(buffers, f"{m}.")) for m, memory in enumerate(self.memories))


class Packed(SumsBeside):
    """Luna: Σ k_j c_jᵀ, Σ c_j v_jᵀ, and the number of tokens."""

    def __init__(self, margin: int) -> None:
        super().__init__(("keys.", "values.", "count."), margin)

    def terms(self, module, chunk, seed):
        q, k, v = every_head(chunk)
        real = existing(chunk)
        pack = module.packing(k)  # (B, H, t, l)
        pack = pack if real is None else pack * real[:, None, :, None]
        one = torch.ones_like(k[:, :1, :, :1])
        count = one if real is None else one * real[:, None, :, None]
        return [Terms(q * module.options.softmax_scale, k, pack), Terms(pack, pack, v), Terms(one, count, one)]

    def step(self, module, chunk, buffers, length, seed):
        keys, values, counts = self.terms(module, chunk, seed)
        count, found = self.sums[2].ask(buffers, counts, chunk, length)
        buffers = buffers | found
        count = count.clamp(min=1)
        asked, found = self.sums[0].ask(buffers, keys, chunk, length)
        buffers = buffers | found
        weights = (asked / count).softmax(-1)  # (B, H, t, l)
        if module.training and module.options.dropout:
            b, h, _, size = weights.shape
            instance = torch.arange(b * h, device=weights.device).view(b, h, 1, 1)
            where = (instance, chunk.position[:, None, :, None], torch.arange(size, device=weights.device))
            weights = weights * dropout_factors(seed, module.options.dropout, *where, weights.dtype)
        out, found = self.sums[1].ask(buffers, values._replace(a=weights), chunk, length)
        return out / count, buffers | found


class NearAndFar(SumsBeside):
    """FMMformer: the band token by token, and a sum for every feature map."""

    def __init__(self, near: Keys, rank: int, margin: int) -> None:
        super().__init__([f"far{m}." for m in range(rank)], margin)
        self.near = near

    def earliest(self, state: State) -> Tensor:
        near = state.part(self.near, inner(state.buffers, "near."))
        return super().earliest(state).maximum(self.near.earliest(near))

    def empty(self, module, chunk, seed):
        return super().empty(module, chunk, seed) | outer(self.near.empty(chunk), "near.")

    def fill(self, module, chunk, buffers, state):
        after = torch.zeros_like(state.length) + chunk.added
        near = self.near._written(module, chunk, inner(buffers, "near."), state.length, after)
        return super().fill(module, chunk, buffers, state) | outer(near, "near.")

    def terms(self, module, chunk, seed):
        (q, k, v), real = every_head(chunk), existing(chunk)
        v = dropped(module, torch.cat((v, torch.ones_like(v[..., :1])), -1), chunk, seed)
        return [Terms(*module.features_of(q, k, sign, real), v) for sign in (1, -1)[: len(self.sums)]]

    def step(self, module, chunk, buffers, length, seed):
        near, after = inner(buffers, "near."), length + chunk.added
        out, near = self.near._step(module, chunk, near, length, seed)
        seen = self.near.seen(chunk, near, after).any(-1)[:, 0]  # (B, t)
        first, *others = module.blended(out, ~seen)
        out, buffers = out * first, buffers | outer(near, "near.")
        for one, terms, weight in zip(self.sums, self.terms(module, chunk, seed), others, strict=True):
            found, new = one.ask(buffers, terms, chunk, length)
            out, buffers = out + weight * quotient(found), buffers | new
        return out, buffers
