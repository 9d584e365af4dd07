"""Summaries of groups: one query, one key and one value for every group of a kind, all kinds of Combiner's partitions.

A summary's query and key are pooled from its members' (`kernels.pools`), its value is what its query finds among its
members; with an attended abstraction its key too. In an asked row nothing is pooled: with the query of the row's
token in the query's column as local query, p(j|Ω) = softmax_j(q·k_j), the summary's key is Σ_j p(j|Ω) k_j; a local
query that does not exist (padding, or a last row too short) is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.base import Rows
from subquad.attention.call import Call, real_spans, repeat_heads
from subquad.attention.checks import check_inputs
from subquad.core.numbers import is_symbolic, length_of
from subquad.kernels.merge import merge_attention
from subquad.kernels.pools import span_pool, spans_with_members
from subquad.kernels.pools.groups import grid, group_pools, groups_with_members
from subquad.kernels.values import readable
from subquad.supports.grids import has_groups
from subquad.supports.partitions import GroupSet
from subquad.supports.shards import in_blocks

Source = tuple[Tensor, Tensor, Tensor | None]  # keys, values (B, H, m, d), which exist (B, 1, m) or None


class Tokens(NamedTuple):
    """What is attended, q, k and v (B, H, n, d), and the call."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: Call


def summarise(module: Any, text: str, number: int, group_set: GroupSet, tokens: Tokens, below: Source) -> Source:
    """The summaries of source `number` of the partition `text`; their members are in `below`."""
    features = module.abstraction(tokens.q, tokens.k)
    find = partial(_find, module, text, f"members:{number}", tokens)
    if group_set.pool == "spans":
        return _spans(module, group_set, tokens, features, below, find)
    n = length_of(tokens.q.shape[2])  # grids and trees are made of numbers: a compiled graph is one for this length
    if group_set.pool in ("nodes", "nodes-back"):
        return _nodes(module, tokens, features, find, back=group_set.pool == "nodes-back")
    if not is_symbolic(n) and not has_groups(n, group_set.size, group_set.pool):
        exists = tokens.call.exists
        return tokens.k[:, :, :0], tokens.v[:, :, :0], None if exists is None else exists[:, :, :0]
    if group_set.pool == "asked-row":
        return _asked_rows(module, group_set.size, tokens, features, find)
    return _grid_groups(module, group_set, tokens, features, find)


Find = Callable[[Tensor, Source], Tensor]  # what summaries' queries (B, H, m, d) find among their members


def _find(module: Any, text: str, which: str, tokens: Tokens, query: Tensor, source: Source) -> Tensor:
    keys, values, valid = source
    where, scale = (text, which, tokens.q.shape[2]), module.options.softmax_scale
    return merge_attention(query, [keys], [values], *where, scale=scale, lengths=tokens.call.lengths, valid=[valid])


# ---- spans --------------------------------------------------------------------------------------------------


def _spans(module, group_set, tokens: Tokens, features, below: Source, find: Find) -> Source:
    call, skip = tokens.call, group_set.skip
    about = {"pool": module.abstraction.pool, "key_mask": call.key_mask, "lengths": call.lengths, "skip": skip}
    query = span_pool(features[0], group_set.size, **about)  # (B, H, m, d)
    if module.abstraction.attended:
        keys, _, valid = below
        key = find(query, (keys, features[1], valid))
    else:
        key = span_pool(features[1], group_set.size, **about)
    alive = None if call.key_mask is None else spans_with_members(call.key_mask, group_set.size, skip)
    return key, find(query, below), alive


