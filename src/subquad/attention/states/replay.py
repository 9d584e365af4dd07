"""The fallback: keep q, k and v of all tokens, and call the mechanism on the whole again. Exact for all causal ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from subquad.attention.states.state import Buffers, Chunk, Memory, State, appended, read, with_room
from subquad.kernels.values import readable

if TYPE_CHECKING:
    from subquad.attention.base import Attention


class Replay(Memory):
    """Everything. A step costs what a call costs; the fast path decides what is computed."""

    def extend(self, module: Attention, chunk: Chunk, state: State) -> tuple[Tensor, Buffers]:
        length = state.length + chunk.added  # (B,)
        longest = 0 if torch.compiler.is_compiling() else chunk.longest(length)
        buffers = appended(state.buffers, {"q": chunk.q, "k": chunk.k, "v": chunk.v}, chunk, longest)
        n = self.called(module, buffers, longest)
        if n == 0:  # nothing but padding so far
            return torch.zeros_like(chunk.q), buffers
        q, k, v = (buffers[name][:, :, :n] for name in "qkv")
        real = existing(chunk, buffers, length, n)
        out = module.attend_aligned(q, k, v, real, length, state.seed)
        return read(out, chunk.position.clamp(max=n - 1)), buffers

    @staticmethod
    def called(module: Attention, buffers: Buffers, longest: int) -> int:
        """With how many tokens the mechanism is called: those of the longest row, in a compiled graph, which knows no
        lengths, as many as there is room for.
        """
        if not torch.compiler.is_compiling():
            return longest
        room = buffers["real"].shape[1] - 1
        return room if module.options.max_length is None else min(room, module.options.max_length)

    def reserve(self, buffers: Buffers, length: int) -> Buffers:
        return with_room(buffers, length)

    def room(self, buffers: Buffers) -> int | None:
        return buffers["real"].shape[1] - 1 if buffers else None

    @property
    def forgets(self) -> bool:
        return False


def existing(chunk: Chunk, buffers: Buffers, length: Tensor, n: int) -> Tensor | None:
    """Which of the first n places hold a real token of rows of `length` (B,), bool (B, n); None = all of them."""
    if chunk.even is not None:
        return None
    real = buffers["real"][:, :n] & (torch.arange(n, device=length.device) < length[:, None])
    return None if readable(real) and bool(real.all()) else real
