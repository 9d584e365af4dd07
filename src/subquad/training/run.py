"""One training run: a task, an attention, a recipe and a seed, in a folder of its own.

    run.json       what was asked for, with which versions        log.jsonl    losses, metrics, speed, memory
    checkpoints/   to go on from, the best and the newest         tensorboard/ the same curves
    model/         the best model and its task, for eval, predict and generate
    result.json    what came out; written last, so it says that the run is finished

The best checkpoint is the one with the best validation metric of the task, the earliest of equals; the test set is
read once, with that one.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, Trainer, TrainerState, TrainingArguments, set_seed
from transformers.integrations import TensorBoardCallback

import subquad
from subquad.core import memory
from subquad.core.console import err
from subquad.core.files import write_atomically
from subquad.models import HEADS, SubquadConfig
from subquad.tasks.base import Task
from subquad.training import checkpoints, log
from subquad.training.callbacks import UNTOLD, Bar, Recorder, Stopper
from subquad.training.connections import connections


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal; a checkpoint holds the state."""


@dataclass
class Run:
    """What to train, and where. `attention` is a spec, or several that the layers take in turn."""

    task: Task
    attention: list[str]
    out: Path
    recipe_name: str = "small"
    seed: int = 0
    command: list[str] = field(default_factory=lambda: sys.argv)

    def described(self) -> dict[str, Any]:
        """What decides the result: a run resumes only under the same description."""
        return {
            "task": self.task.name,
            "attention": self.attention,
            "recipe": self.recipe_name,
            "settings": self.task.recipe.asdict(),
            "seed": self.seed,
        }

    @property
    def title(self) -> str:
        return f"{self.task.name} · {'+'.join(self.attention)} · seed {self.seed}"


def check_attention(task: Task, specs: list[str]) -> None:
    """Refuse an attention that cannot do the task, before anything is loaded or written."""
    r, directions = task.recipe, (False, True) if task.head == "seq2seq" else (HEADS[task.head].causal,)
    if r.width % r.heads:
        raise ValueError(f"width must be a multiple of heads={r.heads}, not {r.width}")
    config = SubquadConfig(
        hidden_size=r.width, num_hidden_layers=r.layers, num_attention_heads=r.heads, positions=r.positions,
        max_position_embeddings=r.length, attention=specs, attention_dropout=r.attention_dropout,
    )  # fmt: skip
    for causal in directions:
        config.check_attention(causal=causal)


