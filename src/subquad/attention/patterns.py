"""The sparsity patterns as mechanisms: each is a pattern of `supports.patterns` and the options that describe it.

`pattern_attention` has how they are attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from subquad.attention.pattern_attention import PatternAttention, PatternOptions
from subquad.attention.states.entrance import require_steady_sets
from subquad.core.options import option
from subquad.supports import drawn, pattern, patterns
from subquad.supports.pattern import Pattern


class Strided(PatternAttention):
    __doc__ = patterns.Strided.__doc__
    kind = patterns.Strided
    paper = "Child et al. 2019; Yun et al. 2020, eq. 4"
    cost = "n·√n"
    own_options = ("w",)
    free_size = "w"
    examples = (
        {},
        {"w": 4, "heads": "union"},
        {"w": 4, "heads": "multihead"},
        {"layer_index": 1, "map": "sparselin-gen"},
    )
    gallery = {"heads": "union"}

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        w: int | None = option(None, "stride and window; None = ⌈√n⌉", ge=1)


class Fixed(PatternAttention):
    __doc__ = patterns.Fixed.__doc__
    kind = patterns.Fixed
    paper = "Child et al. 2019; Yun et al. 2020, eq. 5"
    cost = "n·√n"
    own_options = ("w", "close")
    free_size = "w"
    examples = ({}, {"w": 5, "layer_index": 1}, {"w": 5, "heads": "union", "close": True})
    gallery = {"heads": "union"}

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        w: int | None = option(None, "length of a segment; None = ⌈√n⌉", ge=1)
        close: bool = option(False, "make the last token a summary token too")

    def kept_keys(self, n: int) -> float:
        return self.sized(n).w + n / self.sized(n).w


class Star(PatternAttention):
    __doc__ = patterns.Star.__doc__
    kind = patterns.Star
    paper = "Guo et al. 2019; Yun et al. 2020, eq. 6"
    cost = "n·w"
    exponent = 1.0
    own_options = ("w", "relay")
    examples = ({}, {"w": 2, "relay": "first"})
    gallery = {"w": 2, "relay": "first"}

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        w: int = option(8, "neighbours on each side", ge=1)
        relay: Literal["last", "first"] = option("last", "where the relay token stands")

    def kept_keys(self, n: int) -> float:
        return self.options.w + 1.0


class Random(PatternAttention):
    __doc__ = drawn.Random.__doc__
    boundary = ""
    kind = drawn.Random
    paper = "Yun et al. 2020, section 5"
    cost = "density·n²"
    exponent = 2.0
    own_options = ("density", "seed", "shared", "layer_index", "num_heads")
    examples = ({}, {"density": 0.5, "seed": 3, "shared": True})

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        density: float = option(0.1, "share of the keys that a query draws", gt=0, le=1)
        seed: int = option(0, "seed of the draw", ge=0)
        shared: bool = option(False, "one graph for all heads and layers instead of one each")
        heads: Literal["sequential", "union", "multihead"] = option("multihead", "multihead: every head its own graph")


class Longformer(PatternAttention):
    __doc__ = patterns.Longformer.__doc__
    kind = patterns.Longformer
    paper = "Beltagy et al. 2020"
    cost = "n·window"
    exponent = 1.0
    own_options = ("window", "global_tokens")
    examples = ({"window": 7}, {"window": 8, "global_tokens": 3})
    gallery = {"window": 8, "global_tokens": 2}

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        window: int = option(128, "width of the window, half to each side", ge=1)
        global_tokens: int = option(0, "number of first tokens that see all tokens and are seen by all", ge=0)

    def kept_keys(self, n: int) -> float:
        return self.options.window / 2 + self.options.global_tokens


class Local(PatternAttention):
    """Local attention: a sliding window or blocks alone, the plainest of the baselines (Combiner, table 5).

    out_i = Σ_{j ∈ A_i} ρ[ (q_i·k_j·scale)_{j ∈ A_i} ]_j v_j          O(n·window)

    shape=window   A_i: `window` tokens around i, ⌈(window-1)/2⌉ to the left; causal: i and the window - 1 before it
    shape=blocks   A_i: the block of `window` tokens that contains i; causal: up to i
    """

    paper = "Ren et al. 2021, table 5"
    cost = "n·window"
    exponent = 1.0
    examples = ({"window": 8}, {"window": 5, "shape": "blocks"})
    gallery = {"window": 9}

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        window: int = option(128, "how many tokens a query sees, or tokens of a block", ge=1)
        shape: Literal["window", "blocks"] = option("window", "a window that slides, or blocks that do not overlap")

    def kept_keys(self, n: int) -> float:
        return float(self.options.window)

    def make_pattern(self, options: Any) -> Pattern:
        if options.shape == "blocks":
            return patterns.Blocks(causal=options.causal, size=options.window)
        reach = options.window - 1  # Longformer's window counts the neighbours, half of them to each side
        return patterns.Longformer(causal=options.causal, window=2 * reach if options.causal else reach)


class BigBird(PatternAttention):
    __doc__ = drawn.BigBird.__doc__
    boundary = ""
    kind = drawn.BigBird
    paper = "Zaheer et al. 2020"
    cost = "n·block"
    exponent = 1.0
    own_options = ("block", "random_blocks", "global_blocks", "window_blocks", "seed")
    examples = ({}, {"block": 4, "random_blocks": 2, "global_blocks": 1})
    gallery = {"block": 4, "random_blocks": 2, "global_blocks": 1}

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        block: int = option(64, "tokens of a block", ge=1)
        random_blocks: int = option(3, "blocks that each block draws", ge=0)
        global_blocks: int = option(2, "number of first blocks that see all tokens and are seen by all", ge=0)
        window_blocks: int = option(3, "blocks of the window, the query's in the middle (odd)", ge=1)
        seed: int = option(0, "seed of the draw", ge=0)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.window_blocks % 2 == 0:
                raise ValueError(f"window_blocks must be odd, not {self.window_blocks}")


class Logsparse(PatternAttention):
    __doc__ = patterns.Logsparse.__doc__
    boundary = ""
    kind = patterns.Logsparse
    paper = "Li et al. 2019; Ren et al. 2021, section 4.2"
    cost = "n·log n"
    exponent = 1.0

    own_options = ("sets",)
    examples = ({}, {"sets": "powers"})

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        sets: Literal["suffix", "powers"] = option("suffix", "Combiner's blocks, or Li et al.'s powers of two")


class Axial(PatternAttention):
    __doc__ = patterns.Axial.__doc__
    kind = patterns.Axial
    paper = "Ho et al. 2019"
    cost = "n·√n"
    own_options = ("cols",)
    free_size = "cols"
    examples = ({}, {"cols": 5, "heads": "multihead"})

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        heads: Literal["sequential", "union", "multihead"] = option(
            "union", "how heads and layers share row and column"
        )
        cols: int | None = option(None, "columns of the grid; None = ⌈√n⌉", ge=1)


def window_and_relay(n: int) -> Tensor:
    """An example of a user's own sets: two neighbours on each side, and everyone sees the first token."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    return ((i - j).abs() <= 2) | (j == 0)


