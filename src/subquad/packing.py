"""Packed batches: several sequences one after another in one row of slots, none of which sees another.

    cu_seqlens = [0, 5, 12]                       two sequences, of 5 and of 7 tokens, in a row of 12
    position_ids = [0 1 2 3 4 0 1 2 3 4 5 6]      the same, said by positions that restart at 0

Everything that looks at one token at a time (embeddings, norms, feed-forward) works on the slots as they are. Attention
takes the sequences apart: each becomes a row of a batch of its own, which is what it would be without packing, so the
two agree by construction. Rows of about the same length share a call, and the slots that fill them up stay few: the
time follows the real tokens. The same machinery closes the gaps of rows with padding between their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.attention.base import Attention
from subquad.attention.call import Record
from subquad.core.hashing import bits
from subquad.kernels.values import may_look, readable

SPARE = 32  # slots that may be filled up in a call before another call is cheaper
SHARE = 24  # and 1 / SHARE of the tokens of the call


class Bucket(NamedTuple):
    """Sequences that share a call, each from slot 0 of a row on."""

    slots: Tensor  # int64 (R, m): which of all the slots stands here; behind the end of a sequence any of its row
    mask: Tensor | None  # bool (R, m): what is within a row; None = everything
    in_order: bool = False  # the slots are all there are, one after another: nothing moves

    def rows(self, x: Tensor) -> Tensor:
        """(B, n, …) → (R, m, …)."""
        if self.in_order:
            return x.flatten(0, 1).unflatten(0, self.slots.shape)
        return x.flatten(0, 1).index_select(0, self.slots.flatten()).unflatten(0, self.slots.shape)


class Packing(NamedTuple):
    """Where the sequences of a batch of slots (B, n) are."""

    buckets: tuple[Bucket, ...]
    back: Tensor  # int64 (B·n,): the place of each slot in the rows of all buckets; behind them all where it has none
    shape: tuple[int, int]  # (B, n)
    slots: Tensor | None = None  # int64 (T,): the slots of all sequences, one after another; None: a row is a sequence
    starts: Tensor | None = None  # int64 (S,): which of them a sequence begins with

    @property
    def first_slots(self) -> Tensor:
        """The slot that each sequence begins with, (S,)."""
        if self.slots is None or self.starts is None:
            raise ValueError("rows with gaps are no packed batch: each is one sequence")
        return self.slots[self.starts].to(self.back.device)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, (S,)."""
        if self.slots is None or self.starts is None:
            raise ValueError("rows with gaps are no packed batch: each is one sequence")
        return _lengths(self.slots, self.starts).to(self.back.device)

    def to(self, device: torch.device | None) -> Packing:
        """For tokens on another device. `slots` and `starts` stay where they are, so that the host need not wait."""
        buckets = (
            bucket._replace(slots=_sent(bucket.slots, device), mask=_sent(bucket.mask, device))
            for bucket in self.buckets
        )
        return self._replace(buckets=tuple(buckets), back=_sent(self.back, device))

    @property
    def longest(self) -> int:
        return max(bucket.slots.shape[1] for bucket in self.buckets)

    def seeds(self, seed: Tensor | None, training: bool) -> list[Tensor | None]:
        """A seed for the call of each bucket. In evaluation it is one for all, since rows draw alike there: a sequence
        gives what it gives alone. In training a call counts its rows from 0, and two buckets would drop the same.
        """
        if seed is None or not training:
            return [seed] * len(self.buckets)
        return [seed, *(bits(seed, torch.full_like(seed, number)) for number in range(1, len(self.buckets)))]

    def for_call(self, mechanism: Attention, want_record: bool) -> Packing:
        """The packing that a call takes: where it has something to tell, all sequences share one bucket."""
        tells = want_record and type(mechanism).attend_observed is not Attention.attend_observed
        return _as_one_call(self).to(self.back.device) if tells and self.slots is not None else self

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """What the buckets give, (R, m, D) each, in the order of the slots: (B, n, D); 0 where a slot has no place."""
        tokens = [x.flatten(0, 1) for x in rows]
        if self.buckets[0].in_order:
            return tokens[0].unflatten(0, self.shape)
        tokens.append(tokens[0].new_zeros(1, tokens[0].shape[1]))
        return torch.cat(tokens).index_select(0, self.back).unflatten(0, self.shape)

    def join_weights(self, rows: Sequence[Tensor]) -> Tensor:
        """Weights (R, H, m, m) of every bucket as one matrix (B, H, n, n) with a block for each sequence."""
        (batch, n), heads = self.shape, rows[0].shape[1]
        weights = rows[0].new_zeros(batch, n, n, heads)
        for (index, mask, _), x in zip(self.buckets, rows, strict=True):
            row, slot = index[:, :1, None] // n, index % n
            if mask is not None:
                x = x * (mask[:, None, :, None] & mask[:, None, None])
            places = (row, slot[:, :, None], slot[:, None])  # (R, m, m) together
            weights = weights.index_put(places, x.permute(0, 2, 3, 1), accumulate=True)
        return weights.permute(0, 3, 1, 2)


