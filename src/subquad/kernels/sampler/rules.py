"""What the sampler is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.kernels import devices

SAMPLERS = ("exact", "fastrg", "bernoulli")
SWITCH = 1 / 128  # more proposals than this share of the keys: looking at every key is cheaper
# (measured: from 1 / 250 of 4,096 keys on, from 1 / 110 of 16,384)
LOOSE = 3  # jumps by a bound of p beside points of a walk: so many more are still cheaper
THIN = 1 / 24  # a larger bound of p: looking at every key is cheaper than jumping (one key in 20 takes as long)
OPEN = 1 / 8  # a larger share of pairs that bounds leave open: computing p for all of them is cheaper
SMALL = 128  # up to so many keys a mask is never worse than a list


@dataclass(frozen=True)
class Rules:
    """How graphs are drawn, beside the probabilities."""

    sampler: str = "exact"
    causal: bool = False
    exploration: float = 0.0
    reach: int = -1  # -1: no edge is pinned
    crossover: float = 2.0  # rows go to the mask where the expected density is above this; 2: never, -1: always
    alike: bool = (
        False  # all rows of a batch have the same random numbers: what a row gives does not depend on its place
    )

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, not {self.sampler!r}")
        if not 0 <= self.exploration < 1:
            raise ValueError(f"exploration must be a probability ≥ 0 and < 1, not {self.exploration!r}")


@dataclass(frozen=True, eq=False)
class Sample:
    """B·H sampled graphs; a row stands in the list or in the mask.

    All rows stand in the same, by the expected density of them all. In causal mode each row goes by its own, because it
    must not know what later tokens are, not even by the rounding of another path.
    `counts` (B·H, 2) are the statistics: rows that were sampled by looking at every key, and edges proposed in all
    other rows (before merging and thinning).
    """

    indptr: Tensor  # (B·H, n + 1) int64: CSR; rows of the mask are empty here
    indices: Tensor  # (E,) int32
    mask: Tensor  # (B·H·n·⌈m / 8⌉,) uint8, one bit per pair; rows of the list are 0; empty if all rows are listed
    degrees: Tensor  # (B·H, n) int64
    counts: Tensor  # (B·H, 2) int64

    @property
    def path(self) -> str:
        """Which of the two holds the rows: "edges", "dense" or, causal, "both"."""
        return "edges" if not self.mask.numel() else "both" if self.indices.numel() else "dense"


def all_masked(crossover: float, keys: int | None, on_host: bool) -> bool:
    """Do all rows go to the mask, whatever is drawn? Then nobody has to know how many edges there are. None: any number
    of keys.
    """
    small = keys is not None and keys <= SMALL
    return crossover < 0 or (crossover < 1 and (small if on_host else devices.is_short(keys)))


def rather_masked(like: Tensor, queries: int, keys: int) -> bool:
    """Are some rows better drawn as a mask? On a device that the host would have to ask how many edges there are."""
    if torch.compiler.is_compiling() or devices.is_host(like):
        return False
    return queries * keys <= devices.FEW**2 or not devices.may_wait()


def pinned_reach(self_loops: bool, window: int | None) -> int:
    """A window of w keys reaches w // 2 to each side; a self-loop reaches 0; -1: nothing is pinned."""
    return window // 2 if window is not None else 0 if self_loops else -1


def refuse(side: str) -> ValueError:
    """What to raise for memberships that are not finite; `side` is "q" or "k"."""
    return ValueError(
        f"{side} must be finite to sample a graph, but it (or a parameter of the model) has NaN or infinity"
    )
