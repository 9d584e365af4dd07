"""What committed results say about quality: scores of `subquad compare` and of reproductions, docs/results/*.json.

A wheel has them as `subquad/results`; in a checkout they are read where they are kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import subquad
from subquad import tasks
from subquad.core.options import split_spec

CAUSAL = ("causal-lm",)  # heads of tasks that need a causal attention


class Score(NamedTuple):
    """The result of one trained attention."""

    task: str
    length: int
    causal: bool
    spec: str
    metric: str
    mean: float
    larger_is_better: bool
    source: str  # the file

    @property
    def name(self) -> str:
        return split_spec(self.spec)[0]


class Nearest(NamedTuple):
    """The task with results that is most like a wish, and its scores."""

    task: str
    length: int
    causal: bool
    metric: str
    scores: tuple[Score, ...]

    def of(self, spec: str) -> Score | None:
        """That of the same spec, else of the same mechanism with other options."""
        same = [score for score in self.scores if score.spec == spec]
        return next(iter(same or [score for score in self.scores if score.name == split_spec(spec)[0]]), None)


def results_folder() -> Path | None:
    """Inside the package where it is installed, docs/results in a checkout."""
    package = Path(subquad.__file__).parent
    return next(
        (path for path in (package / "results", package.parents[1] / "docs" / "results") if path.is_dir()), None
    )


def read_scores(folder: Path) -> list[Score]:
    """Everything with a task and a score; other results, such as speeds, have neither."""
    found: list[Score] = []
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error})") from None
        found += _comparison(result, path.stem) if "task" in result else _reproduction(result, path.stem)
    return found


def nearest(scores: Iterable[Score], n: int, causal: bool) -> Nearest | None:
    """The same direction first, then the length nearest to n."""
    groups: dict[tuple[str, int, str], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.task, score.length, score.source), []).append(score)
    if not groups:
        return None
    distance = lambda group: (group[0].causal != causal, abs(math.log(group[0].length / n)))  # noqa: E731
    chosen = min(groups.values(), key=distance)
    first = chosen[0]
    return Nearest(first.task, first.length, first.causal, first.metric, tuple(chosen))


def task_for(n: int, causal: bool, preferred: Nearest | None) -> str:
    """A task to compare attentions on: that with results if it has this direction, else one that needs no data and
    whose sequences are nearest to n.
    """
    if preferred is not None and preferred.causal == causal:
        return preferred.task
    free = [name for name in tasks.available() if not tasks.describe(name)["needs_data"]]
    fitting = [name for name in free if is_causal(name) == causal]
    return min(fitting or free, key=lambda name: abs(math.log(length_of(name, "small") / n)))


def is_causal(task: str) -> bool:
    return tasks.describe(task)["head"] in CAUSAL


@lru_cache(maxsize=64)
def length_of(task: str, recipe: str, settings: tuple[str, ...] = ()) -> int:
    recipes = tasks.task_class(task).recipes
    return recipes[recipe].changed(task, settings).length


def _known(task: str) -> bool:
    return task in tasks.available()


def _comparison(result: dict[str, Any], source: str) -> list[Score]:
    task = result["task"]
    if not _known(task):
        return []
    length = result.get("settings", {}).get("length") or length_of(task, result.get("recipe", "small"))
    larger = tasks.describe(task)["larger_is_better"]
    return [
        Score(task, length, is_causal(task), row["attention"], row["metric"], row["mean"], larger, source)
        for row in result["rows"]
        if row.get("mean") is not None
    ]


def _reproduction(result: dict[str, Any], source: str) -> list[Score]:
    found = []
    for name, column in result.get("columns", {}).items():
        task = column["task"]
        if not _known(task):
            continue
        length = length_of(task, column["recipe"], tuple(column["settings"]))
        metric, larger = tasks.describe(task)["metric"], column["larger_is_better"]
        for method, about in result["methods"].items():
            mean = result["ours"].get(method, {}).get(name, {}).get("mean")
            if mean is not None:
                found.append(Score(task, length, is_causal(task), about["spec"], metric, mean, larger, source))
    return found
