"""Proposition 1 of Combiner (Ren et al. 2021, appendix A), examined.

    "The proposed Combiner will not break the universal approximation property of the original sparse transformers."

The appendix defines the class of functions and cites Yun et al.; no proof is printed. Here is one. In the proof of Yun
et al. heads have size 1: a query with a positive score factor looks for the largest key, one with a negative factor for
the smallest. Take a plan with

    1  the token itself in its direct set, i ∈ Ω_i^0
    2  direct set and groups a partition of everything (causal: of 0 … i)
    3  groups summarised by pooling, k_Ω = max k_j and q_Ω = max q_j

and the layers that the proof builds for *dense* attention (Lemma 7 with s = 1, any order γ). In every layer all tokens
have positive factors, except the one whose turn it is, in the second of its two heads: its id is the smallest of all.

- Positive factor: the largest of all terms is the largest of all ids, for k_Ω is the largest in Ω. If it lies in a
  group, q_Ω is positive too and p(j|Ω) goes to it. So the head returns the maximum over everything.
- Negative factor: the token's own id is the smallest term, and by 1 it is a term by itself. So the head returns it.

Both heads do what dense attention does, exactly with the hardmax, and with margins of δ²/2 in both softmaxes, so that
appendix F carries over with 2η for η. Whether the direct sets alone are universal plays no part. The other summaries:

- DeepSets with W = 1 leaves the ids as they are: they are not negative.
- Mean: let γ(0) stand at E = n² and choose δ^{-d} ≥ n + 3, which Lemma 5 allows. Then the largest id is always more
  than n times the next one, and the mean of its group is still the largest term. (A coarser δ often does.)
- A group asked by one position (axial-rowmajor) has the largest key or the smallest, by the sign of that position's
  factor. It matters only to the token whose turn it is: no group that it asks may hold the token before it in γ. For
  such a γ to exist the order must be free (not causal), and every position that asks must be in its group (full rows).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from subquad.theory.hamiltonian import Path, hamiltonian_path
from subquad.theory.hops import Hops, hops
from subquad.theory.sets import Family, Support

QUERIES = 256  # of a long sequence that many are checked to have a partition


@dataclass(frozen=True)
class Condition:
    """One condition of the proof."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True, eq=False)
class Proposition1:
    """What holds for the plans of one mechanism."""

    conditions: tuple[Condition, ...]
    order: Path  # γ of the construction; any order would do unless positions ask for groups
    direct_path: Path  # Assumption 1.2 and 1.3 for the direct sets alone
    direct_hops: Hops
    causal: bool

    @property
    def proved(self) -> bool:
        return all(condition.holds for condition in self.conditions)

    @property
    def status(self) -> str:
        return "proved" if self.proved else "not decided"

    @property
    def direct_universal(self) -> bool | None:
        """Would the direct sets alone satisfy the theorem of Yun et al.? Condition 1 is their self-loop."""
        if not self.conditions[0].holds or self.direct_hops.steps is None:
            return False
        return {"found": True, "impossible": False, "undecided": None}[self.direct_path.status]

    @property
    def reasons(self) -> list[str]:
        lines = ["Proposition 1 of Combiner: the paper states it and prints no proof; ours needs three conditions"]
        lines += [f"  {'✓' if c.holds else '✗'} {c.name}: {c.detail}" for c in self.conditions]
        if self.proved:
            lines.append(
                "  proved: the layers of dense attention (s = 1) work with summaries too; `subquad prove` runs them"
            )
        else:
            lines.append(
                "  not decided: the proof does not apply, which refutes nothing; `subquad prove` runs the layers"
            )
        alone = {True: "obey", False: "do not obey", None: "may obey"}[self.direct_universal]
        why = self.direct_path.why if self.direct_hops.steps else self.direct_hops.why(self.causal)
        lines.append(f"  the direct sets alone {alone} Assumption 1: {why}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "conditions": {c.name: c.holds for c in self.conditions},
            "direct_sets_universal": self.direct_universal,
            "direct_sets_hops": self.direct_hops.steps,
        }


