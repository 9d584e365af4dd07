"""`subquad bench --decode SPEC…`: a decode step against full attention over a cache, the state, and the prefill."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from subquad.cli.tables import show_table
from subquad.core.console import err, out

if TYPE_CHECKING:
    from subquad.bench import Setting
    from subquad.bench_decode import DecodeRow


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
    show_table(console, table(rows))
    for line in (
        "full: scaled_dot_product_attention over a preallocated key/value cache; state: against that cache",
        f"prefill: the n tokens in chunks of {chunk:,}, against one call of the mechanism, which keeps no state;",
        "its memory: growth of resident memory in chunks, and in one call",
    ):
        console.print(line, style="dim", soft_wrap=True)
    if json is not None:
        console.print(f"results: {json}", soft_wrap=True)


def table(rows: Sequence[DecodeRow]) -> Table:
    """One line per mechanism and length; full attention first, as the measure."""
    from subquad.cli.bench_table import against, seconds

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
