"""Faults: kills at any moment, every file damaged in five ways, two starts at once, full disks, dead processes.

The result is equal, or one clear line says what is wrong: never silently different numbers. Other faults have their
tests where they belong: padding that a mechanism forgets in test_testing.py, threads and forked workers in
test_parallel.py, NaN in the contract and scores of 1e30 in test_routing.py, damaged and malicious archives in
test_data_files.py.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from subquad.training import checkpoints, lock, log, use
from subquad.training.compare import Comparison, compare, prepare
from subquad.training.run import Interrupted, train
from subquad.training.trainer import RunTrainer
from training_runs import TINY, losses, one_thread, outcome, sampled, start, start_two, tiny, train_in_process

__all__ = ["one_thread"]  # a fixture of every test here


@pytest.fixture(scope="module")
def made_once(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sampled") / "run"
    train(sampled(out))
    return out


@pytest.fixture(scope="module")
def expected(made_once) -> dict:
    return outcome(made_once, log.read_result(made_once))


@pytest.fixture
def run(made_once, tmp_path) -> Path:
    """A copy of a finished run with sampled attention and dropout."""
    return Path(shutil.copytree(made_once, tmp_path / "run"))


def resumed(out: Path) -> dict:
    return outcome(out, train(sampled(out), resume=True))


# ---- kills ----------------------------------------------------------------------------------------------------


def test_a_kill_during_the_test_changes_nothing(run, expected):
    (run / "result.json").unlink()
    torch.randn(7)  # what was drawn before must not matter
    assert resumed(run) == expected
    metrics = use.evaluate(*use.load(run))
    assert metrics == {key: expected["test"][key] for key in metrics}, "and `subquad eval` repeats the test"


def test_a_run_resumes_from_every_checkpoint(run, expected):
    (run / "result.json").unlink()
    shutil.rmtree(checkpoints.all_checkpoints(run)[0])
    assert resumed(run) == expected
    shutil.rmtree(run / checkpoints.FOLDER)
    (run / "result.json").unlink()
    assert resumed(run) == expected, "from none"


def kill_and_resume(out: Path, expected: dict, draw: random.Random, kills: int) -> None:
    """Kill a run again and again, at moments spread over its whole life, then let it finish."""
    hits = 0
    for _ in range(kills):
        process, lines = start_or_resume(out), draw.randint(0, len(expected["log"]))
        while process.is_alive() and not ((out / "run.json").exists() and len(log.read(out)) >= lines):
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))  # in a step, an evaluation, the writing of a checkpoint, the test
        process.kill()
        process.join()
        hits += process.exitcode == -signal.SIGKILL
    assert hits, "it was killed on the way"
    start_or_resume(out).join()
    assert outcome(out, log.read_result(out)) == expected


def start_or_resume(out: Path) -> Any:
    return start(train_in_process, out, (out / "run.json").exists())


@pytest.fixture(scope="module")
def expected_of_a_process(tmp_path_factory) -> dict:
    """What a run gives that is left alone in a process of its own, as the killed ones are."""
    out = tmp_path_factory.mktemp("alone") / "run"
    start(train_in_process, out, False).join()
    return outcome(out, log.read_result(out))


def test_kills_at_random_moments(tmp_path, expected_of_a_process):
    kill_and_resume(tmp_path / "run", expected_of_a_process, random.Random(0), 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_more_kills_at_random_moments(tmp_path, expected_of_a_process, seed):
    kill_and_resume(tmp_path / "run", expected_of_a_process, random.Random(seed), 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_a_checkpoint(tmp_path, expected, monkeypatch, capfd, number):
    """Also at a step without a checkpoint of its own, and between two records of the log."""
    calls = []

    def compute_loss(self, *args, **kwargs):
        calls.append(self.model.training)
        if sum(calls) == 3:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # the terminal and the parent both send it: counts once
        return original(self, *args, **kwargs)

    original = RunTrainer.compute_loss
    monkeypatch.setattr(RunTrainer, "compute_loss", compute_loss)
    with pytest.raises(Interrupted, match="stopped at step 3 of 6"):
        train(sampled(tmp_path))
    assert "make the same call again with resume=True to continue" in capfd.readouterr().err
    assert checkpoints.step_of(checkpoints.newest_good(tmp_path)[0]) == 3
    assert not (tmp_path / "error.txt").exists() and not (tmp_path / lock.FILE).exists()
    assert resumed(tmp_path) == expected


def test_the_loss_between_two_records_is_kept(tmp_path, monkeypatch):
    """With a record every second step, an interruption after an odd one loses no half of a mean."""
    from subquad.training import trainer

    def every_second(run):
        arguments = original(run)
        arguments.logging_steps = 2
        return arguments

    original = trainer.make_arguments
    monkeypatch.setattr("subquad.training.run.make_arguments", every_second)
    train(tiny(tmp_path / "whole"))
    monkeypatch.setattr(RunTrainer, "training_step", _interrupting(3))
    with pytest.raises(Interrupted):
        train(tiny(tmp_path / "parts"))
    monkeypatch.setattr(RunTrainer, "training_step", _interrupting(-1))
    train(tiny(tmp_path / "parts"), resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 3


def _interrupting(step: int):
    original = RunTrainer.__mro__[1].training_step

    def training_step(self, *args, **kwargs):
        if self.state.global_step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args, **kwargs)

    return training_step


def test_other_threads_and_versions_are_named(run, expected, capfd):
    """The order of sums follows them: the last digits may differ, but not in silence."""
    torch.set_num_threads(1)
    log.warn.cache_clear()  # a message is said once
    assert json.loads((run / "run.json").read_text())["threads"] == 1
    (run / "result.json").unlink()
    assert resumed(run) == expected and "last digits" not in capfd.readouterr().err
    about = json.loads((run / "run.json").read_text())
    about["threads"], about["versions"]["torch"] = 7, "2.0"
    (run / "run.json").write_text(json.dumps(about))
    (run / "result.json").unlink()
    resumed(run)
    said = capfd.readouterr().err
    assert "warning: this run was started with threads 7, not 1: its last digits may differ" in said
    assert "torch 2.0, " in said and said.count("last digits") == 2


# ---- damage ---------------------------------------------------------------------------------------------------


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """One bit, somewhere in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


