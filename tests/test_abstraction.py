"""Residual and attended abstractions: exact against the definition, and what they promise."""

from __future__ import annotations

import pytest
import torch

import subquad
from subquad.abstraction import Abstraction

KINDS = ("residual-max", "residual-mean", "attended", "residual-attended")


def make(kind, name="combiner-window", causal=True, **more):
    torch.manual_seed(0)
    sizes = {"combiner-window": {"span": 4, "window": 6, "sinks": 3}, "combiner-fixed": {"span": 4}}.get(name, {})
    a = subquad.attention(name, num_heads=4, head_dim=8, causal=causal, abstraction=kind, **sizes, **more).double()
    for parameter in a.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return a


def tokens(n=23, batch=2):
    torch.manual_seed(1)
    return [torch.randn(batch, heads, n, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind in KINDS for name in ("combiner-window", "combiner-fixed")),
        *((kind, name) for kind in KINDS[:2] for name in ("combiner-logsparse", "combiner-tree")),
    ],
)
def test_fast_is_the_definition(kind, name, causal):
    """Values and gradients, with fewer key heads, on padded rows."""
    a, (q, k, v) = make(kind, name, causal), tokens()
    real = torch.ones(2, 23, dtype=torch.bool)
    real[0, :5] = real[1, 20:] = real[1, 7] = False
    fast, dense = a(q, k, v, key_mask=real), a.dense(q, k, v, key_mask=real)
    seen = real[:, None, :, None]
    torch.testing.assert_close(fast * seen, dense * seen, atol=1e-9, rtol=1e-9)
    inputs, weight = [q, k, v, *a.parameters()], torch.randn_like(fast) * seen
    for one, other in zip(
        *(torch.autograd.grad(x, inputs, weight, allow_unused=True) for x in (fast, dense)), strict=True
    ):
        assert (one is None) == (other is None)
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_is_one_call(kind):
    a, (q, k, v) = make(kind), tokens(70)
    whole, state, parts = a(q, k, v), a.start(2, dtype=torch.float64), []
    with torch.no_grad():
        for start, stop in ((0, 50), (50, 51), (51, 70)):
            out, state = a.extend(*(x[:, :, start:stop] for x in (q, k, v)), state)
            parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2), whole, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("heads", [4, 2, 1], ids="{} key heads".format)
@pytest.mark.parametrize("kind", ["max", "mean", "residual-max", "attended", "residual-attended"])
def test_heads_that_share_a_summary(kind, heads):
    """Two heads ask together: the definition, streaming, and one summary where they share their key too."""
    a, (q, k, v) = make(kind, shared_heads=2), tokens(70)
    k, v = (x.repeat_interleave(2, 1)[:, :heads].detach() for x in (k, v))
    whole = a(q, k, v)
    torch.testing.assert_close(whole, a.dense(q, k, v), atol=1e-9, rtol=1e-9)
    mean = q.unflatten(1, (2, 2)).mean(2).repeat_interleave(2, 1)
    alone = make(kind).abstraction
    if kind in ("max", "mean", "attended"):  # the others have fewer maps
        torch.testing.assert_close(a.abstraction(q, k.repeat_interleave(4 // heads, 1))[0], alone(mean, k)[0])
    state, parts = a.start(2, dtype=torch.float64), []
    with torch.no_grad():
        for start, stop in ((0, 50), (50, 51), (51, 53), (53, 70)):
            out, state = a.extend(*(x[:, :, start:stop] for x in (q, k, v)), state)
            parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2), whole, atol=1e-9, rtol=1e-9)
    assert state.buffers["k"].shape[1] == (4 if heads == 4 else 2)


def test_a_state_keeps_what_a_future_query_can_use():
    """The window's keys, one summary per span, and the queries of the span that is not complete."""
    sizes = {"num_heads": 9, "head_dim": 4, "causal": True, "span": 32, "window": 256, "sinks": 4}
    a = subquad.attention("combiner-window", abstraction="attended", shared_heads=3, **sizes)
    q, k, v = (torch.randn(1, heads, 8192, 4) for heads in (9, 3, 3))
    with torch.no_grad():
        _, state = a.extend(q, k, v, a.start(1))
        assert state.nbytes <= (k.nbytes + v.nbytes) / 10
        for _ in range(40):  # a span more, the buffers have grown
            _, state = a.extend(*(x[:, :, :1] for x in (q, k, v)), state)
    assert state.nbytes <= (k.nbytes + v.nbytes) / 10


def test_shared_heads_divide_the_heads():
    with pytest.raises(ValueError, match="shared_heads must divide num_heads=4, not be 3"):
        make("mean", shared_heads=3)


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_residual_maps_begin_as_nothing(pool):
    options = {"num_heads": 4, "head_dim": 8, "causal": True, "span": 4, "window": 6}
    plain, residual = (
        subquad.attention("combiner-window", abstraction=x, **options) for x in (pool, f"residual-{pool}")
    )
    q, k, v = (x.float() for x in tokens())
    torch.testing.assert_close(residual(q, k, v), plain(q, k, v))


def test_a_sharp_summary_is_one_token():
    """The key and the value of a group become those of one token: then its effective weights are on that one."""
    a, (q, k, _) = make("attended", sharpness=1e6), tokens()
    far = a.weights(q, k)[:, :, -1, 4:12].unflatten(2, (2, 4))  # two spans, seen by the last query through summaries
    largest = far.amax(3) / far.sum(3)
    torch.testing.assert_close(largest, torch.ones_like(largest))
    soft = make("attended", sharpness=1e-6).weights(q, k)[:, :, -1, 4:8]
    torch.testing.assert_close(soft / soft.sum(-1, keepdim=True), torch.full_like(soft, 0.25), atol=1e-4, rtol=1e-4)


def test_calibrated_to_the_mean_query():
    abstraction = Abstraction("residual-attended", 8, 4, sharpness=16.0)
    q, k = torch.randn(1, 4, 12, 8), torch.randn(1, 2, 12, 8)
    mean = torch.randn(4, 8)
    abstraction.calibrate(mean)
    torch.testing.assert_close(abstraction(q, k)[0], q + 16 * mean[:, None])
    with pytest.raises(ValueError, match="it must be residual-attended"):
        Abstraction("mean", 8).calibrate(mean)


def test_only_plans_of_spans_attend():
    with pytest.raises(ValueError, match="abstraction must be one of"):
        subquad.attention("combiner-logsparse", num_heads=4, head_dim=8, abstraction="attended")
