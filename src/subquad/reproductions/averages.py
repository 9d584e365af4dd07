"""Columns that are computed from others, such as the average over the Long Range Arena."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from subquad.reproductions.declare import Reproduction
from subquad.reproductions.verdict import seeds_of


def add_averages(reproduction: Reproduction, cells: Mapping[str, dict[str, Any]]) -> None:
    """The cells of the computed columns, where all that they are computed from are there."""
    for column in reproduction.columns:
        for row in cells.values() if column.mean_of else ():
            parts = [row[name] for name in column.mean_of if name in row]
            if len(parts) == len(column.mean_of) and (cell := average(parts)):
                row[column.name] = {**cell, "mean_of": list(column.mean_of)}


def average(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The mean of the cells. Its spread is that of the means of each seed, over the seeds that all of them have: the
    numbers of different columns lie far apart, and say nothing about it.
    """
    known = [dict(zip(seeds_of(part), part["scores"], strict=True)) for part in parts]
    seeds = sorted(set.intersection(*(set(scores) for scores in known)))
    if not seeds:
        return None
    scores = [statistics.mean(each[seed] for each in known) for seed in seeds]
    return {
        "mean": statistics.mean(part["mean"] for part in parts),
        "sd": statistics.stdev(scores) if len(scores) > 1 else None,
        "seeds": seeds, "scores": scores, "rate": None,
        "left_plateau": [step for part in parts for step in part["left_plateau"]],
    }  # fmt: skip
