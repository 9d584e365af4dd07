"""The report of a comparison: one HTML page that needs nothing else, to read, to print and to send.

The page states the finding, shows the numbers, the curves and the attention, and says how to get them again. What is
missing (a log, a model, a run that failed) is said in its place: a report never fails for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any

import jinja2

from subquad.core.files import write_atomically
from subquad.core.options import fields
from subquad.plots import COLOURS, KINDS, LINES, rgb
from subquad.reports import charts, curves, findings, pictures
from subquad.reports.findings import Row
from subquad.tasks import describe, task_class

TEMPLATE = "report_template.html"


def write_report(path: Path, comparison: dict[str, Any], *, title: str) -> Path:
    """Write the page of a comparison (what comparison.json holds) to `path`."""
    write_atomically(path, render(comparison, title=title))
    return path


def render(comparison: dict[str, Any], *, title: str) -> str:
    rows = [{**row, "colour": i} for i, row in enumerate(comparison["rows"])]
    busy = findings.untrusted(comparison)
    found = findings.find(rows, comparison.get("guessing"), busy=busy)
    metric = found.metric if found else attempt(lambda: task_class(comparison["task"]).metric, "metric")[0]
    histories = curves.read_histories(rows)
    page = {
        "title": title,
        "comparison": comparison,
        "facts": facts(comparison, rows),
        "headline": findings.headline(found),
        "cards": findings.cards(rows, found),
        "caution": findings.caution(comparison),
        "about": about(comparison, found),
        "guessing": comparison.get("guessing") and findings.number(comparison["guessing"]["score"]),
        "legend": charts.legend([(one.name, one.colour) for one in histories if one.seeds]),
        "columns": columns(rows, metric, found, busy=busy is not None),
        "names": charts.legend([(row["attention"], row["colour"]) for row in findings.finished(rows)]),
        "rows": rows,
        "costs": costs(rows, metric, busy=busy is not None),
        "curves": curves.draw_curves(histories, metric),
        "densities": densities(rows, histories),
        "attentions": attentions(comparison, rows),
        "kinds": list(zip(COLOURS[1:], KINDS[1:], strict=True)),
        "settings": settings(comparison),
        "colours": palette(len(rows)),
        "larger": found.larger if found else None,
        "reference": findings.reference(rows)["attention"] if rows else "–",
        "busy": busy,
        "side_by_side": comparison.get("timing") is not None,
    }
    return fill(TEMPLATE, page)


def fill(template: str, page: dict[str, Any]) -> str:
    """A page from its template, which lies beside this module with those that it takes pieces from."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=jinja2.FunctionLoader(lambda name: files(__package__).joinpath(name).read_text(encoding="utf-8")),
    )  # fmt: skip
    environment.filters["breakable"] = charts.breakable
    return environment.get_template(template).render(page)


