"""Runs a reproduction: trains, measures or draws, and puts our numbers beside the paper's.

Trainings are comparisons (`subquad.training.compare`): one process per run, kept and resumed. Their folders are named
by task, recipe and settings, so that tables share the runs they have in common. What is finished is in the result at
any time: a missing data set or an interruption costs nothing that was there before.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from subquad.attention.registry import check_name
from subquad.core.files import write_atomically
from subquad.reproductions import REPRODUCTIONS, verdict
from subquad.reproductions.averages import add_averages
from subquad.reproductions.declare import Column, Method, Reproduction, Scale, check_possible, limited
from subquad.reproductions.earlier import check_earlier, file_name, joined, known, read_earlier, setting
from subquad.reproductions.measures import Ask
from subquad.tasks import task as make_task
from subquad.training import log
from subquad.training.compare import Comparison, check_attentions, check_data, compare, prepare
from subquad.training.rates import multiples
from subquad.training.run import versions

Tell = Callable[[str], None]
POINTS = 40  # of a curve that is kept


@dataclass
class Plan:
    """How a reproduction is run."""

    reproduction: Reproduction
    out: Path
    scale: str = "small"
    seeds: int = 1
    rates: tuple[str, ...] | None = None  # None = those of the reproduction
    data: Path | None = None
    earlier: Mapping[str, Any] = field(default_factory=dict)  # a result of this table, whose runs are not repeated
    jobs: int = 1  # runs at a time
    results: Path | None = None  # the folder of that result, in which other commands may add to it meanwhile

    def bracket(self, column: Column) -> tuple[str, ...]:
        """The learning rates that are tried in a column."""
        if self.rates is not None:
            return self.rates
        if self.scale == "small":
            return self.reproduction.rates
        recipe, settings, _ = column.scale(self.scale)
        factors = self.reproduction.rate_factors
        return multiples(make_task(column.task, recipe, settings).recipe.rate, factors) if factors else ()

    @property
    def brackets(self) -> tuple[str, ...]:
        """The learning rates of all columns."""
        return tuple(dict.fromkeys(rate for column in self.reproduction.run_columns for rate in self.bracket(column)))

    def comparisons(self) -> Iterator[tuple[Column, list[Method], Comparison]]:
        """What is trained: for each column the methods that share their settings."""
        for column in self.reproduction.run_columns:
            groups: dict[tuple[str, ...], list[Method]] = {}
            for method in known_methods(self.reproduction):
                groups.setdefault(method.settings(self.scale), []).append(method)
            scale = column.scale(self.scale)
            for own, methods in groups.items():
                specs = list(dict.fromkeys(method.spec_at(self.scale) for method in methods))
                comparison = self._comparison(column.task, scale, specs, self.bracket(column), own)
                if scale.begin is not None:
                    comparison.begin = replace(self._comparison("mlm", scale.begin, specs, self.rates or ()), seeds=1)
                comparison.known = known(self.earlier, column, methods, self.scale, comparison)
                yield column, methods, comparison

    def _comparison(
        self, task: str, scale: Scale, specs: list[str], rates: tuple[str, ...], own: tuple[str, ...] = ()
    ) -> Comparison:
        settings = (*scale.settings, *own)
        where = self.out / task / ",".join((scale.recipe, *settings)).replace("/", "_")
        return Comparison(
            task, specs, where, scale.recipe, settings, self.seeds, self.data, rates=rates, timed=False, jobs=self.jobs
        )

    @property
    def table(self) -> Reproduction:
        """What is reported: the part that is run, and what the earlier result has beside it."""
        cells = self.earlier.get("ours", {})
        if not cells:
            return self.reproduction
        whole = REPRODUCTIONS.get(self.reproduction.key, self.reproduction)
        columns = {name for row in cells.values() for name in row} | {each.name for each in self.reproduction.columns}
        methods = set(cells) | {each.name for each in self.reproduction.methods}
        return limited(
            whole,
            [each.name for each in whole.methods if each.name in methods],
            [each.name for each in whole.columns if each.name in columns],
        )


def left_out(reproduction: Reproduction) -> list[str]:
    """What the table has and this part of it has not, in words."""
    whole = REPRODUCTIONS.get(reproduction.key, reproduction)
    notes = []
    for kind, here, there in (
        ("methods", reproduction.methods, whole.methods),
        ("columns", reproduction.run_columns, whole.run_columns),
    ):
        names = {each.name for each in here}
        gone = [each.name for each in there if each.name not in names]
        if gone:
            notes.append(f"{len(gone)} of {len(there)} {kind} were left out: {'; '.join(gone)}")
    return notes


def known_methods(reproduction: Reproduction) -> list[Method]:
    """Those whose mechanism exists here."""
    return [method for method in reproduction.methods if not absent(method)]


def absent(method: Method) -> bool:
    try:
        check_name(method.spec)
    except ValueError:
        return True
    return False


def reproduce(plan: Plan, tell: Tell = lambda text: None) -> dict[str, Any]:
    """Run what has not been run; what result.json holds."""
    reproduction = plan.reproduction
    check_possible(reproduction, plan.scale)
    check_earlier(plan.earlier, plan.brackets)
    if reproduction.kind == "drawn":
        return drawn(plan)
    if reproduction.kind == "measured":
        ask = Ask(plan.out / "measured.json", tell)
        return summary(plan, _function(reproduction)(reproduction, ask))
    return so_far(plan, train(plan, tell))


def _function(reproduction: Reproduction) -> Any:
    module, _, name = reproduction.function.partition(":")
    return getattr(import_module(module), name)


def drawn(plan: Plan) -> dict[str, Any]:
    """The picture lies beside the runs."""
    path = plan.out / f"{plan.reproduction.key}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    _function(plan.reproduction)(path, plan)
    return {"key": plan.reproduction.key, "picture": str(path)}


def train(plan: Plan, tell: Tell) -> list[str]:
    """Every comparison in turn. A column without data is passed over; what was missing is returned in words."""
    notes: list[str] = []
    possible: list[Comparison] = []
    for column, _, comparison in plan.comparisons():
        known_already = {each.out for each in possible}
        wanted = [each for each in (comparison.begin, comparison) if each and each.out not in known_already]
        for each in wanted:
            check_attentions(each)
        try:
            for each in wanted:
                check_data(each)
        except (FileNotFoundError, ValueError) as error:  # not there, or not what it should be
            notes.append(f"{column.name}: {error}")
            continue
        for each in wanted:
            prepare(each, overwrite=False)
        possible += wanted
    if not possible:
        raise FileNotFoundError("; ".join(dict.fromkeys(notes)) or f"{plan.reproduction.key} has nothing to train")
    for comparison in possible:
        compare(comparison, tell)
    return list(dict.fromkeys(notes))


# ---- results ---------------------------------------------------------------------------------------------------


def so_far(plan: Plan, notes: Sequence[str] = ()) -> dict[str, Any]:
    """What is finished, beside what the folder of the results has of this table by now."""
    if plan.results is not None:
        plan = replace(plan, earlier=read_earlier(plan.results, plan.reproduction.key, plan.scale))
    return summary(plan, collect(plan), notes)


def collect(plan: Plan) -> dict[str, dict[str, Any]]:
    """The cells of what is finished, in the paper's unit; those of the earlier result with what was added to them."""
    before = plan.earlier.get("ours", {})
    cells: dict[str, dict[str, Any]] = {name: dict(row) for name, row in before.items()}
    for column, methods, comparison in plan.comparisons():
        plateau = _plateau(comparison)
        for method in methods:
            spec = method.spec_at(plan.scale)
            rate, old = comparison.chosen(spec), before.get(method.name, {}).get(column.name)
            kept = old if comparison.known_seeds(spec, rate) else None  # not if another learning rate is better
            cell = joined(kept, _cell(comparison, spec, column, plateau))
            if cell is not None:
                bracket = {"rate": rate, "tried": _tried(comparison, spec, column)} if comparison.rates else {}
                cells.setdefault(method.name, {})[column.name] = {**cell, **bracket}
    add_averages(plan.table, cells)
    return cells


