"""Speed that can be trusted: the spread of step times, relative cost measured side by side, and a busy machine noticed.

Runs of a comparison are minutes apart, and the machine may have been busy in one and idle in the other. So relative
cost is measured at the end, in one process: the trained models take turns, a few steps each, and each turn is compared
with the turn of the reference in the same round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from subquad.core.load import OtherLoad, quartiles, why_busy
from subquad.training import log, use

ROUNDS, STEPS = 7, 2  # turns of each model, steps of a turn


# ---- step times of a log -------------------------------------------------------------------------------------


def seconds_at(records: Sequence[dict[str, Any]]) -> Callable[[int], float]:
    """step → seconds of training until then: each record holds the mean time of the steps since the one before."""
    steps, seconds = [0], [0.0]
    for record in records:
        if "step_seconds" in record:
            seconds.append(seconds[-1] + record["step_seconds"] * (record["step"] - steps[-1]))
            steps.append(record["step"])
    return lambda step: float(np.interp(step, steps, seconds))


def training_times(logs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Of the logs of all seeds: the quartiles of the step times, and the mean seconds of all training steps."""
    times = [record["step_seconds"] for records in logs for record in records if "step_seconds" in record]
    totals = [seconds_at(records)(records[-1]["step"]) for records in logs if records]
    return {"step_quartiles": quartiles(times), "total_seconds": statistics.fmean(totals) if totals else None}


# ---- side by side --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Seconds of a training step and the ratio to the reference, each as [lower quartile, median, upper quartile]."""

    seconds: list[float]
    ratio: list[float]


def relative_costs(
    folders: dict[str, Path], reference: str, data: Path | None, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Training steps of the trained models in `folders` (attention → run), taking turns.

    Returns {"reference", "costs": {attention: Cost as a dict}, "busy": why the numbers are not to be trusted, or None}.
    """
    tell("measuring relative cost: the trained models take turns, a few steps each")
    subjects = {name: TrainingStep(folder, data) for name, folder in folders.items()}
    for step in subjects.values():
        step()  # loads and compiles what is loaded once
    times: dict[str, list[float]] = {name: [] for name in subjects}
    with OtherLoad() as load:
        for turn in range(ROUNDS):
            order = list(subjects) if turn % 2 == 0 else list(reversed(subjects))
            for name in order:
                start = time.perf_counter()
                for _ in range(STEPS):
                    subjects[name]()
                times[name].append((time.perf_counter() - start) / STEPS)
    costs = {}
    for name, own in times.items():
        ratios = [mine / base for mine, base in zip(own, times[reference], strict=True)]
        costs[name] = Cost(quartiles(own) or [], quartiles(ratios) or [])
    busy = why_busy(load.share, {name: cost.ratio for name, cost in costs.items()})
    return {"reference": reference, "costs": {name: asdict(cost) for name, cost in costs.items()}, "busy": busy}


class TrainingStep:
    """Forward, backward and update of a trained model on one batch of its task."""

    def __init__(self, folder: Path, data: Path | None) -> None:
        self.model, task = use.load(folder, data)
        train: Any = task.load().train
        size = min(task.recipe.batch // task.recipe.accumulate, len(train))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        batch = task.collate([train[index] for index in range(size)])
        self.inputs = {key: value.to(device) for key, value in batch.items()}
        self.model.to(device).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-9
        )  # the model stays what it was trained to be

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(**self.inputs).loss
        loss.backward()
        self.optimizer.step()
        loss.item()  # waits for a GPU


def finished_runs(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Path]]:
    """(attention, its first finished run that has a model)."""
    for row in rows:
        for run in row["runs"]:
            if log.read_result(Path(run)) is not None and (Path(run) / "model" / "task.json").exists():
                yield row["attention"], Path(run)
                break
