"""Running the constructive proof on the whole grid, stage by stage, and showing where it breaks.

    print(prove("star", 4, 1, "1/2"))
    prove(sets, 3, 1, "1/3", function=lambda x: x[:, ::-1])     # your sets, your function (d, n) → (d, n)

Every stage of appendices D and E becomes a statement that is verified on every sequence of {0, δ, …, 1-δ}^{d×n}. For a
pattern that violates an assumption the construction goes on with what there is (the identity for a missing γ, p·n
layers for a missing s), and the first statement that fails is where the proof breaks.

A Combiner (Proposition 1 of its authors, `combiner`) is given the network of dense attention, since its plan joins all
pairs. One more stage then runs the attention layers with the mechanism itself, softmax and summaries included, and asks
whether the ids are those of the exact network.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from subquad.core.numbers import check_grid, steps_per_unit
from subquad.theory.assumptions import missing_loop
from subquad.theory.combiner import suitable_order
from subquad.theory.construction import (
    Array,
    Assign,
    Plan,
    assignments,
    common_unit,
    connecting_family,
    embed,
    grid,
    max_shifts,
    quantisers,
    run,
    selective_shifts,
)
from subquad.theory.functions import Function, evaluate_exactly, named
from subquad.theory.hamiltonian import hamiltonian_path
from subquad.theory.hops import hops
from subquad.theory.sets import Support, read
from subquad.theory.temperature import first_wrong_layer, run_context, sufficient_temperature


@dataclass(frozen=True)
class Stage:
    """One statement of the proof, verified on the grid."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True, eq=False)
class Proof:
    """The network and what was verified about it."""

    support: Support
    plan: Plan
    stages: list[Stage]
    inputs: Array = field(repr=False)  # H, the quantised sequences (N, d, n)
    context: Array = field(repr=False)  # g_c(H), (N, d, n)
    outputs: Array = field(repr=False)  # the target on the grid, (N, d, n)
    values: list[Assign] = field(repr=False)
    layers: dict[str, int] = field(default_factory=dict)  # how many of each kind

    @property
    def holds(self) -> bool:
        return all(stage.holds for stage in self.stages)

    @property
    def breaks(self) -> Stage | None:
        """The first statement that fails."""
        return next((stage for stage in self.stages if not stage.holds), None)

    def __str__(self) -> str:
        p, counts = self.plan, ", ".join(f"{count:,} {name}" for name, count in self.layers.items())
        lines = [
            f"{self.support.name}, n = {p.n}, d = {p.d}, delta = 1/{p.m}: {len(self.inputs):,} sequences, {counts}"
        ]
        lines += [f"{'✓' if s.holds else '✗'} {s.name}: {s.detail}" for s in self.stages]
        broken = self.breaks
        end = f"the proof breaks at: {broken.name}" if broken else "the network equals the function"
        return "\n".join([*lines, end])


def prove(
    source: Any,
    n: int,
    d: int = 1,
    delta: Fraction | float | str = "1/2",
    function: str | Function | None = None,
    *,
    causal: bool | None = None,
) -> Proof:
    """Build the modified sparse Transformer for `function` from the sets of `source`, and verify every stage.

    `function` maps an array (d, n) to (d, n) numbers, or is a name (`functions`); None = reverse (causal: cumsum).
    """
    support = source if isinstance(source, Support) else read(source, n, causal=causal)
    if support.view == "other":
        raise ValueError(
            f"{support.name} is neither a probability map over index sets (eq. 2) nor a Combiner plan; "
            "the construction has nothing to be built from"
        )
    m = steps_per_unit(delta)
    check_grid(n, d, m)
    targets = _targets(function, n, d, m, support.causal)
    unit = common_unit(m, [value for value in targets.flat])
    outputs = np.array([int(value * unit) for value in targets.flat], dtype=object).reshape(targets.shape)
    path, least_top = hamiltonian_path(support.union), 0
    if support.view == "summaries":
        suitable = suitable_order(support)
        path = path if suitable.order is None else suitable
        least_top = n * n if support.abstraction.endswith("mean") else 0
    order = list(range(n)) if path.order is None else path.order.tolist()
    steps = hops(support.heads, support.causal)  # a multihead layer can rest all families but one
    s = len(support.heads) * n if steps.steps is None else steps.steps
    plan = Plan(support.heads, order, s, d, m, unit, support.causal, least_top=least_top)
    stages = [Stage("embedding (D.1, Assumption 1.2)", path.order is not None, _embedding_detail(plan, path.why))]
    return _build(support, plan, stages, outputs, steps.why(support.causal))


