"""Is this pattern a universal approximator? Assumptions 1 and 2 of Yun et al. (section 3.2), with reasons.

    verdict = check("strided:w=16", 256)
    verdict.universal        True, False, or None = not decided
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
cover it, Proposition 1 of its authors does (`combiner`), and `universal` is True where that is proved, else None. For
anything else, such as Composite Slice, the checks on the support are reported and `universal` stays None.
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
    path: Path
    hops: Hops
    map: MapVerdict
    proposition1: Proposition1 | None = None  # of a Combiner

    @property
    def self_loops(self) -> bool:
        return self.loops is None

    @property
    def hamiltonian_path(self) -> bool | None:
        return {"found": True, "impossible": False, "undecided": None}[self.path.status]

    @property
    def assumption1(self) -> bool | None:
        """All of 1.1, 1.2, 1.3 (causal: of the variant); None while only 1.2 is open."""
        if not self.self_loops or self.hops.steps is None:
            return False
        return self.hamiltonian_path

    @property
    def universal(self) -> bool | None:
        if self.assumption1 is False or not self.map.holds:
            return False
        if self.proposition1 is not None:
            return True if self.proposition1.proved else None
        return None if self.support.view == "other" else self.assumption1

    @property
    def refuted(self) -> bool:
        """Not universal whatever the proof: some token never sees some other (1.3 is necessary)."""
        return self.hops.steps is None

    @property
    def reasons(self) -> list[str]:
        s, causal = self.support, self.support.causal
        lines = [_loops_reason(s, self.loops)]
        lines.append(f"1.2 Hamiltonian path: {self.path.status}; {self.path.why}")
        lines.append(f"1.3 hops{' (causal variant)' if causal else ''}: {self.hops.why(causal)}")
        lines.append(f"2 probability map {self.map.name}: {'holds' if self.map.holds else 'fails'}, {self.map.why}")
        if causal:
            lines.append("causal: 1.3 as printed cannot hold, token 0 sees nobody else; this is the causal variant")
        if s.layout == "multihead":
            lines.append("multihead: 1.2 and 1.3 on the union of the heads' sets, 1.1 on every head's own")
        if s.view == "sampled":
            lines.append("sampled graphs: the checks are about the expected graph, pairs with p > 0")
        if s.view == "summaries":
            lines.append("these are the pairs it joins, most of them through summaries; Theorem 1 is about eq. 2 only")
        if s.view == "other":
            lines.append("reaches tokens through summaries: Theorem 1 is about eq. 2 and does not cover it")
        if self.proposition1 is not None:
            lines += self.proposition1.reasons
        if self.universal is False and not self.refuted:
            lines.append("not covered by Theorem 1, which does not prove that it is not universal")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The verdict as plain values, for JSON."""
        s, order = self.support, self.path.order
        return {
            "name": s.name,
            "n": s.n,
            "variant": "causal" if s.causal else "bidirectional",
            "layout": s.layout,
            "families": len(s.cycle),
            "universal": self.universal,
            "refuted": self.refuted,
            "assumption1": self.assumption1,
            "assumption2": self.map.holds,
            "self_loops": self.self_loops,
            "self_loops_witness": self.loops,
            "hamiltonian_path": self.hamiltonian_path,
            "path_why": self.path.why,
            "hops": self.hops.steps,
            "hops_witness": self.hops.witness,
            "map": self.map.name,
            "connections": connections(s),
            "sparsity": sparsity(s),
            "proposition1": None if self.proposition1 is None else self.proposition1.to_dict(),
            "reasons": self.reasons,
            "path": None if order is None else order.tolist(),
        }

    def __str__(self) -> str:
        s, answer = self.support, {True: "yes", False: "no", None: "not decided"}[self.universal]
        counts = f"{connections(s):,} connections per layer, sparsity {sparsity(s):.2%}"
        return "\n".join([f"{s.name}, n = {s.n}: universal? {answer} ({counts})", *self.reasons])


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

    `map` is a probability map or any callable (columns, n) → weights; None = the mechanism's own, else softmax.
    `seed` is that of the heuristic search for γ: it may decide more or less, never differently.
    """
    support = source if isinstance(source, Support) else read(source, n, causal=causal, layout=layout)
    rho = map or support.map or Softmax()
    if not isinstance(rho, ProbabilityMap) and not callable(rho):
        raise TypeError(f"map is {rho!r}; it must be a probability map or a callable (columns, n) → weights")
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
