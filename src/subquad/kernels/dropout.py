"""Dropout for blocks of weights, by counting: see `core.hashing`. The same seed drops the same pairs on every path."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from subquad.core.hashing import chance, chances, halves
from subquad.kernels.parallel import kernel, run


@torch.library.custom_op("subquad::dropout_blocks", mutates_args=())
def dropout_blocks(streams: Tensor, columns: Tensor, dropout: float) -> Tensor:
    """0 where a pair is dropped, 1 / (1 - dropout) where it is kept: float32 (S, R, M).

    streams int64 (S, R): the random streams of the rows (`hashing.streams`); columns int64 (S, M): numbers of the keys.
    """
    return (chances(streams[..., None], columns[:, None]) >= dropout) / (1 - dropout)


@dropout_blocks.register_kernel("cpu")
def _(streams, columns, dropout):
    out = np.empty((*streams.shape, columns.shape[1]), np.float32)
    run(_fill, streams.contiguous().numpy().view(np.uint64), columns.contiguous().numpy(), np.float32(dropout), out)
    return torch.from_numpy(out)


@dropout_blocks.register_fake
def _(streams, columns, dropout):
    return streams.new_empty(*streams.shape, columns.shape[1], dtype=torch.float32)


@kernel
def _fill(streams, columns, dropout, out):
    kept = np.float32(1 / (1 - np.float64(dropout)))
    for task in numba.prange(out.shape[0] * out.shape[1]):
        s, r = task // out.shape[1], task % out.shape[1]
        a, b = halves(streams[s, r])
        row, column = out[s, r], columns[s]
        for j in range(row.size):
            row[j] = kept if chance(a, b, column[j]) >= dropout else np.float32(0)
