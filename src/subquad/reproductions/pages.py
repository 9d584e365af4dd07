"""The pages of docs/ that are made of results: the list of every table and figure, and the tables that were run.

`subquad reproduce --pages docs` writes what lies between the two marks of docs/experiments.md again, from the
declarations and docs/results/*.json.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subquad.core.spoken import argument
from subquad.reports.findings import listed
from subquad.reproductions import PAPERS, REPRODUCTIONS
from subquad.reproductions.curves import draw_curves, has_curves, picture
from subquad.reproductions.declare import Reproduction
from subquad.reproductions.runner import Plan, known_methods
from subquad.reproductions.verdict import counted
from subquad.training.rates import at_the_edge

BEGIN, END = "<!-- made by: subquad reproduce --pages docs -->", "<!-- end -->"
PAGE, RESULTS = "experiments.md", "results"
Place = tuple[str, str]  # of a cell: method and column
Words = tuple[str, ...]
SIGNS = {"agrees": "✓", "contradicts": "✗", "open": "~", "missing": "–"}


def write_pages(docs: Path) -> list[Path]:
    """The part between the marks, and the figures of measured curves."""
    page = docs / PAGE
    if not page.is_file():
        what = f"{docs} has no {PAGE}" if docs.is_dir() else f"{docs} does not exist"
        raise ValueError(f"{argument('pages')}: the folder {what}")
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page} has no part between {BEGIN} and {END} to write")
    results = read_results(docs / RESULTS)
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{BEGIN}\n{body(results)}{END}{after}")
    return [page, *(draw_curves(result, docs) for result in results.values() if has_curves(result))]


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """By key, in the order of the papers; those of the full size after the scaled-down ones, those without a number
    left out.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if result.get("key") in REPRODUCTIONS and result["ours"]:
            found[path.stem] = result
    places = list(REPRODUCTIONS)
    return dict(sorted(found.items(), key=lambda pair: (places.index(pair[1]["key"]), pair[1]["scale"] == "paper")))


def body(results: dict[str, dict[str, Any]]) -> str:
    parts = [f"\n### {paper}\n\n{listing(all_of, results)}" for paper, all_of in PAPERS.items()]
    tables = [section(result) for result in results.values()]
    return "".join(parts) + "\n## What was run\n\n" + "\n".join(tables) + "\n"


def listing(all_of: tuple[Reproduction, ...], results: dict[str, dict[str, Any]]) -> str:
    lines = ["| table, figure | what | command | here |", "|---|---|---|---|"]
    for each in all_of:
        place = each.place.split(", ", 1)[1]
        lines.append(f"| {place} | {each.title} | {command(each)} | {standing(each, results)} |")
    return "\n".join(lines) + "\n"


def command(each: Reproduction) -> str:
    return "–" if each.kind == "stated" else f"`subquad reproduce {each.same_as or each.key}`"


def standing(each: Reproduction, results: dict[str, dict[str, Any]]) -> str:
    """What is known of a table here, in a few words."""
    if each.kind == "stated":
        return each.differs
    if each.kind == "same":
        return f"see {REPRODUCTIONS[each.same_as].place.split(', ', 1)[1]}"
    if each.kind == "drawn":
        return each.differs or "drawn"
    if each.too_big:
        return f"not at this size: {each.too_big}; `--recipe paper`"
    found = results.get(each.key)
    if found is None:
        return "not run yet"
    return f"{'In part: ' * any('left out' in note for note in found['notes'])}{found['sentence']}"


