"""Attention in clusters on a GPU: whole clusters by torch's kernels where these can, the rest in tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.clusters import aten, tiles

# Arguments behind the tensors: seed, clusters, causal, last_query_only, scale, dropout, chunk, avoid_self
DROPOUT, CHUNK = 5, 6


def attention(q, keys, values, order, cluster, real, *about) -> tuple[Tensor, Tensor]:
    return _room(q, about).attention(q, keys, values, order, cluster, real, *about)


def attention_backward(grad, q, keys, values, out, lse, order, cluster, real, *about) -> list[Tensor]:
    return _room(q, about).attention_backward(grad, q, keys, values, out, lse, order, cluster, real, *about)


def _room(q: Tensor, about: tuple):
    """Chunks are tiles of a known size; whole clusters may be of any."""
    return tiles if about[CHUNK] or not _torch_takes(q.dtype, q.shape[2], about[DROPOUT]) else aten


def reads_sizes(dtype: torch.dtype, width: int, dropout: float, length: int | None) -> bool:
    """Does the host read the sizes of whole clusters, to make tiles of them? Torch's kernels take them as they are, and
    tiles of short sequences have all pairs.
    """
    return not _torch_takes(dtype, width, dropout) and not devices.is_short(length)


def _torch_takes(dtype: torch.dtype, width: int, dropout: float) -> bool:
    return devices.route("clusters", dtype, width, dropout=dropout).impl == "aten"
