"""Measurement: time against full attention in the same run, peak memory, floating-point operations.

    for rows in measure(["longformer:window=128"], [8192], Setting(causal=True)): ...

A mechanism on q, k, v is held against `F.scaled_dot_product_attention` with the same causal flag; one of
level "layer" is measured as a `MultiheadAttention` layer and held against a full-attention layer.

time      best of several rounds; in each, full attention and all mechanisms run one after the other, so that
          a slow moment of the machine hits all of them
memory    how far the resident memory of a fresh process rises during its first step of that size: output,
          gradients, workspace and the making of index sets included, inputs not
load      the share of the machine that other programs used meanwhile, and the quartiles of the ratio over the rounds:
          `busy` says why times are not to be trusted
FLOPs     counted, not timed: 2 per multiply-add of the matrix products and of our kernels; the masked pairs
          inside a block count too
"""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from subquad.attention.registry import for_length, mechanism
from subquad.core import memory
from subquad.core.child import command as child_command
from subquad.core.child import paths as child_paths
from subquad.core.files import write_atomically
from subquad.core.load import OtherLoad, quartiles, why_busy
from subquad.core.options import split_spec
from subquad.layers import MultiheadAttention

FULL = "full"  # what everything is measured against
LEAST = 0.05  # seconds of a round
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all measurements of a run share."""

    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    causal: bool = False
    backward: bool = False
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer ≥ 1, not {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, not {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda: torch finds no GPU here (subquad doctor shows what it finds)")

    @property
    def place(self) -> dict[str, Any]:
        """Where tensors are, and of which dtype."""
        return {"device": self.device, "dtype": getattr(torch, self.dtype)}


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


# ---- one step ----------------------------------------------------------------------------------------------


@dataclass
class Step:
    """Something that runs once per call: forward without gradients, or forward and backward."""

    spec: str
    level: str
    module: nn.Module
    inputs: list[Tensor]
    grad: Tensor | None  # of the output; None = forward only
    flops: int | None = None
    rounds: list[float] = field(default_factory=list)  # seconds, the best of each round
    memory: int | None = None

    @property
    def seconds(self) -> float:
        return min(self.rounds)

    def __call__(self) -> None:
        if self.grad is None:
            with torch.no_grad():
                self.forward()
            return
        self.module.zero_grad(set_to_none=True)
        for x in self.inputs:
            x.grad = None
        self.forward().backward(self.grad)

    def forward(self) -> Tensor:
        if self.level == "layer":
            return self.module(*self.inputs * 3, need_weights=False)[0]
        return self.module(*self.inputs)

    def count(self) -> None:
        """The first call, under the counter."""
        with FlopCounterMode(display=False) as counter:
            self()
        self.flops = counter.get_total_flops() or None

    def wait(self) -> None:
        """Until a GPU has done what it was given."""
        if self.inputs[0].is_cuda:
            torch.cuda.synchronize()

    def clock(self) -> None:
        """The best of the calls that fit into `LEAST` seconds: a single short call says little."""
        self.wait()
        first = last = time.perf_counter()
        best = float("inf")
        while last - first < LEAST:
            self()
            self.wait()
            now = time.perf_counter()
            best, last = min(best, now - last), now
        self.rounds.append(best)


class _Full(nn.Module):
    """torch's own attention, without anything around it."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def make_inputs(level: str, n: int, setting: Setting) -> tuple[list[Tensor], Tensor | None]:
    """Seeded q, k, v (B, H, n, d), or tokens (B, n, E); and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    tokens = (setting.batch, n, setting.heads * setting.head_dim)
    shape = tokens if level == "layer" else (setting.batch, setting.heads, n, setting.head_dim)
    count = 1 if level == "layer" else 3
    inputs = [torch.randn(shape, generator=generator).to(**setting.place) for _ in range(count)]
    if not setting.backward:
        return inputs, None
    return [x.requires_grad_() for x in inputs], torch.randn(shape, generator=generator).to(**setting.place)


def make_step(spec: str, level: str, n: int, setting: Setting, data: tuple[list[Tensor], Tensor | None]) -> Step:
    """A mechanism ready to run on `data` of `make_inputs`; full attention on q, k, v is torch's function."""
    heads, causal = setting.heads, setting.causal
    if spec == FULL and level == "head":
        return Step(spec, level, _Full(causal), *data)
    chosen = for_length(spec, n, causal=causal, num_heads=heads, head_dim=setting.head_dim)
    if level == "head":
        return Step(spec, level, chosen.to(**setting.place).train(setting.backward), *data)
    layer = MultiheadAttention(heads * setting.head_dim, heads, batch_first=True, causal=causal)
    layer.attention = chosen
    return Step(spec, level, layer.to(**setting.place).train(setting.backward), *data)


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
            for_length(spec, n, causal=setting.causal, num_heads=setting.heads, head_dim=setting.head_dim)
    done: list[Row] = []
    for n in lengths:
        subjects = _subjects_at(n, specs, setting, tell)
        with OtherLoad() as load:
            for turn in range(repeats):
                for subject in subjects:
                    tell(f"{subject.spec} at n = {n:,}, round {turn + 1}")
                    subject.clock()
                yield done + _rows(subjects, n, load)
        for subject in subjects if memory else ():
            tell(f"{subject.spec} at n = {n:,}, memory")
            subject.memory = peak_memory(subject.spec, subject.level, n, setting)
            yield done + _rows(subjects, n, load)
        done += _rows(subjects, n, load)


