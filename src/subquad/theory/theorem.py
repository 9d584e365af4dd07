"""Theorem 1 of Yun et al. from end to end: a continuous function f, a network g of our layers, and their distance.

    d_p(f, g) = (∫ ‖f(X) - g(X)‖_p^p dX)^{1/p}  ≤  d_p(f, f̄) + d_p(f̄, g)  ≤  ε/2 + ε/2

    step 1   f̄ is constant on cubes of side δ, f̄(X) = f(G) for X ∈ G + [0, δ)^{d×n}            (Lemma 5)
    step 2   f̄ is a network with hardmax and three-piece activations, exactly                   (`proof`)
    step 3   softmax and ReLUs instead, in `MultiheadAttention`: d_p(f̄, g) ≤ ε/2                (appendix F, `network`)

The integrals over [0, 1)^{d×n} are means over random points, equally many in each cube. The quantiser g̃_q is exact on
a share (1-α)^{nd} of the domain, D_1; on the rest, D_2, the network is bounded but wrong, at most B away from f̄. Points
are drawn in both parts, and the two means are weighed by the parts' measures. α is chosen as F.4 asks,
(1-(1-α)^{nd}) B^p ≤ (ε/2)^p / 2. (The paper says "α close enough to 1"; close enough to 0 is meant.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from subquad.core.numbers import LARGEST_GRID
from subquad.theory.construction import Plan, quantisers
from subquad.theory.functions import Function, evaluate, named
from subquad.theory.network import clip_network, from_tokens, in_floats, quantiser, to_tokens, value_network, width
from subquad.theory.network import context_network as make_context
from subquad.theory.proof import Proof, Stage
from subquad.theory.temperature import run_context, sufficient_temperature

SAMPLES = 256  # points of D_1; half as many of D_2, whose measure is small, and four times as many for Lemma 5
SMALLEST_ALPHA = 1e-9  # a slope of 1/α must leave float64 some digits
FINEST = 64  # 1/δ up to which Lemma 5 is measured


@dataclass(frozen=True)
class Approximation:
    """The attention layers with ρ[t·]: how far they are from the exact ones."""

    t: float
    context_error: float  # largest error of an id, in multiples of δ; below 1/4 every column finds its value
    d_p: float


@dataclass(frozen=True)
class Distance:
    """A measured d_p with its standard error, and the largest ‖·‖_p at a single point."""

    value: float
    error: float
    largest: float


@dataclass(frozen=True, eq=False)
class Theorem1:
    """The network and its distance from f."""

    network: nn.Module = field(repr=False)
    epsilon: float
    stages: list[Stage]
    lemma5: Distance  # d_p(f, f̄)
    finer: dict[int, float]  # 1/δ → d_p(f, f̄) on finer grids
    alpha: float
    t: float
    bound: float  # B
    step3: Distance  # d_p(f̄, g)
    total: Distance  # d_p(f, g)

    @property
    def holds(self) -> bool:
        return all(stage.holds for stage in self.stages)


def approximate(proof: Proof, temperatures: list[float], p: float = 2.0) -> list[Approximation]:
    """The error of the attention layers at each temperature, and d_p(f̄, g) as α goes to 0."""
    plan, D = proof.plan, width(proof.support, proof.plan.d)
    values, target = value_network(plan, proof.values, D), in_floats(proof.outputs, plan.unit)
    rows = []
    for t in temperatures:
        context = run_context(proof.support, plan, proof.inputs, proof.context, t)
        with torch.no_grad():
            got = from_tokens(values(to_tokens(context.tokens, D)), plan.d)
        rows.append(Approximation(t, context.error, _distance(got - target, p).value))
    return rows


def theorem1(
    proof: Proof,
    function: str | Function | None = None,
    *,
    epsilon: float | None = None,
    p: float = 2.0,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Theorem1:
    """The network of a proof that holds, in the library's layers, measured against the function.

    `epsilon` defaults to twice the measured d_p(f, f̄): the ε for which the proof's δ is fine enough.
    """
    if not proof.holds:
        raise ValueError(f"the proof breaks at {proof.breaks.name}; there is no network to measure")  # type: ignore[union-attr]
    if epsilon is not None and epsilon <= 0:
        raise ValueError(f"epsilon is {epsilon}; it must be > 0")
    if p < 1:
        raise ValueError(f"p is {p}; the norm needs p ≥ 1")
    plan, f = proof.plan, named(function, proof.support.causal)
    generator = np.random.default_rng(seed)
    lemma5 = piecewise_error(f, plan.n, plan.d, plan.m, p, 4 * samples, generator)
    finer = {
        m: piecewise_error(f, plan.n, plan.d, m, p, 512, generator).value for m in (2 * plan.m, 4 * plan.m, 8 * plan.m)
    }
    chosen = epsilon if epsilon is not None else 2 * lemma5.value or 1e-3
    target = in_floats(proof.outputs, plan.unit)  # f̄ on the cubes, (N, d, n)
    low, high = float(target.min()), float(target.max())
    bound = (plan.n * plan.d) ** (1 / p) * (high - low)
    alpha = choose_alpha(chosen, bound, plan.n * plan.d, p)
    t = sufficient_temperature(plan, proof.support.map, summaries=proof.support.view == "summaries")
    network = build(proof, t, alpha, low, high)
    measured = measure(proof, network, f, alpha, p, samples, generator)
    stages = _stages(proof, chosen, lemma5, alpha, t, bound, measured, p, f)
    return Theorem1(network, chosen, stages, lemma5, finer, alpha, t, bound, measured.step3, measured.total)


def build(proof: Proof, t: float, alpha: float, low: float, high: float) -> nn.Sequential:
    """clip ∘ g̃_v ∘ g̃_c ∘ g̃_q, from tokens X + E (N, n, D) to tokens."""
    plan, D = proof.plan, width(proof.support, proof.plan.d)
    return nn.Sequential(
        quantiser(plan, quantisers(plan), alpha, D),
        make_context(proof.support, plan, t),
        value_network(plan, proof.values, D),
        clip_network(plan.d, low, high, D),
    ).eval()


def choose_alpha(epsilon: float, bound: float, entries: int, p: float) -> float:
    """The largest α that F.4 allows, at most 1/4."""
    share = 0.5 * (epsilon / 2 / bound) ** p if bound else 1.0  # of the domain, that may be mapped wrongly
    alpha = 1 - (1 - min(share, 0.5)) ** (1 / entries)
    if alpha < SMALLEST_ALPHA:
        raise ValueError(f"epsilon is {epsilon:g}: F.4 asks for α = {alpha:.1e}, below what float64 resolves (1e-9)")
    return min(alpha, 0.25)


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Means over random points of the two parts of the domain."""

    share: float  # (1-α)^{nd}, the measure of D_1
    quantised: float  # the share of the points of D_1 that g̃_q maps to their corner
    inside: float  # the largest ‖g - f̄‖_p on D_1
    outside: float  # the largest ‖g - f̄‖_p on D_2
    step3: Distance
    total: Distance


