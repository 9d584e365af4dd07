"""What a table or figure of a paper says, and how it is made again: data only, one file per paper beside this one.

Reproduction   a table or figure: its numbers, what the paper says of them, what is trained, counted or drawn
Column         a column of a table: a task, scaled down and at the paper's size
Method         a row: the paper's name of a method and our spec of it
Claim          one statement of the paper: this is better than that
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

SCALES = ("small", "paper")


class Scale(NamedTuple):
    """A recipe of the task, and what is changed of it. `begin`: every run begins with the encoder that its attention
    has trained in the task `mlm` at that scale.
    """

    recipe: str
    settings: tuple[str, ...] = ()
    begin: Scale | None = None


SMALL, PAPER = Scale("small"), Scale("paper")


@dataclass(frozen=True)
class Column:
    """What the numbers of a column are measured by. A column of something counted has no task, nor has one that is
    computed from others.
    """

    name: str
    task: str = ""
    small: Scale = SMALL
    paper: Scale = PAPER
    metric: str | None = None  # None = that of the task
    factor: float = 1.0  # from our unit to the paper's: 100 for per cent
    larger_is_better: bool | None = None  # None = as in the other columns
    mean_of: tuple[str, ...] = ()  # nothing is run: the mean of these columns, where all of them are there
    noise: float = 0.0  # of a measurement: what differs by this share or less cannot be told apart

    def scale(self, name: str) -> Scale:
        return self.small if name == "small" else self.paper


@dataclass(frozen=True)
class Method:
    """A row. `small` and `paper` are settings of this method alone, such as its length; `full` is the spec at the size
    of the paper, where it is another one.
    """

    name: str
    spec: str
    small: tuple[str, ...] = ()
    paper: tuple[str, ...] = ()
    full: str = ""

    def spec_at(self, scale: str) -> str:
        return self.full if scale == "paper" and self.full else self.spec

    def settings(self, scale: str) -> tuple[str, ...]:
        return self.small if scale == "small" else self.paper


@dataclass(frozen=True)
class Claim:
    """`better` is better than `worse` in the columns, by default in all that are not computed. Either may be a number
    in the unit of the paper: "this reaches 99" is Claim("this", 99), "this does not" is Claim(99, "this").
    """

    better: str | float
    worse: str | float
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reproduction:
    """A table or figure.

    kind      trained: every cell is a training run; measured: a function counts or measures the cells; drawn: a
              function draws the figure; same: the runs of another one; stated: there is nothing to run
    numbers   of the paper, by method, in the order of the columns; None where it has none
    spreads   their standard deviations, where the paper gives them
    differs   how the scaled-down version differs from the paper; `differs_paper`: how the full size still does
    too_big   why there is no scaled-down version; `--recipe paper` still runs
    """

    key: str
    place: str
    title: str
    kind: Literal["trained", "measured", "drawn", "same", "stated"] = "trained"
    columns: tuple[Column, ...] = ()
    methods: tuple[Method, ...] = ()
    numbers: dict[str, Sequence[float | None]] = field(default_factory=dict)
    spreads: dict[str, Sequence[float | None]] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    larger_is_better: bool = True
    rates: tuple[str, ...] = ()  # learning rates of the scaled-down version, of which each method gets its best
    rate_factors: tuple[float, ...] = ()  # at full size: the rates are those of each column's recipe times these
    function: str = ""  # "module:function" of what is measured or drawn
    same_as: str = ""
    differs: str = ""
    differs_paper: str = ""
    too_big: str = ""

    def number(self, method: str, column: str) -> float | None:
        """The paper's number of a cell."""
        return self._cell(self.numbers, method, column)

    def spread(self, method: str, column: str) -> float | None:
        return self._cell(self.spreads, method, column)

    def _cell(self, table: dict[str, Sequence[float | None]], method: str, column: str) -> float | None:
        place = [each.name for each in self.columns].index(column)
        row = table.get(method, ())
        return row[place] if place < len(row) else None

    @property
    def run_columns(self) -> tuple[Column, ...]:
        """Those that are run: all but the computed ones."""
        return tuple(each for each in self.columns if not each.mean_of)

    def larger(self, column: Column) -> bool:
        return self.larger_is_better if column.larger_is_better is None else column.larger_is_better


def check_possible(reproduction: Reproduction, scale: str) -> None:
    """Refuse what cannot be run at this scale."""
    if scale == "small" and reproduction.too_big:
        raise ValueError(
            f"{reproduction.key} cannot be scaled down: {reproduction.too_big}; --recipe paper runs it at full size"
        )
    if reproduction.kind == "stated":
        raise ValueError(f"{reproduction.key} has nothing to run ({reproduction.title}): {reproduction.differs}")


AVERAGE = Column("Average", mean_of=("ListOps", "Text", "Retrieval", "Image", "Pathfinder"))  # over the Arena


SMALL_ARENA = (
    "the small recipes of the tasks: shorter sequences, fewer steps, 2 layers of 64 (Retrieval: 1 of 32) and a linear "
    "classifier; one of the five files of CIFAR-10's training pictures; Retrieval is a stand-in of ACL papers, "
    "Pathfinder is drawn at 16 × 16"
)


def lra(percent: float = 100.0, recipe: str = "paper") -> tuple[Column, ...]:
    """The five tasks of the Long Range Arena, in the order of the papers."""
    tasks = {"ListOps": "listops", "Text": "text", "Retrieval": "retrieval", "Image": "image"}
    tasks["Pathfinder"] = "pathfinder"
    return tuple(Column(name, task, paper=Scale(recipe), factor=percent) for name, task in tasks.items())


def half_overlapping(length: int, scored: int | None = None) -> tuple[str, ...]:
    """Settings of a language model: windows of an evaluation that overlap by half, as many as score this many tokens
    (None = all there are), so that models of different lengths are measured by equally much text.
    """
    step = length // 2
    return f"length={length}", f"stride={step}", *(() if scored is None else (f"eval_size={scored // step}",))


MEASURED = 0.05  # the noise of times and memory
SCORED = 61_440  # tokens of books, in the scaled-down version


def limited(reproduction: Reproduction, methods: Sequence[str], columns: Sequence[str]) -> Reproduction:
    """The reproduction with these methods and columns only, all of them by default. A computed column goes with those
    that it is computed from.
    """
    for kind, asked, there in (("method", methods, reproduction.methods), ("column", columns, reproduction.columns)):
        names = [each.name for each in there]
        for name in asked:
            if name not in names:
                raise ValueError(f"{reproduction.key} has no {kind} {name!r}; it has {'; '.join(names) or 'none'}")
    needed = {each.name: set(each.mean_of or (each.name,)) for each in reproduction.columns}
    kept = set[str]().union(*(needed[name] for name in columns or needed))
    places = [i for i, each in enumerate(reproduction.columns) if needed[each.name] <= kept]
    return replace(
        reproduction,
        methods=tuple(each for each in reproduction.methods if not methods or each.name in methods),
        columns=tuple(reproduction.columns[i] for i in places),
        numbers={name: [row[i] for i in places] for name, row in reproduction.numbers.items()},
        spreads={name: [row[i] for i in places] for name, row in reproduction.spreads.items()},
    )
