"""One training run: a task, an attention, a recipe and a seed, in a folder of its own (training/folder.py).

The best checkpoint is the one with the best validation metric of the task, the earliest of equals; the test set is
read once, with that one.
"""

from __future__ import annotations

import contextlib
import json
import platform
import shlex
import shutil
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file
from transformers import TrainerState, set_seed

import subquad
from subquad.attention.registry import check_name
from subquad.core import memory
from subquad.distributed import whole
from subquad.models import HEADS, SubquadConfig
from subquad.tasks import CAUSAL
from subquad.tasks.base import Task
from subquad.training import checkpoints, folder, log
from subquad.training.callbacks import TIMES, Recorder, Stopper, no_progress_bars, reaches, say
from subquad.training.connections import connections
from subquad.training.folder import clear, was
from subquad.training.processes import main_process, name_dead_processes, to_resume, world_size
from subquad.training.sequence import Sequence, check_divided
from subquad.training.start import slug
from subquad.training.trainer import Resume, RunTrainer, evaluation_seed, make_arguments, make_trainer, seeded

__all__ = ["Interrupted", "Run", "check_specs", "clear", "main_process", "make_arguments", "make_model", "slug",
           "train", "versions", "was"]  # fmt: skip


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal; a checkpoint holds the state."""


@dataclass
class Run:
    """What to train, and where. `attention` is a list of one spec, or of several that the layers take in turn."""

    task: Task
    attention: list[str]
    out: Path
    recipe_name: str = "small"
    seed: int = 0
    command: list[str] = field(default_factory=lambda: sys.argv)

    def __post_init__(self) -> None:
        if not isinstance(self.task, Task):
            raise TypeError(f'task must be a task, such as subquad.tasks.task("needle"), not {self.task!r}')
        specs = self.attention
        if not isinstance(specs, (list, tuple)) or not specs or not all(isinstance(spec, str) for spec in specs):
            raise TypeError(f'attention must be a list of specs, such as ["full"], not {specs!r}')
        self.attention, self.out = list(specs), Path(self.out)
        for spec in specs:
            check_name(spec)

    def described(self) -> dict[str, Any]:
        """What decides the result: a run resumes only under the same description, on any number of processes."""
        settings = self.task.recipe.asdict()
        del settings["sequence_parallel"]
        return {
            "task": self.task.name,
            "attention": self.attention,
            "recipe": self.recipe_name,
            "settings": settings,
            "seed": self.seed,
        }

    @property
    def title(self) -> str:
        return f"{self.task.name} · {'+'.join(self.attention)} · seed {self.seed}"


def check_specs(task: Task, specs: list[str]) -> None:
    """Refuse an attention that cannot do the task, before anything is loaded or written."""
    r, directions = task.recipe, CAUSAL.get(task.head, (False,))
    r.check()
    config = SubquadConfig(
        hidden_size=r.width, num_hidden_layers=r.layers, num_attention_heads=r.heads, head_dim=r.head_dim,
        positions=r.positions, max_position_embeddings=r.length, attention=specs, attention_dropout=r.attention_dropout,
    )  # fmt: skip
    if r.sequence_parallel > 1:
        check_divided(task, config)
    for causal in directions:
        config.check_layers(causal=causal)


def train(run: Run, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Train to the end, or continue where a killed run stopped. Returns what result.json holds."""
    if not isinstance(run, Run):
        raise TypeError(f'run must be a Run, such as Run(task("needle"), ["full"], Path("out")), not {run!r}')
    check_specs(run.task, run.attention)
    state = PartialState(cpu=not torch.cuda.is_available())  # joins the other processes, if there are any
    if resume and not overwrite and (run.out / folder.RUN).exists() and (found := log.read_result(run.out)):
        folder.check_same(run)
        return found
    set_seed(run.seed)
    arguments = make_arguments(run)
    splits = run.task.load()  # before the folder is made: what cannot work leaves nothing behind, and deletes nothing
    with no_progress_bars(), contextlib.ExitStack() as held, name_dead_processes():
        checkpoint = open_everywhere(run, held, state, resume=resume, overwrite=overwrite)
        return _train(run, arguments, splits, checkpoint)


def open_everywhere(run: Run, held: contextlib.ExitStack, state: PartialState, **how: bool) -> Path | None:
    """The first process opens the folder; if it cannot, the others end with it, and it alone says why."""
    answer: list[Any] = [None, None]
    failure = None
    if state.is_main_process:
        about = {"versions": versions(), "threads": torch.get_num_threads()}
        try:
            answer[0] = held.enter_context(folder.opened(run, about, **how))
        except Exception as error:
            failure, answer[1] = error, True
    answer = broadcast_object_list(answer)
    if failure is not None:
        raise failure
    if answer[1]:
        raise SystemExit(2)
    return answer[0]


