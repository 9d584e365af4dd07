"""`subquad prove SPEC`: the constructive proof of universal approximation, run on a small grid and measured."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.text import Text

from subquad.cli.analyze import EXTRA, Sets, imported, read_arguments, source_of
from subquad.cli.plot import Causal
from subquad.core.console import out
from subquad.core.numbers import check_grid, steps_per_unit

FUNCTIONS = (
    "reverse, sum, mean, product, sort, max, sine, cumsum, first, cummax, wave"  # `theory.functions`; torch-free
)


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
        typer.Option(
            help=f"A continuous function (d, n) → (d, n) to approximate: {FUNCTIONS}, or module:function. "
            "Default: reverse; causal: cumsum."
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="The distance d_2 that the network must reach. Default: twice that of the step function."),
    ] = None,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Build the network of the proof from the pattern's sets, verify every stage on every sequence of the grid,
    then measure the same network made of this library's layers against the function.

    The exit code is 1 if a stage does not hold.
    """
    source, _ = source_of(*read_arguments(spec, context.args), sets, causal)
    check_grid(n, d, steps_per_unit(delta))  # what is wrong is refused before torch is imported
    if function and ":" not in function and function not in FUNCTIONS.split(", "):
        raise typer.BadParameter(f"--function must be one of {FUNCTIONS}, or module:function, not {function!r}")
    if epsilon is not None and not epsilon > 0:
        raise typer.BadParameter(f"--epsilon must be a number > 0, not {epsilon}")
    target = imported(function) if function and ":" in function else function
    from subquad.theory import proof

    result = proof.prove(source, n, d, delta, target, causal=causal)
    rows, theorem, trouble = _measure(result, target, epsilon) if result.holds else ([], None, None)
    holds = result.holds and (theorem is None or theorem.holds)
    if as_json:
        print(json.dumps(_as_dict(result, rows, theorem, trouble, holds), indent=2, ensure_ascii=False))
    else:
        _print(result, rows, theorem, trouble, epsilon is not None)
    raise typer.Exit(0 if holds else 1)


def _measure(result: Any, function: Any, epsilon: float | None) -> tuple[list[Any], Any, str | None]:
    """Temperatures from far too low to sufficient, and Theorem 1; or the sentence that says why it cannot be run."""
    from subquad.theory.temperature import require_digits, sufficient_temperature
    from subquad.theory.theorem import approximate, theorem1

    try:
        require_digits(result.plan, result.context)
        enough = sufficient_temperature(result.plan, result.support.map, summaries=result.support.view == "summaries")
        rows = approximate(result, [enough / 2**k for k in (6, 4, 2, 0)])
    except ValueError as error:
        if epsilon is not None:
            raise
        return [], None, str(error)
    return rows, theorem1(result, function, epsilon=epsilon), None


def _as_dict(result: Any, rows: list[Any], theorem: Any, trouble: str | None, holds: bool) -> dict[str, Any]:
    answer = {
        "holds": holds,
        "breaks": result.breaks.name if result.breaks else None,
        "layers": result.layers,
        "stages": [_stage(s) for s in result.stages],
        "softmax": [vars(row) for row in rows],
        "not_run": trouble,
        "theorem1": None,
    }
    if theorem is not None:
        answer["theorem1"] = {
            "holds": theorem.holds,
            "epsilon": theorem.epsilon,
            "lemma5": theorem.lemma5.value,
            "lemma5_on_finer_grids": {f"1/{m}": value for m, value in theorem.finer.items()},
            "alpha": theorem.alpha,
            "temperature": theorem.t,
            "bound": theorem.bound,
            "step3": theorem.step3.value,
            "distance": theorem.total.value,
            "standard_error": theorem.total.error,
            "stages": [_stage(s) for s in theorem.stages],
        }
    return answer


def _stage(stage: Any) -> dict[str, Any]:
    return {"stage": stage.name, "holds": stage.holds, "detail": stage.detail}


def _print(result: Any, rows: list[Any], theorem: Any, trouble: str | None, asked: bool) -> None:
    console = out()
    for line in str(result).splitlines():
        console.print(Text(line, {"✓": "green", "✗": "red"}.get(line[0], "")), soft_wrap=True)
    if trouble is not None:
        console.print(f"\nThe network of this library's layers was not run: {trouble}", soft_wrap=True)
    if rows:
        console.print("\nThe attention layers of this library at temperature t (appendix F.2):")
    for row in rows:
        console.print(f"t = {row.t:8.1f}   error of an id {row.context_error:9.2e} δ   d_2(f̄, g) = {row.d_p:.2e}")
    if theorem is not None:
        chosen = "" if asked else ", twice the error of the step function (--epsilon sets another)"
        console.print(
            f"\nTheorem 1, measured on the network of this library's layers, ε = {theorem.epsilon:.4g}{chosen}:"
        )
        for stage in theorem.stages:
            mark, style = ("✓", "green") if stage.holds else ("✗", "red")
            console.print(Text(f"{mark} {stage.name}: {stage.detail}", style), soft_wrap=True)
        finer = ", ".join(f"{value:.4g} for δ = 1/{m}" for m, value in theorem.finer.items())
        console.print(f"on finer grids d_2(f, f̄) is {finer}", soft_wrap=True)
