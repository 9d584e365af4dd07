"""Composite Slice attention (Lee et al. 2023): attention inside slices, then attention between slices.

Tokens X (n, D) are cut into slices S of L tokens; W are the layer's own projections, P the positions:

    Y_l = softmax((S + P_l)W_q · ((S_ext + P_l)W_k)ᵀ) S_ext W_v    eqs. 8, 13: a token to its extended slice
    Z_t = Σ_l m_tl Y_tl / Σ_l m_tl                                 the mean of the real tokens of a slice
    Y_g = softmax((Z + P_g)W_q · ((Z + P_g)W_k)ᵀ) Z W_v            eqs. 9, 14: a slice to every slice
    Y_i = Y_l,i + Y_g,t(i)                                         eq. 10, then the output projection

Heads are concatenated before the mean. Cost n·α·L + n²/L².

The choices made:
- S_ext (eqs. 11, 12) reaches r = (α-1)L/2 tokens beyond both ends of the slice, causal beyond the left one;
  what lies outside the sequence does not exist. P_l has αL rows: the slice is its middle L, or last L.
- Causal: slice t is given what a causal global attention gives to slice t-1. That is the paper's scheme, the
  query of slice t-1 and keys strictly before t; slice 0 is given nothing.
- A slice of padding alone is no key; where it asks, it asks with Z = 0.
- `parallel` pools the tokens instead of Y_l; `global-local` then also feeds X + Y_g to the local attention.
- `local=mlp` is Y_l = W_2 gelu(W_1 S W_v) over the L places of a slice, one for all channels, with no bias
  (padding is 0); causal, unit h reads the places up to ⌊hL/hidden⌋ and writes to those from there on.
- `pool=linear` is Σ_l m_l Y_l W_l / Σ_l m_l with a matrix W_l (E, E) per place, a 1-D convolution whose kernel and
  stride are L (table 8); every W_l is the identity at first: the mean.
- `levels=3`: slices of slices, the same composition once more in place of the global attention, and so on.
- `share_weights=False` gives each coarser scale its own W, with no bias, as eq. 9 is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.base import Attention, Capabilities
from subquad.attention.call import Call, Record, Rows, clean_tokens, length_groups, put_together
from subquad.attention.checks import check_lengths, check_mask, refuse_tangents
from subquad.attention.composite_slice_definition import Definition
from subquad.attention.slicing import AnyLengthComposer, Composer, Tokens, each
from subquad.attention.states import entrance
from subquad.attention.states.slices import Slices
from subquad.attention.states.state import Memory
from subquad.core.hashing import dropout_factors
from subquad.core.numbers import is_symbolic
from subquad.core.options import Options, option
from subquad.positions import MultiScalePositions


@dataclass(frozen=True, kw_only=True)
class SliceOptions(Options):
    slice_length: int = option(32, "tokens of a slice, L", ge=1)
    extension: float = option(1.0, "α: keys reach (α-1)L/2 beyond the slice, a whole number", ge=1, le=3)
    positions: Literal["none", "ms-vipe"] = option("none", "positions inside the layer; ms-vipe needs max_length")
    interpolate: bool = option(False, "positions=ms-vipe: stretch the global ones beyond max_length, not raise")
    composition: Literal["local-global", "parallel", "global-local"] = option("local-global", "order of the scales")
    local: Literal["attention", "mlp"] = option("attention", "what mixes the tokens of a slice")
    hidden: int | None = option(None, "local=mlp: hidden units; None = slice_length", ge=1)
    pool: Literal["mean", "max", "linear"] = option("mean", "how a slice becomes one embedding")
    share_weights: bool = option(True, "all scales use the layer's projections")
    levels: int = option(2, "scales: 2 = tokens and slices, 3 = slices of slices, …", ge=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        length, alpha = self.slice_length, self.extension
        if abs((alpha - 1) * length / 2 - self.reach) > 1e-6:
            raise ValueError(f"extension must make (α-1)·slice_length/2 whole, not {alpha} with slice_length={length}")
        if self.positions == "ms-vipe" and self.max_length is None:
            raise ValueError("max_length is needed with positions=ms-vipe: an integer ≥ 1")
        if self.interpolate and self.positions == "none":
            raise ValueError("interpolate=True needs positions=ms-vipe, not none")
        if self.local == "attention" and self.hidden is not None:
            raise ValueError(f"hidden={self.hidden} needs local=mlp, not attention")
        if self.local == "mlp" and self.reach:
            raise ValueError(f"extension must be 1 with local=mlp, not {alpha}")
        if self.causal and self.hidden is not None and self.hidden < length:
            raise ValueError(f"hidden must be ≥ slice_length={length} when causal, not {self.hidden}")

    @property
    def reach(self) -> int:
        return round((self.extension - 1) * self.slice_length / 2)

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


class SliceMLP(nn.Module):
    """Two layers that mix the L places of a slice, dropout on the units; causal by masks on the weights."""

    unread: Tensor
    unwritten: Tensor

    def __init__(self, length: int, hidden: int, causal: bool) -> None:
        super().__init__()
        self.first = nn.Linear(length, hidden, bias=False)
        self.second = nn.Linear(hidden, length, bias=False)
        place, last = torch.arange(length), torch.arange(hidden) * length // hidden
        self.register_buffer("unread", (place > last[:, None]) & causal, persistent=False)  # (hidden, L)
        self.register_buffer("unwritten", (last > place[:, None]) & causal, persistent=False)  # (L, hidden)

    def forward(self, v: Tensor, call: Call, numbers: Tensor | None = None) -> Tensor:  # slices (B·m, L, E)
        """`numbers` (B·m,): by which dropout counts the slices; None = in order."""
        first = self.first.weight.masked_fill(self.unread, 0)
        second = self.second.weight.masked_fill(self.unwritten, 0)
        units = F.gelu(first.expand(len(v), -1, -1).bmm(v))  # (B·m, hidden, E)
        if call.dropout and call.seed is not None:
            place, unit, channel = (torch.arange(size, device=v.device) for size in units.shape)
            place = place if numbers is None else numbers
            about = (place[:, None, None], unit[:, None], channel, units.dtype)
            units = units * dropout_factors(call.seed, call.dropout, *about)
        return second.expand(len(v), -1, -1).bmm(units)


class OwnWeights(nn.Module):
    """Input projections of a coarser scale, with the methods of the layer's own."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim, width = head_dim, num_heads * head_dim
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.in_proj_weight)

    def queries(self, x: Tensor) -> Tensor:
        return self._project(0, x)

    def keys(self, x: Tensor) -> Tensor:
        return self._project(1, x)

    def values(self, x: Tensor) -> Tensor:
        return self._project(2, x)

    def together(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.queries(query), self.keys(key), self.values(value)

    def _project(self, which: int, x: Tensor) -> Tensor:
        weight = self.in_proj_weight.chunk(3)[which]
        return F.linear(x, weight).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, n, d)


