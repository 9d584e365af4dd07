"""Exchanges with gradients: what a process is sent in the forward pass, it sends the gradient of in the backward pass.

Every process must make the same calls in the same order, with tensors of the same kinds; sizes may differ, and be 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.distributed.groups import Group
from subquad.supports.shards import Cut, Range


def overlap(a: Range, b: Range) -> Range:
    first = max(a[0], b[0])
    return first, max(first, min(a[1], b[1]))


def stretch(x: Tensor, of: Range, places: Range) -> Tensor:
    """The places of a tensor (B, H, t, d) that holds the range `of`."""
    return x[:, :, places[0] - of[0] : places[1] - of[0]]


# ---- moving places of a sequence ------------------------------------------------------------------------------------


def move(group: Group, xs: Sequence[Tensor], have: Cut, want: Cut) -> list[Tensor]:
    """Tensors (B, H, have, d) → (B, H, want, d): each process gets the range that it wants. Ranges may overlap."""
    return list(xs) if have == want else list(_Move.apply(group, have, want, *xs))


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, have: Cut, want: Cut, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.have, ctx.want = group, have, want
        return tuple(_moved(group, xs, have, want))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *_moved(ctx.group, grads, ctx.want, ctx.have)


def _moved(group: Group, xs: Sequence[Tensor], have: Cut, want: Cut) -> list[Tensor]:
    """Where ranges of `have` overlap, what comes from several processes is added up: such are gradients."""
    me, mine, wish = group.rank, have[group.rank], want[group.rank]
    others = [r for r in range(group.size) if r != me]
    give, take = [overlap(mine, one) for one in want], [overlap(one, wish) for one in have]
    pieces = [[stretch(x, mine, give[r]) for x in xs] if r in others else [] for r in range(group.size)]
    shapes = [
        [(*x.shape[:2], take[r][1] - take[r][0], x.shape[3]) for x in xs] if r in others else []
        for r in range(group.size)
    ]
    pending = group.exchange(pieces, shapes, xs[0])
    if all(a[1] <= b[0] for a, b in itertools.pairwise(have)):  # every place comes from one process
        received = pending.wait()
        return [_joined([stretch(x, mine, take[r]) if r == me else received[r][i] for r in range(group.size)])
                for i, x in enumerate(xs)]  # fmt: skip
    out = [x.new_zeros(*x.shape[:2], wish[1] - wish[0], x.shape[3]) for x in xs]
    for y, x in zip(out, xs, strict=True):
        stretch(y, wish, take[me]).copy_(stretch(x, mine, take[me]))
    received = pending.wait()
    for r in others:
        for y, piece in zip(out, received[r], strict=True):
            stretch(y, wish, take[r]).add_(piece)
    return out


def _joined(pieces: list[Tensor]) -> Tensor:
    """Side by side; no copy where there is one piece only."""
    some = [piece for piece in pieces if piece.shape[2]] or pieces[:1]
    return some[0] if len(some) == 1 else torch.cat(some, 2)


# ---- tokens in another order ----------------------------------------------------------------------------------------


def reorder(group: Group, x: Tensor, order: Tensor, slots: Sequence[Tensor]) -> Tensor:
    """(B, t, …) → (B, t, …): place c of row b gets what stood in slot order[b, c] of the whole row.

    order (B, n) is a permutation of every row, the same in all processes; `slots`: which slots each process has, (t,).
    """
    return _Reorder.apply(group, x, order, slots)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor, order: Tensor, slots: Sequence[Tensor]) -> Tensor:
        ctx.group, ctx.order, ctx.slots = group, order, slots
        return _reordered(group, x, order, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, _reordered(ctx.group, grad, torch.argsort(ctx.order, dim=1), ctx.slots), None, None


def _reordered(group: Group, x: Tensor, order: Tensor, slots: Sequence[Tensor]) -> Tensor:
    me, everyone = group.rank, range(group.size)
    owner, place = torch.empty_like(order[0]), torch.empty_like(order[0])  # (n,): who has a slot, and where
    for r, own in enumerate(slots):
        owner[own], place[own] = r, torch.arange(len(own), device=own.device)
    wanted = [order[:, own] for own in slots]  # [process]: the slots that go there, (B, t)
    pieces, row = [], torch.arange(len(x), device=x.device)[:, None].expand_as(order)
    for r in everyone:
        here = owner[wanted[r]] == me  # (B, t)
        pieces.append(x[row[:, : here.shape[1]][here], place[wanted[r][here]]])  # (count, …), row by row
    from_where = owner[wanted[me]]  # (B, t)
    sizes = [int((from_where == r).sum()) for r in everyone]
    pending = group.exchange(
        [[pieces[r]] if r != me else [] for r in everyone],
        [[(sizes[r], *x.shape[2:])] if r != me else [] for r in everyone],
        x,
    )
    out = torch.empty_like(x)
    out[from_where == me] = pieces[me]
    received = pending.wait()
    for r in everyone:
        if r != me:
            out[from_where == r] = received[r][0]
    return out


# ---- small tensors of the same shape in every process ---------------------------------------------------------------


def gather(group: Group, x: Tensor) -> Tensor:
    """x of every process: (p, …)."""
    return _Gather.apply(group, x)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor) -> Tensor:
        ctx.group = group
        return group.gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group = ctx.group
        pieces = [[] if r == group.rank else [grad[r]] for r in range(group.size)]
        shapes = [[] if r == group.rank else [grad.shape[1:]] for r in range(group.size)]
        own = grad[group.rank].clone()
        for some in group.exchange(pieces, shapes, grad).wait():
            for piece in some:
                own += piece
        return None, own


def total(group: Group, x: Tensor) -> Tensor:
    """The sum over the processes. Each of them uses it, so its gradient is the sum of theirs."""
    return _Total.apply(group, x)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor) -> Tensor:
        ctx.group = group
        return group.total(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, ctx.group.total(grad)


def earlier(group: Group, x: Tensor) -> Tensor:
    """x of the processes before this one: (rank, …)."""
    return _Earlier.apply(group, x)


class _Earlier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor) -> Tensor:
        ctx.group = group
        pieces = [[x] if r > group.rank else [] for r in range(group.size)]
        shapes = [[x.shape] if r < group.rank else [] for r in range(group.size)]
        found = group.exchange(pieces, shapes, x).wait()[: group.rank]
        return torch.stack([some[0] for some in found]) if found else x.new_empty(0, *x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group = ctx.group
        pieces = [[grad[r]] if r < group.rank else [] for r in range(group.size)]
        shapes = [[grad.shape[1:]] if r > group.rank else [] for r in range(group.size)]
        own = grad.new_zeros(grad.shape[1:])
        for some in group.exchange(pieces, shapes, grad).wait():
            for piece in some:
                own += piece
        return None, own
