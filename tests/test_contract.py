"""Every registered mechanism passes every check of the contract."""

import pytest

import subquad
from subquad.attention.registry import mechanism
from subquad.testing import cases, parametrize_with_checks
from subquad.testing.behaviour import compiles


@parametrize_with_checks(*subquad.available())
def test_contract(check):
    check()


@pytest.mark.slow
@pytest.mark.parametrize("name", subquad.available())
def test_both_directions_compile_for_any_length(name):
    if reason := mechanism(name).exceptions.get("compiles"):  # which the contract holds it to
        pytest.skip(reason)
    for case in cases(name, **mechanism(name).examples[0]):
        compiles(case, any_length=True)
