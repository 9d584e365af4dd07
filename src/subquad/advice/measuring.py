"""The times of a calibration: the best of a few calls of a layer, at the lengths and sizes of `points`.

All of them are measured in several rounds, minutes apart, and the best of these counts: what other programs of this
computer, or others that share its caches, cost is rarely the same twice.
A length whose step would take too long, judged by the shorter ones, is left out: the cost model extrapolates.
Data-dependent mechanisms are measured on random tokens.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from subquad import bench
from subquad.advice.points import ALONE, BASE, DECODED, MIDDLE, VARIED, Points, Shape, Subject, shapes
from subquad.attention.registry import mechanism
from subquad.bench import Setting, Step, make_inputs, make_step
from subquad.core.child import command as child_command
from subquad.core.child import paths as child_paths
from subquad.core.options import split_spec
from subquad.kernels.affine import affine_parts, apply_linear
from subquad.layers import MultiheadAttention

PATIENCE = {8192: 2.0, 32768: 0.8}  # seconds of a step beyond which a sequence up to so long is not measured
LEAST = 0.06  # seconds that the calls of one measurement take together
CAREFUL = 0.15  # the same at the length that other sizes are scaled from
SHARED = 0.5  # the same for the projections, a part of every layer
CALLS = 4  # at least so many, of which the best counts: a neighbour's burst spoils two or three in a row
LONG = 0.5  # seconds from which half of them are enough
CHUNK = 1024  # tokens of a chunk before a decode step
ROOM = 64  # decode steps that a state has room for

Tell = Callable[[str], None]


def setting(subject: Subject, shape: Shape, *, backward: bool) -> Setting:
    return Setting(
        heads=shape.heads, head_dim=shape.head_dim, batch=shape.batch, causal=subject.causal, backward=backward
    )


class Projections(nn.Module):
    """The projections of a layer, and no attention between them: what all layers share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(
        self, x: Tensor, *_: Tensor, key_padding_mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, None]:
        """Called like a layer; there is no padding here, and there are no weights."""
        q, k, v = affine_parts(
            x, self.inner.weight, self.inner.bias, [x.shape[-1]] * 3
        )  # (B, n, E) each, as a layer makes them
        return apply_linear(self.outer, q + k + v), None


def make(subject: Subject, shape: Shape, *, backward: bool) -> Step:
    """A layer ready to run."""
    now = setting(subject, shape, backward=backward)
    data = make_inputs("layer", shape.n, now)
    if subject == ALONE:
        return Step(subject.spec, "layer", Projections(shape.width), *data)
    return make_step(subject.spec, "layer", shape.n, now, data)


def best(call: Callable[[], object], least_seconds: float = LEAST) -> float:
    """The shortest of the calls that fit into so many seconds, after one that warms up; at least `CALLS`, and fewer
    where they are long.
    """
    begun = time.perf_counter()
    call()
    first = last = time.perf_counter()
    taken, found = first - begun, math.inf
    least = CALLS if taken < LONG else CALLS // 2
    while least > 0 or last - first < least_seconds:
        call()
        now = time.perf_counter()
        found, last, least = min(found, now - last), now, least - 1
    return found


def step_seconds(subject: Subject, shape: Shape, quantity: str) -> float:
    """Of one forward pass, or of one forward and backward pass."""
    step = make(subject, shape, backward=quantity == "train")
    return best(step, SHARED if subject == ALONE else CAREFUL if shape.n * shape.batch == MIDDLE else LEAST)


def surroundings(subject: Subject) -> tuple[str, dict[str, str]]:
    """The module in which a mechanism registers itself, and the environment of a process that can import it: one of the
    user's may lie in the working folder.
    """
    module = mechanism(split_spec(subject.spec)[0]).__module__
    return module, {**os.environ, "PYTHONPATH": child_paths(working_folder=not module.startswith("subquad."))}


