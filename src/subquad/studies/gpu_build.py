"""`subquad study gpu-build`: the Triton kernels compiled for real GPUs on a machine that has none.

For every kernel, dtype and head width: registers per thread, bytes of shared memory and of stack (a stack of 0
bytes means that no register is spilled), matrix instructions in the innermost loops of the machine code, and the
occupancy that follows from registers and shared memory. Nothing here is a measurement of speed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from subquad.core.console import err, out
from subquad.kernels import builds
from subquad.kernels.builds import KINDS

TARGETS = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "gfx942": "gfx942"}
MATRIX = re.compile(r"\b(HMMA|IMMA|DMMA|HGMMA|UTCHMMA|UTCQMMA|OMMA)\b|\bv_mfma")
LABEL = re.compile(r"\s*([.\w]+):")
BRANCH = re.compile(r"\bBRA\b[^(]*\(([.\w]+)\)|\bs_c?branch\w*\s+([.\w]+)")


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor has (CUDA C++ Programming Guide, table of compute capabilities; CDNA 3 ISA guide)."""

    warps: int
    registers: int
    shared: int  # bytes, what programs can have of it
    lanes: int = 32


LIMITS = {
    "sm_80": Limits(64, 65536, 163 * 1024),
    "sm_90": Limits(64, 65536, 227 * 1024),
    "sm_100": Limits(64, 65536, 227 * 1024),
    "gfx942": Limits(32, 131072, 64 * 1024, 64),  # 4 SIMDs of 512 VGPRs × 64 lanes, 8 waves each
}


@dataclass(frozen=True)
class Build:
    """One compiled kernel."""

    kernel: str
    dtype: str
    width: int
    target: str
    tile: str
    warps: int
    registers: int
    shared: int  # bytes
    stack: int  # bytes; 0 = no spill
    matrix: int  # matrix instructions in the innermost loops of the machine code
    occupancy: float  # resident warps / possible warps
    source: str  # what it was compiled from, hashed


def show(targets: list[str], kinds: list[str], widths: list[int], kernels: str, json_: Path | None) -> None:
    """Compile the Triton kernels for GPUs ahead of time and show what they use; no GPU is needed."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise ValueError("TRITON_INTERPRET is set: kernels are interpreted then, not compiled; unset it")
    known = {} if json_ is None or not json_.exists() else {(r.target, r.source): r for r in read(json_)}
    rows: list[Build] = []
    for job in jobs(kinds, widths, targets):
        if kernels in job.kernel:
            place = (job.target, job.source)
            if place not in known:
                err().print(f"{job.kernel} {job.dtype} {job.width} {job.target}", style="dim", soft_wrap=True)
                known[place] = build(job)
            rows.append(known[place])
            if json_ is not None:
                json_.write_text(json.dumps([asdict(row) for row in known.values()], indent=2) + "\n")
    out().print(markdown(rows), markup=False, soft_wrap=True)


def read(path: Path) -> list[Build]:
    return [Build(**row) for row in json.loads(path.read_text())]


@dataclass(frozen=True)
class Job:
    """One kernel with the types of its arguments. Pointers and strides are multiples of 16 bytes."""

    kernel: str
    function: Any
    dtype: str
    width: int
    target: str
    signature: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int
    tile: str
    options: dict[str, int]

    @property
    def source(self) -> str:
        """Equal for equal builds: a hash of the kernel, its arguments and the compiler's version."""
        from triton import __version__

        about = (self.signature, self.constants, self.warps, self.stages, self.options, __version__)
        return hashlib.sha256(f"{self.function.cache_key} {about}".encode()).hexdigest()[:16]


def jobs(dtypes: list[str], widths: list[int], targets: list[str]) -> Iterator[Job]:
    for entry in builds.entries():
        for dtype, width, target in product([x for x in dtypes if x in entry.kinds], widths, targets):
            made = entry.make(KINDS[dtype], width, target.startswith("gfx"))
            yield Job(entry.name, made.function, dtype, width, target, *made[1:])


