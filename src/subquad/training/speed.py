"""Speed that can be trusted: the spread of step times, relative cost measured side by side, and a busy machine noticed.

Runs of a comparison are minutes apart, and the machine may have been busy in one and idle in the other. So relative
cost is measured at the end, in one process: the trained models take turns, a few steps each, and each turn is compared
with the turn of the reference in the same round.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from subquad.training import log, use

ROUNDS, STEPS = 7, 2  # turns of each model, steps of a turn
BUSY = 0.15  # share of the machine that other programs may use
WIDE = 1.5  # upper quartile / lower quartile of the ratios beyond which they say nothing


# ---- step times of a log -------------------------------------------------------------------------------------


def seconds_at(records: Sequence[dict[str, Any]]) -> Callable[[int], float]:
    """step → seconds of training until then: each record holds the mean time of the steps since the one before."""
    steps, seconds = [0], [0.0]
    for record in records:
        if "step_seconds" in record:
            seconds.append(seconds[-1] + record["step_seconds"] * (record["step"] - steps[-1]))
            steps.append(record["step"])
    return lambda step: float(np.interp(step, steps, seconds))


def quartiles(values: Sequence[float]) -> list[float] | None:
    """[lower quartile, median, upper quartile]; None without values."""
    return [float(x) for x in np.percentile(values, (25, 50, 75))] if values else None


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
    busy = why_busy(load.share, costs)
    return {"reference": reference, "costs": {name: asdict(cost) for name, cost in costs.items()}, "busy": busy}


def why_busy(share: float | None, costs: dict[str, Cost]) -> str | None:
    """Why times measured now are not to be trusted; None if they are."""
    if share is not None and share > BUSY:
        return f"other programs used {100 * share:.0f} % of the machine during the measurement"
    spreads = {name: cost.ratio[2] / cost.ratio[0] for name, cost in costs.items() if cost.ratio[0] > 0}
    name = max(spreads, key=lambda each: spreads[each], default=None)
    if name is not None and spreads[name] > WIDE:
        return f"the quartiles of {name}'s relative cost are a factor of {spreads[name]:.1f} apart"
    return None


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


class OtherLoad:
    """The share of all cores that other programs used meanwhile; `share` is None where the system does not tell."""

    share: float | None = None

    def __enter__(self) -> OtherLoad:
        self.started = self._now()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.started is None or (ended := self._now()) is None:
            return
        busy, own, total = (after - before for after, before in zip(ended, self.started, strict=True))
        self.share = max(0.0, busy - own) / total if total > 0 else None

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """(busy seconds of all cores, of this process, all seconds of all cores), from /proc/stat."""
        try:
            numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        idle = numbers[3] + numbers[4]  # idle and waiting for a disk
        return (sum(numbers) - idle) / ticks, time.process_time(), sum(numbers) / ticks


def finished_runs(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Path]]:
    """(attention, its first finished run that has a model)."""
    for row in rows:
        for run in row["runs"]:
            if log.read_result(Path(run)) is not None and (Path(run) / "model" / "task.json").exists():
                yield row["attention"], Path(run)
                break
