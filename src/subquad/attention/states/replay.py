"""The fallback: keep q, k and v of all tokens, and call the mechanism on the whole again. Exact for all causal ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from subquad.attention.states.state import Buffers, Chunk, Memory, State, appended, read, with_room

if TYPE_CHECKING:
    from subquad.attention.base import Attention


class Replay(Memory):
    """Everything. A step costs what a call costs; the fast path decides what is computed."""

    def extend(self, module: Attention, chunk: Chunk, state: State) -> tuple[Tensor, Buffers]:
        if torch.compiler.is_exporting():
            raise ValueError(
                f"{module.name} cannot be exported with a cache: it reads all tokens again at every step, and how many "
                "those are is not known while it is traced; export it with use_cache=False"
            )
        length = state.length + chunk.added  # (B,)
        n = int(length.max())
        buffers = appended(state.buffers, {"q": chunk.q, "k": chunk.k, "v": chunk.v}, chunk, n)
        if n == 0:  # nothing but padding so far
            return torch.zeros_like(chunk.q), buffers
        q, k, v = (buffers[name][:, :, :n] for name in "qkv")
        place = torch.arange(n, device=length.device)
        real = buffers["real"][:, :n] & (place < length[:, None])  # (B, n)
        out = module.attend_aligned(q, k, v, None if bool(real.all()) else real, length, state.seed)
        return read(out, chunk.position.clamp(max=n - 1)), buffers

    def reserve(self, buffers: Buffers, length: int) -> Buffers:
        return with_room(buffers, length)

    @property
    def forgets(self) -> bool:
        return False
