"""Maxima along a dimension: running ones, and those of all others.

torch.cummax keeps indices and runs one element at a time on a CPU. Here whole slices are worked on, the same code on
every device; on a CPU `pools.lines` takes one pass over memory.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from subquad.kernels.operators import derive


@torch.library.custom_op("subquad::running_max", mutates_args=())
def running_max(x: Tensor, dim: int, backwards: bool) -> Tensor:
    """max(x_0 … x_i) along `dim`, or max(x_i …) backwards."""
    out = x.new_empty(x.shape)
    slices = list(zip(x.unbind(dim), out.unbind(dim), strict=True))
    slices = slices[::-1] if backwards else slices
    slices[0][1].copy_(slices[0][0])
    for (_, before), (here, now) in pairwise(slices):
        torch.maximum(before, here, out=now)
    return out


@running_max.register_fake
def _(x, dim, backwards):
    return x.new_empty(x.shape)


@torch.library.custom_op("subquad::running_max_backward", mutates_args=())
def running_max_backward(grad: Tensor, x: Tensor, out: Tensor, dim: int, backwards: bool) -> Tensor:
    """The gradient of a maximum goes to the element that set it (of equal ones, to the latest)."""
    dx = x.new_empty(x.shape)
    slices = list(zip(*(t.unbind(dim) for t in (grad, x, out, dx)), strict=True))
    pending = torch.zeros_like(slices[0][0])  # what later maxima owe to an element not yet met
    for g, here, top, d in slices if backwards else slices[::-1]:
        pending.add_(g)
        set_here = here == top
        torch.mul(pending, set_here, out=d)
        pending.masked_fill_(set_here, 0)
    return dx


derive(running_max, running_max_backward, "running_max", of=(0,), behind=1)


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
    return out.contiguous(), first, second


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
    dx = x.new_empty(x.shape)
    for here, place in zip(x.unbind(dim), dx.unbind(dim), strict=True):
        torch.mul(for_first, here == first, out=place).addcmul_(for_second, (here == second).to(x.dtype))
    return dx


derive(others_max, others_max_backward, "others_max", of=(0,), behind=1, kept=slice(1, None))
