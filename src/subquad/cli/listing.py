"""`subquad list`: the table of mechanisms."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from subquad.core.console import out

NARROW = 90  # columns below which a table would break words


def add_to(app: typer.Typer) -> None:
    app.command("list", epilog="Example: subquad list --json | jq '.[].name'")(list_mechanisms)


def list_mechanisms(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the attention mechanisms: family, directions, cost and paper."""
    entries = mechanisms()
    if as_json:
        print(json.dumps(entries, indent=2, ensure_ascii=False))
        return
    titles = ("name", "family", "causal", "bidirectional", "cost", "paper")
    rows = []
    for entry in entries:
        marks = ["✓" if entry[way] else "–" for way in ("causal", "bidirectional")]
        rows.append([entry["name"], entry["family"], *marks, entry["cost"], entry["paper"]])
    print_rows(out(), titles, rows, centred=("causal", "bidirectional"))


def mechanisms() -> list[dict[str, Any]]:
    """What every mechanism declares about itself."""
    from subquad.attention.registry import available, describe

    return [describe(name) for name in available()]


def print_rows(console: Console, titles: tuple[str, ...], rows: list[list[str]], centred: tuple[str, ...] = ()) -> None:
    """A table whose first column is a name; in a narrow window each name with its facts below it."""
    if console.width >= NARROW:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for title in titles:
            table.add_column(title, justify="center" if title in centred else "left", no_wrap=title == titles[0])
        for name, *facts in rows:
            table.add_row(Text(name, "bold"), *facts)
        console.print(table)
        return
    for name, *facts in rows:
        console.print(Text(name, "bold"), soft_wrap=True)
        for title, fact in zip(titles[1:], facts, strict=True):
            console.print(Padding(Text(f"{title}: {fact}"), (0, 0, 0, 2)))
