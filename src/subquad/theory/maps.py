"""Assumption 2: scaled up, the probability map ρ comes as close to the hardmax as one likes.

    for every ζ > 0 and 0 < η ≤ 1 there is a t > 0 such that every column v whose maximum v_* leads by at least ζ
    has ρ[tv]_* ≥ 1 - η          (the others then share at most η, because ρ sums to 1)

Appendix B gives t for the maps in use, for columns of n entries:

    softmax          (1 + (n-1) e^{-tζ})^{-1} ≥ 1-η    ⇔    t ≥ ln((n-1)(1-η)/η) / ζ
    topk             the same with min(k, n) for n
    sparselin-gen    t = (1-η) / ζ, for every λ
    α-entmax         t = 1 / (ζ (α-1)), for α > 1; α = 1 is the softmax
    hardmax          any t

Where a formula says "any", t = 1 is used. A map of your own is searched numerically: t is doubled until the worst of
many columns obeys. Then the verdict is evidence, not a proof, and says so; a map for which no t up to 2^30 does is
reported as failing, with the column. The columns are drawn at random and built by hand: all others level just below
the maximum (the worst case of every map above), one rival, a staircase, huge and tiny leads, offsets to both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from subquad.probability import Entmax, Hardmax, LearnedEntmax, ProbabilityMap, Softmax, SparselinGen, TopK

Rho = Callable[[Tensor], Tensor]

ZETAS = (1.0, 0.1, 0.001)
ETAS = (1.0, 0.5, 0.1, 1e-3, 1e-6)
LARGEST = 2.0**30
SLACK = 1e-9  # rounding of a float64 row


@dataclass(frozen=True)
class MapVerdict:
    """Does ρ obey Assumption 2 on columns of n entries?"""

    name: str
    holds: bool
    proved: bool  # by the formula of appendix B; False = by numerical search
    temperatures: dict[tuple[float, float], float] = field(repr=False)  # (ζ, η) → t
    why: str = ""
    column: tuple[float, ...] | None = None  # where it fails


def temperature(rho: Rho, zeta: float, eta: float, n: int) -> float | None:
    """t(ζ, η) of appendix B for columns of n entries, or None for a map that it does not treat."""
    if zeta <= 0 or not 0 < eta <= 1:
        raise ValueError(f"zeta is {zeta}, eta is {eta}; they must obey zeta > 0 and 0 < eta ≤ 1")
    if isinstance(rho, Hardmax):
        return 1.0
    if isinstance(rho, SparselinGen):
        return (1 - eta) / zeta if eta < 1 else 1.0
    if isinstance(rho, Entmax):
        if rho.alpha > 1:
            return 1 / (zeta * (rho.alpha - 1))
    elif isinstance(rho, TopK):
        n = min(n, rho.topk)
    elif not isinstance(rho, Softmax):
        return None
    if eta == 1 or n == 1:
        return 1.0
    least = math.log((n - 1) * (1 - eta) / eta) / zeta
    return least if least > 0 else 1.0


def check_map(rho: Rho, n: int = 32, *, seed: int = 0) -> MapVerdict:
    """Assumption 2 for a map of the library (by formula, then verified on columns) or for any callable.

    A callable takes a float64 tensor (columns, n) and returns weights of the same shape along the last dimension.
    """
    if n < 2:
        raise ValueError(f"n is {n}; a column needs at least 2 entries for a maximum to lead")
    name = _name(rho)
    if isinstance(rho, LearnedEntmax):
        rho = Entmax(float(rho.alpha.min()))  # the head that is slowest to concentrate speaks for all
    found: dict[tuple[float, float], float] = {}
    proved = temperature(rho, 1.0, 0.5, n) is not None
    for zeta in ZETAS:
        columns = trial_columns(n, zeta, seed)
        for eta in ETAS:
            t = temperature(rho, zeta, eta, n) if proved else _search(rho, columns, eta)
            if t is None or leads(rho, columns, t)[0] < 1 - eta - SLACK:
                return _failure(name, proved, found, rho, columns, zeta, eta, t)
            found[zeta, eta] = t
    if proved:
        why = f"by the formula of appendix B, verified on {len(columns)} columns for each of {len(found)} pairs (ζ, η)"
    else:
        why = f"numerically, on {len(columns)} columns for each of {len(found)} pairs (ζ, η): evidence, not a proof"
    return MapVerdict(name, True, proved, found, why)


def leads(rho: Rho, columns: Tensor, t: float) -> tuple[float, Tensor]:
    """The smallest ρ[tv]_* over columns (c, n) and the column where it occurs; refuses weights that are not weights."""
    weights = _weights(rho, t * columns)  # (c, n)
    best = weights.gather(-1, columns.argmax(-1, keepdim=True)).squeeze(-1)  # (c,)
    return float(best.min()), columns[best.argmin()]


def trial_columns(n: int, zeta: float, seed: int = 0) -> Tensor:
    """Columns (c, n) in which the maximum leads by at least ζ, the worst ones we know among them."""
    generator = torch.Generator().manual_seed(seed)

    def noise(count: int) -> Tensor:
        return torch.rand(count, n, dtype=torch.float64, generator=generator)

    below = [torch.zeros(1, n, dtype=torch.float64)]  # all level: the worst case
    below += [noise(4) * -(10.0**k) * zeta for k in range(-1, 6)]  # clouds of all widths under the rivals
    below += [-zeta * torch.arange(n, dtype=torch.float64)[None]]  # a staircase
    rival = torch.full((1, n), -1e6 * zeta, dtype=torch.float64)
    rival[:, n // 2] = 0.0  # one rival, the rest far away
    rows = torch.cat([*below, rival])  # (r, n), maximum ≤ 0
    columns = []
    for lead, offset in ((1.0, 0.0), (1.0, 5.0), (1.5, -5.0), (100.0, 0.0)):
        chosen = rows - rows.amax(-1, keepdim=True)
        place = torch.randint(n, (len(chosen), 1), generator=generator)
        columns.append(chosen.scatter(1, place, lead * zeta) + offset * zeta)
    return torch.cat(columns)


def _weights(rho: Rho, scores: Tensor) -> Tensor:
    with torch.no_grad():
        weights = rho(scores)
    if not isinstance(weights, Tensor) or weights.shape != scores.shape:
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"the map returns {got} for scores {tuple(scores.shape)}; it must keep the shape")
    sums, least = weights.sum(-1), weights.min()
    if not torch.isfinite(weights).all() or least < -SLACK or (sums - 1).abs().max() > 1e-6:
        worst = int(torch.nan_to_num(sums - 1, nan=math.inf).abs().argmax())
        raise ValueError(
            f"the map is not a probability map: a column sums to {float(sums[worst]):.6g}, the smallest weight is "
            f"{float(least):.6g}; weights must be non-negative and sum to 1"
        )
    return weights


def _search(rho: Rho, columns: Tensor, eta: float) -> float | None:
    """The first power of two that does."""
    t = 2.0**-10
    while t <= LARGEST:
        if leads(rho, columns, t)[0] >= 1 - eta:
            return t
        t *= 2
    return None


def _failure(name, proved, found, rho, columns, zeta, eta, t) -> MapVerdict:
    got, column = leads(rho, columns, LARGEST if t is None else t)
    upto = f"no t up to 2^30 does: at the last one a column that leads by ζ = {zeta:g}" if t is None else f"t = {t:g}"
    why = f"fails for ζ = {zeta:g}, η = {eta:g}: {upto} gets weight {got:.6g} < 1 - η"
    return MapVerdict(name, False, proved, found, why, tuple(column.tolist()))


def _name(rho: Rho) -> str:
    if isinstance(rho, ProbabilityMap):
        inner = rho.extra_repr()
        return type(rho).__name__.lower() + (f"({inner})" if inner else "")
    return getattr(rho, "__name__", type(rho).__name__)
