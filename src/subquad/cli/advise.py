"""`subquad advise`: which attention for this length, size and machine? `subquad calibrate` measures the machine."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from subquad.attention.registry import check_name
from subquad.cli.bench_table import against, seconds
from subquad.cli.tables import show_table
from subquad.core.console import err, out
from subquad.core.memory import parse_bytes, physical_memory, show_bytes
from subquad.core.options import split_list

if TYPE_CHECKING:
    from subquad.advice.ranking import Advice, Row, Wish

WIDE = 112  # columns that the whole table takes
FIRST = 10  # rows shown without --all


def add_to(app: typer.Typer) -> None:
    example = "Example: subquad advise --n 16384 --causal --width 512 --heads 8 --memory 4GiB --train"
    app.command(epilog=example)(advise)
    app.command(epilog="Example: subquad calibrate --minutes 5")(calibrate)


# ---- advise ----------------------------------------------------------------------------------------------------------


def advise(
    n: Annotated[int, typer.Option("--n", min=1, help="Length of the sequences.")],
    causal: Annotated[bool, typer.Option("--causal", help="Rank causal attention.")] = False,
    width: Annotated[int, typer.Option(min=1, help="Width of the layer, a multiple of the number of heads.")] = 512,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 8,
    memory: Annotated[
        str | None,
        typer.Option(help="Available memory, such as 4GiB. Default: that of this machine.", show_default=False),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    layers: Annotated[
        int, typer.Option(min=1, help="Number of attention layers that have to fit into the memory together.")
    ] = 1,
    train: Annotated[bool, typer.Option("--train", help="Rank by a training step, not by a forward pass.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="Rank by one decode step after n tokens.")] = False,
    attention: Annotated[
        str | None,
        typer.Option(help="Only these mechanisms, comma-separated. Default: all.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help=f"Show all mechanisms, not only the first {FIRST}.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Rank the mechanisms for a length, a size and a machine.

    Times and memory are predicted by a cost model, fitted to what `subquad calibrate` measured on this machine, or to
    measurements that come with the package. Mechanisms that fit into the memory are listed first; among these, the
    ones in which every token can reach every other within --layers layers (12 if not given) come first, by time.
    """
    if width % heads:
        raise typer.BadParameter(f"--width must be a multiple of --heads {heads}, not {width}")
    if train and decode:
        raise typer.BadParameter("--train and --decode exclude each other: choose one")
    if decode and not causal:
        raise typer.BadParameter("--decode needs --causal: tokens are generated one after another")
    specs = split_list(attention) if attention is not None else None
    for spec in specs or ():
        check_name(spec)
    room = parse_bytes(memory, "--memory") if memory is not None else physical_memory()
    if room is None:
        raise typer.BadParameter("--memory is needed: this system does not tell how much it has")
    from subquad.advice.measuring import about_here
    from subquad.advice.ranking import Wish, sources
    from subquad.advice.ranking import advise as rank

    wish = Wish(
        n=n, width=width, heads=heads, memory=room, causal=causal, batch=batch, layers=layers, train=train,
        decode=decode,
    )  # fmt: skip
    costs, points, here, why = sources(causal, about_here())
    with err().status("") as status:
        found = rank(wish, costs, points, specs=specs, measured_here=here, tell=status.update)
    if as_json:
        print(json.dumps(as_dict(found, why), indent=2, ensure_ascii=False))
        return
    show(found, why, every=every)


def as_dict(advice: Advice, why: str | None) -> dict[str, Any]:
    """The advice as plain values."""
    results = advice.results
    keys = ("task", "length", "causal", "metric", "layers")
    about = None if results is None else {key: getattr(results, key) for key in keys}
    rows = []
    for row in advice.rows:
        score = None if row.score is None else row.score._asdict()
        rows.append({**asdict(row), "reach": None if row.reach is None else row.reach._asdict(), "score": score})
    return {
        "wish": asdict(advice.wish),
        "measured_here": advice.measured_here,
        "why_not": why,
        "machine": advice.machine,
        "versions": advice.versions,
        "results": about,
        "compare": advice.command(),
        "rows": rows,
        "unmeasured": advice.unmeasured,
    }


def show(advice: Advice, why: str | None, *, every: bool = False) -> None:
    console = out()
    console.print(describe(advice.wish), style="bold")
    for line in origin(advice, why):
        console.print(line, style="" if advice.measured_here else "yellow")
    rows = advice.rows if every else advice.fitting[:FIRST]
    reference = [row for row in advice.rows if row.spec == "full" and row not in rows]
    if advice.fitting:
        for table in tables([*rows, *reference], advice, console):
            console.print()
            show_table(console, table)
    else:
        nearest_possible(advice, console)
    console.print()
    for line in remarks(advice, rows):
        console.print(line, style="dim")
    command = advice.command()
    if command is not None:
        console.print(f"compare the first {len(advice.best)}: {command}", style="bold", soft_wrap=True)


