"""Comparisons: the same task, the same budget, different attention.

Every run is a process of its own (its memory is its own, and a crash takes nothing with it) in a folder of its own;
several of them may run at a time. Finished ones are kept, interrupted ones resumed. `comparison.json` has the table.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from subquad.core.child import AGAIN, TOLD, command
from subquad.core.files import write_atomically
from subquad.core.options import split_spec
from subquad.core.spoken import again, argument, given
from subquad.tasks import task as make_task
from subquad.tasks.guessing import Plateau, find_plateau, guess, left_at
from subquad.training import log, speed
from subquad.training.children import Children, Here, shares
from subquad.training.lock import holder, locked, refusal
from subquad.training.processes import part_of_a_comparison
from subquad.training.rates import choose
from subquad.training.run import Interrupted, Run, check_specs, make_arguments, slug, train, versions, was
from subquad.training.run import clear as clear_run
from subquad.training.start import check_out


class Known(NamedTuple):
    """Runs of an attention that are known from elsewhere: its learning rate, if there was a choice, and their seeds;
    the rates that were tried for it, each with what `choose` asks for.
    """

    rate: str | None = None
    seeds: tuple[int, ...] = ()
    tried: Mapping[str, dict[str, Any]] = MappingProxyType({})


class Pending(NamedTuple):
    """A run that is yet to be trained."""

    attention: str
    seed: int
    rate: str | None

    def __str__(self) -> str:
        return f"{self.attention} · seed {self.seed}" + ("" if self.rate is None else f" · rate {self.rate}")


@dataclass
class Comparison:
    """What is compared; `attentions` are specs, each perhaps several separated by |, which the layers take in turn."""

    task: str
    attentions: list[str]
    out: Path
    recipe: str = "small"
    settings: tuple[str, ...] = ()
    seeds: int = 1
    data: Path | None = None
    command: list[str] = field(default_factory=lambda: sys.argv)
    rates: tuple[str, ...] = ()  # learning rates of which each attention gets its best; none: the recipe's
    guessing: dict[str, float] | None = None  # the score of guessing and its standard error, from `check`
    plateau: Plateau | None = None  # from `check`
    timing: dict[str, Any] | None = None  # what `speed.relative_costs` found
    timed: bool = True  # measure the relative cost of the attentions at the end
    inside: bool = False  # train in this process: no other one can import the task or a mechanism
    jobs: int = 1  # runs at a time
    children: Children = field(default_factory=Children)  # the processes of the runs
    environment: dict[str, str] = field(default_factory=dict)  # of these processes, beside this one's
    known: Mapping[str, Known] = field(default_factory=dict)  # by attention: what is not run again
    begin: Comparison | None = None  # every run begins with the encoder that this one has trained with its attention

    def described(self) -> dict[str, Any]:
        settings = make_task(self.task, self.recipe, self.settings).recipe.asdict()
        return {"task": self.task, "recipe": self.recipe, "settings": settings}

    def folder(self, attention: str, seed: int, rate: str | None = None) -> Path:
        own = self.out / slug(attention)
        return (own if rate is None else own / f"rate={rate}") / f"seed{seed}"

    def settings_of(self, attention: str, rate: str | None = None) -> tuple[str, ...]:
        """What a run changes of the recipe."""
        changes = [*self.settings]
        if self.begin is not None:
            changes.append(f"init={self.begin.folder(attention, 0, self.begin.chosen(attention))}")
        return (*changes, *([] if rate is None else [f"rate={rate}"]))

    def tried(self, attention: str) -> dict[str, dict[str, Any]]:
        """The results of the learning rates that have been tried, here or elsewhere."""
        found = {rate: log.read_result(self.folder(attention, 0, rate)) for rate in self.rates}
        here = {rate: result for rate, result in found.items() if result is not None}
        return {**self.known.get(attention, Known()).tried, **here}

    def chosen(self, attention: str) -> str | None:
        """The best of the learning rates that have been tried; None if there was no choice, or none came to an end."""
        return choose(self.tried(attention))

    def known_seeds(self, attention: str, rate: str | None) -> tuple[int, ...]:
        """The seeds that have been run elsewhere with this learning rate."""
        known = self.known.get(attention, Known())
        return known.seeds if known.rate == rate else ()


def check(comparison: Comparison) -> None:
    """What cannot work is refused before anything is trained or deleted: every attention is made once in small, the
    data are read, and the score of guessing is taken from them.
    """
    check_attentions(comparison)
    check_data(comparison)


def check_attentions(comparison: Comparison) -> None:
    """Every attention is made once in small."""
    task = make_task(comparison.task, comparison.recipe, comparison.settings, comparison.data)
    for attention in comparison.attentions:
        check_specs(task, attention.split("|"))
        make_arguments(Run(task, attention.split("|"), comparison.out))


def check_data(comparison: Comparison) -> None:
    """The data are read; the score of guessing and the plateau are taken from them."""
    task = make_task(comparison.task, comparison.recipe, comparison.settings, comparison.data)
    guessing = guess(task, task.load())
    comparison.guessing, comparison.plateau = asdict(guessing), find_plateau(task, guessing)


def prepare(comparison: Comparison, *, overwrite: bool) -> None:
    """The folder; a comparison goes on only as what it was (attentions and seeds may be added)."""
    path, wanted = comparison.out / "comparison.json", comparison.described()
    check_out(comparison.out)
    if process := holder(comparison.out):
        raise refusal(comparison.out, process)
    if (comparison.out / "suite.json").exists():
        raise ValueError(
            f"{comparison.out} already contains a comparison of several tasks: choose another {argument('out')}"
        )
    if overwrite and not path.exists() and (runs := _runs(comparison.out)):
        raise ValueError(
            f"{comparison.out} contains runs ({runs[0].relative_to(comparison.out)}) but no comparison.json: they are "
            f"not deleted by {given('overwrite')}; delete them yourself, or choose another {argument('out')}"
        )
    if path.exists() and overwrite:
        with locked(comparison.out):
            clear(comparison.out)
    if path.exists():
        before = log.read_json(path)
        recipe = make_task(comparison.task, comparison.recipe, comparison.settings).recipe
        flat = [{"task": x["task"], "recipe": x["recipe"]} for x in (before, wanted)]
        for key, value in wanted["settings"].items():
            flat[0][key], flat[1][key] = was(before["settings"], key, recipe), value
        for key in flat[1]:
            if flat[0][key] != flat[1][key]:
                raise ValueError(
                    f"{comparison.out} already contains a comparison with {key}={flat[0][key]!r}, not "
                    f"{flat[1][key]!r}: delete it with {given('overwrite')}, or choose another {argument('out')}"
                )
    comparison.out.mkdir(parents=True, exist_ok=True)
    write(comparison)


def clear(out: Path) -> None:
    """Delete what a comparison writes, its runs included, and nothing else that lies in the folder."""
    for run in _runs(out):
        with locked(run):
            clear_run(run)
        for folder in (run, run.parent, *([run.parent.parent] if run.parent.name.startswith("rate=") else [])):
            with contextlib.suppress(OSError):  # not empty: something of the user's
                folder.rmdir()
    for name in ("comparison.json", "report.html"):
        (out / name).unlink(missing_ok=True)


def _runs(out: Path) -> list[Path]:
    found = [*out.glob("*/seed*"), *out.glob("*/rate=*/seed*")]
    return sorted(run for run in found if (run / "run.json").exists())


def compare(comparison: Comparison, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Train what is not yet trained; returns what comparison.json holds. Ctrl-C leaves everything resumable."""
    with locked(comparison.out), tempfile.TemporaryDirectory() as told:
        comparison.environment |= {TOLD: told, AGAIN: again(), **shares(comparison.jobs)}
        run_all(comparison, tell)
        write(comparison)
        if comparison.timed:
            comparison.timing = measure_timing(comparison, tell)
        return write(comparison)


