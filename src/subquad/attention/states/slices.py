"""The state of Composite Slice attention: at each scale the tokens of the last slices, and what coarser scales gave.

A scale is a sequence of its own. When a slice is complete, its embedding is the next token of the coarser scale, and
what that gives belongs to the tokens of the slice behind. Rows complete slices at different times: at a coarser scale
some rows have a new token and others have none.

    0.k 0.v     keys and values of the last αL + margin tokens of scale 0      0.x    what is pooled
    0.given     what the coarser scale gave, for the last slices
    top.k top.v keys and values of all tokens of the coarsest scale
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.attention.call import repeat_heads
from subquad.attention.states.keys import SOURCE, attend_kept, attend_runs
from subquad.attention.states.slice_runs import Run
from subquad.attention.states.state import Buffers, Chunk, Memory, State, grown, read, write
from subquad.core.hashing import dropout_factors
from subquad.kernels.values import readable
from subquad.supports.kept import Kept

WIDE = 256  # of a long chunk so many tokens at a time, with rings that are wide enough for a while
FIRST = 16  # tokens of the coarsest scale that a new buffer has room for


class News(NamedTuple):
    """New tokens of a scale."""

    x: Tensor  # (B, t, E)
    real: Tensor  # bool (B, t)
    here: Tensor  # bool (B, t): rows may have fewer new tokens
    length: Tensor  # (B,): tokens before
    even: int | None = None  # one new token for every row, behind so many, and nothing was ever padded
    before: int | None = None  # tokens before, where all rows have as many and the host knows
    bound: int | None = None  # no row has more tokens with these

    @property
    def position(self) -> Tensor:
        return self.length[:, None] + torch.arange(self.x.shape[1], device=self.x.device)

    @property
    def after(self) -> Tensor:
        return self.length + self.here.sum(1)

    @property
    def longest(self) -> int:
        """How many tokens the longest row has with these; of a device, which is not asked, how many it can have."""
        if self.before is not None:
            return self.before + self.x.shape[1]
        return int(self.after.max()) if self.bound is None or readable(self.length) else self.bound


class Slices(Memory):
    """Composite Slice attention; `extend` gives (B, 1, t, E), and takes the tokens as the chunk's keys."""

    def __init__(self, options: Any, margin: int) -> None:
        self.size, self.reach, self.top = options.slice_length, options.reach, options.levels - 1
        self.options, self.margin = options, margin
        self.steps = [-(-margin // self.size**scale) + (scale > 0) for scale in range(self.top + 1)]
        self.rings = [self.size + self.reach + step for step in self.steps]  # tokens of a scale that are kept

    def earliest(self, state: State) -> Tensor:
        found = torch.zeros_like(state.length)
        for scale, ring in enumerate(self.rings[:-1]):
            unit = self.size**scale
            lost = state.high // unit - ring
            found = torch.where(lost > 0, found.maximum((lost + self.size + self.reach) * unit), found)
        return found

    def reserve(self, buffers: Buffers, length: int) -> Buffers:
        wanted = length // self.size**self.top + 1
        if not buffers or buffers["top.k"].shape[2] >= wanted:
            return buffers
        return buffers | {
            name: grown(x, wanted, x.dim() // 2) for name, x in buffers.items() if name.startswith("top.")
        }

    def room(self, buffers: Buffers) -> int | None:
        return buffers["top.k"].shape[2] * self.size**self.top - 1 if buffers else None

    def extend(self, module: Any, chunk: Chunk, state: State, project: Any = None) -> tuple[Tensor, Buffers]:
        t, buffers = chunk.k.shape[2], dict(state.buffers)
        everyone = torch.ones_like(chunk.position, dtype=torch.bool)
        real, here = (everyone if x is None else x for x in (chunk.real, chunk.here))
        real = real & here
        if not buffers:
            own = project.keys(chunk.k[:, 0, :1]).shape[1]  # key heads of the layer
            coarse = own if module.options.share_weights else module.options.num_heads
            buffers = self.empty(chunk.k[:, 0], [own] + [coarse] * self.top, module.options.head_dim)
        even = self._even(module, chunk, state)
        if not torch.compiler.is_compiling():
            buffers = self.reserve(buffers, chunk.longest(state.length + chunk.added))
        if t > self.margin and self._is_run(module, chunk, state):
            assert state.even is not None
            out, buffers = Run(self, module).extend(0, chunk.k[:, 0], state.even, project, buffers)
            return out[:, None], buffers
        outs, length = [], state.length
        wide = self
        if t > 2 * self.margin and self.margin < WIDE and not torch.compiler.is_compiling():
            wide = Slices(self.options, WIDE)
            buffers = moved(buffers, length, self, wide)
        for first in range(0, t, wide.margin):
            piece = slice(first, first + wide.margin)
            before = None if chunk.even is None else chunk.even + first
            news = News(chunk.k[:, 0, piece], real[:, piece], here[:, piece], length, even, before, chunk.bound)
            out, buffers = _Scale(wide, module, state.seed).extend(0, news, project, buffers)
            outs.append(out.masked_fill(~news.real[..., None], 0))
            length = news.after
        buffers = buffers if wide is self else moved(buffers, length, wide, self)
        return (outs[0] if len(outs) == 1 else torch.cat(outs, 1))[:, None], buffers

    @staticmethod
    def _even(module: Any, chunk: Chunk, state: State) -> int | None:
        """The position of the one new token of every row, where rows are even and no gradient is asked for."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or chunk.real is not None or chunk.k.shape[2] > 1:
            return None
        return None if module.training and module.options.dropout else state.even

    @staticmethod
    def _is_run(module: Any, chunk: Chunk, state: State) -> bool:
        """Are the new tokens one run for all rows, behind rows that were never padded? Then the kernels take them."""
        if torch.compiler.is_compiling() or state.even is None or chunk.real is not None:
            return False
        return module.positions is None and not (module.training and module.options.dropout)

    def empty(self, like: Tensor, heads: list[int], width_of_head: int) -> Buffers:
        b, width = like.shape[0], like.shape[2]
        made: Buffers = {}
        for scale, ring in enumerate(self.rings[:-1]):
            slices = self.steps[scale + 1] + 2
            for name in ("k", "v"):
                made[f"{scale}.{name}"] = like.new_zeros(b, heads[scale], ring + 1, width_of_head)
            made[f"{scale}.x"] = like.new_zeros(b, 1, ring + 1, width)
            made[f"{scale}.real"] = torch.ones(b, ring + 1, dtype=torch.bool, device=like.device)
            made[f"{scale}.given"] = like.new_zeros(b, 1, slices + 1, width)
        for name in ("k", "v"):
            made[f"top.{name}"] = like.new_zeros(b, heads[-1], FIRST + 1, width_of_head)
        made["top.real"] = torch.ones(b, FIRST + 1, dtype=torch.bool, device=like.device)
        return made


def moved(buffers: Buffers, length: Tensor, old: Slices, new: Slices) -> Buffers:
    """The buffers of rows of `length` (B,) tokens with rings of other sizes: what is last in them, as much as fits."""
    found = {name: x for name, x in buffers.items() if name.startswith("top.")}
    for scale, (ring, size) in enumerate(zip(old.rings[:-1], new.rings[:-1], strict=True)):
        count = length // old.size**scale
        slices = (old.steps[scale + 1] + 2, new.steps[scale + 1] + 2)
        for name in ("k", "v", "x", "real", "given"):
            one = count // old.size if name == "given" else count
            before, after = slices if name == "given" else (ring, size)
            found[f"{scale}.{name}"] = _ring(buffers[f"{scale}.{name}"], one, before, after)
    return found


def _ring(buffer: Tensor, count: Tensor, old: int, new: int) -> Tensor:
    """A ring of `old` slots, the last entry of which is number count - 1, as one of `new` slots."""
    entry = count[:, None] - 1 - torch.arange(min(old, new), device=count.device)  # (B, m)
    shape = list(buffer.shape)
    shape[buffer.dim() // 2] = new + 1
    empty = buffer.new_ones(shape) if buffer.dtype == torch.bool else buffer.new_zeros(shape)
    return write(empty, torch.where(entry >= 0, entry % new, new), read(buffer, entry % old))


class _Scale:
    """One call: new tokens of a scale and of all coarser ones."""

    def __init__(self, memory: Slices, module: Any, seed: Tensor | None) -> None:
        self.memory, self.module, self.options, self.seed = memory, module, memory.options, seed

    def extend(self, scale: int, news: News, project: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        """(B, t, E): what the new tokens of the scale are given, and the buffers that have them."""
        if scale == self.memory.top:
            return self._coarsest(news, project, buffers)
        if self.options.composition == "local-global":
            fine, buffers = self._mix(scale, news, news.x, project, buffers)
            coarse, buffers = self._coarser(scale, news, fine, project, buffers)
            return fine + coarse, buffers
        coarse, buffers = self._coarser(scale, news, news.x, project, buffers)
        x = news.x + coarse if self.options.composition == "global-local" else news.x
        fine, buffers = self._mix(scale, news, x, project, buffers)
        return fine + coarse, buffers

    # ---- coarser scales ----

    def _coarser(self, scale: int, news: News, x: Tensor, project: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        """What the coarser scale gives to the slices of the new tokens, (B, t, E), after the slices now complete."""
        if news.even is not None:
            return self._coarser_for_one(scale, news, x, project, buffers)
        m, size = self.memory, self.memory.size
        ring, kept = m.rings[scale], buffers[f"{scale}.given"].shape[2] - 1
        slot = torch.where(news.here, news.position % ring, ring)
        buffers = buffers | {f"{scale}.x": write(buffers[f"{scale}.x"], slot, x[:, None])}
        buffers |= {f"{scale}.real": write(buffers[f"{scale}.real"], slot, news.real)}
        first, stop = news.length // size, news.after // size  # (B,)
        many = news.x.shape[1] // size + 1
        inner = None if news.before is None else news.before // size
        if inner is not None:
            many = news.longest // size - inner
        elif not torch.compiler.is_compiling() and (news.bound is None or readable(stop)):
            many = int((stop - first).max())
        bound = None if news.bound is None else news.bound // size
        if many:
            block = first[:, None] + torch.arange(many, device=first.device)  # (B, c)
            buffers = self._completed(scale, block, block < stop[:, None], project, buffers, None, inner, bound)
        before = news.position // size - 1  # (B, t): the slice whose output is given
        found = read(buffers[f"{scale}.given"], before % kept)[:, 0]
        return found.masked_fill((before < 0)[..., None], 0), buffers

    def _completed(
        self, scale: int, block: Tensor, done: Tensor, project: Any, buffers: Buffers, even: int | None,
        before: int | None = None, bound: int | None = None,
    ) -> Buffers:  # fmt: skip
        """The slices (B, c) that are done become tokens of the coarser scale."""
        kept = buffers[f"{scale}.given"].shape[2] - 1
        pooled, alive = self._pooled(scale, block, buffers)
        inner = project if self.options.share_weights else self.module.own[scale]
        given, buffers = self.extend(
            scale + 1, News(pooled, alive & done, done, block[:, 0], even, before, bound), inner, buffers
        )
        place = torch.where(done, block % kept, kept)
        return buffers | {f"{scale}.given": write(buffers[f"{scale}.given"], place, given[:, None])}

    def _coarser_for_one(self, scale: int, news: News, x: Tensor, project: Any, buffers: Buffers):
        """The same for one token per row, all at one position."""
        i, size, ring = news.even, self.memory.size, self.memory.rings[scale]
        assert i is not None
        kept = buffers[f"{scale}.given"].shape[2] - 1
        buffers[f"{scale}.x"][:, 0, i % ring] = x[:, 0]
        if (i + 1) % size == 0:
            block = (news.length // size)[:, None]
            buffers = self._completed(
                scale, block, torch.ones_like(block, dtype=torch.bool), project, buffers, i // size
            )
        given = buffers[f"{scale}.given"][:, :, (i // size - 1) % kept]  # (B, 1, E)
        return (given if i >= size else torch.zeros_like(given)), buffers

    def _pooled(self, scale: int, block: Tensor, buffers: Buffers) -> tuple[Tensor, Tensor]:
        """The embeddings of complete slices (B, c, E), and which exist (B, c)."""
        size, ring = self.memory.size, self.memory.rings[scale]
        member = (block[..., None] * size + torch.arange(size, device=block.device)).flatten(1) % ring
        x = read(buffers[f"{scale}.x"], member)[:, 0].unflatten(1, (-1, size))  # (B, c, L, E)
        real = read(buffers[f"{scale}.real"], member).unflatten(1, (-1, size))  # (B, c, L)
        kind, work, alive = x.dtype, torch.promote_types(x.dtype, torch.float32), real.any(-1)
        if self.options.pool == "max":
            top = x.masked_fill(~real[..., None], -torch.inf).amax(2)
            return top.masked_fill(~alive[..., None], 0), alive
        share = real.to(work) / real.sum(-1, keepdim=True).clamp(min=1)
        if self.options.pool == "linear":  # Σ_l share_l x_l W_l
            weight = self.module.pools[scale].to(work)  # (L, E, E)
            return ((x.to(work) * share[..., None]).flatten(2) @ weight.flatten(0, 1)).to(kind), alive
        return (share[:, :, None] @ x.to(work))[:, :, 0].to(kind), alive

    def _coarsest(self, news: News, project: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        q, k, v = project.together(news.x, news.x, news.x)  # (B, H, t, d)
        if self.module.positions is not None:
            table = self.module.positions.globe
            rows = table[news.position.clamp(max=len(table) - 1)]  # (B, t, E)
            q, k = q + self._moved(project.queries, rows), k + self._moved(project.keys, rows)
        if news.even is not None:
            i = news.even
            buffers["top.k"][:, :, i], buffers["top.v"][:, :, i] = k[:, :, 0], v[:, :, 0]
            out = attend_runs(q, buffers["top.k"], buffers["top.v"], [slice(0, i + 1)], self.options.softmax_scale)
            return out.transpose(1, 2).flatten(2), buffers
        trash = buffers["top.k"].shape[2] - 1
        slot = torch.where(news.here, news.position, trash)
        new = {"k": k, "v": v, "real": news.real}
        buffers = buffers | {f"top.{name}": write(buffers[f"top.{name}"], slot, x) for name, x in new.items()}
        used = trash if torch.compiler.is_compiling() else max(1, news.longest)
        place = torch.arange(used, device=news.x.device)
        seen = (place <= news.position[..., None]) & buffers["top.real"][:, None, :used]  # (B, t, m)
        keys, values = (buffers[f"top.{name}"][:, :, :used] for name in ("k", "v"))
        factors = self._factors(news, place.expand(len(seen), 1, used))
        out = attend_kept(q, keys, values, seen[:, None], self.options.softmax_scale, factors)
        return out.transpose(1, 2).flatten(2), buffers

    # ---- inside a slice ----

    def _mix(self, scale: int, news: News, x: Tensor, project: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        if self.options.local == "mlp":
            return self._mlp(scale, news, x, project, buffers)
        m, ring = self.memory, self.memory.rings[scale]
        q, k, v = project.together(x, x, x)  # (B, H, t, d)
        if news.even is not None and self.module.positions is None:
            i, first = news.even, max(0, news.even // m.size * m.size - m.reach)
            keys, values = buffers[f"{scale}.k"], buffers[f"{scale}.v"]
            keys[:, :, i % ring], values[:, :, i % ring] = k[:, :, 0], v[:, :, 0]
            runs = Kept(size=ring, ring=True).slices(range(first, i + 1))
            out = attend_runs(q, keys, values, runs, self.options.softmax_scale)
            return out.transpose(1, 2).flatten(2), buffers
        slot = torch.where(news.here, news.position % ring, ring)
        new = {"k": k, "v": v, "real": news.real}
        buffers = buffers | {f"{scale}.{name}": write(buffers[f"{scale}.{name}"], slot, y) for name, y in new.items()}
        newest, place = news.after[:, None] - 1, torch.arange(ring, device=x.device)
        holds = newest - (newest - place) % ring  # (B, C): the token in each slot
        first = news.position // m.size * m.size  # (B, t): where the slice begins
        offset = holds[:, None] - first[..., None]  # (B, t, C): the place of a key in the extended slice, minus reach
        seen = (offset >= -m.reach) & (holds[:, None] <= news.position[..., None]) & (holds >= 0)[:, None]
        seen = seen & buffers[f"{scale}.real"][:, None, :ring]
        keys, values = (buffers[f"{scale}.{name}"][:, :, :ring] for name in ("k", "v"))
        placed = self.module.positions is not None
        columns = holds[:, None] + SOURCE * ((offset < 0) & placed)
        factors, scale_ = self._factors(news, columns), self.options.softmax_scale
        if not placed:
            out = attend_kept(q, keys, values, seen[:, None], scale_, factors)
            return out.transpose(1, 2).flatten(2), buffers
        table = self.module.positions(scale, 0)[m.reach :]  # (reach + L, E)
        own = self._moved(project.queries, table[None, m.reach :])  # (1, H, L, d)
        q = q + own[0].transpose(0, 1)[news.position % m.size].transpose(1, 2)
        moved = self._moved(project.keys, table[None])  # (1, H or H/g, reach + L, d)
        bias = (
            q @ moved.repeat_interleave(q.shape[1] // moved.shape[1], 1).mT
        )  # (B, H, t, reach + L): by the key's place
        where = (offset + m.reach).clamp(0, m.reach + m.size - 1)
        bias = bias.gather(3, where[:, None].expand(-1, q.shape[1], -1, -1))
        empty = ~seen.any(-1)[:, None, :, None]
        group = q.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, 1) if group > 1 else x for x in (keys, values))
        scores = ((q @ keys.mT + bias) * scale_).masked_fill(~(seen[:, None] | empty), -torch.inf)
        weights = scores.softmax(-1).masked_fill(empty, 0)
        out = (weights if factors is None else weights * factors) @ values
        return out.transpose(1, 2).flatten(2), buffers

    def _mlp(self, scale: int, news: News, x: Tensor, project: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        """The slice of every new token, as far as it is there; the masks of the MLP let nobody see further."""
        m, ring = self.memory, self.memory.rings[scale]
        v = project.values(x).masked_fill(~news.real[:, None, :, None], 0)  # (B, H, t, d)
        slot = torch.where(news.here, news.position % ring, ring)
        buffers = buffers | {f"{scale}.v": write(buffers[f"{scale}.v"], slot, v)}
        first = news.position // m.size * m.size  # (B, t)
        member = first[..., None] + torch.arange(m.size, device=x.device)  # (B, t, L)
        there = (member < news.after[:, None, None]).flatten(1)
        whole = read(buffers[f"{scale}.v"], member.flatten(1) % ring) * there[:, None, :, None]
        whole = repeat_heads(whole, self.options.num_heads).transpose(1, 2).flatten(2)  # (B, t·L, E)
        whole = whole.view(-1, m.size, x.shape[2])
        mixed = self.module.mlps[scale](whole, self.module._call_of(self.seed))
        own = (news.position % m.size).flatten()[:, None, None].expand(-1, 1, x.shape[2])
        return mixed.gather(1, own).view(x.shape), buffers

    def _moved(self, project: Any, table: Tensor) -> Tensor:
        """(x + P)W = xW + PW: the projected positions, without the bias that xW already has."""
        return project(table) - project(torch.zeros_like(table[:, :1]))

    def _factors(self, news: News, columns: Tensor) -> Tensor | None:
        """Dropout by positions, as in one call: columns (B, t or 1, m)."""
        if not self.module.training or not self.options.dropout:
            return None
        assert self.seed is not None
        b, h = len(columns), self.options.num_heads
        instance = torch.arange(b * h, device=columns.device).view(b, h, 1, 1)
        where = (instance, news.position[:, None, :, None], columns[:, None])
        return dropout_factors(self.seed, self.options.dropout, *where, news.x.dtype)