def _train(run: Run, arguments: Any, splits: Any, checkpoint: Path | None) -> dict[str, Any]:
    records = [] if checkpoint is None else log.read(checkpoint)
    r = run.task.recipe
    load_kernels(run, splits)
    recorder = Recorder(run.out, r.batch * r.length, memory.reset_peak(), records)
    model = make_model(run)
    stopper = Stopper()
    sequence = Sequence.of(run.task, model) if r.sequence_parallel > 1 else None
    trainer = make_trainer(run, arguments, model, splits, stopper, recorder, sequence)
    if checkpoint is not None and is_trained(checkpoint, run.task):
        take_best(trainer, model, checkpoint)  # killed during the test: nothing is left to train
    else:
        if checkpoint is not None:
            check_processes(checkpoint)
            trainer.add_callback(Resume(trainer, checkpoint))
        with stopper:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if stopper.stopped and trainer.state.global_step < trainer.state.max_steps:
        where = f"stopped at step {trainer.state.global_step} of {trainer.state.max_steps}"
        say(f"{where}; {to_resume()}")
        raise Interrupted(where)  # the command line turns it into exit code 130, silently
    test = trainer.evaluate(splits.test, metric_key_prefix="test")
    if sequence is not None:
        whole(model)
    with seeded(evaluation_seed(run.seed, 0)):
        test.update({f"test_{key}": value for key, value in run.task.finish(model, splits.test).items()})
    result = None
    if main_process():
        result = summary(run, model, trainer, recorder, test)
        recorder.close()
        save_model(run, model)
        log.write_result(run.out, result)
    return broadcast_object_list([result])[0]


def load_kernels(run: Run, splits: Any) -> None:
    """One step of a model that is thrown away: it loads the kernels, or compiles them, which takes more memory. That of
    a run is counted from here, so it is the same either way.
    """
    if run.task.recipe.sequence_parallel > 1:  # a step needs all processes
        return
    with seeded(run.seed):
        model = make_model(run)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        examples = [splits.train[index] for index in range(min(2, len(splits.train)))]
        inputs = {name: x.to(model.device) if isinstance(x, torch.Tensor) else x
                  for name, x in run.task.collate(examples).items()}  # fmt: skip
        model(**inputs).loss.backward()
        with torch.no_grad():
            model.eval()(**inputs)


def is_trained(checkpoint: Path, task: Any) -> bool:
    """Whether training ended at a checkpoint: all steps are done, patience ran out, or the score is enough."""
    recipe, state = task.recipe, checkpoints.read_state(checkpoint)
    if checkpoints.step_of(checkpoint) >= recipe.steps:
        return True
    if reaches(state.get("best_metric"), recipe.enough, task.larger_is_better):
        return True
    waiting = state.get("stateful_callbacks", {}).get("EarlyStoppingCallback")
    without_gain = waiting["attributes"]["early_stopping_patience_counter"] if waiting else 0
    return recipe.patience is not None and without_gain >= recipe.patience


def check_processes(checkpoint: Path) -> None:
    """Each process has random numbers of its own: with more or fewer of them, others are drawn."""
    before = checkpoints.processes(checkpoint)
    if before != world_size() and main_process():
        log.warn(
            f"{checkpoint.name} was written by {before} process{'es' * (before > 1)}, not {world_size()}: what is "
            "drawn at random (dropout, sampled attention) will differ from an uninterrupted run"
        )


def take_best(trainer: RunTrainer, model: Any, checkpoint: Path) -> None:
    """The end of a training that was finished before: its history, and the weights of its best checkpoint."""
    trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    checkpoints.forget_lost_best(checkpoint, trainer.state)
    best = checkpoint.with_name(f"checkpoint-{trainer.state.best_global_step}")
    model.load_state_dict(load_file((best if best.exists() else checkpoint) / "model.safetensors"), strict=False)
    model.tie_weights()


def make_model(run: Run) -> Any:
    """The model of a run, initialised as its task says. An attention that cannot do the task is refused here."""
    head = HEADS[run.task.head]
    config = SubquadConfig(attention=run.attention if len(run.attention) > 1 else run.attention[0], **run.task.config())
    model = head(config)
    run.task.initialise(model)
    return model


def summary(run: Run, model: Any, trainer: RunTrainer, recorder: Recorder, test: dict[str, float]) -> dict[str, Any]:
    """What came out, for people and for the comparison."""
    records = recorder.training
    density = records[-1].get("density")  # of the newest training step that was logged: (layers, heads)
    return {
        **run.described(),
        "metric": run.task.metric,
        "larger_is_better": run.task.larger_is_better,
        "test": {key[5:]: value for key, value in test.items() if key.startswith("test_") and key[5:] not in TIMES},
        "valid": trainer.state.best_metric,
        "best_step": trainer.state.best_global_step,
        "steps": trainer.state.global_step,
        "step_seconds": statistics.median(record["step_seconds"] for record in records),
        "tokens_per_second": statistics.median(record["tokens_per_second"] for record in records),
        "memory": max(record["memory"] for record in records),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "connections": connections(model, run.task.recipe.length, density),
        "density": density,
        "command": shlex.join(run.command),
        "versions": versions(),
    }


def save_model(run: Run, model: Any) -> None:
    """model/: weights, configuration, and the task it was trained for."""
    part = run.out / ".model"
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    (part / "task.json").write_text(json.dumps(run.described(), indent=1))
    run.task.save(part)
    checkpoints.seal(part)
    shutil.rmtree(run.out / "model", ignore_errors=True)
    part.rename(run.out / "model")


def versions() -> dict[str, str]:
    return {
        "subquad": subquad.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
