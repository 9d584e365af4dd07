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
    """Which pairs are dropped, bool (S, R, M); those that are kept count 1 / (1 - dropout).

    streams int64 (S, R): the random streams of the rows (`hashing.streams`); columns int64 (S, M): numbers of the keys.
    """
    return chances(streams[..., None], columns[:, None]) < dropout


@dropout_blocks.register_kernel("cpu")
def _(streams, columns, dropout):
    out = np.empty((*streams.shape, columns.shape[1]), np.bool_)
    run(_fill, streams.contiguous().numpy().view(np.uint64), columns.contiguous().numpy(), np.float32(dropout), out)
    return torch.from_numpy(out)


@dropout_blocks.register_fake
def _(streams, columns, dropout):
    return streams.new_empty(*streams.shape, columns.shape[1], dtype=torch.bool)


@kernel
def _fill(streams, columns, dropout, out):
    for task in numba.prange(out.shape[0] * out.shape[1]):
        s, r = task // out.shape[1], task % out.shape[1]
        a, b = halves(streams[s, r])
        row, column = out[s, r], columns[s]
        for j in range(row.size):
            row[j] = chance(a, b, column[j]) < dropout
