"""States of all keys where the content decides who is seen: clusters, and blocks that suit a query best."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.attention.states.keys import Keys, factors_of
from subquad.attention.states.state import Buffers, Chunk, grown, write
from subquad.supports.kept import EVERYTHING, Ranges


def past(source: int, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def all_before(i: int) -> Ranges:
    return [(0, range(i + 1))]


class Chosen(Keys):
    """All keys by position; the mechanism narrows down which of the past ones are seen (`choose`)."""

    def __init__(self, heads: int, margin: int) -> None:
        super().__init__(EVERYTHING, [past], [0] * heads, margin)

    def _attend(self, module: Any, chunk: Chunk, buffers: Buffers, used: int, seen: Tensor, entries, seed) -> Tensor:
        seen = self.choose(module, chunk, {name: x[:, :, :used] for name, x in buffers.items() if name != "real"}, seen)
        return super()._attend(module, chunk, buffers, used, seen, entries, seed)

    def choose(self, module: Any, chunk: Chunk, buffers: Buffers, seen: Tensor) -> Tensor:
        """bool (B, H, t, m)."""
        return module.chosen(chunk.q, buffers["k"], seen, chunk.position)

    def _factors(self, module: Any, chunk: Chunk, columns: Tensor, seed: Tensor | None) -> Tensor:
        """A key is dropped for all queries of a head: see `full.drop_keys`."""
        return factors_of(module, chunk, torch.zeros_like(columns), columns, seed)


class Labelled(Chosen):
    """Routing: every key has the number of its cluster, (B, H, slots, 1)."""

    _factors = Keys._factors  # a weight is dropped for itself

    def empty(self, chunk: Chunk) -> Buffers:
        buffers = super().empty(chunk)
        b, h, slots = chunk.q.shape[0], chunk.q.shape[1], buffers["k"].shape[2]
        return buffers | {"label": torch.zeros(b, h, slots, 1, dtype=torch.int64, device=chunk.q.device)}

    def reserve(self, buffers: Buffers, length: int) -> Buffers:
        buffers = super().reserve(buffers, length)
        return buffers | {"label": grown(buffers["label"], buffers["k"].shape[2], 2)}

    def _written(self, module, chunk, buffers, length, after):
        buffers = super()._written(module, chunk, buffers, length, after)
        trash = buffers["k"].shape[2] - 1
        slot = chunk.position if chunk.here is None else torch.where(chunk.here, chunk.position, trash)
        return buffers | {"label": write(buffers["label"], slot, module.labels(chunk.q, chunk.k))}

    def written_run(self, module, chunk, buffers, length, first):
        buffers = super().written_run(module, chunk, buffers, length, first)
        stop = first + chunk.q.shape[2]
        buffers["label"][:, :, first:stop] = module.labels(chunk.q, chunk.k)
        return buffers

    def choose(self, module, chunk, buffers, seen):
        return seen & (module.labels(chunk.q, chunk.k) == buffers["label"].mT)
