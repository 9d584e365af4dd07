"""`subquad show SPEC`: what a mechanism is, its options, its cost and its picture."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from subquad.attention.registry import available, check_direction, check_name, for_length, mechanism
from subquad.cli.plot import LONGEST, Causal, Spec
from subquad.cli.tables import show_table
from subquad.core.console import out
from subquad.core.files import ENDINGS, check_picture
from subquad.core.numbers import possible_pairs

if TYPE_CHECKING:
    from subquad.attention.base import Attention
    from subquad.core.options import Options


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: subquad show strided:w=8,heads=union --n 32 --causal")(show)


def show(
    spec: Spec,
    n: Annotated[
        int, typer.Option("--n", min=1, max=LONGEST, help="Length of the sequence that is counted and drawn.")
    ] = 64,
    causal: Causal = None,
    png: Annotated[
        Path | None, typer.Option(help=f"Draw the picture into this file ({ENDINGS}) instead of the terminal.")
    ] = None,
) -> None:
    """Explain a mechanism: what it is, its options, its cost, and who attends to whom."""
    check_name(spec, used=False)
    check_direction(spec, causal)
    check_picture(png, "--png")
    from subquad.plots import draw_support, panels, save, tally

    console = out()
    only = mechanism(spec).python_only if spec in available() else ""
    try:
        attention = for_length(spec, n, causal=causal, **(mechanism(spec).gallery if only else {}))
        pictures = panels(attention.picture(n))
    except ValueError:
        if spec in available():  # it needs options, which are best explained before the error
            _explain(mechanism(spec), None, console)
        raise
    _explain(type(attention), attention.options, console)
    if only:
        example = f"{only} can only be given in Python: subquad.attention({spec!r}, {only}=…); this is an example"
        console.print(Text(example), soft_wrap=True)
    for line in _facts(attention, n, [(heads, *tally(picture)) for heads, picture in pictures]):
        console.print(line, soft_wrap=True)
    if png is not None:
        save(draw_support(attention, n, title=spec), png)
        console.print(f"\npicture: {png}", soft_wrap=True)
        return
    _draw(pictures, console)


def _explain(cls: type[Attention], options: Options | None, console: Console) -> None:
    """What it is, and its options; without a configured mechanism (None), the defaults."""
    console.print(Text.assemble((cls.name, "bold"), f"  {cls.family} · {cls.paper}"))
    console.print()
    console.print(Text(inspect.cleandoc(cls.__doc__ or "")), soft_wrap=True)
    console.print()
    show_table(console, _options(cls, options))
    console.print()


def _options(cls: type[Attention], options: Options | None) -> Table:
    """Own options first, then those that every mechanism has; a value that is not the default stands out."""
    from subquad.core.options import Options, fields

    shared = {field.name for field in fields(Options)}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("option", "value", "default", "allowed", "meaning"):
        table.add_column(title, no_wrap=title == "option")
    for field in sorted(fields(cls.Options), key=lambda field: field.name in shared):
        value = getattr(options, field.name, field.default)
        style = "bold" if value is not field.default and value != field.default else ""
        name = Text(field.name, style="" if field.name in shared else "bold")
        table.add_row(name, Text(_short(value), style), _short(field.default), field.allowed(), field.help)
    return table


def _short(value: Any) -> str:
    """A value as a spec writes it."""
    if isinstance(value, tuple):
        return "+".join(str(item) for item in value)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 24 else type(value).__name__


def _facts(attention: Attention, n: int, tallies: list[tuple[str, int, int]]) -> list[Text]:
    able = attention.capabilities
    ways = [way for way in ("causal", "bidirectional", "cross", "padding", "streaming") if getattr(able, way)]
    possible = possible_pairs(n, attention.options.causal)
    growth = f"grows like n^{attention.exponent:.3g}, up to logarithms, with these options"
    facts = {"cost": f"{growth} (in general {attention.cost})", "supports": ", ".join(ways)}
    for heads, direct, summary in tallies:
        label = f"at n = {n}" + (f", {heads}" if heads else "")
        sparsity = 1 - (direct + summary) / possible
        parts = f" ({direct:,} direct, {summary:,} through summaries)" if summary else ""
        facts[label] = f"{direct + summary:,} of {possible:,} connections{parts}, sparsity {sparsity:.1%}"
    report = getattr(attention, "cost_report", None)
    if report is not None:
        counts = {name: value for name, value in report(n).items() if name != "exponent"}  # the cost says it
        facts |= {name: f"{value:,}" if isinstance(value, int) else f"{value:g}" for name, value in counts.items()}
    return [Text.assemble((f"{name}: ", "bold"), fact) for name, fact in facts.items()]


def _draw(pictures, console: Console) -> None:
    from subquad.cli.terminal import SIGNS, draw, plain
    from subquad.plots import COLOURS, KINDS

    kinds = sorted({int(kind) for _, picture in pictures for kind in picture.unique()} | {0, 1})
    for label, picture in pictures:
        console.print()
        if label:
            console.print(label, style="bold")
        console.print(draw(picture, console), soft_wrap=True)
    legend = Text()
    for kind in kinds:
        legend.append(SIGNS[kind] if plain(console) else "■", "" if plain(console) else COLOURS[kind])
        legend.append(f" {KINDS[kind]}   ")
    console.print(legend.append("row = query, column = key"))
