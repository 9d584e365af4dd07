"""Combiner-Mixture (Ren et al. 2021, section 3.3): several plans ω_1 … ω_M at once.

    mean (default)  A(x_i) = 1/M Σ_m A(x_i; ω_m)
    joint           one softmax over all plans' groups and the union of their direct sets, each token counted once

Default: axial-vertical and axial-horizontal. `joint` is for the axial plans, whose direct sets are made of the
query's row and column; `joint=True, split=True` (causal) is the variant the authors published as code. Every
component has an abstraction of its own, `cols` holds for all axial ones; the others have the options they have alone
by default, routing as many clusters as `max_length` asks for. Where components share their direct sets (vertical and
horizontal) these are attended once; with dropout each component drops for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from subquad.attention.base import Attention
from subquad.attention.call import Call
from subquad.attention.combiner import Combiner, CombinerOptions, joint_weights
from subquad.attention.combiner_plans import (
    CombinerAxial,
    CombinerFixed,
    CombinerLogsparse,
    CombinerTree,
    CombinerWindow,
)
from subquad.attention.combiner_routing import CombinerRouting
from subquad.attention.states.replay import Replay
from subquad.attention.states.several import Several
from subquad.attention.states.state import Memory
from subquad.attention.summaries import Source, Tokens, summarise
from subquad.core.numbers import length_of
from subquad.core.options import option
from subquad.kernels.merge import merge_attention
from subquad.kernels.mixture import mixture_merge
from subquad.supports.grids import mixture_text
from subquad.supports.partitions import Partition

OTHERS: dict[str, Any] = {
    "fixed": CombinerFixed,
    "window": CombinerWindow,
    "logsparse": CombinerLogsparse,
    "routing": CombinerRouting,
    "tree": CombinerTree,
}
Plan = Literal[
    "axial-vertical", "axial-horizontal", "axial-rowmajor", "fixed", "window", "logsparse", "routing", "tree"
]


class CombinerMixture(Attention):
    __doc__ = __doc__
    family = "combiner"
    paper = "Ren et al. 2021"
    cost = "n·√n"
    examples = ({}, {"joint": True, "split": True}, {"plans": ("fixed", "axial-rowmajor"), "cols": 5})

    @dataclass(frozen=True, kw_only=True)
    class Options(CombinerOptions):
        plans: tuple[Plan, ...] = option(("axial-vertical", "axial-horizontal"), "the components")
        joint: bool = option(False, "one softmax over all components instead of the mean of their outputs")
        split: bool = option(False, "axial-horizontal: left and right part of a row are groups of their own")
        cols: int | None = option(None, "columns of the grid of the axial plans; None = ⌈√n⌉", ge=1)

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.plans:
                raise ValueError("plans must name at least one plan, not an empty list")
            if self.split and "axial-horizontal" not in self.plans:
                raise ValueError(
                    f"split=True belongs to axial-horizontal, which is not in plans={'+'.join(self.plans)}"
                )
            other = [name for name in self.plans if name in OTHERS]
            if self.joint and other:
                raise ValueError(f"joint=True is for the axial plans, whose direct sets agree; plans has {other[0]}")

    def __init__(self, options: CombinerMixture.Options) -> None:
        super().__init__(options)
        self.components = nn.ModuleList(self._component(name) for name in options.plans)

    def parts(self) -> list[Combiner]:
        return cast(list[Combiner], list(self.components))

    def _component(self, name: str) -> Combiner:
        o = self.options
        shared: dict[str, Any] = {
            key: getattr(o, key)
            for key in ("num_heads", "head_dim", "causal", "max_length", "scale", "dropout", "abstraction")
        }
        if name in OTHERS:
            return OTHERS[name](OTHERS[name].Options(**shared))
        shared |= {"plan": name.removeprefix("axial-"), "cols": o.cols, "split": o.split and name == "axial-horizontal"}
        return CombinerAxial(CombinerAxial.Options(**shared))

    @property
    def grouped(self) -> bool:
        return all(component.grouped for component in self.parts())

    @property
    def exponent(self) -> float:
        return max(component.exponent for component in self.parts())

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return tuple(component.partition for component in self.parts())

    @property
    def open_size(self) -> str | None:
        return next((size for component in self.parts() if (size := component.open_size)), None)

    # ---- the fast path ----

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        shares_direct = set(self.options.plans) <= {"axial-vertical", "axial-horizontal"}
        if not self.options.joint and (call.dropout or not shares_direct):
            out = mean(component.attend(q, k, v, call) for component in self.parts())
            return out if call.lengths is None else _cut(out, call.lengths)
        work = torch.promote_types(q.dtype, torch.float32)
        tokens = Tokens(q.to(work), k.to(work), v.to(work), call)
        return (self._joint(tokens) if self.options.joint else self._mean(tokens)).to(q.dtype)

    def _summaries(self, tokens: Tokens) -> tuple[str, list[int], list[Source]]:
        """The text of the mixture, how many sets of summaries each component has, and all of them."""
        n, call = length_of(tokens.q.shape[2]), tokens.call
        texts, sizes, found = [], [], []
        for component in self.parts():
            text, group_sets = component.described(call.slots, n)
            texts.append(text)
            sizes.append(len(group_sets))
            for number, group_set in enumerate(group_sets, 1):
                below = (tokens.k, tokens.v, call.exists)
                found.append(summarise(component, text, number, group_set, tokens, below))
        return mixture_text(tuple(texts)), sizes, found

    def _joint(self, tokens: Tokens) -> Tensor:
        n, call = length_of(tokens.q.shape[2]), tokens.call
        text, _, summaries = self._summaries(tokens)
        keys, values, valid = (list(x) for x in zip((tokens.k, tokens.v, call.exists), *summaries, strict=True))
        about: dict[str, Any] = {"lengths": call.lengths, "valid": valid, "dropout": call.dropout, "seed": call.seed}
        scale = self.options.softmax_scale
        return merge_attention(tokens.q, keys, values, text, "joint", n, scale=scale, **about)

    def _mean(self, tokens: Tokens) -> Tensor:
        """The mean of the components, with the direct part attended once."""
        (q, k, v, call), n = tokens, length_of(tokens.q.shape[2])
        text, sizes, summaries = self._summaries(tokens)
        keys, values, alive = (list(x) for x in zip(*summaries, strict=True))
        every = [q.new_ones(1, 1, x.shape[2], dtype=torch.bool) for x in keys]
        missing = any(real is not None for real in alive)  # of one kind all may exist, of another not
        alive = [one if real is None else real for one, real in zip(every, alive, strict=True)] if missing else []
        exists = [] if call.exists is None else [call.exists]
        about = (call.lengths, sizes, text, n, self.options.softmax_scale)
        return mixture_merge(q, [k, v], keys, values, exists, alive, *about)[0]

    def make_memory(self, margin: int) -> Memory:
        memories = [component.make_memory(margin) for component in self.parts()]
        if self.options.joint or all(isinstance(memory, Replay) for memory in memories):
            return super().make_memory(margin)
        return Several(memories)

    # ---- the definition ----

    def define(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        if not self.options.joint:
            return mean(component.define(q, k, call) for component in self.parts())
        return joint_weights([component.terms(q, k, call) for component in self.parts()])

    def connections(self, n: int) -> float:
        return sum(component.connections(n) for component in self.parts())

    def cost_report(self, n: int) -> dict[str, int]:
        """The three terms of section 3.1, summed over the components."""
        reports = [component.cost_report(n) for component in self.parts()]
        return {key: sum(report[key] for report in reports) for key in reports[0]}

    def summaries(self, n: int) -> tuple[list[Sequence[int]], list[list[int]]]:
        """Those of one component after another."""
        sets: list[Sequence[int]] = []
        rows: list[list[int]] = [[] for _ in range(n)]
        for component in self.parts():
            more, seen = component.summaries(n)
            for row, numbers in zip(rows, seen, strict=True):
                row += [len(sets) + number for number in numbers]
            sets += more
        return sets, rows

    def picture(self, n: int) -> Tensor:
        """Directly where any component does so."""
        drawn = torch.stack([component.picture(n) for component in self.parts()])  # (M, n, n)
        return torch.where((drawn == 1).any(0), 1, drawn.amax(0))


def _cut(x: Tensor, lengths: Tensor) -> Tensor:
    """0 behind the end of each row: (B, H, n, d)."""
    outside = torch.arange(x.shape[2], device=x.device) >= lengths[:, None]
    return x.masked_fill(outside[:, None, :, None], 0)


def mean(tensors: Iterable[Tensor]) -> Tensor:
    """The running mean: one pass per tensor."""
    first, *rest = tensors
    for count, x in enumerate(rest, 2):
        first = torch.lerp(first, x, 1 / count)
    return first
