"""The rows of a padded batch: from their first real token on, without what stands in padded slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.values import readable


class Rows(NamedTuple):
    """Where the rows of a padded batch begin and end; `align` moves them to slot 0, `restore` moves them back."""

    key_mask: Tensor | None  # as the mechanism sees it, after `align`
    lengths: Tensor | None  # (B,): slots from the first real token to the last; 0 = nothing but padding
    order: Tensor | None  # (B·n,): the slots in their new order; None = rows begin at slot 0 already
    back: Tensor | None  # (B·n,): the inverse
    is_solid: bool = False  # known: every row is real from its first token to its last

    @classmethod
    def of(cls, key_mask: Tensor | None, *, align: bool) -> Rows:
        if key_mask is None:
            return cls(None, None, None, None)
        batch, n = key_mask.shape
        place = torch.arange(n, device=key_mask.device)
        end = ((place + 1) * key_mask).amax(1)  # (B,)
        start = torch.where(key_mask, place, n).amin(1).minimum(end)
        if not align:
            return cls(key_mask, end, None, None)
        looks = readable(key_mask)
        solid = looks and bool((key_mask.sum(1) == end - start).all())
        if looks and not bool(start.any()):
            return cls(key_mask, end, None, None, solid)
        first = torch.arange(batch, device=key_mask.device)[:, None] * n
        order = (first + (place + start[:, None]) % n).flatten()
        back = (first + (place - start[:, None]) % n).flatten()
        return cls(key_mask.flatten()[order].view(batch, n), end - start, order, back, solid)

    def align(self, x: Tensor) -> Tensor:
        """(B, H, n, d) with each row from its first real token on."""
        return _reorder(x, self.order)

    def restore(self, x: Tensor) -> Tensor:
        return _reorder(x, self.back)


def _reorder(x: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return x
    tokens = x.transpose(1, 2).flatten(0, 1)  # (B·n, H, d)
    return tokens.index_select(0, order).view(x.shape[0], x.shape[2], *x.shape[1::2]).transpose(1, 2)


def clean(q: Tensor, k: Tensor, v: Tensor | None, key_mask: Tensor | None):
    """What stands in padded slots never matters: k and v become 0 there, a q that is not finite too.

    A finite q in a padded slot is still computed, so that masked attention equals torch's row for row.
    """
    if key_mask is None:
        return q, k, v
    padded = ~key_mask[:, None, :, None]  # (B, 1, m, 1)
    if q.shape[2] == k.shape[2]:
        q = q.masked_fill(padded & ~torch.isfinite(q), 0)
    k = k.masked_fill(padded, 0)
    return q, k, None if v is None else v.masked_fill(padded, 0)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(B, H/g, m, d) → (B, H, m, d): each key head g times in a row."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def clean_tokens(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Tokens (B, n, E); whatever stands in padded slots becomes 0."""
    return x if key_mask is None else x.masked_fill(~key_mask[..., None], 0)


def real_spans(key_mask: Tensor) -> Iterator[tuple[int, slice]]:
    """The rows that have a real token, each with its slots from the first one to the last."""
    for b, real in enumerate(key_mask):
        places = real.nonzero()[:, 0]
        if len(places):
            yield b, slice(int(places[0]), int(places[-1]) + 1)


def weights_by_row(
    define: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, key_mask: Tensor
) -> Tensor:
    """The weights (B, H, n, m) that `define` gives a row at a time, each from its first real token to its last."""
    work = torch.promote_types(q.dtype, torch.float32)
    found = torch.zeros(*q.shape[:3], k.shape[2], dtype=work, device=q.device)
    for b, own in real_spans(key_mask):
        one = define(q[b : b + 1, :, own], k[b : b + 1, :, own], key_mask[b : b + 1, own])
        found[b, :, own, own] = one[0].to(work)
    return found