def _sent(x: Any, device: torch.device | None) -> Any:
    return x if x is None or device is None else x.to(device, non_blocking=True)


def packing_of(
    shape: tuple[int, int],
    key_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    sharing: str = "near",
    pad_left: bool = False,
    device: torch.device | None = None,
    longest: int | None = None,
) -> Packing | None:
    """The sequences of a batch of slots (B, n); None where each row is one, with nothing missing inside.

    A sequence begins where `position_ids` (B or 1, n) are 0, or at the slots `cu_seqlens` (S + 1,); padded slots belong
    to none. `sharing`: which sequences share a call, those of near lengths or only those of equal ones. `pad_left`:
    where the padding goes that stands between tokens. `device`: that of the tokens; `cu_seqlens` may be on the CPU,
    where nobody waits to read them. `longest`: what no sequence may be longer than.
    """
    tracing = torch.compiler.is_compiling()
    begins = None if position_ids is None else _restarts(position_ids, shape)
    if position_ids is not None and not may_look(position_ids):
        _assert_unpacked(position_ids, key_mask)
    if begins is not None and key_mask is not None:
        begins = begins & key_mask  # positions of padded slots say nothing
    if cu_seqlens is not None:
        begins = _sent(_checked(cu_seqlens, shape), None if key_mask is None else key_mask.device)
    if begins is None or tracing:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens: how many sequences there are is not known while a model is traced")
        if key_mask is None:
            return None
        looks = readable(key_mask) or (pad_left and may_look(key_mask))
        if looks and not has_gaps(key_mask):
            return None
        return _closed(key_mask, pad_left=pad_left)
    if cu_seqlens is not None and not may_look(begins):
        return _within_bounds(cu_seqlens, shape, key_mask, sharing, longest).to(device)
    real = torch.ones_like(begins) if key_mask is None else key_mask
    slots = real.flatten().nonzero()[:, 0]  # (T,): the slots of the real tokens
    if len(slots) == 0:
        return None
    row = slots // shape[1]
    first = torch.ones_like(slots, dtype=torch.bool)
    first[1:] = (row[1:] != row[:-1]) | begins.flatten().cumsum(0)[slots].diff().bool()
    starts = first.nonzero()[:, 0]
    if cu_seqlens is None and len(starts) == len(row.unique()):  # one sequence in each row: no need of all this
        return _closed(key_mask, pad_left=pad_left) if key_mask is not None and has_gaps(key_mask) else None
    return _apart(slots, starts, shape, sharing).to(device)


def without_gaps(key_mask: Tensor) -> Packing:
    """The real tokens alone, of rows that have them at the same slots."""
    (batch, n), count = key_mask.shape, int(key_mask[0].sum())
    slots = key_mask.flatten().nonzero()[:, 0]  # (B·c,)
    back = slots.new_full((batch * n,), len(slots))
    back[slots] = torch.arange(len(slots), device=slots.device)
    return Packing((Bucket(slots.view(batch, count), None),), back, (batch, n))


def _restarts(position_ids: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """Where positions restart at 0, bool (B, n); None where no position but a row's first one is 0."""
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, shape[0]) or position_ids.shape[1] != shape[1]:
        raise ValueError(f"position_ids must have shape {shape} or {(1, shape[1])}, not {tuple(position_ids.shape)}")
    begins = position_ids == 0
    if not may_look(begins) or not bool(begins[:, 1:].any()):
        return None
    return begins.expand(shape)


