"""The convolution of the values along the sequence: one pass, against torch's own and the band matrices."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subquad.kernels.convolution import _convolve, _convolve_filters, banded, convolve


def inputs(n: int, taps: int = 5, d: int = 3, kind=torch.float64):
    draw = torch.Generator().manual_seed(n)
    x, plus = torch.randn(2, 2, 3, n, d, generator=draw, dtype=kind)
    return x, torch.randn(3, taps, generator=draw, dtype=kind), plus


@pytest.mark.parametrize("n", [1, 2, 4, 63, 64, 65, 130])
@pytest.mark.parametrize("taps", [1, 5, 33])
def test_values_are_those_of_a_depthwise_convolution(n, taps):
    x, filters, plus = inputs(n, taps)
    expected = plus + F.conv2d(x, filters[:, None, :, None], padding=(taps // 2, 0), groups=3)
    torch.testing.assert_close(convolve(x, filters, plus), expected)
    torch.testing.assert_close(plus + banded(x, filters), expected)


def test_rows_may_stand_anywhere_and_the_result_stands_as_they_do():
    wide = torch.randn(2, 70, 3 * 8, generator=torch.Generator().manual_seed(0))
    x = wide.chunk(3, -1)[1].unflatten(-1, (2, 4)).transpose(1, 2)  # (2, 2, 70, 4): a part of a projection
    filters, plus = torch.randn(2, 7), torch.randn(2, 2, 70, 4)
    found = convolve(x, filters, plus)
    torch.testing.assert_close(found, convolve(x.contiguous(), filters, plus))
    assert found.transpose(1, 2).is_contiguous()
    turned = x.mT.contiguous().mT  # entries of a row apart
    torch.testing.assert_close(convolve(turned, filters, plus), found)


@pytest.mark.parametrize("n", [1, 7])
def test_first_and_second_derivatives(n):
    given = [x.requires_grad_() for x in inputs(n, 5, 2)]
    assert torch.autograd.gradcheck(convolve, given)
    assert torch.autograd.gradgradcheck(convolve, given)


def test_operators_pass_opcheck():
    x, filters, plus = (t.requires_grad_() for t in inputs(9))
    torch.library.opcheck(_convolve, (x, filters, plus))
    torch.library.opcheck(_convolve_filters, (x, plus, 5))


def test_an_empty_sequence():
    x = torch.zeros(1, 2, 0, 4)
    assert convolve(x, torch.ones(2, 3), x).shape == x.shape