def train(run: Run, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Train to the end, or go on where a killed run stopped. Returns what result.json holds; a failure leaves its
    reason in error.txt, for the comparison that asked for the run.
    """
    try:
        return _train(run, resume=resume, overwrite=overwrite)
    except Exception as error:
        if main_process() and run.out.is_dir():
            (run.out / "error.txt").write_text(" ".join(str(error).split()) or type(error).__name__)
        raise


def _train(run: Run, *, resume: bool, overwrite: bool) -> dict[str, Any]:
    check_attention(run.task, run.attention)
    state = PartialState(cpu=not torch.cuda.is_available())  # joins the other processes, if there are any
    if resume and (run.out / "result.json").exists():
        return finished(run)
    set_seed(run.seed)
    arguments = make_arguments(run)
    splits = run.task.load()  # before the folder is made: what cannot work leaves nothing behind, and deletes nothing
    opened = [open_folder(run, resume=resume, overwrite=overwrite) if state.is_main_process else None]
    checkpoint = broadcast_object_list(opened)[0]
    base_memory = memory.reset_peak()  # the program and the data
    model = make_model(run)
    stopper = Stopper()
    trainer = make_trainer(run, arguments, model, splits, stopper, base_memory)
    if checkpoint is not None and checkpoints.step_of(checkpoint) >= run.task.recipe.steps:
        take_best(trainer, model, checkpoint)  # killed during the test: nothing is left to train
    else:
        with stopper:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if stopper.stopped and trainer.state.global_step < trainer.state.max_steps:
        where = f"stopped at step {trainer.state.global_step} of {trainer.state.max_steps}; --resume goes on"
        if state.is_main_process:
            err().print(
                where, soft_wrap=True
            )  # the command line turns a KeyboardInterrupt into exit code 130, silently
        raise Interrupted(where)
    test = trainer.evaluate(splits.test, metric_key_prefix="test")
    test.update({f"test_{key}": value for key, value in run.task.finish(model, splits.test).items()})
    result = summary(run, model, trainer, test)
    if trainer.is_world_process_zero():
        save_model(run, model)
        write_atomically(run.out / "result.json", json.dumps(result, indent=1))
    return result


def take_best(trainer: Trainer, model: Any, checkpoint: Path) -> None:
    """The end of a training that was finished before: its history, and the weights of its best checkpoint."""
    trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    best = checkpoint.with_name(f"checkpoint-{trainer.state.best_global_step}")
    model.load_state_dict(load_file((best if best.exists() else checkpoint) / "model.safetensors"), strict=False)
    model.tie_weights()


def finished(run: Run) -> dict[str, Any]:
    """The result of a run that came to its end before."""
    _same(log.read_json(run.out / "run.json"), run)
    return log.read_json(run.out / "result.json")


def open_folder(run: Run, *, resume: bool, overwrite: bool) -> Path | None:
    """Prepare the run's folder, in the first process; the checkpoint to go on from, None for a start from scratch."""
    path, wanted = run.out / "run.json", run.described()
    if run.out.exists() and not run.out.is_dir():
        raise ValueError(f"--out must be a folder, and {run.out} is a file")
    if path.exists() and overwrite:
        clear(run.out)
    elif path.exists() and not resume:
        raise ValueError(f"{run.out} holds a run already: --resume goes on with it, --overwrite starts it anew")
    checkpoint = None
    if path.exists() and not overwrite:
        _same(log.read_json(path), run)
        checkpoint, complaints = checkpoints.newest_good(run.out)
        for complaint in complaints:
            print(f"warning: {complaint}", file=sys.stderr)
        log.rewind(run.out, 0 if checkpoint is None else checkpoints.step_of(checkpoint))
    else:
        run.out.mkdir(parents=True, exist_ok=True)
        about = {"command": shlex.join(run.command), "versions": versions()}
        write_atomically(path, json.dumps({**wanted, **about}, indent=1))
    return checkpoint


def clear(out: Path) -> None:
    """Delete what a run writes, and nothing else that lies in the folder."""
    for name in (checkpoints.FOLDER, "tensorboard", "model", ".model"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("run.json", log.FILE, "result.json", "error.txt"):
        (out / name).unlink(missing_ok=True)


def _same(before: dict[str, Any], run: Run) -> None:
    """A run goes on only as what it was."""
    now = run.described()
    for key in ("task", "attention", "recipe", "seed"):
        _compare(key, before.get(key), now[key], run.out)
    for key, value in now["settings"].items():
        _compare(key, was(before["settings"], key, run.task.recipe), value, run.out)


def was(settings: dict[str, Any], key: str, recipe: Any) -> Any:
    """A setting of an older run; one that did not exist then had its default."""
    value = settings.get(key, getattr(type(recipe), key, None))
    return list(value) if isinstance(value, tuple) else value


def _compare(key: str, before: Any, now: Any, out: Path) -> None:
    if before != (list(now) if isinstance(now, tuple) else now):
        raise ValueError(f"--resume: {key} was {before!r} in {out} and is {now!r} now; take another --out")


def make_model(run: Run) -> Any:
    """The model of a run, initialised as its task says. An attention that cannot do the task is refused here."""
    head = HEADS[run.task.head]
    config = SubquadConfig(attention=run.attention if len(run.attention) > 1 else run.attention[0], **run.task.config())
    model = head(config)
    run.task.initialise(model)
    return model


def make_trainer(run: Run, arguments: Any, model: Any, splits: Any, stopper: Stopper, base_memory: int) -> Trainer:
    task, r = run.task, run.task.recipe
    tokens = r.batch * r.length
    bar = Bar(run.title, task.metric, run.out)
    callbacks = [Recorder(run.out, tokens, base_memory), stopper, bar]
    if r.patience is not None:
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=r.patience))
    board = TensorBoardCallback()
    board.logging_dir = str(run.out / "tensorboard")
    callbacks.append(board)
    trainer = SafeTrainer(
        model,
        arguments,
        data_collator=task.collate,
        train_dataset=splits.train,
        eval_dataset=splits.valid,
        compute_metrics=lambda outputs: task.measure(np.asarray(outputs.predictions)),
        preprocess_logits_for_metrics=task.score,
        callbacks=callbacks,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def make_arguments(run: Run) -> TrainingArguments:
    """A recipe in transformers' words."""
    r, processes = run.task.recipe, world_size()
    parts = processes * r.accumulate
    if r.batch % parts:
        raise ValueError(
            f"batch must be a multiple of {processes} processes × accumulate={r.accumulate}, not {r.batch}"
        )
    schedule = {"constant": "constant_with_warmup", "sqrt": "inverse_sqrt"}.get(r.schedule, r.schedule)
    return TrainingArguments(
        output_dir=str(run.out / checkpoints.FOLDER),
        max_steps=r.steps,
        per_device_train_batch_size=r.batch // parts,
        per_device_eval_batch_size=max(r.batch // parts, 1),
        gradient_accumulation_steps=r.accumulate,
        learning_rate=r.rate,
        warmup_steps=r.warmup,
        lr_scheduler_type=schedule,
        weight_decay=r.decay,
        max_grad_norm=r.clip,
        optim="adamw_torch",
        gradient_checkpointing=r.checkpointing,
        logging_steps=max(1, r.steps // 200),
        logging_nan_inf_filter=False,  # a loss that is not finite is shown, not hidden
        eval_strategy="steps",
        eval_steps=min(r.evaluate, r.steps),
        save_strategy="steps",
        save_steps=min(r.evaluate, r.steps),
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model=f"eval_{run.task.metric}",
        greater_is_better=run.task.larger_is_better,
        restore_callback_states_from_checkpoint=True,
        seed=run.seed,
        data_seed=run.seed,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )


class SafeTrainer(Trainer):
    """A trainer that keeps its last good checkpoint when a new one cannot be written."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
        except (
            OSError,
            SafetensorError,
            RuntimeError,
        ) as error:  # torch and safetensors have their words for a full disk
            shutil.rmtree(folder, ignore_errors=True)
            raise OSError(
                f"{folder.name} could not be written ({error}); what was saved before is kept: is the disk full? "
                "--resume goes on"
            ) from error


def summary(run: Run, model: Any, trainer: Trainer, test: dict[str, float]) -> dict[str, Any]:
    """What came out, for people and for the comparison."""
    records = [record for record in log.read(run.out) if "loss" in record]
    density = model.density()
    return {
        **run.described(),
        "metric": run.task.metric,
        "larger_is_better": run.task.larger_is_better,
        "test": {key[5:]: value for key, value in test.items() if key.startswith("test_") and key[5:] not in UNTOLD},
        "valid": trainer.state.best_metric,
        "best_step": trainer.state.best_global_step,
        "steps": trainer.state.global_step,
        "step_seconds": statistics.median(record["step_seconds"] for record in records),
        "tokens_per_second": statistics.median(record["tokens_per_second"] for record in records),
        "memory": max(record["memory"] for record in records),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "connections": connections(model, run.task.recipe.length),
        "density": None if density is None else density.tolist(),
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
    shutil.rmtree(run.out / "model", ignore_errors=True)
    part.rename(run.out / "model")


def slug(spec: str) -> str:
    """A spec as a folder's name."""
    return "".join(letter if letter.isalnum() or letter in "-+=.," else "_" for letter in spec)


def versions() -> dict[str, str]:
    return {
        "subquad": subquad.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def main_process() -> bool:
    return int(os.environ.get("RANK", "0")) == 0