def _build(support: Support, plan: Plan, stages: list[Stage], outputs: Array, reach: str) -> Proof:
    x = grid(plan.n, plan.d, plan.m, plan.unit)
    h = embed(plan, x)
    quantise, shift = quantisers(plan), selective_shifts(plan)
    stages.append(_quantised(plan, quantise, x, h))
    shifted = run(plan, shift, h)
    stages += _shifted(plan, support, h, shifted)
    plan = replace(plan, lift=_lift(plan, shifted, outputs))
    raised = max_shifts(plan)
    context = run(plan, raised, shifted)
    stages += _contextual(plan, x, context, reach)
    values = assignments(plan, context, outputs)
    result = run(plan, values, context)
    wrong = np.argwhere((result != outputs).any(1))  # (sequence, token)
    detail = f"{len(values):,} layers; on all {len(x):,} sequences the network equals the function"
    if len(wrong):
        s, k = wrong[0]
        detail = f"wrong at token {k} of {_sequence(plan, x[s])} ({len({int(i) for i, _ in wrong}):,} sequences)"
    stages.append(Stage("values (Lemma 8)", not len(wrong), detail))
    if support.view == "summaries":
        stages.append(_with_summaries(support, plan, x, h, context))
    layers = {
        "quantising layers": len(quantise),
        "attention layers": len(shift) + len(raised),
        "value layers": len(values),
    }
    return Proof(support, plan, stages, h, context, outputs, values, layers)


# ---- the statements ---------------------------------------------------------------------------------------------


def _embedding_detail(plan: Plan, why: str) -> str:
    return f"γ = {plan.order}, E = {plan.embedding}; {why}"


def _quantised(plan: Plan, layers: list, x: Array, h: Array) -> Stage:
    """Lemma 6 at the corners of every cube, in its middle, and at random places inside."""
    generator = np.random.default_rng(0)
    quarter = plan.delta // 4
    for inside in (0, 2, generator.integers(0, 4, x.shape).astype(object)):
        if (run(plan, layers, embed(plan, x + inside * quarter)) != h).any():
            return Stage("quantisation (Lemma 6)", False, "a point of a cube is not rounded to its corner")
    return Stage("quantisation (Lemma 6)", True, "corners, middles and random points of all cubes go to the corners")


def _shifted(plan: Plan, support: Support, h: Array, shifted: Array) -> list[Stage]:
    """z̃_γ(i) = z_γ(i) + δ^{-d}(z̃_γ(i-1) - z_γ(i)), eq. 9, and: z̃_γ(n-1) tells the sequences apart."""
    z, after = plan.ids(h), plan.ids(shifted)
    jump, wanted = plan.m**plan.d, z[:, plan.order[0]]
    bad = None
    for i, token in enumerate(plan.order):
        wanted = wanted if i == 0 else z[:, token] + jump * (wanted - z[:, token])
        if bad is None and (after[:, token] != wanted).any():
            bad = i
    if bad is None:
        first = Stage("selective shifts (E.2.3)", True, "every column moved by δ^(-d)(max - min) exactly once")
    else:
        first = Stage("selective shifts (E.2.3)", False, _shift_detail(plan, support, bad))
    last = after[:, plan.order[-1]]
    name = "unique id at γ(n-1) (E.2.3)"
    distinct = len(set(last)) == len(last)
    return [first, Stage(name, distinct, f"{len(set(last)):,} ids for {len(last):,} sequences")]


def _shift_detail(plan: Plan, support: Support, i: int) -> str:
    token, before = plan.order[i], plan.order[i - 1]
    family = plan.families[connecting_family(plan, i)]
    if before not in family.of(token):
        return f"token {token} does not see token {before}, whose id it must build on (Assumption 1.2)"
    bare = missing_loop(support)
    if bare is not None:
        return f"token {token} gets another shift than max - min: token {bare[1]} does not see itself (Assumption 1.1)"
    return f"token {token} does not get the shift max - min"


