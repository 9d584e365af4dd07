"""Attention in clusters on a CPU: which kernels take a call."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from subquad.kernels.clusters import cpu_attention, sorted_runs, tiles
from subquad.kernels.parallel import fits

# Arguments behind the tensors: seed, clusters, causal, last_query_only, scale, dropout, chunk, avoid_self
LAST_QUERY_ONLY, DROPOUT, CHUNK, AVOID_SELF = 3, 5, 6, 7


def attention(q, keys, values, order, *rest) -> tuple[Tensor, Tensor]:
    out, lse = room(q, keys, order, rest[2:]).attention(q, keys, values, order, *rest)
    return _like(out, q), lse


def attention_backward(grad, q, keys, values, out, lse, order, *rest) -> list[Tensor]:
    found = room(q, keys, order, rest[2:]).attention_backward(grad, q, keys, values, out, lse, order, *rest)
    return [_like(dx, x) for dx, x in zip(found, (q, *keys, *values), strict=True)]


def _like(found: Tensor, x: Tensor) -> Tensor:
    """In the order of the memory of x: a layer goes on without a copy."""
    laid = torch.empty_like(x)
    return found if found.stride() == laid.stride() else laid.copy_(found)


def room(q: Tensor, keys: list[Tensor], order: Tensor, about: tuple) -> ModuleType:
    """The query's cluster alone as runs of keys; whole clusters of one round in tiles of scores; others in products."""
    if about[DROPOUT] or not fits(q):
        return tiles
    if len(keys) == 1 and not about[LAST_QUERY_ONLY]:
        return sorted_runs
    return tiles if order.dim() > 1 or about[CHUNK] or about[AVOID_SELF] else cpu_attention
