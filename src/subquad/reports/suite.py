"""The report of a suite: its tasks side by side, their average, and what it costs, as the papers have it.

The tasks of a suite are scored by an accuracy. `suite.json` holds the table, and report.html shows it and leads to
the reports of the tasks.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from subquad.core.files import write_atomically
from subquad.core.spoken import again, argument
from subquad.reports import charts, findings, report
from subquad.reports.findings import Row
from subquad.training.log import read_json

TEMPLATE = "suite_template.html"
SUITE, REPORT = "suite.json", "report.html"
Suite = dict[str, Any]  # what suite.json holds


def write_suite(out: Path, name: str, comparisons: Sequence[dict[str, Any]]) -> Suite:
    """Write suite.json and report.html beside the folders of the tasks; `comparisons` are what comparison.json of each
    task holds, finished or not.
    """
    suite = combine(name, comparisons)
    write_atomically(out / SUITE, json.dumps(suite, indent=1))
    reported = [each["task"] for each in comparisons if (out / each["task"] / REPORT).exists()]
    write_atomically(out / REPORT, render(suite, comparisons, reported))
    return suite


def write_standing(out: Path, name: str, folders: Sequence[Path]) -> Suite:
    """`write_suite` of comparisons as they stand in their folders."""
    return write_suite(out, name, [read_json(folder / "comparison.json") for folder in folders])


def check_folder(out: Path, *, overwrite: bool) -> None:
    """The report of a suite must not take the place of the report of a comparison in the same folder."""
    if (out / "comparison.json").exists():
        raise ValueError(f"{out} already contains the comparison of a task: choose another {argument('out')}")
    if overwrite:
        clear(out)


def clear(out: Path) -> None:
    """Delete what `write_suite` has written."""
    if (out / SUITE).exists():
        for name in (SUITE, REPORT):
            (out / name).unlink(missing_ok=True)


# ---- the numbers -------------------------------------------------------------------------------------------


def combine(name: str, comparisons: Sequence[dict[str, Any]]) -> Suite:
    """One row per attention, over the tasks."""
    first = comparisons[0]
    names = [each["task"] for each in comparisons]
    rows = [
        average(dict(zip(names, own, strict=True)), dict(zip(names, bases, strict=True)))
        for bases in [[findings.reference(each["rows"]) for each in comparisons]]
        for own in zip(*(each["rows"] for each in comparisons), strict=True)
    ]
    return {
        "suite": name,
        **{key: first[key] for key in ("recipe", "seeds", "command", "versions")},
        "rates": first.get("rates", []),
        "own_rates": [each["settings"]["rate"] for each in comparisons],
        "reference": findings.reference(first["rows"])["attention"],
        "tasks": [
            {"task": each["task"], "guessing": each["guessing"], "untrusted": untrusted(each)} for each in comparisons
        ],
        "guessing": guessing([each["guessing"] for each in comparisons]),
        "rows": rows,
    }


def untrusted(comparison: dict[str, Any]) -> str | None:
    """Why the times of a task say nothing; None as long as there are none to compare."""
    return findings.untrusted(comparison) if len(findings.finished(comparison["rows"])) > 1 else None


def guessing(known: Sequence[dict[str, float] | None]) -> dict[str, float] | None:
    """The average over the tasks, and its standard error."""
    scores = [each for each in known if each is not None]
    if len(scores) < len(known):
        return None
    error = math.hypot(*(each["error"] for each in scores)) / len(scores)
    return {"score": statistics.mean(each["score"] for each in scores), "error": error}


def average(own: dict[str, Row], bases: dict[str, Row]) -> Row:
    """An attention over the tasks, relative to the reference of each. An average over some of them would not be
    comparable: it is None until all are finished.
    """
    cells = {task: cell(row, bases[task]) for task, row in own.items()}
    done = len(findings.finished(list(cells.values()))) == len(cells)
    known = over_tasks(cells.values(), lambda each: each["relative_quartiles"])
    parameters = over_tasks(cells.values(), lambda each: each["parameters"])
    averages = [statistics.mean(scores) for scores in seeds_of(cells)] if done else []
    return {
        "attention": next(iter(own.values()))["attention"],
        "average": statistics.mean(each["mean"] for each in cells.values()) if done else None,
        "sd": statistics.stdev(averages) if len(averages) > 1 else None,
        "averages": averages,
        "relative_time": geometric(over_tasks(cells.values(), lambda each: each["relative_time"])),
        "relative_quartiles": [geometric(column) for column in zip(*known, strict=True)] or None,
        "relative_memory": geometric(over_tasks(cells.values(), lambda each: each["relative_memory"])),
        "parameters": round(statistics.mean(parameters)) if parameters else None,
        "tasks": cells,
    }


def cell(row: Row, base: Row) -> Row:
    """What the suite keeps of an attention on a task."""
    kept = ("rate", "rates", "mean", "sd", "scores", "left_plateau", "error", "relative_time", "relative_quartiles",
            "parameters")  # fmt: skip
    memory = row["memory"] / base["memory"] if row["memory"] and base["memory"] else None
    return {**{key: row[key] for key in kept}, "relative_memory": memory}


def seeds_of(cells: dict[str, Row]) -> list[tuple[float, ...]]:
    """The scores of each seed on all tasks; nothing if the tasks have different numbers of them."""
    scores = [each["scores"] for each in cells.values()]
    return list(zip(*scores, strict=True)) if len({len(each) for each in scores}) == 1 else []


def over_tasks(cells: Iterable[Row], of: Callable[[Row], Any]) -> list[Any]:
    """A number of every task; nothing if one is missing."""
    found = [of(each) for each in cells]
    return found if all(found) else []


def geometric(values: Sequence[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None


# ---- the words ---------------------------------------------------------------------------------------------


def judged(suite: Suite) -> list[Row]:
    """The averages, in per cent, as the rows that findings and charts are made of. A plateau lowers an average, but
    does not take its rank: it is marked where it is.
    """
    return [
        {
            "attention": row["attention"],
            "colour": i,
            "metric": "average",
            "larger_is_better": True,
            "mean": percent(row["average"]),
            "sd": percent(row["sd"]),
            "scores": [percent(each) for each in row["averages"]] or [percent(row["average"])],
            "memory": row["relative_memory"],
            **{key: row[key] for key in ("relative_time", "relative_quartiles", "parameters")},
        }
        for i, row in enumerate(suite["rows"])
    ]


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def find(suite: Suite) -> findings.Findings | None:
    chance = suite["guessing"] and {key: 100 * value for key, value in suite["guessing"].items()}
    return findings.find(judged(suite), chance, busy=busy(suite))


def headline(found: findings.Findings | None) -> Markup:
    if found is None:
        return Markup("No attention has finished all tasks yet.")
    if found.alone:
        who, value = findings.name(found.best), findings.number(found.best["mean"])
        return Markup("Only {} has finished all tasks so far, average {}.").format(who, value)
    return findings.headline(found)


def busy(suite: Suite) -> str | None:
    """Why the times are not to be trusted: each reason with its tasks."""
    reasons: dict[str, list[str]] = {}
    for each in suite["tasks"]:
        if each["untrusted"]:
            reasons.setdefault(each["untrusted"], []).append(each["task"])
    return "; ".join(f"{findings.listed(tasks)}: {reason}" for reason, tasks in reasons.items()) or None


def caution(suite: Suite) -> str:
    """How far the numbers can be trusted, and what to do about it."""
    cells = [each for row in suite["rows"] for each in row["tasks"].values()]
    done = findings.finished(cells)
    alone = sum(bool(findings.finished(list(row["tasks"].values()))) for row in suite["rows"]) < 2
    said = [*_unfinished(suite), findings.over_seeds(suite, done) if done else ""]
    said += [findings.over_rates(suite["rates"], suite["own_rates"], done, alone=alone), _on_plateau(suite)]
    if why := busy(suite):
        said.append(f"The times are not reliable ({why}). To measure them again, {again()} on a quiet machine.")
    return " ".join(filter(None, said))


def _unfinished(suite: Suite) -> list[str]:
    """Which attentions have no result, or not all, on which tasks."""
    lost = tasks_where(suite, lambda each: not findings.finished([each]) and (each["error"] or each["scores"]))
    waiting = tasks_where(suite, lambda each: not (findings.finished([each]) or each["error"] or each["scores"]))
    some = tasks_where(suite, lambda each: findings.finished([each]) and each["error"])
    said = {"failed on": lost, "not finished": waiting, "lost a seed on": some}
    everybody = len(suite["rows"])
    return [
        f"No attention has finished {findings.listed(tasks)} yet."
        if groups is waiting and len(who) == everybody > 1
        else f"{findings.listed(who)} {findings.has(who)} {what} {findings.listed(tasks)}."
        for what, groups in said.items()
        for tasks, who in groups.items()
    ]


def _on_plateau(suite: Suite) -> str:
    groups = tasks_where(suite, findings.stuck)
    who = "; ".join(f"{findings.listed(who)} on {findings.listed(tasks)}" for tasks, who in groups.items())
    return f"* A run is still on the plateau, no better than guessing: {who}." if who else ""


def tasks_where(suite: Suite, is_so: Callable[[Row], Any]) -> dict[tuple[str, ...], list[str]]:
    """Tasks where something is so, and the attentions that this holds for."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in suite["rows"]:
        if tasks := tuple(task for task, each in row["tasks"].items() if is_so(each)):
            groups.setdefault(tasks, []).append(row["attention"])
    return groups


