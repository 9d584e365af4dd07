"""`span_pool`: the maximum or the mean of every span of a sequence, padding and sinks left out.

One operator for every device, in whole-tensor steps on views: nothing is padded or copied where nothing is missing.
On a CPU the gradient is a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels import devices, parallel
from subquad.kernels.operators import Eager, derive


def span_pool(
    x: Tensor, size: int, *, pool: str, key_mask: Tensor | None, lengths: Tensor | None, skip: int = 0
) -> Tensor:
    """x (B, H, n, d) → (B, H, ⌈n/size⌉ + 1, d): span a holds the tokens a·size … of its row, the first `skip` left out.

    key_mask bool (B, n), lengths (B,): what exists. A span without members pools to 0. The last place belongs to no
    span: it keeps the size above 1, which torch would take for a special case when a graph is exported for any length.
    """
    return _eager_pool(x, key_mask, lengths, size, skip, pool == "max")


def spans_with_members(key_mask: Tensor, size: int, skip: int = 0) -> Tensor:
    """Which spans have a member: (B, n) → bool (B, 1, ⌈n/size⌉ + 1); the place of no span counts as one that has."""
    n = key_mask.shape[1]
    place = torch.arange(n, device=key_mask.device)
    before = F.pad((key_mask & (place >= skip)).cumsum(1), (1, 0))  # (B, n + 1): members before each place
    start = torch.arange(-(-n // size) + 1, device=key_mask.device) * size
    some = before[:, (start + size).clamp(max=n)] > before[:, start.clamp(max=n)]
    return (some | (start >= n))[:, None]


class _Run(NamedTuple):
    """Consecutive spans of equal length in some rows of the batch."""

    rows: slice
    spans: slice
    start: int
    length: int

    def members(self, x: Tensor) -> Tensor:
        """(B, H, n, d) → a view (b, H, spans, length, d)."""
        count = self.spans.stop - self.spans.start
        return x[self.rows, :, self.start : self.start + count * self.length].unflatten(2, (count, self.length))


def _runs(batch: int, n: int, lengths: Tensor | None, size: int, skip: int) -> Iterator[_Run]:
    sizes, first = [n] * batch if lengths is None else lengths.tolist(), 0
    for b in range(1, batch + 1):
        if b < batch and sizes[b] == sizes[first]:
            continue
        rows, length, whole = slice(first, b), sizes[first], -(-skip // size)
        first, full = b, length // size
        cut = min(length, whole * size)
        if cut > skip:  # a span that begins with what is left out
            yield _Run(rows, slice(whole - 1, whole), skip, cut - skip)
        if full > whole:
            yield _Run(rows, slice(whole, full), whole * size, size)
        if length % size and full >= whole:
            yield _Run(rows, slice(full, full + 1), full * size, length % size)


def _by_mask(x: Tensor, key_mask: Tensor | None, lengths: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """On a GPU what exists is a mask alone: to read the lengths would be to wait for it."""
    if lengths is None or devices.is_host(x):
        return key_mask, lengths
    inside = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
    return inside if key_mask is None else inside & key_mask, None


def _exists(run: _Run, key_mask: Tensor | None) -> Tensor | None:
    """Which members of a run exist, (b, 1, spans, length, 1); None = all of them."""
    if key_mask is None:
        return None
    real = run.members(key_mask[:, None, :, None])
    everyone = devices.is_host(real) and bool(real.all())  # a GPU would have to be waited for
    return None if everyone else real


@torch.library.custom_op("subquad::span_pool", mutates_args=())
def _pool(x: Tensor, key_mask: Tensor | None, lengths: Tensor | None, size: int, skip: int, is_max: bool) -> Tensor:
    key_mask, lengths = _by_mask(x, key_mask, lengths)
    out = x.new_zeros(x.shape[0], x.shape[1], -(-x.shape[2] // size) + 1, x.shape[3])
    for run in _runs(len(x), x.shape[2], lengths, size, skip):
        members, real = run.members(x), _exists(run, key_mask)
        if is_max:
            top = (members if real is None else members.masked_fill(~real, -torch.inf)).amax(3)
            pooled = top if real is None else top.masked_fill(~real.any(3), 0)
        elif real is None:
            pooled = members.mean(3)
        else:
            pooled = members.masked_fill(~real, 0).sum(3) / real.sum(3).clamp(min=1)
        out[run.rows, :, run.spans] = pooled
    return out


@torch.library.custom_op("subquad::span_pool_backward", mutates_args=())
def _pool_backward(
    grad: Tensor,
    x: Tensor,
    out: Tensor,
    key_mask: Tensor | None,
    lengths: Tensor | None,
    size: int,
    skip: int,
    is_max: bool,
) -> Tensor:
    """A maximum pays the members that have it, in equal shares; a mean pays all."""
    key_mask, lengths = _by_mask(x, key_mask, lengths)
    dx = x.new_zeros(x.shape)
    for run in _runs(len(x), x.shape[2], lengths, size, skip):
        members, real = run.members(x), _exists(run, key_mask)
        g = grad[run.rows, :, run.spans][:, :, :, None]  # (b, H, spans, 1, d)
        if is_max:
            pays = members == out[run.rows, :, run.spans][:, :, :, None]
            pays = pays if real is None else pays & real
            shares = g / pays.sum(3, keepdim=True).clamp(min=1)
            run.members(dx).copy_(shares * pays)
        else:
            count = run.length if real is None else real.sum(3, keepdim=True).clamp(min=1)
            run.members(dx).copy_((g / count).expand(members.shape) if real is None else g / count * real)
    return dx


@_pool.register_fake
def _(x, key_mask, lengths, size, skip, is_max):
    return x.new_empty(x.shape[0], x.shape[1], -(-x.shape[2] // size) + 1, x.shape[3])


@_pool_backward.register_kernel("cpu")
def _cpu_backward(grad, x, out, key_mask, lengths, size, skip, is_max) -> Tensor:
    if x.dtype not in (torch.float32, torch.float64):  # Numba has no half precision
        return _pool_backward._init_fn(grad, x, out, key_mask, lengths, size, skip, is_max)
    grad, x, out = (t.contiguous() for t in (grad, x, out))
    dx = torch.empty_like(x)
    ends = np.full(len(x), x.shape[2]) if lengths is None else lengths.numpy()
    real = np.zeros((1, 0), dtype=bool) if key_mask is None else key_mask.numpy()
    parallel.run(_backward_kernel, *(t.numpy() for t in (grad, x, out, dx)), real, ends, size, skip, is_max)
    return dx


@parallel.kernel
def _backward_kernel(grad, x, out, dx, real, ends, size, skip, is_max):
    """Two passes over each span while it is in the cache."""
    batch, heads, n, width = x.shape
    spans = -(-n // size)
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for task in numba.prange(batch * heads * spans):
        b, h, a = task // (heads * spans), task // spans % heads, task % spans
        count = np.zeros(width, x.dtype)  # who shares the gradient of a feature
        first, last = a * size, min(a * size + size, n)
        for i in range(first, last):
            if i >= skip and i < ends[b] and (real.shape[1] == 0 or real[b, i]):
                for t in range(width):
                    count[t] += one if not is_max or x[b, h, i, t] == out[b, h, a, t] else zero
        for t in range(width):
            count[t] = grad[b, h, a, t] / max(count[t], one)
        for i in range(first, last):
            if i >= skip and i < ends[b] and (real.shape[1] == 0 or real[b, i]):
                for t in range(width):
                    dx[b, h, i, t] = count[t] if not is_max or x[b, h, i, t] == out[b, h, a, t] else zero
            else:
                dx[b, h, i] = zero


_derivative = derive(_pool, _pool_backward, "span_pool", of=(0,), behind=1, call=Eager(_pool_backward, _cpu_backward))
_eager_pool = Eager(_pool, _pool._init_fn, *_derivative)
