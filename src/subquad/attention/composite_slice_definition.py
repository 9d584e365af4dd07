"""Composite Slice attention from its definition, eqs. 8 to 14 with loops over the slices: slow and simple."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.attention.call import repeat_heads


class Definition:
    """The oracle of a `CompositeSlice`; `found` takes the weights of each scale as it goes."""

    def __init__(self, attention, found: dict[int, Tensor | None]) -> None:
        self.attention, self.options, self.found = attention, attention.options, found

    def compose(self, tokens, project, real: Tensor, scale: int) -> Tensor:
        o, n = self.options, tokens[0].shape[1]
        if scale == o.levels - 1:
            return self.attend(tokens, project, real, scale, n, 0)
        t = torch.arange(n, device=real.device) // o.slice_length  # the slice of every token
        if o.composition == "local-global":
            fine = self.mix(tokens, project, real, scale)
            coarse = self.slices([fine] * 3, project, real, scale)  # (B, m, E)
            return fine + coarse[:, t]  # eq. 10
        coarse = self.slices(tokens, project, real, scale)
        if o.composition == "global-local":
            tokens = [x + coarse[:, t] for x in tokens]
        return self.mix(tokens, project, real, scale) + coarse[:, t]

    def slices(self, tokens, project, real: Tensor, scale: int) -> Tensor:
        """Y_g (B, m, E): of slice t, or when causal of slice t-1, which sees itself and what is before it."""
        o = self.options
        cuts = [slice(first, first + o.slice_length) for first in range(0, real.shape[1], o.slice_length)]
        pooled = [torch.stack([self.pool(x[:, c], real[:, c], scale) for c in cuts], 1) for x in tokens]
        exists = torch.stack([real[:, c].any(1) for c in cuts], 1)  # (B, m)
        project = project if o.share_weights else self.attention.own[scale]
        if not o.causal:
            return self.compose(pooled, project, exists, scale + 1)
        first = torch.zeros_like(pooled[0][:, :1])
        if len(cuts) == 1:
            return first
        return torch.cat([first, self.compose([x[:, :-1] for x in pooled], project, exists[:, :-1], scale + 1)], 1)

    def pool(self, x: Tensor, real: Tensor, scale: int) -> Tensor:
        """One slice x (B, l, E) → (B, E), each batch element by itself."""
        rows = []
        for tokens, m in zip(x, real, strict=True):
            chosen = tokens[m]  # (real tokens, E)
            if self.options.pool == "linear":
                weights = self.attention.pools[scale][: len(m)][m]  # (real tokens, E, E)
                chosen = torch.stack([y @ w for y, w in zip(chosen, weights, strict=True)]) if len(chosen) else chosen
            if len(chosen) == 0:
                rows.append(tokens.new_zeros(tokens.shape[1]))
            else:
                rows.append(chosen.amax(0) if self.options.pool == "max" else chosen.mean(0))
        return torch.stack(rows)

    def mix(self, tokens, project, real: Tensor, scale: int) -> Tensor:
        o = self.options
        if o.local == "attention":
            return self.attend(tokens, project, real, scale, o.slice_length, o.reach)
        v = repeat_heads(project.values(tokens[2]), o.num_heads).transpose(1, 2).flatten(2)  # (B, n, E)
        v = v * real[..., None]
        mlp, outs = self.attention.mlps[scale], []
        one, two = mlp.first.weight, mlp.second.weight  # (hidden, L), (L, hidden)
        if o.causal:
            h, place = torch.arange(len(one), device=v.device), torch.arange(o.slice_length, device=v.device)
            reads = place <= h[:, None] * o.slice_length // len(one)
            one, two = one * reads, two * (h * o.slice_length // len(one) <= place[:, None])
        for piece in v.split(o.slice_length, 1):
            length = piece.shape[1]
            outs.append(two[:length] @ F.gelu(one[:, :length] @ piece))
        return torch.cat(outs, 1)

    def attend(self, tokens, project, real: Tensor, scale: int, size: int, reach: int) -> Tensor:
        """Eqs. 8 and 11 to 13, or 9 and 14 at the coarsest scale, where all is one slice."""
        o, n = self.options, real.shape[1]
        query, key, value = tokens
        table = None if self.attention.positions is None else self.attention.positions(scale, n)
        start = 2 * reach if o.causal else reach  # the row of P_l at which the slice itself begins
        outs, rows_of_weights = [], []
        for first in range(0, n, size):
            i = torch.arange(first, min(n, first + size), device=query.device)
            j = torch.arange(
                max(0, first - reach), min(n, first + size + (0 if o.causal else reach)), device=query.device
            )
            at_i, at_j = (0, 0) if table is None else (table[i - first + start], table[j - first + start])
            q, k, v = (
                project.queries(query[:, i] + at_i),
                project.keys(key[:, j] + at_j),
                project.values(value[:, j]),
            )
            k, v = (repeat_heads(x, o.num_heads) for x in (k, v))
            allowed = real[:, None, None, j] & ((j <= i[:, None]) | (not o.causal))  # (B, 1, i, j)
            scores = (q @ k.mT * o.softmax_scale).masked_fill(~allowed, torch.finfo(q.dtype).min)
            w = scores.softmax(-1) * allowed  # (B, H, i, j), a row that may see nothing is 0
            outs.append((w @ v).transpose(1, 2).flatten(2))
            rows_of_weights.append(
                torch.zeros(*w.shape[:3], n, dtype=w.dtype, device=w.device).index_copy(3, j, w.detach())
            )
        self.found[scale] = torch.cat(rows_of_weights, 2)
        return torch.cat(outs, 1)