def steps(specs: Sequence[str], lengths: Sequence[int], repeats: int, memory: bool = True) -> int:
    """How many times `measure` will call `tell`."""
    return len(lengths) * len(_subjects(specs)) * (1 + repeats + memory)


def _subjects(specs: Sequence[str]) -> list[tuple[str, str]]:
    """What runs in a round: full attention once per level, then the mechanisms."""
    wanted = [(spec, level_of(spec)) for spec in dict.fromkeys(specs)]
    return list(dict.fromkeys([(FULL, level) for _, level in wanted] + wanted))


def _subjects_at(n: int, specs: Sequence[str], setting: Setting, tell: Callable[[str], None]) -> list[Step]:
    """Made and called once, which warms them up and counts their operations; they share their inputs."""
    pairs = _subjects(specs)
    data = {level: make_inputs(level, n, setting) for level in {level for _, level in pairs}}
    subjects = []
    for spec, level in pairs:
        tell(f"{spec} at n = {n:,}, first call")
        try:
            subjects.append(make_step(spec, level, n, setting, data[level]))
            subjects[-1].count()
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


def _rows(subjects: Sequence[Step], n: int, load: OtherLoad) -> list[Row]:
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
            ratio_quartiles=quartiles(
                [own / base for own, base in zip(subject.rounds, full[subject.level].rounds, strict=True)]
            ),
            other_load=load.share,
        )
        for subject in subjects
    ]


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
    request["module"] = mechanism(split_spec(spec)[0]).__module__  # a mechanism of the user's registers itself there
    paths = child_paths(working_folder=not request["module"].startswith("subquad."))
    child = subprocess.run(
        child_command("subquad.bench"),
        input=json.dumps(request),
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"the process ended with code {child.returncode}"])[-1]
        raise ValueError(f"memory of {spec} at n = {n} could not be measured: {last}")
    return int(child.stdout)


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
    __import__(request["module"])
    torch.set_num_threads(request["threads"])
    spec, level, n, setting = request["spec"], request["level"], request["n"], Setting(**request["setting"])
    small = replace(setting, batch=1)
    make_step(spec, level, min(n, 64), small, make_inputs(level, min(n, 64), small))()
    print(growth(make_step(spec, level, n, setting, make_inputs(level, n, setting)), setting.device == "cuda"))


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
        "setting": asdict(setting),
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
