"""`subquad bench SPEC… --processes 1,2,4`: one sequence over several processes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from subquad.cli.bench_table import describe, seconds, size
from subquad.cli.tables import show_table
from subquad.core.console import err, out


def show(
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
            _rows(table, spec, n, processes, setting, repeats, count_only)
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


def _rows(table: Table, spec: str, n: int, processes: Sequence[int], setting, repeats: int, count_only: bool) -> None:
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
