"""One sequence over several processes: the bytes that are sent, the memory and the time of a step.

    subquad study processes --json docs/results/processes.json --write docs/distributed.md

Bytes are counted on tensors without data, for any length; memory is measured in fresh processes. Times need a quiet
machine: one process and several are measured in turn, and every round is kept. Results are kept as they come: run the
same command again to continue, and delete the file first to measure everything anew.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from subquad import bench
from subquad.bench import FULL, Setting
from subquad.bench_processes import bytes_sent, peak_memory, step_seconds
from subquad.studies import tables

LENGTHS, PROCESSES = (16_384, 65_536, 1 << 20), 4  # of the bytes
SENT = (
    FULL, "combiner-fixed", "combiner-window", "combiner-tree", "composite-slice:slice_length=32",
    "longformer:window=256", "local", "strided", "strided:heads=union", "fixed:heads=union", "long-short",
    "linear", "performer", "cosformer",
)  # fmt: skip
STEP = 32_768  # tokens of a step
MEMORY = ("combiner-fixed", "longformer:window=256", "composite-slice:slice_length=32")
TIMED = (  # rows that are measured in turn: spec, layout, n, processes
    tuple(("combiner-fixed", "contiguous", STEP, p) for p in (1, 2)),
    ((FULL, "contiguous", 8192, 1), (FULL, "contiguous", 8192, 2), (FULL, "zigzag", 8192, 2)),
)
SETTING = Setting(causal=True, backward=True)
Rows = list[dict[str, Any]]
Make = Callable[[], Rows]


def sent(rounds: int) -> Iterator[tuple[Rows, Make]]:
    """What a process sends in one layer, of every mechanism and length, in both directions."""
    for causal, spec, n in itertools.product((True, False), SENT, LENGTHS):

        def count(causal=causal, spec=spec, n=n) -> Rows:
            one = bytes_sent(spec, n, PROCESSES, Setting(causal=causal, backward=True))
            return [{"forward": one.forward, "backward": one.backward}]

        yield [{"spec": spec, "causal": causal, "n": n}], count


def memory(rounds: int) -> Iterator[tuple[Rows, Make]]:
    """The largest process of a step, on 1, 2 and 4 processes."""
    for spec, p in itertools.product(MEMORY, (1, 2, PROCESSES)):

        def peak(spec=spec, p=p) -> Rows:
            return [{"bytes": peak_memory(spec, STEP, p, SETTING)}]

        yield [{"spec": spec, "n": STEP, "processes": p}], peak


def times(rounds: int) -> Iterator[tuple[Rows, Make]]:
    """Seconds of a step: those of a group one after the other, in every round."""
    for number, rows in itertools.product(range(rounds), TIMED):
        about = [dict(zip(("spec", "layout", "n", "processes"), row, strict=True)) for row in rows]

        def measure(about=about) -> Rows:
            return [{"seconds": step_seconds(**one, setting=SETTING, repeats=2)} for one in about]

        yield [{**one, "round": number} for one in about], measure


PARTS: dict[str, Callable[[int], Iterator[tuple[Rows, Make]]]] = {"sent": sent, "memory": memory, "times": times}


def run(path: Path, parts: Sequence[str], rounds: int) -> None:
    """Count and measure what the file does not have yet."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    about = bench.report([], SETTING)
    for part in parts:
        for rows, make in PARTS[part](rounds):
            known = [{key: row.get(key) for key in rows[0]} for row in kept.get(part, [])]
            if all(row in known for row in rows):
                continue
            made = [{**row, **found} for row, found in zip(rows, make(), strict=True)]
            kept = {**{key: about[key] for key in ("versions", "machine", "setting")}, **kept}
            kept[part] = [*kept.get(part, []), *made]
            bench.write(path, kept)


# ---- tables ---------------------------------------------------------------------------------------------------------


def sent_table(result: dict[str, Any], words: Sequence[str]) -> str:
    """MiB forward + backward, and how small a part of the ring that is; `words`: causal."""
    rows = [row for row in result["sent"] if row["causal"] == ("causal" in words)]
    at = {(row["spec"], row["n"]): row for row in rows}
    lengths, lines = sorted({row["n"] for row in rows}), []
    for spec in dict.fromkeys(row["spec"] for row in rows):
        cells = [f"`{spec}`{', ring' * (spec == FULL)}"]
        for n in lengths:
            own, ring = at[spec, n], at[FULL, n]
            share = (ring["forward"] + ring["backward"]) / (own["forward"] + own["backward"])
            cells += [f"{_mib(own['forward'])} + {_mib(own['backward'])}", f"1/{share:,.0f}" if share >= 1.05 else "1"]
        lines.append(cells)
    titles = [title for n in lengths for title in (f"{n:,}", "of the ring")]
    return tables.markdown(["causal" if "causal" in words else "bidirectional", *titles], lines)


def _mib(size: int) -> str:
    mib = size / 2**20
    return f"{mib:,.0f}" if mib >= 100 else f"{mib:.1f}" if mib >= 10 else f"{mib:.2f}"


def memory_table(result: dict[str, Any], words: Sequence[str]) -> str:
    """Of every mechanism: the peak of a process, and its share of that of a single process."""
    rows = result["memory"]
    at = {(row["spec"], row["processes"]): row["bytes"] for row in rows}
    counts, lines = sorted({row["processes"] for row in rows}), []
    for spec in dict.fromkeys(row["spec"] for row in rows):
        cells = [f"{at[spec, p] / 2**20:,.0f} MiB" for p in counts]
        cells[1:] = [f"{cell} ({at[spec, p] / at[spec, 1]:.2f})" for cell, p in zip(cells[1:], counts[1:], strict=True)]
        lines.append([f"`{spec}`", *cells])
    return tables.markdown(["peak of a process", *(f"{p} process{'es' * (p > 1)}" for p in counts)], lines)


def time_table(result: dict[str, Any], words: Sequence[str]) -> str:
    """Medians of the rounds, and the speed-up over one process in the same round, with its range."""
    found: dict[tuple, list[float]] = {}
    for row in sorted(result["times"], key=lambda row: row["round"]):
        found.setdefault((row["spec"], row["n"], row["processes"], row["layout"]), []).append(row["seconds"])
    lines = []
    for (spec, n, p, layout), seconds in sorted(found.items()):
        ratios = [a / b for a, b in zip(found[spec, n, 1, "contiguous"], seconds, strict=True)]
        shown = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if p > 1 else ""
        name = f"`{spec}`{f', {layout}' * (spec == FULL and p > 1)}"
        lines.append([name, f"{n:,}", str(p), f"{median(seconds):.2f} s", shown])
    return tables.markdown(["attention", "tokens", "processes", "time of a step", "speed-up"], lines)


SHOWN: dict[str, Callable[[dict[str, Any], Sequence[str]], str]] = {
    "sent": sent_table,
    "memory": memory_table,
    "times": time_table,
}


def show(path: Path, write: Sequence[Path], parts: Sequence[str], rounds: int) -> None:
    """Bytes, memory and time of one sequence that is divided among processes. Times need a quiet machine."""
    run(path, parts, rounds)
    for each in write:
        tables.update(each, path.parent)
