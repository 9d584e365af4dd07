"""`subquad train` with sequences that are divided among processes: the run is that of one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from subquad.tasks import task
from subquad.training import checkpoints
from subquad.training.run import Run, train
from subquad.training.trainer import RunTrainer
from training_runs import TINY, losses, one_thread, start_two  # noqa: F401  (a fixture)

SPEC = "combiner-fixed:span=5"


def divided(out: Path, processes: int, *settings: str) -> Run:
    made = task("needle", "small", (*TINY, "steps=6", "evaluate=2", f"sequence_parallel={processes}", *settings))
    return Run(made, [SPEC], out, command=["subquad", "train"])


def train_two(out: Path, resume: bool = False) -> None:
    train(divided(out, 2), resume=resume)


def killed_after_four(out: Path) -> None:
    def training_step(self, *args, **kwargs):
        if self.state.global_step == 4 and self.args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kwargs)

    original = RunTrainer.training_step
    RunTrainer.training_step = training_step
    try:
        train(divided(out, 2))
    except ConnectionError as error:
        (out / "said.txt").write_text(str(error))


def finish(processes) -> None:
    for process in processes:
        process.join(200)


def test_a_divided_run_is_that_of_one_process(tmp_path):
    """Also after a kill: two processes write a checkpoint, one continues from it."""
    expected = train(divided(tmp_path / "one", 1))
    first, second = start_two(killed_after_four, tmp_path / "two")
    finish((second, first))
    assert first.exitcode == 0 and second.exitcode == -signal.SIGKILL
    assert (tmp_path / "two" / "said.txt").read_text().startswith(f"process 1 of 2 (pid {second.pid}) has died")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one")[:4], rel=1e-4)
    assert checkpoints.all_checkpoints(tmp_path / "two")
    found = train(divided(tmp_path / "two", 1), resume=True)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert found["test"]["accuracy"] == pytest.approx(expected["test"]["accuracy"], abs=1e-6)


@pytest.mark.slow
def test_a_divided_run_to_its_end(tmp_path):
    expected = train(divided(tmp_path / "one", 1))
    processes = start_two(train_two, tmp_path / "two")
    finish(processes)
    assert [process.exitcode for process in processes] == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert train(divided(tmp_path / "two", 1), resume=True)["test"] == pytest.approx(expected["test"], rel=1e-4)


def test_what_cannot_be_divided_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"sequence_parallel=2 needs a multiple of 2 processes, not 1: torchrun"):
        train(divided(tmp_path, 2))
    run = divided(tmp_path, 2)
    run.attention = ["sbm"]
    with pytest.raises(ValueError, match="sbm cannot be divided among processes"):
        train(run)
    assert not list(tmp_path.iterdir())