# ---- the page ----------------------------------------------------------------------------------------------


def render(suite: Suite, comparisons: Sequence[dict[str, Any]], reported: Sequence[str]) -> str:
    """`reported` are the tasks that have a report to lead to."""
    rows, found, doubt = judged(suite), find(suite), busy(suite)
    page = {
        "title": f"{suite['suite']}: which attention wins, at what cost?",
        "suite": suite,
        "facts": facts(suite),
        "headline": headline(found),
        "about": "",
        "cards": findings.cards(rows, found),
        "caution": caution(suite),
        "columns": columns(suite, comparisons, reported),
        "guessing": chances(suite),
        "rows": rows,
        "failures": failures(suite),
        "names": charts.legend([(labelled(row), row["colour"]) for row in rows]),
        "costs": costs(suite),
        "tasks": [task_panel(each, each["task"] in reported) for each in comparisons],
        "colours": report.palette(len(rows)),
        "busy": doubt,
    }
    return report.fill(TEMPLATE, page)


def facts(suite: Suite) -> list[str]:
    seeds = suite["seeds"]
    return [f"recipe {suite['recipe']}", f"{len(suite['tasks'])} tasks", f"{seeds} seed{'' if seeds == 1 else 's'}"]


def columns(suite: Suite, comparisons: Sequence[dict[str, Any]], reported: Sequence[str]) -> list[report.Column]:
    """A column per task, the average, and the cost."""
    rows, doubt = judged(suite), busy(suite)
    made = [task_column(each, link=each["task"] in reported) for each in comparisons]
    mean = report.column(rows, "average", "mean", lambda row: f"{row['mean']:.2f}", mark=False)
    report.mark_winners(rows, mean, find(suite))
    for row, one in zip(rows, mean.cells, strict=True):
        one.note = "" if row["sd"] is None else f"± {row['sd']:.2f}"
    shown = partial(findings.relative, trusted=doubt is None)
    return [
        *made,
        mean,
        report.column(rows, "relative time", "relative_time", shown, mark=doubt is None),
        report.column(rows, "relative memory", "memory", times_memory, noise=report.MEMORY_NOISE),
        report.column(rows, "parameters", "parameters", lambda row: count(row["parameters"]), mark=False),
    ]