def _tried(comparison: Comparison, spec: str, column: Column) -> dict[str, float | None]:
    """Validation scores by learning rate; None where an earlier result has none, or it is no number."""
    scores = {rate: column.factor * result["valid"] for rate, result in comparison.tried(spec).items()}
    return {rate: score if math.isfinite(score) else None for rate, score in scores.items()}


def _plateau(comparison: Comparison) -> Any:
    """The plateau as `check` found it when the comparison began."""
    from subquad.tasks.guessing import Plateau

    path = comparison.out / "comparison.json"
    found = log.read_json(path).get("plateau") if path.exists() else None
    return None if found is None else Plateau(**found)


def _cell(comparison: Comparison, spec: str, column: Column, plateau: Any) -> dict[str, Any] | None:
    from subquad.tasks.guessing import left_at

    rate = comparison.chosen(spec)
    if comparison.rates and rate is None:
        return None
    new = [seed for seed in range(comparison.seeds) if seed not in comparison.known_seeds(spec, rate)]
    folders = {seed: comparison.folder(spec, seed, rate) for seed in new}
    results = {seed: log.read_result(folder) for seed, folder in folders.items()}
    found = {seed: score(result, column) for seed, result in results.items() if result is not None}
    scores = {seed: number for seed, number in found.items() if number is not None}
    if not scores:
        return None
    first = next(iter(scores))
    result, records = results[first], log.read(folders[first])
    assert result is not None  # it has a score
    about = {"metric": result["metric"], "larger_is_better": result["larger_is_better"]}
    left = [left_at(log.read(folders[seed]), plateau=plateau, **about) for seed in scores] if plateau else []
    numbers = list(scores.values())
    return {
        "mean": statistics.mean(numbers), "sd": statistics.stdev(numbers) if len(numbers) > 1 else None,
        "seeds": list(scores), "scores": numbers, "setting": setting(comparison),
        "rate": rate, "left_plateau": left, "steps": result["steps"], "parameters": result["parameters"],
        "step_seconds": round(result["step_seconds"], 4), "curve": curve(records, result["metric"], column.factor),
        **({"density": result["density"]} if result["density"] else {}),
    }  # fmt: skip