def facts(comparison: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """The line above the headline."""
    known = comparison["settings"]
    seeds = max((len(row["runs"]) for row in rows), default=0)
    found = [f"recipe {comparison['recipe']}"]
    found += [f"{key} {known[key]:,}" for key in ("length", "steps") if isinstance(known.get(key), int)]
    return [*found, f"{seeds} seed{'' if seeds == 1 else 's'}"]


def about(comparison: dict[str, Any], found: findings.Findings | None) -> str:
    """The task in one sentence, and what guessing scores."""
    title, _ = attempt(lambda: describe(comparison["task"])["title"], "")
    text = f"The task: {title.rstrip('.')}. " if title else ""
    if found is not None and found.guessing is not None:
        better = "above" if found.larger else "below"
        chance = findings.number(found.guessing, found.best["mean"])
        text += (
            f"Guessing, the most frequent answer regardless of the input, has {found.metric} {chance}: "
            f"only an attention that is clearly {better} it has learned something."
        )
    return text.strip()


def palette(count: int) -> list[tuple[str, str]]:
    """For each attention its colour on white, and a lighter one on black; after the last the first comes again."""
    chosen = [LINES[i % len(LINES)] for i in range(count)]
    light = [0.62 * rgb(colour) + 0.38 for colour in chosen]
    return [
        (colour, "#" + "".join(f"{round(255 * part):02x}" for part in pale))
        for colour, pale in zip(chosen, light, strict=True)
    ]


# ---- the table ---------------------------------------------------------------------------------------------


def mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"


MEMORY_NOISE = 0.05  # peaks of two runs of the same model differ by so much


@dataclass
class Cell:
    """A number of the table; `bar` is the length of its bar in per cent."""

    value: float | None
    text: str = "–"
    note: str = ""
    bar: float | None = None
    best: bool = False


@dataclass
class Column:
    title: str
    cells: list[Cell]
    link: str = ""


def scored(row: Row) -> str:
    """The metric, with the learning rate it was reached at, and a mark if the plateau was never left."""
    rate = f" at rate {row['rate']}" if row.get("rate") else ""
    return findings.score(row) + rate + (" (on the plateau)" if findings.stuck(row) else "")


def columns(rows: Sequence[Row], metric: str, found: findings.Findings | None, *, busy: bool = False) -> list[Column]:
    """The table, column by column. Of the metric all that are level with the best are marked, if there is a winner; of
    the time none if times are not to be trusted.
    """
    shown = partial(findings.relative, trusted=not busy)
    made = [
        column(rows, metric, "mean", scored, mark=False),
        column(rows, "relative time", "relative_time", shown, mark=not busy),
        column(rows, "training time", "total_seconds", lambda row: duration(row["total_seconds"]), mark=False),
        column(rows, "peak memory", "memory", lambda row: mebibytes(row["memory"]), noise=MEMORY_NOISE),
        column(rows, "parameters", "parameters", lambda row: f"{row['parameters']:,}"),
        column(rows, "connections", "connections", lambda row: f"{row['connections']:,.0f}"),
    ]
    mark_winners(rows, made[0], found)
    slowest = max((cell.value for cell in made[1].cells if cell.value), default=1.0)
    for row, score, time, total in zip(rows, *(each.cells for each in made[:3]), strict=True):
        if len(row["scores"]) > 1:
            score.note = " · ".join(findings.number(value, row["mean"]) for value in row["scores"])
        if row.get("relative_quartiles"):
            low, _, high = row["relative_quartiles"]
            time.note = f"quartiles {low:.2f} to {high:.2f}"
        if row.get("step_quartiles"):
            low, _, high = (milliseconds(seconds) for seconds in row["step_quartiles"])
            total.note = f"{low} to {high} a step"
        if time.value:
            time.bar = 100 * time.value / slowest
    return made


def mark_winners(rows: Sequence[Row], scores: Column, found: findings.Findings | None) -> None:
    """All that are level with the best, if there is a winner and not everybody is."""
    winners = [found.best, *found.level] if found is not None and found.has_winner else []
    names = [row["attention"] for row in winners]
    for row, cell in zip(rows, scores.cells, strict=True):
        cell.best = len(names) < len(rows) and row["attention"] in names


def column(
    rows: Sequence[Row], title: str, key: str, show: Callable[[Row], str], *, mark: bool = True, noise: float = 0.0
) -> Column:
    """Cells of one number; the smallest are marked, unless most are. What looks equal or is within `noise` is equal."""
    cells = [Cell(row.get(key)) for row in rows]
    for cell, row in zip(cells, rows, strict=True):
        cell.text = cell.text if cell.value is None else show(row)
    known = [(cell.value, cell) for cell in cells if cell.value is not None and math.isfinite(cell.value)]
    if known and mark:
        least, best = min(known, key=lambda pair: pair[0])
        marked = [cell for value, cell in known if cell.text == best.text or value <= (1 + noise) * least]
        for cell in marked if 2 * len(marked) <= len(known) else ():
            cell.best = True
    return Column(title, cells)


def duration(seconds: float) -> str:
    """8 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2f} ms"


# ---- charts ------------------------------------------------------------------------------------------------


def costs(rows: Sequence[Row], metric: str, *, busy: bool = False) -> list[dict[str, Any]]:
    """The trade between metric and time; time and memory as bars. Only what is known is drawn."""
    doubt = "; not to be trusted, see above" if busy else ""
    times = time_bars(rows, busy=busy)
    memory = [
        charts.Bar(row["attention"], row["colour"], row["memory"], mebibytes(row["memory"]))
        for row in rows
        if row.get("memory") is not None
    ]
    base, dots = findings.reference(rows)["attention"] if rows else "", circles(rows)
    area = "; the area of a circle is the peak memory" if dots and all(dot.size for dot in dots) else ""
    return [
        {
            "title": f"{metric} against time",
            "note": f"time per step of {base} = 1{area}{doubt}",
            "chart": trade(dots, metric, height=beside(times)),
        },
        {
            "title": "Time per step",
            "note": f"{base} = 1{doubt}",
            "chart": charts.bar_chart(times, label="time per step", marked=1.0) if times else "",
        },
        {
            "title": "Peak memory",
            "note": "of training, beyond the loaded program and data",
            "chart": charts.bar_chart(memory, label="peak memory") if memory else "",
        },
    ]


def circles(rows: Sequence[Row], named: Callable[[Row], str] = itemgetter("attention")) -> list[charts.Dot]:
    """Score over time, as large as the memory, of the attentions that have both."""
    return [
        charts.Dot(named(row), row["colour"], row["relative_time"], row["mean"], row["sd"], row.get("memory"))
        for row in findings.finished(rows)
        if row.get("relative_time")
    ]


def trade(dots: Sequence[charts.Dot], metric: str, *, height: float = charts.HEIGHT) -> str:
    return charts.scatter_chart(dots, x="time per step", y=metric, marked=1.0, height=height) if dots else ""


def time_bars(rows: Sequence[Row], *, busy: bool) -> list[charts.Bar]:
    return [
        charts.Bar(row["attention"], row["colour"], row["relative_time"], findings.relative(row, trusted=not busy))
        for row in rows
        if row.get("relative_time")
    ]


def beside(bars: Sequence[charts.Bar]) -> float:
    """The height of a chart beside two charts of such bars."""
    return min(max(2 * (charts.BAR + charts.TEXT) * len(bars) + 110, charts.HEIGHT), 560)


def densities(rows: Sequence[Row], histories: Sequence[curves.Histories]) -> list[dict[str, Any]]:
    """Of each SBM attention: the density over steps, and the trained model's, for each layer and head in per cent."""
    found = []
    for row, history in zip(rows, histories, strict=True):
        table = [[f"{100 * head:.1f}" for head in layer] for layer in row.get("density") or ()]
        chart = curves.draw_density(history)
        if table or chart:
            found.append({"row": row, "chart": chart, "table": table})
    return found


# ---- pictures ----------------------------------------------------------------------------------------------


def attentions(comparison: dict[str, Any], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each attention its pictures and those of its trained layers, or the reason why there are none."""
    models = {row["attention"]: folder for row in rows for folder in _models(row)[:1]}
    example, missing = None, "no trained model"
    if models:
        data = Path(comparison["data"]) if comparison.get("data") else None
        example, missing = attempt(partial(pictures.example_of, next(iter(models.values())), data), None)
    found = []
    for row in rows:
        support, why_support = attempt(partial(_support, comparison, row["attention"]), [])
        folder, weights = models.get(row["attention"]), list[dict[str, str]]()
        if folder is None:
            why = "no trained model is in the folders of its runs"
        elif example is None:
            why = f"no example to show them on: {missing}"
        else:
            weights, why = attempt(partial(pictures.weight_pictures, folder, example), [])
            why = why or ("" if weights else "this mechanism adds scales up: it has no single matrix of weights")
        found.append({"row": row, "support": support, "why_support": why_support, "weights": weights, "why": why})
    return found


def attempt(make: Callable[[], Any], otherwise: Any) -> tuple[Any, str]:
    """What `make` gives, or `otherwise` and the reason: hours of training must not lose their report to a picture."""
    try:
        return make(), ""
    except Exception as error:
        return otherwise, " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _models(row: Row) -> list[Path]:
    return [Path(run) / "model" for run in row["runs"] if (Path(run) / "model" / "task.json").exists()]


def _support(comparison: dict[str, Any], attention: str) -> list[dict[str, str]]:
    known = comparison["settings"]
    causal = task_class(comparison["task"]).head == "causal-lm"
    return pictures.support_pictures(
        attention, causal=causal, heads=known.get("heads", 4), longest=known.get("length", pictures.PICTURE)
    )


# ---- settings ----------------------------------------------------------------------------------------------


def settings(comparison: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Key, value, and what the key means where the task is known."""
    recipe, _ = attempt(
        lambda: task_class(comparison["task"]).recipes[comparison["recipe"]], None
    )  # a task of one's own
    meaning = {field.name: field.help for field in fields(type(recipe))} if recipe is not None else {}
    return [(key, plain(value), meaning.get(key, "")) for key, value in comparison["settings"].items()]


def plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