WAYS = (delete, empty, cut, flip, garbage)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_no_damage_of_a_checkpoint_goes_unnoticed(run, made_once):
    """All files, all ways: the older checkpoint is used, and one line names the damaged one and the file."""
    newest, older = checkpoints.all_checkpoints(run)
    names = [path.name for path in files(newest)]
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "digests.json"} <= set(names)
    for name in names:
        for way in WAYS:
            way(newest / name)
            found, complaints = checkpoints.newest_good(run)
            assert found == older and len(complaints) == 1, (name, way)
            assert newest.name in complaints[0] and "put aside as damaged-6" in complaints[0]
            assert name in complaints[0] or name == "digests.json", complaints
            shutil.copytree(made_once / newest.relative_to(run), newest)


@pytest.mark.parametrize(("name", "way"), [("rng_state.pth", delete), ("optimizer.pt", garbage), ("log.jsonl", flip)])
def test_a_damaged_checkpoint_changes_nothing(run, expected, name, way, capsys):
    (run / "result.json").unlink()
    way(checkpoints.all_checkpoints(run)[0] / name)
    assert resumed(run) == expected
    assert "warning: checkpoint-6 is damaged" in capsys.readouterr().err


def test_damage_of_every_other_file(run, made_once, expected, capsys):
    """Of an unfinished run (result.json is missing too) and of a finished one."""
    for name in ("run.json", "log.jsonl", "result.json"):
        for way in WAYS:
            way(run / name)
            if name != "result.json":
                (run / "result.json").unlink()
            try:
                assert resumed(run) == expected, (name, way)
            except lock.Refused as error:
                assert name == "run.json" and "\n" not in str(error) and "run" in str(error)
            shutil.copytree(made_once, run, dirs_exist_ok=True)
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert any("result.json is damaged" in line for line in warnings)


def test_damage_of_the_model(run, made_once):
    for path in files(run / "model"):
        for way in WAYS:
            way(path)
            try:
                use.load(run)
                unnoticed = True
            except (ValueError, FileNotFoundError) as error:
                unnoticed = False
                assert "\n" not in str(error) and str(run) in str(error)
            assert not unnoticed or (path.name == "digests.json" and way is delete), (path.name, way)
            shutil.copy(made_once / path.relative_to(run), path)


@pytest.mark.slow
def test_damage_of_everything_to_the_end(run, made_once, expected):
    for path in files(made_once):
        for way in WAYS:
            shutil.rmtree(run)
            shutil.copytree(made_once, run)
            (run / "result.json").unlink()
            if path.name == "result.json":
                continue
            way(run / path.relative_to(made_once))
            try:
                assert resumed(run) == expected, (path, way)
            except lock.Refused as error:
                assert path.name == "run.json" and "\n" not in str(error)


def test_a_log_that_changes_during_training(tmp_path, monkeypatch, capsys):
    """One flipped bit gave a KeyError after all training."""

    def append(run, record):
        text = json.dumps(record).replace("step_seconds", "step_secondr" if record["step"] == 3 else "step_seconds")
        with (run / log.FILE).open("a") as file:
            file.write(text + "\n")

    monkeypatch.setattr(log, "append", append)
    result = train(tiny(tmp_path))
    assert result["step_seconds"] > 0 and len(losses(tmp_path)) == 6
    assert "was changed during training and has been rewritten" in capsys.readouterr().err


