"""A wish → the mechanisms in order, each with what it costs and what is known of it; or the nearest possible wishes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from subquad.advice.costs import Costs, Size, crossover
from subquad.advice.points import Points, Subject, calibration_file, shipped, subjects
from subquad.advice.quality import Nearest, Score, Trial, nearest, read_scores, results_folder, trial_for
from subquad.advice.reach import Reach, reach
from subquad.attention.registry import available
from subquad.core.options import split_spec

SHOWN = tuple(2**k for k in range(6, 23))  # lengths among which a crossover is looked for
LONGEST = 2**50  # a length that nothing reaches
DEEP = 12  # layers of a model whose depth is not given, in which tokens should reach each other


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What somebody wants to run; `memory` in bytes."""

    n: int
    width: int
    heads: int
    memory: int
    causal: bool = False
    batch: int = 1
    layers: int = 1
    train: bool = False
    decode: bool = False

    def __post_init__(self) -> None:
        for name in ("n", "width", "heads", "memory", "batch", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer ≥ 1, not {getattr(self, name)}")
        if self.n > LONGEST:
            raise ValueError(f"n must be at most 2^50, not {self.n:,}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads={self.heads}, not {self.width}")
        if self.decode and self.train:
            raise ValueError("decode and train are different wishes: choose one")
        if self.decode and not self.causal:
            raise ValueError("decode needs causal: tokens are generated one after another")

    @property
    def size(self) -> Size:
        return Size(self.n, self.width, self.heads, self.batch)

    @property
    def quantity(self) -> str:
        return "train" if self.train else "forward"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mechanism: seconds of a layer's step, bytes of all layers."""

    spec: str
    seconds: float  # of what the wish is about: a forward pass, a training step, or a decode step
    full_seconds: float
    bytes: float
    fits: bool
    longest: int  # the length up to which it fits
    faster_from: int | None  # the length from which it is faster than full attention; None = none that was looked at
    reach: Reach | None = None  # None = the theory does not say
    decode_seconds: float | None = None  # None = it cannot stream
    state_bytes: float | None = None
    score: Score | None = None

    def reaches(self, layers: int) -> bool:
        """Does every token reach every other in a model of so many layers? One layer stands for an unknown depth."""
        if self.reach is None or self.reach.layers is None:
            return False
        return self.reach.layers <= (layers if layers > 1 else DEEP)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The answer: rows in order, those that fit first."""

    wish: Wish
    rows: list[Row]
    machine: dict[str, Any]
    versions: dict[str, Any]
    measured_here: bool
    unmeasured: list[str]  # registered, has this direction, not calibrated here
    results: Nearest | None

    @property
    def fitting(self) -> list[Row]:
        return [row for row in self.rows if row.fits]

    @property
    def best(self) -> list[Row]:
        """The first three that fit, full attention aside."""
        return [row for row in self.fitting if row.spec != "full"][:3]

    @property
    def trial(self) -> Trial | None:
        """What to compare the first three on."""
        specs = [row.spec for row in self.best]
        return trial_for(self.wish.n, self.wish.causal, specs) if specs else None

    def command(self) -> str | None:
        """That compares the first three with full attention."""
        trial = self.trial
        if trial is None:
            return None
        settings = "".join(f" --set {setting}" for setting in trial.settings)
        return f"subquad compare {trial.task}{settings} --attention {','.join(['full', *(r.spec for r in self.best)])}"


def sources(causal: bool, here: dict[str, Any]) -> tuple[Costs, Points, bool, str | None]:
    """The cost model, its points, whether they were measured here, and why not, where there is a file."""
    default, path, why = shipped(), calibration_file(), None
    if path.exists():
        own = Points.read(path)
        different = [key for key in ("machine", "versions") if own.about[key] != here[key]]
        if different:
            why = f"{path} was measured with other {' and '.join(different)}: run `subquad calibrate` again"
        elif not any(subject.causal == causal for subject in own):
            why = f"{path} has nothing {'causal' if causal else 'bidirectional'}: run `subquad calibrate`"
        else:
            return Costs(own, default), own, True, None
    return Costs(default), default, False, why


def advise(
    wish: Wish,
    costs: Costs,
    points: Points,
    *,
    specs: Sequence[str] | None = None,
    measured_here: bool = False,
    tell: Callable[[str], None] = lambda what: None,
) -> Advice:
    """All measured mechanisms of this direction, or `specs` of them, in order."""
    known = [subject.spec for subject in costs.subjects if subject.causal == wish.causal]
    named = [spec for spec in known if split_spec(spec)[0] in available()]
    for spec in specs or ():
        if spec not in named:
            subjects([spec], (wish.causal,), strict=True)  # refuses options that cannot be, and a direction it lacks
            command = f"subquad calibrate {spec}"
            way = "causal" if wish.causal else "bidirectional"
            raise ValueError(f"{spec} ({way}) has not been measured on this machine: run `{command}` first")
    chosen = list(specs) if specs else named
    folder = results_folder()
    results = None if folder is None else nearest(read_scores(folder), wish.n, wish.causal)
    rows = []
    for spec in chosen:
        tell(spec)
        if wish.decode and not costs.knows(Subject(spec, True), "decode"):
            continue
        rows.append(make_row(wish, costs, spec, results))
    return Advice(
        wish=wish,
        rows=sorted(rows, key=lambda row: order(row, wish)),
        machine=points.about["machine"],
        versions=points.about["versions"],
        measured_here=measured_here,
        unmeasured=[] if specs else _unmeasured(wish, known),
        results=results,
    )


def order(row: Row, wish: Wish) -> tuple[bool, bool, float]:
    """What fits comes first, then that in which every token reaches every other, then the fast."""
    return not row.fits, not row.reaches(wish.layers), row.seconds if row.fits else row.bytes


def make_row(wish: Wish, costs: Costs, spec: str, results: Nearest | None) -> Row:
    subject, size = Subject(spec, wish.causal), wish.size
    full = Subject("full", wish.causal)
    streams = wish.causal and costs.knows(subject, "decode")
    step = costs.decode_seconds(subject, size) if streams else None
    seconds = step if wish.decode and step is not None else costs.seconds(subject, size, wish.quantity)
    whole = needed(wish, costs, subject, wish.n)
    return Row(
        spec=spec,
        seconds=seconds,
        full_seconds=costs.decode_seconds(full, size) if wish.decode else costs.seconds(full, size, wish.quantity),
        bytes=whole,
        fits=whole <= wish.memory,
        longest=longest(wish, costs, subject),
        faster_from=None if spec == "full" else crossover(costs, subject, size, wish.quantity, SHOWN),
        reach=reach(subject, wish.n),
        decode_seconds=step,
        state_bytes=costs.state_bytes(subject, size) if streams else None,
        score=None if results is None else results.of(spec),
    )


def needed(wish: Wish, costs: Costs, subject: Subject, n: int) -> float:
    """Bytes of all layers: of a step on n tokens, or of the states after them and one decode step."""
    size = wish.size._replace(n=n)
    if not wish.decode:
        return costs.bytes(subject, size, wish.quantity, wish.layers)
    one = size._replace(n=1)
    return wish.layers * costs.state_bytes(subject, size) + costs.bytes(subject, one, "forward", wish.layers)


def longest(wish: Wish, costs: Costs, subject: Subject) -> int:
    """The longest sequence that fits; 0 = none."""
    low, high = 0, 1
    while needed(wish, costs, subject, high) <= wish.memory:
        low, high = high, 2 * high
        if high > LONGEST:
            return LONGEST
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if needed(wish, costs, subject, middle) <= wish.memory else (low, middle)
    return low


def _unmeasured(wish: Wish, known: Sequence[str]) -> list[str]:
    return [subject.spec for subject in subjects(ways=(wish.causal,)) if subject.spec not in known]
