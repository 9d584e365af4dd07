"""Theorem 1 with the library's own layers: F.1, F.2, F.3, F.4, and the distance from a continuous function."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from subquad.layers import MultiheadAttention
from subquad.theory import approximate, prove, theorem1
from subquad.theory.construction import grid, quantisers, run
from subquad.theory.functions import FUNCTIONS, evaluate, named
from subquad.theory.network import clip_network, from_tokens, in_floats, quantiser, to_tokens, value_network, width
from subquad.theory.temperature import run_context, sufficient_temperature
from subquad.theory.theorem import choose_alpha, piecewise_error

OWN = [[[0, 1], [1], [2, 3], [3, 0]], [[0], [1, 2], [2], [3, 2]]]  # two families, γ is not the identity
RING = [[0, 1], [1, 2], [2, 3], [3, 0]]


def test_the_relu_quantiser_is_exact_outside_its_ramps():
    """F.1: g̃_q = g_q where every entry is in [kδ, (k+1-α)δ]; inside a ramp it is the printed formula."""
    plan, alpha = prove("star:w=1", 3, 2, "1/2").plan, 0.125
    generator = np.random.default_rng(0)
    corners = in_floats(grid(3, 2, 2, 2), 2) + np.array(plan.embedding, dtype=float)  # (64, 2, 3)
    network = quantiser(plan, quantisers(plan), alpha, 2)

    def rounded(places):
        with torch.no_grad():
            return from_tokens(network(to_tokens(corners + places / plan.m, 2)), 2)

    for places in (np.zeros(corners.shape), generator.random(corners.shape) * (1 - alpha)):
        assert np.abs(rounded(places) - corners).max() < 1e-12
    ramp = 1 - alpha + alpha * generator.random(corners.shape)
    formula = ramp + (1 - alpha) / alpha * (ramp - 1)  # t + φ̃_α(t), in multiples of δ
    assert np.abs(rounded(ramp) - (corners + formula / plan.m)).max() < 1e-12


@pytest.mark.parametrize("source", ["strided:w=2", "star:w=1", "full", "axial:cols=2,heads=multihead", RING], ids=str)
def test_softmax_error_falls_with_the_temperature(source):
    proof = prove(source, 4, 1, "1/2")
    enough = sufficient_temperature(proof.plan)
    rows = approximate(proof, [enough / 16, enough / 4, enough])
    errors = [row.context_error for row in rows]
    assert errors == sorted(errors, reverse=True) and errors[0] > 1
    assert errors[-1] <= 1 / 8 and rows[-1].d_p <= 1 / 16  # what the sufficient temperature promises
    assert rows[0].d_p > 1e3 * rows[-1].d_p


def test_the_layers_are_the_librarys_with_the_pattern_inside():
    proof = prove("strided:w=2", 4)
    network = theorem1(proof, samples=16).network
    layers = [module for module in network.modules() if isinstance(module, MultiheadAttention)]
    assert len(layers) == sum(1 for layer in network[1])
    assert {type(layer.attention).__name__ for layer in layers} == {"Strided"}
    assert {layer.attention.options.layer_index for layer in layers} == {0, 1}  # both families take part
    assert not any(isinstance(module, torch.nn.LayerNorm) for module in network.modules())
    assert all(p.dtype == torch.float64 for p in network.parameters())
    assert all(block.first_bias.numel() <= 4 for part in (0, 2, 3) for block in network[part])  # r = 4


@pytest.mark.parametrize(
    "spec", ["star:w=1,map=entmax,alpha=1.5", "star:w=1,map=sparselin-gen", "star:w=1,map=topk,topk=2"]
)
def test_other_maps_do_as_well(spec):
    proof = prove(spec, 3, 1, "1/3")
    low, high = approximate(proof, [0.5, sufficient_temperature(proof.plan, proof.support.map)])
    assert low.context_error > 1 and high.context_error <= 1 / 8


def test_the_printed_margin_is_too_large():
    """Scores differ by δ²/2, not δ/2: the temperature for the printed ζ leaves errors that the proof does not allow."""
    proof = prove("fixed:w=2", 2, 1, "1/3")
    plan, enough = proof.plan, sufficient_temperature(proof.plan)
    printed = enough * (1 / (4 * plan.m**2)) / (1 / (2 * plan.m))  # the same η with ζ = δ/2
    assert printed < enough
    assert approximate(proof, [printed])[0].context_error > approximate(proof, [enough])[0].context_error


def test_the_value_layers_catch_what_is_near_and_nothing_else():
    proof = prove("full", 3, 1, "1/3", "product")
    plan, D = proof.plan, width(proof.support, 1)
    network, exact = value_network(plan, proof.values, D), in_floats(proof.context, plan.unit)
    outputs = in_floats(proof.outputs, plan.unit)
    with torch.no_grad():
        for off in (0.0, 0.2 / plan.m, -0.2 / plan.m):  # within δ/4: the output is off by as much
            got = from_tokens(network(to_tokens(exact + off, D)), 1)
            assert np.abs(got - outputs - off).max() < 1e-6
        for off in (0.6 / plan.m, -0.6 / plan.m):  # between two ids
            lone = exact[-1:] + off
            assert np.abs(from_tokens(network(to_tokens(lone, D)), 1) - lone).max() < 1e-5


def test_clipping():
    x = torch.tensor([[[-7.0, 5.0], [0.25, -1.0], [1e9, 0.5]]], dtype=torch.float64)
    with torch.no_grad():
        clipped = clip_network(1, -1.0, 2.0, 2)(x)
    assert clipped[0, :, 0].tolist() == pytest.approx([-1.0, 0.25, 2.0], abs=1e-6)
    assert torch.equal(clipped[..., 1], x[..., 1])  # only the first row


# ---- from end to end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "n", "d", "delta", "function"),
    [
        ("star:w=1", 4, 1, "1/2", "sine"),
        ("strided:w=2", 4, 1, "1/2", "sort"),
        ("fixed:w=2", 2, 2, "1/2", "product"),
        ("axial:cols=2,heads=multihead", 4, 1, "1/2", "mean"),
        (RING, 4, 1, "1/2", "reverse"),
        ("full", 3, 1, "1/3", lambda x: np.exp(-np.asarray(x, dtype=float))),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_theorem_1(source, n, d, delta, function):
    proof = prove(source, n, d, delta, function)
    found = theorem1(proof, function, samples=64)
    assert found.holds, [str(stage) for stage in found.stages]
    assert found.total.value <= found.epsilon == pytest.approx(2 * found.lemma5.value)
    assert found.total.value <= found.lemma5.value + found.step3.value + 4 * (found.total.error + found.lemma5.error)
    assert found.step3.value <= found.epsilon / 2 and 0 < found.alpha <= 0.25
    assert found.finer[8 * proof.plan.m] < found.lemma5.value / 4  # Lemma 5: it goes to 0 with δ


def test_the_network_is_a_function_of_the_input_alone():
    """One point through the network by hand: X + E in, f of its corner out."""
    proof = prove("star:w=1", 3, 1, "1/2", "sort")
    network = theorem1(proof, "sort", samples=64).network
    x = np.array([[[0.7, 0.1, 0.9]]]) + np.array(proof.plan.embedding, dtype=float)
    with torch.no_grad():
        got = from_tokens(network(to_tokens(x, width(proof.support, 1))), 1)
    assert got[0, 0].tolist() == pytest.approx([0.0, 0.5, 0.5], abs=1e-6)


def test_causal_theorem_1():
    for spec in ("full", "star:w=1"):
        proof = prove(spec, 3, 1, "1/2", "wave", causal=True)
        found = theorem1(proof, "wave", samples=64)
        assert found.holds, [str(stage) for stage in found.stages]


def test_lemma_5_is_the_modulus_of_continuity():
    """f(x) = x: ‖f - f̄‖ is uniform on [0, δ) in every entry, so d_2 = δ √(nd/3)."""
    generator = np.random.default_rng(0)
    for m in (2, 5, 40):
        got = piecewise_error(lambda x: x, 3, 2, m, 2.0, 4000, generator)
        assert got.value == pytest.approx((6 / 3) ** 0.5 / m, abs=5 * got.error)
        assert got.largest <= 6**0.5 / m


def test_an_epsilon_of_ones_own():
    proof = prove("star:w=1", 2, 1, "1/2", "mean")
    assert theorem1(proof, "mean", epsilon=1.0, samples=64).holds
    coarse = theorem1(proof, "mean", epsilon=0.5, samples=64)
    assert not coarse.holds and not coarse.stages[0].holds and "is fine enough" in coarse.stages[0].detail
    needed = int(coarse.stages[0].detail.split("delta = 1/")[1].split()[0])
    assert theorem1(prove("star:w=1", 2, 1, Fraction(1, needed), "mean"), "mean", epsilon=0.5, samples=64).holds


def test_alpha_is_what_f4_asks_for():
    for epsilon, bound, entries, p in ((0.5, 3.0, 4, 2.0), (0.1, 10.0, 6, 1.0)):
        alpha = choose_alpha(epsilon, bound, entries, p)
        assert (1 - (1 - alpha) ** entries) * bound**p == pytest.approx((epsilon / 2) ** p / 2)
    assert choose_alpha(1.0, 0.0, 4, 2.0) <= 0.25  # a constant function
    with pytest.raises(ValueError, match="float64 resolves"):
        choose_alpha(1e-8, 1.0, 4, 2.0)


def test_a_constant_function():
    proof = prove("star:w=1", 3, 1, "1/2", lambda x: 0 * x + 2)
    found = theorem1(proof, lambda x: 0 * x + 2, samples=64)
    assert found.holds and found.total.value < 1e-6


def test_a_discontinuous_function_is_seen():
    """Lemma 5 needs continuity: for a step at 1/3 the error falls like √δ and the largest one not at all."""

    def step(x):
        return np.where(np.asarray(x, dtype=float) < 1 / 3, 0.0, 1.0)

    generator = np.random.default_rng(0)
    fine, finer = (piecewise_error(step, 2, 1, m, 2.0, 4000, generator) for m in (8, 32))
    assert finer.largest >= 1 and finer.value > fine.value / 4


# ---- bad input ----------------------------------------------------------------------------------------------------


def test_what_cannot_be_run_says_why():
    with pytest.raises(ValueError, match="float64"):
        approximate(prove(OWN, 4, 1, "1/2"), [1.0])
    with pytest.raises(ValueError, match="samples its graph"):
        approximate(prove("sbm:clusters=2", 3), [1.0])
    with pytest.raises(ValueError, match="there is no network"):
        theorem1(prove("fixed:w=2", 3))
    proof = prove("star:w=1", 3)
    for options, message in (({"epsilon": -1}, "epsilon is -1"), ({"p": 0.5}, "p is 0.5")):
        with pytest.raises(ValueError, match=message):
            theorem1(proof, **options)
    with pytest.raises(ValueError, match="alpha is 1"):
        quantiser(proof.plan, quantisers(proof.plan), 1.0, 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_named_functions_are_the_same_on_fractions_and_floats(name):
    x = np.array([[Fraction(1, 3), Fraction(3, 4), Fraction(1, 2)], [Fraction(0), Fraction(1, 7), Fraction(2, 3)]])
    from subquad.theory.functions import evaluate_exactly

    exact, floats = evaluate_exactly(named(name, False), x), evaluate(named(name, False), x.astype(float))
    assert exact.astype(float) == pytest.approx(floats, abs=1e-12) and exact.shape == (2, 3)


def test_the_exact_network_and_the_librarys_agree_on_the_context():
    proof = prove(RING, 4, 1, "1/2")
    t = sufficient_temperature(proof.plan)
    found = run_context(proof.support, proof.plan, proof.inputs, proof.context, t)
    exact = run(proof.plan, [], proof.context)
    assert np.abs(found.tokens - in_floats(exact, proof.plan.unit)).max() * proof.plan.m == pytest.approx(found.error)
