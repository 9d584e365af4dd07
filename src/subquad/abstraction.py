"""Abstractions: how a group of tokens becomes one query and one key (Combiner, section 3.2).

    max             q_Ω = max_{j∈Ω} q_j          k_Ω = max_{j∈Ω} k_j          elementwise
    mean            the same with the mean
    deepsets-max    q_Ω = max_{j∈Ω} ReLU(q_j W_q)   k_Ω = max_{j∈Ω} ReLU(k_j W_k)
    deepsets-mean   the same with the mean          W_q, W_k (d, d), shared by the heads

Padding is no member: it is left out of every maximum, sum and count, and what has no member pools to 0 (the
caller marks it as absent). A pool is a shape of reduction, one function each (spans, prefixes, all others, binary
nodes), that takes `kind` "max" or "sum"; `pooled` runs it and looks after padding and counts.
Sums and maxima are taken in the dtype of x: give it float32 for half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["max", "mean", "deepsets-max", "deepsets-mean"]
Reduction = Callable[[Tensor, str], Tensor]


class Abstraction(nn.Module):
    """What is pooled (`features`) and how (`pool`); with DeepSets the two matrices are its parameters."""

    def __init__(self, kind: Kind, head_dim: int) -> None:
        super().__init__()
        self.kind = kind
        self.pool: Literal["max", "mean"] = "max" if kind.endswith("max") else "mean"
        if kind.startswith("deepsets"):
            std = (2 / head_dim) ** 0.5  # keeps the size of x through the ReLU
            self.query_weight = nn.Parameter(torch.empty(head_dim, head_dim).normal_(std=std))
            self.key_weight = nn.Parameter(torch.empty(head_dim, head_dim).normal_(std=std))

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What the groups pool of the queries and of the keys, (B, H, n, d) each."""
        if not self.kind.startswith("deepsets"):
            return q, k
        return F.relu(q @ self.query_weight.to(q.dtype)), F.relu(k @ self.key_weight.to(k.dtype))

    def extra_repr(self) -> str:
        return self.kind


def pooled(x: Tensor, pool: str, exists: Tensor | None, reduce: Reduction) -> Tensor:
    """Pool the members that exist. x (B, H, n, d) or (B, H, rows, cols, d); exists broadcasts to x, last dim 1.

    `exists=None`: everything exists and no group is empty.
    """
    if pool == "max":
        if exists is None:
            return reduce(x, "max")
        top = reduce(x.masked_fill(~exists, -torch.inf), "max")
        return top.masked_fill(top == -torch.inf, 0)  # nobody there
    if exists is None:
        exists = torch.ones((1, 1, *x.shape[2:-1], 1), dtype=torch.bool, device=x.device)
    count = reduce(exists.to(x.dtype), "sum").clamp(min=1)
    return reduce(x.masked_fill(~exists, 0), "sum") / count


def anyone(exists: Tensor, reduce: Reduction) -> Tensor:
    """Which groups have a member at all: bool, shaped like the pool."""
    return reduce(exists.float(), "max") > 0


# ---- shapes of reduction: (x, "max" or "sum") → reduced x ---------------------------------------------------


def spans(size: int) -> Reduction:
    """Consecutive spans of `size` along dim 2, the last one possibly shorter: (B, H, n, d) → (B, H, ⌈n/size⌉, d)."""

    def reduce(x: Tensor, kind: str) -> Tensor:
        over = torch.amax if kind == "max" else torch.sum
        full = x.shape[2] // size * size
        pieces = []
        if full:
            pieces.append(over(x[:, :, :full].unflatten(2, (-1, size)), 3))  # (B, H, n // size, d)
        if full < x.shape[2]:
            pieces.append(over(x[:, :, full:], 2, keepdim=True))  # (B, H, 1, d)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)

    return reduce


def prefixes(dim: int, *, backwards: bool = False) -> Reduction:
    """Everything up to and including oneself along `dim` (backwards: from oneself on)."""

    def reduce(x: Tensor, kind: str) -> Tensor:
        if kind == "max":
            return running_max(x, dim, backwards)
        return x.flip(dim).cumsum(dim).flip(dim) if backwards else x.cumsum(dim)

    return reduce


def others(dim: int) -> Reduction:
    """Everything along `dim` except oneself; the maximum of nothing is -inf."""

    def reduce(x: Tensor, kind: str) -> Tensor:
        if kind == "sum":
            return x.sum(dim, keepdim=True) - x
        return others_max(x, dim)[0]

    return reduce


