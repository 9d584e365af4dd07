"""Attention over sampled graphs on a CPU: each row by the route it came for.

Rows that come as a list run through the loops of the edge room, linear in the edges. Rows that come as bits have their
scores in tiles of all pairs, everything else by the edges.
"""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.core.hashing import chance, halves, stream
from subquad.kernels.edges import cpu as edges
from subquad.kernels.edges import loops
from subquad.kernels.edges.cpu import Transposed, array, head_rows, room
from subquad.kernels.graphs import tiles
from subquad.kernels.graphs.reference import NEEDS_MASK, REST, settled_to_zero
from subquad.kernels.masks import blocks, product, scratch, unpack
from subquad.kernels.operators import in_float32
from subquad.kernels.parallel import cut, exp, inline, kernel, launch, run, run_rows

GROUP = 2**21  # edges of the graphs that are differentiated together: buffers of 8 MB
CREDIT = {"pre": loops.PRE, "published": loops.PUBLISHED}


@in_float32
def attention(q, k, v, w, z, indptr, indices, mask, key_mask, seed, scale, dropout, ste, causal, reach) -> Tensor:
    random = (key_mask, seed, scale, dropout)
    parts = [_tile_forward(q, k, v, mask, *random)] if mask.numel() else []
    if indices.numel() or not parts:
        parts.append(_list_forward(q, k, v, indptr, indices, *random))
    return sum(parts[1:], parts[0])


@in_float32
def attention_backward(
    grad, q, k, v, w, z, indptr, indices, mask, key_mask, seed, scale, dropout, ste, causal, reach, gated
) -> tuple[Tensor, ...]:
    tensors, random, parts = (grad, q, k, v, w, z), (key_mask, seed, scale, dropout), []
    if mask.numel() and gated and ste == "difference":  # a gradient for every pair
        parts.append(_mask_backward(*tensors, mask, *random, causal, reach))
    elif mask.numel():
        parts.append(_tile_backward(*tensors, mask, *random, ste, reach, gated))
    if indices.numel() or not parts:
        parts.append(_list_backward(*tensors, indptr, indices, *random, ste, reach, gated))
    return tuple(sum(grads[1:], grads[0]) for grads in zip(*parts, strict=True))


# ---- rows that come as a list -------------------------------------------------------------------------------


def _list_forward(q, k, v, indptr, indices, key_mask, seed, scale, dropout) -> Tensor:
    """Its edges lead to real keys only: the key mask is for the dropout."""
    edges.check_list(indptr, indices, k.shape[2])
    out = room(v, *q.shape[:3])
    x, y, u, ptr, keys = map(array, (q, k, v, indptr, indices))
    dropped = edges.drop(seed, dropout, key_mask, q.shape[0], q.shape[2], k.shape[2])
    settings = (edges.places(q.shape[1], q.shape[1], None), dropped, x.dtype.type(scale), array(out))
    run_rows(loops.attention_kernel, x.shape, x, y, u, (ptr, keys, 1), *settings)
    return cut(out, v.shape[3])