def measure(proof: Proof, network: nn.Sequential, f: Function, alpha: float, p: float, samples: int, generator):
    """Run the network on points of D_1 and D_2."""
    plan, D = proof.plan, width(proof.support, proof.plan.d)
    corners = in_floats(proof.inputs, plan.unit)  # G + E, (N, d, n)
    target = in_floats(proof.outputs, plan.unit)
    place = np.array(plan.embedding, dtype=float)
    order = generator.permutation(len(corners))  # equally many points in each cube
    gaps, misses, quantised = [], [], 0.0
    for wrong in (False, True):
        chosen = np.resize(order, samples // 2 if wrong else samples)
        inside = _offsets((len(chosen), plan.d, plan.n), alpha, wrong, generator) / plan.m
        points = corners[chosen] + inside
        with torch.no_grad():
            rounded = network[0](to_tokens(points, D))
            got = from_tokens(network[1:](rounded), plan.d)
        if not wrong:
            quantised = float((np.abs(from_tokens(rounded, plan.d) - corners[chosen]) < 1e-9).all((1, 2)).mean())
        gaps.append(_powers(got - target[chosen], p))
        misses.append(_powers(got - np.stack([evaluate(f, x) for x in points - place]), p))
    share = (1 - alpha) ** (plan.n * plan.d)
    inside_most, outside_most = (float(gap.max() ** (1 / p)) for gap in gaps)
    return Measured(share, quantised, inside_most, outside_most, _weighed(gaps, share, p), _weighed(misses, share, p))


def piecewise_error(f: Function, n: int, d: int, m: int, p: float, samples: int, generator) -> Distance:
    """Lemma 5, measured: d_p(f, f̄) for cubes of side 1/m, at random points."""
    cubes = generator.integers(0, m, (samples, d, n))
    if m ** (d * n) <= samples:  # equally many points in each cube
        every = np.indices((m,) * (d * n)).reshape(d * n, -1).T.reshape(-1, d, n)
        cubes = every[np.resize(np.arange(len(every)), samples)]
    points = (cubes + generator.random(cubes.shape)) / m
    known: dict[bytes, np.ndarray] = {}
    gaps = np.empty_like(points)
    for s, (cube, point) in enumerate(zip(cubes, points, strict=True)):
        corner = known.get(cube.tobytes())
        if corner is None:
            corner = known[cube.tobytes()] = evaluate(f, cube / m)
        gaps[s] = evaluate(f, point) - corner
    return _distance(gaps, p)


def sufficient_delta(f: Function, n: int, d: int, epsilon: float, p: float = 2.0, seed: int = 0) -> int | None:
    """The smallest 1/δ up to 64 for which the measured d_p(f, f̄) is at most ε/2."""
    generator = np.random.default_rng(seed)
    for m in range(2, FINEST + 1):
        if piecewise_error(f, n, d, m, p, 512, generator).value <= epsilon / 2:
            return m
    return None


def _offsets(shape: tuple[int, int, int], alpha: float, wrong: bool, generator) -> np.ndarray:
    """Places inside a cube, in multiples of δ: all entries below 1-α (D_1), or at least one above (D_2)."""
    places = generator.random(shape) * (1 - alpha)
    if not wrong:
        return places
    flat = places.reshape(len(places), -1)  # (S, dn)
    entries, none_yet = flat.shape[1], np.ones(len(flat), dtype=bool)
    for e in range(entries):  # in the zone with probability α, given that at least one entry is
        chance = np.where(none_yet, alpha / (1 - (1 - alpha) ** (entries - e)), alpha)
        zone = generator.random(len(flat)) < chance
        flat[zone, e] = 1 - alpha + alpha * generator.random(int(zone.sum()))
        none_yet &= ~zone
    return flat.reshape(shape)


def _powers(gap: np.ndarray, p: float) -> np.ndarray:
    """‖·‖_p^p of each sample, (S, d, n) → (S,)."""
    return (np.abs(gap) ** p).sum((1, 2))


def _distance(gap: np.ndarray, p: float) -> Distance:
    return _weighed([_powers(gap, p)], 1.0, p)


def _weighed(parts: list[np.ndarray], share: float, p: float) -> Distance:
    """The mean over the parts of the domain, to the power 1/p."""
    weights = (share, 1 - share)[: len(parts)]
    mean = sum(w * float(part.mean()) for w, part in zip(weights, parts, strict=True))
    variance = sum(w**2 * float(part.var()) / len(part) for w, part in zip(weights, parts, strict=True))
    value = mean ** (1 / p)
    error = value * variance**0.5 / (p * mean) if mean > 0 else 0.0
    return Distance(value, error, float(max(part.max() for part in parts) ** (1 / p)))


# ---- the statements -------------------------------------------------------------------------------------------------


def _stages(proof: Proof, epsilon, lemma5, alpha, t, bound, measured: Measured, p: float, f: Function) -> list[Stage]:
    half, name = epsilon / 2, f"d_{p:g}"
    enough = lemma5.value <= half * (1 + 1e-12)
    detail = f"{name}(f, f̄) = {lemma5.value:.4g} ± {lemma5.error:.1g}, ε/2 = {half:.4g}"
    if not enough:
        detail += "; " + _advice(proof.plan, f, epsilon, p)
    off = run_context(proof.support, proof.plan, proof.inputs, proof.context, t).error
    third, total = measured.step3, measured.total
    return [
        Stage("piecewise constant (Lemma 5)", enough, detail),
        Stage(
            "ReLU quantiser (F.1)",
            measured.quantised == 1,
            f"α = {alpha:.3g}; on (1-α)^(nd) = {measured.share:.2%} of the domain it equals g_q, "
            f"at {measured.quantised:.2%} of the points tried there",
        ),
        Stage("attention (F.2)", off <= 0.25, f"t = {t:.1f}; ids are off by at most {off:.1e} δ, δ/4 is allowed"),
        Stage(
            "values (F.3)",
            measured.inside**p <= half**p / 2,
            f"on that part ‖g - f̄‖ ≤ {measured.inside:.1e}",
        ),
        Stage(
            "the rest (F.4)",
            third.value <= half,
            f"elsewhere ‖g - f̄‖ ≤ {measured.outside:.3g}, B = {bound:.3g}; {name}(f̄, g) = {third.value:.4g} "
            f"± {third.error:.1g}, ε/2 = {half:.4g}",
        ),
        Stage(
            "Theorem 1",
            total.value <= epsilon,
            f"{name}(f, g) = {total.value:.4g} ± {total.error:.1g}, ε = {epsilon:.4g}",
        ),
    ]


def _advice(plan: Plan, f: Function, epsilon: float, p: float) -> str:
    m = sufficient_delta(f, plan.n, plan.d, epsilon, p)
    if m is None:
        return f"no delta down to 1/{FINEST} is fine enough"
    columns = plan.n * m ** (plan.n * plan.d)
    size = f"{columns:,} value layers"
    return f"delta = 1/{m} is fine enough, with {size}" + (", too many to build here" if columns > LARGEST_GRID else "")