def describe(wish: Wish) -> str:
    what = "a decode step after" if wish.decode else "a training step on" if wish.train else "a forward pass over"
    way = "causal" if wish.causal else "bidirectional"
    stack = f"{wish.layers} layers" if wish.layers > 1 else "one layer"
    rows = f", batch {wish.batch}" if wish.batch > 1 else ""
    return (
        f"{what} {wish.n:,} tokens, {way}, {stack}, width {wish.width}, {wish.heads} heads{rows}, "
        f"memory {show_bytes(wish.memory)}"
    )


def origin(advice: Advice, why: str | None) -> list[str]:
    """Where the figures come from."""
    machine, versions = advice.machine, advice.versions
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    model = f"{machine['processor'] or machine['machine']}, {threads}, torch {versions['torch']}, float32"
    if advice.measured_here:
        return [f"predicted from the calibration of this machine ({model})"]
    lines = [f"predicted from measurements on another machine ({model}): `subquad calibrate` measures this one"]
    return [why, *lines] if why is not None else lines


TITLES = ("attention", "time", "against full", "memory", "faster from", "reaches all", "decode", "state", "quality")
COST, KNOWN = (0, 1, 2, 3, 4), (0, 5, 6, 7, 8)


def tables(rows: list[Row], advice: Advice, console: Console) -> list[Table]:
    """One table, or two below each other where the window is narrow."""
    lines = [cells(row) for row in rows]
    hidden = set() if advice.wish.causal else {6, 7}
    hidden |= {8} if advice.results is None else set()
    chosen = [tuple(range(len(TITLES)))] if console.width >= WIDE else [COST, KNOWN]
    return [_table([i for i in columns if i not in hidden], lines) for columns in chosen]


