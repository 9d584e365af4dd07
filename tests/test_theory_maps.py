"""Assumption 2: the temperatures of appendix B on adversarial columns, and maps that obey it or do not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.probability import probability_map
from subquad.theory.maps import check_map, leads, temperature, trial_columns

MAPS = [
    ("softmax", {}),
    ("topk", {"topk": 1}),
    ("topk", {"topk": 3}),
    ("sparselin-gen", {"lam": 0.0}),
    ("sparselin-gen", {"lam": 0.9}),
    ("entmax", {"alpha": 1.0}),
    ("entmax", {"alpha": 1.5}),
    ("entmax", {"alpha": 2.0}),
    ("entmax", {"alpha": "learn", "num_heads": 2}),
    ("hardmax", {}),
]


@pytest.mark.parametrize(("name", "options"), MAPS)
def test_the_maps_of_the_library_obey_by_formula(name, options):
    verdict = check_map(probability_map(name, **options), 12)
    assert verdict.holds and verdict.proved and len(verdict.temperatures) == 15


@given(
    st.sampled_from(MAPS[:8]),
    st.floats(1e-3, 10),
    st.floats(1e-6, 1),
    st.lists(st.floats(0, 50), min_size=1, max_size=12),
    st.floats(0, 5),
)
def test_the_temperature_suffices_on_any_column(chosen, zeta, eta, below, extra):
    rho = probability_map(chosen[0], **chosen[1])
    column = torch.tensor([[zeta + extra, *(-x for x in below)]], dtype=torch.float64)
    t = temperature(rho, zeta, eta, column.shape[1])
    assert leads(rho, column, t)[0] >= 1 - eta - 1e-9


@pytest.mark.parametrize(("name", "options", "n"), [("softmax", {}, 12), ("topk", {"topk": 4}, 4)])
def test_the_softmax_temperature_is_the_least(name, options, n):
    """On the worst column, all others level below the maximum, the formula is an equality."""
    rho, zeta, eta = probability_map(name, **options), 0.3, 0.01
    column = torch.zeros(1, n, dtype=torch.float64)
    column[0, 2] = zeta
    t = temperature(rho, zeta, eta, n)
    assert leads(rho, column, t)[0] == pytest.approx(1 - eta, abs=1e-12)
    assert leads(rho, column, 0.99 * t)[0] < 1 - eta


def test_trial_columns_lead_by_zeta():
    for zeta in (1.0, 1e-3):
        top = trial_columns(9, zeta).topk(2).values
        assert (top[:, 0] - top[:, 1] >= zeta * (1 - 1e-9)).all()
        assert (top[:, 0] - top[:, 1] <= zeta * (1 + 1e-9)).any()


def test_a_map_of_ones_own_is_searched():
    good = check_map(lambda v: (3 * v).softmax(-1), 8)
    assert good.holds and not good.proved and "evidence" in good.why
    uniform = check_map(lambda v: torch.full_like(v, 1 / v.shape[-1]), 8)
    assert not uniform.holds and len(uniform.column) == 8
    leaky = check_map(lambda v: 0.9 * v.softmax(-1) + 0.1 / v.shape[-1], 8)
    assert not leaky.holds and "η = 0.001" in leaky.why  # good enough for η = 0.1, not below
    linear = check_map(
        lambda v: (v - v.amin(-1, keepdim=True) + 1) / (v - v.amin(-1, keepdim=True) + 1).sum(-1, keepdim=True), 8
    )
    assert not linear.holds


@pytest.mark.parametrize(
    ("rho", "message"),
    [
        (lambda v: v.exp(), "not a probability map"),
        (lambda v: torch.cat([-v.softmax(-1)[:, :1], v.softmax(-1)[:, 1:]], 1), "not a probability map"),
        (lambda v: v * float("nan"), "not a probability map"),
        (lambda v: v[:1], "keep the shape"),
        (lambda v: 1, "keep the shape"),
    ],
)
def test_maps_that_are_not_stochastic(rho, message):
    with pytest.raises(ValueError, match=message):
        check_map(rho, 6)


def test_bad_numbers():
    softmax = probability_map("softmax")
    for zeta, eta in ((0, 0.5), (1, 0), (1, 1.5)):
        with pytest.raises(ValueError, match="zeta > 0 and 0 < eta"):
            temperature(softmax, zeta, eta, 4)
    with pytest.raises(ValueError, match="at least 2"):
        check_map(softmax, 1)
