"""Training: runs and their folders, going on after a kill, several processes, damage, comparisons, use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from subquad.core.options import split_list
from subquad.tasks import task
from subquad.training import checkpoints, log, use
from subquad.training.compare import Comparison, check, pending, prepare, rows, write
from subquad.training.run import Run, check_attention, train

TINY = (
    "length=64",
    "sentence=4",
    "repeats=1",
    "questions=8",
    "values=8",
    "width=16",
    "heads=2",
    "feedforward=32",
    "batch=4",
    "eval_size=8",
    "warmup=0",
)


def tiny(out: Path, *settings: str, attention: str = "full", seed: int = 0) -> Run:
    made = task("needle", "small", (*TINY, "steps=6", "evaluate=2", *settings), seed=seed)
    return Run(made, [attention], out, seed=seed, command=["subquad", "train"])


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in log.read(out) if "loss" in record]


def command(out: Path, *more: str) -> list[str]:
    settings = [part for setting in (*TINY, "evaluate=3") for part in ("--set", setting)]
    return [sys.executable, "-m", "subquad", "train", "needle", "--out", str(out), *settings, *more]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def test_a_run_and_what_it_leaves(tmp_path):
    result = train(tiny(tmp_path / "run"))
    out = tmp_path / "run"
    assert result == json.loads((out / "result.json").read_text())
    assert result["steps"] == 6 and result["best_step"] in (2, 4, 6) and 0 <= result["test"]["accuracy"] <= 1
    records = [record for record in log.read(out) if "loss" in record]
    assert len(records) == 6 and all(record["tokens_per_second"] > 0 and record["memory"] >= 0 for record in records)
    assert [record["step"] for record in log.read(out) if "valid" in record] == [2, 4, 6]
    assert any((out / "tensorboard").iterdir())
    best = max(
        (record for record in log.read(out) if "valid" in record), key=lambda record: record["valid"]["accuracy"]
    )
    assert result["valid"] == best["valid"]["accuracy"] and result["best_step"] == best["step"]
    model, again = use.load(out)
    metrics = use.evaluate(model, again)
    assert metrics["accuracy"] == pytest.approx(result["test"]["accuracy"]), "the best model is the saved one"
    with pytest.raises(ValueError, match="holds a run already"):
        train(tiny(out))
    assert train(tiny(out), resume=True) == result, "a finished run is not run again"


def test_seeds_decide(tmp_path):
    first, second, third = (tiny(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    for run in (first, second, third):
        train(run)
    assert losses(first.out) == losses(second.out) != losses(third.out)


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    """kill -9 in the middle, then --resume: the same losses as if nothing had happened."""
    for name in ("whole", "killed"):
        process = subprocess.Popen(
            command(tmp_path / name, "--set", "steps=12", "--set", "dropout=0.1", "--attention", "sbm:clusters=4"),
            env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        if name == "killed":
            while process.poll() is None and len(losses(tmp_path / name)) < 7:
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not (tmp_path / "killed" / "result.json").exists(), "killed on the way"
    again = [
        *command(tmp_path / "killed", "--set", "steps=12", "--set", "dropout=0.1"),
        "--attention",
        "sbm:clusters=4",
    ]
    subprocess.run([*again, "--resume"], env=ENVIRONMENT, check=True, capture_output=True)
    whole, killed = (losses(tmp_path / name) for name in ("whole", "killed"))
    assert len(whole) == 12 and killed == whole


def test_two_processes_equal_one(tmp_path):
    """The same global batch over two processes (gloo) gives the same losses."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    many = [*torchrun, "-m", *command(tmp_path / "two", "--set", "steps=4")[2:]]
    subprocess.run(many, env=ENVIRONMENT, check=True, capture_output=True)
    subprocess.run(command(tmp_path / "one", "--set", "steps=4"), env=ENVIRONMENT, check=True, capture_output=True)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two")]
    assert results[0]["test"]["accuracy"] == pytest.approx(results[1]["test"]["accuracy"], abs=0.02)


