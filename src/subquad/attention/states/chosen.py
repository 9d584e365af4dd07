"""States of all keys where not the position alone decides who is seen: clusters, blocks that suit a query best, and
patterns that name a few keys, which alone are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.attention.states.keys import Keys, factors_of
from subquad.attention.states.state import Buffers, Chunk, grown, write
from subquad.kernels.tables import UNION, named_keys
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


PAIRS = 1 << 20  # keys of all queries of a step that are copied at a time


class NamedKeys(Keys):
    """All keys, by position; the pattern names the keys of a query."""

    def _step(self, module, chunk, buffers, length, seed):
        buffers = self._written(module, chunk, buffers, length, length + chunk.added)
        pattern = self.sees[0].pattern  # type: ignore[attr-defined]
        families = tuple(UNION if sees.family is None else sees.family for sees in self.sees)  # type: ignore[attr-defined]
        room = buffers["real"].shape[1] - 1
        named = named_keys(chunk.position, pattern, families, room, chunk.even)  # (B, F, t, m)
        step = max(1, PAIRS // max(1, named[:, :, 0].numel() * chunk.q.shape[1]))
        outs = []
        for first in range(0, named.shape[2], step):
            piece = chunk if named.shape[2] <= step else chunk.part(first, first + step)
            outs.append(self._read(module, piece, buffers, named[:, :, first : first + step], seed))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2), buffers

    def _read(self, module: Any, chunk: Chunk, buffers: Buffers, named: Tensor, seed: Tensor | None) -> Tensor:
        b, h = chunk.q.shape[:2]
        groups = buffers["k"].shape[1]
        families = torch.tensor(self.families, device="cpu").to(named.device, non_blocking=True)
        named = named[:, families] if len(self.sees) > 1 else named  # (B, H or 1, t, m)
        place = named.clamp(0, buffers["real"].shape[1] - 1)  # what is behind the last token of a row has none
        row = torch.arange(b, device=named.device).view(b, 1, 1, 1)
        exists = (named >= 0) & buffers["real"][row, place]  # (B, H or 1, t, m)
        head = torch.arange(h if len(self.sees) > 1 else groups, device=named.device).view(1, -1, 1, 1)
        head = head // (h // groups) if len(self.sees) > 1 else head
        keys, values = (buffers[name][row, head, place] for name in ("k", "v"))  # (B, H or G, t, m, d)
        keys, values = (x.repeat_interleave(h // x.shape[1], 1) if x.shape[1] < h else x for x in (keys, values))
        factors = None
        if module.training and module.options.dropout:
            factors = self._factors(module, chunk, named, seed)
        return self._map(module, chunk.q, keys, values, exists, factors)

    @staticmethod
    def _map(module: Any, q: Tensor, keys: Tensor, values: Tensor, exists: Tensor, factors: Tensor | None) -> Tensor:
        """Every query has keys of its own: (B, H, t, m, d)."""
        work = torch.promote_types(q.dtype, torch.float32)
        scores = (keys.to(work) @ q.to(work)[..., None])[..., 0] * module.options.softmax_scale  # (B, H, t, m)
        weights = module.map_of_heads(scores, exists.expand(scores.shape))
        weights = weights if factors is None else weights * factors
        return (weights[..., None, :] @ values.to(work))[..., 0, :].to(q.dtype)
