"""Training: runs and their folders, several processes, comparisons, use. (Kills and damage: test_faults.py.)"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainingArguments
from transformers.utils import ModelOutput
from typer.testing import CliRunner

from subquad import register, tasks, unregister
from subquad.attention.registry import available, mechanism
from subquad.cli import app
from subquad.core import child
from subquad.core.options import split_list
from subquad.core.spoken import command_line
from subquad.models import HEADS, SubquadConfig
from subquad.models.pairs import GlobalBatchNorm
from subquad.tasks import task
from subquad.tasks.guessing import Plateau, left_at
from subquad.testing import cases
from subquad.training import checkpoints, lock, log, statistics, use
from subquad.training import compare as comparing
from subquad.training.callbacks import Bar
from subquad.training.children import shares
from subquad.training.compare import Comparison, check, pending, prepare, rows, write
from subquad.training.connections import connections
from subquad.training.rates import choose, parse_rates, take_rates
from subquad.training.run import Interrupted, Run, check_specs, train
from subquad.training.trainer import RunTrainer, make_arguments
from training_runs import SAMPLED, TINY, losses, one_thread, start_two, tiny

__all__ = ["one_thread"]  # a fixture of every test here


@pytest.fixture(scope="module")
def made_once(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    train(tiny(out))
    return out


@pytest.fixture
def finished(made_once, tmp_path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(made_once, tmp_path / "finished"))


class Hoarder(mechanism("full")):
    """Full attention whose first call keeps memory for good, as one that compiles its kernels does."""

    kept: list[torch.Tensor] = []

    def attend(self, q, k, v, call):
        if not self.kept:
            self.kept.append(torch.ones(64 << 20))  # 256 MiB
        return super().attend(q, k, v, call)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak cannot be counted anew here")
def test_memory_leaves_out_what_kernels_need_to_compile(tmp_path):
    register("hoarder")(Hoarder)
    try:
        result = train(tiny(tmp_path / "run", attention="hoarder"))
        assert Hoarder.kept and result["memory"] < 128 << 20
    finally:
        Hoarder.kept.clear()
        unregister("hoarder")


def test_loading_the_kernels_changes_no_random_numbers(tmp_path, monkeypatch):
    with_it = train(tiny(tmp_path / "with", "dropout=0.1", attention=SAMPLED))
    monkeypatch.setattr("subquad.training.run.load_kernels", lambda run, splits: None)
    without = train(tiny(tmp_path / "without", "dropout=0.1", attention=SAMPLED))
    assert with_it["test"] == without["test"] and losses(tmp_path / "with") == losses(tmp_path / "without")


def test_no_bar_of_transformers_is_shown(tmp_path, capfd):
    train(tiny(tmp_path / "run"))
    shown = capfd.readouterr().err
    assert "%|" not in shown and "it/s" not in shown and "step 6/6" in shown, "our own lines are enough"


def test_the_task_of_the_docs_is_learned(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    code = page.split("Save this as `majority.py`:")[1].split("```python\n")[1].split("```")[0]
    try:
        exec(compile(code, "majority.py", "exec"), {})
        result = train(Run(task("majority"), ["full"], tmp_path / "run"))
        assert result["test"]["accuracy"] >= 0.95, "as the page says; guessing has 0.5"
    finally:
        tasks._TASKS.pop("majority", None)


def test_a_run_and_what_it_leaves(finished):
    out = finished
    result = log.read_result(out)
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
    with pytest.raises(ValueError, match="already contains a run"):
        train(tiny(out))
    assert not (out / "error.txt").exists(), "a refusal leaves no trace in a healthy folder"
    assert train(tiny(out), resume=True) == result, "a finished run is not run again"


def test_seeds_decide(finished, tmp_path):
    for name, seed in (("same", 0), ("other", 2)):
        train(tiny(tmp_path / name, seed=seed))
    assert losses(finished) == losses(tmp_path / "same") != losses(tmp_path / "other")


def test_overwriting_deletes_the_run_alone_and_only_if_the_new_one_can_work(finished):
    tmp_path = finished
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="batch must be a multiple"):
        train(tiny(tmp_path, "accumulate=3"), overwrite=True)
    assert (tmp_path / "result.json").exists()
    assert train(tiny(tmp_path, "steps=2"), overwrite=True)["steps"] == 2
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("a file")
    with pytest.raises(ValueError, match="`out` must be a folder"):
        train(tiny(tmp_path / "file"))


def test_a_setting_that_an_older_run_did_not_have_was_at_its_default(finished):
    tmp_path, result = finished, log.read_result(finished)
    about = json.loads((tmp_path / "run.json").read_text())
    del about["settings"]["initial"]
    (tmp_path / "run.json").write_text(json.dumps(about))
    assert train(tiny(tmp_path), resume=True) == result
    with pytest.raises(ValueError, match=r"initial was 0.02 and is now 0.1"):
        train(tiny(tmp_path, "initial=0.1"), resume=True)
    (tmp_path / "run.json").write_text('{"task":')
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        train(tiny(tmp_path), resume=True)


def test_resuming_something_else_is_refused(finished):
    (finished / "result.json").unlink()
    with pytest.raises(ValueError, match=r"cannot be resumed: rate was 0.005 and is now 0.1"):
        train(tiny(finished, "rate=0.1"), resume=True)


def test_only_a_run_can_be_resumed(tmp_path):
    """What is asked to be resumed and is not there must not be trained anew in silence."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "seed0").mkdir(parents=True)
    (tmp_path / "other" / "notes.txt").write_text("mine")
    found = {"nowhere": "the folder does not exist", "empty": "the folder is empty",
             "other": r"the folder contains no run, but notes\.txt, seed0"}  # fmt: skip
    for name, what in found.items():
        out = tmp_path / name
        with pytest.raises(lock.Refused, match=f"{out} cannot be resumed: {what}; without resume=True") as caught:
            train(tiny(out), resume=True)
        assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "notes.txt", "other", "seed0"]
    with pytest.raises(ValueError, match="resume=True continues a run and overwrite=True deletes it: choose one"):
        train(tiny(tmp_path / "new"), resume=True, overwrite=True)