def _table(columns: list[int], lines: list[list[str]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for i in columns:
        left = TITLES[i] == "attention"
        table.add_column(TITLES[i], justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for line in lines:
        table.add_row(*(line[i] for i in columns))
    return table


def cells(row: Row) -> list[str]:
    """A row in words, in the order of `TITLES`."""
    from subquad.advice.ranking import SHOWN

    least = {SHOWN[0]: "any length", None: "" if row.spec == "full" else "never"}
    from_ = least.get(row.faster_from) if row.faster_from in least else f"n = {row.faster_from:,}"
    return [
        row.spec,
        seconds(row.seconds),
        "" if row.spec == "full" else against(row.seconds / row.full_seconds),
        show_bytes(row.bytes) + ("" if row.fits else " (too much)"),
        from_ or "",
        "?" if row.reach is None else row.reach.words(),
        "–" if row.decode_seconds is None else seconds(row.decode_seconds),
        "–" if row.state_bytes is None else show_bytes(row.state_bytes),
        "–" if row.score is None else quality(row),
    ]


def quality(row: Row) -> str:
    """A star where the options of the result are not those of the row."""
    assert row.score is not None
    return f"{row.score.mean:.3f}" + ("" if row.score.spec == row.spec else "*")


def nearest_possible(advice: Advice, console: Console) -> None:
    """Nothing fits: what would."""
    wish = advice.wish
    console.print(f"\nnothing fits into {show_bytes(wish.memory)}; what would fit:", style="bold")
    by_length = sorted(advice.rows, key=lambda row: -row.longest)[:FIRST]
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("attention", overflow="fold")
    table.add_column(f"longest with {show_bytes(wish.memory)}", justify="right")
    table.add_column(f"memory for n = {wish.n:,}", justify="right")
    for row in by_length:
        longest = f"n = {row.longest:,}" if row.longest else "none"
        table.add_row(row.spec, longest, show_bytes(row.bytes))
    show_table(console, table)


def remarks(advice: Advice, rows: list[Row]) -> list[str]:
    """What the columns mean, and what is not shown."""
    wish, lines = advice.wish, []
    what = "weights and states" if wish.decode else "weights, tokens and what a step adds"
    lines.append(f"time: one layer with its projections; memory: {what}, of attention layers only")
    if advice.fitting:
        lines.append(
            "reaches all: layers until every token has seen every "
            f"{'earlier one' if wish.causal else 'other'}; by content: possible, depending on the tokens"
        )
    if advice.fitting and wish.causal and not wish.decode:
        lines.append("decode: one step of one layer after n tokens; state: what its attention keeps for it")
    results = advice.results
    if advice.fitting and results is not None:
        way = "causal" if results.causal else "bidirectional"
        depth = "" if results.layers is None else f", {results.layers} layer{'s' * (results.layers > 1)}"
        model = f"{results.length:,} tokens, {way}{depth}"
        scores = f"{results.metric} on {results.task} ({model}), the nearest task with results"
        starred = any(row.score is not None and row.score.spec != row.spec for row in rows)
        lines.append(f"quality: {scores}{'; *: with other options' if starred else ''}")
    unshown = [row.spec for row in advice.fitting if row not in rows and row.spec != "full"]  # full is a row
    if unshown and advice.fitting:
        lines.append(f"fit as well (--all shows them): {', '.join(unshown)}")
    large = [f"{row.spec} (up to n = {row.longest:,})" for row in advice.rows if not row.fits]
    if large and advice.fitting:
        lines.append(f"do not fit into {show_bytes(wish.memory)}: {', '.join(large)}")
    if advice.unmeasured:
        lines.append(f"not measured yet (`subquad calibrate`): {', '.join(advice.unmeasured)}")
    if advice.trial is not None and advice.trial.remark:
        lines.append(advice.trial.remark)
    return lines


# ---- calibrate -------------------------------------------------------------------------------------------------------


def calibrate(
    specs: Annotated[
        list[str] | None, typer.Argument(metavar="SPEC", help="Mechanisms with their options. Default: all.")
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--bidirectional", help="Only this direction. Default: both.", show_default=False),
    ] = None,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory", help="Measure memory too; otherwise only for mechanisms that the package has no figures for."
        ),
    ] = False,
    times: Annotated[bool, typer.Option("--time/--no-time", help="Measure times, which needs an idle machine.")] = True,
    rounds: Annotated[
        int, typer.Option(min=1, help="Measure everything this many times, minutes apart, and keep the shortest times.")
    ] = 2,
    minutes: Annotated[
        float, typer.Option(min=0, help="Stop after about this many minutes.", show_default=False)
    ] = math.inf,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure everything again.")] = False,
    file: Annotated[
        Path | None,
        typer.Option("--out", help="File for the measurements. Default: in the cache folder.", show_default=False),
    ] = None,
) -> None:
    """Measure layers of every mechanism on this machine, for `subquad advise`.

    This takes many minutes on an idle machine. Run the same command again to resume it.
    """
    for spec in specs or ():
        check_name(spec)
    if file is not None and file.is_dir():
        raise typer.BadParameter(f"--out must be a file, and {file} is a folder")
    from subquad.advice.measuring import about_here, steps
    from subquad.advice.measuring import calibrate as measure
    from subquad.advice.peaks import measure_memory, memory_steps
    from subquad.advice.points import Points, calibration_file, shipped, subjects
    from subquad.core.load import BUSY, OtherLoad

    path, here = file or calibration_file(), about_here()
    points = Points(here)
    if path.exists() and not overwrite:
        points = Points.read(path)
        if points.about != here:
            err().print(
                f"{path} was measured on another machine or with other versions: starting again", soft_wrap=True
            )
            points = Points(here)
    ways = (True, False) if causal is None else (causal,)
    wanted = subjects(None if specs is None else dict.fromkeys(["full", *specs]), ways, strict=specs is not None)
    known = Points(here) if memory else shipped()
    total = (steps(points, wanted, rounds) if times else 0) + memory_steps(points, wanted, known)
    remembered = any(points.of(subject, "train bytes") for subject in wanted)
    if not total and not times and not remembered:
        raise typer.BadParameter("--no-time leaves nothing to measure here: pass --memory as well")
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = err()
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
        OtherLoad() as load,
    ):
        task = progress.add_task("", total=total, completed=-1)
        tell = lambda what: progress.update(task, description=what, advance=1)  # noqa: E731
        done = not times or measure(points, wanted, path, rounds=rounds, minutes=minutes, tell=tell)
        done = done and measure_memory(points, wanted, path, known, minutes=minutes, tell=tell)
    console = out()
    result = "calibrated" if done else "not finished: run the same command again to resume"
    nothing = f"nothing was measured: --minutes {minutes:g} is too short"
    console.print(f"{result}: {path}" if points.values else nothing, soft_wrap=True)
    if times and load.share is not None and load.share > BUSY:
        used = f"other programs used {100 * load.share:.0f} % of the machine meanwhile: times may be too long"
        console.print(f"{used} (--overwrite measures again)", style="bold", soft_wrap=True)