def _assert_unpacked(position_ids: Tensor, key_mask: Tensor | None) -> None:
    """How many sequences there are is not known while a model is traced, or where the host must not wait to learn it:
    more than one in a row are refused.
    """
    begins, first = position_ids == 0, torch.arange(position_ids.shape[1], device=position_ids.device) == 0
    if key_mask is not None:  # positions of padded slots say nothing
        begins, first = begins & key_mask, key_mask & (key_mask.cumsum(1) == 1)
    message = (
        "position_ids restart at 0: a traced graph cannot take a packed batch apart; call the model itself"
        if torch.compiler.is_compiling()
        else "position_ids restart at 0: where the host must not wait, give cu_seqlens"
    )
    torch._assert_async(~(begins & ~first).any(), message)


def _checked(cu_seqlens: Tensor, shape: tuple[int, int]) -> Tensor:
    """Where sequences begin, bool (1, n)."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor, not {kind}")
    if shape[0] != 1:
        raise ValueError(f"cu_seqlens needs all sequences in one row, a batch of 1, not of {shape[0]}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must have shape (S + 1,) for S ≥ 1 sequences, not {tuple(cu_seqlens.shape)}")
    ends, wanted = cu_seqlens.long(), f"begin with 0, never fall and end with the {shape[1]} tokens there are"
    right = (ends[0] == 0) & (ends[-1] == shape[1]) & (ends.diff() >= 0).all()
    if not may_look(right):
        torch._assert_async(right, f"cu_seqlens must {wanted}")
    elif not bool(right):
        raise ValueError(f"cu_seqlens must {wanted}, not {ends[:4].tolist()} … {ends[-1].item()}")
    begins = torch.zeros(shape[1] + 1, dtype=torch.bool, device=ends.device)  # an empty sequence may begin at the end
    return begins.index_fill(0, ends[:-1], True)[None, :-1]


def sequence_positions(cu_seqlens: Tensor, mask: Tensor | None, n: int) -> Tensor:
    """The place of each token in its own sequence, not counting padding (`mask`: 1 = real), (1, n)."""
    begins = _sent(_checked(cu_seqlens, (1, n)), None if mask is None else mask.device)
    count = torch.ones_like(begins, dtype=torch.long) if mask is None else mask.long()
    before = count.cumsum(1) - count  # tokens in front of each slot
    return (before - torch.where(begins, before, 0).cummax(1)[0]).clamp(min=0)


def has_gaps(key_mask: Tensor) -> bool:
    """Is there padding between the tokens of a row?"""
    return bool((key_mask.diff(dim=1) & key_mask[:, 1:]).sum(1).add(key_mask[:, 0]).gt(1).any())


def closed_order(key_mask: Tensor, *, pad_left: bool = False) -> Tensor:
    """The slots of each row, int64 (B, n): those of its real tokens in front, or behind with `pad_left`."""
    return torch.argsort((key_mask if pad_left else ~key_mask).int(), dim=1, stable=True)


def _closed(key_mask: Tensor, *, pad_left: bool = False) -> Packing:
    """Each row with its real tokens in front and its padding behind, or the other way round; the shapes do not depend
    on the mask.
    """
    batch, n = key_mask.shape
    order = closed_order(key_mask, pad_left=pad_left)
    first = torch.arange(batch, device=key_mask.device)[:, None] * n
    bucket = Bucket(order + first, key_mask.gather(1, order))
    return Packing((bucket,), (torch.argsort(order, dim=1) + first).flatten(), (batch, n))


def _apart(slots: Tensor, starts: Tensor, shape: tuple[int, int], sharing: str = "near") -> Packing:
    """Sequences as rows of buckets. `slots` (T,): all their tokens; `starts` (S,): which of them they begin with."""
    lengths = _lengths(slots, starts)
    ordered, order = lengths.sort(descending=True, stable=True)
    back = slots.new_full((shape[0] * shape[1],), -1)
    buckets, filled, at = [], 0, 0
    for count in _shares(ordered.tolist(), sharing):
        own, size = starts[order[at : at + count]], ordered[at : at + count]  # (R,)
        place = torch.arange(int(size[0]), device=slots.device)  # (m,)
        mask = place < size[:, None]  # (R, m)
        index = slots[own[:, None] + place * mask]
        back[index[mask]] = filled + mask.flatten().nonzero()[:, 0]
        buckets.append(Bucket(index, None if bool(mask.all()) else mask))
        filled, at = filled + index.numel(), at + count
    if len(buckets) == 1 and buckets[0].mask is None and filled == len(back) and bool((back.diff() == 1).all()):
        buckets = [buckets[0]._replace(in_order=True)]
    return Packing(tuple(buckets), back.where(back >= 0, filled), shape, slots, starts)


def _lengths(slots: Tensor, starts: Tensor) -> Tensor:
    """Tokens of each sequence, (S,)."""
    return torch.nn.functional.pad(starts, (0, 1), value=len(slots)).diff()


def _within_bounds(
    cu_seqlens: Tensor, shape: tuple[int, int], key_mask: Tensor | None, sharing: str, longest: int | None
) -> Packing:
    """`_apart` for a row of T slots, without reading where its S sequences begin.

    The i-th longest has T / i tokens at most: one row of T slots, two of T/2, four of T/4, … have room for all, and
    that is T·(1 + log₂ S) slots at most. None is longer than `longest`.
    """
    if key_mask is not None or sharing == "equal":
        what = "padding between them" if key_mask is not None else "only sequences of equal length in a call"
        raise ValueError(f"cu_seqlens: where the host must not wait, they must be on the CPU if there is {what}")
    starts, device = cu_seqlens[:-1].long(), cu_seqlens.device
    slots = torch.arange(shape[1], device=device)
    lengths = _lengths(slots, starts)
    longest = shape[1] if longest is None else longest
    right = (lengths > 0) & (lengths <= longest)
    torch._assert_async(right.all(), f"cu_seqlens: where the host must not wait, sequences have 1 … {longest} tokens")
    ordered, order = lengths.sort(descending=True, stable=True)
    back, buckets, filled, at = slots.new_zeros(shape[1] + 1), [], 0, 0
    while at < len(starts):
        count = len(starts) if sharing == "all" else at + 1
        place = torch.arange(min(longest, shape[1] // (at + 1)), device=device)  # (m,)
        own, size = starts[order[at : at + count]], ordered[at : at + count]  # (R,)
        mask = place < size[:, None]  # (R, m)
        index = own[:, None] + place * mask
        where = torch.where(mask, index, shape[1]).flatten()
        back.index_copy_(0, where, filled + torch.arange(index.numel(), device=device))
        buckets.append(Bucket(index, mask))
        filled, at = filled + index.numel(), at + count
    return Packing(tuple(buckets), back[:-1], shape, slots, starts)


def _shares(lengths: list[int], sharing: str) -> list[int]:
    """How many sequences each bucket takes, of sequences ordered by length, the longest first."""
    if sharing == "all":
        return [len(lengths)]
    counts: list[int] = []
    longest = tokens = spare = 0
    for length in lengths:
        spare += longest - length
        if not counts or spare > (0 if sharing == "equal" else max(SPARE, tokens // SHARE)):
            counts.append(0)
            longest, tokens, spare = length, 0, 0
        counts[-1] += 1
        tokens += length
    return counts


def _as_one_call(packing: Packing) -> Packing:
    """All sequences in one bucket, because a record speaks of one call."""
    slots, starts, shape = packing.slots, packing.starts, packing.shape
    assert slots is not None and starts is not None
    if may_look(starts):
        return _apart(slots, starts, shape, "all")
    ends = torch.nn.functional.pad(starts, (0, 1), value=len(slots))
    return _within_bounds(ends, shape, None, "all", packing.longest)


def attend_packed(
    packing: Packing,
    mechanism: Attention,
    tokens: Sequence[Tensor],
    project: Callable[[Bucket], Any],
    seed: Tensor | None = None,
    *,
    want_record: bool = False,
) -> tuple[Tensor, Record]:
    """`mechanism.attend_tokens` on each sequence by itself: (B, n, H·d), and the record of the call.

    `tokens`: query, key and value (B, n, E); `project` gives the layer's projections for the rows of a bucket.
    """
    packing = packing.for_call(mechanism, want_record)
    outputs, record = [], Record()
    for bucket, own_seed in zip(packing.buckets, packing.seeds(seed, mechanism.training), strict=True):
        query = bucket.rows(tokens[0])  # one object stays one: projections look at identity
        key = query if tokens[1] is tokens[0] else bucket.rows(tokens[1])
        value = query if tokens[2] is tokens[0] else key if tokens[2] is tokens[1] else bucket.rows(tokens[2])
        about = (query, key, value, project(bucket), bucket.mask, own_seed)
        y, record = mechanism.attend_tokens(*about, want_record=want_record)
        outputs.append(y)
    return packing.join(outputs), record
