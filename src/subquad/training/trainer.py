"""transformers' Trainer, made repeatable: evaluations have seeds of their own, checkpoints are sealed, and what a run
accumulates between two steps survives a kill.
"""

from __future__ import annotations

import contextlib
import errno
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.integrations import TensorBoardCallback

from subquad.training import checkpoints, log, statistics
from subquad.training.callbacks import Bar, Enough, Recorder, Stopper
from subquad.training.processes import to_resume, world_size
from subquad.training.sequence import Sequence, data_processes

UNLOGGED = "unlogged.json"  # in a checkpoint: the loss since the last record of the log
FULL = (errno.ENOSPC, errno.EDQUOT)


def evaluation_seed(seed: int, step: int) -> int:
    """The seed of an evaluation: it depends on run and step, not on what was drawn before. The test has step 0."""
    return int(np.random.SeedSequence((seed, step)).generate_state(1)[0])


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside; afterwards those of training go on as if nothing had been drawn."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


class RunTrainer(Trainer):
    """The trainer of a run. `density` is that of the newest call that reported one (None without sampled graphs)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.density: torch.Tensor | None = None
        self.sums: statistics.Sums = None
        self.records: list[dict[str, Any]] = []  # the log so far: a checkpoint has a copy
        self.sequence: Sequence | None = None  # the processes that share each sequence
        self.add_callback(_Between(self))

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        inputs = inputs if self.sequence is None else self.sequence.part(inputs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        density = getattr(outputs, "density", None)
        self.density = self.density if density is None else density.detach()
        if model.training:
            self.sums = statistics.add(self.sums, getattr(outputs, "statistics", None))
        return (loss, outputs) if return_outputs else loss

    def update_statistics(self) -> None:
        """Once after each optimiser step: the sums of the whole batch, over its parts and the processes."""
        sums, self.sums = self.sums, None
        update = getattr(self.model, "update_statistics", None)
        if sums is not None and update is not None:
            with torch.no_grad():
                update(statistics.over_processes(sums))

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        step = 0 if metric_key_prefix == "test" else self.state.global_step
        if ignore_keys is None:
            known = getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", ())
            ignore_keys = [*known, "density", "statistics"]
        with seeded(evaluation_seed(self.args.seed, step)):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)
        return loader if self.sequence is None else self.sequence.same_batches(loader)

    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        if self.sequence is None:
            return super().evaluation_loop(dataloader, description, *args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        return self.sequence.evaluate(self.model, dataloader.dataset, self.args.eval_batch_size, prefix)

    # ---- checkpoints ----

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """A checkpoint that cannot be written is removed; the ones before it are deleted only once it is sealed."""
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        run = folder.parent.parent
        main = self.is_world_process_zero()
        if main:
            for earlier in (folder, folder.with_name(f"damaged-{self.state.global_step}")):
                shutil.rmtree(earlier, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        unlogged = self._unlogged()
        try:
            super()._save_checkpoint(model, trial)
            if main:
                (folder / UNLOGGED).write_text(json.dumps(unlogged))
                log.write(folder, self.records)
        except (OSError, SafetensorError, RuntimeError) as error:  # torch and safetensors have errors of their own
            shutil.rmtree(folder, ignore_errors=True)
            raise OSError(f"{folder.name} could not be written {_why(error, run)}") from error
        self.accelerator.wait_for_everyone()  # every process writes the state of its random numbers
        if main:
            checkpoints.seal(folder)
            checkpoints.rotate(run, self.state.best_global_step)

    def _unlogged(self) -> dict[str, Any]:
        loss = self.accelerator.gather(getattr(self, "_tr_loss", torch.zeros(())).reshape(1))
        return {"loss": loss.tolist(), "logged": getattr(self, "_globalstep_last_logged", self.state.global_step)}

    def resume_log(self, checkpoint: Path) -> None:
        """Go on with the loss that was summed up since the last record, so that the next record is what it would be."""
        kept = json.loads((checkpoint / UNLOGGED).read_text())
        if len(kept["loss"]) == world_size() and hasattr(self, "_tr_loss"):
            self._tr_loss += kept["loss"][self.args.process_index]
            self._globalstep_last_logged = kept["logged"]


class _Between(TrainerCallback):
    """What the trainer does between the steps of transformers' loop."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer

    def on_optimizer_step(self, args, state, control, **kwargs: Any) -> None:
        self.trainer.update_statistics()


class Resume(TrainerCallback):
    """What transformers' loop forgets when it starts from a checkpoint."""

    def __init__(self, trainer: RunTrainer, checkpoint: Path) -> None:
        self.trainer, self.checkpoint = trainer, checkpoint

    def on_train_begin(self, args, state, control, **kwargs: Any) -> None:
        self.trainer.resume_log(self.checkpoint)
        checkpoints.forget_lost_best(self.checkpoint, state)


def _why(error: Exception, run: Path) -> str:
    """The cause, which torch words as `enforce fail at inline_container.cc` where a disk is full, and what to do."""
    full = getattr(error, "errno", None) in FULL or shutil.disk_usage(run).free < 1 << 20
    cause = "the disk is full" if full and not isinstance(error, OSError) else str(error)
    what = "; free some disk space and" if full else "; once the cause is fixed,"
    return f"({cause}); what was saved before is kept{what} {to_resume()}"


def make_trainer(
    run: Any, arguments: Any, model: Any, splits: Any, stopper: Stopper, recorder: Recorder,
    sequence: Sequence | None = None,
) -> RunTrainer:  # fmt: skip
    task, r = run.task, run.task.recipe
    callbacks: list[TrainerCallback] = [recorder, stopper, Bar(run.title, task.metric, recorder)]
    if r.patience is not None:
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=r.patience))
    callbacks.append(Enough(r, task.metric, task.larger_is_better))
    board = TensorBoardCallback()
    board.logging_dir = str(run.out / "tensorboard")
    callbacks.append(board)
    trainer = RunTrainer(
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
    recorder.trainer, trainer.records, trainer.sequence = trainer, recorder.records, sequence
    return trainer


def make_arguments(run: Any) -> TrainingArguments:
    """A recipe in transformers' words."""
    r, processes = run.task.recipe, data_processes(run.task.recipe)
    parts = processes * r.accumulate
    if r.batch % parts:
        several = f"{processes} processes × " if processes > 1 else ""
        raise ValueError(f"batch must be a multiple of {several}accumulate={r.accumulate}, not {r.batch}")
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
        adam_beta2=r.beta2,
        optim={"adamw": "adamw_torch"}.get(r.optimizer, r.optimizer),
        gradient_checkpointing=r.checkpointing,
        logging_steps=max(1, r.steps // 200),
        logging_nan_inf_filter=False,  # a loss that is not finite is shown, not hidden
        eval_strategy="steps",
        eval_steps=min(r.evaluate, r.steps),
        save_strategy="steps",
        save_steps=min(r.evaluate, r.steps),
        save_total_limit=None,  # checkpoints.rotate deletes: by step, and after the digests are written
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
