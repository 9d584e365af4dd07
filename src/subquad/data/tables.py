"""Rows of TSV files: one sentence or two, and a label or a score."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

from subquad.data.files import decoded

Row = tuple[str, str, float]  # first sentence, second or "", number of the label or the score


@dataclass(frozen=True)
class Columns:
    """Where a task's files have what. Without `header` the first line is a row, and the columns are named here."""

    folder: str
    first: str
    second: str | None
    label: str
    labels: tuple[str, ...]  # none: a score between 0 and 5
    rows: int  # of the training file
    header: tuple[str, ...] = ()
    dev: str = "dev.tsv"
    torn: bool = False  # the official file has rows that a line end tore apart: they are left out, and counted


def read_rows(where: str, content: bytes, c: Columns) -> Iterator[Row]:
    """Rows of a TSV file. Quotes are letters like all others; a cell ends at a tab and nowhere else."""
    header, torn = list(c.header), 0
    for number, line in decoded(where, BytesIO(content)):
        cells = line.split("\t")
        if not header:
            header = cells
            missing = [name for name in (c.first, c.second, c.label) if name and name not in header]
            if missing:
                raise ValueError(f"{where}, line {number}: the header has no column {missing[0]!r}: {line[:100]!r}")
        elif len(cells) == len(header):
            row = dict(zip(header, cells, strict=True))
            label = _label(f"{where}, line {number}", row[c.label], c.labels)
            yield row[c.first].strip(), row[c.second].strip() if c.second else "", label
        elif c.torn:
            torn += 1
        else:
            raise ValueError(f"{where}, line {number}: {len(cells)} columns, and {len(header)} are expected")
    if torn:
        warnings.warn(f"{where}: {torn} lines of rows torn apart by a line end left out", stacklevel=2)


def _label(where: str, text: str, labels: tuple[str, ...]) -> float:
    if labels:
        if text not in labels:
            raise ValueError(f"{where}: label {text!r} is not one of {', '.join(labels)}")
        return labels.index(text)
    try:
        score = float(text)
    except ValueError:
        raise ValueError(f"{where}: score {text!r} is not a number") from None
    if not 0 <= score <= 5:
        raise ValueError(f"{where}: score {text} is not between 0 and 5")
    return score
