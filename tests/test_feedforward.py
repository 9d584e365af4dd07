"""The feed-forward layer in pieces: values, gradients and second derivatives of torch's operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from subquad.kernels import affine as products
from subquad.kernels import feedforward as module
from subquad.kernels.feedforward import feedforward
from subquad.models import SubquadConfig, SubquadForCausalLM
from subquad.models.blocks import FeedForward

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch has no oneDNN",
)


@pytest.fixture
def pieces(monkeypatch):
    """As if every product were large and the processor one where it pays; three rows at a time."""
    monkeypatch.setattr(products, "LEAST", 1)
    monkeypatch.setattr(products, "_has_faster", lambda: True)
    monkeypatch.setattr(module, "ROWS", 3)


def inputs(*shape: int, bias: bool = True) -> list[torch.Tensor | None]:
    draw = torch.Generator().manual_seed(0)
    e, f, g = shape[-1], 6, 5
    x, w1, b1, w2, b2 = (
        (0.5 * torch.randn(s, generator=draw)).requires_grad_() for s in (shape, (f, e), (f,), (g, f), (g,))
    )
    return [x, w1, b1 if bias else None, w2, b2 if bias else None]


def expected(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 4), (2, 4, 4), (1, 1, 4), (3, 4)])
def test_values_and_two_derivatives_are_those_of_torch(pieces, shape, bias):
    given = inputs(*shape, bias=bias)
    leaves = [t for t in given if t is not None]
    grad = torch.randn(*shape[:-1], 5, generator=torch.Generator().manual_seed(1))
    results = []
    for function in (feedforward, expected):
        out = function(*given)
        once = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        first = torch.autograd.grad(out, leaves, grad, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves, allow_unused=True)
        with torch.no_grad():
            results.append([out, function(*given), once, first, second])
    assert "FeedForward" in type(results[0][0].grad_fn).__name__
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), (0, 3)])
def test_gradients_of_some_inputs_only(pieces, wanted):
    given = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(inputs(2, 4, 4))]
    leaves = [given[i] for i in wanted]
    found = torch.autograd.grad(feedforward(*given).square().sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(expected(*given).square().sum(), leaves))


def test_strided_rows_and_expanded_gradients(pieces):
    x, *maps = inputs(2, 7, 4)
    turned = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    found = torch.autograd.grad(feedforward(turned, *maps).sum(), [turned, *maps])
    torch.testing.assert_close(found, torch.autograd.grad(expected(turned, *maps).sum(), [turned, *maps]))


def test_flops_are_those_of_torch(pieces):
    counts = []
    for function in (feedforward, expected):
        given = inputs(2, 4, 4)
        with FlopCounterMode(display=False) as counter:
            function(*given).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_other_dtypes_autocast_and_transforms_stay_with_torch(pieces):
    given = inputs(5, 4)
    assert "FeedForward" not in type(feedforward(*(t.double() for t in given)).grad_fn).__name__
    with torch.autocast("cpu"):
        assert feedforward(*given).dtype == torch.bfloat16
    rows = torch.func.vmap(lambda row: feedforward(row, *given[1:]))(given[0])
    torch.testing.assert_close(rows, expected(*given))


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu"])
def test_a_layer_is_the_same_with_either_library(pieces, monkeypatch, act):
    layer = FeedForward(SubquadConfig(hidden_size=16, num_attention_heads=2, intermediate_size=24, hidden_act=act))
    x, results = torch.randn(2, 9, 16), []
    for allowed in (True, False):
        monkeypatch.setattr(products, "_has_faster", lambda allowed=allowed: allowed)
        layer.zero_grad()
        out = layer(x)
        out.square().sum().backward()
        results.append([out, *(p.grad.clone() for p in layer.parameters())])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_part_that_was_hooked_is_called(pieces, which):
    layer, calls = FeedForward(SubquadConfig(hidden_size=16, num_attention_heads=2, intermediate_size=24)), []
    x = torch.randn(5, 16)
    layer[which].register_forward_hook(lambda *args: calls.append(1))
    torch.testing.assert_close(layer(x), F.linear(F.gelu(layer[0](x)), layer[2].weight, layer[2].bias))
    assert calls


@pytest.mark.parametrize("groups", [2, 1])
def test_a_model_is_the_same_with_either_library(pieces, monkeypatch, groups):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": groups, "intermediate_size": 24}
    torch.manual_seed(0)
    config = SubquadConfig(attention="combiner-fixed", num_hidden_layers=2, vocab_size=11, positions="rotary", **sizes)
    model, ids, results = SubquadForCausalLM(config), torch.randint(11, (2, 13)), []
    for allowed, checkpointing in ((True, False), (True, True), (False, False)):
        monkeypatch.setattr(products, "_has_faster", lambda allowed=allowed: allowed)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        else:
            model.gradient_checkpointing_disable()
        model.zero_grad()
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        results.append([output.logits, *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(results[1], results[2], rtol=1e-4, atol=1e-6)
