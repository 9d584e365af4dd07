"""Training and comparing from Python: `subquad.train` and `subquad.compare`, as the commands of these names do it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.attention.registry import check_name, entry_of
from subquad.core import child
from subquad.core.options import split_list, split_spec
from subquad.core.spoken import again
from subquad.tasks import SUITES, as_texts, check_data, check_mechanisms, check_settings, task_class
from subquad.training.rates import parse_rates
from subquad.training.start import check_out, check_start, slug

if TYPE_CHECKING:
    from rich.table import Table

    from subquad.tasks.base import Task
    from subquad.training.compare import Comparison


@dataclass(frozen=True, repr=False)
class Trained:
    """A finished training run."""

    task: str
    attention: list[str]  # one spec, or several that the layers take in turn
    metric: str  # of the task, such as "accuracy"
    score: float  # the metric on the test set, with the best checkpoint
    test: dict[str, float]  # all numbers of the test
    valid: float | None  # the best metric on the validation set
    steps: int
    step_seconds: float  # of a training step, median
    memory: int  # bytes of training beyond the loaded program
    parameters: int
    connections: float  # scores computed per head and layer
    folder: Path  # log.jsonl, checkpoints, the model: docs/training.md
    details: dict[str, Any]  # everything that result.json has

    def load(self) -> tuple[Any, Task]:
        """The model, in evaluation mode, and its task."""
        from subquad.training.use import load

        return load(self.folder)

    def __str__(self) -> str:
        return f"{self.task}, {'|'.join(self.attention)}: {self.metric} {self.score:.4f} after {self.steps} steps"

    __repr__ = __str__  # what a notebook shows; `details` has everything


@dataclass(frozen=True, repr=False)
class Compared:
    """A finished comparison. `print` shows its table; `compared["full"]` is the row of an attention."""

    task: str
    metric: str
    rows: list[dict[str, Any]]  # of each attention: scores, mean, sd, relative_time, memory, error …
    guessing: float | None  # the score of guessing
    headline: str  # which attention wins, at what cost
    caution: str  # how far the numbers can be trusted
    folder: Path  # one folder per run, and comparison.json
    report: Path  # the page to look at
    details: dict[str, Any]  # everything that comparison.json has

    def __getitem__(self, attention: str) -> dict[str, Any]:
        """The row of an attention, by its spec."""
        for row in self.rows:
            if row["attention"] == attention:
                return row
        raise KeyError(f"{attention!r} was not compared: {', '.join(row['attention'] for row in self.rows)}")

    def table(self) -> Table:
        """What a terminal shows."""
        from subquad.reports import findings
        from subquad.reports.scores import table

        return table(self.rows, self.details.get("guessing"), trusted=findings.untrusted(self.details) is None)

    def __str__(self) -> str:
        from rich.console import Console

        from subquad.core.console import WIDE

        console = Console(width=WIDE, highlight=False, markup=False, emoji=False, color_system=None)
        with console.capture() as text:
            console.print(self.table())
        lines = [line.rstrip() for line in text.get().splitlines()]
        return "\n".join([*lines, self.headline, self.caution, f"report: {self.report}"])

    def __repr__(self) -> str:
        return str(self)  # what a notebook shows; `details` has everything


@dataclass(frozen=True, repr=False)
class ComparedSuite(Compared):
    """The finished comparisons of a group of tasks. `print` shows the papers' table, `compared["full"]` is the row of
    an attention with its average, and `compared.tasks["listops"]` the comparison of a task.
    """

    tasks: dict[str, Compared]

    def table(self) -> Table:
        from subquad.reports.scores import suite_table

        return suite_table(self.details)


def train(
    task: str,
    attention: str | Sequence[str] = "full",
    *,
    out: str | Path | None = None,
    recipe: str = "small",
    seed: int = 0,
    data: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    **settings: Any,
) -> Trained:
    """Train one model on a task and test it, as `subquad train` does.

        run = subquad.train("needle", "combiner-fixed", steps=300)
        run.score                                       # on the test set
        model, task = run.load()

    The best checkpoint is the one with the best validation metric; the test set is read once, with that one.

    Args:
        task: the name of a task; `subquad.tasks.available()` has them all.
        attention: a spec, or a list of specs, which the layers take in turn.
        out: the folder of the run; None = out/train/TASK/ATTENTION/seedN.
        recipe: the name of a recipe: "small" takes minutes, "paper" is the setting of the paper.
        seed: of the data, the model and the order of the examples.
        data: the folder of data sets; None = $SUBQUAD_DATA, or ./data.
        resume: continue the run in the folder.
        overwrite: delete the run in the folder and start again.
        settings: of the recipe, such as steps=300 or rate=1e-3; `subquad tasks TASK` shows them all.
    """
    specs = attention.split("|") if isinstance(attention, str) else attention
    specs = [spec.strip() for spec in _texts("attention", specs, "combiner-fixed")]
    texts = _check(task, specs, recipe, data, settings)
    where = Path("out/train") / task / slug("+".join(specs)) / f"seed{seed}" if out is None else _path("out", out)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer ≥ 0, not {seed!r}")
    check_start(where, resume=resume, overwrite=overwrite)
    from subquad.tasks import task as make_task
    from subquad.training import run as runs

    made = make_task(task, recipe, texts, _path("data", data), seed)
    command = ["subquad", "train", task, "--attention", "|".join(specs), "--recipe", recipe, "--seed", str(seed)]
    run = runs.Run(made, specs, where, recipe, seed, command=[*command, *_flags(texts, where, data)])
    found = runs.train(run, resume=resume, overwrite=overwrite)
    names = ("task", "attention", "metric", "test", "valid", "steps", "step_seconds", "memory", "parameters",
             "connections")  # fmt: skip
    score = found["test"][found["metric"]]
    return Trained(**{name: found[name] for name in names}, score=score, folder=where, details=found)


def compare(
    task: str,
    attentions: str | Sequence[str],
    *,
    seeds: int = 1,
    out: str | Path | None = None,
    recipe: str = "small",
    data: str | Path | None = None,
    rates: Sequence[float] = (),
    jobs: int = 1,
    overwrite: bool = False,
    **settings: Any,
) -> Compared:
    """Train each attention under the same budget and write report.html and comparison.json, as `subquad compare` does.

        compared = subquad.compare("needle", ["full", "combiner-fixed"], seeds=3, length=2048)
        print(compared)                                 # the table
        compared["combiner-fixed"]["mean"]              # over the seeds
        subquad.compare("lra", ["full", "sbm"]).tasks["text"]     # the papers' table, and one of its five tasks

    The same call again resumes it, or adds attentions and seeds. Every run is a process of its own, except with tasks
    and mechanisms that a script or a notebook defines, which no other process can import.

    Args:
        task: the name of a task; `subquad.tasks.available()` has them all. Or lra: the five tasks of the Long Range
            Arena, each in a folder of its own, and their average (a `ComparedSuite`).
        attentions: specs, each perhaps several separated by |, which the layers take in turn.
        seeds: the number of runs of each attention.
        out: the folder of the comparison; None = out/compare/TASK.
        recipe: the name of a recipe.
        data: the folder of data sets; None = $SUBQUAD_DATA, or ./data.
        rates: learning rates of which each attention gets its best on validation; none = that of the recipe.
        jobs: the number of runs at a time, each with its share of the cores.
        overwrite: delete the comparison in the folder and start again.
        settings: of the recipe, such as steps=300; `subquad tasks TASK` shows them all.
    """
    _check_count("seeds", seeds, "the number of runs of each attention")
    _check_count("jobs", jobs, "the number of runs at a time")
    if "seed" in settings:
        raise TypeError("compare has no argument seed: `seeds` is the number of runs of each attention, 0, 1, 2 …")
    names = SUITES.get(task, (task,))
    specs = split_list(",".join(_texts("attentions", attentions, "full", "combiner-fixed")))
    singles = [one for spec in specs for one in spec.split("|")]
    texts, *_ = [_check(name, singles, recipe, data, settings) for name in names]
    bracket = _bracket(rates)
    where = Path("out/compare") / task if out is None else _path("out", out)
    check_out(where)
    from subquad.reports import suite
    from subquad.training import compare as comparing

    command = ["subquad", "compare", task, "--attention", ",".join(specs), "--seeds", str(seeds), "--recipe", recipe]
    command += ["--rates", ",".join(bracket)] if bracket else []
    command += ["--jobs", str(jobs)] if jobs > 1 else []
    command += _flags(texts, where, data)
    comparisons = [
        comparing.Comparison(
            name, specs, where / name if task in SUITES else where, recipe, texts, seeds, _path("data", data), command,
            bracket, jobs=jobs,
        )
        for name in names
    ]  # fmt: skip
    for each in comparisons:
        _reach(each)
        comparing.check(each)
    if task in SUITES:
        suite.check_folder(where, overwrite=overwrite)
    for each in comparisons:
        comparing.prepare(each, overwrite=overwrite)
    return _finish_suite(task, where, comparisons) if task in SUITES else _finish(comparisons[0])


def _finish_suite(name: str, folder: Path, comparisons: Sequence[Comparison]) -> ComparedSuite:
    """Task by task; what they have in common is reported, also when stopped on the way."""
    from subquad.reports import suite

    try:
        done = {each.task: _finish(each) for each in comparisons}
    finally:
        found = suite.write_standing(folder, name, [each.out for each in comparisons])
    guessing = None if found["guessing"] is None else found["guessing"]["score"]
    return ComparedSuite(
        name, "average", found["rows"], guessing, suite.headline(suite.find(found)).striptags(), suite.caution(found),
        folder, folder / suite.REPORT, found, done,
    )  # fmt: skip


def _finish(comparison: Comparison) -> Compared:
    """Train, and report also when stopped on the way."""
    from subquad.core.console import err
    from subquad.reports import findings
    from subquad.reports.report import write_report
    from subquad.training import compare as comparing

    report = comparison.out / "report.html"
    title = f"{comparison.task}: which attention wins, at what cost?"
    try:
        result = comparing.compare(comparison, lambda text: err().print(text, style="bold", soft_wrap=True))
    except KeyboardInterrupt:
        write_report(report, comparing.write(comparison), title=title)
        err().print(f"stopped; {again()} to resume", soft_wrap=True)
        raise
    write_report(report, result, title=title)
    busy, rows = findings.untrusted(result), result["rows"]
    found = findings.find([{**row, "colour": 0} for row in rows], result["guessing"], busy=busy)
    headline = "" if found is None else findings.headline(found).striptags()
    guessing = None if result["guessing"] is None else result["guessing"]["score"]
    return Compared(
        comparison.task, task_class(comparison.task).metric, rows, guessing, headline, findings.caution(result),
        comparison.out, report, result,
    )  # fmt: skip


def _check(task: str, specs: list[str], recipe: str, data: Any, settings: dict[str, Any]) -> tuple[str, ...]:
    """The settings as texts. What is wrong is refused here, before anything is trained or written."""
    for module in ("transformers", "accelerate", "rich", "jinja2"):
        if find_spec(module) is None:
            raise ModuleNotFoundError(f'training needs {module}: pip install "subquad[train]"', name=module)
    for spec in specs:
        check_name(spec)
    texts = as_texts(settings)
    check_settings(task, texts, recipe)
    check_mechanisms(task, specs, texts, recipe)
    check_data(task, _path("data", data), texts, recipe)
    return texts


def _check_count(name: str, count: Any, what: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} must be {what}, an integer ≥ 1, not {count!r}")


def _bracket(rates: Any) -> tuple[str, ...]:
    """Learning rates as texts."""
    if isinstance(rates, str) or not isinstance(rates, Iterable):
        raise TypeError(f"rates must be a list of learning rates, such as [3e-3, 1e-3], not {rates!r}")
    texts = ",".join(map(str, rates))
    return parse_rates(texts) if texts else ()


def _shown(value: Any) -> str:
    """A value inside one line: of an object whose text is longer, such as a module, its type."""
    text = repr(value)
    return text if len(text) < 80 and "\n" not in text else type(value).__name__


def _texts(name: str, value: Any, *example: str) -> list[str]:
    """A list of specs; a text counts as a list of one."""
    found = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else []
    if not found or not all(isinstance(each, str) for each in found):
        raise TypeError(f"{name} must be a spec or a list of specs, such as {list(example)}, not {_shown(value)}")
    return found


def _path(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, (str, Path)):
        raise TypeError(f"{name} must be a path, not {value!r}")
    return None if value is None else Path(value)


def _flags(texts: Sequence[str], out: Path, data: Any) -> list[str]:
    """The rest of the command that does the same, which a report shows."""
    settings = [word for text in texts for word in ("--set", text)]
    return [*settings, "--out", str(out), *([] if data is None else ["--data", str(data)])]


def _reach(comparison: Comparison) -> None:
    """Let the processes of a comparison find the modules of its task and mechanisms; what a script or a notebook
    defines is trained in this process, one run at a time.
    """
    names = [split_spec(one)[0] for spec in comparison.attentions for one in spec.split("|")]
    classes = [task_class(comparison.task), *(each for each in map(entry_of, names) if not isinstance(each, str))]
    modules = {each.__module__ for each in classes if not each.__module__.startswith("subquad.")}
    comparison.inside = any(getattr(sys.modules.get(module), "__spec__", None) is None for module in modules)
    if comparison.inside and comparison.jobs > 1:
        raise ValueError(
            f"jobs must be 1 for a task or a mechanism that a script or a notebook defines, not {comparison.jobs}: it "
            "is trained in this process; put it in a module of its own to train several runs at a time"
        )
    if modules:
        known = [*filter(None, os.environ.get(child.IMPORTS, "").split(",")), *sorted(modules)]
        paths = child.paths(working_folder=True)
        comparison.environment = {child.IMPORTS: ",".join(dict.fromkeys(known)), "PYTHONPATH": paths}
