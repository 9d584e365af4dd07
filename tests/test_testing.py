"""The shipped contract finds what is wrong, in any mechanism, and is strict about exceptions."""

import pytest
import torch

import subquad
from subquad.testing import ContractError, check_attention
from test_options import Mean


@pytest.fixture
def registered():
    names = []

    def add(cls):
        name = f"trial-{cls.__name__.lower()}"
        subquad.register(name)(cls)
        names.append(name)
        return name

    yield add
    for name in names:
        subquad.unregister(name)


class Leaky(subquad.Attention):
    """Claims to be causal and is the mean of everything."""

    capabilities = subquad.Capabilities(bidirectional=False, padding=False)

    def attend(self, q, k, v, key_mask):
        return v.mean(2, keepdim=True).expand_as(q)

    def define(self, q, k, key_mask):
        weights = torch.ones(*q.shape[:3], k.shape[2], dtype=q.dtype).tril()
        return weights / weights.sum(-1, keepdim=True)


class Excused(Leaky):
    exceptions = {"causal_by_value_and_gradient": "known to leak", "copies_and_seeds": "no reason at all"}


class PaddingLeak(subquad.Attention):
    """Forgets the key mask in its normaliser."""

    def attend(self, q, k, v, key_mask):
        scores = (q @ k.mT * self.options.softmax_scale).softmax(-1)
        return scores @ v

    def define(self, q, k, key_mask):
        scores = q @ k.mT * self.options.softmax_scale
        return (
            scores.masked_fill(~key_mask[:, None, None], -torch.inf).softmax(-1)
            if key_mask is not None
            else scores.softmax(-1)
        )


def test_a_leak_is_found(registered):
    with pytest.raises(ContractError) as error:
        check_attention(registered(Leaky), only=["fast_equals_dense", "causal_by_value_and_gradient"])
    assert "fast_equals_dense: AssertionError: value at n=2" in str(error.value)
    assert "token 1 changes an earlier output" in str(error.value)


def test_a_padding_leak_is_found(registered):
    name = registered(PaddingLeak)
    for check in ("fast_equals_dense", "padding_is_invisible"):
        with pytest.raises(ContractError, match=check):
            check_attention(name, only=[check], causal=False)


def test_exceptions_are_strict(registered):
    name = registered(Excused)
    check_attention(name, only=["causal_by_value_and_gradient"])
    with pytest.raises(ContractError, match="no reason at all"):
        check_attention(name, only=["copies_and_seeds"])


def test_an_honest_mechanism_passes(registered):
    check_attention(registered(Mean))


def test_unknown_checks_are_refused():
    with pytest.raises(ValueError, match="no check is called nonsense"):
        check_attention("full", only=["nonsense"])