def test_a_damaged_line_of_a_finished_log_is_left_out_and_named(run, capsys):
    lines = (run / log.FILE).read_text().splitlines()
    lines[1] = lines[1].replace('"loss"', '"losr"')
    (run / log.FILE).write_text("\n".join([*lines, '{"step": 7, "lo']))
    assert len(log.read(run)) == len(lines) - 1
    said = capsys.readouterr().err
    assert "line 2 of" in said and "damaged" in said and said.count("\n") == 1, "a cut last line is no damage"


def test_the_best_checkpoint_is_looked_at_too(tmp_path, capsys):
    still = ("rate=1e-9",)  # nothing is learned: the first checkpoint stays the best
    train(tiny(tmp_path, *still))
    newest, best = checkpoints.all_checkpoints(tmp_path)
    assert (checkpoints.step_of(newest), checkpoints.step_of(best)) == (6, 2)
    flip(best / "model.safetensors")
    (tmp_path / "result.json").unlink()
    result = train(tiny(tmp_path, *still), resume=True)
    assert (best.parent / "damaged-2").exists() and result["steps"] == 6 and result["best_step"] is None
    assert "it was the best one, so the best from step 6 on is used" in capsys.readouterr().err


def test_rotation_counts_steps_not_file_times(tmp_path):
    for step, age in ((2, 0), (4, 100), (6, 200), (10, 300)):
        folder = tmp_path / checkpoints.FOLDER / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age,) * 2)
    checkpoints.rotate(tmp_path, best=4)
    assert [checkpoints.step_of(folder) for folder in checkpoints.all_checkpoints(tmp_path)] == [10, 4]
    checkpoints.rotate(tmp_path, best=10)
    assert [checkpoints.step_of(folder) for folder in checkpoints.all_checkpoints(tmp_path)] == [10, 4]


def test_another_number_of_processes_is_named(run, capsys):
    log.warn.cache_clear()  # a message is said once
    newest, older = checkpoints.all_checkpoints(run)
    shutil.rmtree(newest)
    (run / "result.json").unlink()
    shutil.copy(older / "rng_state.pth", older / "rng_state_1.pth")
    checkpoints.seal(older)
    assert train(sampled(run), resume=True)["steps"] == 6
    assert f"warning: {older.name} was written by 2 processes, not 1: what is drawn" in capsys.readouterr().err


def test_run_json_is_missing(run):
    (run / "run.json").unlink()
    before = {path: path.read_bytes() for path in files(run)}
    for how in ({"resume": True}, {}):
        with pytest.raises(lock.Refused, match=r"but no run\.json: if it is a damaged run, restore run\.json"):
            train(sampled(run), **how)
    assert {path: path.read_bytes() for path in files(run)} == before
    assert train(sampled(run), overwrite=True)["steps"] == 6


