"""Combiner's instantiations (Ren et al. 2021, section 4): each is a partition and the options that describe it.

    combiner-fixed      4.1: the own span token by token, every other span as one summary
    combiner-window     a sliding window and attention sinks token by token, every other span as one summary
    combiner-tree       the remark in 3.1: groups of groups
    combiner-logsparse  4.2 and appendix B: everything before i as O(log i) binary blocks
    combiner-axial      4.3 and appendix C: rows and columns of a grid

The classes of `supports.spans` and `supports.grids` say which tokens are direct and which are groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from subquad.abstraction import AnyKind
from subquad.attention.base import Call, Record
from subquad.attention.combiner import Combiner, CombinerOptions
from subquad.attention.combiner_proj import SummaryKeys, attend_projected, define_projected, prepared
from subquad.core.options import option
from subquad.supports import grids, spans


class CombinerFixed(Combiner):
    """Combiner-Fixed (Ren et al. 2021, section 4.1): the own span token by token, every other span as one summary.

        Ω_i^0 = {j : ⌊j/s⌋ = ⌊i/s⌋}  (causal: j ≤ i)      groups: the other spans (causal: the earlier, complete ones)
        k_a, q_a = pools over span a                     v_a = Σ_{j in a} softmax_j(q_a·k_j·scale) v_j

        O(n·(s + n/s)); s ≈ √n balances the two.

    Eq. 10 counts from 1, writes "mod" for "div" and leaves out the first span; here all spans count.
    """

    cost = "n·√n"
    free_size = "span"
    boundary = "summaries of spans, and at most one partial span"
    gallery = {"span": 8}

    @dataclass(frozen=True, kw_only=True)
    class Options(CombinerOptions):
        span: int | None = option(None, "tokens of a span; None = ≈ √max_length, or ≈ √n without max_length", ge=1)
        abstraction: AnyKind = option("max", "how a group is summarised")  # type: ignore[assignment]
        sharpness: float = option(16.0, "attended abstractions: factor on the query of a summary", gt=0)

    @property
    def exponent(self) -> float:
        return 1.5 if self._follows_length else 2.0  # a fixed span: n/s summaries for every query

    def kept_keys(self, n: int) -> float:
        return self.sized(n).span + n / self.sized(n).span

    def make_partition(self, options: Any) -> spans.Fixed:
        return spans.Fixed(causal=options.causal, span=options.span)


class CombinerWindow(Combiner):
    """Combiner with a sliding window: the first tokens and the near ones directly, all others through their spans.

        direct: the first `sinks` tokens, and every token from the start of the span that contains i - window + 1 up
                to i (bidirectional: to the end of the span that contains i + window - 1)
        groups: every other span (causal: the complete spans before that), without sinks

        O(n·(window + s + n/s)). With window=1 and sinks=0 it is Combiner-Fixed.

    Trained language models lean on their first tokens (attention sinks, Xiao et al. 2023) and on the last few hundred:
    this plan keeps both exact. A sink is in no group: it is left out of its span's summary.
    """

    cost = "n·√n"
    free_size = "span"
    boundary = "summaries of spans, at most one partial span, and the window's halo"
    examples = ({"window": 5}, {"span": 4, "window": 6, "sinks": 3, "abstraction": "mean"})
    gallery = {"span": 8, "window": 12, "sinks": 2}

    @dataclass(frozen=True, kw_only=True)
    class Options(CombinerOptions):
        span: int | None = option(None, "tokens of a span; None = ≈ √max_length, or ≈ √n without max_length", ge=1)
        abstraction: AnyKind = option("max", "how a group is summarised")  # type: ignore[assignment]
        sharpness: float = option(16.0, "attended abstractions: factor on the query of a summary", gt=0)
        window: int = option(256, "a query sees at least this many tokens directly, itself included", ge=1)
        sinks: int = option(4, "that many first tokens are direct for everyone", ge=0)
        shared_heads: int = option(1, "that many neighbouring heads ask for a summary together", ge=1)

    @property
    def exponent(self) -> float:
        return 1.5 if self._follows_length else 2.0

    def kept_keys(self, n: int) -> float:
        return self.options.window + self.options.sinks + self.sized(n).span + n / self.sized(n).span

    def make_partition(self, options: Any) -> spans.Window:
        return spans.Window(causal=options.causal, span=options.span, window=options.window, sinks=options.sinks)


class CombinerTree(Combiner):
    """Combiner over a partition tree: groups of groups (Ren et al. 2021, the remark in section 3.1).

    Level t = 1 … depth has blocks of s^t tokens. Query i attends to its own block of s tokens directly, and at each
    level to the summaries of the other blocks inside its own block of the next level (at the top: of all others);
    causal: up to i, and blocks that lie before i.

        k_t, q_t = pools over the block's tokens        v_1 = Σ_j softmax_j(q_1·k_j) v_j over its tokens
                                                        v_t = Σ_c softmax_c(q_t·k_c) v_c over its blocks of level t-1

        s ≈ n^(1/(depth+1)):  O(n·(depth+1)·n^(1/(depth+1)));  depth=1 is Combiner-Fixed, depth=2 costs n·n^(1/3)
    """

    cost = "n·n^(1/(depth+1))"
    free_size = "span"
    boundary = "summaries of blocks, and at most one partial block of each level"
    examples = ({}, {"span": 2, "depth": 3, "abstraction": "deepsets-max"})
    gallery = {"span": 4}

    @dataclass(frozen=True, kw_only=True)
    class Options(CombinerOptions):
        depth: int = option(2, "levels of groups; 1 = Combiner-Fixed", ge=1, le=8)
        span: int | None = option(None, "s: tokens of a block, blocks of a block; None = ≈ n^(1/(depth+1))", ge=2)

    @property
    def exponent(self) -> float:
        return 1 + 1 / (self.options.depth + 1) if self._follows_length else 2.0  # a fixed span: n/s^depth tops

    def kept_keys(self, n: int) -> float:
        span, depth = self.sized(n).span, self.options.depth
        return depth * span + n / span**depth

    def make_partition(self, options: Any) -> spans.Tree:
        return spans.Tree(causal=options.causal, span=options.span, depth=options.depth)


class CombinerLogsparse(Combiner):
    """Combiner-Logsparse (Ren et al. 2021, section 4.2 and appendix B): everything before i as O(log i) binary blocks.

    for every set bit l of i: block number (i>>l)-1 of size 2^l, one summary; i itself directly
    level 0 is a single token, hence exact; bidirectional: the mirror image as well, the same on n-1-i

    O(n·log n) time, O(n) memory: all blocks that are ever asked for are one binary tree, see `spans.Logsparse`.
    """

    cost = "n·log n"
    exponent = 1.0
    examples = ({}, {"abstraction": "deepsets-mean"})

    def make_partition(self, options: Any) -> spans.Logsparse:
        return spans.Logsparse(causal=options.causal)


class CombinerAxial(Combiner):
    """Combiner-Axial (Ren et al. 2021, section 4.3 and appendix C): the sequence as a grid of rows × cols, row by row.

        rowmajor    direct: own row; groups: every other row, asked by the token of that row in the own column
        vertical    direct: own row and own column; groups: every other column without the own row's element
        horizontal  direct: own row and own column; groups: every other row without the own column's element

    Causal: the row up to i, the column above, columns and rows above. "Combiner-Axial" in the paper's tables is
    rowmajor (Figure 1F). A summary of vertical and horizontal is pooled from its members. In rowmajor nothing is
    pooled: with q at (row, own column) as local query, p(j|Ω) = softmax_j(q·k_j), the summary's key is Σ_j p(j|Ω) k_j,
    and DeepSets act on that q and these k_j; so max and mean are the same there. A local query that does not exist
    (padding, or a last row too short) is 0. `split` gives horizontal two groups per row, left and right of the own
    column. `summary=proj` (rowmajor) makes the summary's key from its value and the token that asks, as the authors'
    language models do: see `combiner_proj`.

        O(n·(rows + cols))
    """

    cost = "n·√n"
    free_size = "cols"
    examples = (
        {},
        {"plan": "vertical"},
        {"plan": "horizontal", "cols": 5},
        {"plan": "rowmajor", "cols": 5, "abstraction": "deepsets-mean"},
        {"plan": "horizontal", "split": True, "abstraction": "mean"},
    )

    @dataclass(frozen=True, kw_only=True)
    class Options(CombinerOptions):
        plan: Literal["rowmajor", "vertical", "horizontal"] = option("rowmajor", "what is summarised")
        cols: int | None = option(None, "columns of the grid; None = ⌈√max_length⌉, or ⌈√n⌉ without max_length", ge=1)
        split: bool = option(False, "plan=horizontal: left and right part of a row are groups of their own")
        summary: Literal["wsum", "proj"] = option("wsum", "plan=rowmajor: the key of a row, weighted sum or projection")

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.summary == "proj" and (self.plan != "rowmajor" or self.abstraction != "max"):
                raise ValueError(
                    f"summary=proj belongs to plan=rowmajor without DeepSets, not to plan={self.plan}, "
                    f"abstraction={self.abstraction}"
                )
            if self.split and self.plan != "horizontal":
                raise ValueError(f"split=True belongs to plan=horizontal, not to plan={self.plan}")

    @property
    def exponent(self) -> float:
        return 1.5 if self._follows_length else 2.0  # a fixed width: n/cols rows for every query

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.summary_keys = SummaryKeys(options.num_heads, options.head_dim) if options.summary == "proj" else None
        if options.summary == "proj":
            self.capabilities = replace(type(self).capabilities, level="layer", weights=False)  # type: ignore[misc]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        self._refuse("works on tokens and their projections, not on q, k, v: use subquad.MultiheadAttention")
        return super().attend(q, k, v, call)

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        self._refuse("has no weights that follow from q and k: pass need_weights=False")
        return super().define(q, k, call)

    def _refuse(self, reason: str) -> None:
        if self.summary_keys is not None:
            raise TypeError(f"{self.name}: summary=proj {reason}")

    def attend_tokens(self, query, key, value, project, key_mask, seed=None, *, want_record=False):
        if self.summary_keys is None:
            return super().attend_tokens(query, key, value, project, key_mask, seed, want_record=want_record)
        if key is not query or value is not query:
            raise ValueError(f"{self.name}: summary=proj is self-attention: query, key and value must be one tensor")
        rows, x, (q, k, v) = prepared(self, query, project, key_mask)
        out = rows.restore(attend_projected(self, x, q, k, v, self._call(rows, seed, q.shape[2])))
        return out.transpose(1, 2).flatten(2), Record()

    def dense_tokens(self, x: Tensor, project: Any, key_mask: Tensor | None = None) -> Tensor:
        """summary=proj from its definition: tokens (B, n, E) → heads side by side, (B, n, E)."""
        x = x if key_mask is None else x.masked_fill(~key_mask[..., None], 0)
        q, k, v = project.together(x, x, x)  # (B, H, n, d)
        return define_projected(self, x, q, k, v, key_mask).transpose(1, 2).flatten(2)

    def make_partition(self, options: Any) -> grids.Axial:
        return axial(options.plan, causal=options.causal, cols=options.cols, split=options.split)


def axial(plan: str, *, causal: bool, cols: int | None, split: bool = False) -> grids.Axial:
    """The axial partition of a name."""
    if plan == "horizontal":
        return grids.AxialHorizontal(causal=causal, cols=cols, split=split)
    return (grids.AxialVertical if plan == "vertical" else grids.AxialRowmajor)(causal=causal, cols=cols)
