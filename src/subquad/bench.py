"""Measurement: time against full attention in the same run, peak memory, floating-point operations.

    for rows in measure(["longformer:window=128"], [8192], Setting(causal=True)): ...

A mechanism on q, k, v is held against `F.scaled_dot_product_attention` with the same causal flag; one of
level "layer" is measured as a `MultiheadAttention` layer and held against a full-attention layer (`bench_steps`);
`Setting(level="model")` measures training steps of whole models (`bench_model`).

time      best of several rounds; in each, full attention and all mechanisms run one after the other, so that
          a slow moment of the machine hits all of them
memory    how far the resident memory of a fresh process rises during its first step of that size: output,
          gradients, workspace and the making of index sets included, inputs not
load      the share of the machine that other programs used meanwhile, and the quartiles of the ratio over the rounds:
          `busy` says why times are not to be trusted
FLOPs     counted, not timed: 2 per multiply-add of the matrix products and of our kernels; the masked pairs
          inside a block count too, those of causal full attention do not
roofline  FLOPs per second as a share of what a large matrix product reaches, measured in the same rounds
plain     with a ragged batch or dropout: the time of the same step without them, in the same rounds
"""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from subquad.attention.registry import for_length, mechanism
from subquad.bench_steps import DTYPES, FULL, LEVELS, Setting, Step, make_inputs, make_peak, make_step, options
from subquad.core import memory
from subquad.core.child import command as child_command
from subquad.core.child import paths as child_paths
from subquad.core.files import write_atomically
from subquad.core.load import OtherLoad, quartiles, why_busy
from subquad.core.options import split_spec
from subquad.kernels.parallel import has_compiled

