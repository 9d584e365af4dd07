"""What happens beside training: the log, the progress bar, the graceful end on a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback
from transformers.utils import logging

from subquad.core import memory
from subquad.core.child import LINES
from subquad.core.console import err
from subquad.training import log
from subquad.training.processes import any_process, main_process

TIMES = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")  # transformers' own, not shown
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def say(text: str) -> None:
    """One line on stderr, from the first process alone; a terminal that was closed is no reason to fail."""
    if main_process():
        with contextlib.suppress(OSError):
            err().print(text, soft_wrap=True)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers shows a bar for every file that it reads or writes; ours is enough."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class Enough(TrainerCallback):
    """Ends training at the evaluation whose score is enough for the recipe."""

    def __init__(self, recipe: Any, metric: str, larger_is_better: bool) -> None:
        self.recipe, self.metric, self.larger = recipe, metric, larger_is_better

    def on_evaluate(self, args, state, control, metrics, **kwargs: Any) -> None:
        if reaches(metrics.get(f"eval_{self.metric}"), self.recipe.enough, self.larger):
            control.should_training_stop = True


def reaches(score: float | None, enough: float | None, larger_is_better: bool) -> bool:
    """Is a validation score (None: it is not one) enough? Never, where nothing is (None)."""
    if score is None or enough is None:
        return False
    return score >= enough if larger_is_better else score <= enough


class Recorder(TrainerCallback):
    """Writes log.jsonl: {step, loss, learning_rate, grad_norm, step_seconds, tokens_per_second, memory, …} as training
    goes on, {step, valid: {metric: …}} at every evaluation. Times are of training steps alone. `records` is the log as
    it should be, whatever happens to the file.
    """

    def __init__(self, run: Path, tokens_per_step: int, base_memory: int, records: list[dict[str, Any]]) -> None:
        self.run, self.tokens, self.base, self.records = run, tokens_per_step, base_memory, records
        self.seconds, self.steps, self.started = 0.0, 0, 0.0
        self.trainer: Any = None

    def on_step_begin(self, args, state, control, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self.started
        self.steps += 1

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            each = self.seconds / max(self.steps, 1)
            speed = {"step_seconds": each, "tokens_per_second": self.tokens / each if each else 0.0}
            names = ("loss", "learning_rate", "grad_norm")
            record = {"step": state.global_step, **{key: logs[key] for key in names if key in logs}, **speed}
            record["memory"] = max(memory.peak() - self.base, 0)
            if self.trainer.density is not None:
                record["density"] = self.trainer.density.tolist()  # (layers, heads)
            self._append(record)
            self.seconds, self.steps = 0.0, 0
        elif any(key.startswith("eval_") for key in logs):
            valid = {key[5:]: value for key, value in logs.items() if key.startswith("eval_")}
            valid = {key: value for key, value in valid.items() if key not in TIMES}
            self._append({"step": state.global_step, "valid": valid})

    def _append(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        log.append(self.run, record)

    @property
    def training(self) -> list[dict[str, Any]]:
        """The records of training steps."""
        return [record for record in self.records if "loss" in record]

    def close(self) -> None:
        """The file as it should be, if something has happened to it."""
        if not log.holds(self.run, self.records):
            log.warn(f"{self.run / log.FILE} was changed during training and has been rewritten")
            log.write(self.run, self.records)


class Bar(TrainerCallback):
    """Progress on stderr: a bar on a terminal, a line per evaluation elsewhere and where runs share the terminal."""

    def __init__(self, title: str, metric: str, recorder: Recorder) -> None:
        self.title, self.metric, self.recorder = title, metric, recorder
        self.console = err()
        self.lines = not self.console.is_terminal or LINES in os.environ
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
                   TimeRemainingColumn(), TextColumn("{task.fields[numbers]}", markup=False))  # fmt: skip
        self.bar = Progress(*columns, console=self.console, transient=True, disable=self.lines)
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
            if self.lines:
                say(f"{self.title}  step {state.global_step}/{state.max_steps}  {self._numbers()}")
        self.bar.update(self.task, numbers=self._numbers())

    def _numbers(self) -> str:
        training = self.recorder.training[-1:]
        if not training:
            return self.valid
        last = training[-1]
        speed = f"{last['tokens_per_second']:,.0f} tokens/s  {last['memory'] / 2**20:,.0f} MiB"
        return f"loss {last['loss']:.4f}  {self.valid}  {speed}"

    def on_train_end(self, args, state, control, **kwargs: Any) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            self.bar.stop()


class Stopper(TrainerCallback):
    """Ctrl-C, or a TERM or HUP signal, ends training after the current step, with a checkpoint; a second one ends it
    at once. A Ctrl-C that arrives twice, from the terminal and through a parent process, counts once.
    """

    SAME = 1.0  # seconds within which a second signal is taken for the first

    def __init__(self) -> None:
        self.stopped = False
        self.since = 0.0
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:  # nohup
                continue
            try:
                self.previous[number] = signal.signal(number, self._stop)
            except ValueError:  # not the main thread: signals are somebody else's business
                break
        return self

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _stop(self, number: int, frame: Any) -> None:
        if self.stopped and time.monotonic() - self.since > self.SAME:
            raise KeyboardInterrupt
        if not self.stopped:
            self.stopped, self.since = True, time.monotonic()
            if main_process():
                with contextlib.suppress(OSError):  # os.write: a signal may arrive in the middle of a print
                    os.write(
                        2, b"stopping after this step, with a checkpoint (send the signal again to stop at once)\n"
                    )

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        self.stopped = any_process(self.stopped)  # all processes stop at the same step
        if self.stopped and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
