"""The operators of the edge room on a CPU: arrays for the loops, in and out.

Scores, sums and transposed sums are each other's derivatives. dk and dv are sums over the transposed list, so that
every row is written by one task: no atomics, no private copies. The backward pass recomputes p from the row maximum. A
stored logsumexp would be cheaper by little and, at logits of 1e4 in float32, wrong in the third digit of p.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from subquad.core.hashing import dropout_seed, ranks
from subquad.kernels.edges import loops
from subquad.kernels.operators import in_float32
from subquad.kernels.parallel import BYTES, cut, filled, launch, run, run_rows

NO_CREDIT = (0, -1, np.empty((1, 0)))


def head_rows(x: Tensor) -> Tensor:
    """(B, H, n, d) → (B·H, n, d), contiguous, d filled up with zeros to whole vectors."""
    return filled(x.detach()).flatten(0, 1).contiguous()


def room(x: Tensor, *shape: int) -> Tensor:
    """Memory for rows as wide as those of x, filled up."""
    lanes = BYTES // x.element_size()
    return x.new_empty(*shape, -(-x.shape[3] // lanes) * lanes)


def array(x: Tensor) -> np.ndarray:
    """Contiguous, tensors of heads as `head_rows`."""
    return (head_rows(x) if x.ndim == 4 else x.detach().contiguous()).numpy()


class Transposed(NamedTuple):
    """A list by key: its graphs, as the loops take them, and where each edge of the list went (E,)."""

    graphs: tuple[np.ndarray, np.ndarray, int]
    slots: np.ndarray

    @classmethod
    def of(cls, indptr: np.ndarray, indices: np.ndarray, share: int, num_keys: int) -> Transposed:
        offsets = np.zeros((len(indptr), num_keys + 1), np.int64)
        queries = np.empty_like(indices)
        slots = np.empty(indices.shape, np.int32 if len(indices) < 2**31 else np.int64)
        run(loops.transpose_kernel, indptr, indices, offsets, queries, slots)
        return cls((offsets, queries, share), slots)

    def moved(self, weights: np.ndarray) -> np.ndarray:
        """Numbers per edge (u, E) in the order of this list."""
        out = np.empty_like(weights)
        with launch() as workers:
            loops.move_kernel(workers, weights, self.slots, out)
        return out


def places(heads: int, key_heads: int, key_mask: Tensor | None, first: int = 0) -> tuple[int, int, int, np.ndarray]:
    """The loops' tuple of this name."""
    real = np.empty((0, 0), np.bool_) if key_mask is None else array(key_mask)
    return heads, heads // key_heads, first, real


def drop(seed: Tensor | None, rate: float, key_mask: Tensor | None, batch: int, n: int, m: int):
    """The loops' tuple of this name."""
    if not rate:
        none = np.empty((1, 0), np.int64)
        return np.uint64(0), 0.0, none, none
    assert seed is not None
    numbers, columns = (array(x) for x in ranks(key_mask, batch, n, m, torch.device("cpu")))
    return np.uint64(int(dropout_seed(seed)) % 2**64), float(rate), numbers, columns


