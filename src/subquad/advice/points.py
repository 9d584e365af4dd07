"""What is measured: layers of every mechanism at a few lengths and sizes, and the file that keeps the numbers.

subject      a mechanism with its options, causal or not; the projections of a layer alone are one too
quantity     "forward", "train", "decode" in seconds; "forward bytes", "train bytes", "kept bytes", "state bytes",
             "parameter bytes"
point        (length, heads, width of a head, [batch size,] value)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from subquad.attention.registry import available, for_length, mechanism
from subquad.core.files import write_atomically
from subquad.core.options import fields, split_spec
from subquad.data.cache import cache_directory

FORMAT = 1
BASE = (4, 64)  # heads and their width at which lengths are measured
LENGTHS = (64, 512, 2048, 8192, 32768)
MIDDLE = 2048  # the length at which other heads and widths are measured
VARIED = ((4, 32), (4, 128), (8, 64))
BATCHED = (512, *BASE, 4)  # rows of a batch: some kernels take one row as it is, and copy several
WIDER = ((4, 32), (8, 64), (16, 64))  # for the projections, whose cost is quadratic in the width of the layer
DECODED = (256, 1024, 4096)  # tokens before the decode step that is measured
PROJECTIONS = "projections"  # a layer without attention
UNITS = {"forward": "s", "train": "s", "decode": "s"}  # all others are bytes


class Shape(NamedTuple):
    """The size of what one measurement is about."""

    n: int
    heads: int
    head_dim: int
    batch: int = 1

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def is_base(self) -> bool:
        return self[1:] == (*BASE, 1)

    @property
    def numbers(self) -> tuple[int, ...]:
        """As they stand in a file, without a batch size of 1."""
        return self[: 3 if self.batch == 1 else 4]


class Subject(NamedTuple):
    """A mechanism with its options, in one direction."""

    spec: str
    causal: bool

    @property
    def key(self) -> str:
        return f"{self.spec} {'causal' if self.causal else 'bidirectional'}"

    @classmethod
    def of(cls, key: str) -> Subject:
        spec, _, way = key.rpartition(" ")
        return cls(spec, way == "causal")


ALONE = Subject(PROJECTIONS, False)


def subjects(
    specs: Iterable[str] | None = None, ways: Sequence[bool] = (True, False), *, strict: bool = False
) -> list[Subject]:
    """Those of the specs, or of all registered mechanisms that can be made from their names alone, in the directions
    that they have. `strict`: a spec that has none of the directions is refused.
    """
    found = []
    for spec in mechanisms() if specs is None else specs:
        able = mechanism(split_spec(spec)[0]).capabilities
        own = [Subject(spec, causal) for causal in ways if (able.causal if causal else able.bidirectional)]
        if strict and not own:
            raise ValueError(f"{spec} is {'causal only: add --causal' if able.causal else 'bidirectional only'}")
        found += own
    for subject in found:  # a spec that cannot be made is refused before anything runs
        for_length(subject.spec, 64, causal=subject.causal, num_heads=BASE[0], head_dim=BASE[1])
    return found


def mechanisms() -> list[str]:
    """The names that are a spec by themselves: none of their options is an object that has to be given."""
    return [name for name in available() if not any(field.type is Any for field in fields(mechanism(name).Options))]


def shapes(subject: Subject) -> list[Shape]:
    """Where times of a step are measured, in order."""
    base = [Shape(n, *BASE) for n in LENGTHS]
    if subject == ALONE:
        return base + [Shape(MIDDLE, *each) for each in WIDER]
    return [*base, *(Shape(MIDDLE, *each) for each in VARIED), Shape(*BATCHED)]


class Points:
    """Measured values: subject → quantity → points. `about` describes the machine and the versions, `rounds` says how
    many times all times of a subject have been measured.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.values: dict[Subject, dict[str, dict[Shape, float]]] = {}
        self.rounds: dict[Subject, int] = {}

    def add(self, subject: Subject, quantity: str, shape: Shape, value: float) -> None:
        """Of two times the shorter one is kept: what makes a step longer than that is not its own work."""
        known = self.values.setdefault(subject, {}).setdefault(quantity, {})
        known[shape] = min(value, known.get(shape, value)) if quantity in UNITS else value

    def of(self, subject: Subject, quantity: str) -> dict[Shape, float]:
        return self.values.get(subject, {}).get(quantity, {})

    def has(self, subject: Subject, quantity: str, shape: Shape) -> bool:
        return shape in self.of(subject, quantity)

    # ---- the file ----

    def write(self, path: Path) -> None:
        """One line per subject and quantity, so that a difference between two files can be read. Without a point there
        is no file: it would be taken for a calibration.
        """
        if not self.values:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            (
                f"{subject.key} | {quantity}",
                [[*shape.numbers, float(f"{value:.4g}")] for shape, value in sorted(points.items())],
            )
            for subject, quantities in sorted(self.values.items())
            for quantity, points in sorted(quantities.items())
        ]
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(points)}" for key, points in rows)
        rounds = {subject.key: count for subject, count in sorted(self.rounds.items())}
        about = json.dumps({"format": FORMAT, **self.about, "rounds": rounds}, indent=1)[:-2]
        write_atomically(path, f'{about},\n "points": {{\n{lines}\n }}\n}}\n')

    @classmethod
    def read(cls, path: Path) -> Points:
        """Refuses what no calibration has written."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                raise ValueError("another format")
            result = cls({key: found[key] for key in ("machine", "versions")})
            for key, points in found["points"].items():
                subject, _, quantity = key.partition(" | ")
                for *shape, value in points:
                    if not (math.isfinite(value) and value >= 0):
                        raise ValueError(f"{value!r} is not a measurement")
                    result.add(Subject.of(subject), quantity, Shape(*map(int, shape)), float(value))
            result.rounds = {Subject.of(key): int(count) for key, count in found.get("rounds", {}).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a calibration ({error}): delete it and run `subquad calibrate`") from None
        return result

    def __iter__(self) -> Iterator[Subject]:
        return (subject for subject in self.values if subject != ALONE)


def calibration_file() -> Path:
    """Where `subquad calibrate` keeps its points."""
    return cache_directory() / "calibration.json"


def shipped() -> Points:
    """The points that come with the package: measured on another machine."""
    return Points.read(Path(str(files("subquad.advice") / "defaults.json")))