def test_early_stopping(tmp_path):
    result = train(tiny(tmp_path, "rate=1e-9", "steps=40", "patience=2"))
    assert result["steps"] == 6 and result["best_step"] == 2, "two evaluations without a gain"
    before = losses(tmp_path)
    (tmp_path / "result.json").unlink()
    again = train(tiny(tmp_path, "rate=1e-9", "steps=40", "patience=2"), resume=True)
    assert again["steps"] == 6 and losses(tmp_path) == before, "killed during the test: it trains no further"


def test_training_stops_where_the_score_is_enough(tmp_path):
    result = train(tiny(tmp_path, "steps=40", "enough=0.0"))
    assert result["steps"] == 2, "any accuracy is enough at the first evaluation"
    (tmp_path / "result.json").unlink()
    assert train(tiny(tmp_path, "steps=40", "enough=0.0"), resume=True)["steps"] == 2, "it trains no further"


def test_another_optimiser_and_another_width_of_heads(tmp_path):
    """One Billion Words as published has 8 heads of 64 in a width of 256, and Adafactor (Yun et al. 2020, G.2)."""
    published = task("lm-books", "lm1b").recipe
    assert (published.width, published.heads, published.head_dim, published.optimizer) == (256, 8, 64, "adafactor")
    run = tiny(tmp_path, "optimizer=adafactor", "heads=3", "head_dim=6", "beta2=0.99")
    arguments = make_arguments(run)
    assert arguments.optim == "adafactor" and arguments.adam_beta2 == 0.99
    train(run)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["hidden_size"], config["num_attention_heads"], config["head_dim"]) == (8, 3, 6)
    with pytest.raises(ValueError, match="width must be a multiple of heads=3, not 8"):
        train(tiny(tmp_path / "other", "heads=3"))