def section(result: dict[str, Any]) -> str:
    """A result in full: its picture if it is curves, our numbers (the paper's), the orders, the claims, the verdict."""
    columns, names = result["columns"], list(result["methods"])
    head = f"### {result['place']}: {result['title']}\n\n"
    differs = f" Differs from the paper: {result['differs']}." if result["differs"] else ""
    head += f"{made(result)}.{differs}\n\n"
    if has_curves(result):
        head += f"![{result['title']}](images/{picture(result)})\n\n"
    lines = [f"| ours (the paper's) | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for name in names:
        cells = [cell(result, name, column) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return head + "\n".join(lines) + "\n\n" + "\n".join(remarks(result)) + "\n"


def made(result: dict[str, Any]) -> str:
    """How the numbers came about."""
    if REPRODUCTIONS[result["key"]].kind == "measured":
        return "Counted and measured"
    small = any(column.small.recipe != "paper" for column in REPRODUCTIONS[result["key"]].columns)
    size = "Scaled down" if small and result["scale"] == "small" else "At the size of the paper"
    counts = sorted({len(cell["scores"]) for row in result["ours"].values() for cell in row.values()})
    return f"{size}, {' to '.join(map(str, sorted({counts[0], counts[-1]})))} seed{'s' * (counts[-1] > 1)}"


def stated(claim: dict[str, Any], *, larger: bool) -> str:
    """A claim in words: «A better than B», «A above 99»."""
    better, worse = claim["better"], claim["worse"]
    if isinstance(worse, str) and isinstance(better, str):
        return f"{better} better than {worse}"
    high = larger == isinstance(better, str)
    who, limit = (better, worse) if isinstance(better, str) else (worse, better)
    return f"{who} {'above' if high else 'below'} {limit:g}"


def cell(result: dict[str, Any], name: str, column: str) -> str:
    """`37.2 ± 0.4 (37.45)`; – where there is nothing."""
    place = list(result["columns"]).index(column)
    row = result["paper"].get(name, [])
    theirs = row[place] if place < len(row) else None
    ours = result["ours"].get(name, {}).get(column)
    text = "not here" if ours is None and result["methods"][name]["missing"] else "–"
    if ours is not None:
        text = number(ours["mean"]) + ("" if ours["sd"] is None else f" ± {number(ours['sd'], ours['mean'])}")
        text += " (plateau)" if None in ours.get("left_plateau", ()) else ""
    return text if theirs is None else f"{text} ({number(theirs)})"


def number(value: float, like: float | None = None) -> str:
    size = abs(value if like is None else like)
    return f"{value:.{4 if size < 0.1 else 3 if size < 10 else 2 if size < 1000 else 0}f}"


def remarks(result: dict[str, Any]) -> list[str]:
    lines = [f"**{result['sentence']}**"]
    pairs = result["pairs"]
    if sum(pairs.values()):
        total = sum(pairs.values())
        same, other = pairs.get("agrees", 0), pairs.get("contradicts", 0)
        lines.append(
            f"Of {total} pairs that the paper orders, {counted(same, 'has', 'have')} the same order here, {other} the "
            f"other one, {total - same - other} cannot be told apart."
        )
    failed = [each for each in result["claims"] if each["status"] == "contradicts"]
    said = [f"{stated(x, larger=result['columns'][x['column']]['larger_is_better'])} ({x['column']})" for x in failed]
    if said:
        lines.append(f"What fails: {'; '.join(said)}.")
    lines += about_runs(result)
    lines += [f"Missing: {note}" for note in result["notes"]]
    words, version = commands(result), result["versions"]["subquad"]
    if len(words) > 1:
        return [*lines, f"Version {version}:", "", "```", *words, "```"]
    return [*lines, *(f"`{line}`, version {version}." for line in words)]


def commands(result: dict[str, Any]) -> list[str]:
    """What trains the cells of a table, and no others: a command for all columns that have the same methods and rates.
    Where methods have different numbers of seeds, it is the largest.
    """
    plan = Plan(REPRODUCTIONS[result["key"]], Path(), result["scale"])
    every = [method.name for method in known_methods(plan.reproduction)]
    places = [column.name for column in plan.reproduction.run_columns]
    lines = []
    for (methods, rates), columns in _parts(result, plan, places).items():
        seeds = max(len(result["ours"][method][column]["scores"]) for column in columns for method in methods)
        words = ["subquad", "reproduce", result["key"]]
        words += [*_only("--method", methods, every), *_only("--column", columns, places), *rates]
        words += ["--recipe", "paper"] * (result["scale"] == "paper") + ["--seeds", str(seeds)] * (seeds > 1)
        lines.append(shlex.join(words))
    return lines


def _parts(result: dict[str, Any], plan: Plan, places: Sequence[str]) -> dict[tuple[Words, Words], list[str]]:
    """By methods and the option of their rates: the columns that were run with just these."""
    parts: dict[tuple[Words, Words], list[str]] = {}
    for column in places:
        methods: dict[Words, list[str]] = {}
        for name in result["methods"]:
            if cell := result["ours"].get(name, {}).get(column):
                methods.setdefault(_rates_option(result, plan, column, cell), []).append(name)
        for rates, names in methods.items():
            parts.setdefault((tuple(names), rates), []).append(column)
    return parts


def _only(flag: str, names: Sequence[str], every: Sequence[str]) -> list[str]:
    """--method A --method B; nothing if these are all."""
    return [] if set(names) >= set(every) else [word for name in names for word in (flag, name)]


def _rates_option(result: dict[str, Any], plan: Plan, column: str, cell: dict[str, Any]) -> Words:
    """--rates A,B where others than those of the table were tried."""
    if "counted" in cell:
        return ()
    tried = sorted((cell.get("tried") or result["rates"]) if cell.get("rate") else (), key=float, reverse=True)
    usual = next(plan.bracket(each) for each in plan.reproduction.columns if each.name == column)
    same = set(map(float, tried)) == set(map(float, usual))
    return () if same else ("--rates", ",".join(tried) or "none")


def about_runs(result: dict[str, Any]) -> list[str]:
    """What was tried to train the methods, and when they began to learn: as the page and the terminal have it."""
    return [text for text in (rates_in_words(result), plateau_in_words(result)) if text]


def rates_in_words(result: dict[str, Any]) -> str:
    """Which learning rates were tried, which were chosen on validation, and whether they are the last on a side."""
    cells = trained_cells(result)
    if not cells:
        return ""
    tried = {
        place: sorted(cell.get("tried") or result["rates"], key=float, reverse=True)
        for place, cell in cells.items() if cell.get("rate")
    }  # fmt: skip
    if not tried:
        return "Only the learning rate of the recipe was tried."
    chosen = {place: cells[place]["rate"] for place in tried}
    lines = [f"Learning rates tried: {_grouped({place: listed(rates) for place, rates in tried.items()})}."]
    lines += [
        f"Chosen on validation: {_grouped(chosen)}.",
        at_the_edge((chosen[place], rates) for place, rates in tried.items()),
    ]
    alone = [f"{name} ({column})" for name, column in cells if (name, column) not in tried]
    lines += [f"Only the rate of the recipe was tried for {'; '.join(alone)}."] * bool(alone)
    return " ".join(filter(None, lines))


def plateau_in_words(result: dict[str, Any]) -> str:
    """At which steps the runs left the plateau, column by column: for most methods, and in brackets for the others."""
    found: dict[str, dict[str, str]] = {}
    for (name, column), cell in trained_cells(result).items():
        if cell.get("left_plateau"):
            found.setdefault(column, {})[name] = _steps(cell["left_plateau"])
    parts = []
    for column in (column for column in result["columns"] if column in found):
        (first, _), *others = _by_value(found[column])
        rest = "; ".join(f"{steps} for {' and '.join(names)}" for steps, names in others)
        parts.append(f"{column} " * (len(result["columns"]) > 1) + first + (f" ({rest})" if rest else ""))
    return f"Runs had left the plateau by step: {' · '.join(parts)}." if parts else ""


def _steps(left: list[int | None]) -> str:
    """250; 250 to 500; 250 or never; never."""
    steps = sorted(step for step in left if step is not None)
    ends = " to ".join(str(step) for step in dict.fromkeys(steps[:1] + steps[-1:]))
    return " or ".join([*([ends] if steps else []), *(["never"] if None in left else [])])


def trained_cells(result: dict[str, Any]) -> dict[Place, dict[str, Any]]:
    """By method and column: the cells that have runs of their own."""
    cells = {(name, column): cell for name, row in result["ours"].items() for column, cell in row.items()}
    return {place: cell for place, cell in cells.items() if "mean_of" not in cell and "counted" not in cell}


def _grouped(values: dict[Place, str]) -> str:
    """The most frequent value, then the others, each with the cells that have it."""
    (first, _), *others = _by_value({f"{name} ({column})": value for (name, column), value in values.items()})
    rest = " · ".join(f"{value} for {'; '.join(places)}" for value, places in others)
    return f"{first}, except {rest}" if rest else first


def _by_value(values: dict[str, str]) -> list[tuple[str, list[str]]]:
    """Each value with those that have it, the most frequent one first."""
    places: dict[str, list[str]] = {}
    for place, value in values.items():
        places.setdefault(value, []).append(place)
    return sorted(places.items(), key=lambda pair: -len(pair[1]))
