"""`subquad bench SPEC…`: time against full attention, memory and operations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from subquad.attention.registry import check_name
from subquad.core.console import err, out

if TYPE_CHECKING:
    from subquad.bench import Row, Setting


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: subquad bench longformer fixed:w=90 --n 1024,4096,8192 --backward --json out.json")(
        bench
    )


def parse_lengths(text: str) -> list[int]:
    """`1024,4096` → [1024, 4096], ascending, each once."""
    try:
        lengths = sorted({int(piece) for piece in text.split(",")})
    except ValueError:
        raise typer.BadParameter(f"--n must be comma-separated integers ≥ 1, such as 1024,4096, not {text!r}") from None
    if lengths[0] < 1:
        raise typer.BadParameter(f"a length must be ≥ 1, not {lengths[0]}")
    return lengths


def bench(
    specs: Annotated[
        list[str] | None,
        typer.Argument(metavar="SPEC...", help="Mechanisms with their options; with --peers, names of peers."),
    ] = None,
    n: Annotated[
        str | None,
        typer.Option("--n", help="Sequence lengths, comma-separated. Default: 1024,4096,8192; with --peers 4096."),
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="Measure forward and backward, not forward alone.")
    ] = False,
    causal: Annotated[
        bool, typer.Option("--causal", help="Measure causal attention, against causal full attention.")
    ] = False,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    decode: Annotated[
        bool,
        typer.Option("--decode", help="Measure streaming: one decode step after n tokens, the state, and the prefill."),
    ] = False,
    chunk: Annotated[int, typer.Option(min=1, help="With --decode: tokens of a chunk of the prefill.")] = 1024,
    device: Annotated[str, typer.Option(help="Where to measure: cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Dtype of the tensors: float32, bfloat16 or float16.")] = "float32",
    repeats: Annotated[int, typer.Option(min=1, help="Number of rounds; the best time counts.")] = 3,
    processes: Annotated[
        str | None,
        typer.Option(
            help="Divide the sequence among so many processes, comma-separated, such as 1,2,4.", show_default=False
        ),
    ] = None,
    count_only: Annotated[
        bool, typer.Option("--count-only", help="With --processes: only count the bytes that travel, for any length.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file, updated as they come.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Draw time and memory against the length into this file.")
    ] = None,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers",
            help="Measure layers against other implementations of the same mechanism (the extra `peers` and "
            "transformers), each causal or not as it is listed. Without names: all that are installed. Rows of "
            "other peers that the JSON file already has are kept.",
        ),
    ] = False,
    crossover: Annotated[
        bool, typer.Option(help="With --peers: look for the length from which our layer beats full attention.")
    ] = True,
) -> None:
    """Measure mechanisms against full attention in the same run.

    Mechanisms on q, k, v are compared with torch's scaled_dot_product_attention with the same causal flag;
    mechanisms of whole layers are measured with their projections and compared with a layer of full attention.

    With --decode, one token after n others is measured against full attention over a preallocated key/value cache.

    With --processes, one sequence is divided among several processes of one thread each: time and memory of a layer's
    forward and backward pass, and the bytes that a process sends, against ring attention (docs/distributed.md).
    """
    if count_only and processes is None:
        raise typer.BadParameter("--count-only needs --processes")
    special = [name for name, on in (("--decode", decode), ("--peers", peers), ("--processes", processes)) if on]
    if special and (device, dtype) != ("cpu", "float32"):
        raise typer.BadParameter(f"{special[0]} measures on the CPU in float32: leave --device and --dtype out")
    if len(special) > 1:
        raise typer.BadParameter(f"{special[0]} and {special[1]} are measurements of their own: choose one")
    for path in (json, png):
        _check_writable(path)
    if peers:
        if png is not None or causal:
            raise typer.BadParameter("--peers goes with neither --png nor --causal")
        from subquad.bench import Setting
        from subquad.cli.peers import measure_and_print

        given = Setting(batch=batch, heads=heads, head_dim=head_dim, backward=backward)
        measure_and_print(specs or [], None if n is None else parse_lengths(n), given, repeats, json, crossover)
        return
    if not specs:
        raise typer.BadParameter("SPEC is missing: name one mechanism or more, or pass --peers")
    lengths = parse_lengths("1024,4096,8192" if n is None else n)
    for spec in specs:
        check_name(spec)
    if processes is not None:
        if png is not None or json is not None:
            raise typer.BadParameter("--processes prints a table: leave --json and --png out")
        from subquad.cli.bench_processes import show

        show(specs, lengths, parse_lengths(processes), causal, heads, head_dim, batch, repeats, count_only)
        return
    from subquad.bench import Setting, busy

    if decode:
        if backward or png is not None:
            raise typer.BadParameter("--decode does not go with --backward or --png")
        from subquad.cli.decode import decode_bench

        decode_bench(
            specs, lengths, Setting(batch=batch, heads=heads, head_dim=head_dim, causal=True), repeats, chunk, json
        )
        return
    sizes = {"batch": batch, "heads": heads, "head_dim": head_dim}
    setting = Setting(**sizes, causal=causal, backward=backward, device=device, dtype=dtype)
    rows = _run(specs, lengths, setting, repeats, json)
    console = out()
    console.print(describe(setting), style="bold", soft_wrap=True)
    why = busy(rows)
    console.print(table(rows, trusted=why is None))
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
    if device == "cuda":
        console.print("no GPU has been measured yet: please send us the file of --json (docs/gpu.md)", soft_wrap=True)


def _check_writable(path: Path | None) -> None:
    """A run may take long: find out before it whether its results can be kept. Leaves no trace."""
    if path is None:
        return
    new = not path.exists()
    path.open("ab").close()
    if new:
        path.unlink()


def _run(specs: Sequence[str], lengths: list[int], setting: Setting, repeats: int, json: Path | None) -> list[Row]:
    from subquad.bench import measure, report, steps, write

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = err()
    rows: list[Row] = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps(specs, lengths, repeats), completed=-1)
        tell = lambda what: progress.update(task, description=what, advance=1)  # noqa: E731
        for rows in measure(specs, lengths, setting, repeats=repeats, tell=tell):
            if json is not None:
                write(json, report(rows, setting))
    return rows


def describe(setting: Setting) -> str:
    what = "forward + backward" if setting.backward else "forward"
    way = "causal" if setting.causal else "bidirectional"
    where = "CPU" if setting.device == "cpu" else "GPU"
    return f"{what}, {way}, batch {setting.batch}, {setting.heads} heads × {setting.head_dim}, {setting.dtype}, {where}"


def table(rows: Sequence[Row], *, trusted: bool = True) -> Table:
    """One line per mechanism and length; full attention first, as the measure. ≈ marks times of a busy machine."""
    result = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("n", "attention", "time", "against full", "memory", "FLOPs"):
        result.add_column(title, justify="left" if title == "attention" else "right", no_wrap=title != "attention")
    sign = "" if trusted else "≈ "
    for last, row in zip([None, *rows], rows, strict=False):
        if last is not None and last.n != row.n:
            result.add_section()
        name = f"{row.spec} (layer)" if row.level == "layer" else row.spec
        length = f"{row.n:,}" if last is None or last.n != row.n else ""
        result.add_row(
            length, name, seconds(row.seconds), sign + against(row.ratio), size(row.memory), count(row.flops)
        )
    return result


def remarks(rows: Sequence[Row]) -> list[str]:
    """What the columns mean."""
    lines = [
        "memory: peak growth of a fresh process during one step, including output and gradients, without the inputs"
    ]
    if any(row.level == "layer" for row in rows):
        lines.append("(layer): a whole layer with its projections, compared with a layer of full attention")
    if any(row.flops is None for row in rows):
        lines.append("FLOPs –: it runs on kernels that the counter does not know")
    return lines


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def against(ratio: float) -> str:
    """Time over full attention's, in words."""
    return f"{1 / ratio:.2f}× faster" if ratio < 0.995 else f"{ratio:.2f}× slower" if ratio > 1.005 else "1"


def size(memory: int | None) -> str:
    return "–" if memory is None else f"{memory / 2**20:,.0f} MiB"


def count(flops: int | None) -> str:
    if flops is None:
        return "–"
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= factor:
            return f"{flops / factor:.3g} {unit}"
    return f"{flops:,}"