def test_a_batch_that_does_not_divide(tmp_path):
    with pytest.raises(ValueError, match="batch must be a multiple of accumulate=3, not 4"):
        train(tiny(tmp_path, "accumulate=3"))


def test_gradient_accumulation_changes_nothing(finished, tmp_path):
    parts = tiny(tmp_path / "parts", "accumulate=2")
    train(parts)
    assert losses(parts.out) == pytest.approx(losses(finished), rel=1e-4)


def test_impossible_attention_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    from subquad import Attention, Capabilities, register, unregister

    @register("both-ways-only")
    class Bidirectional(Attention):
        capabilities = Capabilities(causal=False)

    try:
        causal = task("copying-causal", "small")
        with pytest.raises(ValueError, match="both-ways-only: causal=True is not supported"):
            check_specs(causal, ["both-ways-only"])
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


def test_connections_are_what_the_mechanisms_count():
    from subquad import Attention, Capabilities, register, unregister

    @register("half-the-pairs")
    class Sampled(Attention):
        capabilities = Capabilities(stochastic=True)

        def connections(self, n, density=None):
            return n * n * (0.5 if density is None else density)

    def of(attention, n, density=None):
        config = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 8192}
        return connections(HEADS["masked-lm"](SubquadConfig(attention=attention, **config)), n, density)

    try:
        assert of("full", 64) == 64**2 and of("full", 8192) == 8192**2, "longer ones by the exponent"
        assert of("longformer:window=8", 8192) == 2 * of("longformer:window=8", 4096) > 8192
        assert of("composite-slice:slice_length=8", 8192) == 8192 * 8 + 1024**2, "a formula needs no exponent"
        assert of("combiner-fixed:span=8", 64) == 64 * (8 + 7) + 64, "tokens and summaries, and what is in these"
        assert of("half-the-pairs", 16) == 128
        assert of("half-the-pairs", 16, [[0.25, 0.5], [0.0, 0.25]]) == 64, "the density that was seen"
        assert of(["full", "half-the-pairs"], 16, [[0.25, 0.25]]) == (256 + 64) / 2
    finally:
        unregister("half-the-pairs")


def test_comparisons(tmp_path):
    whole = Comparison(
        "needle", ["full", "longformer:window=4"], tmp_path, settings=(*TINY, "steps=2", "evaluate=2"), seeds=2
    )
    check(whole)
    prepare(whole, overwrite=False)
    assert len(list(pending(whole))) == 4
    for attention, seed, _ in list(pending(whole))[:3]:
        made = task("needle", "small", whole.settings, seed=seed)
        train(Run(made, [attention], whole.folder(attention, seed), seed=seed, command=["x"]))
    assert list(pending(whole)) == [("longformer:window=4", 1, None)], "what is finished is kept"
    full, other = rows(whole)
    assert (
        full["relative_time"] == 1
        and other["relative_time"] > 0
        and len(full["scores"]) == 2
        and full["sd"] is not None
    )
    assert other["sd"] is None and other["connections"] < full["connections"] == 32 * 32
    assert json.loads((tmp_path / "comparison.json").read_text())["task"] == "needle"
    write(whole)
    changed = Comparison("needle", ["full"], tmp_path, settings=(*TINY, "steps=3", "evaluate=2"))
    with pytest.raises(ValueError, match="already contains a comparison with steps=2, not 3"):
        prepare(changed, overwrite=False)
    (tmp_path / "full" / "notes.txt").write_text("mine")
    prepare(changed, overwrite=True)
    assert (tmp_path / "full" / "notes.txt").exists() and not (tmp_path / "full" / "seed0").exists()
    assert not (tmp_path / "longformer_window=4").exists()
    run = tmp_path / "runs" / "full" / "seed0"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=r"contains runs \(full/seed0\) but no comparison.json: they are not deleted"):
        prepare(Comparison("needle", ["full"], tmp_path / "runs", settings=TINY), overwrite=True)
    assert (run / "run.json").exists(), "runs of `subquad train` are not a comparison"
    with pytest.raises(ValueError, match="batch must be a multiple"):
        check(Comparison("needle", ["full"], tmp_path, settings=(*TINY, "accumulate=3")))
    with pytest.raises(FileNotFoundError, match="not found"):
        check(Comparison("text", ["full"], tmp_path, data=tmp_path / "nowhere"))


