"""Attention over the sets of a pattern, as lists of edges.

Rows of their own length have sets of their own. To read the lengths the host would have to wait for a device, so
there all rows share the list of the longest one, where the sets of a shorter row are these sets, cut off
(`Pattern.is_nested`): keys behind its end are no keys, and queries there get 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from subquad.core.hashing import seed_from
from subquad.kernels import devices
from subquad.kernels.edges import edge_attention, edge_mapped_attention
from subquad.kernels.tables import is_nested, pattern_buckets, pattern_edges
from subquad.kernels.values import cut_rows


def pattern_attention(
    q: Tensor, k: Tensor, v: Tensor, support: str, families: Sequence[int], lengths: Tensor | None, **about: Any
) -> Tensor:
    """Softmax attention over the sets of the families, one for all heads or one per head, (B, H, n, d).

    The pattern is given by its text. lengths (B,), None = n tokens in every row. For `about` see `edge_attention`.
    """
    together = _share_a_list(q, support, lengths)
    edges = pattern_edges(q, support, families, q.shape[2], q.shape[1], None if together else lengths)
    out = edge_attention(q, k, v, edges, **about)
    return cut_rows(out, lengths) if together else out


def pattern_mapped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    support: str,
    families: Sequence[int],
    lengths: Tensor | None,
    probability_map: Callable[[Tensor, Tensor], Tensor],
    *,
    key_mask: Tensor | None = None,
    seed: Tensor | None = None,
    dropout: float = 0.0,
    **about: Any,
) -> Tensor:
    """The same with another probability map, see `edge_mapped_attention`."""
    n, heads, about = q.shape[2], q.shape[1], {"dropout": dropout, **about}
    if not devices.is_host(q) and (lengths is None or _share_a_list(q, support, lengths)):
        edges, buckets = pattern_edges(q, support, families, n, heads, None), pattern_buckets(q, support, families, n)
        about |= {"key_mask": key_mask, "seed": seed, "buckets": buckets}
        return cut_rows(edge_mapped_attention(q, k, v, edges, probability_map, **about), lengths)
    out = torch.zeros_like(q)
    for rows, size in _runs([n] * len(q) if lengths is None else lengths.tolist()):
        x, y, z = (t[rows, :, :size] for t in (q, k, v))
        about["seed"] = seed_from(seed, rows.start * heads) if dropout and seed is not None else None
        about["key_mask"] = None if key_mask is None else key_mask[rows, :size]
        edges = pattern_edges(x, support, families, size, heads, None)
        found = edge_mapped_attention(x, y, z, edges, probability_map, **about)
        out = out.index_put((torch.arange(rows.start, rows.stop)[:, None, None], *_slots(x)), found)
    return out


def _share_a_list(q: Tensor, support: str, lengths: Tensor | None) -> bool:
    """Do rows of their own length have one edge list?"""
    return lengths is not None and not devices.is_host(q) and is_nested(support)


def _runs(sizes: list[int]) -> list[tuple[slice, int]]:
    """Rows in a row that have equally many tokens, without those that have none."""
    cuts = [0, *(b for b in range(1, len(sizes)) if sizes[b] != sizes[b - 1]), len(sizes)]
    return [(slice(a, b), sizes[a]) for a, b in pairwise(cuts) if sizes[a]]


def _slots(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(x.shape[1], device=x.device)[:, None], torch.arange(x.shape[2], device=x.device)
