"""What is counted or measured instead of trained: operations, memory and time of one attention.

Every answer comes from a process of its own, so that memory is that of one call, and is kept in a file: what has been
measured is not measured again. Functions take the reproduction and an `Ask`, and return the cells.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from subquad.core.child import command as child_command
from subquad.core.files import write_atomically
from subquad.core.numbers import growth_exponent
from subquad.reproductions.declare import Reproduction
from subquad.training.log import read_json

Cells = dict[str, dict[str, Any]]
Tell = Callable[[str], None]
DENSITIES = {"ListOps": 0.0115, "Text": 0.1062, "Retrieval": 0.0249, "Image": 0.0133, "Pathfinder": 0.0261}
WRITTEN_OUT = "full, written out"
DEGREE = 64  # edges of a query where m = O(n)


def counted(value: float) -> dict[str, Any]:
    """A cell that no seed moves."""
    return {"mean": value, "sd": None, "scores": [], "counted": True}


class Ask:
    """flops, bytes and (on request) seconds of one forward pass, from a fresh process or from the file."""

    def __init__(self, path: Path, tell: Tell) -> None:
        self.path, self.tell = path, tell
        self.known: dict[str, dict[str, Any]] = read_json(path) if path.exists() else {}

    def __call__(self, spec: str, n: int, **about: Any) -> dict[str, Any]:
        request = json.dumps({"spec": spec, "n": n, **about})
        if request not in self.known:
            self.tell(f"{spec} at n = {n:,}")
            self.known[request] = _measured(request, spec, n)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(self.known, indent=1))
        return self.known[request]


def _measured(request: str, spec: str, n: int) -> dict[str, Any]:
    from subquad import bench

    done = bench.measured(child_command("subquad.reproductions.measures", request))
    if done.returncode not in (0, bench.COMPILED):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"{spec} at n = {n} could not be measured: {last}")
    return json.loads(done.stdout)


def answer(
    spec: str, n: int, heads: int = 2, head_dim: int = 32, causal: bool = False, density: float | None = None,
    repeats: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """In this process. `density` sets the parameters of SBM attention so that a pair is an edge with that chance; the
    spec WRITTEN_OUT is full attention with its matrix of weights in memory.
    """
    from subquad import bench
    from subquad.core.options import split_spec
    from subquad.studies.sbm_cost import set_density

    written_out = spec == WRITTEN_OUT
    spec = "full" if written_out else spec
    setting, level = bench.Setting(heads=heads, head_dim=head_dim, causal=causal), bench.level_of(spec)

    def step(length: int) -> bench.Step:
        if written_out:
            return bench.Step(spec, level, WrittenOut(), *bench.make_inputs(level, length, setting))
        made = bench.make_step(spec, level, length, setting, bench.make_inputs(level, length, setting))
        if density is not None and split_spec(spec)[0] == "sbm":
            set_density(made.module, density)  # type: ignore[arg-type]
        return made

    step(min(n, 64))()  # loads what is loaded once
    chosen = step(n)
    grown = bench.growth(chosen)
    chosen.count()
    for _ in range(repeats):
        chosen.clock()
    return {"flops": chosen.flops, "bytes": grown, "seconds": chosen.seconds if repeats else None}


class WrittenOut(nn.Module):
    """softmax(q kᵀ/√d) v, as it was computed when the papers were written: the weights (B, H, n, n) are stored."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def methods(reproduction: Reproduction) -> list[Any]:
    from subquad.reproductions.runner import known_methods

    return known_methods(reproduction)


def sbm_relative_costs(reproduction: Reproduction, ask: Ask) -> Cells:
    """Table 3 of SBM: operations and memory over those of full attention, at the lengths of the Arena."""
    from subquad.reproductions.sbm import FULL, LENGTHS

    cells: Cells = {}
    wanted = {column.name for column in reproduction.columns}
    for task, n in LENGTHS.items():
        if not wanted & {f"FLOPs, {task}", f"memory, {task}"}:
            continue
        full = ask(WRITTEN_OUT, n)
        for method in methods(reproduction):
            one = full if method.name == FULL else ask(method.spec, n, density=DENSITIES[task])
            for kind, key in (("FLOPs", "flops"), ("memory", "bytes")):
                if one[key] and full[key]:
                    cells.setdefault(method.name, {})[f"{kind}, {task}"] = counted(one[key] / full[key])
    return only(cells, reproduction)


def sbm_step_counts(reproduction: Reproduction, ask: Ask) -> Cells:
    """Table 5 of SBM: counted operations over 8nd² + 4nkd + 2k²d + 4md, as n, m, k and d are doubled one by one."""
    base = {"n": 1024, "degree": 32, "k": 64, "d": 32}
    changes = {"base": {}, "n × 2": {"n": 2048}, "m × 2": {"degree": 64}, "k × 2": {"k": 128}, "d × 2": {"d": 64}}
    cells: Cells = {}
    for method in methods(reproduction):
        for name, change in changes.items():
            now = {**base, **change}
            n, degree, k, d = now["n"], now["degree"], now["k"], now["d"]
            one = ask(f"{method.spec},clusters={k}", n, heads=1, head_dim=d, density=degree / n)
            formula = 8 * n * d * d + 4 * n * k * d + 2 * k * k * d + 4 * n * degree * d
            cells.setdefault(method.name, {})[name] = counted(one["flops"] / formula)
    return only(cells, reproduction)


def growth(reproduction: Reproduction, ask: Ask) -> Cells:
    """Table 6 of SBM: the slopes of operations and memory over the length, both logarithmic."""
    from subquad.reproductions.sbm import FULL

    lengths = (1024, 2048, 4096, 8192)
    cells: Cells = {}
    for method in methods(reproduction):
        spec = WRITTEN_OUT if method.name == FULL else method.spec
        seen = [ask(spec, n, density=DEGREE / n) for n in lengths]
        for column, key in (("time", "flops"), ("memory", "bytes")):
            if all(one[key] for one in seen):
                slope = growth_exponent(list(lengths), [one[key] for one in seen])
                cells.setdefault(method.name, {})[column] = counted(slope)
    return only(cells, reproduction)


def combiner_costs(reproduction: Reproduction, ask: Ask) -> Cells:
    """Figure 3 of Combiner: seconds and MiB of a forward pass, 8 heads × 64, bidirectional."""
    from subquad.reproductions.combiner import LENGTHS

    wanted = {column.name for column in reproduction.columns}
    cells: Cells = {}
    for n in LENGTHS:
        if f"time, {n}" not in wanted and f"memory, {n}" not in wanted:
            continue
        for method in methods(reproduction):
            one = ask(method.spec, n, heads=8, head_dim=64, repeats=3)
            row = cells.setdefault(method.name, {})
            row[f"time, {n}"], row[f"memory, {n}"] = counted(one["seconds"]), counted(one["bytes"] / 2**20)
    return only(cells, reproduction)


def only(cells: Cells, reproduction: Reproduction) -> Cells:
    """The cells of the columns that were asked for."""
    wanted = {column.name for column in reproduction.columns}
    return {name: {column: cell for column, cell in row.items() if column in wanted} for name, row in cells.items()}


if __name__ == "__main__":
    import torch

    from subquad.bench import COMPILED
    from subquad.kernels.parallel import has_compiled

    torch.set_num_threads(1)
    print(json.dumps(answer(**json.loads(sys.argv[1]))))
    sys.exit(COMPILED if has_compiled() else 0)
