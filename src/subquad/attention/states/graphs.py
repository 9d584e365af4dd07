"""The state of SBM attention: all tokens and the memberships of the keys. A new query draws its edges among them.

A row of the graph depends on its query, the keys before it and a random stream of its own, so the rows of new queries
are those that one call draws. Their edges alone are attended. Chunks that are trained on call the mechanism on the
whole: eq. 9 is a gradient of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subquad.attention.states.attending import attend_kept
from subquad.attention.states.replay import Replay
from subquad.attention.states.state import Buffers, Chunk, State, appended, write
from subquad.attention.states.sums import every_head
from subquad.kernels.masks import unpack_mask
from subquad.kernels.sampler import sample

LISTED = 2.0  # a density that no row reaches: all rows are drawn as lists of edges


class Graphs(Replay):
    def extend(self, module: Any, chunk: Chunk, state: State) -> tuple[Tensor, Buffers]:
        if torch.compiler.is_exporting():
            return self._exported(module, chunk, state)
        if torch.is_grad_enabled() or (module.training and module.options.dropout):
            kept = {name: x for name, x in state.buffers.items() if name != "z"}  # made again when it is needed
            return super().extend(module, chunk, replace(state, buffers=kept))
        length = state.length + chunk.added
        n = int(length.max())
        q, k, _ = every_head(chunk)
        w, z = module.memberships(q, k)  # (B, H, t, c)
        tokens = {"q": chunk.q, "k": chunk.k, "v": chunk.v}
        buffers = appended(self._with_z(module, state), tokens | {"z": z}, chunk, n)
        if n == 0:  # nothing but padding so far
            return torch.zeros_like(chunk.q), buffers
        real = buffers["real"][:, :n] & (torch.arange(n, device=length.device) < length[:, None])
        rows = w.new_zeros(*w.shape[:2], n + 1, w.shape[3])  # only the new rows draw
        slot = chunk.position if chunk.here is None else torch.where(chunk.here, chunk.position, n)
        rows = write(rows, slot, w)[:, :, :n]
        rules = module.rules(module.training, LISTED)
        assert state.seed is not None
        drawn = sample(rows, buffers["z"][:, :, :n], state.seed, None if bool(real.all()) else real, rules)
        return self._attend(module, q, buffers, drawn, chunk.position.clamp(max=n - 1)).to(chunk.q.dtype), buffers

    def _exported(self, module: Any, chunk: Chunk, state: State) -> tuple[Tensor, Buffers]:
        """The same with sizes that follow from shapes alone: the graph of all places that there is room for, m × m bits
        of it, and behind a row's last token nothing.
        """
        t, length = chunk.q.shape[2], state.length + chunk.added
        q, k, _ = every_head(chunk)
        w, z = module.memberships(q, k)  # (B, H, t, c)
        tokens = {"q": chunk.q, "k": chunk.k, "v": chunk.v, "z": z}
        buffers = appended(self._with_z(module, state), tokens, chunk, 0 if state.buffers else t)
        m = buffers["k"].shape[2] - 1
        real = buffers["real"][:, :m] & (torch.arange(m, device=length.device) < length[:, None])
        slot = chunk.position if chunk.here is None else torch.where(chunk.here, chunk.position, m)
        rows = w.new_zeros(*w.shape[:2], m + 1, w.shape[3]).scatter(2, _spread(slot, w), w)[:, :, :m]
        assert state.seed is not None
        drawn = sample(rows, buffers["z"][:, :, :m], state.seed, real, module.rules(module.training, -1.0))
        seen = unpack_mask(drawn.mask, (*w.shape[:2], m, m))  # (B, H, m, m)
        place = chunk.position.clamp(max=m - 1)[:, None, :, None].expand(*w.shape[:2], t, m)
        kept = (buffers[name][:, :, :m].to(q.dtype) for name in ("k", "v"))
        return attend_kept(q, *kept, seen.gather(2, place), module.options.softmax_scale).to(chunk.q.dtype), buffers

    def _with_z(self, module: Any, state: State) -> Buffers:
        """The buffers; after chunks that were trained on, with the memberships that these left out."""
        buffers = dict(state.buffers)
        if buffers and "z" not in buffers:
            group = buffers["q"].shape[1] // buffers["k"].shape[1]
            buffers["z"] = module.memberships(buffers["q"], buffers["k"].repeat_interleave(group, 1))[1]
        return buffers

    @staticmethod
    def _attend(module: Any, q: Tensor, buffers: Buffers, drawn: Any, position: Tensor) -> Tensor:
        """Softmax over the edges of the queries at their positions (B, t)."""
        b, h, t, _ = q.shape
        offsets = drawn.indptr.view(b, h, -1)
        begin, end = (offsets.gather(2, (position + more)[:, None].expand(b, h, t)) for more in (0, 1))  # (B, H, t)
        most = max(1, int((end - begin).max()))
        edge = begin[..., None] + torch.arange(most, device=q.device)  # (B, H, t, m)
        exists = edge < end[..., None]
        if not drawn.indices.numel():
            return torch.zeros_like(q)
        key = drawn.indices[edge.clamp(max=drawn.indices.numel() - 1)].long() * exists
        groups = buffers["k"].shape[1]
        row = torch.arange(b, device=q.device).view(b, 1, 1, 1)
        head = torch.arange(h, device=q.device).view(1, h, 1, 1) // (h // groups)
        keys, values = (buffers[name][row, head, key].to(q.dtype) for name in ("k", "v"))  # (B, H, t, m, d)
        scores = (keys @ q[..., None])[..., 0] * module.options.softmax_scale
        weights = scores.masked_fill(~exists, torch.finfo(scores.dtype).min).softmax(-1) * exists
        return (weights[..., None, :] @ values)[..., 0, :]


def _spread(slot: Tensor, x: Tensor) -> Tensor:
    """slot (B, t) for every head and entry of x (B, H, t, c)."""
    return slot[:, None, :, None].expand(x.shape)
