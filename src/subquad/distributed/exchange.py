"""Exchanges with gradients: what a process is sent in the forward pass, it sends the gradient of in the backward pass.

Every exchange is a linear map of the tensors of all processes, and its backward pass the transposed one. Every process
must make the same calls in the same order, with tensors of the same kinds; sizes may differ, and be 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.distributed.groups import Group
from subquad.supports.shards import Cut, Range


class Linear(torch.autograd.Function):
    """A linear map `there` of tensors, and the transposed one, `back`, of their gradients."""

    @staticmethod
    def forward(ctx: Any, there: Callable, back: Callable, *xs: Tensor) -> Any:
        ctx.back = back
        return there(*xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = ctx.back(*grads)
        return None, None, *(found if isinstance(found, tuple) else (found,))


def overlap(a: Range, b: Range) -> Range:
    first = max(a[0], b[0])
    return first, max(first, min(a[1], b[1]))


def stretch(x: Tensor, of: Range, places: Range) -> Tensor:
    """The places of a tensor (B, H, t, d) that holds the range `of`."""
    return x[:, :, places[0] - of[0] : places[1] - of[0]]


# ---- moving places of a sequence ------------------------------------------------------------------------------------


def move(group: Group, xs: Sequence[Tensor], have: Cut, want: Cut) -> list[Tensor]:
    """Tensors (B, H, have, d) → (B, H, want, d): each process gets the range that it wants. Ranges may overlap."""
    if have == want:
        return list(xs)

    def there(*xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(_moved(group, xs, have, want))

    def back(*grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(_moved(group, grads, want, have))

    return list(Linear.apply(there, back, *xs))


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

    def there(x: Tensor) -> Tensor:
        return _reordered(group, x, order, slots)

    def back(grad: Tensor) -> Tensor:
        return _reordered(group, grad, torch.argsort(order, dim=1), slots)

    return Linear.apply(there, back, x)


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

    def back(grad: Tensor) -> Tensor:
        others = [r for r in range(group.size) if r != group.rank]
        return _added(group, grad, others, others, grad[group.rank].clone())

    return Linear.apply(group.gather, back, x)


def total(group: Group, x: Tensor) -> Tensor:
    """The sum over the processes. Each of them uses it, so its gradient is the sum of theirs."""
    return Linear.apply(group.total, group.total, x)


def earlier(group: Group, x: Tensor) -> Tensor:
    """x of the processes before this one: (rank, …)."""
    before, behind = range(group.rank), range(group.rank + 1, group.size)

    def there(x: Tensor) -> Tensor:
        pieces = [[x] if r in behind else [] for r in range(group.size)]
        shapes = [[x.shape] if r in before else [] for r in range(group.size)]
        found = group.exchange(pieces, shapes, x).wait()[: group.rank]
        return torch.stack([some[0] for some in found]) if found else x.new_empty(0, *x.shape)

    def back(grad: Tensor) -> Tensor:
        return _added(group, grad, before, behind, grad.new_zeros(grad.shape[1:]))

    return Linear.apply(there, back, x)


def _added(group: Group, grad: Tensor, to: Sequence[int], by: Sequence[int], own: Tensor) -> Tensor:
    """grad[r] goes to every process r of `to`; what processes `by` send is added to `own`."""
    pieces = [[grad[r]] if r in to else [] for r in range(group.size)]
    shapes = [[grad.shape[1:]] if r in by else [] for r in range(group.size)]
    for some in group.exchange(pieces, shapes, grad).wait():
        for piece in some:
            own += piece
    return own
