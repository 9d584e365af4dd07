"""Linformer (Wang et al. 2020): keys and values projected along the sequence to k rows.

    out = softmax(q (E K)ᵀ · scale) (F V)          E, F (k, max_length), learned          O(n·k)

Token i of a row meets column i of E and F; a row shorter than max_length uses the first columns, and padding is 0, so
that a row gives what it gives alone. There is no causal form: every projected key mixes all tokens.

Choices. E and F start as N(0, 1/k). `share` has the paper's levels of sharing: "heads", one pair (E, F) for all heads;
"keys-values", E = F as well; "none", a pair for every head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subquad.attention.base import Capabilities
from subquad.attention.call import Call, Record, Rows
from subquad.attention.checks import check_inputs, check_lengths
from subquad.attention.full import sdpa
from subquad.attention.outputs import OutputAttention, within_rows
from subquad.core.options import Options as BaseOptions
from subquad.core.options import option


class Linformer(OutputAttention):
    __doc__ = __doc__

    capabilities = Capabilities(causal=False, streaming=False, needs_max_length=True, weights=False)
    family = "low rank"
    theory_reason = "it attends to projections of the whole sequence, not to tokens"
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

    def attend_tokens(self, query, key, value, project, key_mask, seed=None, *, want_record=False):
        """E (X W) = (E X) W: the tokens are projected along the sequence first, so that only k of them are projected to
        keys and values."""
        whole = key_mask is None and self.across is None and query.dtype in (torch.float32, torch.float64)
        if not (whole and getattr(project, "affine", False)) or self.options.share == "none" or want_record:
            return super().attend_tokens(
                query, key, value, project, key_mask, seed, want_record=want_record
            )  # fmt: skip
        q, n = project.queries(query), key.shape[1]
        check_inputs(self, q, q, q, None)
        check_lengths(self, query.shape[1], n)
        e = self.project_keys[0, :, :n]
        f = e if self.project_values is None else self.project_values[0, :, :n]
        keys, values = (
            _affine(get, m, x).to(q.dtype) for get, m, x in ((project.keys, e, key), (project.values, f, value))
        )
        call = self._call(Rows(None, None, None, None), seed, n)
        out = sdpa(q, keys, values, None, causal=False, scale=self.options.softmax_scale, call=call)
        return out.transpose(1, 2).flatten(2), Record()

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


def _affine(project: Callable[[Tensor], Tensor], mix: Tensor, x: Tensor) -> Tensor:
    """mix · project(x), for mix (k, n) and tokens x (B, n, E): (B, H, k, d). A bias is mixed like everything else."""
    bias = project(x.new_zeros(1, 1, x.shape[2]))  # (1, H, 1, d)
    return project(mix.to(x.dtype) @ x) + (mix.sum(1, keepdim=True) - 1) * bias
