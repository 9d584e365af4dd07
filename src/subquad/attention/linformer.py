"""Linformer (Wang et al. 2020): keys and values projected along the sequence to k rows.

    out = softmax(q (E K)ᵀ · scale) (F V)          E, F (k, max_length), learned          O(n·k)

Token i of a row meets column i of E and F; a row shorter than max_length uses the first columns, and padding is 0, so
that a row gives what it gives alone. There is no causal form: every projected key mixes all tokens.

Choices. E and F start as N(0, 1/k) (theorem 2). `share` follows section 4: "heads", one pair (E, F) for all heads;
"keys-values", E = F as well; "none", a pair for every head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subquad.attention.base import Call, Capabilities
from subquad.attention.full import sdpa
from subquad.attention.outputs import OutputAttention, within_rows
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option


class Linformer(OutputAttention):
    __doc__ = __doc__

    capabilities = Capabilities(causal=False, streaming=False, needs_max_length=True, weights=False)
    family = "low rank"
    paper = "Wang et al. 2020"
    cost = "n·k"
    exponent = 1.0
    examples = ({"k": 4}, {"k": 3, "share": "none"})

    @dataclass(frozen=True, kw_only=True)
    class Options(BaseOptions):
        k: int = option(256, "rows that keys and values are projected to", ge=1)
        share: Literal["heads", "keys-values", "none"] = option("heads", "who shares a projection")

    project_keys: nn.Parameter
    project_values: nn.Parameter | None

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        heads = options.num_heads if options.share == "none" else 1
        shape = (heads, options.k, options.max_length)
        self.project_keys = nn.Parameter(torch.randn(shape) * options.k**-0.5)  # E (1 or H, k, max_length)
        self.project_values = None  # F
        if options.share != "keys-values":
            self.project_values = nn.Parameter(torch.randn(shape) * options.k**-0.5)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        work, n = torch.promote_types(q.dtype, torch.float32), k.shape[2]
        e = self.project_keys[..., :n].to(work)
        f = e if self.project_values is None else self.project_values[..., :n].to(work)
        keys, values = e @ k.to(work), f @ v.to(work)  # (B, H, k, d)
        out = sdpa(q.to(work), keys, values, None, causal=False, scale=self.options.softmax_scale, call=call)
        return within_rows(out, call).to(q.dtype)

    def define_output(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        e = self.project_keys.to(q.dtype)
        f = e if self.project_values is None else self.project_values.to(q.dtype)
        outs = []
        for h in range(q.shape[1]):
            own = h if len(e) > 1 else 0
            keys = torch.einsum("rn,bnd->brd", e[own, :, : k.shape[2]], k[:, h])
            values = torch.einsum("rn,bnd->brd", f[own, :, : k.shape[2]], v[:, h])
            outs.append((q[:, h] @ keys.mT * self.options.softmax_scale).softmax(-1) @ values)
        return torch.stack(outs, 1)

    def connections(self, n: int) -> float:
        return float(n * self.options.k)
