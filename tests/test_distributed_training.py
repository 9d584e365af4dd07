"""`subquad train` with sequences that are divided among processes: the run is that of one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer, TrainingArguments

from subquad.distributed import same_batches, sequence_parallel, shard
from subquad.models import SubquadConfig, SubquadForCausalLM
from subquad.tasks import task
from subquad.training import checkpoints, log
from subquad.training.run import Run, train
from subquad.training.trainer import RunTrainer
from training_runs import TINY, losses, one_thread, start_ranks, start_two  # noqa: F401  (a fixture)

SPEC = "combiner-fixed:span=5"


def divided(out: Path, processes: int, *settings: str) -> Run:
    made = task("needle", "small", (*TINY, "steps=6", "evaluate=2", f"sequence_parallel={processes}", *settings))
    return Run(made, [SPEC], out, command=["subquad", "train"])


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


def train_divided(out: Path, processes: int, resume: bool, settings: tuple[str, ...]) -> None:
    train(divided(out, processes, *settings), resume=resume)


def run_on(processes: int, out: Path, resume: bool = False, settings: tuple[str, ...] = ()) -> list[float]:
    """The losses of a run, or of its rest, on so many processes."""
    if processes == 1:
        train_divided(out, 1, resume, settings)
    else:
        team = start_ranks(processes, train_divided, out, processes, resume, settings)
        finish(team)
        assert [process.exitcode for process in team] == [0] * processes
    return losses(out)


def continued_by(processes: int, run: Path, out: Path, settings: tuple[str, ...] = ()) -> list[float]:
    """The losses of a copy of a finished run that goes on from its first checkpoint."""
    shutil.copytree(run, out)
    newest, *older = checkpoints.all_checkpoints(out)
    assert older, "an earlier checkpoint is kept"
    shutil.rmtree(newest)
    (out / "result.json").unlink()
    return run_on(processes, out, resume=True, settings=settings)


def test_a_run_is_continued_by_another_number_of_processes(tmp_path):
    expected = run_on(1, tmp_path / "one")
    assert continued_by(2, tmp_path / "one", tmp_path / "from one") == pytest.approx(expected, rel=1e-4)
    assert run_on(3, tmp_path / "three") == pytest.approx(expected, rel=1e-4)
    assert continued_by(2, tmp_path / "three", tmp_path / "from three") == pytest.approx(expected, rel=1e-4)


def test_dropout_goes_on_with_another_number_of_processes(tmp_path):
    """What is dropped depends on a seed and on the position, and the seed goes with the checkpoint."""
    drops = ("dropout=0.2", "attention_dropout=0.2")
    expected = run_on(2, tmp_path / "two", settings=drops)
    found = continued_by(3, tmp_path / "two", tmp_path / "from two", drops)
    assert found == pytest.approx(expected, rel=1e-4) and losses(tmp_path / "two") == expected


@pytest.mark.slow
def test_a_checkpoint_of_four_is_loaded_by_one_and_two(tmp_path):
    expected = run_on(1, tmp_path / "one")
    assert run_on(4, tmp_path / "four") == pytest.approx(expected, rel=1e-4)
    for processes in (1, 2):
        out = tmp_path / f"on {processes}"
        assert continued_by(processes, tmp_path / "four", out) == pytest.approx(expected, rel=1e-4)
        assert log.read_result(out)["test"] == pytest.approx(log.read_result(tmp_path / "one")["test"], rel=1e-4)


def test_what_cannot_be_divided_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"sequence_parallel=2 needs a multiple of 2 processes, not 1: torchrun"):
        train(divided(tmp_path, 2))
    run = divided(tmp_path, 2)
    run.attention = ["sbm"]
    with pytest.raises(ValueError, match="sbm cannot be divided among processes"):
        train(run)
    assert not list(tmp_path.iterdir())


# ---- a Trainer and an Accelerator of one's own, as docs/distributed.md shows them ------------------------------------


def make_parts():
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = SubquadForCausalLM(SubquadConfig(attention=SPEC, intermediate_size=16, **sizes))
    ids = torch.randint(16, (8, 23), generator=torch.Generator().manual_seed(1))
    return model, [{"input_ids": row, "labels": row} for row in ids]


def mesh_of(processes: int):
    return init_device_mesh("cpu", (1, processes), mesh_dim_names=("data", "sequence"))


def own_trainer(out: Path, processes: int) -> None:
    class SequenceTrainer(Trainer):
        def _get_dataloader(self, *args, **kwargs):
            return same_batches(super()._get_dataloader(*args, **kwargs), mesh["data"])

        def compute_loss(self, model, inputs, *args, **kwargs):
            return super().compute_loss(model, shard(inputs, mesh["sequence"]), *args, **kwargs)

    model, data = make_parts()
    about = {"per_device_train_batch_size": 4, "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2}
    arguments = TrainingArguments(str(out), use_cpu=True, report_to=[], disable_tqdm=True, **about)
    kind: type[Trainer] = Trainer
    if processes > 1:
        dist.is_initialized() or dist.init_process_group("gloo")
        mesh, kind = mesh_of(processes), SequenceTrainer
        model = sequence_parallel(model, mesh["sequence"])
    trainer = kind(model, arguments, train_dataset=data)
    trainer.train()
    keep_losses(out, [record["loss"] for record in trainer.state.log_history if "loss" in record])


def own_accelerator(out: Path, processes: int) -> None:
    model, data = make_parts()
    accelerator = Accelerator(cpu=True)
    mesh = mesh_of(processes) if processes > 1 else None
    if mesh is not None:
        model = sequence_parallel(model, mesh["sequence"])
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), loader)
    found = []
    for batch in loader if mesh is None else same_batches(loader, mesh["data"]):
        loss = model(**(batch if mesh is None else shard(batch, mesh["sequence"]))).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    keep_losses(out, found)


def keep_losses(out: Path, found: list[float]) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "losses.json").write_text(json.dumps(found))


@pytest.mark.parametrize("own", [own_trainer, own_accelerator])
def test_other_training_loops_divide_their_sequences(tmp_path, own):
    for processes in (1, 2):
        team = start_ranks(processes, own, tmp_path / f"on {processes}", processes)
        finish(team)
        assert [process.exitcode for process in team] == [0] * processes
    one, two = (json.loads((tmp_path / f"on {p}" / "losses.json").read_text()) for p in (1, 2))
    assert two == pytest.approx(one, rel=1e-4) and one[0] != one[-1] and len(one) >= 2