def test_interrupt_saves(tmp_path):
    process = subprocess.Popen(
        command(tmp_path, "--set", "steps=400", "--set", "evaluate=400"),
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and len(losses(tmp_path)) < 3:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume goes on" in said and "Traceback" not in said
    checkpoint, complaints = checkpoints.newest_good(tmp_path)
    assert checkpoint is not None and not complaints


def test_damaged_checkpoints_are_put_aside(tmp_path):
    train(tiny(tmp_path))
    newest, older = checkpoints.all_checkpoints(tmp_path)[:2]
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    good, complaints = checkpoints.newest_good(tmp_path)
    assert good == older and "damaged" in complaints[0] and (newest.parent / f"damaged-{newest.name[11:]}").exists()
    (older / "trainer_state.json").unlink()
    good, complaints = checkpoints.newest_good(tmp_path)
    assert good is None and "trainer_state.json is missing" in complaints[0]


def test_every_file_of_a_checkpoint_is_looked_at_and_the_best_one_too(tmp_path):
    train(tiny(tmp_path, "rate=1e-9"))  # nothing is learned: the first checkpoint stays the best
    newest, best = checkpoints.all_checkpoints(tmp_path)
    assert (checkpoints.step_of(newest), checkpoints.step_of(best)) == (6, 2)
    for name, content in (("rng_state.pth", None), ("trainer_state.json", "{}"), ("optimizer.pt", None)):
        path = newest / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2] if content is None else content.encode())
        assert checkpoints.damage(newest) is not None, name
        path.write_bytes(whole)
    (best / "model.safetensors").write_bytes(b"torn")
    (tmp_path / "result.json").unlink()
    result = train(tiny(tmp_path, "rate=1e-9"), resume=True)
    assert (best.parent / "damaged-2").exists() and result["steps"] == 6 and result["best_step"] is None


def test_killed_during_the_test_trains_no_further(tmp_path):
    whole = train(tiny(tmp_path))
    before = losses(tmp_path)
    (tmp_path / "result.json").unlink()
    again = train(tiny(tmp_path), resume=True)
    assert losses(tmp_path) == before and [again[key] for key in ("steps", "best_step", "test", "valid")] == [
        whole[key] for key in ("steps", "best_step", "test", "valid")
    ]


