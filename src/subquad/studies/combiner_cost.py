"""What every Combiner plan costs over the length n, against the exponent it declares.

    operations   counted: 2 per multiply-add of all matrix products of a forward, masked pairs inside blocks included
    memory       measured: how far a fresh process grows at its peak during one forward and backward, inputs not counted
    exponent     the slope of the least-squares line through (log n, log cost)

Every knob stands at its default, which follows n: spans and columns ≈ √n, clusters = ⌈√n⌉, a tree's branches ≈ n^(1/3).
The declared exponent is that of the operations; nothing of the size of the scores is kept, so memory grows like n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from subquad.attention.registry import attention
from subquad.bench import Setting, peak_memory
from subquad.core.numbers import growth_exponent
from subquad.plots import save

PLANS = {
    "fixed": "combiner-fixed",
    "vertical": "combiner-axial:plan=vertical",
    "horizontal": "combiner-axial:plan=horizontal",
    "rowmajor": "combiner-axial:plan=rowmajor",
    "mixture": "combiner-mixture",
    "routing": "combiner-routing:max_length={n}",
    "tree": "combiner-tree",
    "logsparse": "combiner-logsparse",
}
LENGTHS = (1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class Row:
    """One plan at one length."""

    plan: str
    n: int
    declared: float  # exponent
    operations: int  # of one head of width 64
    memory: int | None  # bytes; None = not measured


def operations(plan: str, n: int, causal: bool = True) -> tuple[int, float]:
    """Operations of the forward of one head of width 64, and the declared exponent.

    All products have the width as a factor, so the count of a narrow head tells that of a wide one.
    """
    width = 8
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = attention(PLANS[plan].format(n=n), num_heads=1, head_dim=width, causal=causal).eval()
        q, k, v = torch.randn(3, 1, 1, n, width)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(q, k, v)
    return counter.get_total_flops() * 64 // width, module.exponent


def run(
    lengths: Sequence[int] = LENGTHS,
    *,
    causal: bool = True,
    heads: int | None = 2,
    report: Callable[[Row], Any] = lambda row: None,
) -> list[Row]:
    """Count and measure every plan; memory with `heads` heads of width 64, None leaves it out."""
    rows = []
    for plan, spec in PLANS.items():
        for n in lengths:
            memory = None
            if heads is not None:
                setting = Setting(heads=heads, causal=causal, backward=True)
                memory = peak_memory(spec.format(n=n), "head", n, setting)
            count, declared = operations(plan, n, causal)
            rows.append(Row(plan, n, declared, count, memory))
            report(rows[-1])
    return rows


def by_plan(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.plan, []).append(row)
    return found


# ---- table and plot -----------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """One line per plan: the declared exponent, then operations (GFLOP) and memory (MiB) over n and their slopes."""
    lengths = sorted({row.n for row in rows})
    measured = all(row.memory is not None for row in rows)
    title = "".join(f"{n:>9,}" for n in lengths) + f"{'slope':>7}"
    lines = [f"{'plan':10} {'declared':>8}  {title}" + (f"  |{title}" if measured else "")]
    for plan, of in by_plan(rows).items():
        counts = [row.operations for row in of]
        line = f"{plan:10} {of[0].declared:8.2f}  " + "".join(f"{count / 1e9:9.3f}" for count in counts)
        line += f"{growth_exponent(lengths, counts):7.2f}"
        if measured:
            sizes = [row.memory or 0 for row in of]
            line += (
                "  |" + "".join(f"{size / 2**20:9.1f}" for size in sizes) + f"{growth_exponent(lengths, sizes):7.2f}"
            )
        lines.append(line)
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path | str) -> Path:
    """Operations and memory over n, log-log, with lines of the slopes 1, 1.5 and 2 to compare."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    for plan, of in by_plan(rows).items():
        style = {"marker": "o", "markersize": 4, "label": f"{plan} (declared {of[0].declared:.2f})"}
        axes[0].plot([row.n for row in of], [row.operations for row in of], **style)
        if of[0].memory is not None:
            axes[1].plot([row.n for row in of], [(row.memory or 0) / 2**20 for row in of], **style)
    for axis, title, unit in zip(axes, ("operations", "peak memory"), ("FLOP, one head", "MiB"), strict=True):
        axis.set(title=title, xlabel="length n", ylabel=unit, xscale="log", yscale="log")
        bottom, first, last = axis.get_ylim()[0], rows[0].n, max(row.n for row in rows)
        for power in (1, 1.5, 2):
            ends = [bottom * 1.3, bottom * 1.3 * (last / first) ** power]
            axis.plot([first, last], ends, color="grey", linestyle=":", linewidth=1)
            axis.annotate(f"n^{power:g}", (last, ends[1]), fontsize=7, color="grey")
    axes[0].legend(fontsize=7)
    return save(figure, path, dpi=130)


def show(causal: bool, heads: int, longest: int, png: Path) -> None:
    """Operations and memory of every Combiner plan over n, against the declared exponent: a table and a plot."""
    lengths = [n for n in LENGTHS if n < longest] + [longest]

    def report(row: Row) -> None:
        memory = (row.memory or 0) / 2**20
        print(f"{row.plan:10} n = {row.n:>7,}  {row.operations / 1e9:9.3f} GFLOP  {memory:9.1f} MiB", flush=True)

    rows = run(lengths, causal=causal, heads=heads, report=report)
    print(table(rows))
    print(f"drawn: {draw(rows, png)}")
