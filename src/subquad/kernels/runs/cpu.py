"""The tables' way to the kernels: addresses, strides, and who does what."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from subquad.kernels.parallel import fits, launch, matrix
from subquad.kernels.runs import tiles as kernels

ROWS = 64  # queries of a task, if a tile has not more
takes = fits


def covers(tiles: Tensor, n: int) -> bool:
    """Is each of the n queries in a tile, where none is in two?"""
    return int(tiles[:, 1].sum()) == n


def divides(spans: Tensor, sources: Sequence[int], keys: Sequence[Tensor]) -> bool:
    """Is every key of all sources in exactly one run?"""
    for source, k in enumerate(keys):
        runs = spans[:, [p for p, x in enumerate(sources) if x == source], :2].flatten(0, 1).numpy()  # (T·P, 2)
        runs = runs[runs[:, 1] > 0]
        runs = runs[runs[:, 0].argsort()]
        ends = np.cumsum(runs[:, 1])
        if not len(runs) or ends[-1] != k.shape[1] or (runs[:, 0] != ends - runs[:, 1]).any():
            return False
    return True


def forward(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    bias: Tensor | None,
    orders: tuple[Tensor | None, Tensor | None],
    tables: tuple[Tensor, Tensor, Tensor | None, Sequence[int]],
    scale: float,
    out: Tensor,
    lse: Tensor,
    fresh: bool,
    again: bool = False,
) -> None:
    """out (G, n, d) and lse (G, n) take up the tiles; `fresh`: nothing is in them yet; `again`: a query may be in
    several tiles.

    bias (G or 1, m of all sources one after the other); orders of queries and of keys, (G or 1, ·) or None: row r of
    the tables stands at order[r]; tables: tiles (T, 2), spans (T, P, 4), starts (G + 1,) of the tiles of each instance
    or None = all of them for each, and the source of every run.
    """
    table, spans, starts, sources = tables
    with launch() as threads:
        work = _work(len(q), table, starts, threads, again)
        kernels.forward(
            threads, *_type(q), _most(table), work, table.numpy(), spans.numpy(), *_sources(sources, keys),
            *(_order(x) for x in orders), matrix(q), _matrices(keys), _matrices(values), _bias(bias, q), matrix(out),
            lse.numpy(), scale, fresh,
        )  # fmt: skip


def backward(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    bias: Tensor | None,
    orders: tuple[Tensor | None, Tensor | None],
    tables: tuple[Tensor, Tensor, Tensor | None, Sequence[int]],
    scale: float,
    grad: Tensor,
    delta: Tensor,
    lse: Tensor,
    found: Sequence[Tensor],
    fresh: bool = False,
    once: bool = False,
) -> None:
    """found: the gradients of q, all keys and all values, to which the tiles add; `fresh`: that of q is written, and
    what no tile has stays as it is; `once`: those of keys and values alike."""
    table, spans, starts, sources = tables
    dq, dkeys, dvalues = found[0], found[1 : 1 + len(keys)], found[1 + len(keys) :]
    with launch() as threads:
        work = _work(len(q), table, starts, threads, True)
        kernels.backward(
            threads, *_type(q), _most(table), work, table.numpy(), spans.numpy(), *_sources(sources, keys),
            *(_order(x) for x in orders), matrix(q), _matrices(keys), _matrices(values), _bias(bias, q), scale,
            matrix(grad), delta.numpy(), lse.numpy(), matrix(dq), _matrices(dkeys), _matrices(dvalues), fresh,
            once,
        )  # fmt: skip


def _work(instances: int, table: Tensor, starts: Tensor | None, workers: int, apart: bool) -> np.ndarray:
    """(tasks, 3): instance, first tile, behind the last. `apart`: no two workers have tasks of the same instance.

    Instances are often heads, whose rows stand side by side in memory: some tiles of all of them come one after the
    other, so that pages and lines that were fetched for one head serve the next.
    """
    edges = np.array([0, len(table)] if starts is None else starts.numpy())
    begins, ends = np.broadcast_to(edges[:-1], instances), np.broadcast_to(edges[1:], instances)
    step = max(1, ROWS // _most(table))
    low = begins + step * np.arange(-(-int((ends - begins).max()) // step))[:, None]  # (chunks, G)
    tasks = np.stack((np.broadcast_to(np.arange(instances), low.shape), low, np.minimum(low + step, ends)), -1)
    if apart:  # worker w takes tasks w, w + workers …: those of its own instances
        tasks = np.pad(tasks, ((0, 0), (0, -instances % workers), (0, 0)))
    return np.ascontiguousarray(tasks.reshape(-1, 3), dtype=np.int64)


def _most(table: Tensor) -> int:
    return int(table[:, 1].max()) if len(table) else 1


def _type(q: Tensor) -> tuple[np.ndarray, int, int]:
    return np.ones(1, q.numpy().dtype), q.element_size(), q.shape[2]


def _matrices(found: Sequence[Tensor]) -> np.ndarray:
    return np.array([matrix(x) for x in found], dtype=np.int64)


def _sources(sources: Sequence[int], keys: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """The source of every run, and where the bias of that source begins."""
    begins = np.cumsum([0, *(k.shape[1] for k in keys)])
    return np.array(sources, dtype=np.int64), begins[list(sources)].astype(np.int64)


def _order(order: Tensor | None) -> np.ndarray:
    return np.zeros((1, 0), dtype=np.int64) if order is None else order.numpy()


def _bias(bias: Tensor | None, q: Tensor) -> np.ndarray:
    return np.zeros((1, 0), q.numpy().dtype) if bias is None else bias.numpy()