def score(result: dict[str, Any], column: Column) -> float | None:
    """A run's number in the unit of the paper."""
    if column.metric == "density":
        flat = [x for layer in result["density"] or () for x in layer]
        return column.factor * statistics.mean(flat) if flat else None
    found = result["test"].get(column.metric or result["metric"])
    return None if found is None else column.factor * found


def curve(records: list[dict[str, Any]], metric: str, factor: float) -> list[list[float]]:
    """[step, validation score], thinned out."""
    points = [[r["step"], round(factor * r["valid"][metric], 4)] for r in records if metric in r.get("valid", {})]
    return points[:: max(1, -(-len(points) // POINTS))]


def summary(plan: Plan, cells: dict[str, dict[str, Any]], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Ours beside the paper's, the order of both, every claim, and the verdict. It holds no path of this machine."""
    reproduction = plan.table
    judgements = verdict.judge(reproduction, cells)
    word, sentence = verdict.verdict(judgements)
    columns = {}
    for column in reproduction.columns:
        names, larger = [method.name for method in reproduction.methods], reproduction.larger(column)
        scale = column.scale(plan.scale)
        ours = {name: cells.get(name, {}).get(column.name, {}).get("mean") for name in names}
        theirs = {name: reproduction.number(name, column.name) for name in names}
        columns[column.name] = {
            "task": column.task, "recipe": scale.recipe, "settings": list(scale.settings),
            "larger_is_better": larger,
            "order": verdict.order(ours, larger=larger), "paper_order": verdict.order(theirs, larger=larger),
        }  # fmt: skip
    rates = dict.fromkeys((*plan.earlier.get("rates", ()), *plan.brackets))
    return {
        "key": reproduction.key, "place": reproduction.place, "title": reproduction.title, "scale": plan.scale,
        "seeds": max(plan.seeds, plan.earlier.get("seeds", 1)), "rates": list(rates), "versions": versions(),
        "differs": reproduction.differs if plan.scale == "small" else reproduction.differs_paper,
        "columns": columns,
        "methods": {method.name: _described(method, plan.scale) for method in reproduction.methods},
        "ours": cells,
        "paper": {name: list(row) for name, row in reproduction.numbers.items()},
        "paper_spreads": {name: list(row) for name, row in reproduction.spreads.items()},
        "claims": [
            {**asdict(each.claim), "column": each.column, "status": each.status, "detail": each.detail}
            for each in judgements
        ],
        "pairs": dict(verdict.pairs(reproduction, cells)),
        "verdict": word, "sentence": sentence, "notes": [*left_out(reproduction), *notes],
    }  # fmt: skip


def _described(method: Method, scale: str) -> dict[str, Any]:
    return {"spec": method.spec_at(scale), "settings": list(method.settings(scale)), "missing": absent(method)}


def write_result(folder: Path, result: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(result["key"], result["scale"])
    write_atomically(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return path
