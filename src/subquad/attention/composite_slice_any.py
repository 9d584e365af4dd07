"""Composite Slice attention for a length that stands for any, as `torch.export` traces it.

The slices of a scale stand in the first slots of an array that is as long as the sequence, and `_lengths` says how many
they are: so no size in the graph is a quotient of the length, which torch could not follow. All attentions cost what
they cost otherwise; the projections of the slices run over n slots instead of n/L.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.call import Call
from subquad.attention.composite_slice import CompositeSlice
from subquad.attention.slicing import Composer, Tokens


class AnyLengthComposer(Composer):
    """The fast path of one call; what a scale gives to its slices, (B, n, E), has slice t at slot t."""

    def __init__(self, attention: CompositeSlice, call: Call) -> None:
        super().__init__(attention, call)
        for key, value in (("local", "mlp"), ("pool", "linear")):
            if getattr(self.options, key) == value:
                raise ValueError(
                    f"{attention.name}: {key}={value} cannot be traced for every length: export it for one length, "
                    "without dynamic_shapes for it"
                )

    def _slots(self, like: Tensor) -> Tensor:
        return torch.arange(self.call.slots, device=like.device)  # (n,)

    def _lengths(self, q: Tensor, scale: int) -> Tensor | None:
        if scale == 0:
            return None
        last = self._slots(q)[-1:] // self.options.slice_length**scale  # (1,): the number of the last slice
        return (last + 1).expand(q.shape[0]).contiguous()

    def _sums(self, x: Tensor) -> Tensor:
        """(B, n, …) → (B, n, …): the sum over slice t at slot t."""
        return torch.zeros_like(x).index_add(1, self._slots(x) // self.options.slice_length, x)

    def _add(self, x: Tensor, coarse: Tensor) -> Tensor:
        return x + coarse.index_select(1, self._slots(x) // self.options.slice_length)

    def _put(self, x: Tensor, place: Tensor, size: int) -> Tensor:
        return x + place.index_select(2, self._slots(x) % size)

    def _coarser(self, pooled: Tokens, project: Any, real: Tensor | None, scale: int) -> Tensor:
        project = project if self.options.share_weights else self.attention.own[scale]
        if real is None:
            real = torch.ones_like(pooled[0][..., 0], dtype=torch.bool)  # (B, n)
        out = self.compose(pooled, project, self._sums(real.long()) > 0, scale + 1)  # (B, n, E)
        return F.pad(out[:, :-1], (0, 0, 1, 0)) if self.options.causal else out

    def _pool(self, x: Tensor, real: Tensor | None, scale: int) -> Tensor:
        kind, work = x.dtype, torch.promote_types(x.dtype, torch.float32)
        real = torch.ones_like(x[..., 0], dtype=torch.bool) if real is None else real  # (B, n)
        if self.options.pool == "max":
            slices = self._slots(x) // self.options.slice_length
            low = torch.full_like(x, -torch.inf)
            top = low.index_reduce(1, slices, x.masked_fill(~real[..., None], -torch.inf), "amax")
            return top.masked_fill(top == -torch.inf, 0)
        count = self._sums(real.to(work))[..., None].clamp(min=1)
        return (self._sums(x.to(work).masked_fill(~real[..., None], 0)) / count).to(kind)
