"""The parts of a plan as tiles for a GPU: which rectangles (queries × keys) each tile of queries, or of keys, visits.

A tile is up to `size` places start + i·unit. Parts whose queries stand side by side share tiles of unit 1; parts whose
queries are w apart (columns of a grid) need tiles of unit w, which are a *pass* of their own: it takes up the running
softmax where the pass before has left it. Most plans are one pass. The gradients of keys and values go by tiles of keys
in the same way, so that every row is written by one program: no atomics, the same bits at every run.
"""

from __future__ import annotations

from typing import NamedTuple

from subquad.kernels.merge.key_runs import key_runs
from subquad.kernels.merge.query_runs import query_runs
from subquad.kernels.merge.rectangles import Axis, Rectangle, Tile
from subquad.supports.parts import MEMBERS, NEAR, NODES, NODES_BACK, NOT_NEAR, Plan


class Pass(NamedTuple):
    """Tiles of one unit, and the rectangles of each, source by source."""

    tiles: list[Tile]
    rectangles: list[list[list[Rectangle]]]  # per tile, per source


def by_queries(plan: Plan, sources: int, size: int, width: int) -> list[Pass]:
    """The passes over tiles of queries; keys come `width` at a time."""
    axes = [(part, Axis.of(part.queries)) for part in plan.parts]
    return _passes(axes, plan, plan.rows, size, key_runs, [part.source for part in plan.parts], sources, width)


def by_keys(plan: Plan, source: int, count: int, size: int, width: int) -> list[Pass]:
    """The passes over tiles of the `count` keys of one source; queries come `width` at a time."""
    parts = [part for part in plan.parts if part.source == source]
    axes = [(part, Axis.drawn(part) if part.draws else Axis.of(part.keys)) for part in parts]
    return _passes(axes, plan, count, size, query_runs, [0] * len(parts), 1, width)


def _passes(axes, plan: Plan, places: int, size: int, runs, slots: list[int], sources: int, width: int) -> list[Pass]:
    found = []
    for unit in sorted({axis.unit for _, axis in axes}):
        tiles, visits = [], []
        for start in range(min(unit, places)):
            for first in range(start, places, unit * size):
                tile = Tile(first, unit, min(size, (places - 1 - first) // unit + 1))
                visited: list[list[Rectangle]] = [[] for _ in range(sources)]
                for (part, axis), slot in zip(axes, slots, strict=True):
                    if axis.unit == unit:
                        visited[slot] += runs(part, axis, plan, tile, width)
                if any(visited):
                    tiles.append(tile)
                    visits.append(visited)
        if tiles:
            found.append(Pass(tiles, visits))
    return found


RULES = {0: 0, NODES: 1, NODES_BACK: 1, MEMBERS: 1, NEAR: 2, NOT_NEAR: 2}  # what a kernel must be able to do, as bits


def rules_of(plan: Plan) -> int:
    """Which kinds of rules the parts of a plan have, as bits."""
    found = 0
    for part in plan.parts:
        found |= RULES[part.rule]
    return found
