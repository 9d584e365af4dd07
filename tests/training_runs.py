"""Tiny training runs, and processes to run them in, for the tests of training and of its faults.

Processes are forked from a server that has imported everything once: a fresh interpreter would take seconds each time.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.tasks import task
from subquad.training import log
from subquad.training.run import Run, train

gc.freeze()  # every training collects garbage once; walking through all of torch takes half a second each time

TINY = (
    "length=32", "sentence=4", "repeats=1", "questions=4", "values=4", "width=8", "heads=2", "layers=1", 
    "feedforward=8", "batch=4", "eval_size=8", "warmup=0",
)  # fmt: skip
SAMPLED = "sbm:clusters=2"  # draws a graph in every call, also in evaluations


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny models gain nothing by a second thread, and the processes of these tests have one too: sums are equal."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(out: Path, *settings: str, attention: str = "full", seed: int = 0) -> Run:
    made = task("needle", "small", (*TINY, "steps=6", "evaluate=2", *settings), seed=seed)
    return Run(made, [attention], out, seed=seed, command=["subquad", "train"])


def sampled(out: Path) -> Run:
    """A run in which everything is drawn: order, dropout, graphs."""
    return tiny(out, "dropout=0.1", attention=SAMPLED)


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in log.read(out) if "loss" in record]


def outcome(out: Path, result: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on kills and damage: everything but times and memory."""
    records = [{key: record.get(key) for key in ("step", "loss", "valid", "density")} for record in log.read(out)]
    return {"log": records, **{key: result[key] for key in ("test", "valid", "best_step", "steps", "density")}}


# ---- processes ------------------------------------------------------------------------------------------------

_context: Any = None


def start(target: Callable[..., None], *args: Any) -> Any:
    """A process that calls `target`; its exit code is 0, or 1 after an error, which goes to stderr."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["subquad.training.run", "subquad.training.compare", "subquad.cli.train"])
    process = _context.Process(target=_call, args=(target, args), daemon=False)
    process.start()
    return process


def _call(target: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        target(*args)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start_two(target: Callable[..., None], *args: Any) -> list[Any]:
    """Two processes as torchrun would start them."""
    return start_ranks(2, target, *args)


def start_ranks(size: int, target: Callable[..., None], *args: Any) -> list[Any]:
    """So many processes as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [start(_as_rank, rank, size, port, target, args) for rank in range(size)]


def _as_rank(rank: int, size: int, port: int, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    target(*args)


def train_in_process(out: Path, resume: bool = False) -> None:
    train(sampled(out), resume=resume)