def test_overwriting_deletes_the_run_alone_and_only_if_the_new_one_can_work(tmp_path):
    train(tiny(tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="batch must be a multiple"):
        train(tiny(tmp_path, "accumulate=3"), overwrite=True)
    assert (tmp_path / "result.json").exists()
    assert train(tiny(tmp_path, "steps=2"), overwrite=True)["steps"] == 2
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("a file")
    with pytest.raises(ValueError, match="--out must be a folder"):
        train(tiny(tmp_path / "file"))


def test_a_setting_that_an_older_run_did_not_have_was_at_its_default(tmp_path):
    result = train(tiny(tmp_path))
    about = json.loads((tmp_path / "run.json").read_text())
    del about["settings"]["initial"]
    (tmp_path / "run.json").write_text(json.dumps(about))
    assert train(tiny(tmp_path), resume=True) == result
    with pytest.raises(ValueError, match=r"initial was 0.02 .* and is 0.1 now"):
        train(tiny(tmp_path, "initial=0.1"), resume=True)
    (tmp_path / "run.json").write_text('{"task":')
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        train(tiny(tmp_path), resume=True)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    run = tiny(tmp_path, "evaluate=2")
    import subquad.training.run as module

    written = []

    def save(self, folder):
        if written:
            raise OSError(28, "No space left on device")
        written.append(folder)
        return original(self, folder)

    original = module.SafeTrainer._save_optimizer_and_scheduler
    monkeypatch.setattr(module.SafeTrainer, "_save_optimizer_and_scheduler", save)
    with pytest.raises(OSError, match=r"No space left on device.*what was saved before is kept"):
        train(run)
    assert [folder.name for folder in checkpoints.all_checkpoints(tmp_path)] == ["checkpoint-2"]
    monkeypatch.undo()
    assert train(tiny(tmp_path, "evaluate=2"), resume=True)["steps"] == 6


def test_resuming_something_else_is_refused(tmp_path):
    train(tiny(tmp_path))
    (tmp_path / "result.json").unlink()
    with pytest.raises(ValueError, match=r"rate was 0.005 .* and is 0.1 now"):
        train(tiny(tmp_path, "rate=0.1"), resume=True)


def test_early_stopping(tmp_path):
    result = train(tiny(tmp_path, "rate=1e-9", "steps=40", "patience=2"))
    assert result["steps"] == 6 and result["best_step"] == 2, "two evaluations without a gain"


def test_a_batch_that_does_not_divide(tmp_path):
    with pytest.raises(ValueError, match="batch must be a multiple of 1 processes × accumulate=3, not 4"):
        train(tiny(tmp_path, "accumulate=3"))


def test_gradient_accumulation_changes_nothing(tmp_path):
    whole, parts = tiny(tmp_path / "whole"), tiny(tmp_path / "parts", "accumulate=2")
    train(whole)
    train(parts)
    assert losses(parts.out) == pytest.approx(losses(whole.out), rel=1e-4)


def test_impossible_attention_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    from subquad import Attention, Capabilities, register, unregister

    @register("both-ways-only")
    class Bidirectional(Attention):
        capabilities = Capabilities(causal=False)

    try:
        causal = task("copying-causal", "small")
        with pytest.raises(ValueError, match="both-ways-only: causal=True is not supported"):
            check_attention(causal, ["both-ways-only"])
    finally:
        unregister("both-ways-only")
    with pytest.raises(ValueError, match="unknown attention 'ful'"):
        train(tiny(tmp_path / "new", attention="ful"))
    assert not (tmp_path / "new").exists()


def test_lists_of_specs():
    assert split_list("full,combiner-fixed:span=64,abstraction=mean,sbm") == [
        "full", "combiner-fixed:span=64,abstraction=mean", "sbm",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="names full twice"):
        split_list("full,full")


def test_comparisons(tmp_path):
    whole = Comparison(
        "needle", ["full", "longformer:window=4"], tmp_path, settings=(*TINY, "steps=2", "evaluate=2"), seeds=2
    )
    check(whole)
    prepare(whole, overwrite=False)
    assert len(list(pending(whole))) == 4
    for attention, seed in list(pending(whole))[:3]:
        made = task("needle", "small", whole.settings, seed=seed)
        train(Run(made, [attention], whole.folder(attention, seed), seed=seed, command=["x"]))
    assert list(pending(whole)) == [("longformer:window=4", 1)], "what is finished is kept"
    full, other = rows(whole)
    assert (
        full["relative_time"] == 1
        and other["relative_time"] > 0
        and len(full["scores"]) == 2
        and full["sd"] is not None
    )
    assert other["sd"] is None and other["connections"] < full["connections"] == 64 * 64
    assert json.loads((tmp_path / "comparison.json").read_text())["task"] == "needle"
    write(whole)
    changed = Comparison("needle", ["full"], tmp_path, settings=(*TINY, "steps=3", "evaluate=2"))
    with pytest.raises(ValueError, match="already contains a comparison with steps=2, not 3"):
        prepare(changed, overwrite=False)
    (tmp_path / "full" / "notes.txt").write_text("mine")
    prepare(changed, overwrite=True)
    assert (tmp_path / "full" / "notes.txt").exists() and not (tmp_path / "full" / "seed0").exists()
    assert not (tmp_path / "longformer_window=4").exists()
    with pytest.raises(ValueError, match="batch must be a multiple"):
        check(Comparison("needle", ["full"], tmp_path, settings=(*TINY, "accumulate=3")))
    with pytest.raises(FileNotFoundError, match="not found"):
        check(Comparison("text", ["full"], tmp_path, data=tmp_path / "nowhere"))


def test_predicting_and_generating(tmp_path):
    small = ("length=64", "width=16", "heads=2", "feedforward=32", "steps=2", "evaluate=2", "batch=4")
    listops = ("max_length=60", "train_size=64", "eval_size=8")
    train(Run(task("listops", "small", (*small, *listops)), ["full"], tmp_path, command=["x"]))
    model, made = use.load(tmp_path)
    answers = list(use.predict(model, made, ["[MAX 2 9 [MIN 4 7 ] 0 ]", "", "7"]))
    assert answers[1] == "" and all(answer in "0123456789" for answer in answers)
    with pytest.raises(ValueError, match="'\\[SUM' is no token of ListOps"):
        list(use.predict(model, made, ["[SUM 1 2 ]"]))
    with pytest.raises(ValueError, match="line 1: the input has 65 tokens, beyond the model's 64"):
        list(use.predict(model, made, ["[MAX " + "1 " * 63 + "]"]))
    with pytest.raises(ValueError, match="generate needs a causal language model"):
        use.generate(model, made, "x", 5, 1.0, 0)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="the model cannot be read"):
        use.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no model"):
        use.load(tmp_path / "nowhere")


def test_tokens_stay_in_their_window():
    """Sliding windows: every token but the first is predicted exactly once."""
    from subquad.data.datasets import Windows

    for size, length, stride in ((50, 8, 3), (8, 8, 8), (9, 8, 7), (100, 16, 15), (5, 8, 4)):
        windows = Windows(torch.arange(size).numpy(), length, stride)
        counted = [
            int(x) for window in (windows[i] for i in range(len(windows))) for x in window["labels"][1:] if x >= 0
        ]
        missing = set(range(1, size)) - set(counted)
        assert len(counted) == len(set(counted)) and (not missing or stride == length)
