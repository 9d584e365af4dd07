"""Attention over the sets of a pattern, as lists of edges.

Rows of their own length have sets of their own. To read the lengths the host would have to wait for a device, so
there all rows share the list of the longest one, where the sets of a shorter row are these sets, cut off
(`Pattern.is_nested`): keys behind its end are no keys, and queries there get 0. Other lists are made on the device
(`Pattern.listed`), where a pattern can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.core.hashing import seed_from
from subquad.kernels import devices
from subquad.kernels.edges import edge_attention, edge_mapped_attention
from subquad.kernels.tables import (
    buckets_by_length,
    edges_by_length,
    is_nested,
    lists_any_length,
    pattern_buckets,
    pattern_edges,
)
from subquad.kernels.values import cut_rows


def pattern_attention(
    q: Tensor, k: Tensor, v: Tensor, support: str, families: Sequence[int], lengths: Tensor | None, **about: Any
) -> Tensor:
    """Softmax attention over the sets of the families, one for all heads or one per head, (B, H, n, d).

    The pattern is given by its text. lengths (B,), None = n tokens in every row. For `about` see `edge_attention`.
    """
    if lists_on_device(q, support, lengths):
        return _with_lists(q, k, v, support, families, lengths, edge_attention, **about)
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
    """The same with another probability map, see `edge_mapped_attention`. Lists of a device leave out the queries of
    `Pattern.global_queries`, which get 0.
    """
    n, heads, about = q.shape[2], q.shape[1], {"dropout": dropout, **about}
    if lists_on_device(q, support, lengths):
        about |= {"key_mask": key_mask, "seed": seed, "probability_map": probability_map}
        return _with_lists(q, k, v, support, families, lengths, edge_mapped_attention, **about)
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
        out = out.index_put((torch.arange(rows.start, rows.stop, device=q.device)[:, None, None], *_slots(x)), found)
    return out


def _share_a_list(q: Tensor, support: str, lengths: Tensor | None) -> bool:
    """Do rows of their own length have one edge list?"""
    return lengths is not None and not devices.is_host(q) and is_nested(support)


def lists_on_device(q: Tensor, support: str, lengths: Tensor | None) -> bool:
    """Do rows of their own length have lists that are made on the device?"""
    return lengths is not None and not devices.is_host(q) and not is_nested(support) and lists_any_length(support)


def _with_lists(q, k, v, support, families, lengths, attend, *, key_mask: Tensor | None, **about: Any) -> Tensor:
    """`attend` with a list of its own for every row. Behind the n keys there are n that do not exist: see the list."""
    n = q.shape[2]
    edges = edges_by_length(support, families, n, q.shape[1], lengths)
    if "probability_map" in about:
        about["buckets"] = buckets_by_length(edges)
    real = torch.ones_like(q[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
    q, k, v = (F.pad(x, (0, 0, 0, n)) for x in (q, k, v))
    return attend(q, k, v, edges, key_mask=F.pad(real, (0, n)), **about)[:, :, :n]


def _runs(sizes: list[int]) -> list[tuple[slice, int]]:
    """Rows in a row that have equally many tokens, without those that have none."""
    cuts = [0, *(b for b in range(1, len(sizes)) if sizes[b] != sizes[b - 1]), len(sizes)]
    return [(slice(a, b), sizes[a]) for a, b in pairwise(cuts) if sizes[a]]


def _slots(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(x.shape[1], device=x.device)[:, None], torch.arange(x.shape[2], device=x.device)
