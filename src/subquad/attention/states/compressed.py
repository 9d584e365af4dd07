"""The state of compressed attention (`hca`, `csa`): the last tokens, and an entry for every block that is complete.

x          the last tokens, from which the next entries are made; `k` their keys, rotated; `real` which are real
entries    one for every complete block, of which `exist` have a real token; `small`: those of the index of `csa`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.attention.states.state import Buffers, Chunk, Memory, State, grown, read, write
from subquad.core.hashing import key_factors

FIRST = 16  # entries that a new buffer has room for


class Compressed(Memory):
    """A ring of tokens, and all entries. `extend` gives (B, H, t, d), and takes the tokens as the chunk's keys."""

    def __init__(self, options: Any, margin: int, *, overlap: bool) -> None:
        self.window, self.rate, self.overlap, self.margin = options.window, options.rate, int(overlap), margin
        self.reach = max(self.window, (1 + self.overlap) * self.rate)  # how far back a new token may look
        self.ring = self.reach + margin

    def earliest(self, state: State) -> Tensor:
        lost = state.high - self.ring  # tokens before this one are overwritten
        return torch.where(lost > 0, lost + self.reach, 0)

    def reserve(self, buffers: Buffers, length: int) -> Buffers:
        if not buffers:
            return buffers
        grow = (name for name in ("entries", "small", "exist") if name in buffers)
        return buffers | {
            name: grown(buffers[name], length // self.rate + 1, buffers[name].dim() // 2) for name in grow
        }

    def room(self, buffers: Buffers) -> int | None:
        return buffers["exist"].shape[1] * self.rate - 1 if buffers else None

    def extend(self, module: Any, chunk: Chunk, state: State, project: Any = None) -> tuple[Tensor, Buffers]:
        buffers, length = dict(state.buffers), state.length
        if not torch.compiler.is_compiling():
            buffers = self.reserve(buffers, chunk.longest(length + chunk.added))
        if not buffers:
            buffers = self.empty(module, chunk, project)
            if chunk.k.shape[2] > self.margin:
                return self._whole(module, chunk, buffers, state.seed, project)
        return chunk.walked(
            self.margin, buffers, length, lambda c, b, n: self._step(module, c, b, n, state.seed, project)
        )

    def empty(self, module: Any, chunk: Chunk, project: Any) -> Buffers:
        x, work = chunk.k, torch.promote_types(chunk.k.dtype, torch.float32)
        b, slots = x.shape[0], self.ring + 1  # and one for what does not exist
        heads = project.keys(x[:, 0, :1]).shape[1]
        longest = 0 if torch.compiler.is_compiling() else chunk.longest(chunk.added + chunk.position[:, 0])
        room = max(FIRST, longest // self.rate) + 1
        made = {
            "x": x.new_zeros(b, 1, slots, x.shape[3]),
            "k": x.new_zeros(b, heads, slots, module.options.head_dim, dtype=work),
            "real": torch.ones(b, slots, dtype=torch.bool, device=x.device),
            "exist": torch.ones(b, room, dtype=torch.bool, device=x.device),
        }
        return made | {
            name: x.new_zeros(b, 1, room, len(one.norm), dtype=work) for name, one in module.compressors.items()
        }

    # ---- what is kept ----

    def _whole(
        self, module: Any, chunk: Chunk, buffers: Buffers, seed: Tensor | None, project: Any
    ) -> tuple[Tensor, Buffers]:
        """The first tokens, many of them: the mechanism's fast path, and what is kept of them."""
        x, length = chunk.k[:, 0], torch.zeros_like(chunk.position[:, 0])  # (B, t, E)
        after, real = length + chunk.added, _existing(chunk)
        out = module.attend_aligned_tokens(x, project, None if chunk.real is None else real, after, seed)
        _, k = module.heads(x, chunk.position, project)
        buffers = self._written(chunk, buffers, k, real, after)
        block = torch.arange(x.shape[1] // self.rate, device=x.device).expand(len(x), -1)
        if block.shape[1]:
            buffers = self._compressed(module, buffers, x, real, length, block, after)
        return out, buffers

    def _written(self, chunk: Chunk, buffers: Buffers, k: Tensor, real: Tensor, after: Tensor) -> Buffers:
        """The tokens in the ring: of more than it holds the last."""
        last = chunk.position >= (after - self.ring)[:, None]
        last = last if chunk.here is None else last & chunk.here
        slot = torch.where(last, chunk.position % self.ring, self.ring)
        new = {"x": chunk.k, "k": k, "real": real}
        return buffers | {name: write(buffers[name], slot, x) for name, x in new.items()}

    def _compressed(
        self, module: Any, buffers: Buffers, x: Tensor, real: Tensor, first: Tensor, block: Tensor, after: Tensor
    ) -> Buffers:
        """The entries of blocks (B, c) that are complete, from tokens x that begin with block `first` (B,)."""
        work, skipped = torch.promote_types(x.dtype, torch.float32), 0
        slot = torch.where(block < (after // self.rate)[:, None], block, buffers["exist"].shape[1] - 1)
        with torch.autocast(x.device.type, enabled=False):
            for name, compress in module.compressors.items():
                rows, exist = compress(x.to(work), real, first)
                skipped = rows.shape[1] - block.shape[1]  # the block before, which is there for the overlap
                buffers = buffers | {name: write(buffers[name], slot, rows[:, None, skipped:])}
        return buffers | {"exist": write(buffers["exist"], slot, exist[:, skipped:])}

    # ---- a few tokens ----

    def _step(
        self, module: Any, chunk: Chunk, buffers: Buffers, length: Tensor, seed: Tensor | None, project: Any
    ) -> tuple[Tensor, Buffers]:
        x, position, after = chunk.k[:, 0], chunk.position, length + chunk.added
        q, k = module.heads(x, position, project)  # (B, H, t, d), (B, G, t, d)
        buffers = self._written(chunk, buffers, k, _existing(chunk), after)
        buffers = self._completed(module, chunk, buffers, length, after)
        compiling = torch.compiler.is_compiling()
        used = buffers["exist"].shape[1] - 1 if compiling else chunk.longest(after) // self.rate
        newest, place = after[:, None] - 1, torch.arange(self.ring, device=x.device)
        holds = newest - (newest - place) % self.ring  # (B, ring): the token in each slot
        distance = position[..., None] - holds[:, None]  # (B, t, ring)
        near = (distance >= 0) & (distance < self.window) & ((holds >= 0) & buffers["real"][:, :-1])[:, None]
        done = (position[..., None] + 1) // self.rate > torch.arange(used, device=x.device)  # (B, t, m)
        far = module.chosen(x, position, buffers, done & buffers["exist"][:, None, :used])
        k, entries = buffers["k"][:, :, :-1], buffers["entries"][:, :, :used]
        values = (k, entries)
        if module.training and module.options.dropout:
            assert seed is not None
            column = torch.arange(used, device=x.device).expand(len(x), used)
            rate = module.options.dropout
            values = (k * key_factors(seed, rate, k, holds), entries * key_factors(seed + 1, rate, entries, column))
        return module.attend_near_and_far(q, (k, entries), values, (near, far), position), buffers

    def _completed(self, module: Any, chunk: Chunk, buffers: Buffers, length: Tensor, after: Tensor) -> Buffers:
        """The entries of the blocks that the new tokens complete."""
        first, rate = length // self.rate, self.rate
        many = chunk.k.shape[2] // rate + 1
        if not torch.compiler.is_compiling():
            many = chunk.completes(rate, length, after)
        if not many:
            return buffers
        block = first[:, None] + torch.arange(many, device=first.device)  # (B, c)
        begin = first - self.overlap
        member = begin[:, None] * rate + torch.arange((many + self.overlap) * rate, device=first.device)
        inside = (member >= 0) & (member < after[:, None])
        slot = torch.where(inside, member % self.ring, self.ring)
        x, real = read(buffers["x"], slot)[:, 0], read(buffers["real"], slot) & inside
        return self._compressed(module, buffers, x, real, begin, block, after)


def _existing(chunk: Chunk) -> Tensor:
    """Which new slots hold a real token, bool (B, t)."""
    if chunk.real is None:
        return torch.ones_like(chunk.position, dtype=torch.bool)
    return chunk.real if chunk.here is None else chunk.real & chunk.here
