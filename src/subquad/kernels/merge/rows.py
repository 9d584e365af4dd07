"""Which rows of a batch follow which plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from subquad.supports.parts import Plan
from subquad.supports.support import plan_of


def plans(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lengths: Tensor | None,
    support: str,
    which: str,
    n: int,
) -> Iterator[tuple[slice, Plan]]:
    """Consecutive batch elements of equal length, and the plan of that length; empty elements are left out."""
    sizes, first = [n] * len(q) if lengths is None else lengths.tolist(), 0
    for b in range(1, len(q) + 1):
        if b == len(q) or sizes[b] != sizes[first]:
            if sizes[first] > 0 or lengths is None:
                plan = plan_of(support, sizes[first], which)
                check(q, keys, values, plan, f"the plan {which} of {support} for {sizes[first]} tokens")
                yield slice(first, b), plan
            first = b


def check(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], plan: Plan, about: str) -> None:
    """Refuse tensors that are shorter than the plan: kernels would read beyond their end."""
    if q.shape[2] < plan.rows:
        raise ValueError(f"q has {q.shape[2]} rows, and {about} has {plan.rows}")
    for name, tensors in (("keys", keys), ("values", values)):
        needed = max(plan.reaches, default=-1) + 1
        if len(tensors) < needed:
            raise ValueError(f"{name} has {len(tensors)} source{'s' * (len(tensors) != 1)}, and {about} needs {needed}")
        for source, reach in plan.reaches.items():
            if tensors[source].shape[2] < reach:
                raise ValueError(f"{name}[{source}] has {tensors[source].shape[2]} keys, and {about} reaches {reach}")
