"""How much a token belongs to each cluster: sigmoid(ReLU(x W + b) M + s), for the queries times the block matrix.

On a CPU the tokens go through in chunks that stay in the cache, and the backward pass makes again what lies between:
of what is as large as all memberships, only these themselves take memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from subquad.kernels.operators import is_plain, without_autocast

CHUNK = 2**18  # memberships of a chunk, of all heads together: 1 MB in float32


def memberships(
    x: Tensor, weight: Tensor, bias: Tensor, into: Tensor, shift: Tensor, block: Tensor | None = None
) -> Tensor:
    """x (B, H, n, d), weight (H, d, d), bias (H, 1, d), into M (H, d, k), shift s (H, 1, k), block (H, k, k) or None
    → (B, H, n, k).

    First derivatives only, where it runs in chunks.
    """
    given = (x, weight, bias, into, shift)
    if not is_plain(given):
        found = _nodes(x @ weight + bias, into, shift)[1]
        return found if block is None else found @ block
    return _Chunked.apply(*given, block)


def _nodes(hidden: Tensor, into: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The layer between (before its ReLU) → itself after it, and the memberships."""
    hidden = hidden.relu()
    return hidden, (hidden @ into + shift).sigmoid()


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, into, shift, block):
        out = x.new_empty(*x.shape[:3], into.shape[2])
        weights = _every(len(x), weight, bias, into, shift, block)
        for rows, some in _chunks(x, into):
            nodes = _between(some, *weights[:4])[1]
            out.flatten(0, 1)[:, rows] = nodes if block is None else torch.bmm(nodes, weights[4])
        ctx.save_for_backward(x, weight, bias, into, shift, block)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        with without_autocast([grad]):
            return _gradients(grad, *ctx.saved_tensors)


def _gradients(grad: Tensor, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    every = _every(len(x), *parameters)
    (weight, bias, into, shift, block), dx = every, torch.empty_like(x, memory_format=torch.contiguous_format)
    sums = [None if p is None else torch.zeros_like(p) for p in every]  # (B·H, …)
    for rows, some in _chunks(x, into):
        hidden, nodes = _between(some, weight, bias, into, shift)
        g = grad[:, :, rows].reshape(nodes.shape)  # (B·H, r, k)
        if block is not None:
            sums[4].baddbmm_(nodes.mT, g)
            g = torch.bmm(g, block.mT)
        g = torch.ops.aten.sigmoid_backward(g, nodes)
        sums[2].baddbmm_(hidden.mT, g)
        sums[3] += g.sum(1, keepdim=True)
        g = torch.ops.aten.threshold_backward(torch.bmm(g, into.mT), hidden, 0)  # (B·H, r, d)
        sums[0].baddbmm_(some.mT, g)
        sums[1] += g.sum(1, keepdim=True)
        dx.flatten(0, 1)[:, rows] = torch.bmm(g, weight.mT)
    return dx, *(None if s is None else s.unflatten(0, (len(x), -1)).sum(0) for s in sums)


def _between(some: Tensor, weight: Tensor, bias: Tensor, into: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden layer (B·H, r, d) and the memberships (B·H, r, k) of a chunk."""
    hidden = torch.baddbmm(bias, some, weight).relu_()
    return hidden, torch.baddbmm(shift, hidden, into).sigmoid_()


def _every(batch: int, *tensors: Tensor | None) -> list:
    """(H, …) → (B·H, …): every instance has its own."""
    return [None if t is None else t.expand(batch, *t.shape).reshape(-1, *t.shape[1:]) for t in tensors]


def _chunks(x: Tensor, into: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some tokens of all instances at a time: which, and (B·H, r, d)."""
    step = max(1, CHUNK // (x.shape[0] * x.shape[1] * into.shape[-1]))
    for first in range(0, x.shape[2], step):
        rows = slice(first, min(x.shape[2], first + step))
        yield rows, x[:, :, rows].reshape(-1, rows.stop - first, x.shape[3])
