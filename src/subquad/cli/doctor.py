"""`subquad doctor`: what this machine would run."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.table import Table

from subquad.cli.tables import show_table
from subquad.core.console import out

DTYPES = ("float16", "bfloat16", "float32", "float64")


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: subquad doctor --dtype float16 --head-dim 128")(doctor)


def doctor(
    dtype: Annotated[
        str, typer.Option(help="Dtype of the tensors: float16, bfloat16, float32 or float64.")
    ] = "float16",
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 64,
    dropout: Annotated[float, typer.Option(min=0, max=0.99, help="Dropout of the weights.")] = 0.0,
) -> None:
    """Show the devices of this machine, and which kernel each operator uses on a GPU and why."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    import torch

    from subquad.kernels import devices

    console = out()
    console.print(f"system: {platform.system()} {platform.machine()}, Python {platform.python_version()}")
    console.print(f"torch {torch.__version__}, triton {_version('triton')}, impl={devices.chosen()}", soft_wrap=True)
    for line in _devices():
        console.print(line, soft_wrap=True)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("operator", "on a GPU", "why", "what it does"):
        table.add_column(title)
    for name, operator in devices.OPERATORS.items():
        try:
            found = devices.route(name, getattr(torch, dtype), head_dim, dropout=dropout)
        except ValueError as error:  # what is asked for by name cannot run
            found = devices.Route("–", str(error))
        table.add_row(name, found.impl, found.reason, operator.does)
    show_table(console, table)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return ["GPU: none that torch can use; operators run on the CPU"]
    found = []
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        found.append(f"GPU {number}: {torch.cuda.get_device_name(number)}, compute capability {major}.{minor}")
    return found
