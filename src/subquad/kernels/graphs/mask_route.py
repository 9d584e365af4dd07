"""The backward pass of ste=difference on a CPU: a gradient of p for all pairs, a block at a time.

Seven matrix products, two of which carry the gradient of p, and one fused kernel over the block while it is in the
cache. No n × m matrix is kept but the mask, one bit per pair.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.core.hashing import chance, halves, stream
from subquad.kernels.edges.cpu import drop as dropout_of
from subquad.kernels.graphs.reference import REST, settled_to_zero
from subquad.kernels.masks import blocks, product, scratch, unpack
from subquad.kernels.parallel import exp, inline, kernel, run

_REST = REST


@inline
def _factors(drop, instance, heads, row, width, like):
    """What dropout multiplies a row's weights with; empty without dropout."""
    seed, rate, numbers, columns = drop
    if rate == 0:
        return np.empty(0, like.dtype)
    b, kept = instance // heads, like.dtype.type(1 / (1 - rate))
    low, high = halves(stream(seed, instance, numbers[b, row]))
    column, limit, nothing = columns[b], np.float32(rate), like.dtype.type(0)
    factors = np.empty(width, like.dtype)
    for j in range(width):
        factors[j] = kept if chance(low, high, column[j]) >= limit else nothing
    return factors


@inline
def _backward_row(row, grad, edge, drop, scale, gate):
    nothing = row.dtype.type(-np.inf)
    top, total, delta = nothing, row.dtype.type(0), row.dtype.type(0)
    for j in range(row.size):
        row[j] *= scale
        gate[j] = row[j] if edge[j] else nothing
    for j in range(row.size):
        top = max(top, gate[j])
    if top == nothing:
        for j in range(row.size):  # any edge would be all that the row has
            gate[j] = grad[j]
        for j in range(drop.size):
            gate[j] *= drop[j]
        row[:], grad[:] = 0, 0
        return
    for j in range(row.size):
        gate[j] = exp(gate[j] - top)
    for j in range(row.size):
        total += gate[j]
    for j in range(drop.size):
        grad[j] *= drop[j]
    for j in range(row.size):
        delta += gate[j] * grad[j]
    delta /= total
    edges, one, rest = edge.sum(), row.dtype.type(1), row.dtype.type(_REST)
    for j in range(row.size):
        a = gate[j] / total
        ds = a * (grad[j] - delta)
        alone = edge[j] and edges == 1  # without it nothing is left: out = 0
        gate[j] = grad[j] if alone else _edge_weight(a, edge[j], row[j], top, total, one, rest) * (grad[j] - delta)
        row[j] = ds * scale
        grad[j] = a
    for j in range(drop.size):
        grad[j] *= drop[j]


@inline
def _edge_weight(a, edge, s, top, total, one, rest):
    """How far an edge moves the output along v_j - out: r / (1 - r) where it is there, r / (1 + r) where it is not."""
    if edge:
        return a / max(one - a, rest)
    if s > top:
        return one / (one + total * exp(top - s))
    r = exp(s - top) / total
    return r / (one + r)


@kernel
def _softmax_backward(s, dp, bits, scale, drop, first, heads, first_row, g):
    """q·k and dout·v become the weights of dq, dk (ds · scale) and of dv (A); g becomes the gradient of p."""
    for task in numba.prange(s.shape[0] * s.shape[1]):
        t, i = task // s.shape[1], task % s.shape[1]
        factors = _factors(drop, first + t, heads, first_row + i, s.shape[2], s)
        _backward_row(s[t, i], dp[t, i], unpack(bits[t, i]), factors, scale, g[t, i])


def _flat(*tensors: Tensor) -> list[Tensor]:
    return [x.flatten(0, 1) for x in tensors]  # (B, H, n, d) → (B·H, n, d)


def backward(grad, q, k, v, w, z, mask, key_mask, seed, scale, dropout, causal, reach) -> tuple[Tensor, ...]:
    """dq, dk, dv, dw, dz."""
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, w, z)]
    do, x, y, u, a, b = _flat(grad, q, k, v, w, z)
    dx, dy, du, da, db = _flat(*grads)
    bits = mask.numpy().reshape(len(x), x.shape[1], -1)  # (B·H, n, ⌈m / 8⌉)
    drop = dropout_of(seed, dropout, key_mask, q.shape[0], q.shape[2], k.shape[2])
    buffers = [scratch(q, len(x), x.shape[1], y.shape[1]) for _ in range(3)]
    number = np.dtype(str(q.dtype).removeprefix("torch.")).type
    for t, rows, keys in blocks(len(x), x.shape[1], y.shape[1], causal):
        s = product(x[t, rows], y[t, keys].mT, buffers[0])  # (g, rows, keys)
        dp = product(do[t, rows], u[t, keys].mT, buffers[1])
        g = buffers[2][: s.numel()].view_as(s)
        where = (number(scale), drop, t.start, q.shape[1], rows.start)
        run(_softmax_backward, s.numpy(), dp.numpy(), bits[t, rows], *where, g.numpy())
        dx[t, rows] = torch.matmul(s, y[t, keys])
        dy[t, keys].baddbmm_(s.mT, x[t, rows])
        du[t, keys].baddbmm_(dp.mT, do[t, rows])
        g = settled_to_zero(g, causal, reach, rows.start)
        da[t, rows] = torch.matmul(g, b[t, keys])
        db[t, keys].baddbmm_(g.mT, a[t, rows])
    return tuple(grads)
