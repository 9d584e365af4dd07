"""Attention in clusters on a CPU: which tiles of scores there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from subquad.kernels.clusters import cpu_tiles
from subquad.kernels.clusters.layout import TIME, Layout
from subquad.kernels.parallel import launch
from subquad.kernels.running_softmax import BAND


class _Lists(NamedTuple):
    """Tiles of queries and keys, given by lists of tokens."""

    tiles: np.ndarray  # (T, 4), see `cpu_tiles.forward`
    starts: np.ndarray  # (G + 1,): the first tile of each sequence
    rows: np.ndarray  # numbers of tokens
    keys: np.ndarray
    about: tuple[np.ndarray, np.ndarray, np.ndarray]  # born, end, tag of every token, and of nobody
    others: bool


def attention(q, keys, values, order, cluster, real, seed, clusters, causal, last_query_only, scale, *plain):
    """As `tiles.attention`, for whole clusters of one round, without dropout."""
    layout = Layout(order, cluster, real, clusters, causal)
    q, sources = q.contiguous(), [[x.contiguous() for x in pair] for pair in zip(keys, values, strict=True)]
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    with launch() as threads:
        for number, lists in enumerate(_lists(layout, last_query_only, len(keys) > 1)):
            k, v = sources[number]
            cpu_tiles.forward(
                threads, *_type(q), lists.tiles, lists.rows, lists.keys, _time(layout), lists.about, lists.others,
                number == 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.view(-1).numpy(),
                scale,
            )  # fmt: skip
    return out, lse


def attention_backward(
    grad, q, keys, values, out, lse, order, cluster, real, seed, clusters, causal, last_query_only, scale, *plain
):
    """As `tiles.attention_backward`."""
    layout = Layout(order, cluster, real, clusters, causal)
    grad, q, out, lse = (x.contiguous() for x in (grad, q, out, lse))
    sources = [[x.contiguous() for x in pair] for pair in zip(keys, values, strict=True)]
    dq, dkv = torch.zeros_like(q), [[torch.zeros_like(x) for x in pair] for pair in sources]
    with launch() as threads:
        for number, lists in enumerate(_lists(layout, last_query_only, len(keys) > 1)):
            tensors = (q, *sources[number], out, grad, dq, *dkv[number])
            cpu_tiles.backward(
                threads, *_type(q), lists.starts, lists.tiles, lists.rows, lists.keys, _time(layout), lists.about,
                lists.others, *(x.data_ptr() for x in tensors), lse.view(-1).numpy(), scale,
            )  # fmt: skip
    return [dq, *(pair[0] for pair in dkv), *(pair[1] for pair in dkv)]


def _type(q: Tensor) -> tuple[np.ndarray, int, int]:
    return np.zeros(1, q.numpy().dtype), q.element_size(), q.shape[2]


def _time(layout: Layout) -> np.ndarray:
    """(N,): when each query is asked; without causality after everything is there."""
    if not layout.causal:
        return np.zeros(layout.total, np.int32)
    return (np.arange(layout.total) % layout.n).astype(np.int32)


def _lists(layout: Layout, last_query_only: bool, summaries: bool) -> Iterator[_Lists]:
    """The cluster of each query and, if wanted, the summaries of the others."""
    real, tag = layout.real.numpy(), layout.tag.numpy().astype(np.int32)
    time = np.append(_time(layout), 0)
    born = np.where(real, time, cpu_tiles.NEVER).astype(np.int32)
    always = np.full_like(born, cpu_tiles.NEVER)
    yield _own(layout, last_query_only, (born, always, tag))
    if summaries:
        yield _others(layout, (born, layout.end.numpy().astype(np.int32), tag))


def _own(layout: Layout, last_query_only: bool, about: tuple[np.ndarray, np.ndarray, np.ndarray]) -> _Lists:
    sizes, starts, order = layout.sizes.numpy(), layout.starts.numpy(), layout.order.numpy()
    if last_query_only:
        last = layout.last.numpy()
        some = np.flatnonzero(last < layout.total)
        found = np.stack((np.arange(len(some)), np.ones_like(some), starts[some], sizes[some]), 1)
        return _Lists(found, _firsts(some, layout), last[some], order, about, False)
    blocks = -(-sizes // BAND)
    owner = np.arange(len(sizes)).repeat(blocks)
    number = np.arange(len(owner)) - (blocks.cumsum() - blocks)[owner]
    rows = np.minimum(BAND, sizes[owner] - number * BAND)
    keys = number * BAND + rows if layout.causal else sizes[owner]
    found = np.stack((starts[owner] + number * BAND, rows, starts[owner], keys), 1)
    return _Lists(found, _firsts(owner, layout), order, order, about, False)


def _firsts(owner: np.ndarray, layout: Layout) -> np.ndarray:
    """Where the tiles of each sequence begin, given the clusters of all of them, ascending."""
    return np.searchsorted(owner, np.arange(layout.total // layout.n + 1) * layout.clusters)


def _others(layout: Layout, about: tuple[np.ndarray, np.ndarray, np.ndarray]) -> _Lists:
    """Stretches of TIME queries to the summaries that stand when they begin, and those that are born inside."""
    n, g = layout.n, layout.total // layout.n
    stretches = -(-n // TIME)
    first = np.arange(stretches) * TIME
    rows = np.minimum(TIME, n - first)
    table = layout._table().flatten(0, 1).numpy()  # (G·stretches, C)
    start = (np.arange(g)[:, None] * n + first).reshape(-1)
    if layout.causal:
        inside = start[:, None] + np.arange(TIME)
        inside = np.where(np.arange(TIME) < np.tile(rows, g)[:, None], inside, layout.total)
        table = np.concatenate((table, inside), 1)
    width = table.shape[1]
    count = np.full(len(start), width)
    found = np.stack((start, np.tile(rows, g), np.arange(len(start)) * width, count), 1)
    return _Lists(found, np.arange(g + 1) * stretches, np.arange(layout.total), table.ravel(), about, True)
