"""Speed that can be trusted: spread, turns in one process, a busy machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from subquad.core.load import OtherLoad, quartiles, why_busy
from subquad.models import HEADS, SubquadConfig
from subquad.tasks import task as make_task
from subquad.training import speed
from subquad.training.compare import Comparison, compare, measure_timing, rows
from subquad.training.lock import holder
from subquad.training.speed import finished_runs, relative_costs, training_times

SETTINGS = (
    "length=32",
    "sentence=4",
    "keys=1",
    "questions=2",
    "repeats=1",
    "width=8",
    "heads=2",
    "layers=1",
    "batch=2",
)


def save_run(run: Path, attention: str, score: float = 0.5) -> Path:
    """An untrained model of the needle task, saved as a finished run."""
    torch.manual_seed(0)
    task = make_task("needle", settings=SETTINGS)
    HEADS[task.head](SubquadConfig(attention=attention, **task.config())).save_pretrained(run / "model")
    about = {"task": "needle", "attention": [attention], "recipe": "small", "settings": task.recipe.asdict(), "seed": 0}
    (run / "model" / "task.json").write_text(json.dumps(about))
    numbers = {"step_seconds": 1.0, "memory": 1, "parameters": 1, "connections": 1.0, "density": None}
    metric = {"metric": "accuracy", "larger_is_better": True, "test": {"accuracy": score}}
    (run / "result.json").write_text(json.dumps({**about, **numbers, **metric}))
    return run


def test_quartiles_and_totals_of_logs():
    logs = [[{"step": 2, "step_seconds": 1.0}, {"step": 4, "valid": {}}, {"step": 6, "step_seconds": 3.0}], []]
    assert quartiles([1.0, 2.0, 3.0]) == [1.5, 2.0, 2.5] and quartiles([]) is None and quartiles([4]) == [4, 4, 4]
    assert training_times(logs) == {"step_quartiles": [1.5, 2.0, 2.5], "total_seconds": 14.0}
    assert training_times([]) == {"step_quartiles": None, "total_seconds": None}


def test_models_take_turns_and_stay_what_they_are(tmp_path):
    folders = {name: save_run(tmp_path / name, name) for name in ("full", "longformer")}
    before = (tmp_path / "full" / "model" / "model.safetensors").read_bytes()
    found = relative_costs(folders, "full", None)
    assert found["reference"] == "full" and found["costs"]["full"]["ratio"] == [1, 1, 1]
    low, middle, high = found["costs"]["longformer"]["ratio"]
    assert 0 < low <= middle <= high and all(seconds > 0 for seconds in found["costs"]["longformer"]["seconds"])
    assert (tmp_path / "full" / "model" / "model.safetensors").read_bytes() == before


def test_a_busy_machine_is_noticed():
    calm = {"full": [1, 1, 1], "star": [0.9, 1.0, 1.1]}
    wild = {**calm, "sbm": [0.5, 1.0, 6.0]}
    assert why_busy(0.01, calm) is None and why_busy(None, calm) is None
    assert why_busy(0.5, calm) == "other programs used 50 % of the machine during the measurement"
    assert why_busy(0.01, wild) == "the quartiles of sbm's relative cost are a factor of 12.0 apart"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux tells the load of all programs")
def test_the_load_of_others_is_a_share(monkeypatch):
    readings = iter([(10.0, 1.0, 100.0), (30.0, 11.0, 120.0)])  # 20 s busy of 20 × 1 core, 10 s of them our own
    monkeypatch.setattr(OtherLoad, "_now", staticmethod(lambda: next(readings)))
    with OtherLoad() as load:
        pass
    assert load.share == 0.5
    monkeypatch.undo()
    busy, own, total = OtherLoad._now() or (0.0, 0.0, 0.0)
    assert total > busy > 0 and own > 0


def test_a_comparison_measures_once_and_keeps_it(tmp_path, monkeypatch):
    comparison = Comparison("needle", ["full", "longformer"], tmp_path, settings=SETTINGS)
    for name in comparison.attentions:
        save_run(comparison.folder(name, 0), name)
    assert list(dict(finished_runs(rows(comparison)))) == ["full", "longformer"]
    assert all(row["relative_quartiles"] is None for row in rows(comparison)), "training runs are minutes apart"
    calls = []
    costs = {name: {"seconds": [1, 1, 1], "ratio": [ratio] * 3} for name, ratio in (("full", 1), ("longformer", 0.5))}

    def measured(folders, reference, data, tell):
        calls.append(reference)
        return {"reference": reference, "costs": costs, "busy": None if len(calls) > 1 else "a neighbour"}

    monkeypatch.setattr(speed, "relative_costs", measured)
    for _ in range(3):
        comparison.timing = measure_timing(comparison, lambda text: None)
    assert calls == ["full", "full"], "once more after the busy one, and then no more"
    assert [row["relative_time"] for row in rows(comparison)] == [1, 0.5]

    def broken(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(speed, "relative_costs", broken)
    comparison.timing = {"reference": "full", "costs": {}, "busy": "a neighbour"}
    assert "could not be measured: out of memory" in measure_timing(comparison, lambda text: None)["busy"]


def test_the_folder_is_locked_while_cost_is_measured(tmp_path, monkeypatch):
    comparison = Comparison("needle", ["full", "longformer"], tmp_path, settings=SETTINGS)
    for name in comparison.attentions:
        save_run(comparison.folder(name, 0), name)
    held = []

    def measured(folders, reference, data, tell):
        held.append(holder(tmp_path))
        costs = {name: {"seconds": [1, 1, 1], "ratio": [1, 1, 1]} for name in folders}
        return {"reference": reference, "costs": costs, "busy": None}

    monkeypatch.setattr(speed, "relative_costs", measured)
    whole = compare(comparison)
    assert held == [str(os.getpid())] and holder(tmp_path) is None
    assert whole["timing"]["busy"] is None and [row["relative_quartiles"] for row in whole["rows"]] == [[1, 1, 1]] * 2


def test_a_damaged_result_is_not_timed(tmp_path):
    comparison = Comparison("needle", ["full", "longformer"], tmp_path, settings=SETTINGS)
    for name in comparison.attentions:
        save_run(comparison.folder(name, 0), name)
    (comparison.folder("full", 0) / "result.json").write_text("{")
    assert list(dict(finished_runs(rows(comparison)))) == ["longformer"]