def butterfly(n: int) -> Tensor:
    """Another example: positions that differ in at most one bit."""
    gap = torch.arange(n)[:, None] ^ torch.arange(n)
    return (gap & (gap - 1)) == 0


class Custom(PatternAttention):
    """A pattern of your own: `sets=` a mask (n, n) or (p, n, n), or for every query the indices it may see, or a
    function of n that returns one of these.

    A padded batch has rows of several lengths, and asks for the sets of each. `nested=True` says that the sets of fewer
    tokens are those of more tokens, cut off: then all rows share one list, and a GPU, which knows the lengths, is not
    waited for.
    """

    boundary = ""
    paper = "Yun et al. 2020, eq. 2"
    cost = "edges"
    exponent = 2.0
    examples = ({"sets": window_and_relay}, {"sets": window_and_relay, "nested": True})
    gallery = {"sets": butterfly}
    python_only = "sets"

    @dataclass(frozen=True, kw_only=True)
    class Options(PatternOptions):
        sets: Any = option(None, "bool mask (n, n) or (p, n, n), or n (or p × n) lists of key positions, or n → these")
        nested: bool = option(False, "the sets of fewer tokens are those of more, cut off")

    def make_pattern(self, options: Any) -> Pattern:
        make = GivenSets(options.sets, options.nested)
        return pattern.Custom(causal=options.causal, masks=make, families=make.families, nested=options.nested)

    def make_memory(self, margin):
        require_steady_sets(self.name, partial(self.pattern.masks.is_nested_at, causal=True))
        return super().make_memory(margin)


FEW = 4  # tokens of the sets that are asked for when a mechanism is made


class GivenSets:
    """A user's sets, n → bool (p, n, n); a class, so that a configured mechanism can be pickled."""

    def __init__(self, sets: Any, nested: bool = False) -> None:
        # a copy: who goes on to change a mask does not change the mechanisms that were made with it
        self.sets, self.fixed, self.nested = sets, None if callable(sets) else as_masks(sets).clone(), nested
        self.families = len(as_masks(sets(FEW)) if self.fixed is None else self.fixed)
        self.length = None if self.fixed is None else self.fixed.shape[1]
        if nested and not self.is_nested_at(FEW):
            raise ValueError(
                f"pattern: nested=True, but the sets of {FEW} tokens are not those of up to {2 * FEW} tokens, cut off"
            )

    def is_nested_at(self, n: int, causal: bool = False) -> bool:
        """Are the sets of n tokens those of n + 1 … 2n tokens, cut off? `causal`: as far as keys are not later."""
        if self.fixed is not None:
            return True
        few = self(n)  # (p, n, n)
        place = torch.arange(n, device=few.device)
        later = (place > place[:, None]) & causal  # nobody sees these
        return all(torch.equal(self(more)[:, :n, :n] | later, few | later) for more in range(n + 1, 2 * n + 1))

    def __call__(self, n: int) -> Tensor:
        masks = as_masks(self.sets(n)) if self.fixed is None else self.fixed
        masks = masks[:, :n, :n] if self.nested else masks
        if masks.shape != (self.families, n, n):
            have = {"length": (masks.shape[1], n), "number of families": (masks.shape[0], self.families)}
            wrong = [f"{what} {given}, not {right}" for what, (given, right) in have.items() if given != right]
            raise ValueError(f"pattern: sets for a sequence of length {n} have {' and '.join(wrong)}")
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
