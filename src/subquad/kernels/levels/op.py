"""The operators `subquad::levels` and `subquad::levels_backward`: entrance, schema, means, derivatives, FLOPs."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from subquad.kernels.operators import derive
from subquad.kernels.row_dots import row_dots
from subquad.kernels.runs import cpu, reference
from subquad.kernels.runs.op import EVERYTHING, Runs, ready


def spans_of(first: Tensor, stop: Tensor, m: int, last: Tensor | None = None) -> Tensor:
    """Runs of the keys first … stop - 1 that exist, (T, 4), seen by all queries unless `last` says otherwise."""
    first, stop = first.clamp(min=0), stop.clamp(max=m)
    last = torch.full_like(first, EVERYTHING) if last is None else last
    return torch.stack((first, (stop - first).clamp(min=0), last, torch.full_like(first, -EVERYTHING)), -1)


@lru_cache(maxsize=64)
def runs_of_level(m: int, size: int, number: int, device: torch.device) -> Runs:
    """The m rows of a level, in blocks and, but for the finest, in halves of blocks: those that touch the neighbour see
    only the half of it that does not touch them."""
    step = size // 2 if number else size
    first = torch.arange(0, m, step, device=device)
    tiles = torch.stack((first, (m - first).clamp(max=step)), -1)
    if not number:
        spans = spans_of(first - size, first + 2 * size, m)[:, None]
        return Runs(tiles, spans, (0,), 3 * size * m, (step, 3 * size))
    block, half = first // size * size, first // step % 2  # the first row of the block, and which half it is
    before = spans_of(block - size, block - step * (1 - half), m)
    after = spans_of(block + size + step * half, block + 2 * size, m)
    return Runs(tiles, torch.stack((before, after), 1), (0, 0), 3 * step * m, (step, size, size))


def attend_levels(
    q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, block: int, levels: int, scale: float
) -> Tensor:
    """q, k, v (G, n, d), real (G or 1, n): 1 for a token, 0 for padding, or None → (G, n, d)."""
    real = None if real is None else real.detach()
    return attention(ready(q), ready(k), ready(v), real, block, levels, scale)[0]


@torch.library.custom_op("subquad::levels", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, block: int, levels: int, scale: float
) -> tuple[Tensor, Tensor]:
    """out (G, n, d) and the logsumexp of its rows (G, n)."""
    steps = _steps(q, real, levels)
    means = [_means(x, steps) for x in (q, k, v)]
    out = lse = None
    for number in reversed(range(levels)):
        x, y, z = (found[number] for found in means)
        runs = runs_of_level(x.shape[1], block, number, q.device)
        begun = None
        if out is not None and lse is not None:
            begun = _twice(out, torch.empty_like(x)), _twice(lse, x.new_empty(x.shape[:2]))
        out, lse = _attend(x, y, z, steps[number].bias, runs, scale, begun)
    assert out is not None and lse is not None
    return out, lse


@torch.library.custom_op("subquad::levels_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor | None,
    out: Tensor,
    lse: Tensor,
    block: int,
    levels: int,
    scale: float,
) -> list[Tensor]:
    """Gradients of q, k, v."""
    steps = _steps(q, real, levels)
    means = [_means(x, steps) for x in (q, k, v)]
    nobody = lse == -torch.inf
    rows = [_Rows(ready(grad), row_dots(grad, out).masked_fill_(nobody, 0), lse.masked_fill(nobody, torch.inf))]
    for _ in range(1, levels):
        rows.append(rows[-1].of_groups())
    found: list[Tensor] = []
    for number in reversed(range(levels)):
        x, y, z = (mean[number] for mean in means)
        runs = runs_of_level(x.shape[1], block, number, q.device)
        pairs = zip((x, y, z), found, strict=False)  # nothing has been found before the coarsest level
        begun = [_spread(coarse, torch.empty_like(fine), steps[number + 1].shares) for fine, coarse in pairs]
        found = _differentiate(x, y, z, steps[number].bias, runs, scale, rows[number], begun)
    return found


# ---- means of groups ----


class _Step(NamedTuple):
    """From one level to the next: (G or 1, m)."""

    bias: Tensor | None  # the logarithm of how many tokens a group has; None = 0
    shares: tuple[Tensor, Tensor] | None  # of the two halves in the mean of a group, (G or 1, m, 1); None = 1/2 each


def _steps(q: Tensor, real: Tensor | None, levels: int) -> list[_Step]:
    n = q.shape[1]
    count = q.new_ones(1, n) if real is None else real.to(q.dtype)
    steps = [_Step(None if real is None else count.log(), None)]
    for number in range(1, levels):
        left, right = _halves(count[..., None])
        count = (left + right)[..., 0]
        whole = real is None and n % (1 << number) == 0
        least = (left + right).clamp(min=1)
        steps.append(_Step(count.log(), None if whole else (left / least, right / least)))
    return steps


def _means(x: Tensor, steps: list[_Step]) -> list[Tensor]:
    """(G, m, d) of every level."""
    found = [x]
    for step in steps[1:]:
        left, right = _halves(found[-1])
        mean = left.new_empty(left.shape)  # a head's rows side by side, however the tokens' stand
        if step.shares is None:
            found.append(torch.lerp(left, right, 0.5, out=mean))
        else:
            found.append(torch.mul(left, step.shares[0], out=mean).addcmul_(right, step.shares[1]))
    return found


def _halves(x: Tensor, missing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Even and odd rows, (G, m, d) → (G, ⌈m/2⌉, d) each; the last odd one may be missing."""
    if x.shape[1] % 2:
        x = torch.cat((x, x.new_full((x.shape[0], 1, x.shape[2]), missing)), 1)
    left, right = x.unflatten(1, (-1, 2)).unbind(2)
    return left, right


