"""Parts through the tile kernels: what they take, and how the work is divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subquad.core.hashing import dropout_seed
from subquad.kernels.merge import cpu_tiles as tiles
from subquad.kernels.merge.reference import SOURCE
from subquad.kernels.merge.rows import grid_view
from subquad.kernels.parallel import launch, run
from subquad.kernels.vectors import BYTES
from subquad.supports.parts import Part, Plan


def takes(part: Part, q: Tensor) -> bool:
    """Are there vectors of this type and width, and do the places go upwards?

    Parts of a shard, which count from its first query and keep the numbers of the whole for dropout, go the other way.
    """
    whole = part.numbers is None
    return whole and _fits(q) and not part.is_self and part.queries.stride > 0 and part.placed.stride > 0


def parts_of(plan: Plan, q: Tensor) -> tuple[Part, ...]:
    return plan.joined if _fits(q) else plan.parts


def _fits(q: Tensor) -> bool:
    return q.dtype in (torch.float32, torch.float64) and q.shape[-1] * q.element_size() % BYTES == 0


def forward(frame: Any, part: Part, plan: Plan, scale: float, seed: Tensor | None, dropout: float) -> None:
    """The part's share of out and lse."""
    q, out, lse = frame.queries
    k, v = frame.keys[part.source], frame.values[part.source]
    rows = min(part.queries.length, tiles.TASK_ROWS)
    chunks = -(-part.queries.length // rows)
    run(
        tiles.forward, *_type(q), len(q) * part.queries.blocks * chunks, chunks, rows,
        *(_matrix(x) for x in (q, k, v, out)), lse[..., 0].numpy(), *_geometry(part), part.fresh,
        *_rules(frame, part, plan, q), *_randomness(frame, part, q, scale, seed, dropout),
    )  # fmt: skip


def backward(frame: Any, part: Part, plan: Plan, scale: float, seed: Tensor | None, dropout: float) -> None:
    """The part's share of dq, dk and dv."""
    g, q, out, lse, dq = frame.queries
    m = len(frame.keys)
    k, v = frame.keys[part.source], frame.values[part.source]
    dk, dv = frame.gradients[part.source], frame.gradients[m + part.source]
    with launch() as threads:
        phases, copies = _division(part, len(q), threads)
        sums = (
            [q.new_zeros(len(q) * copies, part.keys.length, q.shape[2]) for _ in range(2)] if copies > 1 else [dk, dv]
        )
        for work in phases:
            run(
                tiles.backward, *_type(q), work, *(_matrix(x) for x in (g, q, k, v, out)), lse[..., 0].numpy(),
                *(_matrix(x) for x in (dq, *sums)), *_geometry(part),
                *_rules(frame, part, plan, q), *_randomness(frame, part, q, scale, seed, dropout),
            )  # fmt: skip
    if copies > 1:
        for total, pieces in zip((dk, dv), sums, strict=True):
            share = pieces.view(len(q), copies, *pieces.shape[1:]).sum(1)  # (G, S, d)
            grid_view(total, part.keys._replace(blocks=1))[:, 0].add_(share)


def _division(part: Part, instances: int, threads: int) -> tuple[list[np.ndarray], int]:
    """Tasks in phases, see `cpu_tiles.backward`, and how many sums of its own every instance has (1 = none of its own).

    Where blocks share their keys, rows are divided, and each share has sums of its own. Where key blocks overlap, runs
    of blocks are so long that a run meets its neighbours only: first the even ones, then the odd ones.
    """
    blocks, rows, keys = part.queries.blocks, part.queries.length, part.keys
    wanted = max(1, -(-4 * threads // instances))
    if part.draws:  # any block may draw any keys
        return [_tasks(instances, [(0, blocks, 0, rows, -1)])], 1
    if blocks > 1 and keys.step:
        overlaps = keys.stride == 1 and keys.step < keys.length
        least = -(-keys.length // keys.step) if overlaps else 1
        size = max(least, -(-blocks // wanted))
        runs = [(a, min(a + size, blocks), 0, rows, -1) for a in range(0, blocks, size)]
        phases = [runs[::2], runs[1::2]] if overlaps else [runs]
        return [_tasks(instances, phase) for phase in phases if phase], 1
    copies = min(wanted, max(1, blocks * rows // tiles.TASK_ROWS))
    if copies == 1:
        return [_tasks(instances, [(0, blocks, 0, rows, -1)])], 1
    if blocks >= copies:
        cuts = [(a * blocks // copies, (a + 1) * blocks // copies, 0, rows) for a in range(copies)]
    else:
        cuts = [(0, blocks, a * rows // copies, (a + 1) * rows // copies) for a in range(copies)]
    return [_tasks(instances, [(*cut, at) for at, cut in enumerate(cuts)], copies)], copies


def _tasks(instances: int, shares: Sequence[tuple[int, ...]], copies: int = 0) -> np.ndarray:
    """(tasks, 6): every instance with every share."""
    shared = np.array(shares, dtype=np.int64)  # (shares, 5)
    number = np.arange(instances).repeat(len(shared))[:, None]
    work = np.hstack([number, np.tile(shared, (instances, 1))])
    work[:, 5] += np.where(work[:, 5] >= 0, work[:, 0] * copies, 0)
    return work


# ---- arguments ----------------------------------------------------------------------------------------------


def _type(q: Tensor) -> tuple[np.ndarray, int, int]:
    return np.zeros(1, q.numpy().dtype), q.element_size(), q.shape[2]


def _matrix(x: Tensor) -> tuple[int, int, int]:
    return x.data_ptr(), x.stride(0), x.stride(1)


def _geometry(part: Part) -> tuple[tuple[int, ...], ...]:
    return tuple(part.queries), tuple(part.keys), tuple(part.placed), tuple(part.limits)


def _rules(frame: Any, part: Part, plan: Plan, q: Tensor) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
    """Drawn blocks, how many a part draws, a mask where the limits do not say it all, and which keys exist."""
    from subquad.kernels.merge.cpu import kept_mask

    drawn = np.array(plan.drawn if part.draws else (0,), dtype=np.int64)
    bias = np.zeros((1, 1, 0), q.numpy().dtype) if part.is_interval else kept_mask(part, q.dtype)[0].numpy()
    valid = frame.valid.get(part.source)
    exists = np.zeros((1, 0), dtype=bool) if valid is None else valid.numpy()
    return drawn, part.draws, bias, exists


def _randomness(frame: Any, part: Part, q: Tensor, scale: float, seed: Tensor | None, dropout: float) -> tuple:
    kind = q.numpy().dtype.type
    number = int(dropout_seed(seed)) % (1 << 64) if dropout and seed is not None else 0
    return (
        frame.instances.numpy(), np.uint64(number), kind(scale), np.float32(dropout), kind(1 / (1 - dropout)),
        part.source * SOURCE,
    )  # fmt: skip