def binary_nodes(x: Tensor, kind: str) -> Tensor:
    """All aligned binary blocks with an even number, in one array as long as x: (B, H, n, d) → (B, H, n, d).

    Place p holds the block of 2^l tokens that ends with token p, where 2^l is the largest power of two that
    divides p+1 (a Fenwick tree). Built in linear time: the even places hold the tokens themselves, the odd ones
    the nodes of the sequence of pairs.
    """
    pairs = x.shape[2] // 2
    if pairs == 0:
        return x
    left, right = x[:, :, 0 : 2 * pairs : 2], x[:, :, 1::2]  # (B, H, n // 2, d)
    above = binary_nodes(torch.maximum(left, right) if kind == "max" else left + right, kind)
    woven = torch.stack((left, above), 3).flatten(2, 3)
    return woven if 2 * pairs == x.shape[2] else torch.cat((woven, x[:, :, -1:]), 2)


# ---- maxima slice by slice ----------------------------------------------------------------------------------
# torch.cummax keeps indices and runs one element at a time on a CPU; whole slices are 50 times faster, and what a
# pass carries from slice to slice stays in the cache.


@torch.library.custom_op("subquad::running_max", mutates_args=())
def running_max(x: Tensor, dim: int, backwards: bool) -> Tensor:
    """max(x_0 … x_i) along `dim`, or max(x_i …) backwards."""
    out = torch.empty_like(x)
    slices = list(zip(x.unbind(dim), out.unbind(dim), strict=True))
    slices = slices[::-1] if backwards else slices
    slices[0][1].copy_(slices[0][0])
    for (_, before), (here, now) in pairwise(slices):
        torch.maximum(before, here, out=now)
    return out


@running_max.register_fake
def _(x, dim, backwards):
    return torch.empty_like(x)


@torch.library.custom_op("subquad::running_max_backward", mutates_args=())
def running_max_backward(grad: Tensor, x: Tensor, out: Tensor, dim: int, backwards: bool) -> Tensor:
    """The gradient of a maximum goes to the element that set it (of equal ones, to the latest)."""
    dx = torch.empty_like(x)
    slices = list(zip(*(t.unbind(dim) for t in (grad, x, out, dx)), strict=True))
    pending = torch.zeros_like(slices[0][0])  # what later maxima owe to an element not yet met
    for g, here, top, d in slices if backwards else slices[::-1]:
        pending.add_(g)
        set_here = here == top
        torch.mul(pending, set_here, out=d)
        pending.masked_fill_(set_here, 0)
    return dx


@running_max_backward.register_fake
def _(grad, x, out, dim, backwards):
    return torch.empty_like(x)


def _save(ctx, inputs, output):
    x, ctx.dim, ctx.backwards = inputs
    ctx.save_for_backward(x, output)


def _running_max_gradient(ctx, grad):
    return running_max_backward(grad, *ctx.saved_tensors, ctx.dim, ctx.backwards), None, None


running_max.register_autograd(_running_max_gradient, setup_context=_save)


@torch.library.custom_op("subquad::others_max", mutates_args=())
def others_max(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum of all others along `dim` (-inf of nobody), and the two largest values (counted twice if equal).

    It is the largest value for everyone but the one who has it, whose others have the second largest.
    """
    slices = x.unbind(dim)
    first = slices[0].clone(memory_format=torch.contiguous_format)
    second, lower = torch.full_like(first, -torch.inf), torch.empty_like(first)
    for here in slices[1:]:
        torch.minimum(first, here, out=lower)
        torch.maximum(second, lower, out=second)
        torch.maximum(first, here, out=first)
    top = first.unsqueeze(dim)
    out = torch.where(x == top, second.unsqueeze(dim), top)
    return out, first, second


@others_max.register_fake
def _(x, dim):
    size = [length for place, length in enumerate(x.shape) if place != dim]
    return x.new_empty(x.shape), x.new_empty(size), x.new_empty(size)


@torch.library.custom_op("subquad::others_max_backward", mutates_args=())
def others_max_backward(grad: Tensor, x: Tensor, first: Tensor, second: Tensor, dim: int) -> Tensor:
    """Everyone's gradient goes to the largest, that of the largest to the second; equal ones share it."""
    shares = [torch.zeros_like(first) for _ in range(4)]  # gradients and numbers of the largest and the second
    for g, here in zip(grad.unbind(dim), x.unbind(dim), strict=True):
        top = here == first
        shares[0].add_(g.masked_fill(top, 0))
        shares[1].add_(g * top)
        shares[2].add_(top)
        shares[3].add_(here == second)
    for_first, for_second = shares[0] / shares[2], shares[1] / shares[3].clamp_(min=1)
    dx = torch.empty_like(x)
    for here, place in zip(x.unbind(dim), dx.unbind(dim), strict=True):
        torch.mul(for_first, here == first, out=place).addcmul_(for_second, (here == second).to(x.dtype))
    return dx


@others_max_backward.register_fake
def _(grad, x, first, second, dim):
    return torch.empty_like(x)


def _save_others(ctx, inputs, output):
    x, ctx.dim = inputs
    ctx.save_for_backward(x, output[1], output[2])


def _others_gradient(ctx, grad, grad_first, grad_second):
    return others_max_backward(grad, *ctx.saved_tensors, ctx.dim), None


others_max.register_autograd(_others_gradient, setup_context=_save_others)
