"""Measurement against other implementations of the same mechanism: the packages of the extra `peers`, and transformers.

    for rows in measure_peers(["performer", "hca"], Setting(backward=True)): ...

Each of ours is a `MultiheadAttention` layer and each peer a module on tokens (B, n, E), with its projections; a peer
that has no output projection of its own gets one. A round runs full attention, ours and the peer one after the other,
so that a slow moment of the machine hits all of them; the best of several rounds counts. So do the four projections
alone: their share of the peer's time is the least that a ratio can be where nothing of them can be saved. Sizes
(window, landmarks …) are the same on both sides. No peer is imported before it is measured, and nothing else in the
package imports one.

crossover: the shortest of the lengths 256, 512, … at which our layer is faster than a layer of full attention, and also
at the next one.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn

from subquad.bench import FULL, Setting, Step, make_inputs, make_step
from subquad.bench import report as bench_report
from subquad.peer_modules import PEERS, Peer, find

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)  # where a crossover is looked for
SECONDS = 1.0  # a crossover is looked for no further than the length at which one step takes longer


@dataclass(frozen=True, kw_only=True)
class PeerRow:
    """Seconds of one step; `ratio` = seconds / peer_seconds."""

    peer: str
    package: str
    version: str
    spec: str
    causal: bool
    backward: bool
    n: int
    repeats: int
    seconds: float
    peer_seconds: float
    full_seconds: float
    ratio: float
    bar: float
    projections_seconds: float  # of the four projections alone, which both sides have
    crossover: int | None = None  # None = none of the lengths tried
    tried: tuple[int, ...] = ()  # lengths at which a crossover was looked for


class Projections(nn.Module):
    """What no layer can do without: queries, keys and values in one product, and the output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x)[..., : x.shape[2]])


# ---- a run ------------------------------------------------------------------------------------------------


def measure_peers(
    names: Sequence[str],
    setting: Setting,
    *,
    n: int | None = None,
    repeats: int = 3,
    crossover: bool = True,
    tell: Callable[[str], None] = lambda what: None,
) -> Iterator[list[PeerRow]]:
    """All rows so far, after every peer. `names`: peers, all if empty; `n`: a length for all of them."""
    chosen = [find(name) for name in names] or [peer for peer in PEERS if peer.installed]
    for peer in chosen:
        if not peer.installed:
            raise ValueError(f"{peer.name} needs the package {peer.package}: pip install 'subquad[peers]'")
    rows: list[PeerRow] = []
    for peer in chosen:
        rows.append(_measure(peer, replace(setting, causal=peer.causal), n or peer.n, repeats, tell))
        yield list(rows)
        if crossover:
            same = [row for row in rows[:-1] if (row.spec, row.causal) == (peer.spec, peer.causal)]
            found = same[0] if same else _with_crossover(rows[-1], replace(setting, causal=peer.causal), repeats, tell)
            rows[-1] = replace(rows[-1], crossover=found.crossover, tried=found.tried)
            yield list(rows)


def peer_step(peer: Peer, n: int, setting: Setting, data: tuple[list[Tensor], Tensor | None]) -> Step:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # some talk while they are imported
        warnings.simplefilter("ignore")
        module = peer.make(n, setting).train(setting.backward)
    return Step(peer.name, "head", module, *data)


def _measure(peer: Peer, setting: Setting, n: int, repeats: int, tell: Callable[[str], None]) -> PeerRow:
    data = make_inputs("layer", n, setting)
    subjects = [make_step(spec, "layer", n, setting, data) for spec in (FULL, peer.spec)]
    subjects.append(peer_step(peer, n, setting, data))
    subjects.append(
        Step("projections", "head", Projections(setting.heads * setting.head_dim).to(**setting.place), *data)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(repeats + 1):  # the first one warms up
            for subject in subjects:
                tell(f"{peer.name} at n = {n:,}, {f'round {turn}' if turn else 'first call'}")
                if turn:
                    subject.clock()
                else:
                    subject()
    full, ours, theirs, projections = (subject.seconds for subject in subjects)
    return PeerRow(
        peer=peer.name, package=peer.package, version=peer.version, spec=peer.spec, causal=peer.causal, n=n,
        backward=setting.backward, repeats=repeats, seconds=ours, peer_seconds=theirs, full_seconds=full,
        ratio=ours / theirs, bar=peer.bar, projections_seconds=projections,
    )  # fmt: skip


def _with_crossover(row: PeerRow, setting: Setting, repeats: int, tell: Callable[[str], None]) -> PeerRow:
    faster: dict[int, bool] = {}
    for n in LENGTHS:
        data = make_inputs("layer", n, setting)
        full, ours = (make_step(spec, "layer", n, setting, data) for spec in (FULL, row.spec))
        for subject in (full, ours):
            tell(f"{row.spec} at n = {n:,}, crossover")
            subject()
        for subject in [full, ours] * repeats:
            subject.clock()
        faster[n] = ours.seconds < full.seconds
        if max(full.seconds, ours.seconds) > SECONDS or list(faster.values())[-2:] == [True, True]:
            break
    from_here = [n for n in faster if all(faster[m] for m in faster if m >= n)]
    return replace(row, crossover=min(from_here, default=None), tried=tuple(faster))


def report(rows: Sequence[PeerRow], setting: Setting) -> dict[str, Any]:
    """Rows and the circumstances, ready for JSON."""
    content = bench_report([], setting)
    content["machine"] |= {"processor": _processor(), "cores": os.cpu_count()}
    for name in ("causal", "backward"):  # a matter of each row
        content["setting"].pop(name)
    return content | {"rows": [asdict(row) for row in rows]}


def _processor() -> str:
    """The processor's name, where the system tells it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


# ---- for the documentation ----


def as_markdown(content: dict[str, Any]) -> str:
    """The table of a file of results: ours over the peer's time, forward and forward + backward."""
    rows: dict[tuple[str, int], dict[bool, dict[str, Any]]] = {}
    for row in content["rows"]:
        rows.setdefault((row["peer"], row["n"]), {})[row["backward"]] = row
    machine, setting = content["machine"], content["setting"]
    lines = [
        f"{machine['processor']}, {machine['threads']} threads, torch {content['versions']['torch']}; batch "
        f"{setting['batch']}, {setting['heads']} heads × {setting['head_dim']}, float32.",
        "",
        "| peer | package | ours | n | forward, ms: ours / peer | ratio | least | + backward, ms | ratio | least "
        "| pays from |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, n), both in rows.items():
        one = both.get(False) or both[True]
        pays = "–" if not one["tried"] else str(one["crossover"] or f"beyond {one['tried'][-1]}")
        package, way = f"{one['package']} {one['version']}", ", causal" if one["causal"] else ""
        cells = " | ".join(_cells(both.get(backward)) for backward in (False, True))
        lines.append(f"| {name} | {package} | `{one['spec']}`{way} | {n} | {cells} | {pays} |")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any] | None) -> str:
    """Times, their ratio, and the share of the projections in the peer's time."""
    if row is None:
        return "– | – | –"
    times = f"{_ms(row['seconds'])} / {_ms(row['peer_seconds'])}"
    return f"{times} | {row['ratio']:.2f} | {row['projections_seconds'] / row['peer_seconds']:.2f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.01 else f"{1e3 * seconds:.1f}"


if __name__ == "__main__":
    import json
    import sys
    from pathlib import Path

    print(as_markdown(json.loads(Path(sys.argv[1]).read_text())), end="")
