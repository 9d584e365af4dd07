"""Attention over a sparsity pattern (Yun et al., section 3.1, eq. 2):

    out_k = Σ_{j ∈ A_k^l} ρ[ (q_k·k_j·scale)_{j ∈ A_k^l} ]_j v_j

The sets come from `supports.patterns`. With p > 1 families `heads` says how a layer uses them (section 5):
`sequential` layer l takes family l mod p, `union` every head takes all families at once, `multihead` the heads
are split evenly over the families. Softmax over regular sets runs as blocks through the merge kernel; other
sets, and other probability maps ρ, run over the edge list; what is nearly dense, as on short sequences, runs as
masked full attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.attention.base import Attention, Capabilities
from subquad.attention.full import MapOptions, masked_map, sdpa
from subquad.core.options import option
from subquad.kernels.blocks import plan, unplan
from subquad.kernels.constants import constant
from subquad.kernels.edges import EdgeList, edge_attention, edge_map, edge_scores, edge_sum
from subquad.kernels.merge import merge_attention
from subquad.supports import patterns as supports
from subquad.supports.patterns import Pattern

DENSE = 0.75  # share of all pairs from which on blocks are not worth their while


@dataclass(frozen=True, kw_only=True)
class PatternOptions(MapOptions):
    heads: Literal["sequential", "union", "multihead"] = option("sequential", "how heads and layers share the families")
    layer_index: int = option(0, "heads=sequential: number of the layer, picks family layer_index mod p", ge=0)


@lru_cache(maxsize=128)
def _blocks(pattern: Pattern, n: int, family: int | None) -> tuple[int, ...] | None:
    parts = pattern.parts(n, family)
    return None if parts is None else plan(parts, n, pattern.drawn(n))


@lru_cache(maxsize=16)
def _edges(pattern: Pattern, n: int, family: int | None) -> EdgeList:
    return pattern.edges(n, family)


@torch.compiler.assume_constant_result
def _plan(pattern: Pattern, n: int, family: int | None) -> tuple[int, ...] | None:
    """The blocks for length n, None for sets that have none. A compiled graph takes it as a constant."""
    return _blocks(pattern, n, family)


@lru_cache(maxsize=128)
def _nearly_dense(pattern: Pattern, n: int, family: int | None) -> bool:
    blocks = _blocks(pattern, n, family)
    return blocks is not None and sum(p.blocks * p.q_len * p.k_len for p in unplan(blocks)) > DENSE * n * n


@torch.compiler.assume_constant_result
def _runs_dense(pattern: Pattern, n: int, family: int | None) -> bool:
    """Blocks that multiply most of all n² pairs are slower than one masked product (causal ones save a half)."""
    return n >= 256 and not pattern.causal and _nearly_dense(pattern, n, family)


@torch.compiler.assume_constant_result
def _bucket_count(pattern: Pattern, n: int, family: int | None) -> int:
    return len(_edges(pattern, n, family).buckets[0])


def _mask(pattern: Pattern, n: int, family: int | None) -> Tensor:
    return pattern.mask(n, family)


def _indptr(pattern: Pattern, n: int, family: int | None) -> Tensor:
    return _edges(pattern, n, family).indptr


def _indices(pattern: Pattern, n: int, family: int | None) -> Tensor:
    return _edges(pattern, n, family).indices


def _bucket(pattern: Pattern, n: int, family: int | None, bucket: int, which: int) -> Tensor:
    """The slots (which = 0) or the mask (1) of a bucket."""
    return _edges(pattern, n, family).buckets[0][bucket][which]


def _place(pattern: Pattern, n: int, family: int | None) -> Tensor:
    return _edges(pattern, n, family).buckets[1]


class PatternAttention(Attention):
    """Attention over the sets of a pattern; a subclass names the pattern and its options."""

    capabilities = Capabilities()
    family = "sparse pattern"
    passed: ClassVar[tuple[str, ...]] = ()  # options that are the pattern's own

    def __init__(self, options: PatternOptions) -> None:
        super().__init__(options)
        self.pattern = self.make_pattern(options)
        self.maps: Any = nn.ModuleList(options.probability_map(len(heads)) for heads, _ in self.head_groups())

    def make_pattern(self, options: Any) -> Pattern:
        own = {key: getattr(options, key) for key in self.passed}
        return getattr(supports, type(self).__name__)(causal=options.causal, **own)

    def head_groups(self) -> list[tuple[range, int | None]]:
        """Which heads use which family; None = the union of all."""
        heads, p = self.options.num_heads, self.pattern.families
        if self.options.heads == "union" or p == 1:
            return [(range(heads), None)]
        if self.options.heads == "sequential":
            return [(range(heads), self.options.layer_index % p)]
        cuts = [heads * f // p for f in range(p + 1)]
        return [(range(cuts[f], cuts[f + 1]), f) for f in range(p) if cuts[f] < cuts[f + 1]]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        outs = []
        for rho, (heads, family) in zip(self.maps, self.head_groups(), strict=True):
            chosen = slice(heads.start, heads.stop)
            outs.append(self._attend(q[:, chosen], k[:, chosen], v[:, chosen], key_mask, family, rho))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _attend(self, q, k, v, key_mask, family, rho) -> Tensor:
        n, scale = index(q.shape[2]), self.options.softmax_scale  # index: one compiled graph per length
        given = (self.pattern, n, family)
        blocks = _plan(*given) if self.options.map == "softmax" else None
        if blocks is not None and _runs_dense(*given):
            seen = constant(_mask, *given).to(q.device)  # (n, n)
            seen = seen if key_mask is None else seen & key_mask[:, None, None, :]
            return sdpa(q, k, v, seen, causal=False, scale=scale, drop=self.drop)
        if blocks is not None:
            valid = None if key_mask is None else [key_mask[:, None]]
            return merge_attention(q, [k], [v], blocks, scale=scale, valid=valid, dropout=self.drop)
        edges = EdgeList(constant(_indptr, *given).to(q.device), constant(_indices, *given).to(q.device), n)
        if self.options.map != "softmax":
            return self._mapped(q, k, v, key_mask, family, rho, edges)
        if key_mask is not None:
            edges = edges.masked(key_mask, q.shape[1])
        shape = (q.shape[0] * q.shape[1] // edges.num_graphs, edges.num_edges)
        gate = F.dropout(q.new_ones(shape), self.drop) if self.drop else None
        return edge_attention(q, k, v, edges, scale=scale, weight_gate=gate)

    def _mapped(self, q, k, v, key_mask, family, rho, edges: EdgeList) -> Tensor:
        """Any probability map over the edges: scores, map, sum."""
        heads, given = q.shape[1], (self.pattern, index(q.shape[2]), family)
        pairs = [
            (constant(_bucket, *given, b, 0).to(q.device), constant(_bucket, *given, b, 1).to(q.device))
            for b in range(_bucket_count(*given))
        ]
        buckets = pairs, constant(_place, *given).to(q.device)
        allowed = None
        if key_mask is not None:
            allowed = key_mask[:, edges.indices.long()].repeat_interleave(heads, 0)  # (B·H, E)
        scores = edge_scores(q, k, edges, scale=self.options.softmax_scale)  # (B·H, E)
        weights = edge_map(scores, edges, rho, heads, allowed=allowed, buckets=buckets)
        return edge_sum(F.dropout(weights, self.drop), v, edges, heads)

    def define(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        outs = []
        for rho, (heads, family) in zip(self.maps, self.head_groups(), strict=True):
            chosen = slice(heads.start, heads.stop)
            seen = self.pattern.mask(q.shape[2], family).to(q.device)
            outs.append(masked_map(rho, q[:, chosen], k[:, chosen], seen, key_mask, self.options.softmax_scale))
        return torch.cat(outs, 1)

    def support(self, n: int) -> Tensor:
        groups = self.head_groups()
        if len(groups) == 1:
            return self.pattern.mask(n, groups[0][1])
        return torch.cat([self.pattern.mask(n, f).expand(len(heads), n, n) for heads, f in groups])


class Strided(PatternAttention):
    __doc__ = supports.Strided.__doc__
    paper = "Child et al. 2019; Yun et al. 2020, eq. 4"
    cost = "n·√n"
    passed = ("w",)

    @property
    def exponent(self) -> float:
        return 1.5 if self.options.w is None else 2.0

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        w: int | None = option(None, "stride and window; None = ⌈√n⌉", ge=1)


class Fixed(PatternAttention):
    __doc__ = supports.Fixed.__doc__
    paper = "Child et al. 2019; Yun et al. 2020, eq. 5"
    cost = "n·√n"
    passed = ("w", "close")

    @property
    def exponent(self) -> float:
        return 1.5 if self.options.w is None else 2.0

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        w: int | None = option(None, "length of a segment; None = ⌈√n⌉", ge=1)
        close: bool = option(False, "make the last token a summary token too")


class Star(PatternAttention):
    __doc__ = supports.Star.__doc__
    paper = "Guo et al. 2019; Yun et al. 2020, eq. 6"
    cost = "n·w"
    exponent = 1.0
    passed = ("w", "relay")

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        w: int = option(8, "neighbours on each side", ge=1)
        relay: Literal["last", "first"] = option("last", "where the relay token stands")


class Random(PatternAttention):
    __doc__ = supports.Random.__doc__
    paper = "Yun et al. 2020, section 5"
    cost = "density·n²"
    exponent = 2.0
    passed = ("density", "seed")

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        density: float = option(0.1, "share of the keys that a query draws", gt=0, le=1)
        seed: int = option(0, "seed of the draw", ge=0)


class Longformer(PatternAttention):
    __doc__ = supports.Longformer.__doc__
    paper = "Beltagy et al. 2020"
    cost = "n·window"
    exponent = 1.0
    passed = ("window", "global_tokens")

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        window: int = option(128, "width of the window, half to each side", ge=1)
        global_tokens: int = option(0, "that many first tokens see and are seen by all", ge=0)


class BigBird(PatternAttention):
    __doc__ = supports.BigBird.__doc__
    paper = "Zaheer et al. 2020"
    cost = "n·block"
    exponent = 1.0
    passed = ("block", "random_blocks", "global_blocks", "window_blocks", "seed")

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        block: int = option(64, "tokens of a block", ge=1)
        random_blocks: int = option(3, "blocks that each block draws", ge=0)
        global_blocks: int = option(2, "that many first blocks see and are seen by all", ge=0)
        window_blocks: int = option(3, "blocks of the window, the own one in the middle (odd)", ge=1)
        seed: int = option(0, "seed of the draw", ge=0)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.window_blocks % 2 == 0:
                raise ValueError(f"window_blocks must be odd, not {self.window_blocks}")


class Logsparse(PatternAttention):
    __doc__ = supports.Logsparse.__doc__
    paper = "Li et al. 2019"
    cost = "n·log n"
    exponent = 1.0

    class Options(PatternOptions):
        pass


class Axial(PatternAttention):
    __doc__ = supports.Axial.__doc__
    paper = "Ho et al. 2019"
    cost = "n·√n"
    passed = ("cols",)

    @property
    def exponent(self) -> float:
        return 1.5 if self.options.cols is None else 2.0

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        heads: Literal["sequential", "union", "multihead"] = option(
            "union", "how heads and layers share row and column"
        )
        cols: int | None = option(None, "columns of the grid; None = ⌈√n⌉", ge=1)


class Custom(PatternAttention):
    """A pattern of your own: `sets=` a mask (n, n) or (p, n, n), or for every query the indices it may see, or a
    function of n that returns one of these.
    """

    paper = "Yun et al. 2020, eq. 2"
    cost = "edges"
    exponent = 2.0

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        sets: Any = option(None, "bool mask (n, n) or (p, n, n), or n (or p × n) lists of key positions, or n → these")

    def make_pattern(self, options: Any) -> Pattern:
        make = GivenSets(options.sets)
        return supports.Custom(causal=options.causal, masks=make, families=make.families)


class GivenSets:
    """A user's sets, n → bool (p, n, n); a class, so that a configured mechanism can be pickled."""

    def __init__(self, sets: Any) -> None:
        self.sets, self.fixed = sets, None if callable(sets) else as_masks(sets)
        self.families = len(as_masks(sets(4)) if self.fixed is None else self.fixed)

    def __call__(self, n: int) -> Tensor:
        masks = as_masks(self.sets(n)) if self.fixed is None else self.fixed
        if masks.shape != (self.families, n, n):
            given = f"{masks.shape[0]} families of length {masks.shape[1]}"
            raise ValueError(f"pattern: sets give {given}, the sequence has length {n} and {self.families} families")
        return masks


