"""Mechanisms whose output is not weights × values over tokens: they define the output instead of the weights."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from subquad.attention.base import Attention, Capabilities
from subquad.attention.call import Call, Rows, clean, real_spans, repeat_heads
from subquad.attention.checks import check_inputs
from subquad.kernels.values import cut_rows


class OutputAttention(Attention):
    """A mechanism with `define_output` (slow and simple) instead of `define`; `weights` raises."""

    capabilities: ClassVar[Capabilities] = Capabilities(weights=False)

    def define_output(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """The output from the definition, (B, H, n, d), in at least float32.

        Where the mechanism is positional it is given one row at a time, without leading and trailing padding.
        """
        raise NotImplementedError

    def dense(
        self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, seed: Tensor | int | None = None
    ) -> Tensor:
        """The oracle: the definition of the output, differentiable."""
        check_inputs(self, q, k, v, key_mask)
        kind, work = q.dtype, torch.promote_types(q.dtype, torch.float32)
        q, k, v = (x.to(work) for x in clean(q, k, v, key_mask))
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        call = self._call(Rows.of(key_mask, align=False), seed, q.shape[2])._replace(lengths=None)
        if key_mask is None or not self.positional:
            return self.define_output(q, k, v, call).to(kind)
        out = torch.zeros_like(q)
        for b, own in real_spans(key_mask):
            x, y, z = (t[b : b + 1, :, own] for t in (q, k, v))
            out[b, :, own] = self.define_output(x, y, z, call._replace(key_mask=key_mask[b : b + 1, own]))[0]
        return out.to(kind)


def within_rows(out: Tensor, call: Call) -> Tensor:
    """0 behind the end of a row, (B, H, n, d)."""
    return cut_rows(out, call.lengths)
