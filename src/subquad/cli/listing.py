"""`subquad list`: the table of mechanisms."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from subquad.cli.console import out


def add_to(app: typer.Typer) -> None:
    app.command("list", epilog="Example: subquad list --json | jq '.[].name'")(list_mechanisms)


def list_mechanisms(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the attention mechanisms: family, directions, cost, paper."""
    entries = mechanisms()
    if as_json:
        print(json.dumps(entries, indent=2, ensure_ascii=False))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("name", "family", "causal", "bidirectional", "cost", "paper"):
        centred = title in ("causal", "bidirectional")
        table.add_column(title, justify="center" if centred else "left", no_wrap=title == "name")
    for entry in entries:
        marks = ["✓" if entry[way] else "–" for way in ("causal", "bidirectional")]
        table.add_row(f"[bold]{entry['name']}", entry["family"], *marks, entry["cost"], entry["paper"])
    out().print(table)


def mechanisms() -> list[dict[str, Any]]:
    """What the registry says about every mechanism."""
    from subquad.attention.registry import available, mechanism

    entries = []
    for name in available():
        cls = mechanism(name)
        able = cls.capabilities
        entries.append(
            {
                "name": name,
                "family": cls.family,
                "causal": able.causal,
                "bidirectional": able.bidirectional,
                "level": able.level,
                "cost": cls.cost,
                "paper": cls.paper,
            }
        )
    return entries