def run_all(comparison: Comparison, tell: Callable[[str], None]) -> None:
    """Every run that is pending, `jobs` of them at a time, each begun once."""
    one = run_inside if comparison.inside else run_one
    begun: set[Pending] = set()
    running: dict[Future, Pending] = {}
    children = comparison.children
    guarded = contextlib.nullcontext() if comparison.inside else children.guarded()
    pool = Here() if comparison.jobs == 1 else ThreadPoolExecutor(comparison.jobs)
    with guarded, pool:  # leaving the pool waits for the runs in it
        try:
            while not children.came:
                while len(running) < comparison.jobs and (run := next_run(comparison, begun, running.values())):
                    begun.add(run)
                    tell(f"{comparison.task} · {run}")
                    running[pool.submit(one, comparison, *run)] = run
                if not running:
                    return
                for finished in wait(running, return_when=FIRST_COMPLETED).done:
                    note(comparison, running.pop(finished), finished.result())
            raise KeyboardInterrupt
        except BaseException:
            if not children.came:
                children.send(signal.SIGTERM)  # the other runs save their state
            raise


def next_run(comparison: Comparison, begun: Collection[Pending], running: Collection[Pending]) -> Pending | None:
    """The first that can begin: a seed after the first waits until the learning rate of its attention is chosen."""
    trying = {run.attention for run in running if run.seed == 0 and comparison.rates}
    runs = (run for run in pending(comparison) if run not in begun and not (run.seed and run.attention in trying))
    return next(runs, None)


