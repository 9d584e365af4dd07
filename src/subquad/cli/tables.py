"""Tables that can be read in any window."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text


def show_table(console: Console, table: Table) -> None:
    """A table. In a window that is too narrow for its words, each row is a name with its facts below it."""
    if table_width(table) <= console.width:
        console.print(table)
        return
    name = next((i for i, column in enumerate(table.columns) if column.header == "attention"), 0)
    titles = [str(column.header) for column in table.columns]
    columns = [_filled(column) if i == 0 else list(column.cells) for i, column in enumerate(table.columns)]
    for row in zip(*columns, strict=True):
        console.print(Text(str(row[name]), "bold"), soft_wrap=True)
        for i, (title, cell) in enumerate(zip(titles, row, strict=True)):
            if i != name and str(cell):
                console.print(Padding(Text(f"{title}: {cell}"), (0, 0, 0, 2)))


def table_width(table: Table) -> int:
    """The columns of a window in which no word of the table is broken."""
    gaps = 2 * (len(table.columns) - 1)
    return gaps + sum(max(_least(text, column) for text in (column.header, *column.cells)) for column in table.columns)


def _least(text: object, column: Column) -> int:
    return max((cell_len(word) for word in ([str(text)] if column.no_wrap else str(text).split())), default=0)


def _filled(column: Column) -> list[str]:
    """A blank cell of the first column means the one above it."""
    last, cells = "", []
    for cell in column.cells:
        last = str(cell) or last
        cells.append(last)
    return cells
