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

A mechanism is read through its class, never by its name: `pattern` (a map over index sets, eq. 2), `partitions` or
`partition` (Combiner plans, with groups summarised by `abstraction`), a random graph (`capabilities.stochastic`), or
a probability map over all pairs (`map`). A class may say so itself with `theory_view`, one of `VIEWS`, and with
`theory_reason` why it is none of them ("other").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subquad.attention.base import Attention
from subquad.attention.patterns import as_masks
from subquad.attention.registry import for_length
from subquad.probability import ProbabilityMap
from subquad.supports.pattern import Csr, Pattern, csr_of_mask

LAYOUTS = ("sequential", "union", "multihead")
VIEWS = ("map", "summaries", "sampled", "other")  # how the weights of a mechanism come about; see `Support.view`
UNDECLARED = 'its class declares neither a pattern nor a probability map over its sets (theory_view = "map")'
NOT_COPIED = ("num_heads", "head_dim", "scale", "dropout", "layer_index")  # options a layer of the proof sets itself


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

    def mask(self) -> Tensor:
        """bool (n, n), row = query."""
        mask = torch.zeros(self.n, self.n, dtype=torch.bool)
        mask[torch.from_numpy(self.rows()), torch.from_numpy(self.indices).long()] = True
        return mask


@dataclass(frozen=True, eq=False)
class Support:
    """The sets of one mechanism at one length, ready to be checked."""

    name: str
    cycle: tuple[Family, ...]  # layer t = 1, 2, … lets token k see cycle[(t - 1) mod p].of(k)
    heads: tuple[Family, ...]  # the families that single heads use
    causal: bool
    layout: str = "sequential"
    view: str = "map"  # "map": eq. 2; "summaries": Combiner plans; "sampled": a random graph; "other": none of these
    map: ProbabilityMap | None = None
    plans: tuple[Any, ...] = ()  # view "summaries": the partitions
    abstraction: str = ""  # view "summaries": how a group becomes one query and one key
    layer: tuple[str, dict[str, Any]] | None = field(default=None, repr=False)  # what MultiheadAttention is made with
    why_other: str = UNDECLARED  # view "other": what sets it apart from eq. 2

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
        edges = [source.csr(_length(n), f) for f in range(source.families)]
        return _arrange(type(source).__name__.lower(), edges, source.causal, layout or "sequential")
    masks = as_masks(_tensor(source))  # (p, n, n)
    if n is not None and n != masks.shape[1]:
        raise ValueError(f"n is {n}, but the sets are given for length {masks.shape[1]}")
    _length(masks.shape[1])
    edges = [csr_of_mask(mask.tril() if causal else mask) for mask in masks]
    return _arrange("sets", edges, bool(causal), layout or "sequential")


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


def _arrange(name: str, edges: list[Csr], causal: bool, layout: str, **more: Any) -> Support:
    """p families in a head layout. Sets that no mechanism brings are run as `attention="pattern"`."""
    families = tuple(_family(e, f"{name}: family {f}") for f, e in enumerate(edges))
    cycle = families if layout == "sequential" else (join(families),)
    heads = cycle if layout == "union" else families
    layout = layout if len(families) > 1 else "sequential"
    if "layer" not in more:
        sets = torch.stack([family.mask() for family in families])  # (p, n, n)
        more["layer"] = "pattern", {"sets": sets, "heads": layout, "causal": causal}
    return Support(name, cycle, heads, causal, layout, **more)


def _from_attention(a: Any, n: int) -> Support:
    view, name, causal = view_of(a), a.name or type(a).__name__, a.options.causal
    options = {key: value for key, value in vars(a.options).items() if key not in NOT_COPIED and value is not None}
    more: dict[str, Any] = {"layer": (a.name, options) if a.name else None}
    pattern = a.sized(n) if isinstance(getattr(a, "pattern", None), Pattern) else None
    if pattern is not None:
        layout, rho = a.options.heads, a.options.probability_map(a.options.num_heads)
        used = [f for _, f in a.head_groups()] if layout == "multihead" else range(pattern.families)
        return _arrange(name, [pattern.csr(n, f) for f in used], causal, layout, map=rho, **more)
    if view == "summaries":
        more |= {"plans": plans_of(a), "abstraction": getattr(a.options, "abstraction", "")}
    if view == "other":
        more["why_other"] = getattr(a, "theory_reason", UNDECLARED)
    mask = a.support(n)
    masks = mask.unique(dim=0) if mask.dim() == 3 else mask[None]  # heads with equal sets are one family
    rho = getattr(a, "map", None) if view == "map" else None
    return _arrange(name, [csr_of_mask(m) for m in masks], causal, "multihead", view=view, map=rho, **more)


def view_of(a: Any) -> str:
    """How the weights of a mechanism come about, one of `VIEWS`."""
    declared = getattr(a, "theory_view", None)
    if declared is not None:
        if declared not in VIEWS:
            raise ValueError(f"{type(a).__name__}.theory_view is {declared!r}; it must be one of {', '.join(VIEWS)}")
        return declared
    if isinstance(getattr(a, "pattern", None), Pattern):
        return "map"
    if plans_of(a):
        return "summaries"
    if a.capabilities.stochastic:
        return "sampled"
    return "map" if isinstance(getattr(a, "map", None), ProbabilityMap) else "other"


def plans_of(a: Any) -> tuple[Any, ...]:
    """The Combiner plans of a mechanism; several in a mixture, none where it has no plan."""
    if hasattr(a, "partitions"):
        return tuple(a.partitions)
    return (a.partition,) if hasattr(a, "partition") else ()


def _family(edges: Csr, where: str) -> Family:
    indptr, indices = edges
    empty = np.flatnonzero(np.diff(indptr) == 0)
    if len(empty):
        raise ValueError(f"{where}: the set of token {empty[0]} is empty; every token needs at least one key")
    return Family(indptr, indices)
