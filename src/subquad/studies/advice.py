"""Predictions of `subquad advise` beside measurements, on layers that no calibration has measured.

    subquad study advice --json docs/results/advice.json --write docs/advise.md

Ten layers are drawn with a fixed seed: their lengths are spread evenly, on a logarithmic scale, from 512 to 65,536, and
their mechanisms, directions, sizes, batch sizes and steps are random. Mechanisms with a quadratic part are drawn up to
`QUADRATIC` tokens. Time is the best of a few calls in each of `ROUNDS` rounds over all ten, every time in a fresh
process; memory is the growth of a process whose kernels are loaded.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from subquad import bench
from subquad.advice.costs import Costs, Size, exponent
from subquad.advice.measuring import about_here, fresh_seconds
from subquad.advice.peaks import Peaks
from subquad.advice.points import Shape, Subject, shapes, subjects
from subquad.advice.ranking import sources
from subquad.studies import tables

TIME, MEMORY = 0.25, 0.20  # errors that are allowed
ROUNDS = 3  # of times: a neighbour's burst rarely meets the same layer twice
LEAST = 0.5  # seconds of the calls of one measurement
SEED = 2027
COUNT = 10
SIZES = ((256, 4), (256, 8), (384, 6), (512, 4), (512, 8), (768, 12), (1024, 16))  # width and heads
BATCHES = (1, 2, 4)
LARGEST = 2**24  # numbers in one tensor, (B, n, E)
QUADRATIC = 4096


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
    def subject(self) -> Subject:
        return Subject(self.spec, self.causal)

    @property
    def shape(self) -> Shape:
        return Shape(self.n, self.heads, self.width // self.heads, self.batch)


def drawn(seed: int = SEED, count: int = COUNT) -> tuple[Held, ...]:
    """Layers of different mechanisms, from 512 to 65,536 tokens in multiples of 64."""
    chance, names, found = random.Random(seed), subjects(), []
    for i in range(count):
        n = 64 * round(8 * 128 ** (i / (count - 1)))
        subject = chance.choice([each for each in names if n <= QUADRATIC or exponent(each) < 2])
        names = [each for each in names if each.spec != subject.spec]
        width, heads = chance.choice([size for size in SIZES if n * size[0] <= LARGEST])
        fitting = [Shape(n, heads, width // heads, size) for size in BATCHES if size * n * width <= LARGEST]
        batch = chance.choice([shape.batch for shape in fitting if shape not in shapes(subject)])
        found.append(Held(subject.spec, subject.causal, chance.random() < 0.5, n, width, heads, batch))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Predicted and measured: seconds of a layer's step, and bytes by which it raises the memory of a process; None
    where it has not been measured yet.
    """

    about: dict[str, Any]
    predicted_seconds: float
    predicted_bytes: float
    seconds: float | None = None
    bytes: int | None = None

    @property
    def time_error(self) -> float | None:
        return None if self.seconds is None else self.predicted_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.bytes is None else self.predicted_bytes / self.bytes - 1


def predict(costs: Costs, held: Held) -> tuple[float, float]:
    """Seconds and bytes."""
    size, quantity = Size(held.n, held.width, held.heads, held.batch), "train" if held.train else "forward"
    return costs.seconds(held.subject, size, quantity), costs.peak(held.subject, size, quantity)


def measure_seconds(held: Held) -> float:
    return fresh_seconds(held.subject, held.shape, backward=held.train, least_seconds=LEAST)


def measure_bytes(held: Held) -> int:
    with Peaks() as peaks:
        return peaks.measure(held.subject, held.shape, backward=held.train)["peak"]


