"""Every registered mechanism passes every check of the contract."""

import subquad
from subquad.testing import parametrize_with_checks


@parametrize_with_checks(*subquad.available())
def test_contract(check):
    check()
