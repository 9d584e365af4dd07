"""The processes that the runs of a comparison are trained in: signals reach them, and they share the cores."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from typing import Any

import torch

from subquad.core.child import LINES
from subquad.training.callbacks import SIGNALS

STOPPED = (-1, -2, -15, 129, 130, 143)  # exit codes of a process that a signal has ended


class Children:
    """Signals that end a program go on to its children, which save their state; it ends when they have ended."""

    def __init__(self) -> None:
        self.alive: list[subprocess.Popen] = []
        self.came: list[int] = []  # signals, as they come

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    before[number] = signal.signal(number, lambda number, frame: self.send(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def send(self, number: int) -> None:
        self.came.append(number)
        for child in tuple(self.alive):
            child.send_signal(number)

    def run(self, words: list[str], environment: Mapping[str, str]) -> int:
        """A process to its end: its exit code, 130 if it was stopped. Progress passes through."""
        child = subprocess.Popen(words, stdout=subprocess.DEVNULL, env={**os.environ, **environment})
        self.alive.append(child)
        for number in tuple(self.came):  # one that came while the child was being started
            child.send_signal(number)
        code = child.wait()
        self.alive.remove(child)
        return 130 if self.came or code in STOPPED else code


class Here(Executor):
    """One call after the other, in the thread that submits them."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        future.set_result(function(*args, **kwargs))
        return future


def shares(jobs: int) -> dict[str, str]:
    """What processes that run beside each other find in their environment: each has its share of the threads, unless
    the user has said how many, and they print lines, as several bars on one terminal overwrite each other.
    """
    if jobs == 1:
        return {}
    threads = str(max(1, torch.get_num_threads() // jobs))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {LINES: "1", **{name: threads for name in names if name not in os.environ}}