__all__ = [
    "DTYPES",
    "FULL",
    "Row",
    "Setting",
    "Step",
    "for_length",
    "make_inputs",
    "make_step",
    "measure",
    "peak_memory",
]
COMPILED = 75  # exit code of a process that has counted memory and has compiled kernels meanwhile


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mechanism at one length: seconds and bytes of one step; `ratio` = seconds / full_seconds."""

    spec: str
    level: str  # "head": on q, k, v; "layer": with projections, against a full-attention layer
    n: int
    repeats: int
    seconds: float
    full_seconds: float
    ratio: float
    flops: int | None  # None = its kernels tell the counter nothing
    full_flops: int | None
    input_bytes: int
    memory: int | None = None  # None = not measured yet
    full_memory: int | None = None
    ratio_quartiles: list[float] | None = None  # of the ratio over the rounds
    other_load: float | None = None  # share of all cores that other programs used meanwhile; None = unknown
    gemm: float | None = None  # FLOP/s of a large matrix product
    of_gemm: float | None = None  # flops / seconds / gemm
    plain_seconds: float | None = None  # without padding and dropout; None = there is neither
    plain_quartiles: list[float] | None = None  # of seconds / plain_seconds over the rounds


def level_of(spec: str) -> str:
    return mechanism(split_spec(spec)[0]).capabilities.level


# ---- a run -------------------------------------------------------------------------------------------------


def measure(
    specs: Sequence[str],
    lengths: Sequence[int],
    setting: Setting,
    *,
    repeats: int = 3,
    memory: bool = True,
    tell: Callable[[str], None] = lambda what: None,
) -> Iterator[list[Row]]:
    """All rows so far, after every round and every measurement of memory: what is yielded can be kept.

    `tell` hears of each of the `steps(...)` steps before it runs. A spec that cannot be made is refused
    before anything runs.
    """
    if not specs or not lengths or repeats < 1 or min(lengths) < 1:
        raise ValueError(f"bench needs specs, lengths ≥ 1 and repeats ≥ 1, not {specs}, {lengths} and {repeats}")
    for spec in specs:
        for n in lengths:
            for_length(spec, n, causal=setting.causal, **options(setting))
    done: list[Row] = []
    gemm = make_peak(setting)
    for n in lengths:
        subjects = _subjects_at(n, specs, setting, tell)
        with OtherLoad() as load:
            for turn in range(repeats):
                gemm.clock()
                for subject in subjects:
                    tell(f"{subject.spec} at n = {n:,}, round {turn + 1}")
                    subject.clock()
                    if subject.plain is not None:
                        subject.plain.clock()
                yield done + _rows(subjects, n, load, gemm)
        for subject in subjects if memory else ():
            tell(f"{subject.spec} at n = {n:,}, memory")
            subject.memory = peak_memory(subject.spec, subject.level, n, setting)
            yield done + _rows(subjects, n, load, gemm)
        done += _rows(subjects, n, load, gemm)


def steps(
    specs: Sequence[str], lengths: Sequence[int], repeats: int, memory: bool = True, level: str | None = None
) -> int:
    """How many times `measure` will call `tell`."""
    return len(lengths) * len(_subjects(specs, level)) * (1 + repeats + memory)


def _subjects(specs: Sequence[str], level: str | None) -> list[tuple[str, str]]:
    """What runs in a round: full attention once per level, then the mechanisms."""
    wanted = [(spec, level or level_of(spec)) for spec in dict.fromkeys(specs)]
    return list(dict.fromkeys([(FULL, level) for _, level in wanted] + wanted))


def _subjects_at(n: int, specs: Sequence[str], setting: Setting, tell: Callable[[str], None]) -> list[Step]:
    """Made and called once, which warms them up and counts their operations; they share their inputs."""
    pairs = _subjects(specs, setting.level)
    data = {level: make_inputs(level, n, setting) for level in {level for _, level in pairs}}
    subjects = []
    for spec, level in pairs:
        tell(f"{spec} at n = {n:,}, first call")
        try:
            subjects.append(make_step(spec, level, n, setting, data[level]))
            subjects[-1].count()
            if setting.plain is not None:
                subjects[-1].plain = make_step(spec, level, n, setting.plain, data[level])
                subjects[-1].plain()
        except Exception as error:  # whatever a mechanism raises: the user asked for it at this length
            raise ValueError(f"{spec} cannot run at n = {n}: {error}") from error
    return subjects


def busy(rows: Sequence[Row]) -> str | None:
    """Why the times of these rows are not to be trusted; None if they are."""
    shares = [row.other_load for row in rows if row.other_load is not None]
    ratios: dict[str, Sequence[float]] = {
        f"{row.spec} at n = {row.n:,}": row.ratio_quartiles for row in rows if row.ratio_quartiles
    }
    return why_busy(max(shares, default=None), ratios)


def _rows(subjects: Sequence[Step], n: int, load: OtherLoad, gemm: Step) -> list[Row]:
    peak = (gemm.flops or 0) / gemm.seconds
    full = {subject.level: subject for subject in subjects if subject.spec == FULL}
    return [
        Row(
            spec=subject.spec,
            level=subject.level,
            n=n,
            repeats=len(subject.rounds),
            seconds=subject.seconds,
            full_seconds=full[subject.level].seconds,
            ratio=subject.seconds / full[subject.level].seconds,
            flops=subject.flops,
            full_flops=full[subject.level].flops,
            input_bytes=_input_bytes(subject),
            memory=subject.memory,
            full_memory=full[subject.level].memory,
            ratio_quartiles=_ratios(subject, full[subject.level]),
            other_load=load.share,
            gemm=peak,
            of_gemm=None if subject.flops is None else subject.flops / subject.seconds / peak,
            plain_seconds=None if subject.plain is None else subject.plain.seconds,
            plain_quartiles=None if subject.plain is None else _ratios(subject, subject.plain),
        )
        for subject in subjects
    ]


def _ratios(subject: Step, base: Step) -> list[float] | None:
    """The quartiles of the ratio over the rounds."""
    return quartiles([own / other for own, other in zip(subject.rounds, base.rounds, strict=True)])


def _input_bytes(step: Step) -> int:
    return sum(x.nbytes for x in [*step.inputs, step.grad] if x is not None)


# ---- memory ------------------------------------------------------------------------------------------------


def peak_memory(spec: str, level: str, n: int, setting: Setting) -> int:
    """Bytes by which a fresh process grows during one step, at its peak."""
    request: dict[str, Any] = {
        "spec": spec,
        "level": level,
        "n": n,
        "setting": asdict(setting),
        "threads": torch.get_num_threads(),
    }
    modules = [mechanism(split_spec(spec)[0]).__module__, LEVELS[level].step.__module__]  # they register themselves
    request["modules"] = modules
    paths = child_paths(working_folder=not modules[0].startswith("subquad."))
    variables = {**os.environ, **memory.RETURNED, "PYTHONPATH": paths}
    child = measured(child_command("subquad.bench"), input=json.dumps(request), env=variables)
    if child.returncode not in (0, COMPILED):
        last = (child.stderr.strip().splitlines() or [f"the process ended with code {child.returncode}"])[-1]
        raise ValueError(f"memory of {spec} at n = {n} could not be measured: {last}")
    return int(child.stdout)


def measured(words: list[str], **about: Any) -> subprocess.CompletedProcess:
    """A process that counts memory. If it had to compile kernels, which takes memory of its own, it is asked once more:
    then they are loaded.
    """
    done = subprocess.run(words, capture_output=True, text=True, **about)
    return done if done.returncode != COMPILED else subprocess.run(words, capture_output=True, text=True, **about)


def growth(step: Callable[[], None], cuda: bool = False) -> int:
    """Bytes by which this process grows during one call, at its peak."""
    gc.collect()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        taken = torch.cuda.memory_allocated()
        step()
        return max(0, torch.cuda.max_memory_allocated() - taken)
    before = memory.reset_peak()
    step()
    return max(0, memory.peak() - before)


def _child() -> None:
    """The fresh process: a small step first, to load what is loaded once; then the step that counts."""
    request = json.loads(sys.stdin.read())
    for module in request["modules"]:
        __import__(module)
    torch.set_num_threads(request["threads"])
    spec, level, n, setting = request["spec"], request["level"], request["n"], Setting(**request["setting"])
    small = replace(setting, batch=2 if setting.ragged else 1)
    make_step(spec, level, min(n, 64), small, make_inputs(level, min(n, 64), small))()
    print(growth(make_step(spec, level, n, setting, make_inputs(level, n, setting)), setting.device == "cuda"))
    sys.exit(COMPILED if has_compiled() else 0)


# ---- keeping results ---------------------------------------------------------------------------------------


def report(rows: Sequence[Any], setting: Setting) -> dict[str, Any]:
    """Rows and the circumstances, ready for JSON."""
    from subquad import __version__

    versions = {"subquad": __version__, "torch": torch.__version__, "python": platform.python_version()}
    about = machine()
    if setting.device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    return {
        "versions": versions,
        "machine": about,
        "setting": setting.asdict(),
        "busy": busy([row for row in rows if isinstance(row, Row)]),
        "rows": [asdict(row) for row in rows],
    }


def machine() -> dict[str, Any]:
    """The machine as far as times depend on it."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    """The name of the CPU model, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write(path: Path, content: dict[str, Any]) -> None:
    """Whoever reads `path`, at any moment, finds a whole file."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    _child()
