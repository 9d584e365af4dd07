"""Full attention of a divided sequence: a ring (Liu et al. 2023).

Keys and values go round; each process attends to the block that is with it while the next one is on its way, and merges
what it finds by the logsumexps. A causal process passes blocks on that it may not see. With zig-zag ranges every
process has an early and a late chunk, and all have the same work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from subquad.distributed.groups import Group
from subquad.kernels.merge.op import merge, merge_backward
from subquad.kernels.merge.views import absorb
from subquad.supports.shards import Rectangle


def attend(group: Group, about: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v (B, H, t, d) of this process; `about`: ranges, key mask (B, 1, n), causal, scale, dropout, seed."""
    return _Ring.apply(group, about, q, k, v)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, about: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.group, ctx.about = group, about
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
        for owner, (keys, values), pending in _round(group, about[0], [k, v]):
            for rows, block, job in _blocks(group, about, owner):
                found, here = merge(q[:, :, rows], [keys[:, :, block]], [values[:, :, block]], *job)
                absorb(out[:, :, rows], lse[:, :, rows], found, here)
            pending()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Keys and values go round once more, and their gradients one step behind them, back to where they belong."""
        group, about, (q, k, v, out, lse) = ctx.group, ctx.about, ctx.saved_tensors
        dq, travelling = torch.zeros_like(q), [torch.zeros_like(k), torch.zeros_like(v)]
        for owner, (keys, values), pending in _round(group, about[0], [k, v]):
            dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
            for rows, block, job in _blocks(group, about, owner):
                given = (grad[:, :, rows], q[:, :, rows], [keys[:, :, block]], [values[:, :, block]])
                grads = merge_backward(*given, out[:, :, rows], lse[:, :, rows], *job)
                dq[:, :, rows] += grads[0]
                dk[:, :, block] += grads[1]
                dv[:, :, block] += grads[2]
            pending()
            travelling = [have + new for have, new in zip(travelling, (dk, dv), strict=True)]
            # what has gathered for this block goes on to the next process, which holds the same block next
            before = (owner - 1) % group.size
            travelling = _pass_on(group, travelling, _size(about[0], before)).wait_next()
        return None, None, dq, *travelling


class _Passing:
    def __init__(self, group: Group, pending: Any, own: list[Tensor]) -> None:
        self.group, self.pending, self.own = group, pending, own

    def wait_next(self) -> list[Tensor]:
        if self.pending is None:
            return self.own
        return self.pending.wait()[(self.group.rank - 1) % self.group.size]


def _pass_on(group: Group, xs: list[Tensor], size: int) -> _Passing:
    """Send to the next process, and receive from the one before a block of `size` keys."""
    if group.size == 1:
        return _Passing(group, None, xs)
    after, before, everyone = (group.rank + 1) % group.size, (group.rank - 1) % group.size, range(group.size)
    pieces = [list(xs) if r == after else [] for r in everyone]
    shapes = [[(*x.shape[:2], size, x.shape[3]) for x in xs] if r == before else [] for r in everyone]
    return _Passing(group, group.exchange(pieces, shapes, xs[0]), xs)


def _size(ranges: Any, owner: int) -> int:
    return sum(hi - lo for lo, hi in ranges[owner])


def _round(group: Group, ranges: Any, xs: list[Tensor]) -> Iterator[tuple[int, list[Tensor], Any]]:
    """The blocks of all processes, the query's first. The next is on its way; `pending` waits for it."""
    for step in range(group.size):
        owner = (group.rank - step) % group.size
        last = step == group.size - 1
        passing = None if last else _pass_on(group, xs, _size(ranges, (owner - 1) % group.size))
        following: list[list[Tensor]] = []

        def arrive(passing=passing, following=following) -> None:
            if passing is not None:
                following.append(passing.wait_next())

        yield owner, xs, arrive
        if following:
            xs = following[0]


def _blocks(group: Group, about: tuple[Any, ...], owner: int) -> Iterator[tuple[slice, slice, tuple[Any, ...]]]:
    """Own queries and the owner's keys, range by range: where they lie, and the rest of the arguments of `merge`."""
    ranges, exists, causal, scale, dropout, seed = about
    row = 0
    for lo, hi in ranges[group.rank]:
        rows, key = slice(row, row + hi - lo), 0
        row = rows.stop
        for first, last in ranges[owner]:
            block = slice(key, key + last - first)
            key = block.stop
            if lo == hi or first == last or (causal and first >= hi):
                continue
            text = Rectangle(causal=causal, rows=(lo, hi), keys=(first, last)).text
            valid = [] if exists is None else [exists[:, :, first:last]]
            yield rows, block, (valid, None, seed, text, "main", hi - lo, scale, dropout)