def fresh_seconds(subject: Subject, shape: Shape, *, backward: bool, least_seconds: float = LEAST) -> float:
    """As a program has it that runs nothing else. Tensors of more than 32 MiB are fresh memory at every step there;
    after other layers they may fit where the tensors of these were, and a step takes up to a third less.
    """
    module, environment = surroundings(subject)
    request = json.dumps([module, torch.get_num_threads(), subject.key, shape, backward, least_seconds])
    done = subprocess.run(
        child_command(__name__, request), env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def answer(request: str) -> float:
    """In the process that measures."""
    module, threads, key, shape, backward, least_seconds = json.loads(request)
    __import__(module)
    torch.set_num_threads(threads)
    return best(make(Subject.of(key), Shape(*shape), backward=backward), least_seconds)


@torch.no_grad()
def decode(subject: Subject, shape: Shape) -> tuple[float, int]:
    """Seconds of one decode step of a layer after n tokens, and the bytes of the state of its attention."""
    layer = MultiheadAttention(
        shape.width, shape.heads, attention=subject.spec, causal=True, batch_first=True, max_length=shape.n + ROOM
    ).eval()
    x = torch.randn(1, shape.n + 1, shape.width, generator=torch.Generator().manual_seed(0))
    state = layer.start(1)
    for piece in x[:, : shape.n].split(CHUNK, 1):
        _, state = layer.extend(piece, state)
    current, size = [state], state.nbytes

    def step() -> None:
        if int(current[0].length[0]) >= shape.n + ROOM:
            current[0] = current[0].crop(shape.n + ROOM - 32)
        current[0] = layer.extend(x[:, shape.n :], current[0])[1]

    return best(step), size


def streams(subject: Subject) -> bool:
    """Can it decode token by token?"""
    return subject.causal and subject != ALONE and mechanism(split_spec(subject.spec)[0]).capabilities.streaming


def estimate(points: dict[Shape, float], n: int) -> float:
    """What a step of the base size would take, by the growth between the two longest that are known."""
    known = sorted((shape.n, value) for shape, value in points.items() if shape.is_base and shape.n < n)
    if len(known) < 2:
        return 0.0
    (low, before), (high, after) = known[-2:]
    return after * (n / high) ** max(1.0, math.log(after / before) / math.log(high / low))


def tasks(subject: Subject, points: Points) -> list[tuple[str, Shape]]:
    """What of a subject is not measured yet, as far as it can be told before the shorter lengths are known."""
    return [(quantity, shape) for quantity, shape in wanted(subject) if not points.has(subject, quantity, shape)]


def wanted(subject: Subject) -> list[tuple[str, Shape]]:
    """All that is measured of a subject, if none of it takes too long."""
    found = [(quantity, shape) for quantity in ("forward", "train") for shape in shapes(subject)]
    if streams(subject):
        found += [("decode", Shape(n, *BASE)) for n in DECODED]
        found += [("decode", Shape(DECODED[0], *each)) for each in VARIED]
    return found


def again(subject: Subject, points: Points) -> list[tuple[str, Shape]]:
    """What another round measures."""
    return [(quantity, shape) for quantity, shape in wanted(subject) if points.has(subject, quantity, shape)]


def too_long(subject: Subject, quantity: str, shape: Shape, points: Points) -> bool:
    if not shape.is_base or quantity == "decode":
        return False
    limit = next(seconds for n, seconds in PATIENCE.items() if shape.n <= n)
    return estimate(points.of(subject, quantity), shape.n) > limit


def calibrate(
    points: Points,
    subjects: Sequence[Subject],
    path: Path,
    *,
    rounds: int = 1,
    minutes: float = math.inf,
    tell: Tell = lambda what: None,
) -> bool:
    """Measure what is missing, the projections first, until all have been measured `rounds` times, and keep every
    subject at once. True when nothing is missing; it stops after about `minutes`.
    """
    end = time.monotonic() + 60 * minutes
    for number in range(rounds):
        for subject in (ALONE, *subjects):
            if number and points.rounds.get(subject, 0) > number:
                continue
            for quantity, shape in (again if number else tasks)(subject, points):
                tell(f"{subject.key}, {quantity} at n = {shape.n:,}")
                if time.monotonic() > end:
                    points.write(path)
                    return False
                if number or not too_long(subject, quantity, shape, points):
                    measure(points, subject, quantity, shape)
            points.rounds[subject] = max(number + 1, points.rounds.get(subject, 0))
            points.write(path)
    return True


def measure(points: Points, subject: Subject, quantity: str, shape: Shape) -> None:
    """One value into `points`; a decode step gives the state's bytes too."""
    try:
        if quantity == "decode":
            seconds, size = decode(subject, shape)
            points.add(subject, "state bytes", shape, size)
        else:
            seconds = step_seconds(subject, shape, quantity)
    except Exception as error:  # whatever a mechanism raises: say which, and where
        raise ValueError(f"{subject.key} cannot be measured at n = {shape.n:,} ({quantity}): {error}") from error
    points.add(subject, quantity, shape, seconds)


def steps(points: Points, subjects: Sequence[Subject], rounds: int = 1) -> int:
    """How many times `calibrate` will call `tell`, at most."""
    more = lambda subject: rounds - max(1, points.rounds.get(subject, 0))  # noqa: E731
    return sum(len(tasks(each, points)) + max(0, more(each)) * len(wanted(each)) for each in (ALONE, *subjects))


def about_here() -> dict[str, object]:
    """The machine and the versions that times depend on."""
    report = bench.report([], Setting())
    return {"machine": report["machine"], "versions": report["versions"]}


if __name__ == "__main__":
    print(answer(sys.argv[1]))