def as_masks(sets: Any) -> Tensor:
    """A user's sets as p masks, bool (p, n, n)."""
    if sets is None:
        raise ValueError("pattern: sets is needed: a bool mask (n, n) or (p, n, n), or n lists of key positions")
    if isinstance(sets, Tensor):
        if sets.dtype != torch.bool:
            raise TypeError(f"pattern: a mask in sets must be bool, not {sets.dtype}")
        masks = sets[None] if sets.dim() == 2 else sets
        if masks.dim() != 3 or masks.shape[1] != masks.shape[2] or 0 in masks.shape:
            raise ValueError(f"pattern: a mask in sets must be (n, n) or (p, n, n), not {tuple(sets.shape)}")
        return masks
    if not isinstance(sets, Sequence) or not sets or isinstance(sets, str):
        raise TypeError(f"pattern: sets must be a bool tensor or lists of key positions, not {sets!r}")
    nested = all(isinstance(row, Sequence) and row and not isinstance(row[0], int) for row in sets)
    return torch.stack([_mask_of(rows) for rows in (sets if nested else [sets])])


def _mask_of(rows: Sequence[Any]) -> Tensor:
    n = len(rows)
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i, keys in enumerate(rows):
        for j in keys.tolist() if isinstance(keys, Tensor) else keys:
            if not isinstance(j, int) or not 0 <= j < n:
                raise ValueError(f"pattern: sets[{i}] holds {j!r}, key positions are integers 0 … {n - 1}")
            mask[i, j] = True
    return mask
