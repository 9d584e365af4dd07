"""Combiner-Axial with projected summaries, as the authors' language models have them (`summary=proj`).

The summary of row Ω asked in column c stands at the token p = (row, c). Its value is what q_p finds in the row, as
everywhere; its key is made from that value and from the token itself, by parameters of its own:

    v_Ω = Σ_{j ∈ Ω} softmax_j(q_p·k_j·scale) v_j
    k_Ω = W_2 LayerNorm(x_p + W_1 [v_Ω of all heads])

x_p is the layer's input at p, 0 where there is no such token. Heads meet in W_1, and a mechanism on q, k, v does not
know x: this one is of level "layer".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from subquad.attention.base import Call, Rows
from subquad.attention.summaries import Tokens, summarise
from subquad.kernels.merge import merge_attention
from subquad.kernels.pools.groups import grid


class SummaryKeys(nn.Module):
    """k_Ω from x_p and v_Ω."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        width = num_heads * head_dim
        self.shape = (num_heads, head_dim)
        self.mix, self.norm, self.key = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        """x (B, m, E), values (B, H, m, d) → keys (B, H, m, d)."""
        found = values.to(self.mix.weight.dtype).transpose(1, 2).flatten(2)  # (B, m, E)
        keys = self.key(self.norm(x + self.mix(found)))
        return keys.unflatten(-1, self.shape).transpose(1, 2)


def attend_projected(module: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """`Combiner.attend` with the keys of the rows made by `module.summary_keys`: x (B, n, E) → (B, H, n, d)."""
    work = torch.promote_types(q.dtype, torch.float32)
    tokens, n = Tokens(q.to(work), k.to(work), v.to(work), call), q.shape[2]
    text, (rows,) = module.described(call.slots, n)
    own = (tokens.k, tokens.v, call.exists)
    _, values, alive = summarise(module, text, 1, rows, tokens, own)  # (B, H, m, d), m = the summarised rows · cols
    asked = grid(x[:, None], values.shape[2] // rows.size, rows.size).flatten(2, 3)[:, 0]  # (B, m, E)
    keys = module.summary_keys(asked, values).to(work)
    about: dict[str, Any] = {"lengths": call.lengths, "valid": [call.exists, alive]}
    about |= {"scale": module.options.softmax_scale, "dropout": call.dropout, "seed": call.seed}
    out = merge_attention(tokens.q, [tokens.k, keys], [tokens.v, values], text, "main", n, **about)
    return out.to(q.dtype)


def define_projected(module: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """The definition, group by group and a row of the batch at a time: (B, H, n, d)."""
    out = torch.zeros_like(v)
    for b in range(q.shape[0]):
        real = torch.ones(q.shape[2], dtype=torch.bool) if key_mask is None else key_mask[b]
        if not real.any():
            continue
        places = real.nonzero()[:, 0]
        own = slice(int(places[0]), int(places[-1]) + 1)
        call = Call(real[None, own], None, None, 0.0, False, q.shape[2])
        terms = module.terms(q[b : b + 1, :, own], k[b : b + 1, :, own], call)
        values, n = v[b : b + 1, :, own].masked_fill(~real[None, None, own, None], 0), len(real[own])
        if terms.summaries:
            asked = x.new_zeros(1, len(terms.summaries), x.shape[2])
            for u, group in enumerate(terms.summaries):
                p = group.query_position
                if p < n and real[own][p]:
                    asked[:, u] = x[b, own][p]
            keys = module.summary_keys(asked, terms.local @ values)  # (1, H, U, d)
            terms.group_logits = terms.q @ keys.mT * terms.scale
        out[b : b + 1, :, own] = terms.weights() @ values
    return out


def prepared(module: Any, query: Tensor, project: Any, key_mask: Tensor | None) -> tuple[Rows, Tensor, Any]:
    """The rows of a batch from slot 0 on: where they were, x (B, n, E) and q, k, v (B, H, n, d)."""
    heads, d = module.options.num_heads, module.options.head_dim
    if query.shape[-1] != heads * d:
        raise ValueError(f"summary=proj needs tokens of width num_heads·head_dim = {heads * d}, not {query.shape[-1]}")
    x = query if key_mask is None else query.masked_fill(~key_mask[..., None], 0)
    q, k, v = project.together(x, x, x)
    if k.shape[1] != heads:
        raise ValueError(f"summary=proj needs as many key heads as num_heads={heads}, not {k.shape[1]}")
    module._validate(q, k, v, key_mask)
    rows, q, k, v = module._begin(q, k, v, key_mask)
    return rows, rows.align(x[:, None])[:, 0], (q, k, v)
