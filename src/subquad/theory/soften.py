"""Step 3 of the proof (Lemma 4, appendix F): the same network with ρ[t·] for the hardmax and ReLUs for the activations.

    ψ̃^l(Z; b)_k = uᵀZ_A ρ[t (uᵀZ_A)ᵀ(uᵀZ_k - b)],       φ̃' = a trapezoid of four ReLUs for the value layers

It runs in float64, in multiples of δ, on the quantised sequences: the quantiser g̃_q equals g_q except on a share
1 - (1-α)^{nd} of the domain that goes away with α, whatever t is. So d_p is taken over the rest, where it is

    d_p(ḡ, g)^p = (1-α)^{nd} · mean over H of ‖g̃(H) - ḡ(H)‖_p^p,       reported for α → 0

Two corrections to appendix F, for whoever computes the t that suffices. Scores are products: neighbouring ids differ by
δ and |uᵀZ_k - b| ≥ δ/2, so the margin is δ²/2, not δ/2. And the errors of the selective shifts do not stay: every
all-max-shift multiplies them by up to 1 + c, so η must be smaller by (1+c)^s than printed. Both cost a larger t.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from subquad.probability import ProbabilityMap, Softmax
from subquad.theory.construction import Assign, MaxShift, Plan, Shift, max_shifts, selective_shifts
from subquad.theory.maps import Rho, temperature
from subquad.theory.proof import Proof
from subquad.theory.sets import Family

DIGITS = 2.0**49  # ids up to this many δ leave float64 three bits below δ


@dataclass(frozen=True)
class Approximation:
    """The network with ρ[t·]: how far it is from the exact one."""

    t: float
    context_error: float  # largest error of an id, in multiples of δ; below 1/4 every column finds its value
    d_p: float


def approximate(proof: Proof, temperatures: list[float], rho: Rho | None = None, p: float = 2.0) -> list[Approximation]:
    """The error of Step 3 at each temperature t. `rho` defaults to the softmax, `p` is that of d_p."""
    plan, rho = proof.plan, rho or Softmax()
    exact = _floats(proof.context, plan.delta)  # (N, d, n)
    if np.abs(plan.ids(exact)).max() > DIGITS:
        raise ValueError(
            f"ids reach {float(np.abs(plan.ids(exact)).max()):.2g} δ, too many digits for float64 (2^49 δ); "
            "choose a smaller n, d or 1/delta"
        )
    target = _floats(proof.outputs, plan.delta)
    attention: list[Shift | MaxShift] = [layer for layer in selective_shifts(plan) if layer.c]
    attention += max_shifts(plan)
    rows = []
    for t in temperatures:
        z = _floats(proof.inputs, plan.delta)
        for layer in attention:
            _attend(plan, layer, z, rho, t / plan.m**2)  # scores are products of two ids: δ² in our units
        error = float(np.abs(plan.ids(z) - plan.ids(exact)).max())
        for assign in proof.values:
            _assign(plan, assign, z)
        gap = np.abs(z - target) / plan.m
        rows.append(Approximation(t, error, float((gap**p).sum((1, 2)).mean() ** (1 / p))))
    return rows


def sufficient_temperature(proof: Proof, rho: ProbabilityMap | None = None) -> float:
    """A t with which no id is off by more than δ/8, from Assumption 2 and the corrected bounds of appendix F.

    With c = δ^{-d}, C the constant of Ω, L = (n-1)δ^{-d} selective shifts and D the largest id before the
    all-max-shifts, errors obey ε ← (1+2c)ε + 2cηD per selective shift and ε ← (1+C)ε + CηD(1+C)^s per all-max-shift.
    """
    plan, rho = proof.plan, rho or Softmax()
    jump, steps, big = plan.m**plan.d, (plan.n - 1) * plan.m**plan.d, plan.raise_by
    spread = (plan.top + 1) * plan.m ** (plan.n * plan.d)
    growth = (1 + big) ** plan.hops * (1 + 2 * jump) ** steps + plan.hops * big * (1 + big) ** (2 * plan.hops)
    eta = Fraction(1, 8 * plan.m) / (spread * growth)
    largest = max(len(family.of(k)) for family in plan.families for k in range(plan.n))
    t = temperature(rho, 1 / (4 * plan.m**2), float(eta), largest)
    if t is None:
        raise ValueError(f"rho is {type(rho).__name__}; appendix B gives no temperature for it")
    return t


def _floats(z: np.ndarray, delta: int) -> np.ndarray:
    """Units to float64 multiples of δ."""
    return np.array([float(Fraction(int(value), delta)) for value in z.flat]).reshape(z.shape)


def _attend(plan: Plan, layer: Shift | MaxShift, z: np.ndarray, rho: Rho, t: float) -> None:
    ids, family = plan.ids(z), plan.families[layer.family]  # (N, n)
    if isinstance(layer, MaxShift):
        z[:, 0] += layer.c * _head(ids, family, 0.0, rho, t)
    else:
        low, high = (_head(ids, family, layer.b + side, rho, t) for side in (-0.5, 0.5))
        z[:, 0] += layer.c * (low - high)


def _head(ids: np.ndarray, family: Family, bias: float, rho: Rho, t: float) -> np.ndarray:
    out = np.empty_like(ids)
    for k in range(ids.shape[1]):
        seen = ids[:, family.of(k)]  # (N, |A|)
        scores: Tensor = torch.from_numpy(t * seen * (ids[:, k] - bias)[:, None])
        with torch.no_grad():
            weights = rho(scores).numpy()
        least = seen.min(1)  # weighing the differences keeps the digits of large ids
        out[:, k] = least + ((seen - least[:, None]) * weights).sum(1)
    return out


def _assign(plan: Plan, layer: Assign, z: np.ndarray) -> None:
    """Z + move φ̃'(uᵀZ - id): 1 within δ/4 of the id, 0 beyond δ/2, linear between."""
    off = np.abs(plan.ids(z) - float(Fraction(layer.id, plan.delta)))  # (N, n)
    share = np.clip(2 - 4 * off, 0, 1)
    if share.any():
        move = _floats(layer.move, plan.delta)
        z += share[:, None] * move[None, :, None]
