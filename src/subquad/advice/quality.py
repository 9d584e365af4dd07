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
from subquad.attention.registry import check_direction
from subquad.core.options import split_spec

CAUSAL = ("causal-lm",)  # heads of tasks that need a causal attention
SHARES = ("accuracy", "f1", "matthews", "pearson")  # at most 1, and per cent in the tables of many papers
OTHER_WAY = 16  # results of the other direction say as little as those of a length that many times as far away
TRAINED = 2**14  # a longer comparison is none of minutes


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
    layers: int | None = None  # of the model

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
    layers: int | None = None  # of all these models

    def of(self, spec: str) -> Score | None:
        """That of the same spec, else the best of the same mechanism with other options."""
        same = [score for score in self.scores if score.spec == spec]
        found = same or [score for score in self.scores if score.name == split_spec(spec)[0]]
        return max(found, key=lambda score: score.mean if score.larger_is_better else -score.mean, default=None)


class Trial(NamedTuple):
    """What to compare mechanisms on."""

    task: str
    settings: tuple[str, ...] = ()
    remark: str | None = None  # how it differs from the wish, in sentences


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
    """The length nearest to n, where the same direction counts as much as a factor of `OTHER_WAY`. Where models of
    several depths were trained, the deepest: scores of different depths cannot be compared.
    """
    groups: dict[tuple[str, int, str], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.task, score.length, score.source), []).append(score)
    if not groups:
        return None
    other = math.log(OTHER_WAY)
    distance = lambda group: abs(math.log(group[0].length / n)) + other * (group[0].causal != causal)  # noqa: E731
    chosen = min(groups.values(), key=distance)
    deepest = max(score.layers or 0 for score in chosen)
    chosen = [score for score in chosen if (score.layers or 0) == deepest]
    first = chosen[0]
    return Nearest(first.task, first.length, first.causal, first.metric, tuple(chosen), first.layers)


def trial_for(n: int, causal: bool, specs: Iterable[str] = ()) -> Trial:
    """A task that needs no data, with sequences of about n tokens as far as that can be trained in minutes."""
    if causal and n <= 4 * length_of("copying-causal", "small"):
        return Trial("copying-causal", (f"length={max(4, n - n % 2)}",))
    shortest = 1024
    if not causal and n <= shortest // 2:
        free = [name for name in tasks.available() if not tasks.describe(name)["needs_data"] and not is_causal(name)]
        return Trial(min(free, key=lambda name: abs(math.log(length_of(name, "small") / n))))
    length = min(max(round(n / 16) * 16, shortest), TRAINED)  # needle: whole sentences
    less = f"The command below has {length:,} tokens, as {n:,} would not be trained in minutes."
    shorter = less if n > TRAINED else None
    if not causal:
        return Trial("needle", (f"length={length}",), shorter)
    own = f"lm-bytes --set length={length} is causal, but needs data."
    if not all(_has_way(spec, causal=False) for spec in specs):
        return Trial("copying-causal", (), f"No generated causal task is longer than copying-causal. {own}")
    long = f"No generated causal task is this long, so the command below uses needle, which is bidirectional. {own}"
    return Trial("needle", (f"length={length}",), " ".join(filter(None, (shorter, long))))


def _has_way(spec: str, *, causal: bool) -> bool:
    try:
        check_direction(spec, causal)
    except ValueError:
        return False
    return True


def is_causal(task: str) -> bool:
    return tasks.describe(task)["head"] in CAUSAL


def length_of(task: str, recipe: str, settings: tuple[str, ...] = ()) -> int:
    return _recipe(task, recipe, settings).length


@lru_cache(maxsize=64)
def _recipe(task: str, recipe: str, settings: tuple[str, ...]) -> Any:
    return tasks.task_class(task).recipes[recipe].changed(task, settings)


def _known(task: str) -> bool:
    return task in tasks.available()


def _comparison(result: dict[str, Any], source: str) -> list[Score]:
    task = result["task"]
    if not _known(task):
        return []
    usual, own = _recipe(task, result.get("recipe", "small"), ()), result.get("settings", {})
    length, layers = own.get("length") or usual.length, own.get("layers") or usual.layers
    larger = tasks.describe(task)["larger_is_better"]
    return [
        Score(task, length, is_causal(task), row["attention"], row["metric"], row["mean"], larger, source, layers)
        for row in result["rows"]
        if row.get("mean") is not None
    ]


def _reproduction(result: dict[str, Any], source: str) -> list[Score]:
    found = []
    for name, column in result.get("columns", {}).items():
        task = column["task"]
        if not _known(task):
            continue
        recipe = _recipe(task, column["recipe"], tuple(column["settings"]))
        metric, larger = tasks.describe(task)["metric"], column["larger_is_better"]
        means = {method: result["ours"].get(method, {}).get(name, {}).get("mean") for method in result["methods"]}
        known = {method: mean for method, mean in means.items() if mean is not None}
        unit = 100 if metric in SHARES and any(mean > 1 for mean in known.values()) else 1  # per cent, as in the paper
        for method, mean in known.items():
            spec = result["methods"][method]["spec"]
            score = (spec, metric, mean / unit, larger, source, recipe.layers)
            found.append(Score(task, recipe.length, is_causal(task), *score))
    return found
