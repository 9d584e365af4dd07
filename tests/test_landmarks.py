"""Gathering to landmarks, spreading from them and the pseudo-inverse: the kernels of a CPU against plain torch."""

from __future__ import annotations

import pytest
import torch

import subquad
from subquad.kernels.landmarks import gather, op, pseudo_inverse, reference, spread
from subquad.layers import MultiheadAttention, Projections

EXACT = {"atol": 1e-9, "rtol": 1e-9}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def side_by_side(n: int, width: int, seed: int) -> torch.Tensor:
    """(2, 3, n, width), heads beside each other in memory."""
    return draw(2, n, 3 * width, seed=seed).unflatten(2, (3, width)).transpose(1, 2).requires_grad_()


def same(found, expected, inputs) -> None:
    torch.testing.assert_close(found, expected, **EXACT)
    grad = draw(*expected.shape, seed=9)
    pair = [torch.autograd.grad(out, inputs, grad) for out in (found, expected)]
    torch.testing.assert_close(*pair, **EXACT)


@pytest.mark.parametrize("n", [1, 2, 47, 48, 49, 101])
def test_gather_and_spread_are_those_of_torch(n):
    scores, v, read = side_by_side(n, 8, 0), side_by_side(n, 4, 1), draw(2, 3, 8, 4, seed=2).requires_grad_()
    assert op.takes(scores, v)
    same(gather(scores, v), reference.gather(scores, v), [scores, v])
    for taps in (None, 1, 5, 33):
        filters = None if taps is None else draw(3, taps, seed=3).requires_grad_()
        inputs = [scores, read] if filters is None else [scores, read, v, filters]
        same(spread(scores, read, v, filters), reference.spread(scores, read, v, filters), inputs)


def test_widths_without_vectors_are_left_to_torch():
    scores, v = side_by_side(9, 3, 0), side_by_side(9, 4, 1)
    assert not op.takes(scores, v)
    same(gather(scores, v), reference.gather(scores, v), [scores, v])


def test_large_scores_stay_finite():
    scores, v = (1e4 * side_by_side(50, 8, 0)).detach().float(), side_by_side(50, 8, 1).detach().float()
    for out in (gather(scores, v), spread(scores, gather(scores, v), v, None)):
        assert out.isfinite().all()


@pytest.mark.parametrize("m", [4, 8, 12, 5])
def test_the_pseudo_inverse_is_that_of_torch(m):
    a = draw(2, 3, m, m).softmax(-1)
    a[..., -1, :] = 0  # a landmark that does not exist
    a[..., -1] = 0
    a.requires_grad_()
    for iterations in (1, 6):
        same(pseudo_inverse(a, iterations), reference.pseudo_inverse(a, iterations), [a])


def test_operators():
    scores, v, a = side_by_side(9, 8, 0), side_by_side(9, 4, 1), draw(2, 8, 8, seed=2).softmax(-1)
    calls = [
        (op.gather_op, scores, v),
        (op.spread_op, scores, draw(2, 3, 8, 4).requires_grad_(), v, draw(3, 5).requires_grad_()),
        (op.inverse_op, a.requires_grad_(), 2),
    ]
    for function, *arguments in calls:
        assert set(torch.library.opcheck(function, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [9, 64, 67])
def test_a_layer_that_maps_tokens_to_scores_is_the_layer_that_projects(batch, bias, n):
    layer = MultiheadAttention(16, 2, attention="nystrom:landmarks=8,conv=5", batch_first=True, bias=bias).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    x, results = draw(batch, n, 16).requires_grad_(), []
    for folded in (True, False):
        if folded:
            out = layer(x, x, x, need_weights=False)[0]
        else:
            heads = layer.attention.dense(*Projections(layer).together(x, x, x))
            out = layer.out_proj(heads.transpose(1, 2).flatten(2))
        results.append([out, *torch.autograd.grad(out, [x, *layer.parameters()], draw(*out.shape, seed=5))])
    torch.testing.assert_close(*results, **EXACT)


def test_there_is_no_second_derivative():
    module = subquad.attention("nystrom", num_heads=2, head_dim=8)
    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    (first,) = torch.autograd.grad(module(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        first.sum().backward()
