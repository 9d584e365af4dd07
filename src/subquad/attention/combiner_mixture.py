"""Combiner-Mixture (Ren et al. 2021, section 3.3): several plans ω_1 … ω_M at once.

    mean (default)  A(x_i) = 1/M Σ_m A(x_i; ω_m)
    joint           one softmax over all plans' groups and the union of their direct sets, each token counted once

Default: axial-vertical and axial-horizontal. `joint` is for the axial plans, whose direct sets are made of the own
row and the own column; `joint=True, split=True` (causal) is the variant the authors published as code. Every
component has an abstraction of its own, `cols` holds for all axial ones; the others have the options they have alone
by default, routing as many clusters as `max_length` asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from subquad.attention.base import Attention
from subquad.attention.combiner import Combiner, CombinerOptions, Terms, attend_in_float, cost_report, joint_weights
from subquad.attention.combiner_axial import (
    CombinerAxial,
    all_summaries,
    axial_attention,
    default_cols,
    mean_plans,
)
from subquad.attention.combiner_fixed import CombinerFixed
from subquad.attention.combiner_logsparse import CombinerLogsparse
from subquad.attention.combiner_routing import CombinerRouting
from subquad.attention.combiner_tree import CombinerTree
from subquad.core.options import option
from subquad.kernels.mixture import mixture_merge
from subquad.supports.partitions import Partition

OTHERS: dict[str, type[Combiner]] = {
    "fixed": CombinerFixed,
    "logsparse": CombinerLogsparse,
    "routing": CombinerRouting,
    "tree": CombinerTree,
}
Plan = Literal["axial-vertical", "axial-horizontal", "axial-rowmajor", "fixed", "logsparse", "routing", "tree"]


class CombinerMixture(Attention):
    __doc__ = __doc__
    family = "combiner"
    paper = "Ren et al. 2021"
    cost = "n·√n"

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
                raise ValueError(f"joint=True is for the axial plans, whose direct sets agree; plans holds {other[0]}")

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
    def exponent(self) -> float:
        return max(component.exponent for component in self.parts())

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return tuple(component.partition for component in self.parts())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        if self._shares_direct() and self.drop == 0 and q.device.type == "cpu":
            return attend_in_float(self._mean, q, k, v, key_mask)
        if not self.options.joint:
            return mean(c.attend(q, k, v, key_mask) for c in self.parts())
        return attend_in_float(partial(axial_attention, self._sets(), cols=self.options.cols), q, k, v, key_mask)

    def _shares_direct(self) -> bool:
        """Is it a mean of plans that all attend directly to own row and own column?"""
        return not self.options.joint and set(self.options.plans) <= {"axial-vertical", "axial-horizontal"}

    def _mean(self, q, k, v, exists) -> Tensor:
        """The mean of the components, with the direct part attended once."""
        o, n = self.options, q.shape[2]
        c = o.cols or default_cols(n)
        kinds = tuple(cast(CombinerAxial, part).kinds() for part in self.parts())
        keys, values, alive = all_summaries(self._sets(), q, k, v, exists, c)
        missing = any(real is not None for real in alive)  # of one kind all may exist, of another not
        all_real = [q.new_ones(1, 1, x.shape[2], dtype=torch.bool) for x in keys]
        alive = [one if real is None else real for one, real in zip(all_real, alive, strict=True)] if missing else []
        plans = list(mean_plans(n, c, o.causal, kinds))
        real = [] if exists is None else [exists]
        q, k, v, *pools = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, *keys, *values))
        keys, values = pools[: len(keys)], pools[len(keys) :]
        out, _, _ = mixture_merge(q, [k, v], keys, values, real, alive, [len(x) for x in kinds], plans, o.softmax_scale)
        return out

    def _sets(self) -> list[tuple[Combiner, str]]:
        """All sets of summaries, each with the component that makes it."""
        return [(c, kind) for c in self.parts() for kind in cast(CombinerAxial, c).kinds()]

    def define(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
        if not self.options.joint:
            return mean(c.define(q, k, key_mask) for c in self.parts())
        work, scale = torch.promote_types(q.dtype, torch.float32), self.options.softmax_scale
        q, k = q.to(work), k.to(work)
        return joint_weights([Terms(c.partition, q, k, c.abstraction, key_mask, scale) for c in self.parts()])

    def cost_report(self, n: int) -> dict[str, int]:
        return cost_report(self.partitions, n)

    def picture(self, n: int) -> Tensor:
        """Directly where any component does so."""
        drawn = torch.stack([p.picture(n) for p in self.partitions])  # (M, n, n)
        return torch.where((drawn == 1).any(0), 1, drawn.amax(0))


def mean(tensors: Iterable[Tensor]) -> Tensor:
    """The running mean: one pass per tensor."""
    first, *rest = tensors
    for count, x in enumerate(rest, 2):
        first = torch.lerp(first, x, 1 / count)
    return first
