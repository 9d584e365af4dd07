"""Tables of measured results inside Markdown files, made from the JSON files that hold the results.

A table stands between two comments, of which the first names it:

    <!-- table: speed longformer combiner-fixed -->
    …
    <!-- end of table -->
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from subquad import __version__

PLACE = re.compile(r"(<!-- table: (?P<words>[^\n]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def update(path: Path, results: Path) -> None:
    """Write every table of a Markdown file anew, from the JSON files in the folder `results`."""
    path.write_text(updated(path.read_text(), results))


def updated(text: str, results: Path) -> str:
    """The text with its tables made anew."""

    def made(match: re.Match[str]) -> str:
        name, *words = match["words"].split()
        if name not in TABLES:
            raise ValueError(f"no table is called {name!r} (tables: {', '.join(TABLES)})")
        file, function = TABLES[name]
        return f"{match[1]}{function(json.loads((results / file).read_text()), words)}\n{match[3]}"

    return PLACE.sub(made, text)


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---- speed ---------------------------------------------------------------------------------------------------


def machine(result: dict[str, Any], words: Sequence[str]) -> str:
    """One sentence about where and with what it was measured."""
    on, versions = result["machine"], result["versions"]
    threads = f"{on['threads']} thread{'s' * (on['threads'] > 1)} on {on['cores']} cores"
    return (
        f"Measured with subquad {versions['subquad']} and torch {versions['torch']}: {threads} "
        f"({on['processor'] or on['machine']}), float32, batch {result['setting']['batch']}, "
        f"{result['setting']['heads']} heads × {result['setting']['head_dim']}."
    )


def speed(result: dict[str, Any], words: Sequence[str]) -> str:
    """Of the mechanisms named, or of all: times faster than full attention at the longest length, memory and
    break-even lengths.
    """
    rows = [row for row in result["rows"] if not _use(row)]
    longest = max(row["n"] for row in rows)
    lines = []
    for spec in words or dict.fromkeys(row["spec"] for row in rows):
        own = [row for row in rows if row["spec"] == spec]
        at = {(row["causal"], row["backward"]): row for row in own if row["n"] == longest}
        faster = [_faster(at.get(way)) for way in WAYS]
        lines.append([f"`{spec}`", *faster, _memory(at), *(break_even(own, causal) for causal in (False, True))])
    titles = ["mechanism", "forward", "forward + backward", "causal forward", "causal forward + backward"]
    return markdown([*titles, "memory, MiB (full)", "break-even", "causal break-even"], lines)


WAYS = ((False, False), (False, True), (True, False), (True, True))  # (causal, backward)


def _faster(row: dict[str, Any] | None) -> str:
    """How many times faster than full attention; nothing where the machine was busy."""
    if row is None or row["busy"]:
        return ""
    return f"{1 / row['ratio']:.0f}" if row["ratio"] < 0.1 else f"{1 / row['ratio']:.2g}"


def _memory(at: dict[tuple[bool, bool], dict[str, Any]]) -> str:
    """Of forward + backward, causal where it can: its own and that of full attention."""
    row = at.get((True, True)) or at.get((False, True))
    if row is None or row["memory"] is None:
        return ""
    return f"{row['memory'] / 2**20:,.0f} ({row['full_memory'] / 2**20:,.0f})"


def break_even(rows: Sequence[dict[str, Any]], causal: bool) -> str:
    """The length from which forward + backward is faster than full attention, in words."""
    chosen = [row for row in rows if row["backward"] and row["causal"] == causal]
    own = sorted((row["n"], row["ratio"]) for row in chosen)
    if not own or any(row["busy"] for row in chosen):
        return ""
    if own[-1][1] >= 1:
        return f"> {own[-1][0]:,}"
    last = next((i for i in reversed(range(len(own))) if own[i][1] >= 1), None)
    if last is None:
        return f"< {own[0][0]:,}"
    (low, above), (high, below) = own[last], own[last + 1]
    share = math.log(above) / (math.log(above) - math.log(below))
    return f"{float(f'{low * (high / low) ** share:.2g}'):,.0f}"


def lengths(result: dict[str, Any], words: Sequence[str]) -> str:
    """Of all mechanisms: times faster than full attention over the length; `words`: causal, backward."""
    chosen = [row for row in result["rows"] if not _use(row) and row["causal"] == ("causal" in words)]
    chosen = [row for row in chosen if row["backward"] == ("backward" in words)]
    sizes = sorted({row["n"] for row in chosen})
    found = {(row["spec"], row["n"]): row for row in chosen}
    lines = [
        [f"`{spec}`", *(_faster(found.get((spec, n))) for n in sizes)]
        for spec in dict.fromkeys(row["spec"] for row in chosen)
    ]
    return markdown(["mechanism", *(f"{n:,}" for n in sizes)], lines)


def _use(row: dict[str, Any]) -> str | None:
    """What a row was measured for beside the plain step: ragged, dropout or model."""
    return next(
        (key for key in ("ragged", "dropout") if row.get(key)), "model" if row.get("level") == "model" else None
    )


def in_use(result: dict[str, Any], words: Sequence[str]) -> str:
    """Of the mechanisms measured with `words`, ragged or dropout: their time over that of the same step without it;
    with model: how many times faster a training step is than with full attention.
    """
    chosen = [row for row in result["rows"] if _use(row) == words[0]]
    columns = sorted({(row["backward"], row["n"]) for row in chosen})
    found = {(row["spec"], row["backward"], row["n"]): row for row in chosen}
    lines = []
    for spec in dict.fromkeys(row["spec"] for row in chosen):
        cells = (found.get((spec, *column)) for column in columns)
        lines.append([f"`{spec}`", *(_faster(row) if words[0] == "model" else _beside_plain(row) for row in cells)])
    way = {True: "training step" if words[0] == "model" else "forward + backward", False: "forward"}
    return markdown(["mechanism", *(f"{way[backward]}, n = {n:,}" for backward, n in columns)], lines)


def _beside_plain(row: dict[str, Any] | None) -> str:
    return "" if row is None or row["busy"] else f"{row['seconds'] / row['plain_seconds']:.2f}"


# ---- a comparison --------------------------------------------------------------------------------------------


def comparison(result: dict[str, Any], words: Sequence[str]) -> str:
    """The table of `subquad compare`, from its comparison.json."""
    metric = next(row["metric"] for row in result["rows"] if row["metric"])
    busy = result["timing"]["busy"] if result.get("timing") else "not measured"
    lines = []
    for row in result["rows"]:
        spread = "" if row["sd"] is None else f" ± {row['sd']:.3f}"
        times = "–" if row["relative_time"] is None else f"{'≈' if busy else '×'} {row['relative_time']:.2f}"
        memory, sizes = f"{row['memory'] / 2**20:,.0f} MiB", f"{row['parameters']:,}"
        lines.append(
            [row["attention"], f"{row['mean']:.3f}{spread}", times, memory, sizes, f"{row['connections']:,.0f}"]
        )
    if result.get("guessing"):
        lines.append(["guessing", f"{result['guessing']['score']:.3f}", *[""] * 4])
    table = markdown(["attention", metric, "time of a step", "memory", "parameters", "connections"], lines)
    return f"{table}\n\nThis run was made with subquad {result['versions']['subquad']}."


def keep_comparison(path: Path, results: Path) -> None:
    """Keep of a comparison.json what its table shows, without the folders and settings of its runs."""
    found = json.loads(path.read_text())
    shown = ("attention", "metric", "mean", "sd", "relative_time", "memory", "parameters", "connections")
    if any(row["mean"] is None for row in found["rows"]):
        raise ValueError(f"{path}: not all attentions are trained; run the comparison to its end first")
    kept = {
        "versions": {"subquad": __version__},
        "task": found["task"],
        "guessing": found.get("guessing"),
        "timing": {"busy": (found.get("timing") or {"busy": "not measured"})["busy"]},
        "rows": [{key: row[key] for key in shown} for row in found["rows"]],
    }
    (results / TABLES["run"][0]).write_text(json.dumps(kept, indent=2) + "\n")


def conversion(result: dict[str, Any], words: Sequence[str]) -> str:
    """What `subquad study conversion` measured: losses, speeds or passkeys."""
    from subquad.studies.conversion_tables import SHOWN

    return SHOWN[words[0]](result)


def processes(result: dict[str, Any], words: Sequence[str]) -> str:
    """What `subquad study processes` counted and measured: bytes that are sent, memory or times."""
    from subquad.studies.processes import SHOWN

    return SHOWN[words[0]](result, words[1:])


def advice(result: dict[str, Any], words: Sequence[str]) -> str:
    """What `subquad study advice` predicted and measured."""
    from subquad.studies.advice import table

    return table(result)


TABLES: dict[str, tuple[str, Callable[[dict[str, Any], Sequence[str]], str]]] = {
    "machine": ("speed.json", machine),
    "speed": ("speed.json", speed),
    "lengths": ("speed.json", lengths),
    "use": ("speed.json", in_use),
    "run": ("run.json", comparison),
    "conversion": ("conversion.json", conversion),
    "processes": ("processes.json", processes),
    "advice": ("advice.json", advice),
}
