"""Attention over sampled graphs on a CPU: each row by the route it came for.

Rows that come as a list run through the loops of the edge room, linear in the edges. Rows that come as bits have their
scores in tiles of all pairs, everything else by the edges.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.edges import cpu as edges
from subquad.kernels.edges import loops
from subquad.kernels.edges.cpu import Transposed, array
from subquad.kernels.graphs import mask_route, tiles
from subquad.kernels.graphs.reference import NEEDS_MASK
from subquad.kernels.operators import in_float32
from subquad.kernels.parallel import BYTES, launch, run_rows

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
        parts.append(mask_route.backward(*tensors, mask, *random, causal, reach))
    elif mask.numel():
        parts.append(_tile_backward(*tensors, mask, *random, ste, reach, gated))
    if indices.numel() or not parts:
        parts.append(_list_backward(*tensors, indptr, indices, *random, ste, reach, gated))
    return tuple(sum(grads[1:], grads[0]) for grads in zip(*parts, strict=True))


# ---- rows that come as a list -------------------------------------------------------------------------------


def _list_forward(q, k, v, indptr, indices, key_mask, seed, scale, dropout) -> Tensor:
    """Its edges lead to real keys only: the key mask is for the dropout."""
    edges.check_list(indptr, indices, k.shape[2])
    out = q.new_empty(*q.shape[:3], v.shape[3])
    x, y, u, ptr, keys = map(array, (q, k, v, indptr, indices))
    dropped = edges.drop(seed, dropout, key_mask, q.shape[0], q.shape[2], k.shape[2])
    settings = (edges.places(q.shape[1], q.shape[1], None), dropped, x.dtype.type(scale), array(out))
    run_rows(loops.attention_kernel, x.shape, x, y, u, (ptr, keys, 1), *settings)
    return out


def _list_backward(
    grad, q, k, v, w, z, indptr, indices, key_mask, seed, scale, dropout, ste, reach, gated
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dw, dz. Some graphs at a time: numbers per edge stay small, and their pages are used again."""
    if gated and ste == "difference":
        raise NotImplementedError(NEEDS_MASK)
    grads = [x.new_empty(x.shape) for x in (q, k, v)]  # the loops write every row
    grads += [x.new_empty(x.shape) if gated else x.new_zeros(x.shape) for x in (w, z)]
    rows = [array(x) for x in (grad, q, k, v, w, z, *grads)]
    dropped = edges.drop(seed, dropout, key_mask, q.shape[0], q.shape[2], k.shape[2])
    for t, e in _groups(indptr):
        graphs = ((indptr[t] - e.start).numpy(), indices[e].numpy(), 1)
        by_key = Transposed.of(*graphs, k.shape[2])
        do, x, y, u, a, b, dx, dy, du, da, db = (rows_of_all[t] for rows_of_all in rows)
        where = edges.places(q.shape[1], q.shape[1], None, t.start)
        credit = np.empty((1, len(graphs[1]) * gated), x.dtype)
        chosen = (CREDIT[ste] if gated else 0, reach, credit)
        edges.backward(do, x, y, u, graphs, by_key, where, dropped, scale, (dx, dy, du), chosen)
        if gated:
            run_rows(loops.sum_kernel, a.shape, credit, b, graphs, 1, 1, da)
            run_rows(loops.sum_kernel, b.shape, by_key.moved(credit), a, by_key.graphs, 1, 1, db)
    return tuple(grads)


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
    x, y, u = map(_rows, (q, k, v))
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
    do, x, y, u, a, b = map(_rows, (grad, q, k, v, w, z))
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


def _rows(x: Tensor) -> Tensor:
    """(B, H, n, d) → (B·H, n, d), contiguous, d filled up with zeros to a multiple of the lanes."""
    x = x.detach().flatten(0, 1)
    return F.pad(x, (0, -x.shape[2] % (BYTES // x.itemsize))).contiguous()


def _like(x: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_rows`."""
    return x[..., : shape[3]].contiguous().view(shape)


def _across(x: Tensor) -> np.ndarray:
    """(g, m, d) → (g, tiles, d, 64): keys tile by tile, transposed."""
    x = F.pad(x, (0, 0, 0, -x.shape[1] % tiles.KEYS))
    return x.unflatten(1, (-1, tiles.KEYS)).mT.contiguous().numpy()


def _words(mask: Tensor, x: Tensor, y: Tensor) -> np.ndarray:
    """The packed mask as words, (g, n, ⌈m / 64⌉) uint64."""
    bits = mask.view(len(x), x.shape[1], -(-y.shape[1] // 8))
    return F.pad(bits, (0, -bits.shape[2] % 8)).contiguous().numpy().view(np.uint64)