def proposition1(support: Support) -> Proposition1:
    """The three conditions for every plan of the mechanism, and Assumption 1 for its direct sets alone."""
    if support.view != "summaries":
        raise ValueError(f"{support.name} has no Combiner plan; Proposition 1 is about partitions with summaries")
    direct, order = direct_sets(support), suitable_order(support)
    conditions = (_self_direct(support), _covers(support), _summarised(support, order))
    return Proposition1(conditions, order, hamiltonian_path(direct), hops((direct,), support.causal), support.causal)


def direct_sets(support: Support) -> Family:
    """Ω_0^0 … Ω_{n-1}^0, the union over the plans; a token without any stands alone."""
    n = support.n
    sets = [sorted({j for plan in support.plans for j in plan.direct(n, i)} or {i}) for i in range(n)]
    counts = [len(members) for members in sets]
    return Family(np.concatenate(([0], np.cumsum(counts))), np.concatenate(sets).astype(np.int32))


def groups_of(plan: Any, n: int) -> Iterator[Any]:
    """Every group of the plan once, the groups inside groups too."""
    waiting = [group for i in range(n) for group in plan.groups(n, i)]
    seen: set[Any] = set()
    while waiting:
        group = waiting.pop()
        if group not in seen:
            seen.add(group)
            waiting.extend(group.children)
            yield group


def _self_direct(support: Support) -> Condition:
    name = "every token is in its own direct set"
    for plan in support.plans:
        for i in range(support.n):
            if i not in plan.direct(support.n, i):
                return Condition(name, False, f"token {i} is not")
    return Condition(name, True, "holds for all tokens")


def _covers(support: Support) -> Condition:
    name, n = "direct set and groups are a partition of the support", support.n
    queries = range(n) if n <= QUERIES else np.linspace(0, n - 1, QUERIES).astype(int).tolist()
    for plan in support.plans:
        try:
            plan.check(n, queries)
        except ValueError as error:
            return Condition(name, False, str(error))
    return Condition(name, True, "checked for " + ("all tokens" if n <= QUERIES else f"{QUERIES} tokens"))


def _summarised(support: Support, order: Path) -> Condition:
    name, kind = "groups are summarised in a way that shows the largest id", support.abstraction
    asked = [group for plan in support.plans for group in groups_of(plan, support.n) if not is_pooled(group)]
    if any(query_position_of(group) not in group.members for group in asked):
        return Condition(name, False, "a group is asked by a position that it does not have, in a row that is not full")
    if asked and order.order is None:
        return Condition(
            name, False, f"some groups are asked by a position, and no order of the tokens suits: {order.why}"
        )
    if asked:
        return Condition(
            name, True, "groups are asked by a position; in the order γ no token follows one that it asks for"
        )
    if kind.endswith("mean"):
        return Condition(name, True, f"abstraction is {kind}; with δ^(-d) ≥ n + 3 the mean does")
    return Condition(name, True, f"abstraction is {kind}")


def suitable_order(support: Support) -> Path:
    """γ: j may stand before a only if no group that a asks for has j in it (and a sees j)."""
    allowed = support.union.mask().numpy()  # (n, n), row = the later token
    for plan in support.plans:
        for group in groups_of(plan, support.n):
            query = query_position_of(group)
            if query is not None and query < support.n:
                allowed[query, list(group.members)] = query == np.array(group.members)  # itself stays: no empty set
    counts = allowed.sum(1)
    family = Family(np.concatenate(([0], counts.cumsum())), np.nonzero(allowed)[1].astype(np.int32))
    return hamiltonian_path(family)


def query_position_of(group: Any) -> int | None:
    """The position whose query a group uses; None where it pools the queries of its members."""
    position = group.query_position
    return None if position is None or position < 0 else int(position)


def is_pooled(group: Any) -> bool:
    return query_position_of(group) is None
