"""Index sets of one length n, whatever they come from: what every check of the theory reads.

    read("strided:w=16", 256)             a spec
    read(Strided(w=16), 256)              a pattern
    read(subquad.attention("axial"), 64)  a mechanism, with its head layout
    read(masks), read(sets)               your own: bool (n, n) or (p, n, n), or n (or p × n) collections of keys

Head layouts (Yun et al., section 5): `sequential` layers cycle through the p families, as in Assumption 1. `union`
is one family, the union. `multihead` shows a token the union of the families in every layer, so paths and hops
(1.2, 1.3) are those of the union, while self-loops (1.1) are asked of every head's own family: one head cannot look
into the sets of another. Heads that differ in `Attention.support` are read in the same way. The theorem takes two heads
per family; that many are assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from subquad.attention.base import Attention
from subquad.attention.full import Full
from subquad.attention.patterns import PatternAttention, as_masks
from subquad.attention.registry import for_length
from subquad.probability import ProbabilityMap
from subquad.supports.patterns import Csr, Pattern, pointers

LAYOUTS = ("sequential", "union", "multihead")


@dataclass(frozen=True, eq=False)
class Family:
    """A_0 … A_{n-1} as CSR: row k owns indices[indptr[k] : indptr[k+1]], ascending."""

    indptr: np.ndarray  # (n + 1,) int64
    indices: np.ndarray  # (edges,) int32

    @property
    def n(self) -> int:
        return len(self.indptr) - 1

    @property
    def connections(self) -> int:
        return len(self.indices)

    def of(self, k: int) -> np.ndarray:
        """A_k."""
        return self.indices[self.indptr[k] : self.indptr[k + 1]]

    def rows(self) -> np.ndarray:
        """The query of every edge, (edges,)."""
        return np.repeat(np.arange(self.n), np.diff(self.indptr))

    def loops(self) -> np.ndarray:
        """Is k in A_k? (n,) bool."""
        found = np.zeros(self.n, dtype=bool)
        rows = self.rows()
        found[rows[rows == self.indices]] = True
        return found

    def transposed(self) -> Family:
        """Row j = who attends to j."""
        order = np.argsort(self.indices, kind="stable")
        counts = np.bincount(self.indices, minlength=self.n)
        return Family(np.concatenate(([0], counts.cumsum())), self.rows()[order].astype(np.int32))


@dataclass(frozen=True, eq=False)
class Support:
    """The sets of one mechanism at one length, ready to be checked."""

    name: str
    cycle: tuple[Family, ...]  # layer t = 1, 2, … lets token k see cycle[(t - 1) mod p].of(k)
    heads: tuple[Family, ...]  # the families that single heads use
    causal: bool
    layout: str = "sequential"
    weighing: str = "map"  # "map": eq. 2, a map over scores on the sets; "sampled": an SBM; "other": neither
    map: ProbabilityMap | None = None

    @property
    def n(self) -> int:
        return self.cycle[0].n

    @property
    def union(self) -> Family:
        return join(self.cycle)


def join(families: tuple[Family, ...]) -> Family:
    """The union of the sets, token by token."""
    if len(families) == 1:
        return families[0]
    n = families[0].n
    keys = np.unique(np.concatenate([f.rows() * n + f.indices for f in families]))
    counts = np.bincount(keys // n, minlength=n)
    return Family(np.concatenate(([0], counts.cumsum())), (keys % n).astype(np.int32))


def read(source: Any, n: int | None = None, *, causal: bool | None = None, layout: str | None = None) -> Support:
    """The sets of `source` at length n; see the module docstring for what a source may be.

    `causal` asks a spec for its causal form (None: as the spec says, else bidirectional if it can) and cuts sets of
    your own to the past; a Pattern or an Attention knows by itself. `layout` is for sources without a layout of
    their own (a Pattern, your sets); default sequential.
    """
    if layout not in (None, *LAYOUTS):
        raise ValueError(f"layout is {layout!r}; the head layouts are {', '.join(LAYOUTS)}")
    if isinstance(source, str):
        source = for_length(source, _length(n), causal=causal)
    if isinstance(source, Attention):
        if layout is not None:
            raise ValueError(f"layout is {layout!r}, but {source.name} has a layout of its own (heads=…)")
        return _from_attention(source, _length(n))
    if isinstance(source, Pattern):
        sets = [source.sized(_length(n)).csr(_length(n), f) for f in range(source.families)]
        return _arrange(type(source).__name__.lower(), sets, source.causal, layout or "sequential")
    masks = as_masks(_tensor(source))  # (p, n, n)
    if n is not None and n != masks.shape[1]:
        raise ValueError(f"n is {n}, but the sets are given for length {masks.shape[1]}")
    _length(masks.shape[1])
    sets = [_csr(mask.tril() if causal else mask) for mask in masks]
    return _arrange("sets", sets, bool(causal), layout or "sequential")


def _length(n: int | None) -> int:
    if n is None or isinstance(n, bool) or not isinstance(n, int) or n < 2:
        raise ValueError(f"n is {n!r}; it must be an integer ≥ 2: the theorem is about several tokens (Lemma 7)")
    return n


def _tensor(sets: Any) -> Any:
    """numpy arrays as tensors; lists of families with unequal numbers of sets are refused here, with their sizes."""
    if isinstance(sets, np.ndarray):
        return torch.from_numpy(sets)
    if isinstance(sets, (list, tuple)):
        if sets and all(isinstance(mask, (np.ndarray, torch.Tensor)) and np.ndim(mask) == 2 for mask in sets):
            sizes = sorted({tuple(mask.shape) for mask in sets})
            if len(sizes) > 1:
                raise ValueError(f"sets holds masks of shapes {sizes}; the families must have one shape (n, n)")
            return torch.stack([torch.as_tensor(mask) for mask in sets])
        nested = [row for row in sets if isinstance(row, (list, tuple)) and row and not isinstance(row[0], int)]
        if nested and len({len(row) for row in nested}) > 1:
            sizes = [len(row) for row in nested]
            raise ValueError(f"sets holds families of {sizes} sets; every family needs one set per token")
    return sets


def _arrange(name: str, sets: list[Csr], causal: bool, layout: str, **more: Any) -> Support:
    """p families in a head layout."""
    families = tuple(_family(each, f"{name}: family {f}") for f, each in enumerate(sets))
    cycle = families if layout == "sequential" else (join(families),)
    heads = cycle if layout == "union" else families
    return Support(name, cycle, heads, causal, layout if len(families) > 1 else "sequential", **more)


def _from_attention(a: Attention, n: int) -> Support:
    name, causal = a.name or type(a).__name__, a.options.causal
    if isinstance(a, PatternAttention):
        layout, rho = a.options.heads, a.options.probability_map(a.options.num_heads)
        used = [f for _, f in a.head_groups()] if layout == "multihead" else range(a.pattern.families)
        return _arrange(name, [a.sized(n).csr(n, f) for f in used], causal, layout, map=rho)
    mask = a.support(n)
    masks = mask.unique(dim=0) if mask.dim() == 3 else mask[None]  # heads with equal sets are one family
    weighing = "map" if isinstance(a, Full) else "sampled" if name == "sbm" else "other"
    rho = a.map if isinstance(a, Full) else None
    return _arrange(name, [_csr(m) for m in masks], causal, "multihead", weighing=weighing, map=rho)


def _csr(mask: torch.Tensor) -> Csr:
    """The sets of a mask (n, n)."""
    return pointers(mask.sum(1).numpy()), mask.nonzero()[:, 1].numpy().astype(np.int32)


def _family(sets: Csr, where: str) -> Family:
    indptr, indices = sets
    empty = np.flatnonzero(np.diff(indptr) == 0)
    if len(empty):
        raise ValueError(f"{where}: the set of token {empty[0]} is empty; every token needs at least one key")
    return Family(indptr, indices)