def chances(suite: Suite) -> list[str]:
    """What guessing scores on each task, and on average."""
    known = [*(each["guessing"] for each in suite["tasks"]), suite["guessing"]]
    return ["–" if each is None else f"{100 * each['score']:.2f}" for each in known]


def task_column(comparison: dict[str, Any], *, link: bool) -> report.Column:
    """The scores of a task in per cent; those that are level with the best are marked as in its own report."""
    rows, task = comparison["rows"], comparison["task"]
    made = report.column(rows, task, "mean", lambda row: f"{100 * row['mean']:.2f}", mark=False)
    made.link = f"{task}/{REPORT}" if link else ""
    found = findings.find([{**row, "colour": 0} for row in rows], comparison["guessing"])
    report.mark_winners(rows, made, found)
    for row, one in zip(rows, made.cells, strict=True):
        one.text += " *" if findings.stuck(row) else ""
        one.note = "" if row["sd"] is None else f"± {100 * row['sd']:.2f}"
        if row["mean"] is None:
            one.note = "failed" if row["error"] else "not finished"
    return made


def times_memory(row: Row) -> str:
    return f"× {row['memory']:.2f}"


def labelled(row: Row) -> str:
    """The name of an attention with the number of its parameters."""
    return row["attention"] + (f", {count(row['parameters'])} parameters" if row["parameters"] else "")


