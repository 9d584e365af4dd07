"""A plan as tables for the tile kernels: bands of query rows, and which parts each band has a share in.

Parts whose queries stand equally far apart make a phase. A phase cuts the rows into bands, at the ends of the parts'
blocks and at most BAND rows each; a piece is the share of one block of one part in a band. So a band goes
through all parts of its phase at once. The first phase has every row of the tensor in some band, rows without a key
too: what it lays down needs no memory that was cleared before. Rules that are no intervals are masks (`kept_mask`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from subquad.kernels.merge.cpu_tiles import DRAWS, FIELDS, PLACES
from subquad.kernels.merge.reference import SOURCE
from subquad.kernels.running_softmax import BAND, ROWS
from subquad.supports.parts import Part, Plan

KEPT_BYTES = 1 << 26  # of the most recent masks
SLACK = 16  # entries behind the last one, which kernels may read: they go in whole vectors


class Program(NamedTuple):
    """The tables of one plan, or of the plans of a batch one behind the other; see `cpu_tiles` for their columns."""

    parts: np.ndarray  # (P, FIELDS)
    drawn: np.ndarray
    bands: np.ndarray  # (N, 6)
    pieces: np.ndarray  # (M, 5)
    phases: tuple[range, ...]  # the bands of each phase
    masked: tuple[tuple[int, Part], ...]  # parts whose rule is a mask


class _Block(NamedTuple):
    """Rows [low, high) of a phase, counted in its steps, that belong to one block of a part."""

    low: int
    high: int
    part: int
    block: int
    keys: int


def make_program(plan: Plan, rows: int, most: int) -> Program:
    """The program of a plan for tensors of `rows` queries; bands have at most `most` pairs, where they can."""
    parts = plan.joined
    assert all(grid.stride > 0 for part in parts for grid in (part.queries, part.keys, part.placed))  # tiles go upwards
    bands: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    phases: list[range] = []
    for step, members in _by_step(parts).items():
        first = len(bands)
        for residue in range(step):
            blocks = list(_blocks(parts, members, step, residue))
            height = -(-(rows - residue) // step) if not phases else 0  # the first phase has them all
            for low, high, found in _cut(blocks, height, most):
                begin = len(pieces)
                pieces += [_piece(parts[block.part], block, low, high) for block in found]
                place = residue + low * step
                bands.append((begin, len(pieces), place, step, high - low, not phases))
        phases.append(range(first, len(bands)))
    return Program(
        np.array([_fields(part) for part in parts], dtype=np.int64).reshape(-1, FIELDS),
        np.array(plan.drawn or (0,), dtype=np.int64),
        np.array(bands, dtype=np.int64).reshape(-1, 6),
        np.array(pieces, dtype=np.int64).reshape(-1, 5),
        tuple(phases),
        tuple((at, part) for at, part in enumerate(parts) if not part.is_interval and not _is_selves(part)),
    )


def together(programs: Sequence[Program]) -> tuple[Program, list[list[range]]]:
    """The programs of a batch as one, and the bands of each phase of each of them."""
    if len(programs) == 1:
        return programs[0], [list(programs[0].phases)]
    starts = {name: np.cumsum([0, *(len(getattr(p, name)) for p in programs)]) for name in Program._fields[:4]}
    parts, bands, pieces = ([getattr(p, name).copy() for p in programs] for name in ("parts", "bands", "pieces"))
    for at in range(len(programs)):
        draws = parts[at][:, DRAWS] > 0
        parts[at][draws, PLACES] += starts["drawn"][at]
        pieces[at][:, 0] += starts["parts"][at]
        bands[at][:, :2] += starts["pieces"][at]
    moved = [
        [range(r.start + a, r.stop + a) for r in p.phases] for p, a in zip(programs, starts["bands"], strict=False)
    ]
    masked = [(number + int(starts["parts"][at]), part) for at, p in enumerate(programs) for number, part in p.masked]
    drawn = np.concatenate([p.drawn for p in programs])
    joined = Program(np.concatenate(parts), drawn, np.concatenate(bands), np.concatenate(pieces), (), tuple(masked))
    return joined, moved


def _is_selves(part: Part) -> bool:
    """One key for every row: a product of rows, not of matrices."""
    return part.is_self and (part.is_triangle or part.sees_everything) and part.queries.step > 0


def _by_step(parts: Sequence[Part]) -> dict[int, list[int]]:
    """The numbers of the parts by the distance of their queries; all rows in one phase where there is no part."""
    found: dict[int, list[int]] = {}
    for at, part in enumerate(parts):
        one_row = part.queries.length == 1
        found.setdefault(1 if one_row else part.queries.stride, []).append(at)
    return dict(sorted(found.items())) or {1: []}


def _blocks(parts: Sequence[Part], members: list[int], step: int, residue: int) -> Iterator[_Block]:
    for at in members:
        q, keys = parts[at].queries, parts[at].keys.length
        if _is_selves(parts[at]):
            yield _Block(q.start, q.start + (q.blocks - 1) * q.step + 1, at, -1, keys)
            continue
        first = q.start + np.arange(q.blocks) * q.step
        for block in np.flatnonzero(first % step == residue).tolist():
            low = int(first[block]) // step
            yield _Block(low, low + q.length, at, block, keys)


def _cut(blocks: list[_Block], height: int, most: int) -> Iterator[tuple[int, int, list[_Block]]]:
    """Bands [low, high), and the blocks that have a share in each, in the order of the parts."""
    low, high, work, found = 0, 0, 0, set[_Block]()
    for begin, end, here in _stretches(blocks, height):
        if not here and not height:
            continue  # a later phase leaves rows alone that it has nothing for
        pairs = sum(block.keys for block in here)
        size = max(1, min(BAND, most // max(pairs, 1)))
        size = size // ROWS * ROWS or size
        for at in range(begin, end, size):
            stop = min(at + size, end)
            if at != high or stop - low > BAND or work + (stop - at) * pairs > most:
                if high > low:
                    yield low, high, sorted(found, key=lambda block: block[2:])
                low, work, found = at, 0, set()
            high, work = stop, work + (stop - at) * pairs
            found.update(here)
    if high > low:
        yield low, high, sorted(found, key=lambda block: block[2:])


def _stretches(blocks: list[_Block], height: int) -> Iterator[tuple[int, int, list[_Block]]]:
    """Rows between two ends of blocks, and the blocks that they are in."""
    cuts = sorted({0, height}.union(*(block[:2] for block in blocks)))
    waiting, active = sorted(blocks, reverse=True), list[_Block]()
    for begin, end in itertools.pairwise(cuts):
        while waiting and waiting[-1].low <= begin:
            active.append(waiting.pop())
        active = [block for block in active if block.high > begin]
        yield begin, end, active


def _piece(part: Part, block: _Block, low: int, high: int) -> tuple[int, ...]:
    """(part, block, first row of the block, rows, first row of the band); selves (part, first, step, how many, …)."""
    if block.block >= 0:
        begin, end = max(low, block.low), min(high, block.high)
        return block.part, block.block, begin - block.low, end - begin, begin - low
    q = part.queries
    first, behind = max(0, -(-(low - q.start) // q.step)), min(q.blocks, (high - 1 - q.start) // q.step + 1)
    return block.part, first, q.step, max(0, behind - first), q.start + first * q.step - low


def _fields(part: Part) -> tuple[int, ...]:
    """A row of the table of parts."""
    numbers = (part.source * SOURCE, 0, 0)
    if part.numbers is not None:
        grid = part.numbers
        numbers = (grid.start + numbers[0], grid.step, grid.stride)
    placed = part.placed.moved(part.origin)
    single = (part.draws, part.source, part.origin)
    return (*part.queries, *part.keys, *placed, *part.limits, *single, *numbers, _is_selves(part))


class _MaskCache:
    """Masks of parts whose rule is no interval, the most recent ones, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes, self.lock = limit, 0, Lock()
        self.kept: OrderedDict[tuple[Part, torch.dtype], Tensor] = OrderedDict()

    def __call__(self, part: Part, dtype: torch.dtype) -> Tensor:
        """What the part's rule adds to the scores, (A or 1, L, S)."""
        with self.lock:
            found = self.kept.get((part, dtype))
            if found is not None:
                self.kept.move_to_end((part, dtype))
                return found
        allowed = torch.from_numpy(part.allowed())  # (A or 1, L, S)
        room = allowed.new_zeros(allowed.numel() + SLACK, dtype=dtype)
        found = room[: allowed.numel()].view(allowed.shape).masked_fill_(~allowed, -torch.inf)
        with self.lock:
            if found.nbytes <= self.limit // 8 and (part, dtype) not in self.kept:
                self.kept[part, dtype] = found
                self.bytes += found.nbytes
            while self.bytes > self.limit:
                self.bytes -= self.kept.popitem(last=False)[1].nbytes
        return found


kept_mask = _MaskCache(KEPT_BYTES)