def test_each_attention_gets_its_best_rate(tmp_path):
    settings, rest = take_rates((*TINY, "rate=1e-2,1e-3", "steps=2", "evaluate=2")), (*TINY, "steps=2", "evaluate=2")
    assert settings == (rest, ("1e-2", "1e-3"))
    both = Comparison("needle", ["full"], tmp_path, settings=rest, seeds=2, rates=settings[1])
    check(both)
    assert [(seed, rate) for _, seed, rate in pending(both)] == [(0, "1e-2"), (0, "1e-3")], "no choice yet"
    for attention, seed, rate in pending(both):  # the second seed is asked for when the choice is made
        made = task("needle", "small", (*rest, f"rate={rate}"), seed=seed)
        train(Run(made, [attention], both.folder(attention, seed, rate), seed=seed, command=["x"]))
    (row,) = write(both)["rows"]
    assert row["rate"] == max(row["rates"], key=row["rates"].get) and len(row["scores"]) == 2
    assert (tmp_path / "full" / f"rate={row['rate']}" / "seed1" / "result.json").exists()
    assert len(row["left_plateau"]) == 2 and len(list(tmp_path.glob("full/*/seed*"))) == 3
    prepare(both, overwrite=True)
    assert not (tmp_path / "full").exists()


def several(out: Path, jobs: int, **about: Any) -> Comparison:
    return Comparison("needle", ["full", "linear"], out, settings=TINY, timed=False, jobs=jobs, **about)


def test_several_runs_at_a_time(tmp_path, monkeypatch):
    """Two runs meet at a barrier, never three; the second seed begins when the learning rates have been tried."""
    events: list[tuple] = []
    both = threading.Barrier(2, timeout=60)

    def run(comparison, attention, seed, rate):
        events.append(("begin", attention, seed, rate))
        if seed == 0:
            both.wait()
        folder = comparison.folder(attention, seed, rate)
        folder.mkdir(parents=True)
        known = {"valid": float(rate), "larger_is_better": True, "metric": "accuracy", "test": {"accuracy": 0.5}}
        costs = dict.fromkeys(("step_seconds", "memory", "parameters", "connections"), 1.0)
        log.write_result(folder, {**known, **costs, "density": None})
        log.write(folder, [{"step": 2, "valid": {"accuracy": 0.5}}, {"step": 2, "loss": 1.0, "step_seconds": 1.0}])
        events.append(("end", attention, seed, rate))
        return 0

    monkeypatch.setattr(comparing, "run_one", run)
    whole = several(tmp_path, 2, seeds=2, rates=("1e-3", "2e-3"))
    prepare(whole, overwrite=False)
    made = comparing.compare(whole)
    assert [row["rate"] for row in made["rows"]] == ["2e-3"] * 2 and [len(row["scores"]) for row in made["rows"]] == [
        2,
        2,
    ]
    alive, most = 0, 0
    for event, *_ in events:
        alive += 1 if event == "begin" else -1
        most = max(most, alive)
    assert len(events) == 12 and most == 2
    for attention in whole.attentions:
        tried = max(events.index(("end", attention, 0, rate)) for rate in whole.rates)
        assert tried < events.index(("begin", attention, 1, "2e-3"))