def scores(q: Tensor, k: Tensor, indptr: Tensor, indices: Tensor, share: int, scale: float) -> Tensor:
    check_list(indptr, indices, k.shape[2])
    x, y, ptr, keys = map(array, (q, k, indptr, indices))
    out = np.empty((len(x) // len(ptr), len(keys)), x.dtype)  # (B·H // g, E)
    run_rows(loops.scores_kernel, x.shape, x, y, (ptr, keys, share), len(x) // len(y), x.dtype.type(scale), out)
    return torch.from_numpy(out)


def sums(
    w: Tensor, x: Tensor, indptr: Tensor, indices: Tensor, share: int, heads: int, num_keys: int, transposed: bool
) -> Tensor:
    check_list(indptr, indices, num_keys)
    weights, y, ptr, ends = map(array, (w, x, indptr, indices))
    graphs = (ptr, ends, share)
    if transposed:  # x are queries; `heads` is the number of key heads
        by_key = Transposed.of(*graphs, num_keys)
        weights, graphs = by_key.moved(weights), by_key.graphs
    out = room(x, x.shape[0], heads, graphs[0].shape[1] - 1)
    spread, gather = (1, x.shape[1] // heads) if transposed else (heads // x.shape[1], 1)
    z = array(out)
    run_rows(loops.sum_kernel, z.shape, weights, y, graphs, spread, gather, z)
    return cut(out, x.shape[3])


@in_float32
def attention(
    q: Tensor, k: Tensor, v: Tensor, indptr: Tensor, indices: Tensor, share: int, key_mask: Tensor | None,
    seed: Tensor | None, scale: float, dropout: float,
) -> Tensor:  # fmt: skip
    check_list(indptr, indices, k.shape[2])
    out = room(v, *q.shape[:3])
    x, y, u, ptr, keys = map(array, (q, k, v, indptr, indices))
    where = places(q.shape[1], k.shape[1], key_mask)
    dropped = drop(seed, dropout, key_mask, q.shape[0], q.shape[2], k.shape[2])
    graphs = (ptr, keys, share)
    run_rows(loops.attention_kernel, x.shape, x, y, u, graphs, where, dropped, x.dtype.type(scale), array(out))
    return cut(out, v.shape[3])


@in_float32
def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, indptr: Tensor, indices: Tensor, share: int,
    key_mask: Tensor | None, seed: Tensor | None, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_list(indptr, indices, k.shape[2])
    grads = [room(x, *x.shape[:3]) for x in (q, k, v)]
    graphs = (array(indptr), array(indices), share)
    where = places(q.shape[1], k.shape[1], key_mask)
    dropped = drop(seed, dropout, key_mask, q.shape[0], q.shape[2], k.shape[2])
    arrays = tuple(map(array, (dout, q, k, v)))
    backward(*arrays, graphs, Transposed.of(*graphs, k.shape[2]), where, dropped, scale, tuple(map(array, grads)))
    dq, dk, dv = (cut(dx, x.shape[3]) for dx, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def backward(do, q, k, v, graphs, by_key: Transposed, where, dropped, scale: float, grads, credit=NO_CREDIT) -> None:
    """Fills dq, dk and dv from arrays as in `loops`; `credit` is (mode, reach, array to fill)."""
    dq, dk, dv = grads
    factor, one, group = q.dtype.type(scale), q.dtype.type(1), where[1]
    mode, reach, given = credit
    s, dp = (np.empty((len(q) // len(graphs[0]), len(graphs[1])), q.dtype) for _ in range(2))  # (B·H // g, E)
    run_rows(loops.scores_kernel, q.shape, q, k, graphs, group, factor, s)
    run_rows(loops.scores_kernel, q.shape, do, v, graphs, group, one, dp)
    settings = (q.shape[1], where, dropped, factor, mode, reach, given.astype(q.dtype, copy=False))
    run_rows(loops.softmax_backward_kernel, q.shape, s, dp, graphs, *settings)
    run_rows(loops.sum_kernel, q.shape, s, k, graphs, group, 1, dq)
    run_rows(loops.sum_kernel, k.shape, by_key.moved(s), q, by_key.graphs, 1, group, dk)
    run_rows(loops.sum_kernel, k.shape, by_key.moved(dp), do, by_key.graphs, 1, group, dv)


def check_list(indptr: Tensor, indices: Tensor, num_keys: int) -> None:
    """The loops trust the list with their memory. To ask costs a hundredth of what they do."""
    rising = bool((indptr[1:, 0] == indptr[:-1, -1]).all()) and bool((indptr.diff(dim=1) >= 0).all())
    if not rising or indptr[0, 0] != 0 or indptr[-1, -1] != indices.shape[0]:
        raise ValueError(f"edges.indptr must rise from 0 to the number of edges, {indices.shape[0]}")
    if indices.numel():
        low, high = indices.aminmax()
        if low < 0 or high >= num_keys:
            raise ValueError(f"edges.indices must be in 0 … {num_keys - 1}, got {low} … {high}")
