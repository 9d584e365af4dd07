"""Compressed sparse attention (DeepSeek-V4): a sliding window, and the entries that an index finds for a query.

    c_w = norm( Σ softmax(x_j W_z + b_j) ⊙ x_j W_c )          over the tokens of block w and, with weights of their own,
                                                             of block w - 1: entries overlap
    I_iw = Σ_h (x_i W_g)_h ReLU(u_ih·s_w)                    u = x W_u, s_w: small entries of the index, made as c_w is
    out_i = R_i⁻¹ Σ_{e ∈ near(i) ∪ top(i)} e^(q_i·e·scale) e / Z_i     top(i): `topk` complete entries, largest I first

    O(n·(window + topk) + n²/rate) with n²/rate cheap products of the index; all else is as in `hca`

The function is that of the eager code in transformers (`DeepseekV4Attention` with `DeepseekV4CSACompressor`), where the
queries of the index come from the low-rank queries; a positive factor per query changes no choice. The choice has no
gradient: the index is not trained by the output, and its parameters require no gradient, so that optimizers and
DistributedDataParallel do not wait for one (`attention.index.requires_grad_()` if a loss of yours trains it). Of
entries with equal I, earlier ones are preferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention.call import Call
from subquad.attention.hca import HCA, CompressedOptions, Compressor, project, rotate
from subquad.attention.states.state import Buffers
from subquad.core.options import option
from subquad.kernels.compressed import index_choice


class Index(nn.Module):
    """Which entries suit a query."""

    def __init__(self, width: int, options: Any) -> None:
        super().__init__()
        heads, size = options.index_heads or options.num_heads, options.index_size
        self.options = replace(options, head_dim=size, rotary=min(options.rotated, size))
        self.queries = nn.Linear(width, heads * size, bias=False)  # W_u
        self.gates = nn.Linear(width, heads, bias=False)  # W_g
        self.compress = Compressor(width, size, options.rate, overlap=True, options=self.options)

    @torch.no_grad()
    def choose(self, x: Tensor, place: Tensor, small: Tensor, possible: Tensor, count: int) -> Tensor:
        """The entries that the queries of tokens x (B, n, E) at positions (n,) or (B, n) see, bool (B, n, m), from the
        small entries (B, m, c).
        """
        u = project(x, self.queries).unflatten(-1, (-1, self.options.head_dim)).transpose(1, 2)  # (B, h, n, c)
        u = rotate(u, place if place.dim() == 1 else place[:, None], self.options)
        return index_choice(u, project(x, self.gates).mT, small, possible, count)


class CSA(HCA):
    __doc__ = __doc__

    cost = "n·(window + topk) + n²/rate"
    overlap = True
    sparse = True
    examples: Any = ({"window": 5, "rate": 4, "topk": 3}, {"window": 2, "rate": 2, "topk": 4, "index_heads": 3})
    gallery = {"window": 12, "rate": 4, "topk": 6}
    picture_note = "An index finds the entries that suit a query. Drawn are the latest ones."

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        rate: int = option(4, "tokens from one entry to the next", ge=1)
        topk: int = option(512, "entries that a query sees", ge=1)
        index_heads: int | None = option(None, "heads of the index; None = num_heads", ge=1)
        index_dim: int | None = option(None, "width of its heads, even; None = head_dim/4", ge=2)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.index_dim is not None and self.index_dim % 2:
                raise ValueError(f"index_dim must be even, not {self.index_dim}")

        @property
        def index_size(self) -> int:
            return self.index_dim or max(2, self.head_dim // 8 * 2)

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.index = Index(self.width, options).requires_grad_(False)

    def _seen(self, x: Tensor, y: Tensor, exist: Tensor, call: Call) -> Tensor:
        possible, count = super()._seen(x, y, exist, call), self.options.topk  # (B, n, m)
        if exist.shape[1] <= count:
            return possible
        with torch.no_grad():
            small = self.index.compress(y, call.key_mask).rows  # (B, m, c)
        place = torch.arange(x.shape[1], device=x.device)
        return self.index.choose(x, place, small, possible.expand(len(x), -1, -1).contiguous(), count)

    @property
    def compressors(self) -> dict[str, Compressor]:
        return {"entries": self.compress, "small": self.index.compress}

    def chosen(self, x: Tensor, position: Tensor, buffers: Buffers, possible: Tensor) -> Tensor:
        count, m = self.options.topk, possible.shape[2]
        if m <= count:
            return possible
        small = buffers["small"][:, 0, :m]  # (B, m, c)
        with torch.autocast(x.device.type, enabled=False):
            return self.index.choose(x.to(small.dtype), position, small, possible.contiguous(), count)

    def picture(self, n: int) -> Tensor:
        """With the latest entries, which overlap by a block; the real ones depend on the tokens."""
        i, j, o = torch.arange(n)[:, None], torch.arange(n), self.options
        entry, done = j // o.rate, (i + 1) // o.rate
        far = (entry < done) & (entry >= done - o.topk - 1)
        return torch.where((i - j < o.window) & (j <= i), 1, 2 * far.int())

    def summaries(self, n: int) -> tuple[list[Sequence[int]], list[list[int]]]:
        """The latest entries, each made of its block and the one before."""
        rate, most = self.options.rate, self.options.topk
        blocks = [range(max(0, w - 1) * rate, (w + 1) * rate) for w in range(n // rate)]
        return list(blocks), [list(range((i + 1) // rate))[-most:] for i in range(n)]

    def connections(self, n: int) -> float:
        o = self.options
        near = n * min(o.window, n) + n * min(o.topk, n // o.rate)
        return float(near + n * (n // o.rate) / 2)