@pytest.mark.parametrize("end", ["stopped", "an error", "a signal"])
def test_runs_at_a_time_end_together(tmp_path, monkeypatch, end):
    """One that is stopped, or cannot be started, or a signal to the comparison: the other one saves its state."""
    waiting = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); print(1); time.sleep(60)"
    )
    codes = {}

    def run(comparison, attention, seed, rate):
        if attention == "linear":
            while not comparison.children.alive:
                time.sleep(0.01)
            time.sleep(0.5)  # the other one has set its handler
            if end == "a signal":
                os.kill(os.getpid(), signal.SIGTERM)
            return {"an error": lambda: 1 / 0}.get(end, lambda: 130)()
        codes[attention] = comparison.children.run([sys.executable, "-c", waiting], comparison.environment)
        return codes[attention]

    monkeypatch.setattr(comparing, "run_one", run)
    whole = several(tmp_path, 2)
    prepare(whole, overwrite=False)
    with pytest.raises(ZeroDivisionError if end == "an error" else KeyboardInterrupt):
        comparing.compare(whole)
    assert codes == {"full": 130} and not whole.children.alive
    assert (tmp_path / "comparison.json").exists() and not list(tmp_path.glob("*/seed0/error.txt"))


@pytest.mark.parametrize("inside", [False, True])
def test_a_run_that_is_stopped_says_how_its_comparison_is_resumed(tmp_path, monkeypatch, capfd, inside):
    """A comparison has no argument `resume`: it resumes its runs by itself."""
    whole = several(tmp_path, 1)
    whole.inside = inside
    compute_loss = RunTrainer.compute_loss

    def stop(self, *given, **more):
        os.kill(os.getpid(), signal.SIGTERM)
        return compute_loss(self, *given, **more)

    def run(comparison, attention, seed, rate):
        for name, value in comparison.environment.items():
            monkeypatch.setenv(name, value)
        with command_line(), pytest.raises(Interrupted):  # as in a process of its own
            train(tiny(comparison.folder(attention, seed, rate)))
        return 130

    monkeypatch.setattr(RunTrainer, "compute_loss", stop)
    monkeypatch.setattr(comparing, "run_one", run)
    prepare(whole, overwrite=False)
    with pytest.raises(KeyboardInterrupt):
        comparing.compare(whole)
    said = capfd.readouterr().err
    assert "; make the same call again to continue" in said and "resume" not in said


def test_runs_share_the_cores_and_the_terminal(monkeypatch, capsys):
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert shares(1) == {}
    assert shares(3) == {child.LINES: "1", "OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"}, "what is set is kept"
    assert shares(16)["OMP_NUM_THREADS"] == "1"
    state = types.SimpleNamespace(is_world_process_zero=True, max_steps=4, global_step=2)
    for number, alone in enumerate((True, False)):
        monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as far as rich is concerned
        if not alone:
            monkeypatch.setenv(child.LINES, "1")
        bar = Bar(f"run {number}", "accuracy", types.SimpleNamespace(training=[]))
        bar.on_log(None, state, None, {"eval_accuracy": 0.5})
        assert ("step 2/4  accuracy 0.5000" in capsys.readouterr().err) is not alone and bar.bar.disable is not alone


def test_a_rate_is_chosen_on_validation():
    made = {rate: {"valid": score, "larger_is_better": True} for rate, score in {"a": 0.2, "b": 0.5, "c": 0.5}.items()}
    assert choose(made) == "b" and choose({}) is None
    assert choose({rate: {**result, "larger_is_better": False} for rate, result in made.items()}) == "a"
    assert choose({"a": {**made["a"], "valid": float("nan")}, **{"b": made["b"]}}) == "b", "a run that diverged"
    for text in ("", "1e-3,", "0", "-1", "x", "nan", "inf"):
        with pytest.raises(ValueError, match="comma-separated positive numbers"):
            parse_rates(text)
    with pytest.raises(ValueError, match="names one twice"):
        parse_rates("1e-3,0.001")


def test_leaving_the_plateau():
    at = lambda *scores: [{"step": step, "valid": {"bits": score}} for step, score in enumerate(scores, 1)]  # noqa: E731
    bigram = Plateau(3.5, 0.1, "bigram")
    assert left_at(at(4.0, 3.45, 3.3, 3.0), "bits", bigram, larger_is_better=False) == 3, "clearly better"
    assert left_at(at(4.0, 3.0, 3.6, 3.2), "bits", bigram, larger_is_better=False) == 4, "for good"
    assert left_at(at(4.0, 3.0, 3.6), "bits", bigram, larger_is_better=False) is None
    assert left_at(at(3.7), "bits", bigram, larger_is_better=True) == 1
    assert left_at([], "bits", bigram, larger_is_better=True) is None


