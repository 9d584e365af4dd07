"""`subquad bench --peers`: our layers against other implementations of the same mechanism."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from subquad.cli.tables import show_table
from subquad.core.console import err, out
from subquad.core.declarations import attributes, module_tree
from subquad.core.names import unknown

if TYPE_CHECKING:
    from subquad.bench import Setting
    from subquad.peers import PeerRow


def peer_names() -> list[str]:
    """Those of `peer_modules.PEERS`, from its source text: torch need not be imported."""
    calls: Any = dict(attributes(module_tree("subquad.peer_modules")))["PEERS"]
    return [call.args[0].value for call in calls.elts]


def measure_and_print(
    names: Sequence[str],
    lengths: list[int] | None,
    about: dict[str, Any],
    repeats: int,
    json: Path | None,
    crossover: bool,
) -> None:
    if lengths is not None and len(lengths) > 1:
        raise typer.BadParameter(f"--peers takes one length, not {len(lengths)}")
    for name in names:
        if name not in peer_names():
            raise unknown("peer", name, peer_names())
    from subquad.bench import Setting, write
    from subquad.peers import measure_peers, report

    setting = Setting(**about)
    before = _rows_of(json, setting)
    console = err()
    rows: list[PeerRow] = []
    with console.status("") as status:

        def tell(what: str) -> None:
            if console.is_terminal:
                status.update(what)

        n = None if lengths is None else lengths[0]
        for rows in measure_peers(names, setting, n=n, repeats=repeats, crossover=crossover, tell=tell):
            if json is not None:
                content = report(rows, setting)
                write(json, content | {"rows": merged(before, content["rows"])})
    way = "forward + backward" if setting.backward else "forward"
    sizes = f"batch {setting.batch}, {setting.heads} heads × {setting.head_dim}, float32, CPU"
    out().print(f"{way}, layers with projections, {sizes}", style="bold", soft_wrap=True)
    show_table(out(), table(rows))
    out().print("pays from: the shortest length tried from which our layer is faster than full attention", style="dim")
    if json is not None:
        out().print(f"results: {json}", soft_wrap=True)


def _rows_of(json: Path | None, setting: Setting) -> list[dict[str, Any]]:
    """The rows that a file already has, if they belong to the same setting."""
    from subquad.peers import report

    if json is None or not json.exists():
        return []
    content = json_text.loads(json.read_text())
    here = report([], setting)
    for part in ("setting", "machine"):
        if content.get(part) != here[part]:
            raise typer.BadParameter(f"{json} already contains results of another {part}: {content.get(part)}")
    return content["rows"]


def merged(before: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows in place of old ones of the same peer, length and direction; a crossover that is not looked for again is
    kept."""
    key = lambda row: (row["peer"], row["n"], row["backward"])  # noqa: E731
    fresh, kept = {key(row): row for row in new}, []
    for row in before:
        again = fresh.pop(key(row), row)
        kept.append(again if again["tried"] else again | {name: row[name] for name in ("crossover", "tried")})
    return kept + list(fresh.values())


def table(rows: Sequence[PeerRow]) -> Table:
    from subquad.cli.bench_table import seconds

    result = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("peer", "ours", "n", "our time", "its time", "ratio", "full attention", "pays from"):
        result.add_column(title, justify="left" if title in ("peer", "ours") else "right")
    for row in rows:
        times = (seconds(x) for x in (row.seconds, row.peer_seconds))
        pays = "–" if not row.tried else f"{row.crossover:,}" if row.crossover else f"beyond {row.tried[-1]:,}"
        result.add_row(
            f"{row.peer} ({row.package})", row.spec, f"{row.n:,}", *times, f"{row.ratio:.2f}",
            seconds(row.full_seconds), pays,
        )  # fmt: skip
    return result
