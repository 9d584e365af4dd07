"""`subquad eval`, `predict`, `generate`, `sample`: what a trained model can do."""

from __future__ import annotations

import contextlib
import json as jsonlib
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from subquad.cli.train import Data
from subquad.core.console import complain, err, out
from subquad.core.files import check_file, model_folder

Model = Annotated[Path, typer.Argument(help="Folder of a finished run, or of its model.")]


def add_to(app: typer.Typer) -> None:
    app.command("eval", epilog="Example: subquad eval out/train/listops/full/seed0")(evaluate)
    app.command(epilog="Example: echo '[MAX 2 9 [MIN 4 7 ] 0 ]' | subquad predict out/train/listops/full/seed0")(
        predict
    )
    app.command(epilog="Example: subquad generate out/train/lm-bytes/full/seed0 --prompt 'To be'")(generate)
    app.command(epilog="Example: subquad sample out/train/image-density/combiner-axial/seed0 -o sample.png")(sample)


def evaluate(
    model: Model,
    part: Annotated[str, typer.Option(help="Part of the data: test, valid or train.")] = "test",
    data: Data = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a trained model on a part of its task's data."""
    if part not in ("test", "valid", "train"):
        raise typer.BadParameter(f"--part must be test, valid or train, not {part!r}")
    model_folder(model)  # a wrong one is refused before torch is loaded
    from subquad.training.start import quiet

    quiet()
    from subquad.training import use

    metrics = use.evaluate(*use.load(model, data), part)
    if json:
        print(jsonlib.dumps(metrics))
    else:
        out().print("  ".join(f"{key} {value:.4f}" for key, value in metrics.items()), soft_wrap=True)


def predict(
    model: Model,
    text: Annotated[
        str | None,
        typer.Argument(help="One line of input; without it, --file or standard input is read.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="A file with one input per line.", show_default=False)
    ] = None,
) -> None:
    """Print the answer of a trained model to each line of input.

    A line that is empty or cannot be read is reported on standard error, and its answer is empty; the exit code is
    then 1.
    """
    if text is not None and file is not None:
        raise typer.BadParameter("give either a text or --file, not both")
    model_folder(model)  # a wrong one is refused before torch is loaded
    from subquad.training.start import quiet

    quiet()
    from subquad.data.files import opened
    from subquad.training import use

    wrong: list[str] = []

    def report(message: str) -> None:
        wrong.append(message)
        complain(message)

    asked = use.load(model)
    with contextlib.ExitStack() as held:
        lines: Iterable[str | bytes]
        if text is not None:
            lines = [text]
        elif file is not None:
            lines = held.enter_context(opened(file))
        else:
            lines = getattr(sys.stdin, "buffer", sys.stdin)
        for answer in use.predict(*asked, lines, report):
            print(answer, flush=True)
    if wrong:
        raise typer.Exit(1)


def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="The beginning of the text.")],
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 always selects the most likely token.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
) -> None:
    """Continue a text with a trained language model and print it as it is generated; the speed goes to stderr."""
    if not prompt:
        raise typer.BadParameter("--prompt is empty: give the model at least one character to continue")
    model_folder(model)  # a wrong one is refused before torch is loaded
    from subquad.training.start import quiet

    quiet()
    from subquad.training import use

    pieces = use.write(*use.load(model), prompt, tokens, temperature, seed)
    print(next(pieces), end="", flush=True)
    start, count = time.perf_counter(), -1  # the last piece is what was held back
    for piece in pieces:
        print(piece, end="", flush=True)
        count += 1
    print(flush=True)
    seconds = time.perf_counter() - start
    err().print(f"{count} tokens, {count / max(seconds, 1e-9):.1f} tokens per second")


def sample(
    model: Annotated[Path, typer.Argument(help="Folder of a finished run of the task image-density, or of its model.")],
    png: Annotated[Path, typer.Option("-o", "--out", help="File for the pictures, side by side.")] = Path("sample.png"),
    count: Annotated[int, typer.Option(min=1, help="Number of pictures.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.01, help="Below 1, likely values are drawn more often.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random draws.")] = 0,
) -> None:
    """Sample pictures from a trained density model, value by value. A picture of 32 × 32 pixels takes minutes."""
    if png.suffix.lower() != ".png":
        raise typer.BadParameter(f"--out must end in .png, not in {png.name!r}")
    check_file(png, "--out")
    model_folder(model)
    from subquad.training.start import quiet

    quiet()
    import numpy as np
    from matplotlib.image import imsave

    from subquad.training import use

    trained, task = use.load(model)
    if not hasattr(task, "sample"):
        raise ValueError(f"{model}: sample needs a model of the task image-density, and this is one of {task.name}")
    with Progress(console=err(), transient=True, disable=not err().is_terminal) as progress:
        bar = progress.add_task("drawing", total=task.recipe.length - 1)
        tell = lambda done, total: progress.update(bar, completed=done)  # noqa: E731
        pictures = task.sample(trained, count, seed, temperature, tell)
    imsave(png, np.concatenate(pictures, 1))
    out().print(f"picture: {png}", soft_wrap=True)
