"""What happens beside training: the log, the progress bar, the graceful end on Ctrl-C."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from subquad.core import memory
from subquad.core.console import err
from subquad.training import log

UNTOLD = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")  # transformers' times


class Recorder(TrainerCallback):
    """Writes log.jsonl: {step, loss, learning_rate, grad_norm, step_seconds, tokens_per_second, memory, …} as training
    goes on, {step, valid: {metric: …}} at every evaluation. Times are of training steps alone.
    """

    def __init__(self, run: Path, tokens_per_step: int, base_memory: int) -> None:
        self.run, self.tokens, self.base = run, tokens_per_step, base_memory
        self.seconds, self.steps, self.started = 0.0, 0, 0.0

    def on_step_begin(self, args, state, control, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self.started
        self.steps += 1

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, model=None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            each = self.seconds / max(self.steps, 1)
            speed = {"step_seconds": each, "tokens_per_second": self.tokens / each if each else 0.0}
            names = ("loss", "learning_rate", "grad_norm")
            record = {"step": state.global_step, **{key: logs[key] for key in names if key in logs}, **speed}
            record["memory"] = max(memory.peak() - self.base, 0)
            density = getattr(model, "module", model).density() if model is not None else None
            if density is not None:
                record["density"] = density.tolist()  # (layers, heads)
            log.append(self.run, record)
            self.seconds, self.steps = 0.0, 0
        elif any(key.startswith("eval_") for key in logs):
            valid = {key[5:]: value for key, value in logs.items() if key.startswith("eval_")}
            valid = {key: value for key, value in valid.items() if key not in UNTOLD}
            log.append(self.run, {"step": state.global_step, "valid": valid})


class Bar(TrainerCallback):
    """Progress on stderr: a bar on a terminal, a line per evaluation elsewhere."""

    def __init__(self, title: str, metric: str, run: Path) -> None:
        self.title, self.metric, self.run = title, metric, run
        self.console = err()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                   TextColumn("{task.fields[numbers]}"))  # fmt: skip
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.bar.add_task(title, total=None, numbers="")
        self.valid = ""

    def on_train_begin(self, args, state, control, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.bar.update(self.task, total=state.max_steps, completed=state.global_step)
            self.bar.start()

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if f"eval_{self.metric}" in logs:
            self.valid = f"{self.metric} {logs[f'eval_{self.metric}']:.4f}"
            if not self.console.is_terminal:
                step = f"{state.global_step}/{state.max_steps}"
                self.console.print(f"{self.title}  step {step}  {self._numbers()}", soft_wrap=True)
        self.bar.update(self.task, numbers=self._numbers())

    def _numbers(self) -> str:
        training = [record for record in log.read(self.run)[-3:] if "loss" in record]
        if not training:
            return self.valid
        last = training[-1]
        speed = f"{last['tokens_per_second']:,.0f} tokens/s  {last['memory'] / 2**20:,.0f} MiB"
        return f"loss {last['loss']:.4f}  {self.valid}  {speed}"

    def on_train_end(self, args, state, control, **kwargs: Any) -> None:
        self.bar.stop()


class Stopper(TrainerCallback):
    """Ctrl-C (or a TERM signal) ends training after the step that runs, with a checkpoint; the second one at once."""

    def __init__(self) -> None:
        self.stopped = False
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.previous[number] = signal.signal(number, self._stop)
            except ValueError:  # not the main thread: signals are somebody else's business
                break
        return self

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: Any) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        err().print("stopping after this step, with a checkpoint (again: at once)", soft_wrap=True)

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        if self.stopped and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