def note(comparison: Comparison, run: Pending, code: int) -> None:
    """The end of a run, in comparison.json."""
    if code == 130:
        raise KeyboardInterrupt
    reason = comparison.folder(*run) / "error.txt"
    if code and not reason.exists():  # killed, out of memory: it could not say why
        reason.write_text(f"ended with exit code {code}")
    write(comparison)


def measure_timing(comparison: Comparison, tell: Callable[[str], None]) -> dict[str, Any] | None:
    """Relative cost of the finished attentions, unless it is known already from a quiet machine."""
    found, known = rows(comparison), known_timing(comparison)
    folders = dict(speed.finished_runs(found))
    if len(folders) < 2 or found[0]["reference"] not in folders:
        return known
    if known is not None and known["busy"] is None and set(folders) <= set(known["costs"]):
        return known
    try:
        return speed.relative_costs(folders, found[0]["reference"], comparison.data, tell)
    except Exception as error:  # hours of training must not be lost to a measurement
        reason = f"relative cost could not be measured: {' '.join(str(error).split()) or type(error).__name__}"
        return {"reference": found[0]["reference"], "costs": {}, "busy": reason}


def known_timing(comparison: Comparison) -> dict[str, Any] | None:
    """What was measured in this process, or before it."""
    path = comparison.out / "comparison.json"
    if comparison.timing is None and path.exists():
        comparison.timing = log.read_json(path).get("timing")
    return comparison.timing


def pending(comparison: Comparison) -> Iterator[Pending]:
    """Seed by seed, so that an early look has every attention; the first seed tries the learning rates, and what it
    finds is asked for when the next one begins.
    """
    for seed in range(comparison.seeds):
        for attention in comparison.attentions:
            rates: tuple[str | None, ...] = comparison.rates or (None,)
            if comparison.rates and seed:
                rates = (comparison.chosen(attention),)
            elsewhere = comparison.known.get(attention, Known()).tried
            for rate in rates:
                nothing_chosen = bool(comparison.rates) and rate is None
                known = seed in comparison.known_seeds(attention, rate) or (seed == 0 and rate in elsewhere)
                if not (nothing_chosen or known) and log.read_result(comparison.folder(attention, seed, rate)) is None:
                    yield Pending(attention, seed, rate)


def run_one(comparison: Comparison, attention: str, seed: int, rate: str | None = None) -> int:
    """One training in its own process; its exit code, 130 if it was stopped."""
    folder = comparison.folder(attention, seed, rate)
    arguments = ["train", comparison.task, "--attention", attention]
    arguments += ["--recipe", comparison.recipe, "--seed", str(seed), "--out", str(folder)]
    arguments += ["--resume"] if (folder / "run.json").exists() else []
    for setting in comparison.settings_of(attention, rate):
        arguments += ["--set", setting]
    if comparison.data is not None:
        arguments += ["--data", str(comparison.data)]
    folder.mkdir(parents=True, exist_ok=True)
    if process := holder(folder):  # left over from a comparison that was killed
        raise refusal(folder, process)
    (folder / "error.txt").unlink(missing_ok=True)
    return comparison.children.run(command("subquad", *arguments), comparison.environment)


