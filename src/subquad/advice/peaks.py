"""The memory of a layer's step, measured in a process that does nothing else.

    with Peaks() as peaks: peaks.measure(subject, shape, backward=True)    # {"peak": bytes, "kept": …, "parameters": …}

`subquad bench` takes a fresh process for every number; starting one takes longer than most steps. Here one process
answers all requests. The step runs twice: the first time loads kernels and makes the buffers of libraries, which a
process does once. Then caches are emptied and freed memory is given back, so that the second step makes its plans anew.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.advice.measuring import make, surroundings
from subquad.advice.points import BASE, BATCHED, MIDDLE, VARIED, Points, Shape, Subject
from subquad.bench import Step, growth
from subquad.core.child import command as child_command
from subquad.core.memory import RETURNED

MEASURED = (512, 2048, 8192)  # lengths, at the base size


class Peaks:
    """The process that measures, as a context."""

    def __enter__(self) -> Peaks:
        self.process: subprocess.Popen[str] | None = None
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.process is not None:
            self.process.communicate()  # no more requests: it ends

    def measure(self, subject: Subject, shape: Shape, *, backward: bool) -> dict[str, int]:
        """`peak`: how far the step raises the memory of a process; `kept`: bytes that wait for the backward pass;
        `parameters`: bytes of the mechanism's own.
        """
        module, environment = surroundings(subject)
        process = self._started(environment)
        assert process.stdin is not None and process.stdout is not None
        request = {"module": module, "subject": subject.key, "shape": shape, "backward": backward}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = json.loads(
            process.stdout.readline() or '{"error": "the process was killed, there may be too little memory"}'
        )
        if "error" in answer:
            raise ValueError(f"memory of {subject.key} at n = {shape.n:,} could not be measured: {answer['error']}")
        return answer

    def _started(self, environment: dict[str, str]) -> subprocess.Popen[str]:
        if self.process is None:
            self.process = subprocess.Popen(
                child_command("subquad.advice.peaks", str(torch.get_num_threads())),
                env={**environment, **RETURNED},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self.process


# ---- all of a calibration -------------------------------------------------------------------------------------------


def memory_tasks(subject: Subject, points: Points, known: Points) -> list[tuple[bool, Shape]]:
    """(with backward, shape) of what neither `points` nor `known` has."""
    if known.of(subject, "train bytes"):
        return []
    wanted = [*(Shape(n, *BASE) for n in MEASURED), *(Shape(MIDDLE, *each) for each in VARIED), Shape(*BATCHED)]
    return [
        (backward, shape)
        for backward in (False, True)
        for shape in wanted
        if not points.has(subject, quantity_of(backward), shape)
    ]


def memory_steps(points: Points, subjects: Sequence[Subject], known: Points) -> int:
    """How many times `measure_memory` will call `tell`."""
    return sum(len(memory_tasks(subject, points, known)) for subject in subjects)


def measure_memory(
    points: Points,
    subjects: Sequence[Subject],
    path: Path,
    known: Points,
    *,
    minutes: float = math.inf,
    tell: Callable[[str], None] = lambda what: None,
) -> bool:
    """Measure what is missing, and keep every subject at once; True when nothing is missing."""
    started = time.monotonic()
    with Peaks() as peaks:
        for subject in subjects:
            missing = memory_tasks(subject, points, known)
            for backward, shape in missing:
                if (time.monotonic() - started) / 60 > minutes:
                    points.write(path)
                    return False
                tell(f"{subject.key}, memory at n = {shape.n:,}")
                found = peaks.measure(subject, shape, backward=backward)
                points.add(subject, quantity_of(backward), shape, found["peak"])
                if backward:
                    points.add(subject, "kept bytes", shape, found["kept"])
                    points.add(subject, "parameter bytes", shape, found["parameters"])
            if missing:
                points.write(path)
    return True


def quantity_of(backward: bool) -> str:
    return "train bytes" if backward else "forward bytes"


# ---- the process ----------------------------------------------------------------------------------------------------


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """In the process that measures."""
    try:
        __import__(request["module"])
        subject, shape, backward = Subject.of(request["subject"]), Shape(*request["shape"]), request["backward"]
        make(subject, shape, backward=backward)()
        forget()
        step = make(subject, shape, backward=backward)
        own = getattr(step.module, "attention", None)
        parameters = 0 if own is None else sum(x.nbytes for x in own.parameters())
        return {"peak": growth(step), "kept": kept(step) if backward else 0, "parameters": parameters}
    except Exception as error:  # whatever a mechanism raises goes to the process that asked
        return {"error": f"{type(error).__name__}: {error}"}


def kept(step: Step) -> int:
    """Bytes that a forward pass saves for its backward pass, inputs and parameters not counted."""
    known = {x.untyped_storage().data_ptr() for x in (*step.inputs, *step.module.parameters())}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return x.detach()  # alive, so that no other takes its address; x itself would tie a saved output to itself

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = step.forward()
    del out
    return sum(found.values())


def forget() -> None:
    """Empty the caches of functions, so that a step makes its plans anew, as in a fresh process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("subquad.") and module is not None:
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def serve(threads: int) -> None:
    """Answer requests, one per line."""
    torch.set_num_threads(threads)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
