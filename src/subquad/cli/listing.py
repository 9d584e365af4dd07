"""`subquad list`: the table of mechanisms."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from subquad.cli.tables import show_table, table_width
from subquad.core.console import out


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
    console, centred = out(), ("causal", "bidirectional")
    whole, short = table_of(titles, rows, centred), table_of(titles[:-1], [row[:-1] for row in rows], centred)
    if table_width(short) <= console.width < table_width(whole):
        console.print(short)
        console.print("\n`subquad show NAME` and a wider window show the papers as well", style="dim")
        return
    show_table(console, whole)


def mechanisms() -> list[dict[str, Any]]:
    """What every mechanism declares about itself."""
    from subquad.attention.registry import available, describe

    return [describe(name) for name in available()]


def table_of(titles: tuple[str, ...], rows: list[list[str]], centred: tuple[str, ...] = ()) -> Table:
    """A table whose first column is a name."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(title, justify="center" if title in centred else "left", no_wrap=title == titles[0])
    for name, *facts in rows:
        table.add_row(Text(name, "bold"), *facts)
    return table