def _list_backward(
    grad, q, k, v, w, z, indptr, indices, key_mask, seed, scale, dropout, ste, reach, gated
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dw, dz. Some graphs at a time: numbers per edge stay small, and their pages are used again."""
    if gated and ste == "difference":
        raise NotImplementedError(NEEDS_MASK)
    given = (q, k, v, w, z)
    grads = [room(x, *x.shape[:3]) for x in given]  # the loops write every row
    if not gated:
        grads[3:] = [dx.zero_() for dx in grads[3:]]
    arrays = [array(x) for x in (grad, *given, *grads)]
    dropped = edges.drop(seed, dropout, key_mask, q.shape[0], q.shape[2], k.shape[2])
    for t, e in _groups(indptr):
        graphs = ((indptr[t] - e.start).numpy(), indices[e].numpy(), 1)
        by_key = Transposed.of(*graphs, k.shape[2])
        do, x, y, u, a, b, dx, dy, du, da, db = (x[t] for x in arrays)
        where = edges.places(q.shape[1], q.shape[1], None, t.start)
        credit = np.empty((1, len(graphs[1]) * gated), x.dtype)
        chosen = (CREDIT[ste] if gated else 0, reach, credit)
        edges.backward(do, x, y, u, graphs, by_key, where, dropped, scale, (dx, dy, du), chosen)
        if gated:
            run_rows(loops.sum_kernel, a.shape, credit, b, graphs, 1, 1, da)
            run_rows(loops.sum_kernel, b.shape, by_key.moved(credit), a, by_key.graphs, 1, 1, db)
    return tuple(cut(dx, x.shape[3]) for dx, x in zip(grads, given, strict=True))


def _groups(indptr: Tensor) -> Iterator[tuple[slice, slice]]:
    """Consecutive graphs with about GROUP edges together, at least one: which graphs, which edges."""
    ends, first = indptr[:, -1].tolist(), 0
    starts = [0, *ends[:-1]]
    for last in range(1, len(ends) + 1):
        if last == len(ends) or ends[last] - starts[first] > GROUP:
            yield slice(first, last), slice(starts[first], ends[last - 1])
            first = last


# ---- rows that come as bits ---------------------------------------------------------------------------------


def _tile_forward(q, k, v, mask, key_mask, seed, scale, dropout) -> Tensor:
    x, y, u = map(head_rows, (q, k, v))
    out = u.new_empty(len(x), x.shape[1], u.shape[2])
    words = _words(mask, x, y)
    dropped = edges.drop(seed, dropout, key_mask, q.shape[0], q.shape[2], k.shape[2])
    with launch() as workers:
        tiles.attention_kernel(
            workers, len(x) * -(-x.shape[1] // tiles.ROWS), x.numpy(), _across(y), u.numpy(), words, q.shape[1],
            dropped, scale, out.numpy(),
        )  # fmt: skip
    return _like(out, q.shape[:3] + v.shape[3:])


def _tile_backward(grad, q, k, v, w, z, mask, key_mask, seed, scale, dropout, ste, reach, gated) -> tuple[Tensor, ...]:
    """dq, dk, dv, dw, dz; ste=difference only where p needs no gradient (`gated` False)."""
    do, x, y, u, a, b = map(head_rows, (grad, q, k, v, w, z))
    words = _words(mask, x, y)
    dropped = edges.drop(seed, dropout, key_mask, q.shape[0], q.shape[2], k.shape[2])
    row_grads = [torch.zeros_like(r) for r in (x, a)]
    with launch() as workers:
        splits = min(-(-2 * workers // len(x)), -(-x.shape[1] // tiles.ROWS)) if len(x) < workers else 1
        key_grads = [r.new_zeros(len(r) * splits, *r.shape[1:]) for r in (y, u, b)]
        keys = (_across(y), _across(u), y.numpy(), b.numpy())
        tiles.backward_kernel(
            workers, len(x) * splits, splits, do.numpy(), x.numpy(), a.numpy(), keys, words, q.shape[1], dropped,
            scale, CREDIT[ste] if gated else 0, reach, tuple(r.numpy() for r in row_grads),
            tuple(r.numpy() for r in key_grads),
        )  # fmt: skip
    dk, dv, dz = (r if splits == 1 else r.unflatten(0, (-1, splits)).sum(1) for r in key_grads)
    dq, dw = row_grads
    return tuple(_like(r, like.shape) for r, like in zip((dq, dk, dv, dw, dz), (q, k, v, w, z), strict=True))


def _like(x: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `head_rows`."""
    return cut(x, shape[3]).view(shape)


def _across(x: Tensor) -> np.ndarray:
    """(g, m, d) → (g, tiles, d, 64): keys tile by tile, transposed."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % tiles.KEYS))
    return x.unflatten(1, (-1, tiles.KEYS)).mT.contiguous().numpy()


def _words(mask: Tensor, x: Tensor, y: Tensor) -> np.ndarray:
    """The packed mask as words, (g, n, ⌈m / 64⌉) uint64."""
    bits = mask.view(len(x), x.shape[1], -(-y.shape[1] // 8))
    return F.pad(bits, (0, -bits.shape[2] % 8)).contiguous().numpy().view(np.uint64)


# ---- all pairs under a mask, for the gradient of `difference` -----------------------------------------------


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
    edges, one, rest = edge.sum(), row.dtype.type(1), row.dtype.type(REST)
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


def _mask_backward(grad, q, k, v, w, z, mask, key_mask, seed, scale, dropout, causal, reach) -> tuple[Tensor, ...]:
    """dq, dk, dv, dw, dz: a gradient of p for all pairs, a block at a time. Seven matrix products, two of which carry
    the gradient of p, and one fused kernel over the block while it is in the cache.
    """
    grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, w, z)]
    do, x, y, u, a, b = _flat(grad, q, k, v, w, z)
    dx, dy, du, da, db = _flat(*grads)
    bits = mask.numpy().reshape(len(x), x.shape[1], -1)  # (B·H, n, ⌈m / 8⌉)
    drop = edges.drop(seed, dropout, key_mask, q.shape[0], q.shape[2], k.shape[2])
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
