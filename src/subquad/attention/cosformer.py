"""cosFormer (Qin et al. 2022): rectified queries and keys, and scores that fade with the distance like a cosine.

    w_ij = ReLU(q_i)·ReLU(k_j) cos(π/2 · (i - j)/M)          out_i = Σ_j w_ij v_j / Σ_j w_ij

    cos(x - y) = cos x cos y + sin x sin y: the features are ReLU(x_i) cos(πi/2M) and ReLU(x_i) sin(πi/2M), 2d of them,
    so that the sums cost O(n·d²), causal too

M is `max_length`, or the length of the row where that is left open, as in the paper. A causal model whose M is the
length of the row knows how long the row is: give max_length for language models.

Choices. The paper's code bounds denominators from below; here rows sum to exactly 1, and a query that shares no
positive feature with any key gives 0. `scale` has no meaning here and must be left open.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from subquad.attention.call import Call
from subquad.attention.linear import Features, KernelAttention, refuse_scale
from subquad.attention.outputs import within_rows


class Cosformer(KernelAttention):
    __doc__ = __doc__

    paper = "Qin et al. 2022"
    cost = "n·d"
    positional = True
    sparse = True  # a weight may be exactly 0

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        refuse_scale(self.name, options)

    @property
    def open_size(self) -> str | None:
        return "max_length" if self.options.max_length is None else None

    @property
    def kept_width(self) -> int:
        return 2 * self.options.head_dim

    def features(self, q: Tensor, k: Tensor, call: Call) -> Features:
        angle = self._angles(q, call)  # (1 or B, 1, n, 1)
        real = 1 if call.key_mask is None else call.key_mask[:, None, :, None]
        return Features(_turned(q, angle), _turned(k, angle) * real)

    def features_from(self, q, k, real, position, before):
        angle = math.pi / 2 * position[:, None, :, None].to(q.dtype) / self.options.max_length  # (B, 1, t, 1)
        return Features(_turned(q, angle), _turned(k, angle) * (1 if real is None else real[:, None, :, None]))

    def _angles(self, q: Tensor, call: Call) -> Tensor:
        """π/2 · i/M; what lies behind the end of a row has the angle of its end."""
        n, place = q.shape[2], torch.arange(q.shape[2], device=q.device)
        if call.shard is not None:  # a part of a row: its places and its length are those of the row
            n, place, call = call.shard.n, place + call.shard.own[0], call._replace(lengths=call.shard.lengths)
        size: Any = torch.full((1,), n, device=q.device) if call.lengths is None else call.lengths
        size = size.view(-1, 1, 1, 1).clamp(min=1)
        place = place[:, None].minimum(size)
        whole = size if self.options.max_length is None else self.options.max_length
        return math.pi / 2 * place.to(q.dtype) / whole

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return super().define(q, k, call._replace(lengths=None))  # a row at a time: its length is that of q

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return within_rows(super().attend(q, k, v, call), call)

    def connections(self, n: int) -> float:
        return 4.0 * n * self.options.head_dim


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    """(B, H, n, d) → (B, H, n, 2d)."""
    positive = x.clamp(min=0)
    return torch.cat((positive * angle.cos(), positive * angle.sin()), -1)
