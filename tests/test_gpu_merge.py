"""The merge operator on a GPU, proven without one: tiles against plans, kernels interpreted, shapes on fakes.

bfloat16 is not interpreted: `tl.dot` of bfloat16 is wrong in the interpreter (triton#11584).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fake_gpu import fake_gpu
from merge_calls import Asked, asked, asked_by
from subquad.kernels import devices
from subquad.kernels.merge import aten, cpu, gpu, rectangles, reference, schedule
from subquad.supports.support import plan_of

interpreted = pytest.mark.skipif(not devices.has_triton(), reason=devices.MISSING)
MECHANISMS = (
    "strided",
    "bigbird",
    "axial",
    "composite-slice",
    "combiner-fixed",
    "combiner-window",
    "combiner-logsparse",
)


# ---- tiles ----


def seen_by_plan(plan, one: Asked) -> list[np.ndarray]:
    """How often each pair is seen, (rows, keys) per source, from the definition of the parts."""
    want = [np.zeros((one.rows, count), int) for count in one.keys]
    for part in plan.parts:
        at, key, allowed = part.queries.places(), reference.key_places(part, plan).numpy(), part.allowed()
        for a in range(part.queries.blocks):
            np.add.at(want[part.source], (at[a][:, None], key[a][None]), allowed[a % len(allowed)].astype(int))
    return want


def add_rectangle(total: np.ndarray, r: rectangles.Rectangle) -> None:
    rows, keys = r.q_start + np.arange(r.q_count) * r.q_unit, r.k_start + np.arange(r.k_count) * r.k_unit
    assert rows.min() >= 0 and keys.min() >= 0
    np.add.at(total, (rows[:, None], keys[None]), r.seen().astype(int))


def check_schedule(one: Asked, size: int) -> None:
    plan = plan_of(one.support, one.n, one.which)
    want = seen_by_plan(plan, one)
    by_query, by_key = ([np.zeros_like(x) for x in want] for _ in range(2))
    for taken in schedule.by_queries(plan, len(one.keys), size, size):
        for visited in taken.rectangles:
            for source, found in enumerate(visited):
                for r in found:
                    add_rectangle(by_query[source], r)
    for source, count in enumerate(one.keys):
        for taken in schedule.by_keys(plan, source, count, size, size):
            for (found,) in taken.rectangles:
                for r in found:
                    add_rectangle(by_key[source], r)
    for source, x in enumerate(want):
        assert (by_query[source] == x).all(), f"{one}: tiles of queries, source {source}"
        assert (by_key[source] == x).all(), f"{one}: tiles of keys, source {source}"


@pytest.mark.parametrize("n", [9, 33])
def test_tiles_hold_the_pairs_of_every_plan(n):
    calls = asked(n)
    assert len(calls) > 50
    for one in calls:
        check_schedule(one, 16)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 65, 79])
@pytest.mark.parametrize("size", [16, 64])
def test_tiles_hold_the_pairs_of_long_plans(n, size):
    for one in asked(n):
        check_schedule(one, size)


# ---- kernels ----


def tensors(one: Asked, batch=1, heads=2, key_heads=1, width=8, dtype=torch.float32, masked=True):
    draw = torch.Generator().manual_seed(one.rows)

    def normal(h, count):
        return torch.randn(batch, h, count, width, generator=draw).to(dtype)

    keys, values = ([normal(key_heads, count) for count in one.keys] for _ in range(2))
    valid = [torch.rand(batch, 1, count, generator=draw) > 0.2 for count in one.keys] if masked else []
    return normal(heads, one.rows), keys, values, valid


def check_kernels(one: Asked, dropout=0.0, lengths=None, tolerance=1e-5, **about) -> None:
    q, keys, values, valid = tensors(one, **about)
    rest = (valid, lengths, torch.tensor(77), one.support, one.which, one.n, q.shape[3] ** -0.5, dropout)
    exact = [q.float(), [k.float() for k in keys], [v.float() for v in values]]
    out, lse = reference.forward(*exact, *rest)
    got, got_lse = gpu.forward(q, keys, values, *rest)
    assert got.dtype == q.dtype and got_lse.dtype == torch.float32
    torch.testing.assert_close(got.float(), out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got_lse, lse, rtol=tolerance, atol=tolerance)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    want = reference.backward(grad.float(), *exact, out, lse, *rest)
    found = gpu.backward(grad, q, keys, values, got, got_lse, *rest)
    for number, (a, b) in enumerate(zip(found, want, strict=True)):
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance, msg=lambda m, i=number: f"{i}: {m}")


@interpreted
@pytest.mark.parametrize("name", MECHANISMS)
def test_kernels_equal_the_reference(name):
    """The plan of the mechanism that has most parts: grouped heads, a key mask, dropout for every other one."""
    one = max(asked_by(name, 33), key=lambda x: len(plan_of(x.support, x.n, x.which).parts))
    check_kernels(one, dropout=0.3 if len(name) % 2 else 0.0)


@interpreted
@pytest.mark.parametrize("name", MECHANISMS)
def test_half_precision_keeps_float32_statistics(name):
    """The plan of the mechanism that has fewest parts, and is so the quickest."""
    one = min(asked_by(name, 33), key=lambda x: len(plan_of(x.support, x.n, x.which).parts))
    check_kernels(one, dtype=torch.float16, masked=len(name) % 2 > 0, tolerance=5e-3)


@interpreted
def test_rows_of_their_own_length():
    one = next(x for x in asked_by("fixed", 33) if x.which == "0")
    check_kernels(one, batch=3, heads=1, masked=False, lengths=torch.tensor([33, 0, 12]))


@interpreted
def test_dropout_is_that_of_the_cpu():
    one = next(x for x in asked_by("longformer", 33))
    q, keys, values, _ = tensors(one, key_heads=2)
    rest = ([], None, torch.tensor(5), one.support, one.which, one.n, 0.3, 0.5)
    torch.testing.assert_close(gpu.forward(q, keys, values, *rest)[0], cpu.forward(q, keys, values, *rest)[0])


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    "n, dtype", [(9, torch.float32), (33, torch.float32), (65, torch.float32), (33, torch.float16)]
)
def test_kernels_equal_the_reference_for_every_plan(n, dtype):
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3}[dtype]
    for number, one in enumerate(asked(n)):
        about = {"dropout": 0.2 * (number % 2), "masked": number % 3 > 0, "key_heads": 1 + number % 2}
        check_kernels(one, dtype=dtype, tolerance=tolerance, **about)


# ---- torch's own kernels, on tensors without contents ----


def trace(one: Asked, dtype: torch.dtype, masked: bool) -> None:
    with fake_gpu() as moves:
        shape = (2, 4, one.rows, 20)
        q = torch.empty(shape, device="cuda", dtype=dtype)
        keys, values = ([torch.empty(2, 2, m, 20, device="cuda", dtype=dtype) for m in one.keys] for _ in range(2))
        valid = [torch.ones(2, 1, m, device="cuda", dtype=torch.bool) for m in one.keys] if masked else []
        rest = (valid, None, None, one.support, one.which, one.n, 0.3, 0.0)
        out, lse = aten.forward(q, keys, values, *rest)
        assert out.shape == shape and out.dtype == dtype and lse.shape == shape[:3] and lse.dtype == torch.float32
        grads = aten.backward(torch.empty_like(out), q, keys, values, out, lse, *rest)
        for g, x in zip(grads, (q, *keys, *values), strict=True):
            assert (g.shape, g.dtype, g.device) == (x.shape, x.dtype, x.device)
        assert not moves.found, f"{one}: {moves.found} move to the CPU"


@pytest.mark.parametrize("name", MECHANISMS)
def test_aten_route_traces_without_waiting(name):
    """Reading a value of a fake tensor raises, so that a trace that ends has never waited for the device."""
    for number, one in enumerate(asked_by(name, 33)[:6]):
        trace(one, (torch.float16, torch.float32)[number % 2], masked=number % 3 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_aten_route_traces_every_plan(dtype):
    for one in asked(33):
        for masked in (False, True):
            trace(one, dtype, masked)


# ---- routes ----


def test_routes_say_why():
    pytest.importorskip("triton", reason="triton is not installed")
    with devices.use("aten"):
        assert devices.route("merge", torch.float16, 64).impl == "aten"
        with pytest.raises(ValueError, match="draw their own dropout"):
            devices.route("merge", torch.float16, 64, dropout=0.1)
        with pytest.raises(ValueError, match="impl='aten' cannot run edges"):
            devices.route("edges", torch.float16, 64)
    assert devices.route("merge", torch.float64, 64) == ("reference", "float64 is computed in plain torch")
    with (
        pytest.raises(ValueError, match="impl must be one of auto, triton, aten, reference, not 'fast'"),
        devices.use("fast"),
    ):
        pass
