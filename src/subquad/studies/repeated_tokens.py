"""Finding repeated tokens (Cho et al. 2022, section 5.1): does SBM attention learn to be full where it has to be?

The task is `repeated-tokens` in its recipe `paper`: 256 tokens, one layer, one head, 32 dimensions. SBM attention
starts at a density of a quarter and must find out by itself that it needs all edges; figure 4 of the paper draws
loss and density over the steps. Runs are kept in a folder and resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any


def results(
    out: Path, attentions: Iterable[str], settings: tuple[str, ...] = (), seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Train each attention, or resume its run; the results by name."""
    from subquad.tasks import task
    from subquad.training.run import Run, slug, train

    found = {}
    for name in attentions:
        run = Run(task("repeated-tokens", "paper", settings, seed=seed), [name], out / slug(name), "paper", seed)
        found[name] = train(run, resume=(run.out / "run.json").exists())
    return found


def draw_training(out: Path, attentions: Iterable[str]) -> Path:
    """Figure 4: loss, accuracy and mask density over the steps, of runs that may still be going on."""
    from matplotlib.figure import Figure

    from subquad.training import log
    from subquad.training.run import slug

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    axes = dict(zip(("loss", "accuracy", "density"), figure.subplots(1, 3), strict=True))
    for name in attentions:
        records = log.read(out / slug(name))
        tracks = {
            "loss": [(r["step"], r["loss"]) for r in records if "loss" in r],
            "accuracy": [(r["step"], r["valid"]["accuracy"]) for r in records if "valid" in r],
            "density": [(r["step"], fmean(r["density"][0]) if "density" in r else 1.0) for r in records if "loss" in r],
        }
        for key, track in tracks.items():
            axes[key].plot(*zip(*track, strict=True), label=name, linewidth=1)
    axes["loss"].set(xlabel="step", title="training loss", yscale="log")
    axes["accuracy"].set(xlabel="step", title="validation accuracy")
    axes["density"].set(xlabel="step", title="edges / pairs", ylim=(0, 1.05))
    axes["loss"].legend()
    path = out / "repeated_tokens.png"
    figure.savefig(path, dpi=130)
    return path


def show(out: Path, names: list[str], settings: Sequence[str], seed: int) -> None:
    """The command `subquad study repeated-tokens`."""
    from subquad.core.console import out as console
    from subquad.training.start import quiet

    quiet()
    for name, result in results(out, names, tuple(settings), seed).items():
        density = fmean(result["density"][0]) if result["density"] else 1.0
        console().print(f"{name}: accuracy {result['test']['accuracy']:.4f}, density {density:.2f}")
    console().print(f"drawn: {draw_training(out, names)}")
