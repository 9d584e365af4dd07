"""`subquad explore`: one HTML file that shows who attends to whom, or what a trained model attends to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.attention.registry import available, check_name
from subquad.core.console import err, out
from subquad.core.files import model_folder
from subquad.core.options import split_list


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: subquad explore out/train/lm-bytes/full/seed0 --text chapter.txt -o reading.html")(
        explore
    )


def explore(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="Folder of a finished run, or of its model.", show_default=False),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="With RUN, the text to read: UTF-8, up to 8,192 tokens.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file to write. Default: explorer.html, with RUN reading.html."),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="Without RUN, only these mechanisms, comma-separated. Default: all.", show_default=False),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="With RUN, only these layers, comma-separated from 0. Default: all.", show_default=False),
    ] = None,
) -> None:
    """Write one self-contained HTML page to explore attention; it opens offline in any browser.

    Without RUN it shows who attends to whom: every mechanism over a grid of its options, causal and bidirectional,
    with its summaries, its hop sets and its cost. With RUN and --text it shows what a trained model attends to in a
    text, by layer, head and token. A page is at most 8 MB large, and states what had to be left out.
    """
    if (run is None) != (text is None):
        raise typer.BadParameter("RUN and --text belong together: give both to see a trained model, or neither")
    if run is not None and attention is not None:
        raise typer.BadParameter("--attention belongs to the page without RUN; a run has its own attention")
    if run is None and layers is not None:
        raise typer.BadParameter("--layers belongs to the page of a trained model: give RUN and --text as well")
    path = output or Path("explorer.html" if run is None else "reading.html")
    if run is None:
        _patterns(path, attention)
    else:
        assert text is not None
        _trained(run, text, path, layers)
    size = path.stat().st_size
    out().print(f"explorer: {path} ({size / 1e6:.1f} MB)", soft_wrap=True)


def _patterns(path: Path, attention: str | None) -> None:
    names = list(available()) if attention is None else split_list(attention)
    for name in names:
        check_name(name, used=False)  # a pattern of one's own is shown with an example
        if name not in available():
            raise typer.BadParameter(f"--attention takes names without options, not {name!r}: the page has controls")
    from subquad.explorer.page import check_output, render, save

    check_output(path)
    from subquad.explorer.patterns import describe_patterns

    with _progress(len(names)) as tell:
        data = describe_patterns(names, tell)
    save(render("patterns", "Who attends to whom", data), path)


def _trained(run: Path, text: Path, path: Path, layers: str | None) -> None:
    model_folder(run)  # a wrong one is refused before torch is loaded
    from subquad.explorer.page import check_output, read_text, save

    check_output(path)
    read_text(text)
    wanted = None if layers is None else _numbers(layers)
    from subquad.training.start import quiet

    quiet()
    from subquad.explorer.trained import read_run

    with _progress(None) as tell:
        page = read_run(run, text, wanted, tell)
    save(page, path)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--layers must be comma-separated numbers such as 0,3, not {text!r}") from None


@contextmanager
def _progress(steps: int | None) -> Iterator[Any]:
    """A bar on a terminal, elsewhere nothing; `tell(what)` begins the next step."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console, last = err(), None
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("preparing", total=steps)

        def tell(what: str) -> None:
            nonlocal last
            if last is not None:
                bar.advance(task)
            last = what
            bar.update(task, description=what)

        yield tell
