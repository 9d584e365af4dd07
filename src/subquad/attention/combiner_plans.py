"""Combiner's instantiations (Ren et al. 2021, section 4): each is a partition and the options that describe it.

    combiner-fixed      4.1: a query sees the tokens of its own span, and every other span as one summary
    combiner-window     a sliding window and attention sinks token by token, every other span as one summary
    combiner-tree       the remark in 3.1: groups of groups
    combiner-logsparse  4.2 and appendix B: everything before i as O(log i) binary blocks
    combiner-axial      4.3 and appendix C: rows and columns of a grid
    combiner-plan       3.1: a plan of your own, given as index sets

The classes of `supports.spans` and `supports.grids` say which tokens are direct and which are groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.abstraction import AnyKind
from subquad.attention.call import Call, Record, Rows, repeat_heads
from subquad.attention.combiner import Combiner, CombinerOptions
from subquad.attention.states import entrance
from subquad.attention.summaries import SummaryKeys, attend_projected, define_projected, prepared, projected
from subquad.core.hashing import seed_from
from subquad.core.numbers import settled
from subquad.core.options import option
from subquad.kernels.edges import EdgeList, edge_attention
from subquad.kernels.tables import UNREAD, group_count, partition_edges
from subquad.kernels.values import cut_rows, may_look
from subquad.supports import binary, grids, spans
from subquad.supports.partitions import IndexSets, Partition
from subquad.supports.support import text_of


@dataclass(frozen=True, kw_only=True)
class SpanOptions(CombinerOptions):
    span: int | None = option(None, "tokens of a span; None = ≈ √max_length, or ≈ √n without max_length", ge=1)
    abstraction: AnyKind = option("max", "how a group is summarised")  # type: ignore[assignment]
    sharpness: float = option(16.0, "attended abstractions: factor on the query of a summary", gt=0)


class CombinerFixed(Combiner):
    """Combiner-Fixed (Ren et al. 2021, section 4.1): the tokens of the query's span, every other span as one summary.

        Ω_i^0 = {j : ⌊j/s⌋ = ⌊i/s⌋}  (causal: j ≤ i)      groups: the other spans (causal: the earlier, complete ones)
        k_a, q_a = pools over span a                     v_a = Σ_{j in a} softmax_j(q_a·k_j·scale) v_j

        O(n·(s + n/s)); s ≈ √n balances the two.

    Eq. 10 counts from 1, writes "mod" for "div" and leaves out the first span; here all spans count.
    """

    kind = spans.Fixed
    cost = "n·√n"
    free_size = "span"
    boundary = "summaries of spans, and at most one partial span"
    gallery = {"span": 8}

    Options = SpanOptions

    def kept_keys(self, n: int) -> float:
        return self.sized(n).span + n / self.sized(n).span


class CombinerWindow(Combiner):
    """Combiner with a sliding window: the first tokens and the near ones directly, all others through their spans.

        direct: the first `sinks` tokens, and every token from the start of the span that contains i - window + 1 up
                to i (bidirectional: to the end of the span that contains i + window - 1)
        groups: every other span (causal: the complete spans before that), without sinks

        O(n·(window + s + n/s)). With window=1 and sinks=0 it is Combiner-Fixed.

    Trained language models lean on their first tokens (attention sinks, Xiao et al. 2023) and on the last few hundred:
    this plan keeps both exact. A sink is in no group: it is left out of its span's summary.
    """

    paper = "after Ren et al. 2021"  # the plan is not in the paper
    kind = spans.Window
    cost = "n·√n"
    free_size = "span"
    boundary = "summaries of spans, at most one partial span, and the window's halo"
    examples = ({"window": 5}, {"span": 4, "window": 6, "sinks": 3, "abstraction": "mean"})
    gallery = {"span": 8, "window": 12, "sinks": 2}

    @dataclass(frozen=True, kw_only=True)
    class Options(SpanOptions):
        window: int = option(256, "a query sees at least this many tokens directly, itself included", ge=1)
        sinks: int = option(4, "number of first tokens that every query sees directly", ge=0)
        shared_heads: int = option(1, "number of neighbouring heads that ask for a summary together", ge=1)

    def kept_keys(self, n: int) -> float:
        return self.options.window + self.options.sinks + self.sized(n).span + n / self.sized(n).span


class CombinerTree(Combiner):
    """Combiner over a partition tree: groups of groups (Ren et al. 2021, the remark in section 3.1).

    Level t = 1 … depth has blocks of s^t tokens. Query i attends to its own block of s tokens directly, and at each
    level to the summaries of the other blocks inside its own block of the next level (at the top: of all others);
    causal: up to i, and blocks that lie before i.

        k_t, q_t = pools over the block's tokens        v_1 = Σ_j softmax_j(q_1·k_j) v_j over its tokens
                                                        v_t = Σ_c softmax_c(q_t·k_c) v_c over its blocks of level t-1

        s ≈ n^(1/(depth+1)):  O(n·(depth+1)·n^(1/(depth+1)));  depth=1 is Combiner-Fixed, depth=2 costs n·n^(1/3)
    """

    kind = spans.Tree
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


class CombinerLogsparse(Combiner):
    """Combiner-Logsparse (Ren et al. 2021, section 4.2 and appendix B): everything before i as O(log i) binary blocks.

    for every set bit l of i: block number (i>>l)-1 of size 2^l, one summary; i itself directly
    level 0 is a single token, hence exact; bidirectional: the mirror image as well, the same on n-1-i

    O(n·log n) time, O(n) memory: all blocks that are ever asked for are one binary tree, see `binary.Logsparse`.
    """

    kind = binary.Logsparse
    cost = "n·log n"
    exponent = 1.0
    examples = ({}, {"abstraction": "deepsets-mean"})


class CombinerAxial(Combiner):
    """Combiner-Axial (Ren et al. 2021, section 4.3 and appendix C): the sequence as a grid of rows × cols, row by row.

        rowmajor    direct: i's row; groups: every other row, asked by its token in i's column
        vertical    direct: i's row and column; groups: every other column without its element in i's row
        horizontal  direct: i's row and column; groups: every other row without its element in i's column

    Causal: the row up to i, the column above, columns and rows above. "Combiner-Axial" in the paper's tables is
    rowmajor (Figure 1F). A summary of vertical and horizontal is pooled from its members. In rowmajor nothing is
    pooled: with q at (row, i's column) as local query, p(j|Ω) = softmax_j(q·k_j), the summary's key is Σ_j p(j|Ω) k_j,
    and DeepSets act on that q and these k_j; so max and mean are the same there. A local query that does not exist
    (padding, or a last row too short) is 0. `split` gives horizontal two groups per row, left and right of i's
    column. `summary=proj` (rowmajor) makes the summary's key from its value and the token that asks, as the authors'
    language models do: see `summaries.SummaryKeys`.

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

    def extend(self, q, k, v, state, *, key_mask=None):
        self._refuse("works on tokens and their projections, not on q, k, v: use subquad.MultiheadAttention")
        return super().extend(q, k, v, state, key_mask=key_mask)

    def extend_tokens(self, query, project, state, key_mask=None):
        """With summary=proj a token is kept beside its value, as heads (B, H, t, d)."""
        if self.summary_keys is None:
            return super().extend_tokens(query, project, state, key_mask)
        x, (q, k, v) = projected(self, query, project, key_mask)
        entrance.check_state(self, state, query)
        both = torch.cat((v, x.unflatten(-1, v.shape[1::2]).transpose(1, 2)), -1)  # (B, H, t, 2d)
        out, state = entrance.extend(self, q, k, both, state, key_mask)
        return out.transpose(1, 2).flatten(2), state

    def attend_aligned(self, q, k, v, real, lengths, seed):
        if self.summary_keys is None:
            return super().attend_aligned(q, k, v, real, lengths, seed)
        v, x = v.chunk(2, -1)
        call = self._call(Rows(real, None if real is None else lengths, None, None), seed, q.shape[2])
        return attend_projected(self, x.transpose(1, 2).flatten(2), q, k, v, call)

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


# ---- a plan of your own ----

FEW = 4  # tokens of the plan that nested=True is checked with


def eights(n: int) -> tuple[Sequence, Sequence]:
    """An example of a plan: eight tokens directly, the other eights of the same 64, and the other 64s, as groups."""
    spans = [range(a, min(a + 8, n)) for a in range(0, n, 8)]
    near = [[s for a, s in enumerate(spans) if a != i // 8 and a // 8 == i // 64] for i in range(n)]
    far = [[range(b, min(b + 64, n)) for b in range(0, n, 64) if b // 64 != i // 64] for i in range(n)]
    return [spans[i // 8] for i in range(n)], [near[i] + far[i] for i in range(n)]


def nearby_and_sides(n: int) -> tuple[Sequence, Sequence]:
    """Another: four neighbours on each side directly, what is before and what is behind as two groups."""
    near = [range(max(0, i - 4), min(n, i + 5)) for i in range(n)]
    return near, [[range(keys.start), range(keys.stop, n)] for keys in near]


class CombinerPlan(Combiner):
    """Combiner over a plan of your own (Ren et al. 2021, section 3.1), given as index sets.

        def halves(n):                                        # direct[i], groups[i] for every query i
            direct = [[i] for i in range(n)]
            groups = [[range(i), range(i + 1, n)] for i in range(n)]
            return direct, groups
        subquad.attention("combiner-plan", plan=halves, …)

    `plan` is such a function of n, or a `supports.partitions.Partition` whose groups are plain sets. For every query
    the sets must be a partition of its support; with causal=True each keeps its positions ≤ i. Any plan is exact; the
    cost is that of the plan, Σ terms + Σ members, over edge lists instead of blocks.

    In a padded batch every row follows the plan of its own length. `nested=True` says that the sets of fewer tokens are
    those of more tokens, cut off: then all rows follow one plan, and a GPU, which knows the lengths, is not waited for.
    """

    cost = "that of the plan"
    exponent = 2.0
    grouped = False
    data_dependent = True
    counting_range = (128, 512)
    examples = ({"plan": eights},)
    gallery = {"plan": nearby_and_sides}
    python_only = "plan"
    exceptions = {"compiles": "with key_mask every row has a plan of its own, which a compiled graph does not know"}

    @dataclass(frozen=True, kw_only=True)
    class Options(CombinerOptions):
        plan: Any = option(None, "a function n → (direct sets, groups), or a Partition")
        nested: bool = option(False, "the sets of fewer tokens are those of more, cut off")

    def make_partition(self, options: CombinerPlan.Options) -> Partition:
        given = options.plan
        if callable(given) and not isinstance(given, Partition):
            given = IndexSets(sets=given, causal=options.causal)
        if not isinstance(given, Partition):
            raise TypeError(f"combiner-plan: plan must be a function n → (direct, groups) or Partition, not {given!r}")
        if given.causal != options.causal:
            raise ValueError(f"combiner-plan: plan has causal={given.causal}, the mechanism causal={options.causal}")
        if options.nested and not given.is_nested_at(FEW):
            raise ValueError(f"combiner-plan: nested=True, but {FEW} tokens have other sets than up to {2 * FEW}")
        return given

    def host_reads(self, padded: bool, dtype: torch.dtype = torch.float32, length: int | None = None) -> str:
        return "the lengths of rows, which their plans depend on" if padded and not self.options.nested else ""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """A row at a time: a plan of one's own may divide every length in another way."""
        if call.lengths is None or self.options.nested:
            return cut_rows(self._attend(q, k, v, call), call.lengths)
        if torch.compiler.is_compiling():
            raise ValueError("combiner-plan: key_mask is not supported in a compiled graph; call it eagerly")
        if not may_look(call.lengths):
            raise ValueError(f"combiner-plan: {UNREAD}")
        rows = []
        for b, size in enumerate(call.lengths.tolist()):
            mask = None if call.key_mask is None else call.key_mask[b : b + 1, :size]
            seed = seed_from(call.seed, b * q.shape[1]) if call.dropout and call.seed is not None else None
            own = call._replace(key_mask=mask, lengths=None, seed=seed)
            x, y, z = (t[b : b + 1, :, :size] for t in (q, k, v))
            out = self._attend(x, y, z, own) if size else x
            rows.append(F.pad(out, (0, 0, 0, q.shape[2] - size)))
        return torch.cat(rows)

    def make_memory(self, margin):
        entrance.require_steady_sets(self.name, self.partition.is_nested_at)
        return super().make_memory(margin)

    def attend_aligned(self, q, k, v, real, lengths, seed):
        """Streaming needs sets that follow from the position of a query alone: one plan has those of all rows."""
        call = self._call(Rows(real, None, None, None), seed, q.shape[2])
        return self._attend(q, repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), call)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Over edge lists: summaries to their members, queries to tokens and summaries."""
        n = settled(q.shape[2], self.name, "a plan of one's own", "use another mechanism")
        scale = self.options.softmax_scale
        text = text_of(self.partition) if self._is_sized else text_of(self.partition, index(call.slots))
        groups = group_count(text, n)
        members, main = partition_edges(q, text, n, groups)
        work = torch.promote_types(q.dtype, torch.float32)
        x, y, z = (t.to(work) for t in (q, k, v))
        keys, values, alive = y, z, call.key_mask
        if groups:
            about: dict[str, Any] = {"is_max": self.abstraction.pool == "max", "key_mask": call.key_mask}
            query, key = (member_pool(t, members, **about) for t in self.abstraction(x, y))  # (B, H, U, d)
            value = edge_attention(query, y, z, members, scale=scale, key_mask=call.key_mask)
            keys, values = torch.cat((y, key), 2), torch.cat((z, value), 2)  # (B, H, n + U, d)
            alive = None if call.key_mask is None else torch.cat((call.key_mask, _alive(call.key_mask, members)), 1)
        more: dict[str, Any] = {"key_mask": alive, "dropout": call.dropout, "seed": call.seed}
        return edge_attention(x, keys, values, main, scale=scale, **more).to(q.dtype)


def member_pool(x: Tensor, members: EdgeList, *, is_max: bool, key_mask: Tensor | None) -> Tensor:
    """The pool of x (B, H, n, d) over each group's real members: (B, H, U, d), 0 where there is none."""
    row = members.rows
    if key_mask is not None:
        x = x.masked_fill(~key_mask[:, None, :, None], -torch.inf if is_max else 0)
    inside = x.index_select(2, members.indices.long())  # (B, H, E, d)
    shape = (*x.shape[:2], members.num_queries, x.shape[3])
    if is_max:
        top = inside.new_full(shape, -torch.inf).scatter_reduce(2, row[:, None].expand(inside.shape), inside, "amax")
        return top.masked_fill(top == -torch.inf, 0)
    total = inside.new_zeros(shape).index_add(2, row, inside)
    real = torch.ones_like(x[:, :1, :, 0]) if key_mask is None else key_mask[:, None].to(x.dtype)  # (B, 1, n)
    count = real.new_zeros(*real.shape[:2], members.num_queries).index_add(2, row, real[:, :, members.indices.long()])
    return total / count.clamp(min=1)[..., None]


def _alive(key_mask: Tensor, members: EdgeList) -> Tensor:
    """Which groups have a real member, (B, U)."""
    real = key_mask[:, members.indices.long()].float()  # (B, E)
    return real.new_zeros(len(real), members.num_queries).index_add(1, members.rows, real) > 0