def test_a_folder_of_somebody_else(tmp_path):
    """`--out .` must not replace a folder model/ that no run has written."""
    (tmp_path / "model").mkdir()
    for overwrite in (False, True):
        with pytest.raises(lock.Refused, match=r"contains model but no run\.json"):
            train(tiny(tmp_path), overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


ABSURD = [
    ("task.json", "layers", 10**9, "layers"),
    ("task.json", "dropout", float("nan"), "dropout"),
    ("task.json", "width", "8", "width must be an integer"),
    ("task.json", "seed", -1, "seed must be"),
    ("task.json", "recipe", "huge", "recipe must be one of"),
    ("task.json", "settings", [], "settings is"),
    ("config.json", "num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, and task.json says 1"),
    ("config.json", "max_position_embeddings", 10**12, "max_position_embeddings"),
    ("config.json", "dropout", float("nan"), "dropout must be a finite number"),
    ("config.json", "dropout", 1.5, "dropout must be at least 0 and below 1"),
    ("config.json", "layer_norm_eps", float("nan"), "layer_norm_eps must be a finite number"),
    ("config.json", "layer_norm_eps", -1.0, "layer_norm_eps must be a number > 0"),
]


@pytest.mark.parametrize(("file", "key", "value", "wanted"), ABSURD)
def test_absurd_values_are_refused_at_once(run, file, key, value, wanted):
    (run / "model" / checkpoints.DIGESTS).unlink()
    path = run / "model" / file
    about = json.loads(path.read_text())
    inner = about["settings"] if key in about.get("settings", {}) else about
    assert key in inner
    inner[key] = value
    path.write_text(json.dumps(about))
    started = time.perf_counter()
    with pytest.raises(ValueError, match=wanted) as caught:
        use.load(run)
    assert time.perf_counter() - started < 1 and "\n" not in str(caught.value) and file in str(caught.value)


def test_absurd_values_that_agree_and_deep_nesting(run):
    (run / "model" / checkpoints.DIGESTS).unlink()
    whole = {name: (run / "model" / name).read_text() for name in ("task.json", "config.json")}
    for name, text in whole.items():
        (run / "model" / name).write_text("[" * 100_000)
        with pytest.raises(ValueError, match="is damaged"):
            use.load(run)
        (run / "model" / name).write_text(text)
    (run / "model" / "task.json").write_text(whole["task.json"].replace('"layers": 1', '"layers": 1000000000'))
    many = whole["config.json"].replace('"num_hidden_layers": 1', '"num_hidden_layers": 1000000000')
    (run / "model" / "config.json").write_text(many)
    with pytest.raises(ValueError, match=r"1000000000 layers, and model\.safetensors has \d+ tensors"):
        use.load(run)


# ---- one at a time --------------------------------------------------------------------------------------------


def test_a_second_start_is_refused_and_touches_nothing(run):
    (run / "result.json").unlink()
    before = {path: path.read_bytes() for path in files(run)}
    with lock.locked(run):
        assert lock.holder(run) == str(os.getpid())
        for how in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(lock.Refused, match=f"is in use by process {os.getpid()}: wait until it has finished"):
                train(sampled(run), **how)
    assert lock.holder(run) is None
    assert {path: path.read_bytes() for path in files(run)} == before, "no error.txt, no lock left behind"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_read_only_folder_is_named(run, number, monkeypatch):
    def refuse(path, *args):
        if Path(path).name == lock.FILE:
            raise OSError(number, os.strerror(number), path)
        return original(path, *args)

    original = os.open
    (run / "result.json").unlink()
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="this folder cannot be written to") as caught:
        train(sampled(run), resume=True)
    assert caught.value.filename == str(run) and os.strerror(number) in str(caught.value)


@pytest.mark.parametrize(("error", "words"), [
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 8"), "the disk is full"),
])  # fmt: skip
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, error, words):
    written = []

    def save(self, folder):
        if written:
            raise error
        written.append(folder)
        return original(self, folder)

    original = RunTrainer._save_optimizer_and_scheduler
    monkeypatch.setattr(RunTrainer, "_save_optimizer_and_scheduler", save)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(OSError, match=f"{words}.*what was saved before is kept; free some disk space"):
        train(tiny(tmp_path))
    assert [folder.name for folder in checkpoints.all_checkpoints(tmp_path)] == ["checkpoint-2"]
    assert words in (tmp_path / "error.txt").read_text()
    monkeypatch.undo()
    assert train(tiny(tmp_path), resume=True)["steps"] == 6 and not (tmp_path / "error.txt").exists()


# ---- several processes ----------------------------------------------------------------------------------------


def train_until_dead(out: Path) -> None:
    def training_step(self, *args, **kwargs):
        if self.state.global_step == 3 and self.args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kwargs)

    original = RunTrainer.training_step
    RunTrainer.training_step = training_step
    try:
        train(tiny(out))
    except ConnectionError as error:
        (out / "said.txt").write_text(str(error))


def test_a_dead_process_is_named(tmp_path):
    first, second = start_two(train_until_dead, tmp_path)
    for process in (second, first):
        process.join(200)
    assert second.exitcode == -signal.SIGKILL and first.exitcode == 0
    said = (tmp_path / "said.txt").read_text()
    assert said.startswith(f"process 1 of 2 (pid {second.pid}) has died") and "\n" not in said
    assert train(tiny(tmp_path), resume=True)["steps"] == 6


def compare_here(out: Path, folder: Path) -> None:
    os.chdir(folder)
    comparison = Comparison("needle", ["full"], out, settings=(*TINY, "steps=10000", "evaluate=10000"))
    prepare(comparison, overwrite=False)
    compare(comparison)


def test_a_signal_to_a_comparison_reaches_its_child(tmp_path):
    """And the child imports nothing from the working folder."""
    folder, out = tmp_path / "here", tmp_path / "out"
    folder.mkdir()
    for name in ("accelerate", "transformers", "typer"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    run = out / "full" / "seed0"
    process = start(compare_here, out, folder)
    while process.is_alive() and not losses(run):
        time.sleep(0.05)
    assert lock.holder(out) == str(process.pid) and lock.holder(run) not in (None, str(process.pid))
    os.kill(process.pid, signal.SIGTERM)
    process.join(200)
    assert process.exitcode == 130 and lock.holder(run) is None and not (run / "error.txt").exists()
    assert checkpoints.newest_good(run)[0] is not None and not (tmp_path / "executed").exists()