def test_predicting_and_generating(tmp_path):
    small = ("length=64", "width=16", "heads=2", "feedforward=32", "steps=2", "evaluate=2", "batch=4")
    listops = ("max_length=60", "train_size=64", "eval_size=8")
    train(Run(task("listops", "small", (*small, *listops)), ["full"], tmp_path, command=["x"]))
    model, made = use.load(tmp_path)
    answers = list(use.predict(model, made, ["[MAX 2 9 [MIN 4 7 ] 0 ]", "7"]))
    assert len(answers) == 2 and all(answer and answer in "0123456789" for answer in answers)
    for empty in ("", " \n"):
        with pytest.raises(ValueError, match="line 2: the line is empty"):
            list(use.predict(model, made, ["7", empty]))
    with pytest.raises(ValueError, match="'\\[SUM' is not a token of ListOps"):
        list(use.predict(model, made, ["[SUM 1 2 ]"]))
    with pytest.raises(ValueError, match="line 1: the input has 65 tokens, beyond the model's 64"):
        list(use.predict(model, made, ["[MAX " + "1 " * 63 + "]"]))
    with pytest.raises(ValueError, match="generate needs a causal language model"):
        use.generate(model, made, "x", 5, 1.0, 0)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="safetensors does not agree with its digest"):
        use.load(tmp_path)
    (tmp_path / "model" / checkpoints.DIGESTS).unlink()
    with pytest.raises(ValueError, match="the model cannot be read"):
        use.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        use.load(tmp_path / "nowhere")
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="does not contain a model"):
        use.load(empty)


def test_predict_goes_on_past_lines_it_cannot_read(tmp_path):
    small = ("length=32", "width=16", "heads=2", "feedforward=32", "steps=2", "evaluate=2", "batch=4")
    train(
        Run(
            task("listops", "small", (*small, "max_length=30", "train_size=64", "eval_size=8")),
            ["full"],
            tmp_path / "run",
            command=["x"],
        )
    )
    lines = tmp_path / "lines.txt"
    lines.write_bytes(b"[MAX 2 9 ]\n[SUM 1 ]\n\n\xff\xfe\n7\n")
    for given in (["--file", str(lines)], []):
        typed = lines.read_bytes() if not given else None
        result = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), *given], input=typed)
        answers = result.stdout.split("\n")
        assert result.exit_code == 1 and len(answers) == 6 and answers[1:4] == ["", "", ""] and answers[4].isdigit()
        reports = ("line 2: the expression: '[SUM' is not a token", "line 3: the line is empty", "line 4: not UTF-8")
        assert len(result.stderr.splitlines()) == 3 and all(each in result.stderr for each in reports)
    lines.write_text("7\n")
    assert CliRunner().invoke(app, ["predict", str(tmp_path / "run"), "--file", str(lines)]).exit_code == 0


def test_a_packed_language_model_writes_as_it_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("nä, " * (3 + i % 9) for i in range(80)))
    small = ("length=32", "width=16", "heads=2", "feedforward=32", "steps=2", "evaluate=2", "batch=2", "pack=true")
    lm = task("lm-bytes", "small", (*small, "source=file", f"path={text}"))
    train(Run(lm, ["combiner-fixed"], tmp_path / "run", command=["x"]))
    model, made = use.load(tmp_path / "run")
    ids = made.encode("nä, n")["input_ids"][None]
    for _ in range(40):  # the definition: everything is read at every step, and beyond the length the newest tokens
        ids = torch.cat([ids, model(ids[:, -32:]).logits[:, -1:].argmax(-1)], 1)
    pieces = list(use.write(model, made, "nä, n", 40, 0.0, 0))
    assert "".join(pieces) == made.decode(ids[0].tolist()) and len(pieces) == 42
    result = CliRunner().invoke(
        app, ["generate", str(tmp_path / "run"), "--prompt", "nä, n", "--tokens", "40", "--temperature", "0"]
    )
    assert result.stdout == "".join(pieces) + "\n" and "40 tokens" in result.stderr
    assert "tokens per second" in result.stderr


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


