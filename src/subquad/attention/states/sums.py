"""States of sums: attention whose scores are products of features needs one matrix of all tokens before.

    Σ_{j ≤ i} a_i·b_j e^(s_j - s_i) v_j = a_i·S e^(m - s_i) + the last tokens one by one,   S = Σ_j b_j e^(s_j - m) v_jᵀ

S has all tokens but the last `margin`; these are kept as they are, so that they can be taken back without subtracting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from subquad.attention.states.state import Buffers, Chunk, Memory, State, read, write
from subquad.core.hashing import key_factors

if TYPE_CHECKING:
    from subquad.attention.base import Attention

LOWEST = -1e30  # the scale of no key


class Terms(NamedTuple):
    """New features and values: a (B, H, t, f), b (B, H, t, f), v (B, H, t, e), s (B, H, t, 1) or None = 0."""

    a: Tensor
    b: Tensor
    v: Tensor
    s: Tensor | None = None


class RunningSum:
    """One sum, its buffers under names that begin with `name`."""

    def __init__(self, name: str, margin: int) -> None:
        self.name, self.margin, self.size = name, margin, 2 * margin

    def empty(self, like: Terms) -> Buffers:
        (b, h, _, features), width, place = like.b.shape, like.v.shape[3], like.b.new_zeros
        made = {
            "sum": place(b, h, features, width),
            "b": place(b, h, self.size + 1, features),
            "v": place(b, h, self.size + 1, width),
            "base": torch.zeros(b, dtype=torch.int64, device=like.b.device),
        }
        if like.s is not None:
            made |= {"s": place(b, h, self.size + 1, 1).fill_(LOWEST), "top": place(b, h, 1, 1).fill_(LOWEST)}
        return {self.name + key: x for key, x in made.items()}

    def scale_before(self, buffers: Buffers, length: Tensor) -> Tensor:
        """s of the last token so far, (B, H, 1, 1)."""
        s, top, base = (buffers[self.name + key] for key in ("s", "top", "base"))
        last = read(s, ((length - 1) % self.size)[:, None])
        last = torch.where((length > base)[:, None, None, None], last, top)
        return torch.where((length > 0)[:, None, None, None], last, LOWEST)

    def ask(self, buffers: Buffers, terms: Terms, chunk: Chunk, length: Tensor) -> tuple[Tensor, Buffers]:
        """The sums of the new queries, (B, H, t, e), with the new tokens among them; t ≤ margin."""
        own = {key.removeprefix(self.name): x for key, x in buffers.items() if key.startswith(self.name)}
        fresh = (length < own["base"])[:, None, None, None]  # cropped to nothing
        base = torch.where(fresh[:, 0, 0, 0], 0, own["base"])
        total = own["sum"].masked_fill(fresh, 0)
        after = length + chunk.added
        slot = chunk.position % self.size
        slot = slot if chunk.here is None else torch.where(chunk.here, slot, self.size)
        b, v = write(own["b"], slot, terms.b), write(own["v"], slot, terms.v)
        newest, place = after[:, None] - 1, torch.arange(self.size, device=after.device)
        holds = newest - (newest - place) % self.size  # (B, T): the position in each slot
        tail = (holds >= base[:, None])[:, None] & (holds[:, None] <= chunk.position[..., None])  # (B, t, T)
        weights = (terms.a @ b[:, :, : self.size].mT) * tail[:, None]  # (B, H, t, T)
        found = terms.a @ total  # (B, H, t, e)
        new: Buffers = {}
        if terms.s is not None:
            s, top = write(own["s"], slot, terms.s), torch.where(fresh, LOWEST, own["top"])
            weights = weights * (s[:, :, : self.size].mT - terms.s).clamp(max=0).exp()
            found = found * (top - terms.s).clamp(max=0).exp()
            new = {"s": s, "top": top}
        out = found + weights @ v[:, :, : self.size]
        new |= {"sum": total, "b": b, "v": v, "base": base}
        return out, {self.name + key: x for key, x in self._folded(new, after, chunk.q.shape[2]).items()}

    def _folded(self, own: Buffers, after: Tensor, most: int) -> Buffers:
        """What is more than `margin` tokens back goes into the sum: at most as many as came."""
        stop = (after - self.margin).maximum(own["base"])  # (B,)
        position = own["base"][:, None] + torch.arange(most, device=after.device)
        goes = (position < stop[:, None])[:, None, :, None]  # (B, 1, t, 1)
        slot = position % self.size
        b, v = read(own["b"], slot) * goes, read(own["v"], slot)
        total = own["sum"]
        if "s" in own:
            last = read(own["s"], ((stop - 1) % self.size)[:, None])
            top = torch.where((stop > own["base"])[:, None, None, None], last, own["top"])
            total = total * (own["top"] - top).clamp(max=0).exp()
            b = b * (read(own["s"], slot) - top).clamp(max=0).exp()
            own = own | {"top": top}
        return own | {"sum": total + b.mT @ v, "base": stop}

    def fill(self, buffers: Buffers, terms: Terms, chunk: Chunk) -> Buffers:
        """After the first tokens, many of them."""
        after = chunk.added.expand(len(chunk.q))
        stop = (after - self.margin).clamp(min=0)
        goes = (chunk.position < stop[:, None])[:, None, :, None]
        b, new = terms.b * goes, {}
        if terms.s is not None:
            place = (stop - 1).clamp(min=0)[:, None]
            top = torch.where((stop > 0)[:, None, None, None], read(terms.s, place), LOWEST)
            b = b * (terms.s - top).clamp(max=0).exp()
            new["top"] = top
        new |= {"sum": b.mT @ terms.v, "base": stop}
        mine = chunk.position >= (after - self.size)[:, None]
        mine = mine if chunk.here is None else mine & chunk.here
        slot = torch.where(mine, chunk.position % self.size, self.size)
        for key, x in (("b", terms.b), ("v", terms.v), ("s", terms.s)):
            if x is not None:
                new[key] = write(buffers[self.name + key], slot, x)
        return buffers | {self.name + key: x for key, x in new.items()}


class SumsBeside(Memory):
    """Running sums, asked a piece of `margin` tokens at a time. A subclass says what they sum and what comes of it."""

    def __init__(self, names: Sequence[str], margin: int) -> None:
        self.margin = margin
        self.sums = tuple(RunningSum(name, margin) for name in names)

    def earliest(self, state: State) -> Tensor:
        if not state.buffers:
            return torch.zeros_like(state.length)
        return state.buffers[f"{self.sums[0].name}base"]

    def extend(self, module: Any, chunk: Chunk, state: State) -> tuple[Tensor, Buffers]:
        buffers, length = dict(state.buffers), state.length
        if not buffers:
            buffers = self.empty(module, chunk, state.seed)
            if chunk.q.shape[2] > self.margin:
                return whole(module, chunk, state.seed), self.fill(module, chunk, buffers, state)
        return chunk.walked(self.margin, buffers, length, lambda c, b, n: self.step(module, c, b, n, state.seed))

    def empty(self, module: Any, chunk: Chunk, seed: Tensor | None) -> Buffers:
        found: Buffers = {}
        for one, terms in zip(self.sums, self.terms(module, chunk.part(0, 1), seed), strict=True):
            found |= one.empty(terms)
        return found

    def fill(self, module: Any, chunk: Chunk, buffers: Buffers, state: State) -> Buffers:
        for one, terms in zip(self.sums, self.terms(module, chunk, state.seed), strict=True):
            buffers = one.fill(buffers, terms, chunk)
        return buffers

    def terms(self, module: Any, chunk: Chunk, seed: Tensor | None) -> list[Terms]:
        """What is summed; `a` may be left to `step`."""
        raise NotImplementedError

    def step(self, module: Any, chunk: Chunk, buffers: Buffers, length: Tensor, seed: Tensor | None):
        raise NotImplementedError


class Sums(SumsBeside):
    """Kernel attention: the numerator and, in a last column, the denominator are one running sum."""

    def __init__(self, margin: int) -> None:
        super().__init__(("",), margin)

    def terms(self, module, chunk, seed, before=None):
        """`before` is s of the last token so far, where keys have scales."""
        q, k, v = every_head(chunk)
        a, b, s, _ = module.features_from(q, k, existing(chunk), chunk.position, before)
        v = dropped(module, torch.cat((v, torch.ones_like(v[..., :1])), -1), chunk, seed)
        return [Terms(a, b, v, None if s is None else s[..., None])]

    def step(self, module, chunk, buffers, length, seed):
        before = self.sums[0].scale_before(buffers, length) if "s" in buffers else None
        out, buffers = self.sums[0].ask(buffers, *self.terms(module, chunk, seed, before), chunk, length)
        return quotient(out), buffers


def quotient(out: Tensor) -> Tensor:
    """Numerators over the denominator in the last column; 0 where it vanishes."""
    total, den = out[..., :-1], out[..., -1:]
    empty = den <= torch.finfo(den.dtype).tiny ** 0.5
    return (total / den.masked_fill(empty, 1)).masked_fill(empty, 0)


def whole(module: Attention, chunk: Chunk, seed: Tensor | None) -> Tensor:
    """The mechanism's fast path on the first tokens."""
    real = existing(chunk)
    length = torch.zeros_like(chunk.position[:, 0]) + chunk.added
    return module.attend_aligned(chunk.q, chunk.k, chunk.v, real, length, seed)


def existing(chunk: Chunk) -> Tensor | None:
    """Which slots hold a real token, (B, t); None = all."""
    return chunk.real if chunk.here is None or chunk.real is None else chunk.real & chunk.here


def every_head(chunk: Chunk, heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in float32 at least, with `heads` key heads, by default as many as query heads."""
    work = torch.promote_types(chunk.q.dtype, torch.float32)
    group = (chunk.q.shape[1] if heads is None else heads) // chunk.k.shape[1]
    k, v = (x.to(work).repeat_interleave(group, 1) if group > 1 else x.to(work) for x in (chunk.k, chunk.v))
    return chunk.q.to(work), k, v


def dropped(module: Any, v: Tensor, chunk: Chunk, seed: Tensor | None) -> Tensor:
    """Dropout of keys for all queries of a head, by their positions; a last column of v is left alone."""
    if not module.training or not module.options.dropout:
        return v
    assert seed is not None
    factors = key_factors(seed, module.options.dropout, v, chunk.position)
    return torch.cat((v[..., :-1] * factors, v[..., -1:]), -1)
