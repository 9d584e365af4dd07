"""Rows of sampled graphs that come as a list, on a CPU: through the loops of the edge room, linear in the edges."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from subquad.kernels.edges import cpu, loops
from subquad.kernels.edges.cpu import Transposed, array
from subquad.kernels.graphs.reference import NEEDS_MASK
from subquad.kernels.parallel import run_rows

GROUP = 2**21  # edges of the graphs that are differentiated together: buffers of 8 MB
CREDIT = {"pre": loops.PRE, "published": loops.PUBLISHED}


def forward(q, k, v, indptr, indices, key_mask, seed, scale, dropout) -> Tensor:
    """Its edges lead to real keys only: the key mask is for the dropout."""
    cpu.check_list(indptr, indices, k.shape[2])
    out = q.new_empty(*q.shape[:3], v.shape[3])
    x, y, u, ptr, keys = map(array, (q, k, v, indptr, indices))
    dropped = cpu.drop(seed, dropout, key_mask, q.shape[0], q.shape[2], k.shape[2])
    settings = (cpu.places(q.shape[1], q.shape[1], None), dropped, x.dtype.type(scale), array(out))
    run_rows(loops.attention_kernel, x.shape, x, y, u, (ptr, keys, 1), *settings)
    return out


def backward(
    grad, q, k, v, w, z, indptr, indices, key_mask, seed, scale, dropout, ste, reach, gated
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dw, dz. Some graphs at a time: numbers per edge stay small, and their pages are used again."""
    if gated and ste == "difference":
        raise NotImplementedError(NEEDS_MASK)
    grads = [x.new_empty(x.shape) for x in (q, k, v)]  # the loops write every row
    grads += [x.new_empty(x.shape) if gated else x.new_zeros(x.shape) for x in (w, z)]
    rows = [array(x) for x in (grad, q, k, v, w, z, *grads)]
    dropped = cpu.drop(seed, dropout, key_mask, q.shape[0], q.shape[2], k.shape[2])
    for t, e in _groups(indptr):
        graphs = ((indptr[t] - e.start).numpy(), indices[e].numpy(), 1)
        by_key = Transposed.of(*graphs, k.shape[2])
        do, x, y, u, a, b, dx, dy, du, da, db = (rows_of_all[t] for rows_of_all in rows)
        where = cpu.places(q.shape[1], q.shape[1], None, t.start)
        credit = np.empty((1, len(graphs[1]) * gated), x.dtype)
        chosen = (CREDIT[ste] if gated else 0, reach, credit)
        cpu.backward(do, x, y, u, graphs, by_key, where, dropped, scale, (dx, dy, du), chosen)
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
