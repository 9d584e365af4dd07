"""Copying and depth (Yun et al. 2020, table 1), at reduced scale: how many sparse layers does it take?

A masked token must find its original n/2 positions before it. One layer of a sequential STRIDED or FIXED pattern sees
its own block only, so it can do no better than guessing; two layers join the two families of the pattern, and
more layers are better still. Runs are kept and resumed.
"""

from __future__ import annotations

import json
from pathlib import Path

PATTERNS = ("full", "strided:w=8", "fixed:w=8")


def accuracies(out: Path, steps: int, depths: tuple[int, ...], patterns: tuple[str, ...] = PATTERNS, seed: int = 0):
    """{pattern: {depth: test accuracy}}; yields as runs finish."""
    from subquad.tasks import task
    from subquad.training.run import Run, slug, train

    table: dict[str, dict[int, float]] = {pattern: {} for pattern in patterns}
    for pattern in patterns:
        for depth in depths:
            settings = (f"layers={depth}", f"steps={steps}", f"evaluate={max(steps // 3, 1)}")
            run = Run(
                task("copying", "small", settings, seed=seed), [pattern], out / slug(pattern) / str(depth), seed=seed
            )
            table[pattern][depth] = train(run, resume=(run.out / "run.json").exists())["test"]["accuracy"]
            yield table


def show(out: Path, steps: int, depth: int) -> None:
    """Accuracy on the copying task for 1, 2, … layers of full, STRIDED and FIXED attention (table 1 of Yun et al.)."""
    from subquad.core.console import out as console
    from subquad.training.start import quiet

    quiet()
    depths = tuple(range(1, depth + 1))
    table: dict[str, dict[int, float]] = {}
    for table in accuracies(out, steps, depths):
        (out / "copying.json").write_text(json.dumps(table, indent=1))
    for pattern, row in table.items():
        numbers = "  ".join(f"{layers} layers {100 * accuracy:5.1f} %" for layers, accuracy in row.items())
        console().print(f"{pattern:<12} {numbers}")
