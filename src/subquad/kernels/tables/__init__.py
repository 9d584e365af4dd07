"""What a support says, as tensors: edge lists and masks, made by operators from its text.

A compiled or exported graph holds the text and the length, and makes the lists when it runs, for any length. Where rows
of a batch have lengths of their own, each gets the sets of its own length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels import devices
from subquad.kernels.edges import EdgeList
from subquad.kernels.edges.lists import Buckets
from subquad.supports.partitions import POOLED, Partition
from subquad.supports.pattern import ROWS, Pattern, pointers
from subquad.supports.placed import on_device
from subquad.supports.support import constant_of_graphs, parse, text_of

UNION = -1  # a family: the union of all
UNREAD = (
    "the sets of a row depend on its length, which the host must not read here; pass nested=True if those of a shorter "
    "row are the same sets, cut off"
)
TABLE = 1 << 13  # positions of which a device keeps the named keys of all


def pattern_edges(
    like: Tensor, support: str, families: Sequence[int], n: int, num_heads: int, lengths: Tensor | None
) -> EdgeList:
    """The edge list of a pattern for a batch: one family for all heads, or one per head.

    `like` says the device. Graphs: 1, H, B (each for all heads of a batch element) or B·H.
    """
    indptr, indices = _edges(like, lengths, support, list(families), n)
    share = num_heads if lengths is not None and len(families) == 1 else 1
    return EdgeList(indptr, indices, n, share)


def pattern_buckets(like: Tensor, support: str, families: Sequence[int], n: int) -> Buckets:
    """`EdgeList.buckets` of the pattern for n tokens, made on the host: a GPU would have to be waited for."""
    pairs, place = _buckets(support, tuple(families), n)
    return [(on_device(slots, like), on_device(mask, like)) for slots, mask in pairs], on_device(place, like)


@constant_of_graphs
def is_nested(support: str) -> bool:
    """Are the sets of a shorter row those of the whole batch, cut off? Then one edge list has the edges of all rows."""
    return cast(Pattern, parse(support)).is_nested


def pattern_mask(like: Tensor, support: str, families: Sequence[int], n: int, lengths: Tensor | None) -> Tensor:
    """The same as a mask, bool (B or 1, families, n, n)."""
    if lengths is None or devices.is_host(like) or not masks_any_length(support):
        return _mask(like, lengths, support, list(families), n)
    inside = (torch.arange(n, device=like.device) < lengths[:, None])[:, None]  # (B, 1, n)
    if is_nested(support):
        seen = _mask(like, None, support, list(families), n)
    else:
        seen = _mask_by_length(lengths, support, list(families), n)
    return seen & inside[:, :, None] & inside[..., None]


def edges_by_length(support: str, families: Sequence[int], n: int, num_heads: int, lengths: Tensor) -> EdgeList:
    """`pattern_edges` of rows of their own length, made on the device that has the lengths, without reading them.

    For 2n queries and keys: query i < n has as many edges as any may have, and those that it lacks lead to key n + i,
    which must not exist. So nobody has many of them.
    """
    indptr, indices = _edges_by_length(lengths, support, list(families), n)
    return EdgeList(indptr, indices, 2 * n, num_heads if len(families) == 1 else 1)


def buckets_by_length(edges: EdgeList) -> Buckets:
    """`EdgeList.buckets` of that list."""
    n = edges.num_queries // 2
    slots = torch.arange(edges.num_edges, device=edges.indices.device)
    rows = edges.indices.view(edges.num_graphs, n, -1)
    some = torch.arange(rows.shape[2], device=slots.device) == 0  # no map need accept an empty set
    return [(slots.view(rows.shape), (rows < n) | some)], slots


@constant_of_graphs
def lists_any_length(support: str) -> bool:
    """Can `edges_by_length` be made?"""
    return type(parse(support)).listed is not Pattern.listed  # type: ignore[attr-defined]


@constant_of_graphs
def masks_any_length(support: str) -> bool:
    """Is the mask of a row of any length made on the device?"""
    pattern = cast(Pattern, parse(support))
    return pattern.is_nested or pattern.is_predicate or type(pattern).masked is not Pattern.masked


def global_queries(support: str, n: int, lengths: Tensor) -> Tensor | None:
    """The queries that `edges_by_length` leaves out, because they see everyone: int64 (B, r), None = nobody."""
    return cast(Pattern, parse(support)).global_queries(n, lengths)


def reads_no_length(support: str, *, in_blocks: bool) -> bool:
    """Does a device that has the lengths of rows need no host to read them? In blocks by `merge`, or as lists."""
    pattern = cast(Pattern, parse(support))
    if in_blocks or pattern.is_nested:
        return pattern.is_nested or type(pattern).common is not Pattern.common
    return lists_any_length(support)


@lru_cache(maxsize=32)
def _csr(support: str, n: int, family: int) -> tuple[np.ndarray, np.ndarray]:
    return cast(Pattern, parse(support)).csr(n, _family(family))


def _family(number: int) -> int | None:
    return None if number == UNION else number


def _sizes(n: int, lengths: Tensor | None) -> list[int]:
    if lengths is not None and not devices.is_host(lengths) and not devices.may_wait():
        raise ValueError(f"pattern: {UNREAD}")
    return [n] if lengths is None else lengths.tolist()


@torch.library.custom_op("subquad::pattern_edges", mutates_args=())
def _edges(like: Tensor, lengths: Tensor | None, support: str, families: list[int], n: int) -> tuple[Tensor, Tensor]:
    """indptr (graphs, n + 1) int64 and indices (E,) int32: batch element by batch element, family by family."""
    indptr, indices = _csr_lists(support, families, n, _sizes(n, lengths))
    return on_device(indptr, like), on_device(indices, like)


def _csr_lists(support: str, families: Sequence[int], n: int, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    degrees, indices = [], [np.empty(0, np.int32)]
    for size in sizes:
        for family in families:
            ptr, keys = _csr(support, size, family) if size else (np.zeros(1, np.int64), indices[0])
            degrees.append(np.pad(np.diff(ptr), (0, n - size)))
            indices.append(keys)
    flat = pointers(np.concatenate(degrees))  # (graphs·n + 1,)
    starts = np.arange(len(degrees))[:, None] * n + np.arange(n + 1)
    return flat[starts], np.concatenate(indices)


@lru_cache(maxsize=16)
def _buckets(support: str, families: tuple[int, ...], n: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """As `EdgeList.buckets`."""
    indptr, indices = _csr_lists(support, families, n, [n])
    degrees, starts, place = np.diff(indptr), indptr[:, :-1], np.empty(len(indices), np.int64)
    pairs, before, width = [], 0, 1
    while width < 2 * degrees.max():
        inside = (width // 2 < degrees) & (degrees <= width)  # (g, n)
        longest = inside.sum(1).max()
        rows = np.argsort(~inside, axis=1, kind="stable")[:, :longest]  # (g, rows)
        degree = np.take_along_axis(degrees * inside, rows, 1)[..., None]
        offset = np.arange(width)
        mask = offset < degree  # (g, rows, width)
        slots = np.where(mask, np.take_along_axis(starts, rows, 1)[..., None] + offset, 0)
        place[slots[mask]] = before + np.flatnonzero(mask)
        if longest:
            pairs.append((slots, mask | ((degree == 0) & (offset == 0))))
        before, width = before + mask.size, 2 * width
    return pairs, place


@_edges.register_fake
def _(like, lengths, support, families, n):
    graphs = len(families) * (1 if lengths is None else lengths.shape[0])
    edges = torch.library.get_ctx().new_dynamic_size()
    return like.new_empty(graphs, n + 1, dtype=torch.int64), like.new_empty(edges, dtype=torch.int32)


@torch.library.custom_op("subquad::pattern_edges_by_length", mutates_args=())
def _edges_by_length(lengths: Tensor, support: str, families: list[int], n: int) -> tuple[Tensor, Tensor]:
    """As `_edges`."""
    pattern, own = cast(Pattern, parse(support)), torch.arange(n, device=lengths.device)[:, None]
    lists = [_known(pattern.listed(n, _family(f), lengths)) for f in families]  # (B, n, ·)
    most = max(x.shape[2] for x in lists)
    keys = torch.stack([F.pad(x, (0, most - x.shape[2]), value=n) for x in lists], 1)  # (B, families, n, most)
    graph, row = (
        torch.arange(len(lengths) * len(families), device=own.device),
        torch.arange(2 * n + 1, device=own.device),
    )
    indptr = (graph[:, None] * n + row.clamp(max=n)) * keys.shape[3]
    return indptr, torch.where(keys < n, keys, n + own).int().flatten()


@_edges_by_length.register_fake
def _(lengths, support, families, n):
    edges = torch.library.get_ctx().new_dynamic_size()
    indptr = lengths.new_empty(len(families) * lengths.shape[0], 2 * n + 1)
    return indptr, lengths.new_empty(edges, dtype=torch.int32)


def _known(found: Tensor | None) -> Tensor:
    assert found is not None
    return found


@torch.library.custom_op("subquad::pattern_mask_by_length", mutates_args=())
def _mask_by_length(lengths: Tensor, support: str, families: list[int], n: int) -> Tensor:
    """As `_mask`, whatever it says behind the ends of rows."""
    pattern = cast(Pattern, parse(support))
    return torch.stack([_known(pattern.masked(n, _family(f), lengths)) for f in families], 1)


@_mask_by_length.register_fake
def _(lengths, support, families, n):
    return lengths.new_empty(lengths.shape[0], len(families), n, n, dtype=torch.bool)


@torch.library.custom_op("subquad::pattern_mask", mutates_args=())
def _mask(like: Tensor, lengths: Tensor | None, support: str, families: list[int], n: int) -> Tensor:
    pattern, rows = cast(Pattern, parse(support)), []
    for size in _sizes(n, lengths):
        masks = [pattern.rows(size, _family(f), 0, size) if size else np.zeros((0, 0), bool) for f in families]
        rows.append(np.stack([np.pad(mask, (0, n - size)) for mask in masks]))
    return on_device(np.stack(rows), like)


@_mask.register_fake
def _(like, lengths, support, families, n):
    batch = 1 if lengths is None else lengths.shape[0]
    return like.new_empty(batch, len(families), n, n, dtype=torch.bool)


# ---- the keys of a few queries ------------------------------------------------------------------------------


def named_keys(
    position: Tensor, pattern: Pattern, families: tuple[int, ...], room: int, first: int | None = None
) -> Tensor:
    """The keys that a causal pattern names for queries at `position` (B, t): int64 (B, families, t, m), -1 = none.

    m is the length of the longest list; in a compiled graph that of all queries before position `room`. `first`: the
    first position of all rows, where the host knows it. A device that has the positions looks the lists up in a table
    of all of them, unless that is long.
    """
    if first is not None:
        lists = _listed(np.arange(first, first + position.shape[1])[None], pattern, families, 0)
        return on_device(lists, position).expand(len(position), -1, -1, -1)
    text = text_of(pattern)
    if not torch.compiler.is_compiling():
        if devices.is_host(position) or (room > TABLE and devices.may_wait()):
            return on_device(_listed(position.cpu().numpy(), pattern, families, 0), position)
        table = _named_table(text, families, 1 << max(0, room - 1).bit_length(), position.device)  # (F, room, m)
        return table[:, position.clamp(max=table.shape[1] - 1)].transpose(0, 1)
    return _named(position.clamp(max=room - 1), text, list(families), most_named(text, families, room))


@lru_cache(maxsize=8)
def _named_table(support: str, families: tuple[int, ...], room: int, device: torch.device) -> Tensor:
    """What `named_keys` gives for the positions before `room`, (families, room, m)."""
    pattern = cast(Pattern, parse(support))
    lists = _listed(np.arange(min(room, pattern.longest or room))[None], pattern, families, 0)
    return torch.from_numpy(lists[0]).to(device, non_blocking=True)


@constant_of_graphs
def most_named(support: str, families: tuple[int, ...], n: int) -> int:
    """How many keys a query before position n has at most."""
    return _most_named(cast(Pattern, parse(support)), families, n)


@lru_cache(maxsize=64)
def _most_named(pattern: Pattern, families: tuple[int, ...], n: int) -> int:
    n = min(n, pattern.longest or n)
    pieces = [np.arange(first, min(n, first + ROWS)) for first in range(0, n, ROWS)]
    return max(pattern.named(_family(f), piece).shape[-1] for f in families for piece in pieces)


@torch.library.custom_op("subquad::named_keys", mutates_args=())
def _named(position: Tensor, support: str, families: list[int], width: int) -> Tensor:
    return on_device(_listed(position.cpu().numpy(), cast(Pattern, parse(support)), families, width), position)


def _listed(i: np.ndarray, pattern: Pattern, families: Sequence[int], width: int) -> np.ndarray:
    """The lists of named keys, `width` of them or, where that is 0, as many as the longest has."""
    lists = [pattern.named(_family(f), i) for f in families]
    most = width or max(x.shape[-1] for x in lists)
    wide = [np.pad(x, ((0, 0), (0, 0), (0, most - x.shape[-1])), constant_values=-1) for x in lists]
    return np.stack(wide, 1).astype(np.int64)


@_named.register_fake
def _(position, support, families, width):
    return position.new_empty(position.shape[0], len(families), position.shape[1], width)


# ---- a partition of one's own -------------------------------------------------------------------------------


def partition_edges(like: Tensor, support: str, n: int, groups: int) -> tuple[EdgeList, EdgeList]:
    """Groups → their members, and queries → tokens (0 … n-1) and groups (n …), for a partition of plain groups."""
    (ptr, inside), (rows, seen) = (
        _partition_edges(like, support, kind, n, size) for kind, size in ((True, groups), (False, n))
    )
    return EdgeList(ptr, inside, n), EdgeList(rows, seen, n + groups)


@constant_of_graphs
def group_count(support: str, n: int) -> int:
    """How many different groups a partition has."""
    return len(_lists(parse(support), n)[0])


@lru_cache(maxsize=16)
def _lists(partition: Partition, n: int) -> tuple[list[list[int]], list[list[int]]]:
    groups, rows = partition.unique_groups(n)
    if any(group.children or group.query_position != POOLED for group in groups):
        raise ValueError("plan must be made of plain groups, without children or query positions")
    members = [sorted(group.members) for group in groups]
    return members, [sorted(partition.direct(n, i)) + sorted(n + u for u in row) for i, row in enumerate(rows)]


@torch.library.custom_op("subquad::partition_edges", mutates_args=())
def _partition_edges(like: Tensor, support: str, members: bool, n: int, rows: int) -> tuple[Tensor, Tensor]:
    lists = _lists(parse(support), n)[0 if members else 1]
    indptr = pointers(np.array([len(row) for row in lists], np.int64))[None]
    indices = np.fromiter((j for row in lists for j in row), np.int32)
    return on_device(indptr, like), on_device(indices, like)


@_partition_edges.register_fake
def _(like, support, members, n, rows):
    edges = torch.library.get_ctx().new_dynamic_size()
    return like.new_empty(1, rows + 1, dtype=torch.int64), like.new_empty(edges, dtype=torch.int32)
