"""The tables of `subquad bench`: time, memory and FLOPs; with --processes one sequence over several processes; with
--decode a decode step against full attention over a cache, the state, and the prefill.
"""

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
    from subquad.bench_decode import DecodeRow


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
    """In MiB, also what is a part of one: what a process sends often is."""
    if memory is None:
        return "–"
    mib = memory / 2**20
    return f"{mib:.2f} MiB" if mib < 10 else f"{mib:,.0f} MiB"


def count(flops: float | None) -> str:
    if flops is None:
        return "–"
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= factor:
            return f"{flops / factor:.3g} {unit}"
    return f"{flops:,}"


def processes_bench(
    specs: Sequence[str], lengths: Sequence[int], processes: Sequence[int], causal: bool, heads: int, head_dim: int,
    batch: int, repeats: int, count_only: bool,
) -> None:  # fmt: skip
    from subquad.bench import Setting

    setting = Setting(batch=batch, heads=heads, head_dim=head_dim, causal=causal, backward=True)
    titles = ("n", "attention", "processes", "sent forward", "backward", "of the ring")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles if count_only else (*titles, "time", "speed-up", "memory"):
        table.add_column(title, justify="left" if title == "attention" else "right", no_wrap=title != "attention")
    for n in lengths:
        for spec in specs:
            _process_rows(table, spec, n, processes, setting, repeats, count_only)
    console = out()
    console.print(describe(setting).replace("forward + backward, ", "one layer, "), style="bold", soft_wrap=True)
    show_table(console, table)
    console.print(
        "sent: bytes that the busiest process sends in one layer, counted; of the ring: their share of what full "
        "attention sends around a ring",
        style="dim", soft_wrap=True,
    )  # fmt: skip
    if not count_only:
        console.print("memory: peak growth of the largest process during one step, inputs not included", style="dim")


def _process_rows(
    table: Table, spec: str, n: int, processes: Sequence[int], setting, repeats: int, count_only: bool
) -> None:
    from subquad.bench_processes import bytes_sent, peak_memory, step_seconds

    first = None
    for p in processes:
        cells = ["–", "–", "–"]
        if p > 1:
            own, ring = bytes_sent(spec, n, p, setting), bytes_sent("full", n, p, setting)
            cells = [size(own.forward), size(own.backward), f"1/{ring.both / max(own.both, 1):,.0f}"]
        if not count_only:
            if err().is_terminal:
                err().print(f"{spec} at n = {n:,} on {p} process{'es' * (p > 1)}", style="dim")
            took, grown = step_seconds(spec, n, p, setting, repeats=repeats), peak_memory(spec, n, p, setting)
            first = first or took
            cells += [seconds(took), f"{first / took:.2f}×", size(grown)]
        table.add_row(f"{n:,}", spec, str(p), *cells)


def decode_bench(
    specs: Sequence[str], lengths: list[int], setting: Setting, repeats: int, chunk: int, json: Path | None
) -> None:
    from subquad.bench import report, write
    from subquad.bench_decode import measure

    rows: list[DecodeRow] = []
    with err().status("") as status:
        for rows in measure(specs, lengths, setting, repeats=repeats, chunk=chunk, tell=status.update):
            if json is not None:
                write(json, report(rows, setting))
    console = out()
    about = f"batch {setting.batch}, {setting.heads} heads × {setting.head_dim}, float32, CPU"
    console.print(f"one decode step after n tokens, {about}", style="bold", soft_wrap=True)
    show_table(console, decode_table(rows))
    for line in (
        "full: scaled_dot_product_attention over a preallocated key/value cache; state: against that cache",
        f"prefill: the n tokens in chunks of {chunk:,}, against one call of the mechanism, which keeps no state;",
        "its memory: growth of resident memory in chunks, and in one call",
    ):
        console.print(line, style="dim", soft_wrap=True)
    if json is not None:
        console.print(f"results: {json}", soft_wrap=True)


def decode_table(rows: Sequence[DecodeRow]) -> Table:
    """One line per mechanism and length; full attention first, as the measure."""
    result = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("n", "attention", "step", "against full", "state", "of cache", "prefill", "its memory"):
        result.add_column(title, justify="left" if title == "attention" else "right", no_wrap=title == "attention")
    for last, row in zip([None, *rows], rows, strict=False):
        if last is not None and last.n != row.n:
            result.add_section()
        name = f"{row.spec} (layer)" if row.level == "layer" else row.spec
        length = f"{row.n:,}" if last is None or last.n != row.n else ""
        share = "" if row.spec == "full" else _share(row.state_bytes, row.cache_bytes)
        chunks, call = row.chunk_seconds, row.call_seconds
        prefill = "" if chunks is None or call is None else f"{chunks / call:.2f}×"
        size = f"{row.state_bytes / 2**20:,.2f} MiB"
        peak = "" if not row.chunk_memory or not row.call_memory else _peak(row.chunk_memory, row.call_memory)
        result.add_row(length, name, seconds(row.seconds), against(row.ratio), size, share, prefill, peak)
    return result


def _share(state: int, cache: int) -> str:
    return f"1/{cache / state:,.0f}" if state < cache else f"{state / cache:.1f}×"


def _peak(chunks: int, call: int) -> str:
    return f"{chunks / 2**20:,.0f} of {call / 2**20:,.0f} MiB"
