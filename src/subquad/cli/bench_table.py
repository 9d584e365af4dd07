"""The ordinary measurement of `subquad bench`: it runs, and shows a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from subquad.cli.tables import show_table
from subquad.core.console import err, out

if TYPE_CHECKING:
    from subquad.bench import Row, Setting


def measure_and_print(
    specs: Sequence[str], lengths: list[int], setting: Setting, repeats: int, json: Path | None, png: Path | None
) -> None:
    from subquad.bench import busy

    rows = _run(specs, lengths, setting, repeats, json)
    console = out()
    console.print(describe(setting), style="bold", soft_wrap=True)
    why = busy(rows)
    show_table(console, table(rows, trusted=why is None))
    if why is not None:
        console.print(f"these times are not to be trusted: {why}", style="bold", soft_wrap=True)
    for line in remarks(rows):
        console.print(line, style="dim", soft_wrap=True)
    if png is not None:
        from subquad.plots import draw_bench, save

        save(draw_bench(rows, title=describe(setting)), png)
        console.print(f"plot: {png}", soft_wrap=True)
    if json is not None:
        console.print(f"results: {json}", soft_wrap=True)
    if setting.device == "cuda":
        console.print("no GPU has been measured yet: please send us the file of --json (docs/gpu.md)", soft_wrap=True)


def _run(specs: Sequence[str], lengths: list[int], setting: Setting, repeats: int, json: Path | None) -> list[Row]:
    from subquad.bench import measure, report, steps, write

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = err()
    rows: list[Row] = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        total = steps(specs, lengths, repeats, level=setting.level)
        task = progress.add_task("", total=total, completed=-1)
        tell = lambda what: progress.update(task, description=what, advance=1)  # noqa: E731
        for rows in measure(specs, lengths, setting, repeats=repeats, tell=tell):
            if json is not None:
                write(json, report(rows, setting))
    return rows


def describe(setting: Setting) -> str:
    what = "forward + backward" if setting.backward else "forward"
    if setting.level == "model":
        what = "a training step of 6 layers"
    way = "causal" if setting.causal else "bidirectional"
    where = "CPU" if setting.device == "cpu" else "GPU"
    parts = [what, way, f"batch {setting.batch}", f"{setting.heads} heads × {setting.head_dim}", setting.dtype, where]
    parts += ["rows of n/2 to n tokens"] if setting.ragged else []
    parts += [f"dropout {setting.dropout:g}"] if setting.dropout else []
    return ", ".join(parts)


def table(rows: Sequence[Row], *, trusted: bool = True) -> Table:
    """One line per mechanism and length; full attention first, as the measure. ≈ marks times of a busy machine."""
    result = Table(box=None, header_style="bold", pad_edge=False)
    plain = any(row.plain_seconds is not None for row in rows)
    sign = "" if trusted else "≈ "
    titles = ("n", "attention", "time", "against full", *("against plain",) * plain, "memory", "FLOPs", "of peak")
    for title in titles:
        result.add_column(title, justify="left" if title == "attention" else "right", no_wrap=title != "attention")
    for last, row in zip([None, *rows], rows, strict=False):
        if last is not None and last.n != row.n:
            result.add_section()
        name = row.spec if row.level == "head" else f"{row.spec} ({row.level})"
        length = f"{row.n:,}" if last is None or last.n != row.n else ""
        beside = [sign + f"{row.seconds / row.plain_seconds:.2f}×"] if row.plain_seconds else [""] * plain
        share = "–" if row.of_gemm is None else f"{sign}{100 * row.of_gemm:.0f} %"
        times = (seconds(row.seconds), sign + against(row.ratio), *beside)
        result.add_row(length, name, *times, size(row.memory), count(row.flops), share)
    return result


def remarks(rows: Sequence[Row]) -> list[str]:
    """What the columns mean."""
    lines = [
        "memory: peak growth of a fresh process during one step, including output and gradients, without the inputs"
    ]
    if any(row.level == "layer" for row in rows):
        lines.append("(layer): a whole layer with its projections, compared with a layer of full attention")
    if any(row.level == "model" for row in rows):
        lines.append("(model): forward, loss, backward and update, compared with the same model with full attention")
    if any(row.plain_seconds is not None for row in rows):
        lines.append("against plain: time relative to the same step without padding and without dropout")
    gemm = max((row.gemm for row in rows if row.gemm is not None), default=None)
    if gemm is not None:
        lines.append(f"of peak: FLOPs per second relative to a large matrix product in the same run, {count(gemm)}/s")
    if any(row.flops is None for row in rows):
        lines.append("FLOPs –: the mechanism runs on kernels that the counter does not know")
    return lines


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def against(ratio: float) -> str:
    """Time over full attention's, in words."""
    return f"{1 / ratio:.2f}× faster" if ratio < 0.995 else f"{ratio:.2f}× slower" if ratio > 1.005 else "1"


def size(memory: int | None) -> str:
    return "–" if memory is None else f"{memory / 2**20:,.0f} MiB"


def count(flops: float | None) -> str:
    if flops is None:
        return "–"
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= factor:
            return f"{flops / factor:.3g} {unit}"
    return f"{flops:,}"
