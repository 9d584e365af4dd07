"""The fallback: keep q, k and v of all tokens, and call the mechanism on the whole again. Exact for all causal ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from subquad.attention.states.state import Buffers, Chunk, Memory, State, grown, read, write

if TYPE_CHECKING:
    from subquad.attention.base import Attention

FIRST = 64  # places of a new buffer


class Replay(Memory):
    """Everything. A step costs what a call costs; the fast path decides what is computed."""

    growth = "n"

    def extend(self, module: Attention, chunk: Chunk, state: State) -> tuple[Tensor, Buffers]:
        length = state.length + chunk.added  # (B,)
        n = int(length.max())
        buffers = appended(state.buffers, {"q": chunk.q, "k": chunk.k, "v": chunk.v}, chunk, n)
        q, k, v = (buffers[name][:, :, :n] for name in "qkv")
        place = torch.arange(n, device=length.device)
        real = buffers["real"][:, :n] & (place < length[:, None])  # (B, n)
        out = module.attend_aligned(q, k, v, None if bool(real.all()) else real, length, state.seed)
        return read(out, chunk.position.clamp(max=n - 1)), buffers

    def reserve(self, buffers: Buffers, length: int) -> Buffers:
        return {name: grown(x, length + 1, x.dim() // 2) for name, x in buffers.items()}


def appended(buffers: Buffers, new: Buffers, chunk: Chunk, n: int) -> Buffers:
    """Buffers by position, with room for n of them and a last place for what does not exist."""
    real = chunk.real
    if real is None:
        real = torch.ones_like(chunk.position, dtype=torch.bool)
    new = {**new, "real": real}
    if not buffers:
        buffers = {name: x.new_zeros(*_shape(x, max(FIRST, n + 1))) for name, x in new.items()}
    found = {}
    for name, x in new.items():
        buffer = grown(buffers[name], n + 1, x.dim() // 2)
        last = buffer.shape[x.dim() // 2] - 1
        slot = chunk.position if chunk.here is None else torch.where(chunk.here, chunk.position, last)
        found[name] = write(buffer, slot, x)
    return found


def _shape(x: Tensor, places: int) -> tuple[int, ...]:
    return (*x.shape[: x.dim() // 2], places, *x.shape[x.dim() // 2 + 1 :])
