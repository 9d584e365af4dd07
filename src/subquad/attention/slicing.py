"""The fast path of Composite Slice (`composite_slice` has the formulas): slices, and scales composed of them.

Slices are views: nothing is padded. Slice t holds the tokens t·size … min(n, (t+1)·size) - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.call import Call, repeat_heads
from subquad.kernels.merge import merge_attention
from subquad.supports.slices import slices_text

Tokens = tuple[Tensor, Tensor, Tensor]  # what queries, keys and values are projected from, (B, n, E) each


def each(change: Callable[[Tensor], Tensor], tokens: Tokens) -> Tokens:
    """`change` on the three token tensors, once where they are one: then they stay one matrix product."""
    query, key, value = tokens
    q = change(query)
    k = q if key is query else change(key)
    v = q if value is query else k if value is key else change(value)
    return q, k, v


def slices(x: Tensor, size: int) -> Iterator[Tensor]:
    """(B, n, …) → views (B, full slices, size, …) and, where n is no multiple, the tail (B, 1, rest, …)."""
    full, rest = x.shape[1] // size, x.shape[1] % size
    if full:
        yield x[:, : full * size].unflatten(1, (full, size))
    if rest:
        yield x[:, None, full * size :]


def add_by_slice(x: Tensor, y: Tensor, size: int) -> Tensor:
    """x (B, n, …) + y (B or 1, m or 1, 1 or size, …), slice by slice."""
    sums, first = [], 0
    for view in slices(x, size):
        count, length = view.shape[1:3]
        piece = y if y.shape[1] == 1 else y[:, first : first + count]
        sums.append((view + piece[:, :, :length]).flatten(1, 2))
        first += count
    return sums[0] if len(sums) == 1 else torch.cat(sums, 1)


class Composer:
    """The fast path of one call: scales from the finest to the coarsest."""

    def __init__(self, attention: Any, call: Call) -> None:
        self.attention, self.options, self.call = attention, attention.options, call

    def compose(self, tokens: Tokens, project: Any, real: Tensor | None, scale: int) -> Tensor:
        """The scale and all coarser ones: tokens (B, n, E) → (B, n, E). `real` bool (B, n): which exist."""
        order = self.options.composition
        if scale == self.options.levels - 1:
            return self._attend(tokens, project, real, scale, 0, 0)
        if order == "local-global":
            fine = self._mix(tokens, project, real, scale)  # (B, n, E)
            pooled = (self._pool(fine, real, scale),) * 3  # (B, m, E)
            return self._add(fine, self._coarser(pooled, project, real, scale))
        pooled = each(lambda x: self._pool(x, real, scale), tokens)
        coarse = self._coarser(pooled, project, real, scale)  # (B, m, 1, E)
        if order == "global-local":
            tokens = each(lambda x: self._add(x, coarse), tokens)
        return self._add(self._mix(tokens, project, real, scale), coarse)

    def _add(self, x: Tensor, coarse: Tensor) -> Tensor:
        """To every token what its slice is given."""
        return add_by_slice(x, coarse, self.options.slice_length)

    def _lengths(self, q: Tensor, scale: int) -> Tensor | None:
        """How many of the slots of a scale are in use, int64 (B,); None = all."""
        return None

    def _put(self, x: Tensor, place: Tensor, size: int) -> Tensor:
        """x (B, H, n, d) + the positions (1, H, size, d) of a slice, in every slice."""
        return add_by_slice(x.transpose(1, 2), place.transpose(1, 2)[:, None], size).transpose(1, 2)

    def _coarser(self, pooled: Tokens, project: Any, real: Tensor | None, scale: int) -> Tensor:
        """What the next scale gives to every slice, (B, m, 1, E); causal: what it gives to the one before."""
        project = project if self.options.share_weights else self.attention.own[scale]
        if real is not None:
            real = torch.cat([x.any(2) for x in slices(real, self.options.slice_length)], 1)  # (B, m)
        if not self.options.causal:
            return self.compose(pooled, project, real, scale + 1)[:, :, None]
        batch, m, width = pooled[0].shape
        if m == 1:
            return pooled[0].new_zeros(batch, 1, 1, width)
        earlier = each(lambda x: x[:, :-1], pooled)
        out = self.compose(earlier, project, None if real is None else real[:, :-1], scale + 1)
        return F.pad(out, (0, 0, 1, 0))[:, :, None]

    def _pool(self, x: Tensor, real: Tensor | None, scale: int) -> Tensor:
        """(B, n, E) → slice embeddings (B, m, E), padding excluded, sums in float32 at least."""
        kind, work, size = x.dtype, torch.promote_types(x.dtype, torch.float32), self.options.slice_length
        views = list(slices(x, size))  # (B, c, l, E)
        masks = [None] * len(views) if real is None else list(slices(real, size))  # (B, c, l)
        weight = self.attention.pools[scale].to(work) if self.options.pool == "linear" else None  # (L, E, E)
        pieces = []
        for view, mask in zip(views, masks, strict=True):
            if self.options.pool == "max":
                pieces.append(_masked_max(view, mask))
            elif mask is None and weight is None:
                pieces.append(view.mean(2, dtype=work))
            else:
                share = torch.ones_like(view[..., 0], dtype=work) if mask is None else mask.to(work)  # (B, c, l)
                share = share / share.sum(2, keepdim=True).clamp(min=1)
                pieces.append(_weighted_sum(view.to(work), share, weight))
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)).to(kind)

    def _mix(self, tokens: Tokens, project: Any, real: Tensor | None, scale: int) -> Tensor:
        """Inside the slices: (B, n, E) → (B, n, E)."""
        size = self.options.slice_length
        if self.options.local == "attention":
            return self._attend(tokens, project, real, scale, size, self.options.reach)
        v = repeat_heads(project.values(tokens[2]), self.options.num_heads).transpose(1, 2).flatten(2)  # (B, n, E)
        v = v if real is None else v.masked_fill(~real[..., None], 0)
        batch, n, width = v.shape
        whole = F.pad(v, (0, 0, 0, -n % size)).reshape(-1, size, width)  # (B·m, L, E)
        return self.attention.mlps[scale](whole, self.call).view(batch, -1, width)[:, :n]

    def _attend(self, tokens: Tokens, project: Any, real: Tensor | None, scale: int, size: int, reach: int):
        """Attention inside slices of `size`; size=0: the coarsest scale is one slice."""
        q, k, v = project.together(*tokens)  # (B, H, n, d)
        n, keys, causal = q.shape[2], [k], self.options.causal
        if self.attention.positions is not None:
            q, keys = self._place(q, k, project, self.attention.positions(scale, n), size or n, reach)
        text = slices_text(causal, size, reach, self.attention.positions is not None)
        valid = [None if real is None else real[:, None]] * len(keys)
        about: dict[str, Any] = {"valid": valid, "dropout": self.call.dropout, "seed": self.call.seed}
        about["lengths"] = self._lengths(q, scale)
        values, scale_ = [v] * len(keys), self.options.softmax_scale
        out = merge_attention(q, keys, values, text, "main", n, scale=scale_, **about)  # (B, H, n, d)
        return out.transpose(1, 2).flatten(2)

    def _place(self, q: Tensor, k: Tensor, project: Any, table: Tensor, size: int, reach: int):
        """(x + P)W = xW + PW: the projected positions are added to the projected tokens.

        A key stands at another place of each extended slice it is in, so each neighbour sees keys of its own.
        """
        table = table[None, reach:] if self.options.causal else table[None]  # (1, reach + size [+ reach], E)
        nowhere = torch.zeros_like(table[:, :1])  # takes out the bias, which xW already has
        pq = project.queries(table[:, reach : reach + size]) - project.queries(nowhere)  # (1, H, size, d)
        pk = project.keys(table) - project.keys(nowhere)  # (1, H, rows, d)
        places = [pk[:, :, reach : reach + size]]
        if reach:
            places.append(F.pad(pk[:, :, :reach], (0, 0, size - reach, 0)))  # the last r tokens, from the right
        if reach and not self.options.causal:
            places.append(F.pad(pk[:, :, reach + size :], (0, 0, 0, size - reach)))  # the first r, from the left
        return self._put(q, pq, size), [self._put(k, place, size) for place in places]


def _weighted_sum(x: Tensor, share: Tensor, weight: Tensor | None) -> Tensor:
    """Σ_l share_l x_l W_l: (B, c, l, E), (B, c, l) and (L, E, E) → (B, c, E); no W is the identity."""
    if weight is None:
        return (share[:, :, None] @ x)[:, :, 0]
    return (x * share[..., None]).flatten(2) @ weight[: x.shape[2]].flatten(0, 1)


def _masked_max(x: Tensor, real: Tensor | None) -> Tensor:
    """(B, c, l, E) → (B, c, E), 0 where nothing is real."""
    if real is None:
        return x.amax(2)
    top = x.masked_fill(~real[..., None], -torch.inf).amax(2)
    return top.masked_fill(~real.any(2)[..., None], 0)


class AnyLengthComposer(Composer):
    """The same for a length that stands for any, as `torch.export` traces it.

    The slices of a scale stand in the first slots of an array that is as long as the sequence, and `_lengths` says how
    many they are: so no size in the graph is a quotient of the length, which torch could not follow. What a scale gives
    to its slices, (B, n, E), has slice t at slot t. All attentions cost what they cost otherwise; the projections of
    the slices run over n slots instead of n/L.
    """

    def __init__(self, attention: Any, call: Call) -> None:
        super().__init__(attention, call)
        for key, value in (("local", "mlp"), ("pool", "linear")):
            if getattr(self.options, key) == value:
                raise ValueError(
                    f"{attention.name}: {key}={value} cannot be traced for every length: export it for one length, "
                    "without dynamic_shapes for it"
                )

    def _slots(self, like: Tensor) -> Tensor:
        return torch.arange(self.call.slots, device=like.device)  # (n,)

    def _lengths(self, q: Tensor, scale: int) -> Tensor | None:
        if scale == 0:
            return None
        last = self._slots(q)[-1:] // self.options.slice_length**scale  # (1,): the number of the last slice
        return (last + 1).expand(q.shape[0]).contiguous()

    def _sums(self, x: Tensor) -> Tensor:
        """(B, n, …) → (B, n, …): the sum over slice t at slot t."""
        return torch.zeros_like(x).index_add(1, self._slots(x) // self.options.slice_length, x)

    def _add(self, x: Tensor, coarse: Tensor) -> Tensor:
        return x + coarse.index_select(1, self._slots(x) // self.options.slice_length)

    def _put(self, x: Tensor, place: Tensor, size: int) -> Tensor:
        return x + place.index_select(2, self._slots(x) % size)

    def _coarser(self, pooled: Tokens, project: Any, real: Tensor | None, scale: int) -> Tensor:
        project = project if self.options.share_weights else self.attention.own[scale]
        if real is None:
            real = torch.ones_like(pooled[0][..., 0], dtype=torch.bool)  # (B, n)
        out = self.compose(pooled, project, self._sums(real.long()) > 0, scale + 1)  # (B, n, E)
        return F.pad(out[:, :-1], (0, 0, 1, 0)) if self.options.causal else out

    def _pool(self, x: Tensor, real: Tensor | None, scale: int) -> Tensor:
        kind, work = x.dtype, torch.promote_types(x.dtype, torch.float32)
        real = torch.ones_like(x[..., 0], dtype=torch.bool) if real is None else real  # (B, n)
        if self.options.pool == "max":
            slices = self._slots(x) // self.options.slice_length
            low = torch.full_like(x, -torch.inf)
            top = low.index_reduce(1, slices, x.masked_fill(~real[..., None], -torch.inf), "amax")
            return top.masked_fill(top == -torch.inf, 0)
        count = self._sums(real.to(work))[..., None].clamp(min=1)
        return (self._sums(x.to(work).masked_fill(~real[..., None], 0)) / count).to(kind)
