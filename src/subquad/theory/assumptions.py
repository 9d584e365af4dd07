"""Is this pattern a universal approximator? Assumptions 1 and 2 of Yun et al. (section 3.2), with reasons.

    verdict = check("strided:w=16", 256)
    verdict.universal        True, False, or None = not decided, or not covered; `answer` has the word
    print(verdict)           the reasons

Theorem 1: a Transformer whose attention is eq. 2 and obeys both assumptions approximates every continuous
sequence-to-sequence function on a compact domain. `universal` says whether its conditions hold. Of these, 1.3 is
necessary (a token that is never seen cannot matter); 1.1 and 1.2 are what the proof uses, and a pattern without them
is not covered rather than refuted. `refuted` tells the two apart.

Causal patterns cannot obey 1.3: token 0 sees nobody else. Their verdict is that of the causal variant, over functions
whose output k depends on inputs 0 … k: every token reaches all earlier ones in s hops. The path can then only be the
identity, because edges lead forward. The construction of `proof` carries over with a wider positional embedding.

Mechanisms that are not eq. 2: an SBM-Transformer is read through its expected graph, as in the theorem of its authors.
A Combiner reaches tokens through summaries, whose weights are no map of the tokens' own scores: Theorem 1 does not
cover it, Proposition 1 of its authors does (`combiner`), and `universal` is True where that is proved, else None.
Anything else, such as Composite Slice or Reformer, is not covered: the verdict says why, and claims no conditions.
Its support holds the possible pairs, so 1.3 remains necessary: if some never meet, `universal` is False, else None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from subquad.probability import ProbabilityMap, Softmax
from subquad.theory.combiner import Proposition1, proposition1
from subquad.theory.counting import connections, sparsity
from subquad.theory.hamiltonian import Path, hamiltonian_path
from subquad.theory.hops import Hops, hops
from subquad.theory.maps import MapVerdict, check_map
from subquad.theory.sets import Support, read


@dataclass(frozen=True, eq=False)
class Verdict:
    """What holds for one support and one probability map, and why."""

    support: Support
    loops: tuple[int, int] | None  # the first (family, token) without a self-loop; None = all have one
    path: Path | None  # None, as is `map`: Theorem 1 does not cover the mechanism
    hops: Hops
    map: MapVerdict | None
    proposition1: Proposition1 | None = None  # of a Combiner

    @property
    def self_loops(self) -> bool | None:
        return None if self.path is None else self.loops is None

    @property
    def hamiltonian_path(self) -> bool | None:
        return None if self.path is None else {"found": True, "impossible": False, "undecided": None}[self.path.status]

    @property
    def assumption1(self) -> bool | None:
        """All of 1.1, 1.2, 1.3 (causal: of the variant); None while only 1.2 is open, and of what is not covered."""
        if self.path is None:
            return None
        if not self.self_loops or self.hops.steps is None:
            return False
        return self.hamiltonian_path

    @property
    def universal(self) -> bool | None:
        if self.map is None:
            return False if self.refuted else None
        if self.assumption1 is False or not self.map.holds:
            return False
        if self.proposition1 is not None:
            return True if self.proposition1.proved else None
        return self.assumption1

    @property
    def answer(self) -> str:
        """`universal` in words, which tell what is not covered from what is not decided."""
        undecided = "not covered" if self.support.view == "other" else "not decided"
        return {True: "yes", False: "no", None: undecided}[self.universal]

    @property
    def refuted(self) -> bool:
        """Not universal whatever the proof: some token never sees some other (1.3 is necessary)."""
        return self.hops.steps is None

    @property
    def reasons(self) -> list[str]:
        s, causal = self.support, self.support.causal
        lines = self._conditions()
        if causal:
            lines.append("causal: 1.3 as printed cannot hold, token 0 sees nobody else; this is the causal variant")
        if s.layout == "multihead" and self.path is not None:
            lines.append("multihead: 1.2 and 1.3 on the union of the heads' sets, 1.1 on every head's own")
        if s.view == "sampled":
            lines.append("sampled graphs: the checks are about the expected graph, pairs with p > 0")
        if s.view == "summaries":
            lines.append("these are the pairs it joins, most of them through summaries; Theorem 1 is about eq. 2 only")
        if self.proposition1 is not None:
            lines += self.proposition1.reasons
        if self.universal is False and not self.refuted:
            lines.append("not covered by Theorem 1, which does not prove that it is not universal")
        return lines

    def _conditions(self) -> list[str]:
        s, rho = self.support, self.map
        hops, why = f"1.3 hops{' (causal variant)' if s.causal else ''}", self.hops.why(s.causal)
        if self.path is None or rho is None:
            outside = f"{s.why_other}: Theorem 1 is about eq. 2 of Yun et al. and does not cover it"
            return [outside, f"{hops}, on the possible pairs: {why}"]
        return [
            _loops_reason(s, self.loops),
            f"1.2 Hamiltonian path: {self.path.status}; {self.path.why}",
            f"{hops}: {why}",
            f"2 probability map {rho.name}: {'holds' if rho.holds else 'fails'}, {rho.why}",
        ]

    def counted(self, unit: str = "") -> str:
        """How many connections, and the sparsity. Of what is not covered they are those that are possible."""
        words = ["possible"] * (self.support.view == "other") + [unit] * bool(unit)
        return " ".join([f"{connections(self.support):,}", *words, f"per layer, sparsity {sparsity(self.support):.2%}"])

    def to_dict(self) -> dict[str, Any]:
        """The verdict as plain values, for JSON."""
        s, path, rho = self.support, self.path, self.map
        order = None if path is None else path.order
        return {
            "name": s.name,
            "n": s.n,
            "variant": "causal" if s.causal else "bidirectional",
            "layout": s.layout,
            "families": len(s.cycle),
            "universal": self.universal,
            "answer": self.answer,
            "refuted": self.refuted,
            "assumption1": self.assumption1,
            "assumption2": None if rho is None else rho.holds,
            "self_loops": self.self_loops,
            "self_loops_witness": self.loops,
            "hamiltonian_path": self.hamiltonian_path,
            "path_why": None if path is None else path.why,
            "hops": self.hops.steps,
            "hops_witness": self.hops.witness,
            "map": None if rho is None else rho.name,
            "connections": connections(s),
            "sparsity": sparsity(s),
            "proposition1": None if self.proposition1 is None else self.proposition1.to_dict(),
            "reasons": self.reasons,
            "path": None if order is None else order.tolist(),
        }

    def __str__(self) -> str:
        s, counts = self.support, self.counted("connections")
        return "\n".join([f"{s.name}, n = {s.n}: universal? {self.answer} ({counts})", *self.reasons])


def check(
    source: Any,
    n: int | None = None,
    *,
    causal: bool | None = None,
    map: Any = None,
    layout: str | None = None,
    seed: int = 0,
) -> Verdict:
    """Assumptions 1 and 2 for anything `sets.read` takes.

    `map` is a probability map or any callable (columns, n) → weights; None = the mechanism's own, else softmax. A
    mechanism that Theorem 1 does not cover has none.
    `seed` is that of the heuristic search for γ: it may decide more or less, never differently.
    """
    support = source if isinstance(source, Support) else read(source, n, causal=causal, layout=layout)
    rho = map or support.map or Softmax()
    if not isinstance(rho, ProbabilityMap) and not callable(rho):
        raise TypeError(f"map is {rho!r}; it must be a probability map or a callable (columns, n) → weights")
    if support.view == "other":
        if map is not None:
            raise ValueError(f"{support.name} has no probability map to replace: {support.why_other}")
        return Verdict(support, None, None, hops(support.cycle, support.causal), None)
    columns = min(support.n, 32)  # the formulas hold for every n; verifying them needs no long columns
    return Verdict(
        support,
        missing_loop(support),
        hamiltonian_path(support.union, seed),
        hops(support.cycle, support.causal),
        check_map(rho, columns),
        proposition1(support) if support.view == "summaries" else None,
    )


def missing_loop(support: Support) -> tuple[int, int] | None:
    """Assumption 1.1: the first (family, token) with k ∉ A_k^l, or None."""
    for index, family in enumerate(support.heads):
        bare = np.flatnonzero(~family.loops())
        if len(bare):
            return index, int(bare[0])
    return None


def _loops_reason(support: Support, missing: tuple[int, int] | None) -> str:
    if missing is None:
        return "1.1 self-loops: every token attends to itself in every family"
    whose = "head family" if support.layout == "multihead" else "family"
    return f"1.1 self-loops: token {missing[1]} does not attend to itself in {whose} {missing[0]}"