def run_inside(comparison: Comparison, attention: str, seed: int, rate: str | None = None) -> int:
    """One training in this process; 1 if it failed, 130 if it was stopped."""
    folder = comparison.folder(attention, seed, rate)
    try:
        settings = comparison.settings_of(attention, rate)
        task = make_task(comparison.task, comparison.recipe, settings, comparison.data, seed)
        run = Run(task, attention.split("|"), folder, comparison.recipe, seed, comparison.command)
        with part_of_a_comparison():
            train(run, resume=(folder / "run.json").exists())
    except Interrupted:
        return 130
    except Exception as error:  # the other attentions go on
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "error.txt").write_text(" ".join(str(error).split()) or type(error).__name__)
        return 1
    return 0


def write(comparison: Comparison) -> dict[str, Any]:
    """comparison.json as the runs stand now."""
    about: dict[str, Any] = {"command": shlex.join(comparison.command), "versions": versions()}
    about["data"] = None if comparison.data is None else str(comparison.data)
    about |= {"guessing": comparison.guessing, "timing": known_timing(comparison), "rates": list(comparison.rates)}
    about["plateau"] = None if comparison.plateau is None else asdict(comparison.plateau)
    whole = {**comparison.described(), **about, "seeds": comparison.seeds, "rows": rows(comparison)}
    write_atomically(comparison.out / "comparison.json", json.dumps(whole, indent=1))
    return whole


def rows(comparison: Comparison) -> list[dict[str, Any]]:
    """One row per attention, over the seeds that are finished."""
    found = [row(comparison, attention) for attention in comparison.attentions]
    names = [split_spec(each["attention"])[0] for each in found]
    reference = found[names.index("full")] if "full" in names else found[0]
    timing = known_timing(comparison) or {}
    measured = timing.get("costs", {}) if timing.get("reference") == reference["attention"] else {}
    for each in found:
        each["reference"] = reference["attention"]  # what relative times are relative to
        times = each["step_seconds"], reference["step_seconds"]
        each["relative_time"] = None if None in times else times[0] / times[1]
        each["relative_quartiles"] = None  # None: the time is that of training runs minutes apart
        if each["attention"] in measured and each["mean"] is not None:
            each["relative_quartiles"] = measured[each["attention"]]["ratio"]
            each["relative_time"] = each["relative_quartiles"][1]
    return found


def row(comparison: Comparison, attention: str) -> dict[str, Any]:
    tried = comparison.tried(attention)
    rate = choose(tried) or (comparison.rates[0] if comparison.rates else None)
    folders = [comparison.folder(attention, seed, rate) for seed in range(comparison.seeds)]
    finished = [(folder, result) for folder in folders if (result := log.read_result(folder)) is not None]
    results = [result for _, result in finished]
    errors = [(folder / "error.txt").read_text() for folder in folders if (folder / "error.txt").exists()]
    base: dict[str, Any] = {
        "attention": attention,
        "runs": [str(folder) for folder in folders],
        "error": errors[0] if errors else None,
    }
    base |= {"rate": rate if tried else None, "rates": {each: result["valid"] for each, result in tried.items()}}
    empty = dict.fromkeys(("metric", "larger_is_better", "mean", "sd", "step_seconds", "step_quartiles",
                           "total_seconds", "memory", "parameters", "connections", "density"))  # fmt: skip
    if not results:
        return {**base, **empty, "scores": [], "left_plateau": []}
    metric = results[0]["metric"]
    logs = [log.read(folder) for folder, _ in finished]
    scores = [result["test"][metric] for result in results]
    return {
        **base,
        "metric": metric,
        "larger_is_better": results[0]["larger_is_better"],
        "scores": scores,
        "mean": statistics.mean(scores),
        "sd": statistics.stdev(scores) if len(scores) > 1 else None,
        "left_plateau": steps_on_plateau(comparison, results[0], logs),
        "step_seconds": statistics.median(result["step_seconds"] for result in results),
        **speed.training_times(logs),
        "memory": max(result["memory"] for result in results),
        "parameters": results[0]["parameters"],
        "connections": statistics.mean(result["connections"] for result in results),
        "density": results[0]["density"],
    }


def steps_on_plateau(comparison: Comparison, result: dict[str, Any], logs: list[list[dict[str, Any]]]) -> list[Any]:
    """For each finished run the step at which it left the plateau; None for one that has not. Empty if nobody knows
    the plateau: it is found by `check`.
    """
    if comparison.plateau is None:
        return []
    about = {"metric": result["metric"], "larger_is_better": result["larger_is_better"]}
    return [left_at(records, plateau=comparison.plateau, **about) for records in logs]
