"""`subquad sample MODEL`: pictures drawn from a trained density model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from subquad.core.console import err, out
from subquad.core.files import model_folder


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: subquad sample out/train/image-density/combiner-axial/seed0 -o sample.png")(sample)


def sample(
    model: Annotated[Path, typer.Argument(help="Folder of a finished run of the task image-density, or of its model.")],
    png: Annotated[Path, typer.Option("-o", "--out", help="File for the pictures, side by side.")] = Path("sample.png"),
    count: Annotated[int, typer.Option(min=1, help="Number of pictures.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.01, help="Below 1, likely values are drawn more often.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random draws.")] = 0,
) -> None:
    """Sample pictures from a trained density model, value by value. A picture of 32 × 32 pixels takes minutes."""
    if png.suffix.lower() != ".png" or not png.parent.is_dir():
        raise typer.BadParameter(f"--out must be a .png file in a folder that exists, not {png}")
    model_folder(model)
    from subquad.training.quiet import quiet

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
