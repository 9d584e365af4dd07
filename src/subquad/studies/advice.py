"""Predictions of `subquad advise` beside measurements, on layers that no calibration has measured.

    subquad study advice --json docs/results/advice.json

Ten configurations are held back: lengths between those of the calibration and beyond them, other widths, heads and
batch sizes, both directions, forward passes and training steps. Time is the best of a few calls, memory the
growth of a fresh process, as in `subquad bench`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad import bench
from subquad.advice.costs import Costs, Size
from subquad.advice.measuring import about_here, best
from subquad.advice.points import Subject
from subquad.advice.ranking import sources
from subquad.bench import Setting, make_inputs, make_step

TIME, MEMORY = 0.25, 0.20  # errors that are allowed
LEAST = 0.5  # seconds of the calls of one measurement


@dataclass(frozen=True)
class Held:
    """One layer that the calibration has not measured."""

    spec: str
    causal: bool
    train: bool
    n: int
    width: int
    heads: int
    batch: int = 1

    @property
    def key(self) -> str:
        return " ".join(str(value) for value in asdict(self).values())

    @property
    def setting(self) -> Setting:
        return Setting(
            heads=self.heads,
            head_dim=self.width // self.heads,
            batch=self.batch,
            causal=self.causal,
            backward=self.train,
        )


HELD = (
    Held("combiner-fixed", True, True, 16384, 512, 8),
    Held("full", True, False, 4096, 512, 8),
    Held("longformer", False, True, 12288, 384, 6),
    Held("linear", True, False, 65536, 256, 4),
    Held("composite-slice", False, False, 24576, 512, 4),
    Held("strided", False, True, 1536, 1024, 16),
    Held("combiner-tree", True, False, 49152, 256, 8),
    Held("performer", False, True, 3072, 256, 8, 2),
    Held("moba", True, True, 6144, 512, 8),
    Held("h-transformer-1d", True, False, 512, 768, 12, 4),
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Predicted and measured: seconds of a layer's step, and bytes by which it raises the memory of a process."""

    about: dict[str, Any]
    seconds: float
    predicted_seconds: float
    bytes: int | None = None
    predicted_bytes: float | None = None

    @property
    def time_error(self) -> float:
        return self.predicted_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        if self.bytes is None or self.predicted_bytes is None:
            return None
        return self.predicted_bytes / self.bytes - 1


def predict(costs: Costs, held: Held) -> tuple[float, float]:
    """Seconds and bytes."""
    subject, size = Subject(held.spec, held.causal), Size(held.n, held.width, held.heads, held.batch)
    quantity = "train" if held.train else "forward"
    return costs.seconds(subject, size, quantity), costs.peak(subject, size, quantity)


def measure_seconds(held: Held) -> float:
    data = make_inputs("layer", held.n, held.setting)
    return best(make_step(held.spec, "layer", held.n, held.setting, data), LEAST)


def measure_bytes(held: Held) -> int:
    return bench.peak_memory(held.spec, "layer", held.n, held.setting)


def run(
    chosen: Sequence[Held],
    path: Path,
    *,
    memory: bool = True,
    minutes: float = math.inf,
    tell: Callable[[str], None] = lambda what: None,
) -> bool:
    """Measure what the file does not have yet; True when nothing is missing."""
    started = time.monotonic()
    kept = read(path)
    for held in chosen:
        row = kept.setdefault(held.key, {})
        wanted = {"seconds": measure_seconds} | ({"bytes": measure_bytes} if memory else {})
        for quantity, measure in wanted.items():
            if quantity in row:
                continue
            if (time.monotonic() - started) / 60 > minutes:
                return False
            tell(f"{held.spec} at n = {held.n:,}: {quantity}")
            row[quantity] = measure(held)
            path.parent.mkdir(parents=True, exist_ok=True)
            bench.write(path, {**about_here(), "rows": kept})
    return True


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The measurements of a file, which must be of this machine and these versions."""
    if not path.exists():
        return {}
    found, here = json.loads(path.read_text()), about_here()
    for key in ("versions", "machine"):
        if found[key] != here[key]:
            raise ValueError(f"{path} was measured with other {key} ({found[key]}): delete it to measure again")
    return found["rows"]


def compared(chosen: Sequence[Held], path: Path, costs: Callable[[bool], Costs]) -> list[Compared]:
    """What has been measured, beside the predictions of the cost model of its direction."""
    kept, found = read(path), []
    for held in chosen:
        row = kept.get(held.key, {})
        if "seconds" not in row:
            continue
        seconds, size = predict(costs(held.causal), held)
        found.append(
            Compared(
                about=asdict(held),
                seconds=row["seconds"],
                predicted_seconds=seconds,
                bytes=row.get("bytes"),
                predicted_bytes=size,
            )
        )
    return found


def lines(rows: Sequence[Compared]) -> list[str]:
    """The table, and how many predictions are within the bounds."""
    titles = f"{'layer':<44} {'time':>9} {'predicted':>9} {'':>6}  {'memory':>9} {'predicted':>9}"
    shown = [titles]
    for row in rows:
        a = row.about
        way, what = "causal" if a["causal"] else "both ways", "train" if a["train"] else "forward"
        name = f"{a['spec']} {way} {what}"
        size = f"{a['n']:,} × {a['width']}/{a['heads']}" + (f" × {a['batch']}" if a["batch"] > 1 else "")
        times = f"{1e3 * row.seconds:>6.0f} ms {1e3 * row.predicted_seconds:>6.0f} ms {row.time_error:>+6.0%}"
        memory = ""
        if row.memory_error is not None and row.bytes and row.predicted_bytes:
            sizes = f"{row.bytes / 2**20:>5.0f} MiB {row.predicted_bytes / 2**20:>5.0f} MiB"
            memory = f"  {sizes} {row.memory_error:>+6.0%}"
        shown += [f"{name:<34} {size}", f"{'':<44} {times}{memory}"]
    good = sum(abs(row.time_error) <= TIME for row in rows)
    sized = [row.memory_error for row in rows if row.memory_error is not None]
    small = sum(abs(error) <= MEMORY for error in sized)
    shown.append(f"time within {TIME:.0%}: {good} of {len(rows)}; memory within {MEMORY:.0%}: {small} of {len(sized)}")
    return shown


def show(
    path: Annotated[Path, typer.Option("--json", help="File that keeps the measurements.")] = Path("advice.json"),
    minutes: Annotated[float, typer.Option(help="Stop after about this many minutes.")] = math.inf,
    memory: Annotated[bool, typer.Option(help="Measure memory too.")] = True,
    measured: Annotated[bool, typer.Option("--measured", help="Measure nothing, only print the table.")] = False,
) -> None:
    """Compare the predictions of `subquad advise` with measurements of ten layers outside any calibration.

    The predictions are those of this machine's calibration where there is one. Run the same command again to resume.
    """
    if not measured and not run(HELD, path, memory=memory, minutes=minutes, tell=lambda text: print(text, flush=True)):
        print("not finished: run the same command again to resume")
    here = about_here()
    models = {causal: sources(causal, here) for causal in (True, False)}
    if not all(own for _, _, own, _ in models.values()):
        print("without a calibration of this machine (`subquad calibrate`): predictions are for another one")
    rows = compared(HELD, path, lambda causal: models[causal][0])
    print("\n".join(lines(rows)))


def add_to(app) -> None:
    """The command `subquad study advice`."""
    app.command("advice")(show)
