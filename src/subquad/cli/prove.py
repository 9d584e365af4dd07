"""`subquad prove SPEC`: the constructive proof of universal approximation, run on a small grid."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.text import Text

from subquad.cli.analyze import EXTRA, Sets, imported, read_arguments, source_of
from subquad.cli.plot import Causal
from subquad.core.console import out


def add_to(app: typer.Typer) -> None:
    app.command(context_settings=EXTRA, epilog="Example: subquad prove strided --w 2 --n 4 --d 1 --delta 1/3")(prove)


def prove(
    context: typer.Context,
    spec: Annotated[str | None, typer.Argument(metavar="SPEC", help="A mechanism with its options.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Length of the sequences.")] = 4,
    d: Annotated[int, typer.Option("--d", min=1, help="Width of a token.")] = 1,
    delta: Annotated[str, typer.Option(help="Step of the grid: 1/2, 0.5, 1/3 …")] = "1/2",
    causal: Causal = None,
    function: Annotated[
        str | None,
        typer.Option(help="Function to compute: reverse, sum, sort, max, cumsum, first, cummax, or module:function."),
    ] = None,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Build the network of the proof from the pattern's sets and verify every stage on every sequence of the grid.

    The exit code is 1 if a stage does not hold.
    """
    source, _ = source_of(*read_arguments(spec, context.args), sets)
    from subquad.theory import proof

    target = imported(function) if function and ":" in function else function
    result = proof.prove(source, n, d, delta, target, causal=causal)
    soft = _soften(result) if result.holds else []
    if as_json:
        stages = [{"stage": s.name, "holds": s.holds, "detail": s.detail} for s in result.stages]
        rows = [vars(row) for row in soft if not isinstance(row, str)]
        broken = result.breaks.name if result.breaks else None
        answer = {
            "holds": result.holds,
            "breaks": broken,
            "layers": result.layers,
            "stages": stages,
            "softmax": rows,
        }
        print(json.dumps(answer, indent=2, ensure_ascii=False))
        raise typer.Exit(0 if result.holds else 1)
    console = out()
    for line in str(result).splitlines():
        style = {"✓": "green", "✗": "red"}.get(line[0], "")
        console.print(Text(line, style), soft_wrap=True)
    if soft:
        console.print("\nwith softmax at temperature t (Step 3):")
    for row in soft:
        text = (
            row
            if isinstance(row, str)
            else f"t = {row.t:8.1f}   error of an id {row.context_error:9.2e} δ   d_2 = {row.d_p:.2e}"
        )
        console.print(text, soft_wrap=True)
    raise typer.Exit(0 if result.holds else 1)


def _soften(result: Any) -> list[Any]:
    """Temperatures from far too low to sufficient by Assumption 2; a sentence where float64 has too few digits."""
    from subquad.theory.soften import approximate, sufficient_temperature

    enough = sufficient_temperature(result)
    try:
        return approximate(result, [enough / 2**k for k in (6, 5, 4, 3, 2, 1, 0)])
    except ValueError as error:
        return [f"not run: {error}"]
