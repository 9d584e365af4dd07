"""The state of SBM attention: all tokens and the memberships of the keys. A new query draws its edges among them.

A row of the graph depends on its query, the keys before it and a random stream of its own, so the rows of new queries
are those that one call draws. Their edges alone are attended; a device, which the host would have to ask for the number
of edges, computes all pairs of a few queries, masked. Chunks that are trained on call the mechanism on the
whole: eq. 9 is a gradient of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.attention.states.keys import attend_kept
from subquad.attention.states.replay import Replay, existing
from subquad.attention.states.state import Buffers, Chunk, State, appended, write
from subquad.attention.states.sums import every_head
from subquad.kernels.edges import EdgeList, edge_attention, rows_of
from subquad.kernels.sampler import rather_masked, sample, sample_rows

LISTED = 2.0  # a density that no row reaches: all rows are drawn as lists of edges


class Graphs(Replay):
    def extend(self, module: Any, chunk: Chunk, state: State) -> tuple[Tensor, Buffers]:
        if torch.is_grad_enabled() or (module.training and module.options.dropout):
            kept = {name: x for name, x in state.buffers.items() if name != "z"}  # made again when it is needed
            return super().extend(module, chunk, state.part(self, kept))
        length = state.length + chunk.added
        longest = 0 if torch.compiler.is_compiling() else chunk.longest(length)
        q, k, _ = every_head(chunk)
        w, z = module.memberships(q, k)  # (B, H, t, c)
        tokens = {"q": chunk.q, "k": chunk.k, "v": chunk.v}
        buffers = appended(self._with_z(module, state), tokens | {"z": z}, chunk, longest)
        n = self.called(module, buffers, longest)
        if n == 0:  # nothing but padding so far
            return torch.zeros_like(chunk.q), buffers
        keys, values = (buffers[name] for name in ("k", "v"))
        scale, rules = module.options.softmax_scale, module.rules(module.training, LISTED)
        real = existing(chunk, buffers, length, n)
        assert state.seed is not None
        if rather_masked(q, q.shape[2], n):
            seen = sample_rows(w, buffers["z"][:, :, :n], state.seed, real, chunk.position, rules)
            return attend_kept(chunk.q, keys[:, :, :n], values[:, :, :n], seen, scale), buffers
        rows = w.new_zeros(*w.shape[:2], n + 1, w.shape[3])  # only the new rows draw
        slot = chunk.position if chunk.here is None else torch.where(chunk.here, chunk.position, n)
        rows = write(rows, slot, w)[:, :, :n]
        drawn = sample(rows, buffers["z"][:, :, :n], state.seed, real, rules)
        edges = EdgeList(drawn.indptr, drawn.indices, keys.shape[2])
        row = slot[:, None].expand(q.shape[:3]).flatten(0, 1)  # (B·H, t)
        out = edge_attention(q, keys.to(q), values.to(q), rows_of(edges, row), scale=scale)
        return out.to(chunk.q.dtype), buffers

    def _with_z(self, module: Any, state: State) -> Buffers:
        """The buffers; after chunks that were trained on, with the memberships that these left out."""
        buffers = dict(state.buffers)
        if buffers and "z" not in buffers:
            group = buffers["q"].shape[1] // buffers["k"].shape[1]
            buffers["z"] = module.memberships(buffers["q"], buffers["k"].repeat_interleave(group, 1))[1]
        return buffers
