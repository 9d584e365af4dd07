"""Attention over a sparsity pattern (Yun et al., section 3.1, eq. 2):

    out_k = Σ_{j ∈ A_k^l} ρ[ (q_k·k_j·scale)_{j ∈ A_k^l} ]_j v_j

The sets come from `supports.patterns`. With p > 1 families `heads` says how a layer uses them (section 5):
`sequential` layer l takes family l mod p, `union` every head takes all families at once, `multihead` the heads
are split evenly over the families. Softmax over regular sets runs as blocks through the merge kernel; other sets, and
other probability maps ρ, run over the edge list. The whole matrix of scores is computed for other maps in a compiled
graph alone. In padded rows on a device, whose lengths the host does not read, queries that see everyone are computed
for themselves (`Pattern.global_queries`): where they stand can follow from the length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from subquad.attention.call import Call
from subquad.attention.full import MapOptions, masked_map
from subquad.attention.sized import SizedAttention
from subquad.attention.states.chosen import NamedKeys
from subquad.attention.states.keys import Keys, attend_kept
from subquad.attention.states.state import Memory
from subquad.core.hashing import dropout_factors, ranks
from subquad.core.options import option
from subquad.kernels.merge import merge_attention
from subquad.kernels.pattern_lists import lists_on_device, pattern_attention, pattern_mapped_attention
from subquad.kernels.tables import UNION, global_queries, pattern_mask, reads_no_length
from subquad.supports.kept import EVERYTHING
from subquad.supports.pattern import Pattern
from subquad.supports.shards import Tail


@dataclass(frozen=True, kw_only=True)
class PatternOptions(MapOptions):
    heads: Literal["sequential", "union", "multihead"] = option("sequential", "how heads and layers share the families")
    layer_index: int = option(0, "heads=sequential: number of the layer, picks family layer_index mod p", ge=0)


class PatternAttention(SizedAttention):
    """Attention over the sets of a pattern; a subclass names the pattern and its options."""

    family = "sparse pattern"
    grouped = True
    stays_inside = True
    boundary = "the keys of others that its sets name: a halo, global tokens, column tokens"
    kind: ClassVar[type[Pattern]]
    own_options: ClassVar[tuple[str, ...]] = ()  # options that are the pattern's

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.pattern: Any = self.with_sizes(self.make_pattern(options))
        self._has_parts = self.pattern.has_parts
        self.maps: Any = nn.ModuleList(options.probability_map(len(heads)) for heads, _ in self.head_groups())

    def make_pattern(self, options: Any) -> Pattern:
        own = {key: getattr(options, key) for key in self.own_options}
        return self.kind(causal=options.causal, **own)

    def sized(self, n: int) -> Any:
        """The pattern with every size decided, for a call of length n."""
        return self.pattern if self._is_sized else self.pattern.sized(n)

    @property
    def data_dependent(self) -> bool:
        """Edge lists have a length of their own."""
        return not self._has_parts or self.options.map != "softmax"

    def host_reads(self, padded: bool, dtype: torch.dtype = torch.float32, length: int | None = None) -> str:
        in_blocks = self.options.map == "softmax" and self._has_parts
        known = reads_no_length(self.sized(1).text, in_blocks=in_blocks)
        return "" if known or not padded else "the lengths of rows, which their sets depend on"

    def head_groups(self) -> list[tuple[range, int | None]]:
        """Which heads use which family; None = the union of all."""
        heads, p = self.options.num_heads, self.pattern.families
        if self.options.heads == "union" or p == 1:
            return [(range(heads), None)]
        if self.options.heads == "sequential":
            return [(range(heads), self.options.layer_index % p)]
        cuts = [heads * f // p for f in range(p + 1)]
        return [(range(cuts[f], cuts[f + 1]), f) for f in range(p) if cuts[f] < cuts[f + 1]]

    # ---- the fast path ----

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        text = self.text_for(self.pattern, call.slots)
        if self.options.map == "softmax" and self._has_parts:
            return self._by_blocks(text, q, k, v, call)
        if self.options.map != "softmax" and torch.compiler.is_compiling():
            seen = pattern_mask(q, text, self._families(), q.shape[2], call.lengths)  # (B, 1 or H, n, n)
            return self._densely(seen, q, k, v, call)
        sets, scale = (text, self._families(), call.lengths), self.options.softmax_scale
        about: dict[str, Any] = {"key_mask": call.key_mask, "dropout": call.dropout, "seed": call.seed, "scale": scale}
        if self.options.map == "softmax":
            return pattern_attention(q, k, v, *sets, **about)
        out = pattern_mapped_attention(q, k, v, *sets, self.map_of_heads, **about)
        return self._with_global_queries(out, text, q, k, v, call) if lists_on_device(q, text, call.lengths) else out

    def _with_global_queries(self, out: Tensor, text: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """What the queries that see everyone give, added to 0 in their places."""
        assert call.lengths is not None
        places = global_queries(text, q.shape[2], call.lengths)  # (B, r)
        if places is None:
            return out
        at = places[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
        seen = (places < call.lengths[:, None])[:, None, :, None]  # (B, 1, r, 1)
        return out.scatter_add(2, at, self._densely(seen, q.gather(2, at), k, v, call, places).to(out.dtype))

    def _by_blocks(self, text: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Softmax over regular sets: blocks, a group of heads at a time."""
        about: dict[str, Any] = {"lengths": call.lengths, "valid": [call.exists]}
        about |= {"dropout": call.dropout, "seed": call.seed, "scale": self.options.softmax_scale}

        def attend(which: str, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            return merge_attention(x, [y], [z], text, which, q.shape[2], **about)

        return self._by_groups(attend, q, k, v)

    def _by_groups(self, attend: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """attend(plan, tensors) for the heads of every plan: (B, H, n, d)."""
        outs = []
        for heads, family in self.head_groups():
            own = (_heads(x, heads, self.options.num_heads) for x in tensors)
            outs.append(attend("union" if family is None else str(family), *own))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def instances(self, batch: int, device: torch.device) -> Tensor:
        """Groups of heads that have kernels of their own count from 0 each."""
        if self.options.map != "softmax" or not self._has_parts:
            return super().instances(batch, device)
        groups = [len(heads) for heads, _ in self.head_groups()]
        return torch.cat([torch.arange(batch * size, device=device).view(batch, size) for size in groups], 1)

    def attend_last(self, q: Tensor, keys: list[Tensor], values: list[Tensor], real: Tensor | None) -> Tensor:
        """The last queries (B, H, t, d) of a sequence, whose keys and values (B, H or H/g, ·, d) are given in two
        pieces: those of these t tokens, and those of the tokens before, real (B, ·) or all.
        """
        t, first = q.shape[2], keys[1].shape[2]
        n, scale = first + t, self.options.softmax_scale
        text = self.text_for(self.pattern, n)
        if self.options.map != "softmax" or not self._has_parts:
            k, v = (torch.cat(x[::-1], 2) for x in (keys, values))
            q = torch.cat((torch.zeros_like(q[:, :, :1]).expand(-1, -1, first, -1), q), 2)
            real = None if real is None else torch.cat((real, real.new_ones(q.shape[0], t)), 1)
            lengths = torch.full((q.shape[0],), n, device=q.device)
            return self.attend_aligned(q, k, v, real, lengths, None)[:, :, first:]
        support, valid = Tail(of=text, first=first, sources=1).text, [None, None if real is None else real[:, None]]

        def attend(which: str, x: Tensor, *own: Tensor) -> Tensor:
            return merge_attention(x, own[:2], own[2:], support, which, n, scale=scale, valid=valid)

        return self._by_groups(attend, q, *keys, *values)

    @property
    def divides(self) -> bool:
        return bool(self.boundary) and self._has_parts and self.options.map == "softmax"

    def attend_shard(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """`_by_blocks` for the queries of this process."""
        shard, text, scale = call.shard, self.text_for(self.pattern, call.slots), self.options.softmax_scale

        def attend(which: str, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            sources = [(y, z, shard.exists, shard.cut)]
            return shard.merge(x, sources, text, which, call, queries=shard.cut, scale=scale)

        return self._by_groups(attend, q, k, v)

    def _families(self) -> list[int]:
        """The family of every head, or of all of them."""
        groups = self.head_groups()
        numbers = [UNION if family is None else family for _, family in groups]
        return (
            numbers if len(groups) == 1 else [f for (heads, _), f in zip(groups, numbers, strict=True) for _ in heads]
        )

    def _densely(
        self, seen: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call, places: Tensor | None = None
    ) -> Tensor:
        """On the whole matrix of scores, under a mask (B, 1 or H, n, n); `places` (B, r) are those of some queries."""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        weights = masked_map(self.map_of_heads, q, k, seen, call.key_mask, self.options.softmax_scale)
        return _dropped(weights, call, places).to(v.dtype) @ v

    def map_of_heads(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """ρ of every head: scores and mask (B, H, …, keys)."""
        if len(self.maps) == 1:
            return self.maps[0](scores, allowed)
        allowed = allowed.expand(scores.shape)
        groups = [slice(heads.start, heads.stop) for heads, _ in self.head_groups()]
        pieces = [rho(scores[:, g], allowed[:, g]) for rho, g in zip(self.maps, groups, strict=True)]
        return torch.cat(pieces, 1)

    # ---- streaming ----

    def make_memory(self, margin: int) -> Memory:
        families = [None if f == UNION else f for f in self._families()]
        used = list(dict.fromkeys(families))
        kept = self.pattern.kept(used, margin)
        sees = [FamilySees(self.pattern, family) for family in used]
        heads = [used.index(family) for family in families]
        heads = heads * self.options.num_heads if len(heads) == 1 else heads
        if kept == EVERYTHING:
            return NamedKeys(kept, sees, heads, margin)
        ranges = partial(self.pattern.ranges, used) if len(used) == 1 else None
        return Keys(kept, sees, heads, margin, ranges, self.pattern.begin)

    def attend_kept(self, q, k, v, seen, position, factors=None):
        rho = None if self.options.map == "softmax" else self.map_of_heads
        return attend_kept(q, k, v, seen, self.options.softmax_scale, factors, rho)

    # ---- the definition ----

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        seen = self._seen(self.sized(call.slots), q.shape[2]).to(q.device)
        return masked_map(self.map_of_heads, q, k, seen, call.key_mask, self.options.softmax_scale)

    def support(self, n: int) -> Tensor:
        seen = self._seen(self.sized(n), n)
        return seen[0] if len(seen) == 1 else seen

    def _seen(self, pattern: Pattern, n: int) -> Tensor:
        """bool (1 or H, n, n)."""
        masks = {f: pattern.mask(n, None if f == UNION else f) for f in set(self._families())}
        return torch.stack([masks[f] for f in self._families()])


class FamilySees:
    """The definition of a family, as streaming asks for it; a class, so that a state can be pickled."""

    def __init__(self, pattern: Pattern, family: int | None) -> None:
        self.pattern, self.family = pattern, family

    def __call__(self, source: int, i: Tensor, j: Tensor) -> Tensor:
        return self.pattern.sees(self.family, i, j)


def _dropped(weights: Tensor, call: Call, places: Tensor | None) -> Tensor:
    """Dropout on weights (B, H, n or r, n), which counts the real tokens of a row as for lists of edges."""
    if not call.dropout:
        return weights
    assert call.seed is not None
    (b, h, _, n), device = weights.shape, weights.device
    rows, columns = ranks(call.key_mask, b, n, n, device)  # (B, n)
    rows = rows if places is None else rows.gather(1, places)
    instance = torch.arange(b * h, device=device).view(b, h, 1, 1)
    row, column = rows[:, None, :, None], columns[:, None, None]
    return weights * dropout_factors(call.seed, call.dropout, instance, row, column, weights.dtype)


def _heads(x: Tensor, heads: range, total: int) -> Tensor:
    """Some of the query heads, or the key heads that serve them; where a key head serves others too, a copy each."""
    if len(heads) == total:
        return x
    group = total // x.shape[1]
    if heads.start % group or heads.stop % group:
        return x.repeat_interleave(group, 1)[:, heads.start : heads.stop]
    return x[:, heads.start // group : heads.stop // group]
