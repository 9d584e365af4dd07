"""Checks of streaming: any split is one call, a state is a value and grows as declared, bad input does not harm it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.testing.behaviour import refuses
from subquad.testing.case import Case, NotApplicable, close, gradient_names, gradients, masks

LONGEST = 72  # sizes that are left open follow from it: spans of about 8
LEAST = 16  # what a state keeps beside what is named, at least


def streams_in_any_split(case: Case) -> None:
    """A sequence in chunks of any sizes gives what one call gives, values and gradients, with every kind of padding."""
    if not _can(case):
        raise NotApplicable
    module, n, seed = make(case), 57, torch.tensor(5)
    draw = random.Random(zlib.crc32(f"{case.spec}{case.options}".encode()))
    for mask in (None, masks(n)) if case.able.padding else (None,):
        xs = [x.requires_grad_() for x in case.inputs(n, batch=2 if mask is None else len(mask))]
        sizes = split(n, draw)
        got, _ = stream(case, module, xs, sizes, mask, seed=seed, rollback=0)
        want = one_call(case, module, xs, mask, seed)
        if mask is not None:  # what stands at padding is nobody's business
            got, want = (x * case.spread(mask).to(x) for x in (got, want))
        what = f"in chunks of {sizes}, {'no' if mask is None else 'every kind of'} padding"
        close(got, want, 1e-9, f"value {what}")
        if mask is None:  # without gradients states are written in place, the first of many tokens at once
            with torch.no_grad():
                other, _ = stream(case, module, xs, (n - 8, 1, 2, 5), seed=seed, rollback=0)
            close(other, want, 1e-9, "value in chunks without gradients")
        pairs = zip(gradients(got, xs, module), gradients(want, xs, module), strict=True)
        for name, (a, b) in zip(gradient_names(case, module), pairs, strict=True):
            close(a, b, 1e-9, f"gradient of {name} {what}")
    if case.able.padding:
        _streams_behind_padding(case, module, seed)


def _streams_behind_padding(case: Case, module: Any, seed: Tensor) -> None:
    """The first chunks of all rows may be nothing but padding."""
    xs, mask = case.inputs(20), torch.arange(20).expand(2, 20) >= 7
    with torch.no_grad():
        got, state = stream(case, module, xs, (1, 4, 9, 6), mask, seed=seed)
        close(case.rows(got, mask), case.rows(one_call(case, module, xs, mask, seed), mask), 1e-9, "behind padding")
    assert state.length.tolist() == [13, 13], f"state.length behind padding is {state.length.tolist()}"


def state_is_a_value(case: Case) -> None:
    """crop: as if it had never been longer; reorder and repeat: as if rows had always stood there."""
    if not _can(case):
        raise NotApplicable
    module, seed = make(case), torch.tensor(5)
    uneven = torch.ones(2, 40, dtype=torch.bool)
    uneven[1, :3] = False  # rows of different lengths
    mask = uneven if case.able.padding else None
    begun, other = case.inputs(40), case.inputs(9, seed=7)
    with torch.no_grad():
        _, state = stream(case, module, begun, (21, 19), mask, seed=seed, rollback=8)
        assert state.length.tolist() == [40, 37 if mask is not None else 40], f"state.length is {state.length.tolist()}"

        def go_on(state: Any, rows: Sequence[int] = (0, 1)) -> Tensor:
            return stream(case, module, [x[list(rows)] for x in other], (4, 5), state=state.clone())[0]

        def fresh(length: int, rows: Sequence[int] = (0, 1)) -> Tensor:
            """The same rows, begun at once up to slot `length`."""
            xs = [_cut(case, x[list(rows)], 0, length) for x in begun]
            own = None if mask is None else mask[list(rows), :length]
            return go_on(stream(case, module, xs, (length,), own, seed=seed)[1], rows)

        for back in (1, 8):
            close(go_on(state.crop(state.length - back)), fresh(40 - back), 1e-9, f"after a crop of {back} tokens")
        _, whole = stream(case, module, begun, (21, 19), mask, seed=seed, rollback=None)
        for back in (1, 33):
            close(go_on(whole.crop(whole.length - back)), fresh(40 - back), 1e-9, f"after a crop of {back}, recomputed")
        behind = whole.crop(whole.length - torch.tensor([31, 4])).repeat(2).crop(torch.tensor([7, 9, 30, 33]))
        close(go_on(behind, (0, 0, 1, 1))[:1], fresh(7)[:1], 1e-9, "after two crops, recomputed")
        slots = 33 if mask is None else 36
        close(go_on(behind, (0, 0, 1, 1))[3:], fresh(slots, (1, 1))[1:], 1e-9, "after two crops, recomputed")
        uneven = state.crop(state.length - torch.tensor([2, 0]))
        close(go_on(uneven)[:1], fresh(38)[:1], 1e-9, "after a crop of one row")
        close(go_on(uneven)[1:], fresh(40)[1:], 1e-9, "after a crop of another row")
        close(
            go_on(state.crop(0)),
            go_on(module.start(2, dtype=torch.float64, seed=seed)),
            1e-9,
            "after a crop to nothing",
        )
        for rows in ((1, 0), (1, 1, 0)):
            close(go_on(state.reorder(torch.tensor(rows)), rows), fresh(40, rows), 1e-9, f"after reorder({rows})")
        close(go_on(state.repeat(2), (0, 0, 1, 1)), fresh(40, (0, 0, 1, 1)), 1e-9, "after repeat(2)")


def state_grows_as_declared(case: Case) -> None:
    """The bytes of a state are those of `kept_keys(n)` keys, values and queries, doubled at most when buffers grow."""
    if not _can(case):
        raise NotApplicable
    module = make(case, torch.float32, longest=1024)
    core = case.core(module)
    for n in (256, 1024):
        with torch.no_grad():
            state = stream(case, module, case.inputs(n, torch.float32, batch=1), (n,), rollback=0)[1]
        token = 3 * 4 * case.heads * max(case.width, core.kept_width)
        limit = 2 * token * (core.kept_keys(n) + 4 * LEAST + 16)
        assert state.nbytes <= limit, f"a state of {n} tokens has {state.nbytes:,} bytes, declared {limit:,.0f}"


def streaming_refuses_bad_input(case: Case) -> None:
    """A wrong state, crop or length raises, names what is wrong, and leaves the state as it was."""
    if not _can(case):
        module = case.make()
        refuses("stream", lambda: module.start(2))
        return
    module, xs, seed = make(case), case.inputs(12), torch.tensor(5)
    with torch.no_grad():
        _, state = stream(case, module, xs, (12,), seed=seed)
        before, length = {k: x.clone() for k, x in state.buffers.items()}, state.length.clone()
        others = {
            "batch": lambda: module.extend(*case.inputs(1, batch=3), state),
            "dtype": lambda: module.to(torch.float32).extend(*case.inputs(1, torch.float32), state),
            "cpu": lambda: module.extend(*case.inputs(1), state.to("meta")),
            "State": lambda: module.extend(*case.inputs(1), None),
            "max_length": lambda: module.extend(*case.inputs(LONGEST), state) if sized(case) else _raise("max_length"),
            "length": lambda: state.crop(13),
            "index": lambda: state.reorder(torch.tensor([2])),
            "times": lambda: state.repeat(0),
            "batch_size": lambda: module.start(0),
            "rollback": lambda: module.start(1, rollback=-1),
        }
        if not case.is_layer:
            few = [x[:, : 1 if name > 0 else None] for name, x in enumerate(case.inputs(1))]
            others["heads"] = lambda: module.extend(*few, state)
        for name, call in others.items():
            refuses(name, call)
            module.to(torch.float64)
        same = all(torch.equal(x, state.buffers[k]) for k, x in before.items())
        assert same and torch.equal(length, state.length), "an error has changed the state"


# ---- what the checks share ----------------------------------------------------------------------------------


def _can(case: Case) -> bool:
    return case.causal and case.able.streaming


def sized(case: Case) -> bool:
    return "max_length" not in case.options


def make(case: Case, dtype: torch.dtype = torch.float64, longest: int = LONGEST) -> Any:
    return case.make(dtype, **({"max_length": longest} if sized(case) else {}))


def split(n: int, draw: random.Random) -> tuple[int, ...]:
    """Chunks of any sizes, single tokens among them."""
    sizes: list[int] = []
    while sum(sizes) < n:
        sizes.append(min(n - sum(sizes), draw.choice((1, 1, 2, 3, 7, 15, 16, 17, 30))))
    return tuple(sizes)


def stream(
    case: Case,
    module: Any,
    inputs: Sequence[Tensor],
    sizes: Sequence[int],
    mask: Tensor | None = None,
    *,
    state: Any = None,
    **about: Any,
) -> tuple[Tensor, Any]:
    """The outputs of the chunks, side by side, and the last state."""
    state = module.start(len(inputs[0]), dtype=inputs[0].dtype, **about) if state is None else state
    outs, first = [], 0
    for size in sizes:
        own = None if mask is None else mask[:, first : first + size]
        pieces = [_cut(case, x, first, first + size) for x in inputs]
        out, state = module.extend(*pieces, state, key_mask=own)
        outs.append(out)
        first += size
    return torch.cat(outs, case.time), state


def one_call(case: Case, module: Any, inputs: Sequence[Tensor], mask: Tensor | None, seed: Tensor) -> Tensor:
    return case.run(module, inputs, mask) if case.is_layer else module(*inputs, key_mask=mask, seed=seed)


def _cut(case: Case, x: Tensor, first: int, last: int) -> Tensor:
    return x.narrow(case.time, first, last - first)


def _raise(name: str) -> Callable:
    raise ValueError(f"{name}: sizes are given")
