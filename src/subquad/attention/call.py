"""One call of a mechanism: what belongs to it beside q, k and v, what it tells beside its output, and its rows.

The rows of a padded batch are moved to their first real token, without what stands in padded slots (`Rows`). Rows of
similar length can be computed together (`length_groups`), each group cut at its longest row: only what is computed row
by row and does not depend on the number of slots. Padding that is cut off is neither projected nor attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.kernels.values import readable


class Call(NamedTuple):
    """What belongs to one call beside q, k and v. Nothing of it outlives the call."""

    key_mask: Tensor | None = None  # bool (B, m), True = a real token
    lengths: Tensor | None = None  # int64 (B,): the tokens of a row stand in its first slots; None = in all of them
    seed: Tensor | None = None  # int64 (): everything random follows from it; None where nothing is
    dropout: float = 0.0
    training: bool = False
    slots: int = 0  # the length of the batch: what sizes follow that are left open
    shard: Any = None  # this process's part of the rows (`distributed.across.Piece`); None = the rows are whole

    @property
    def exists(self) -> Tensor | None:
        """The key mask as it broadcasts over heads, (B, 1, m)."""
        return None if self.key_mask is None else self.key_mask[:, None]


class Record(NamedTuple):
    """What one call has to tell beside its output; a mechanism fills in what it has."""

    density: Tensor | None = None  # (H,): sampled edges / possible edges
    auxiliary_loss: Tensor | None = None  # a term of the loss that the mechanism asks for
    statistics: Tensor | None = None  # sums for running averages: hand them to `update` after the step
    path: str | None = None  # which kernel ran, where there is a choice


def draw_seed() -> Tensor:
    """One number from torch's global generator: everything random in a call follows from it."""
    return torch.randint(2**62, (), device="cpu")


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


GROUPS = 4  # at most
LEAST = 1 << 21  # numbers in a batch from which groups pay
SPARED = 0.1  # share of the slots that must be saved


class Group(NamedTuple):
    """Rows of a batch, (g,), and how many of their slots are in use."""

    rows: Tensor
    longest: int

    def cut(self, x: Tensor) -> Tensor:
        """Of x (B, n, …) the slots of the group, (g, longest, …)."""
        return x[self.rows, : self.longest]


def length_groups(lengths: Tensor | None, x: Tensor) -> list[Group]:
    """The groups of a batch x (B, n, E) whose rows have so many slots in use, (B,); [] where they would not pay, or
    where nobody may look at the lengths.
    """
    if lengths is None or not readable(lengths) or len(x) < 2 or x.numel() < LEAST:
        return []
    order = lengths.argsort(descending=True)
    size = -(-len(order) // GROUPS)
    groups = [Group(rows, max(1, int(lengths[rows[0]]))) for rows in order.split(size)]
    computed = sum(len(group.rows) * group.longest for group in groups)
    return groups if computed <= (1 - SPARED) * x.shape[0] * x.shape[1] else []


def put_together(pieces: Sequence[Tensor], groups: Sequence[Group], n: int) -> Tensor:
    """The rows of all groups, (g, longest, E) each, as a batch (B, n, E), 0 behind the end of a group."""
    order = torch.cat([group.rows for group in groups]).argsort().tolist()
    rows = [row for piece in pieces for row in piece.unbind()]
    zeros = pieces[0].new_zeros(n, pieces[0].shape[2])
    parts = [part for i in order for part in (rows[i], zeros[: n - len(rows[i])])]  # one after the other in memory
    return torch.cat(parts).view(len(rows), n, -1)