# ---- the same numbers however a batch is divided -----------------------------------------------------------------


@dataclass
class Output(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    statistics: Any = None


class Centroid(nn.Module):
    """A stand-in for routing attention: its loss depends on a running average of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("centroid", torch.zeros(3))
        self.calls = 0

    def forward(self, x, labels):
        logits = (self.weight * (x - self.centroid)).sum(-1)  # (B,)
        sums = ((x.sum(0), torch.tensor(float(len(x)))), None)
        return Output((logits - labels).square().mean(), logits, sums)

    def update_statistics(self, summed):
        (total, count), nothing = summed
        assert nothing is None and not total.requires_grad
        self.centroid.lerp_(total / count, 0.5)
        self.calls += 1


def train_centroid(out: Path, batch: int, accumulate: int) -> Centroid:
    draw = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(3, generator=draw), "labels": torch.randn((), generator=draw)} for _ in range(32)]
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=4, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate,
        learning_rate=0.1, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        label_names=["labels"], remove_unused_columns=False, dataloader_pin_memory=False, logging_strategy="no",
    )  # fmt: skip
    model = Centroid()
    RunTrainer(model, arguments, train_dataset=data).train()
    return model


def test_statistics_are_those_of_the_whole_batch(tmp_path):
    whole, parts = train_centroid(tmp_path, 8, 1), train_centroid(tmp_path, 4, 2)
    assert whole.calls == parts.calls == 4, "once per optimiser step"
    torch.testing.assert_close(parts.centroid, whole.centroid)
    torch.testing.assert_close(parts.weight, whole.weight)


def test_sums_of_statistics():
    one, two = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0)
    assert statistics.add(None, None) is None
    left = statistics.add(None, (one, (None, two)))
    assert not left[0].requires_grad and left[0] is not one
    assert statistics.add(left, (two, (two, None))) == (3.0, (2.0, 2.0))
    with pytest.raises(ValueError, match="same structure"):
        statistics.add((one,), (one, two))


def pair_model() -> Any:
    torch.manual_seed(0)
    config = SubquadConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                           max_position_embeddings=8)  # fmt: skip
    return HEADS["pair"](config).double()


def pair_inputs() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(9, (2, 4, 8), generator=draw)
    return {"input_ids": ids[0], "pair_ids": ids[1], "labels": torch.tensor([0, 1, 1, 0])}


def stopped_by_one(out: Path) -> None:
    """A signal reaches one of the processes: both stop at the same step, with a checkpoint."""

    def training_step(self, *args, **kwargs):
        if self.state.global_step == 2 and self.args.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args, **kwargs)

    original = RunTrainer.training_step
    RunTrainer.training_step = training_step
    try:
        with pytest.raises(Interrupted, match="stopped at step 3 of 4"):
            train(tiny(out, "steps=4"))
    finally:
        RunTrainer.training_step = original


def every_mechanism(share: slice, reduce: Callable[[torch.Tensor], Any]) -> dict[str, list[torch.Tensor]]:
    """Name → loss, gradients and running averages after a step on a share of a batch, summed over the processes."""
    found = {}
    for name in available():
        kind = mechanism(name)
        if kind.capabilities.stochastic:
            continue  # a sequence draws its graph by its number in the batch
        case = cases(name, **kind.examples[0])[0]
        module, xs = case.make().train(), [x[share] for x in case.inputs(17, batch=4)]
        loss = case.run(module, xs).square().sum()
        if loss.requires_grad:
            loss.backward()
        sums = [loss.detach(), *(p.grad.contiguous() for p in module.parameters() if p.grad is not None)]
        statistics = None if case.is_layer else module.observe(*xs)[1].statistics
        for each in [*sums, *([] if statistics is None else [statistics])]:
            reduce(each)
        if statistics is not None:
            module.update(statistics)
        found[name] = [*sums, *(b.clone() for b in module.buffers())]
    return found


def divided(out: Path) -> None:
    """One of two processes: half of every batch."""
    stopped_by_one(out / "two")
    train(tiny(out / "two", "steps=4"), resume=True)
    import torch.distributed as dist

    rank, share = dist.get_rank(), slice(dist.get_rank(), None, 2)
    centroid = train_centroid(out / "centroid", 4, 1)
    model = pair_model()
    loss = model(**{key: value[share] for key, value in pair_inputs().items()}).loss
    loss.backward()
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    for each in found:
        dist.all_reduce(each)
        each /= 2
    mechanisms = every_mechanism(share, dist.all_reduce)
    saved = {
        "centroid": centroid.state_dict(), "pair": found, "norm": model.norm.state_dict(), "mechanisms": mechanisms,
    }  # fmt: skip
    torch.save(saved, out / f"rank{rank}.pt")


def test_two_processes_equal_one(finished, tmp_path):
    """The same global batch over two processes (gloo): losses, running averages and the pair head's normalisation."""
    processes = start_two(divided, tmp_path)
    one = train(tiny(tmp_path / "one", "steps=4"))
    centroid, model = train_centroid(tmp_path / "centroid", 8, 1), pair_model()
    assert isinstance(model.norm, GlobalBatchNorm)
    loss = model(**pair_inputs()).loss
    loss.backward()
    for process in processes:
        process.join(200)
        assert process.exitcode == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert log.read_result(tmp_path / "two")["test"]["accuracy"] == pytest.approx(one["test"]["accuracy"], abs=0.02)
    wanted = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    whole = every_mechanism(slice(None), lambda each: each)
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        torch.testing.assert_close(found["centroid"], dict(centroid.state_dict()))
        torch.testing.assert_close(found["pair"], wanted)
        assert list(found["mechanisms"]) == list(whole) and len(whole) > 30
        for name, sums in whole.items():
            torch.testing.assert_close(found["mechanisms"][name], sums, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(found["norm"], dict(model.norm.state_dict()))
    checkpoint = checkpoints.all_checkpoints(tmp_path / "two")[0]
    assert checkpoints.processes(checkpoint) == 2 and checkpoints.damage(checkpoint) is None


def test_children_import_nothing_from_the_working_folder(tmp_path, monkeypatch):
    import subprocess

    for name in ("runpy.py", "argparse.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit('the working folder was imported from')")
    monkeypatch.chdir(tmp_path)
    for path in (None, ":/nowhere", "/nowhere:"):
        monkeypatch.delenv("PYTHONPATH", raising=False)
        if path is not None:
            monkeypatch.setenv("PYTHONPATH", path)
        done = subprocess.run(child.command("json.tool", "--compact"), input="[1, 2]", capture_output=True, text=True)
        assert done.stdout.strip() == "[1,2]", done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert str(tmp_path) not in child.paths(working_folder=False).split(":")
    assert child.paths(working_folder=True).endswith(str(tmp_path))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: task(3), "the name of the task must be a string, not 3"),
        (lambda: task("needle", 3), "the name of the recipe must be a string, not 3"),
        (lambda: task("needle", step=5), "needle has no option 'step'; did you mean steps"),
        (lambda: task("needle", settings="steps=5"), r"""settings must be a list of texts such as \["steps=100"\]"""),
        (
            lambda: Run("needle", ["full"], Path("x")),
            r"""task must be a task, such as subquad.tasks.task\("needle"\)""",
        ),
        (lambda: Run(task("needle"), "full", Path("x")), r"""attention must be a list of specs, such as \["full"\]"""),
        (lambda: Run(task("needle"), [], Path("x")), "attention must be a list of specs"),
        (lambda: Run(task("needle"), ["fulll"], Path("x")), "unknown attention 'fulll'; did you mean full"),
        (lambda: train("needle"), "run must be a Run"),
    ],
)
def test_what_is_no_task_and_no_run_is_refused_in_words(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