def _twice(x: Tensor, into: Tensor) -> Tensor:
    """into (G, m, …) = every row of a coarse level (G, ⌈m/2⌉, …) for the two rows that it stands for."""
    for first in (0, 1):
        part = into[:, first::2]
        part.copy_(x[:, : part.shape[1]])
    return into


def _spread(coarse: Tensor, into: Tensor, shares: tuple[Tensor, Tensor] | None) -> Tensor:
    """into (G, m, d) = the gradient of the means, `coarse` (G, ⌈m/2⌉, d), at the rows that they are of."""
    for first in (0, 1):
        half = into[:, first::2]
        part = coarse[:, : half.shape[1]]
        torch.mul(part, 0.5 if shares is None else shares[first][:, : half.shape[1]], out=half)
    return into


# ---- attention inside a level ----


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    runs: Runs,
    scale: float,
    begun: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """out (G, m, d) and lse (G, m), together with what has `begun`."""
    if cpu.takes(q):
        out, lse = begun or (torch.empty_like(q), q.new_empty(q.shape[:2]))
        about = (None, None), (runs.tiles, runs.spans, None, runs.sources)
        cpu.forward(q, [k], [v], bias, *about, scale, out, lse, begun is None)
        return out, lse
    tables = (runs.tiles, runs.spans, list(runs.sources), list(runs.sizes))
    out, lse = reference.forward(q, [k], [v], bias, *tables, scale)
    if begun is None:
        return out, lse
    total = torch.logaddexp(lse, begun[1])
    base = total.masked_fill(total == -torch.inf, 0)
    return out * (lse - base).exp()[..., None] + begun[0] * (begun[1] - base).exp()[..., None], total


class _Rows(NamedTuple):
    """What a level's backward needs of its rows: ḡ (G, m, d), δ̄ (G, m) and L (G, m), inf where a row saw nothing."""

    grad: Tensor
    delta: Tensor
    lse: Tensor

    def of_groups(self) -> _Rows:
        """The rows of the next level."""
        left, right = _halves(self.lse[..., None], torch.inf)  # (G, ⌈m/2⌉, 1)
        least = torch.minimum(left, right)
        shares = [(least - x).masked_fill(x == torch.inf, -torch.inf).exp() for x in (left, right)]
        grad, delta = (
            torch.mul(a, shares[0], out=a.new_empty(a.shape)).addcmul_(b, shares[1])
            for a, b in (_halves(self.grad), _halves(self.delta[..., None]))
        )
        return _Rows(grad, delta[..., 0], least[..., 0])


def _differentiate(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, runs: Runs, scale: float, rows: _Rows, begun: list[Tensor]
) -> list[Tensor]:
    """Gradients of a level's means, (G, m, d) each, added to what has `begun`, if anything has."""
    delta, lse = rows.delta.contiguous(), rows.lse.contiguous()
    if cpu.takes(q):
        found = begun or [torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)]
        about = (None, None), (runs.tiles, runs.spans, None, runs.sources)
        cpu.backward(q, [k], [v], bias, *about, scale, rows.grad, delta, lse, found, not begun)
        return found
    tables = (runs.tiles, runs.spans, list(runs.sources), list(runs.sizes))
    found = reference.backward(rows.grad, delta, lse, q, [k], [v], bias, *tables, scale)
    if begun:
        return [total.add_(dx) for total, dx in zip(begun, found, strict=True)]
    return [torch.empty_like(x).copy_(dx) for x, dx in zip((q, k, v), found, strict=True)]


# ---- shapes, derivatives, FLOPs ----


@attention.register_fake
def _(q, k, v, real, block, levels, scale):
    return torch.empty_like(q), q.new_empty(q.shape[:2])


def _flops(q, k, v, real, block, levels, *args, **kwargs) -> int:
    rows = [-(-q.shape[1] // (1 << number)) for number in range(levels)]
    return 4 * q.shape[0] * q.shape[2] * (3 * block * rows[0] + 3 * block // 2 * sum(rows[1:]))


_like = torch.empty_like
derive(attention, attention_backward, "attend_levels", of=(0, 1, 2), behind=4, empty=_like, flops=_flops)
