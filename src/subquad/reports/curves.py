"""The curves of a comparison, read from the logs of its runs: one line per attention, a faint one per seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from markupsafe import Markup

from subquad.reports.charts import Line, line_chart
from subquad.training import log
from subquad.training.speed import seconds_at

Record = dict[str, Any]
Track = dict[int, tuple[float, float]]  # step → (x, y) of one seed


class Histories(NamedTuple):
    """An attention of a comparison and the logs of its seeds."""

    name: str
    colour: int
    seeds: list[list[Record]]


def read_histories(rows: Sequence[dict[str, Any]]) -> list[Histories]:
    """All logs that can be read; a row whose runs have none has no seeds."""
    return [
        Histories(row["attention"], colour, [records for run in row.get("runs") or () if (records := _read(Path(run)))])
        for colour, row in enumerate(rows)
    ]


def _read(run: Path) -> list[Record]:
    try:
        records = log.read(run)
    except (OSError, ValueError):  # not a log, or nobody may read it: as good as none
        return []
    return [record for record in records if isinstance(record, dict) and "step" in record]


# ---- one seed ----------------------------------------------------------------------------------------------


def loss_track(records: Sequence[Record]) -> Track:
    return {record["step"]: (record["step"], record["loss"]) for record in records if "loss" in record}


def metric_track(records: Sequence[Record], metric: str, *, seconds: bool) -> Track:
    """The validation metric over steps, or over seconds of training."""
    clock = seconds_at(records) if seconds else float
    found = {record["step"]: record["valid"][metric] for record in records if metric in record.get("valid", ())}
    return {step: (clock(step), value) for step, value in found.items()}


def density_tracks(records: Sequence[Record]) -> list[Track]:
    """One track per SBM layer: sampled edges / possible edges, mean over the heads."""
    known = [record for record in records if record.get("density")]
    layers = min((len(record["density"]) for record in known), default=0)
    return [
        {record["step"]: (record["step"], fmean(record["density"][layer])) for record in known}
        for layer in range(layers)
    ]


# ---- all seeds ---------------------------------------------------------------------------------------------


def mean_track(tracks: Sequence[Track]) -> list[tuple[float, float]]:
    """The mean over the seeds, at the steps that all of them have reached."""
    steps = sorted(set.intersection(*map(set, tracks))) if tracks else []
    return [(fmean(t[step][0] for t in tracks), fmean(t[step][1] for t in tracks)) for step in steps]


def lines_of(history: Histories, track: Callable[[list[Record]], Track], *, dots: bool) -> list[Line]:
    tracks = [found for records in history.seeds if (found := track(records))]
    lines = [Line(history.name, history.colour, mean_track(tracks), dots=dots)] if tracks else []
    if len(tracks) > 1:
        lines += [
            Line(f"{history.name}, one seed", history.colour, [found[step] for step in sorted(found)], faint=True)
            for found in tracks
        ]
    return lines


def chart(
    histories: Sequence[Histories], track: Callable[[list[Record]], Track], *, x: str, y: str, dots=False
) -> Markup:
    """All attentions in one chart; empty where no log has such records."""
    lines = [line for history in histories for line in lines_of(history, track, dots=dots)]
    return line_chart(lines, x=x, y=y) if any(line.points for line in lines) else Markup("")


def draw_curves(histories: Sequence[Histories], metric: str) -> list[dict[str, Any]]:
    """The panels of the page: a title, a line about it, the chart ("" if there is nothing to draw)."""
    valid = f"validation {metric}"
    over_steps = chart(histories, lambda r: metric_track(r, metric, seconds=False), x="step", y=valid, dots=True)
    over_time = chart(histories, lambda r: metric_track(r, metric, seconds=True), x="seconds", y=valid, dots=True)
    loss = chart(histories, loss_track, x="step", y="training loss")
    return [
        {"title": f"Validation {metric} over steps", "note": "same number of updates", "chart": over_steps},
        {"title": f"Validation {metric} over time", "note": "seconds of training steps alone", "chart": over_time},
        {"title": "Training loss over steps", "note": "of the batches", "chart": loss},
    ]


def draw_density(history: Histories) -> Markup:
    """The density of an SBM attention over steps: a line per layer, the first palest; "" if it has none."""
    seeds = [density_tracks(records) for records in history.seeds]
    seeds = [tracks for tracks in seeds if tracks]
    layers = min(map(len, seeds), default=0)
    lines = [
        Line(f"layer {i}", history.colour, mean_track([tracks[i] for tracks in seeds]), strength=(i + 2) / (layers + 1))
        for i in range(layers)
    ]
    return (
        line_chart(lines, x="step", y="density", from_zero=True) if any(line.points for line in lines) else Markup("")
    )