def _lift(plan: Plan, shifted: Array, outputs: Array) -> int:
    """The smallest power of two on Ω's constant that puts all ids above the ids of the outputs."""
    highest, lift = max(plan.ids(outputs).flat) + plan.unit, 1
    least = min(plan.ids(shifted).flat)  # every id is at least (constant)^s times this
    while least > 0 and replace(plan, lift=lift).raise_by ** plan.hops * least <= highest:
        lift *= 2
    return lift


def _contextual(plan: Plan, x: Array, context: Array, reach: str) -> list[Stage]:
    """Properties 7.1 and 7.2 (causal: an id tells the position and everything up to it)."""
    ids = plan.ids(context)
    same = [s for s, row in enumerate(ids) if len(set(row)) < plan.n]
    detail = "in every sequence all tokens have different ids"
    if same:
        detail = f"two tokens of {_sequence(plan, x[same[0]])} share an id"
    stages = [Stage("Property 7.1", not same, detail)]
    owners: dict[int, tuple[int, int]] = {}
    for (s, k), id_ in np.ndenumerate(ids):
        t, j = owners.setdefault(id_, (s, k))
        seen = k + 1 if plan.causal else plan.n
        if j != k or (x[s, :, :seen] != x[t, :, :seen]).any():
            one, other = _sequence(plan, x[t]), _sequence(plan, x[s])
            detail = f"token {j} of {one} and token {k} of {other} have the same id; {reach}"
            return [*stages, Stage("Property 7.2 (Assumption 1.3)", False, detail)]
    what = "position and prefix" if plan.causal else "position and sequence"
    detail = f"{len(owners):,} different ids, each of one {what}; {reach}"
    return [*stages, Stage("Property 7.2 (Assumption 1.3)", True, detail)]


def _with_summaries(support: Support, plan: Plan, x: Array, h: Array, context: Array) -> Stage:
    """Proposition 1 of Combiner: the mechanism's own layers give the ids of dense attention."""
    name, t = "summaries (Combiner, Proposition 1)", sufficient_temperature(plan, summaries=True)
    found = run_context(support, plan, h, context, t)
    if found.error < 0.25:
        detail = f"with the layers of {support.name} at t = {t:.1f} no id is off by more than {found.error:.1e} δ"
        return Stage(name, True, detail)
    wrong = first_wrong_layer(support, plan, h, t)
    layer, s, k = wrong if wrong is not None else (-1, *found.worst)
    what = f"token {k} of {_sequence(plan, x[s])} has another id than with dense attention"
    finer = support.abstraction.endswith("mean") and plan.m**plan.d < plan.n + 3
    hint = "; a finer delta, δ^(-d) ≥ n + 3, would do" if finer else ""
    return Stage(name, False, f"after attention layer {layer} {what}{hint}")


def _sequence(plan: Plan, x: Array) -> str:
    """A sequence (d, n) as text, token by token."""
    columns = [[str(Fraction(int(value), plan.unit)) for value in x[:, k]] for k in range(plan.n)]
    return "(" + ", ".join(c[0] if len(c) == 1 else "[" + " ".join(c) + "]" for c in columns) + ")"


# ---- the target ---------------------------------------------------------------------------------------------------


def _targets(function: str | Function | None, n: int, d: int, m: int, causal: bool) -> np.ndarray:
    """f on the grid as Fractions, (N, d, n)."""
    f = named(function, causal)
    points = grid(n, d, m, m)  # integers 0 … m-1
    values = np.empty(points.shape, dtype=object)
    for s, point in enumerate(points):
        exact = np.array([Fraction(int(v), m) for v in point.flat], dtype=object).reshape(d, n)
        values[s] = evaluate_exactly(f, exact)
    if causal:
        _require_causal(points, values)
    return values


def _require_causal(points: Array, values: np.ndarray) -> None:
    known: dict[tuple, list] = {}
    for point, value in zip(points, values, strict=True):
        for k in range(point.shape[1]):
            prefix = (k, *point[:, : k + 1].flat)
            if known.setdefault(prefix, value[:, k].tolist()) != value[:, k].tolist():
                raise ValueError(f"function: output {k} depends on a later token; a causal network cannot equal it")
