"""An earlier result of a table: its runs are not repeated, and what it has beyond this call stays in the table.

docs/results outlives the folders of the runs, so a table can grow on another machine: more seeds, learning rates,
methods, columns.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from subquad.core.spoken import argument
from subquad.reproductions.declare import Column, Method
from subquad.reproductions.verdict import seeds_of
from subquad.tasks import task as make_task
from subquad.training import log
from subquad.training.compare import Comparison, Known
from subquad.training.rates import choose


def file_name(key: str, scale: str) -> str:
    """KEY.json, or KEY-paper.json of the full size."""
    return f"{key}{'-paper' * (scale == 'paper')}.json"


def read_earlier(folder: Path, key: str, scale: str) -> dict[str, Any]:
    """The result in this folder, {} if there is none. What is something else is refused: it would be overwritten."""
    path = folder / file_name(key, scale)
    if not path.exists():
        return {}
    found = log.read_json(path)
    about = (found.get("key"), found.get("scale"), *(type(found.get(name)) for name in ("rates", "methods", "ours")))
    if about != (key, scale, list, dict, dict):
        raise ValueError(f"{path} is not a result of `subquad reproduce {key}`: choose another {argument('results')}")
    return found


def setting(comparison: Comparison) -> str:
    """A digest of the recipe that a cell was trained with, of what it changes only: a setting that recipes gain later
    has a default, and leaves it as it was.
    """
    recipe = make_task(comparison.task, comparison.recipe, comparison.settings).recipe
    values = {field.name: (getattr(recipe, field.name), field.default) for field in dataclasses.fields(recipe)}
    changed = {name: value for name, (value, default) in values.items() if value != default}
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:12]


def check_earlier(earlier: Mapping[str, Any], rates: Sequence[str]) -> None:
    """Learning rates can be added to a result; without any, only a result without any can go on."""
    if earlier and earlier["rates"] and not rates:
        before = ",".join(earlier["rates"])
        raise ValueError(
            f"the earlier result of {earlier['key']} was trained with the learning rates {before}, not with that of "
            f"the recipe: continue it with {argument('rates')} {before}, or choose another {argument('results')}"
        )


def known(
    earlier: Mapping[str, Any], column: Column, methods: Sequence[Method], scale: str, comparison: Comparison
) -> dict[str, Known]:
    """By spec: what of a comparison has been run."""
    found = {}
    for method in methods:
        cell = earlier.get("ours", {}).get(method.name, {}).get(column.name)
        if cell is None:
            continue
        spec = method.spec_at(scale)
        before = cell.get("setting"), earlier["methods"][method.name]["spec"]
        if before != (setting(comparison), spec):
            raise ValueError(
                f"the earlier result of {earlier['key']} was trained with other settings or another spec "
                f"({column.name}, {method.name}: {before[1]}): choose another {argument('results')}, or delete it"
            )
        tried = tried_rates(cell, earlier["rates"], column, comparison) if comparison.rates else {}
        found[spec] = Known(choose(tried), tuple(seeds_of(cell)), tried)
    return found


def tried_rates(
    cell: Mapping[str, Any], rates: Sequence[str], column: Column, comparison: Comparison
) -> dict[str, dict[str, Any]]:
    """By learning rate: what `choose` asks for. A cell without a bracket has tried the rate of its recipe only. One
    without `tried` has the validation scores of the chosen rate: the other `rates` were no better.
    """
    task = make_task(comparison.task, comparison.recipe, comparison.settings)
    scores = cell.get("tried")
    if scores is None:
        best = (max if task.larger_is_better else min)(score for _, score in cell["curve"])
        chosen = cell["rate"] or f"{task.recipe.rate:g}"
        scores = {**dict.fromkeys(rates if cell["rate"] else ()), chosen: best}
    names = {float(rate): rate for rate in comparison.rates}  # as they are written in this call
    return {
        names.get(float(rate), rate): {
            "valid": math.nan if score is None else score / column.factor,
            "larger_is_better": task.larger_is_better,
        }
        for rate, score in scores.items()
    }


def joined(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A cell of an earlier result with the seeds that were run since, all with one learning rate."""
    if before is None or now is None:
        found = before or now
        return None if found is None else dict(found)
    scores = [*before["scores"], *now["scores"]]
    return {
        **now, **before, "mean": statistics.mean(scores), "sd": statistics.stdev(scores),
        "seeds": [*seeds_of(before), *seeds_of(now)], "scores": scores,
        "left_plateau": [*before["left_plateau"], *now["left_plateau"]],
    }  # fmt: skip