def build(job: Job) -> Build:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    target, lanes = job.target, LIMITS[job.target].lanes
    device = GPUTarget("hip" if target.startswith("gfx") else "cuda", TARGETS[target], lanes)
    signature = {**job.signature, **dict.fromkeys(job.constants, "constexpr")}
    attributes = dict(_divisible(list(job.signature.values())))
    source = ASTSource(fn=job.function, signature=signature, constexprs=job.constants, attrs=attributes)
    options = {"num_warps": job.warps, "num_stages": job.stages, **({} if device.backend == "hip" else job.options)}
    built: Any = triton.compile(source, target=device, options=options)
    shared = int(built.metadata.shared)
    registers, stack, code = _amd(built.asm["amdgcn"]) if "amdgcn" in built.asm else _nvidia(built.asm["cubin"])
    occupied = occupancy(target, registers, shared, job.warps)
    matrix = sum(len(MATRIX.findall(line)) for loop in innermost_loops(code) for line in loop)
    about = (job.kernel, job.dtype, job.width, target, job.tile, job.warps)
    return Build(*about, registers, shared, stack, matrix, occupied, job.source)


def innermost_loops(code: str) -> list[list[str]]:
    """The lines of every loop without a loop inside: from a label to the branch that goes back to it."""
    lines, labels = code.splitlines(), {}
    found: list[tuple[int, int]] = []
    for number, line in enumerate(lines):
        if label := LABEL.match(line):
            labels[label[1]] = number
        elif (branch := BRANCH.search(line)) and (branch[1] or branch[2]) in labels:
            found.append((labels[branch[1] or branch[2]], number))
    inner = [a for a in found if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    return [lines[first : last + 1] for first, last in inner]


def _divisible(types: list[Any], path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], list[list[Any]]]]:
    """The attributes that a launch would find: pointers and strides (i64) are multiples of 16."""
    for number, kind in enumerate(types):
        here = (*path, number)
        if isinstance(kind, tuple):
            yield from _divisible(list(kind), here)
        elif kind.startswith("*") or kind == "i64":
            yield here, [["tt.divisibility", 16]]


def _nvidia(cubin: bytes) -> tuple[int, int, str]:
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tools / tool, *words, file.name], capture_output=True, text=True, check=True).stdout
            for tool, words in (("cuobjdump", ["-res-usage"]), ("nvdisasm", ["-c"]))
        )
    found = re.search(r"REG:(\d+).*?STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage does not say REG and STACK: {usage}")
    return int(found[1]), int(found[2]), code


def _amd(code: str) -> tuple[int, int, str]:
    """VGPRs, and bytes of spilled VGPRs per lane."""
    registers, spilled = (re.search(rf"\.{name}_count:\s+(\d+)", code) for name in ("vgpr", "vgpr_spill"))
    assert registers is not None and spilled is not None
    return int(registers[1]), 4 * int(spilled[1]), code


def occupancy(target: str, registers: int, shared: int, warps: int) -> float:
    """Resident warps / possible warps, from registers (given out in eights per thread) and shared memory."""
    limit = LIMITS[target]
    threads = -(-max(registers, 1) // 8) * 8 * limit.lanes * warps
    programs = min(limit.warps // warps, limit.registers // threads)
    if shared:
        programs = min(programs, limit.shared // (shared + 1024))  # 1 kB per program is the driver's
    return programs * warps / limit.warps


def markdown(rows: list[Build]) -> str:
    """The tables of docs/gpu.md, one for each manufacturer, whose GPUs have the same tiles."""
    amd = [r for r in rows if r.target.startswith("gfx")]
    return "\n\n".join(_table(some) for some in ([r for r in rows if r not in amd], amd) if some)


def _table(rows: list[Build]) -> str:
    """A row for each kernel, dtype and width, a column for each GPU."""
    targets = list(dict.fromkeys(r.target for r in rows))
    lines = [
        "| kernel | dtype | width | tile | warps | " + " | ".join(targets) + " |",
        "|---|---|---|---|---|" + "---|" * len(targets),
    ]
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for r in rows:
        cell = f"{r.registers} · {r.shared / 1024:.0f} kB · {r.stack} · {r.matrix} · {r.occupancy:.0%}"
        found.setdefault((r.kernel, r.dtype, r.width, r.tile, r.warps), {})[r.target] = cell
    for about, cells in found.items():
        lines.append("| " + " | ".join([*map(str, about), *(cells.get(target, "–") for target in targets)]) + " |")
    return "\n".join(lines)
