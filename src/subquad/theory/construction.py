"""The constructive proof (Yun et al., appendices D and E): a modified sparse Transformer, layer by layer, in integers.

Modified means: hardmax in place of the probability map, and three-piece linear activations in place of ReLU. With
m = 1/δ, u = (1, m, …, m^{d-1}) and the column id z_k = uᵀZ_k, the network is

    E        γ(0) gets n-1, γ(i) gets i-1: every column in an interval of its own, γ(0) on top           (D.1)
    g_q      dn/δ layers that round every entry down to a multiple of δ                                   (Lemma 6)
    g_c      for i = 1 … n-1 and every value b that z_γ(i) can take, a selective shift Ψ^{l_i}(c=m^d, b ∓ δ/2), where
             γ(i-1) is in A_γ(i)^{l_i}; layers of the other families are the identity; then s all-max-shifts
             Ω^{t mod p}(c = 2sn m^{nd+1})                                                               (Lemma 7)
    g_v      one layer per token and sequence of the grid, which turns its id into the wanted output        (Lemma 8)

A number is an integer multiple of 1/U; U is a multiple of 4m and of the denominators of the target's values, so that
every step is exact. Arrays hold Python integers: ids soon outgrow 64 bits.

Choices. The bound of eq. 10 lacks a factor n: n m^{nd}, used everywhere else in the paper, is meant. In Lemma 8 a
column that has its output might be caught by a later layer if the output's id happens to be one of the ids; the
constant of Ω is raised by a whole factor until all ids lie above the outputs. In causal networks E_γ(0) is raised from
n-1 until the ids of different positions lie in disjoint ranges, because there only z_k, and not the maximum over the
whole sequence, tells what token k has seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from subquad.theory.sets import Family

Array = np.ndarray  # of Python integers; (N, d, n) sequences or (N, n) column ids


@dataclass(frozen=True)
class Quantise:
    """Z ↦ Z + e_row φ(Z_row - kδ): entries of a row in [kδ, (k+1)δ) become kδ."""

    row: int
    k: int


@dataclass(frozen=True)
class Shift:
    """Ψ^l(Z; c, b - δ/2, b + δ/2), b a multiple of δ; c = 0 is an identity layer that keeps the families cycling."""

    family: int
    c: int
    b: int = 0  # in multiples of δ


@dataclass(frozen=True)
class MaxShift:
    """Ω^l(Z; c)."""

    family: int
    c: int


@dataclass(frozen=True, eq=False)
class Assign:
    """Z ↦ Z + move φ'(uᵀZ - id): columns whose id is within δ/2 of `id` move to their output."""

    id: int
    move: Array = field(repr=False)  # (d,)


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that determines the attention part: sets, order of the tokens, sizes and the unit."""

    families: tuple[Family, ...]
    order: Sequence[int]  # γ
    hops: int  # s
    d: int
    m: int  # 1/δ
    unit: int  # U: numbers are multiples of 1/U
    causal: bool = False
    lift: int = 1  # factor on the constant of Ω
    least_top: int = 0  # E_γ(0) is at least this

    @property
    def n(self) -> int:
        return len(self.order)

    @property
    def delta(self) -> int:
        return self.unit // self.m

    @property
    def top(self) -> int:
        """E_γ(0): n-1 as in D.1, or wide enough for causal ids, or as wide as asked for."""
        least = max(self.n - 1, self.least_top)
        if not self.causal:
            return least
        jump, width = self.m**self.d, sum(self.m**i for i in range(self.d))  # δ^{-d} and Δ
        spread = self.m ** (self.d - 1)
        highest = (self.n - 2) * width + spread  # of a column that has not been shifted
        return max(least, (spread + jump * highest) // ((jump - 1) * width) + 1)

    @property
    def embedding(self) -> list[int]:
        """E_k for every token, as whole numbers."""
        rank = {token: i for i, token in enumerate(self.order)}
        return [self.top if rank[k] == 0 else rank[k] - 1 for k in range(self.n)]

    @property
    def raise_by(self) -> int:
        """The constant of the all-max-shifts, 2sn δ^{-nd-1}."""
        return self.lift * 2 * self.hops * (self.top + 1) * self.m ** (self.n * self.d + 1)

    def ids(self, z: Array) -> Array:
        """uᵀZ, (N, d, n) → (N, n)."""
        return sum(self.m**i * z[:, i] for i in range(self.d))


def quantisers(plan: Plan) -> list[Quantise]:
    return [Quantise(row, k) for row in range(plan.d) for k in range((plan.top + 1) * plan.m)]


def selective_shifts(plan: Plan) -> list[Shift]:
    """p δ^{-d} layers for each token after the first, b in increasing order; family l_i works, the others rest."""
    p, width = len(plan.families), sum(plan.m**i for i in range(plan.d))
    layers = []
    for i in range(1, plan.n):
        chosen = connecting_family(plan, i)
        for step in range(plan.m**plan.d):
            b = (i - 1) * width * plan.m + step
            layers += [Shift(f, plan.m**plan.d if f == chosen else 0, b) for f in range(p)]
    return layers


def connecting_family(plan: Plan, i: int) -> int:
    """l_i: the first family in which γ(i) attends to γ(i-1); 0 where none does (then the proof breaks there)."""
    for f, family in enumerate(plan.families):
        if plan.order[i - 1] in family.of(plan.order[i]):
            return f
    return 0


def max_shifts(plan: Plan) -> list[MaxShift]:
    return [MaxShift(t % len(plan.families), plan.raise_by) for t in range(plan.hops)]


# ---- running it -----------------------------------------------------------------------------------------------


def head(ids: Array, family: Family, bias: int) -> Array:
    """ψ^l(Z; b)_k = uᵀZ_A σ_H[(uᵀZ_A)ᵀ(uᵀZ_k - b)], A = A_k^l, written as attention; (N, n) → (N, n)."""
    out = np.empty_like(ids)
    for k in range(ids.shape[1]):
        seen = ids[:, family.of(k)]  # (N, |A|)
        scores = seen * (ids[:, k] - bias)[:, None]
        out[:, k] = np.take_along_axis(seen, scores.argmax(1)[:, None], 1)[:, 0]
    return out


def run(plan: Plan, layers: Sequence[Quantise | Shift | MaxShift | Assign], z: Array) -> Array:
    """The layers applied to sequences (N, d, n); the input is left alone."""
    z = z.copy()
    delta, half = plan.delta, plan.delta // 2
    for layer in layers:
        if isinstance(layer, Quantise):
            rest = z[:, layer.row] - layer.k * delta  # (N, n)
            z[:, layer.row] -= np.where((rest >= 0) & (rest < delta), rest, 0)
        elif isinstance(layer, Shift):
            if layer.c:
                ids, family = plan.ids(z), plan.families[layer.family]
                low, high = (head(ids, family, layer.b * delta + side) for side in (-half, half))
                z[:, 0] += layer.c * (low - high)
        elif isinstance(layer, MaxShift):
            z[:, 0] += layer.c * head(plan.ids(z), plan.families[layer.family], 0)
        else:
            ids = plan.ids(z)
            caught = (ids >= layer.id - half) & (ids < layer.id + half)
            z += np.where(caught[:, None], layer.move[None, :, None], 0)
    return z


def assignments(plan: Plan, z: Array, outputs: Array) -> list[Assign]:
    """One layer per different id of z = g_c(H), (N, d, n): from that column to its output, (N, d, n)."""
    layers: dict[int, Assign] = {}
    for (s, k), id_ in np.ndenumerate(plan.ids(z)):
        layers.setdefault(id_, Assign(id_, outputs[s, :, k] - z[s, :, k]))
    return list(layers.values())


def grid(n: int, d: int, m: int, unit: int) -> Array:
    """All of {0, δ, …, 1-δ}^{d×n}, (m^{dn}, d, n), in units."""
    flat = np.indices((m,) * (d * n)).reshape(d * n, -1).T  # (N, d·n)
    return (flat.astype(object) * (unit // m)).reshape(-1, d, n)


def embed(plan: Plan, x: Array) -> Array:
    """X + E."""
    return x + np.array(plan.embedding, dtype=object) * plan.unit


def common_unit(m: int, values: Sequence[Fraction]) -> int:
    """U: a multiple of 4m, for half and quarter steps, and of every denominator."""
    return math.lcm(4 * m, *(value.denominator for value in values))
