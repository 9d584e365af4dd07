"""`binary_nodes`: all aligned binary blocks with an even number pooled, a Fenwick tree as long as the sequence.

Place p has the block of 2^l tokens that ends with token p, 2^l the largest power of two that divides p+1. It is made of
the token itself and of the nodes at p-1, p-2, p-4 … p-2^(l-1): linear time in all. Sums on a CPU are one pass (maxima:
`node_max`); elsewhere the even places have the tokens themselves, and the odd ones the nodes of the sequence of pairs.
"""

from __future__ import annotations

import numba
import torch
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.operators import no_second_derivative
from subquad.kernels.parallel import kernel, run


def binary_nodes(x: Tensor, kind: str) -> Tensor:
    """x (B, H, n, d), kind "max" or "sum" → (B, H, n, d)."""
    if kind == "sum" and devices.is_host(x) and x.dtype in (torch.float32, torch.float64):
        return _nodes(x)
    return nodes_of_pairs(x, kind)


def nodes_of_pairs(x: Tensor, kind: str) -> Tensor:
    """The same on any device, in steps over whole tensors."""
    pairs = x.shape[2] // 2
    if pairs == 0:
        return x
    left, right = x[:, :, 0 : 2 * pairs : 2], x[:, :, 1::2]  # (B, H, n // 2, d)
    above = nodes_of_pairs(torch.maximum(left, right) if kind == "max" else left + right, kind)
    interleaved = torch.stack((left, above), 3).flatten(2, 3)
    return interleaved if 2 * pairs == x.shape[2] else torch.cat((interleaved, x[:, :, -1:]), 2)


@torch.library.custom_op("subquad::binary_nodes", mutates_args=(), device_types="cpu")
def _nodes(x: Tensor) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    run(_pass, out.flatten(0, 1).numpy())
    return out


@torch.library.custom_op("subquad::binary_nodes_backward", mutates_args=(), device_types="cpu")
def _nodes_backward(grad: Tensor) -> Tensor:
    dx = grad.clone(memory_format=torch.contiguous_format)
    run(_pass_backward, dx.flatten(0, 1).numpy())
    return dx


@_nodes.register_fake
@_nodes_backward.register_fake
def _(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _gradient(ctx, grad):
    return _nodes_backward(grad)


_nodes.register_autograd(_gradient)
_nodes_backward.register_autograd(no_second_derivative("binary_nodes"))


@kernel
def _pass(out):
    """out begins as the tokens."""
    instances, n, width = out.shape
    for g in numba.prange(instances):
        for p in range(n):
            back = 1
            while (p + 1) & back == 0:  # the nodes at p-1, p-2, p-4 … are its left halves, from small to large
                for t in range(width):
                    out[g, p, t] += out[g, p - back, t]
                back *= 2


@kernel
def _pass_backward(dx):
    """dx begins as the gradient of the nodes, which they hand to their halves, from the last node to the first."""
    instances, n, width = dx.shape
    for g in numba.prange(instances):
        for p in range(n - 1, -1, -1):
            back = 1
            while (p + 1) & back == 0:
                for t in range(width):
                    dx[g, p - back, t] += dx[g, p, t]
                back *= 2