def count(parameters: int) -> str:
    """229k: they differ from task to task, so more digits of the mean say nothing."""
    return charts.short(float(f"{parameters:.3g}"))


def failures(suite: Suite) -> list[tuple[int, str, str]]:
    """The colour of an attention, where it failed, and why."""
    return [
        (colour, f"{row['attention']} on {task}" + (", one seed" if each["scores"] else ""), each["error"])
        for colour, row in enumerate(suite["rows"])
        for task, each in row["tasks"].items()
        if each["error"]
    ]


def costs(suite: Suite) -> list[dict[str, Any]]:
    """The picture of Composite Slice's figure 2, and its two costs as bars."""
    rows, doubt = judged(suite), busy(suite)
    base = suite["reference"]
    times, dots = report.time_bars(rows, busy=doubt is not None), report.circles(rows, labelled)
    memory = [charts.Bar(row["attention"], row["colour"], row["memory"], times_memory(row)) for row in rows
              if row["memory"]]  # fmt: skip
    area = "; the area of a circle is the memory" if dots and all(dot.size for dot in dots) else ""
    note = f"{base} = 1, geometric mean over the tasks" + ("; not to be trusted, see above" if doubt else "")
    panels = [
        {
            "title": "Average against time",
            "note": f"time per step: {note}{area}",
            "chart": report.trade(dots, "average accuracy, per cent", height=report.beside(times)),
        },
        {
            "title": "Time per step",
            "note": note,
            "chart": charts.bar_chart(times, label="time per step", marked=1.0) if times else "",
        },
        {
            "title": "Peak memory",
            "note": f"of training, {base} = 1, geometric mean over the tasks",
            "chart": charts.bar_chart(memory, label="peak memory", marked=1.0) if memory else "",
        },
    ]
    return [{**each, "missing": "Drawn once an attention has finished all tasks."} for each in panels]


def task_panel(comparison: dict[str, Any], reported: bool) -> dict[str, Any]:
    """The finding of a task, and its score against time."""
    rows = [{**row, "colour": i} for i, row in enumerate(comparison["rows"])]
    doubt = untrusted(comparison)
    found = findings.find(rows, comparison["guessing"], busy=findings.untrusted(comparison))
    metric = found.metric if found else "accuracy"
    return {
        "title": comparison["task"],
        "link": f"{comparison['task']}/{REPORT}" if reported else "",
        "note": findings.headline(found),
        "doubt": "" if doubt is None else f"The times are not to be trusted: {doubt}.",
        "chart": report.trade(report.circles(rows), metric),
    }