class CompositeSlice(Attention):
    __doc__ = __doc__

    Options = SliceOptions
    capabilities = Capabilities(level="layer", weights=False)
    family = "multi-scale"
    theory_reason = "beyond its own slice a token learns of others through summaries of their slices"
    published_positions = "own"  # MS-VIPE
    paper = "Lee et al. 2023"
    cost = "n·α·L + n²/L²"
    countable = None
    boundary = "slice embeddings, at most one partial slice, and the extension's halo"
    exponent = 4 / 3  # with L near (2n/α)^(1/3); a fixed L is linear until n ≈ L³
    examples = (
        {},
        {"slice_length": 8, "extension": 2.0, "positions": "ms-vipe", "max_length": 16384},
        {"slice_length": 8, "levels": 3, "composition": "global-local", "pool": "linear", "share_weights": False},
    )
    gallery = {"slice_length": 8}

    def __init__(self, options: SliceOptions) -> None:
        super().__init__(options)
        o, coarser = options, range(options.levels - 1)
        own = () if o.share_weights else (OwnWeights(o.num_heads, o.head_dim) for _ in coarser)
        self.own: Any = nn.ModuleList(own)
        mlps = (SliceMLP(o.slice_length, o.hidden or o.slice_length, o.causal) for _ in coarser)
        self.mlps = nn.ModuleList(mlps if o.local == "mlp" else ())
        weights = (nn.Parameter(torch.eye(o.width).repeat(o.slice_length, 1, 1)) for _ in coarser)  # (L, E, E)
        self.pools = nn.ParameterList(weights if o.pool == "linear" else ())
        self.positions: Any = None if o.positions == "none" else self._make_positions()

    def _make_positions(self) -> MultiScalePositions:
        o = self.options
        local = 0 if o.local == "mlp" else o.slice_length + 2 * o.reach
        slices = -(-o.max_length // o.slice_length ** (o.levels - 1))
        return MultiScalePositions(o.width, local=local, slices=slices, scales=o.levels, interpolate=o.interpolate)

    def share_positions(self, other: CompositeSlice) -> None:
        """Use the positions of another layer: MS-VIPE is one for a whole model."""
        if self.positions is None or getattr(other, "positions", None) is None:
            raise ValueError("share_positions: both layers need positions=ms-vipe")
        mine, theirs = ([p.shape for p in x.positions.parameters()] for x in (self, other))
        if mine != theirs:
            raise ValueError(f"share_positions: the tables have shapes {mine} here and {theirs} there")
        self.positions = other.positions

    def attend(self, q, k, v, call):
        raise TypeError(
            f"{self.name} works on tokens and their projections, not on q, k, v: use "
            f"subquad.MultiheadAttention(embed_dim, num_heads, attention={self.name!r})"
        )

    def token_weights(self, query, key, project, key_mask, seed=None):
        raise TypeError(
            f"{self.name} has no single matrix of weights, it adds scales up: pass need_weights=False; "
            "attention.weights(query, key, value, project) gives the weights of each scale"
        )

    def connections(self, n: int) -> float:
        """n·αL at each scale, then all pairs of the coarsest; a causal layer computes about half of them."""
        total, o = 0.0, self.options
        for _ in range(o.levels - 1):
            total += n * o.extension * min(o.slice_length, n)
            n = -(-n // o.slice_length)
        return (total + n * n) / (2 if o.causal else 1)

    # ---- the fast path ----

    def attend_tokens(self, query, key, value, project, key_mask, seed=None, *, want_record=False):
        self._check(query, key, value, key_mask)
        refuse_tangents(self, query, key, value, project=project)
        if self.across is not None:
            return self.across.attend_tokens(self, query, key, value, project, key_mask, seed)
        rows = Rows.of(key_mask, align=True)
        call = self._call(rows, seed, query.shape[1])
        tokens = each(lambda x: rows.align(x[:, None])[:, 0], (query, key, value))
        alone = not call.dropout and not self.options.interpolate and project.affine  # no row depends on the others
        groups = length_groups(rows.lengths, query) if alone else []
        if not groups:
            out = self._composed(tokens, project, rows.key_mask, call)
        else:
            cut = [(each(group.cut, tokens), group.cut(rows.key_mask)) for group in groups]
            out = put_together([self._composed(x, project, real, call) for x, real in cut], groups, query.shape[1])
        return rows.restore(out[:, None])[:, 0], Record()

    def _composed(self, tokens: Tokens, project: Any, real: Tensor | None, call: Call) -> Tensor:
        """All scales of tokens (B, n, E); `real` bool (B, n): which exist."""
        tokens = each(lambda x: clean_tokens(x, real), tokens)
        return clean_tokens(self._composer(call).compose(tokens, project, real, 0), real)

    def _composer(self, call: Call) -> Composer:
        return (AnyLengthComposer if is_symbolic(call.slots) else Composer)(self, call)

    def extend(self, q, k, v, state, *, key_mask=None):
        return self.attend(q, k, v, None)  # raises, and says who can

    def extend_tokens(self, query, project, state, key_mask=None):
        self._check(query, query, query, key_mask)
        out, state = entrance.extend_tokens(self, query, state, key_mask, project)
        return out[:, 0], state

    def make_memory(self, margin: int) -> Memory:
        return Slices(self.options, margin)

    def kept_keys(self, n: int) -> float:
        """αL tokens at each scale, as embeddings too, and all of the coarsest."""
        o = self.options
        return 2 * (o.levels - 1) * o.extension * o.slice_length + n / o.slice_length ** (o.levels - 1)

    def _call_of(self, seed: Tensor | None) -> Call:
        return Call(seed=seed, dropout=self.options.dropout if self.training else 0.0, training=self.training)

    def attend_tokens_shard(self, tokens: Tokens, project: Any, call: Call) -> Tensor:
        """`attend_tokens` on a part of a sequence: tokens (b, t, E) → (b, t, E)."""
        from subquad.attention.composite_slice_shard import ShardComposer

        return ShardComposer(self, call).compose_shard(tokens, project)

    def _check(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> None:
        if not self.options.interpolate:
            check_lengths(self, query.shape[1], key.shape[1])
        if query.shape[0] < 1:
            raise ValueError("query has batch size 0: it must be at least 1")
        if query.shape[2] != self.options.width:
            raise ValueError(
                f"{self.name}: tokens have width {query.shape[2]}, the heads together {self.options.width}: they must "
                "be equal, because pooled outputs go through the same projections"
            )
        for name, x in (("key", key), ("value", value)):
            if x.shape != query.shape:
                raise ValueError(
                    f"{self.name}: {name} must have the shape of query, {tuple(query.shape)}, not "
                    f"{tuple(x.shape)}: pooled outputs go through the same projections"
                )
        check_mask(self, key[:, None], key_mask)

    # ---- the definition ----

    def dense_tokens(self, query, key, value, project, key_mask=None):
        """The oracle, slice by slice from eqs. 8 to 14: what `attend_tokens` must equal."""
        return self._define(query, key, value, project, key_mask, {})

    @torch.no_grad()
    def weights(self, query, key, value=None, project=None, *, key_mask=None):
        """The weights of each scale from the definition, finest first: (B, H, n, n), (B, H, m, m), …

        `project` is `subquad.layers.Projections(layer)`. Row t of a causal coarse scale is what slice t is
        given, row 0 empty. An MLP has no weights: None stands in its place.
        """
        if project is None:
            raise TypeError(f"{self.name}: weights takes query, key, value and project, not q and k")
        o, found = self.options, {}
        self._define(query, key, value, project, key_mask, found)
        nothing = query.new_zeros(query.shape[0], o.num_heads, 1, 1)  # one slice, causal: no coarser scale
        for scale in range(1, o.levels) if o.causal else ():
            found[scale] = F.pad(found[scale], (0, 1, 1, 0)) if scale in found else nothing
        return tuple(None if o.local == "mlp" and s < o.levels - 1 else found[s] for s in range(o.levels))

    def _define(self, query, key, value, project, key_mask, found):
        self._check(query, key, value, key_mask)
        real = torch.ones_like(query[..., 0], dtype=torch.bool) if key_mask is None else key_mask
        if key_mask is None:
            return Definition(self, found).compose((query, key, value), project, real, 0)
        rows, weights = [], []
        for b, mask in enumerate(real):  # each row from its first real token to its last
            places, own = mask.nonzero()[:, 0], slice(0, 0)
            out, seen = torch.zeros_like(query[b]), {}
            if len(places):
                own = slice(int(places[0]), int(places[-1]) + 1)
                one = [clean_tokens(x[b : b + 1, own], mask[None, own]) for x in (query, key, value)]
                piece = Definition(self, seen).compose(one, project, mask[None, own], 0)
                out = out.index_copy(0, torch.arange(own.start, own.stop, device=out.device), piece[0])
            rows.append(out.masked_fill(~mask[:, None], 0))
            weights.append((own.start, seen))
        found.update(self._gathered(weights, query))
        return torch.stack(rows)

    def _gathered(self, rows: list[tuple[int, dict[int, Any]]], query: Tensor) -> dict[int, Tensor]:
        """The weights of every row, each (1, H, r, r) from its first token or slice on, as one tensor per scale."""
        o, found, size = self.options, {}, query.shape[1]
        for scale in range(o.levels):
            if scale:  # causal: the last slice is asked by nobody
                size = -(-size // o.slice_length) - o.causal
            if not size:
                break
            whole = query.new_zeros(len(rows), o.num_heads, size, size)
            for one, (start, seen) in zip(whole, rows, strict=True):
                if seen.get(scale) is not None:
                    first, length = start if scale == 0 else 0, seen[scale].shape[2]
                    one[:, first : first + length, first : first + length] = seen[scale][0]
            found[scale] = whole
        return found

    def summaries(self, n: int) -> tuple[list[Sequence[int]], list[list[int]]]:
        """The slices of the finest scale; causal: those before the query's."""
        size, causal = self.options.slice_length, self.options.causal
        sets: list[Sequence[int]] = [range(first, min(n, first + size)) for first in range(0, n, size)]
        return sets, [list(range(i // size if causal else len(sets))) for i in range(n)]

    def picture(self, n: int) -> Tensor:
        o, i, j = self.options, torch.arange(n)[:, None], torch.arange(n)
        first = i // o.slice_length * o.slice_length
        near = (j >= first - o.reach) & (j < first + o.slice_length + o.reach)
        return self.support(n) * torch.where(near, 1, 2)