def summarise_shard(module: Any, text: str, number: int, group_set: GroupSet, features, cut, sources, call: Call):
    """The spans of source `number` that begin with this process: keys, values, which of all exist, who has which.

    `features` (B, H, t, d) are of the tokens in `cut`; what a span lacks of them comes from the processes behind.
    """
    shard, size, skip = call.shard, group_set.size, group_set.skip
    spans = in_blocks(cut, size)
    whole = tuple((lo * size, max(lo * size, min(shard.n, hi * size))) for lo, hi in spans)  # the tokens of their spans
    first, last = whole[shard.rank]
    about = {"pool": module.abstraction.pool, "key_mask": shard.masked((first, last)), "lengths": None}
    count = spans[shard.rank][1] - spans[shard.rank][0]
    fq, fk = shard.move(features, cut, whole)
    query = span_pool(fq, size, skip=max(0, skip - first), **about)[:, :, :count]  # (B, H, spans, d)
    alive = None if shard.key_mask is None else spans_with_members(shard.key_mask, size, skip)
    alive = None if alive is None else alive[:, :, : -(-shard.n // size)]
    keys, values, *where = sources[group_set.below]

    def find(x: Tensor) -> Tensor:
        asked = {"queries": spans, "scale": module.options.softmax_scale, "dropout": False}
        return shard.merge(query, [(keys, x, *where)], text, f"members:{number}", call, **asked)

    if module.abstraction.attended:
        key = find(features[1])
    else:
        key = span_pool(fk, size, skip=max(0, skip - first), **about)[:, :, :count]
    return key, find(values), alive, spans


# ---- binary blocks ------------------------------------------------------------------------------------------


def _nodes(module, tokens: Tokens, features, find: Find, *, back: bool) -> Source:
    """All binary blocks, a Fenwick tree as long as the sequence; `back`: of the sequence read from its end."""
    turn = _Reverse(tokens) if back else _identity
    k, v, fq = (turn(x) for x in (tokens.k, tokens.v, features[0]))
    fk = k if features[1] is tokens.k else turn(features[1])
    real = tokens.call.exists
    exists = None if real is None else turn(real[..., None])[..., 0]  # (B, 1, n)
    about = ("nodes", 0, module.options.causal)
    query, key = group_pools((fq, fk), exists, module.abstraction.pool, *about)
    if module.abstraction.learns:  # a single token stands for itself
        single = torch.arange(k.shape[2], device=k.device)[:, None] % 2 == 0
        key = torch.where(single, repeat_heads(k, key.shape[1]), key)
    value = find(query, (k, v, exists))
    alive = None if exists is None else groups_with_members(k, exists, *about)
    return turn(key), turn(value), None if alive is None else turn(alive[..., None])[..., 0]


def _identity(x: Tensor) -> Tensor:
    return x


class _Reverse:
    """(B, H, n, d) with each row read from its end; what lies behind the row stays there."""

    def __init__(self, tokens: Tokens) -> None:
        self.lengths, n = tokens.call.lengths, tokens.q.shape[2]
        self.indices: dict[int, Tensor] = {}
        if self.lengths is not None:
            place = torch.arange(n, device=tokens.q.device)
            last = self.lengths[:, None] - 1
            self.order = torch.where(place <= last, last - place, place)  # (B, n)

    def __call__(self, x: Tensor) -> Tensor:
        if self.lengths is None:
            return x.flip(2)
        if not readable(x):
            return x.gather(2, self.order[:, None, :, None].expand(-1, *x.shape[1:2], -1, x.shape[3]))
        heads = x.shape[1]
        if heads not in self.indices:
            first = torch.arange(len(x) * heads, device=x.device)[:, None] * x.shape[2]  # (B·H, 1)
            self.indices[heads] = (first + self.order.repeat_interleave(heads, 0)).flatten()  # (B·H·n,)
        return _Reordered.apply(x, self.indices[heads])


class _Reordered(torch.autograd.Function):
    """Whole rows in another order, which is its own inverse: so is the derivative. `gather` goes number by number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1]).index_select(0, index).view(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return _Reordered.apply(grads[0], index), None


# ---- grids --------------------------------------------------------------------------------------------------


def _grid_groups(module, group_set: GroupSet, tokens: Tokens, features, find: Find) -> Source:
    """Columns and rows, see `group_pool`."""
    about, exists = (group_set.pool, group_set.size, module.options.causal), tokens.call.exists
    query, key = group_pools(features, exists, module.abstraction.pool, *about)
    value = find(query, (tokens.k, tokens.v, exists))
    return key, value, groups_with_members(tokens.k, exists, *about)


def _asked_rows(module, c: int, tokens: Tokens, features, find: Find) -> Source:
    """Rows that the token in the query's column asks: local queries stand where their tokens do."""
    (fq, fk), exists, n = features, tokens.call.exists, tokens.q.shape[2]
    alive: Tensor | None
    if is_symbolic(n):
        query, alive = _asked_for_any_length(fq, exists, c)
    else:
        rows = -(-n // c) - module.options.causal
        if exists is None and rows * c > n:  # a partial last row
            exists = torch.ones(1, 1, n, dtype=torch.bool, device=fq.device)
        real = None if exists is None else grid(exists, rows, c)[..., None]  # (B or 1, 1, rows, c, 1)
        query = grid(fq, rows, c)
        query = (query if real is None else query.masked_fill(~real, 0)).flatten(2, 3)
        alive = None if real is None else real.any(3, keepdim=True).expand(real.shape).flatten(2)
    key, value = (find(query, (tokens.k, x, tokens.call.exists)) for x in (fk, tokens.v))
    return key, value, alive


def _asked_for_any_length(fq: Tensor, exists: Tensor | None, c: int) -> tuple[Tensor, Tensor]:
    """Local queries (B, H, n + c, d), and whether their row has a token, (B or 1, 1, n + c)."""
    n = fq.shape[2]
    exists = torch.ones(1, 1, n, dtype=torch.bool, device=fq.device) if exists is None else exists
    row = torch.arange(n + c, device=fq.device) // c
    members = exists.new_zeros(*exists.shape[:2], n + c, dtype=torch.int64)
    members = members.index_add(2, row[:n], exists.long())  # (B or 1, 1, n + c): tokens of each row
    return F.pad(fq.masked_fill(~exists[..., None], 0), (0, 0, 0, c)), members.index_select(2, row) > 0


# ---- projected keys -----------------------------------------------------------------------------------------


class SummaryKeys(nn.Module):
    """Combiner-Axial with projected summaries, as the authors' language models have them (`summary=proj`).

    The summary of row Ω asked in column c stands at the token p = (row, c). Its value is what q_p finds in the row, as
    everywhere; its key is made from that value and from the token itself, by parameters of its own:

        v_Ω = Σ_{j ∈ Ω} softmax_j(q_p·k_j·scale) v_j
        k_Ω = W_2 LayerNorm(x_p + W_1 [v_Ω of all heads])

    x_p is the layer's input at p, 0 where there is no such token. Heads meet in W_1, and a mechanism on q, k, v does
    not know x: this one is of level "layer".
    """

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
    everyone = q.new_ones(q.shape[0], q.shape[2], dtype=torch.bool) if key_mask is None else key_mask
    for b, own in real_spans(everyone):
        real = everyone[b]
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
    x, (q, k, v) = projected(module, query, project, key_mask)
    rows, q, k, v = module._begin(q, k, v, key_mask)
    return rows, rows.align(x[:, None])[:, 0], (q, k, v)


def projected(module: Any, query: Tensor, project: Any, key_mask: Tensor | None) -> tuple[Tensor, Any]:
    """x (B, n, E), 0 in padded slots, and q, k, v (B, H, n, d)."""
    heads, d = module.options.num_heads, module.options.head_dim
    if query.shape[-1] != heads * d:
        raise ValueError(f"summary=proj needs tokens of width num_heads·head_dim = {heads * d}, not {query.shape[-1]}")
    x = query if key_mask is None else query.masked_fill(~key_mask[..., None], 0)
    q, k, v = project.together(x, x, x)
    if k.shape[1] != heads:
        raise ValueError(f"summary=proj needs as many key heads as num_heads={heads}, not {k.shape[1]}")
    check_inputs(module, q, k, v, key_mask)
    return x, (q, k, v)
