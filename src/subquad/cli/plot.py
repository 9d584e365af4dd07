"""`subquad plot` and `subquad gallery`: pictures of who attends to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subquad.attention.registry import check_direction, check_name, for_length
from subquad.core.console import out
from subquad.core.files import ENDINGS, check_picture

LONGEST = 4096  # a picture is an n × n matrix

Spec = Annotated[str, typer.Argument(metavar="SPEC", help="A mechanism with its options, e.g. fixed:w=8.")]
Causal = Annotated[
    bool | None,
    typer.Option(
        "--causal/--bidirectional",
        help="Direction. Default: that of the spec, otherwise bidirectional if possible.",
    ),
]


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: subquad plot longformer:window=8,global_tokens=2 --n 64 -o out.png")(plot)
    app.command(epilog="Example: subquad gallery -o pictures")(gallery)


def plot(
    spec: Spec,
    output: Annotated[Path, typer.Option("--output", "-o", help=f"The file to write: {ENDINGS}.")],
    n: Annotated[int, typer.Option("--n", min=1, max=LONGEST, help="Length of the sequence.")] = 64,
    causal: Causal = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Draw the effective weights on random q and k (seed 0).")
    ] = False,
) -> None:
    """Draw who attends to whom, directly or through a summary, or the effective weights."""
    check_name(spec)
    check_direction(spec, causal)
    check_picture(output, "--output")
    from subquad.plots import draw_support, draw_weights, save

    attention = for_length(spec, n, causal=causal)
    if weights and not attention.capabilities.weights:
        raise ValueError(f"--weights: {spec} has no matrix of weights; without it, who attends to whom is drawn")
    save((draw_weights if weights else draw_support)(attention, n, title=spec), output)
    out().print(f"picture: {output}", soft_wrap=True)


def gallery(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for gallery.png; it is created if it does not exist.")
    ] = Path("."),
) -> None:
    """Draw every mechanism, bidirectional and causal, on one sheet."""
    if output.is_file():
        raise ValueError(f"--output must be a folder, and {output} is a file")
    output.mkdir(parents=True, exist_ok=True)
    from subquad.plots import draw_gallery, save

    save(draw_gallery(), output / "gallery.png")
    out().print(f"gallery: {output / 'gallery.png'}", soft_wrap=True)