def run(
    chosen: Sequence[Held],
    path: Path,
    *,
    quantities: Sequence[str] = ("bytes", "seconds"),
    minutes: float = math.inf,
    tell: Callable[[str], None] = lambda what: None,
) -> bool:
    """Measure what the file does not have yet; True when nothing is missing."""
    end = time.monotonic() + 60 * minutes
    rows = read(path)
    for quantity, number in [(each, i) for each in quantities for i in range(ROUNDS if each == "seconds" else 1)]:
        for held in chosen:
            row = rows.setdefault(held.key, asdict(held))
            if (row.get("rounds", 0) > number) if quantity == "seconds" else (quantity in row):
                continue
            if time.monotonic() > end:
                return False
            tell(f"{held.spec} at n = {held.n:,}: {quantity}")
            if quantity == "bytes":
                row["bytes"] = measure_bytes(held)
            else:
                seconds = measure_seconds(held)
                row.update(seconds=min(seconds, row.get("seconds", seconds)), rounds=number + 1)
            write(path, rows)
    return True


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a file by their layers; it must be of this machine and these versions."""
    if not path.exists():
        return {}
    found, here = json.loads(path.read_text()), about_here()
    for key in ("versions", "machine"):
        if found[key] != here[key]:
            raise ValueError(f"{path} was measured with other {key} ({found[key]}): delete it to measure again")
    names = Held.__dataclass_fields__
    return {Held(**{name: row[name] for name in names}).key: row for row in found["rows"]}


def write(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    bench.write(path, {**about_here(), "rows": list(rows.values())})


def compare(chosen: Sequence[Held], path: Path, costs: Callable[[bool], Costs]) -> list[Compared]:
    """What has been measured beside the predictions of the cost model of its direction, which the file keeps too."""
    rows = read(path)
    measured = [(held, rows[held.key]) for held in chosen if {"seconds", "bytes"} & rows.get(held.key, {}).keys()]
    for held, row in measured:
        row["predicted_seconds"], row["predicted_bytes"] = predict(costs(held.causal), held)
    write(path, {held.key: rows[held.key] for held in chosen if held.key in rows})
    return [compared(row) for _, row in measured]


def compared(row: dict[str, Any]) -> Compared:
    """A row of the file."""
    figures = ("seconds", "predicted_seconds", "bytes", "predicted_bytes")
    about = {key: value for key, value in row.items() if key not in (*figures, "rounds")}
    return Compared(about=about, **{key: row[key] for key in figures if key in row})


# ---- what is shown --------------------------------------------------------------------------------------------------


def table(result: dict[str, Any], words: Sequence[str] = ()) -> str:
    """For the docs: the layers, and how many predictions are within the bounds."""
    rows = [compared(row) for row in result["rows"] if "predicted_seconds" in row]
    titles = ["layer", "tokens", "width / heads", "time, ms", "predicted", "error", "memory, MiB", "predicted", "error"]
    lines = []
    for row in rows:
        a = row.about
        way, what = "causal" if a["causal"] else "bidirectional", "training" if a["train"] else "forward"
        size = f"{a['width']} / {a['heads']}" + (f", batch {a['batch']}" if a["batch"] > 1 else "")
        line = [f"`{a['spec']}`, {way}, {what}", f"{a['n']:,}", size]
        line += cells(row.seconds, row.predicted_seconds, row.time_error, 1e-3)
        lines.append(line + cells(row.bytes, row.predicted_bytes, row.memory_error, 2**20))
    return f"{tables.markdown(titles, lines)}\n\n{tally(rows)}"


def cells(value: float | None, predicted: float, error: float | None, unit: float) -> list[str]:
    """Measured, predicted and the error, where something was measured."""
    if value is None or error is None:
        return ["", "", ""]
    return [
        *(f"{x / unit:,.0f}" if x >= 100 * unit else f"{x / unit:.3g}" for x in (value, predicted)),
        f"{error:+.0%}",
    ]


def tally(rows: Sequence[Compared]) -> str:
    """How many predictions are within the bounds, of those that something was measured for."""
    found = []
    for what, limit in (("time", TIME), ("memory", MEMORY)):
        errors = [error for row in rows if (error := getattr(row, f"{what}_error")) is not None]
        good = sum(abs(error) <= limit for error in errors)
        missing = f" ({COUNT - len(errors)} not measured yet)" if len(errors) < COUNT else ""
        found.append(f"{what.capitalize()} within {100 * limit:.0f} %: {good} of {len(errors)}{missing}.")
    return " ".join(found)


def show(
    path: Path, write: Sequence[Path], minutes: float, times: bool, memory: bool, seed: int, measured: bool
) -> None:
    """The command `subquad study advice`."""
    held, tell = drawn(seed), lambda text: print(text, flush=True)
    quantities = [name for name, wanted in (("bytes", memory), ("seconds", times)) if wanted]
    if not measured and not run(held, path, quantities=quantities, minutes=minutes, tell=tell):
        print("not finished: run the same command again to resume")
    models = {causal: sources(causal, about_here()) for causal in (True, False)}
    if not all(own for _, _, own, _ in models.values()):
        print("without a calibration of this machine (`subquad calibrate`): predictions are for another one")
    compare(held, path, lambda causal: models[causal][0])
    print(table(json.loads(path.read_text())))
    for each in write:
        tables.update(each, path.parent)
        print(f"table: {each}")
