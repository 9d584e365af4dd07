"""The temperature t at which ρ[t·] does the work of the hardmax (appendix F.2), and the error that is left.

Two corrections to the printed bounds. Scores are products: neighbouring ids differ by δ and |uᵀZ_k - b| ≥ δ/2, so
the margin is δ²/2, not δ/2. And the errors of the selective shifts do not stay: every all-max-shift multiplies them by
up to 1 + c, so η must be smaller by (1+c)^s than printed. Both cost a larger t.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from subquad.probability import ProbabilityMap, Softmax
from subquad.theory.construction import Array, Plan, run
from subquad.theory.maps import temperature
from subquad.theory.network import DIGITS, context_layers, context_network, from_tokens, in_floats, to_tokens, width
from subquad.theory.sets import Support


def sufficient_temperature(plan: Plan, rho: ProbabilityMap | None = None, *, summaries: bool = False) -> float:
    """A t with which no id is off by more than δ/8, from Assumption 2 and the corrected bounds of appendix F.

    With c = δ^{-d}, C the constant of Ω, L = (n-1)δ^{-d} selective shifts and D the largest id before the
    all-max-shifts, errors obey ε ← (1+2c)ε + 2cηD per selective shift and ε ← (1+C)ε + CηD(1+C)^s per all-max-shift.
    With `summaries` a term may be a group with a softmax of its own inside: 2η for η.
    """
    rho = rho or Softmax()
    jump, steps, big = plan.m**plan.d, (plan.n - 1) * plan.m**plan.d, plan.raise_by
    spread = (plan.top + 1) * plan.m ** (plan.n * plan.d)
    growth = (1 + big) ** plan.hops * (1 + 2 * jump) ** steps + plan.hops * big * (1 + big) ** (2 * plan.hops)
    eta = float(Fraction(1, (16 if summaries else 8) * plan.m) / (spread * growth))
    if eta == 0:
        raise ValueError("the η that appendix F asks for is below 1e-308: choose a smaller n, d or 1/delta")
    largest = max(len(family.of(k)) for family in plan.families for k in range(plan.n))
    t = temperature(rho, 1 / (4 * plan.m**2), eta, largest)
    if t is None:
        raise ValueError(f"the probability map is {type(rho).__name__}; appendix B gives no temperature for it")
    return t


@dataclass(frozen=True, eq=False)
class Context:
    """What the attention layers make of the quantised sequences at temperature t."""

    tokens: np.ndarray  # g̃_c(H), float64 (N, d, n)
    error: float  # the largest error of an id, in multiples of δ; below 1/4 every column finds its value
    worst: tuple[int, int]  # the sequence and the token where it occurs


def run_context(support: Support, plan: Plan, inputs: Array, exact: Array, t: float) -> Context:
    """The library's layers on the quantised sequences H (N, d, n), against the exact g_c(H)."""
    require_digits(plan, exact)
    D, wanted = width(support, plan.d), in_floats(plan.ids(exact), plan.unit)  # (N, n)
    with torch.no_grad():
        x = context_network(support, plan, t)(to_tokens(in_floats(inputs, plan.unit), D))
    got = from_tokens(x, plan.d)
    off = np.abs(plan.ids(got) - wanted) * plan.m  # (N, n)
    off = np.nan_to_num(off, nan=np.inf)
    s, k = np.unravel_index(int(off.argmax()), off.shape)
    return Context(got, float(off.max()), (int(s), int(k)))


def first_wrong_layer(support: Support, plan: Plan, inputs: Array, t: float) -> tuple[int, int, int] | None:
    """The first attention layer after which an id is off by δ/4 or more, with the sequence and the token."""
    x, exact = to_tokens(in_floats(inputs, plan.unit), width(support, plan.d)), inputs
    with torch.no_grad():
        for number, (layer, block) in enumerate(
            zip(context_layers(plan), context_network(support, plan, t), strict=True)
        ):
            x, exact = block(x), run(plan, [layer], exact)
            off = np.abs(plan.ids(from_tokens(x, plan.d)) - in_floats(plan.ids(exact), plan.unit)) * plan.m
            if not (off < 0.25).all():
                s, k = np.argwhere(~(off < 0.25))[0]
                return number, int(s), int(k)
    return None


def require_digits(plan: Plan, context: Array) -> None:
    """Raise where float64 cannot tell neighbouring ids apart."""
    largest = float(max(abs(int(value)) for value in plan.ids(context).flat) / plan.delta)
    if largest > DIGITS:
        raise ValueError(
            f"ids reach {largest:.2g} δ, too many digits for float64 (2^49 δ); choose a smaller n, d or 1/delta"
        )
