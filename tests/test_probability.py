"""The probability maps against their definitions, their edges and their errors."""

from __future__ import annotations

import copy
import math
import pickle

import entmax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.probability import MAPS, probability_map

NAN, INF = float("nan"), float("inf")

OPTIONS = {
    "softmax": ("softmax", {}),
    "topk": ("topk", {"topk": 3}),
    "sparsemax": ("sparselin-gen", {}),
    "sparselin-gen": ("sparselin-gen", {"lam": 0.4}),
    "entmax-1": ("entmax", {"alpha": 1}),
    "entmax-1.3": ("entmax", {"alpha": 1.3}),
    "entmax-1.5": ("entmax", {}),
    "entmax-2": ("entmax", {"alpha": 2}),
    "entmax-3": ("entmax", {"alpha": 3.0}),
    "entmax-learn": ("entmax", {"alpha": "learn", "num_heads": 2}),
    "hardmax": ("hardmax", {}),
}
every_map = pytest.mark.parametrize("case", OPTIONS)


def make(case: str):
    name, options = OPTIONS[case]
    return probability_map(name, **options)


def example(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def masked_example(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (2, 2, 5, 7) and a mask (5, 7) whose first row is empty and whose second allows one entry."""
    mask = example(5, 7, seed=seed + 1) > -0.5
    mask[0] = False
    mask[1] = torch.arange(7) == 3
    return example(2, 2, 5, 7, seed=seed, dtype=dtype), mask


# ---------------------------------------------------------------------------------------------- simplex


@settings(max_examples=40, deadline=None)
@given(
    case=st.sampled_from(sorted(OPTIONS)),
    rows=st.integers(1, 4),
    size=st.integers(1, 40),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]),
    density=st.sampled_from([0.0, 0.2, 0.8, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 10_000),
)
def test_weights_lie_on_the_simplex_of_the_allowed(case, rows, size, scale, density, dtype, seed):
    scores = example(1, 2, rows, size, seed=seed, dtype=dtype, scale=scale).requires_grad_()
    mask = torch.rand(2, rows, size, generator=torch.Generator().manual_seed(seed)) < density
    weights = make(case)(scores, mask)
    assert weights.dtype == dtype and weights.shape == scores.shape
    assert (weights >= 0).all()
    assert (weights[:, ~mask] == 0).all()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    expected = mask.any(-1).to(dtype).expand(1, -1, -1)
    torch.testing.assert_close(weights.sum(-1), expected, atol=tolerance, rtol=0)
    weights.square().sum().backward()
    assert scores.grad.isfinite().all()
    assert (scores.grad[:, ~mask] == 0).all()


@settings(max_examples=40, deadline=None)
@given(case=st.sampled_from(sorted(OPTIONS)), shift=st.floats(-50, 50), seed=st.integers(0, 10_000))
def test_a_shift_changes_nothing_and_a_permutation_commutes(case, shift, seed):
    scores, rho = example(1, 2, 9, seed=seed), make(case)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(rho(scores + shift), rho(scores), atol=1e-9, rtol=0)
    torch.testing.assert_close(rho(scores[..., order]), rho(scores)[..., order], atol=1e-12, rtol=0)


@every_map
def test_rows_of_one_entry_and_of_none(case):
    rho = make(case)
    assert torch.equal(rho(example(3, 2, 4, 1)), torch.ones(3, 2, 4, 1, dtype=torch.float64))
    assert rho(torch.zeros(3, 2, 4, 0)).shape == (3, 2, 4, 0)
    assert rho(torch.zeros(0, 2, 4, 5)).shape == (0, 2, 4, 5)


@every_map
def test_equal_scores(case):
    weights = make(case)(torch.full((1, 2, 6), 2.5, dtype=torch.float64))[0, 0]
    kept = {"topk": 3, "hardmax": 1}.get(case, 6)
    expected = (torch.arange(6) < kept).double() / kept
    torch.testing.assert_close(weights, expected, atol=1e-12, rtol=0)


# ------------------------------------------------------------------------------------------ definitions


def test_softmax_is_its_formula():
    scores = example(20, 8)
    expected = scores.exp() / scores.exp().sum(-1, keepdim=True)
    torch.testing.assert_close(probability_map("softmax")(scores), expected)
    torch.testing.assert_close(probability_map("entmax", alpha=1)(scores), expected)


@pytest.mark.parametrize("k", [1, 2, 5, 7, 8, 100])
def test_topk_is_a_softmax_over_the_first_k_of_the_sorted_allowed_entries(k):
    scores = example(2, 3, 12, seed=k).round()  # many ties
    mask = example(2, 3, 12, seed=k + 1) > -0.6
    weights = probability_map("topk", topk=k)(scores, mask)
    for row, allowed, got in zip(scores.view(-1, 12), mask.view(-1, 12), weights.view(-1, 12), strict=True):
        ranked = sorted((j for j in range(12) if allowed[j]), key=lambda j: (-row[j].item(), j))[:k]
        expected = torch.zeros(12, dtype=torch.float64)
        expected[ranked] = row[ranked].exp() / row[ranked].exp().sum()
        torch.testing.assert_close(got, expected)
        assert (got > 0).sum() == min(k, allowed.sum())


@settings(max_examples=50, deadline=None)
@given(lam=st.floats(0, 0.99), size=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_sparselin_gen_solves_its_quadratic_program(lam, size, seed):
    v = example(size, seed=seed).numpy()
    low, high = (
        v.min() - 1.0,
        v.max(),
    )  # the multiplier of sum p = 1, by bisection of the optimality conditions
    for _ in range(100):
        tau = (low + high) / 2
        low, high = (tau, high) if np.maximum(0, (v - tau) / (1 - lam)).sum() > 1 else (low, tau)
    weights = probability_map("sparselin-gen", lam=lam)(torch.from_numpy(v)).numpy()
    np.testing.assert_allclose(weights, np.maximum(0, (v - tau) / (1 - lam)), atol=1e-9)

    def objective(p):
        return ((p - v) ** 2).sum(-1) - lam * (p**2).sum(-1)

    others = np.random.default_rng(seed).dirichlet(np.full(size, 0.5), 200)
    assert (objective(others) >= objective(weights) - 1e-12).all()


@settings(max_examples=50, deadline=None)
@given(
    alpha=st.sampled_from([1.0001, 1.1, 1.5, 1.8, 2, 2.5, 4]),
    size=st.integers(1, 30),
    seed=st.integers(0, 10_000),
)
def test_entmax_meets_its_optimality_conditions(alpha, size, seed):
    v = example(size, seed=seed)
    p = probability_map("entmax", alpha=alpha)(v)
    # the slope of p.v + sum (p - p^alpha) / (alpha (alpha - 1)): one constant on the support, no more outside
    slope = v - p ** (alpha - 1) / (alpha - 1)
    support = p > 0
    assert slope[support].max() - slope[support].min() < 1e-9
    assert (v[~support] <= slope[support].min() + 1e-9).all()
    assert abs(p.sum() - 1) < 1e-12


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.9, 2, 3.5])
def test_entmax_agrees_with_the_entmax_package(alpha):
    ours = example(30, 25, seed=3).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    reference = {1.5: entmax.entmax15, 2: entmax.sparsemax}.get(alpha) or (
        lambda z: entmax.entmax_bisect(z, alpha, n_iter=100)
    )
    direction = example(30, 25, seed=4)
    p, q = probability_map("entmax", alpha=alpha)(ours), reference(theirs)
    torch.testing.assert_close(p, q, atol=1e-9, rtol=0)
    (p * direction).sum().backward()
    (q * direction).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-8, rtol=1e-6)


def test_the_sorting_and_the_bisecting_entmax_agree():
    scores = example(2, 2, 9, 30)
    exact = probability_map("entmax", alpha=1.5)(scores)
    torch.testing.assert_close(make("entmax-learn")(scores), exact, atol=1e-12, rtol=0)
    almost = probability_map("entmax", alpha=2 - 1e-12)(scores)
    torch.testing.assert_close(probability_map("sparselin-gen")(scores), almost, atol=1e-9, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entmax_tends_to_the_softmax(dtype):
    scores = example(20, 50, dtype=dtype)
    near = probability_map("entmax", alpha=1 + 1e-9)(scores)
    torch.testing.assert_close(near, scores.softmax(-1), atol=1e-6 if dtype == torch.float32 else 1e-8, rtol=0)


@pytest.mark.parametrize(("case", "tolerance"), [("sparsemax", 2e-3), ("entmax-1.3", 1e-5), ("entmax-1.5", 1e-5)])
def test_float32_keeps_its_digits_on_long_rows(case, tolerance):
    """One spike over 20,000 small weights, where the rounding of the threshold counts 20,000 times."""
    scores = example(20_000, dtype=torch.float32, scale=2e-5) - 0.5
    scores[0] = 0.0
    weights, expected = make(case)(scores).double(), make(case)(scores.double())
    assert abs(weights.sum() - 1) < 1e-6
    assert (weights - expected).abs().max() < tolerance * expected.max()


def test_hardmax_is_the_first_maximum_with_a_zero_gradient():
    scores = torch.tensor([[1.0, 3.0, 3.0], [NAN, 2.0, 2.0], [-INF, -INF, -7.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True], [False, True, True], [True, True, True]])
    weights = probability_map("hardmax")(scores, mask)
    assert weights.tolist() == [[0, 1, 0], [0, 1, 0], [0, 0, 1]]
    (weights * torch.arange(3)).sum().backward()
    assert torch.equal(scores.grad, torch.zeros(3, 3))


# -------------------------------------------------------------------------------------------- gradients


@every_map
def test_gradients_match_finite_differences(case):
    rho, (scores, mask) = make(case).double(), masked_example()
    scores, mask = scores[:1, :, [0, 2, 3], :5], mask[[0, 2, 3], :5]
    inputs = (scores.requires_grad_(), *rho.parameters())
    assert torch.autograd.gradcheck(lambda s, *_: rho(s, mask), inputs)
    if case != "hardmax":
        assert torch.autograd.gradgradcheck(lambda s, *_: rho(s, mask), inputs)


def test_the_gradient_reaches_alpha_without_one_for_the_scores():
    rho = make("entmax-learn")
    rho(example(1, 2, 5, dtype=torch.float32)).square().sum().backward()
    assert (rho.logit.grad != 0).all()


@pytest.mark.parametrize("logit", [-3.0, -8.0, -14.0, -200.0])
def test_the_gradient_in_alpha_keeps_its_digits_near_the_softmax(logit):
    scores, direction = example(1, 1, 12), example(1, 1, 12, seed=1)

    def gradient(dtype):
        rho = probability_map("entmax", alpha="learn", num_heads=1).to(dtype)
        torch.nn.init.constant_(rho.logit, logit)
        (rho(scores.to(dtype)) * direction.to(dtype)).sum().backward()
        slope = torch.sigmoid(rho.logit.detach().double()).item()
        return rho.logit.grad.item(), slope * (1 - slope)

    single, chain = gradient(torch.float32)
    double, _ = gradient(torch.float64)
    assert single == pytest.approx(double, rel=1e-4, abs=1e-30)
    if -20 < logit < -10:  # at alpha = 1 the derivative is p (E[log^2 p] - log^2 p) / 2
        p = scores.softmax(-1)
        limit = (direction * p * ((p * p.log() ** 2).sum() - p.log() ** 2) / 2).sum().item()
        assert double == pytest.approx(chain * limit, rel=1e-4)


@pytest.mark.parametrize("logit", [-4.0, -1.0, 0.0, 2.0, 6.0])
def test_the_gradient_in_alpha_agrees_with_the_entmax_package(logit):
    scores, direction = example(6, 1, 20), example(6, 1, 20, seed=1)
    rho = probability_map("entmax", alpha="learn", num_heads=1).double()
    torch.nn.init.constant_(rho.logit, logit)
    (rho(scores) * direction).sum().backward()
    theirs = torch.tensor([logit], dtype=torch.float64, requires_grad=True)
    alpha = (1 + theirs.sigmoid()).expand(6, 1, 1)
    (entmax.entmax_bisect(scores, alpha, n_iter=100) * direction).sum().backward()
    torch.testing.assert_close(rho.logit.grad, theirs.grad, atol=1e-10, rtol=1e-8)


def test_alpha_is_learned_per_head():
    target_alpha = torch.tensor([1.2, 1.8])
    scores = example(16, 2, 4, 10, dtype=torch.float32)
    target = torch.stack([probability_map("entmax", alpha=a)(scores[:, h]) for h, a in enumerate((1.2, 1.8))], 1)
    rho = make("entmax-learn")
    assert torch.equal(rho.alpha, torch.tensor([1.5, 1.5]))
    optimizer = torch.optim.Adam(rho.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        (rho(scores) - target).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(rho.alpha, target_alpha, atol=0.02, rtol=0)


# ------------------------------------------------------------------------------- masks, NaN and magnitudes


@every_map
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 3e38])
def test_what_stands_at_a_disallowed_place_is_harmless(case, garbage):
    rho, (clean, mask) = make(case), masked_example(dtype=torch.float32)
    dirty = clean.masked_fill(~mask, garbage).requires_grad_()
    clean.requires_grad_()
    grads = []
    for scores in (clean, dirty):
        weights = rho(scores, mask)
        assert torch.equal(weights[..., 0, :], torch.zeros(2, 2, 7))
        assert torch.equal(weights[..., 1, :], (torch.arange(7) == 3).float().expand(2, 2, 7))
        rho.zero_grad()
        (weights * example(5, 7, dtype=torch.float32)).sum().backward()
        grads.append([weights.detach(), scores.grad, *(p.grad.clone() for p in rho.parameters())])
    for expected, got in zip(*grads, strict=True):
        assert torch.equal(expected, got) and got.isfinite().all()
    assert (dirty.grad[..., ~mask] == 0).all()


@every_map
def test_minus_infinity_disallows_like_the_mask(case):
    rho, (scores, mask) = make(case), masked_example()
    hidden = scores.masked_fill(~mask, -INF)
    assert torch.equal(rho(hidden), rho(scores, mask))
    assert torch.equal(rho(hidden, torch.ones(7, dtype=torch.bool)), rho(scores, mask))


@every_map
@pytest.mark.parametrize("shape", [(7,), (1, 7), (5, 1), (2, 1, 1, 7), (2, 2, 5, 7), (1,)])
def test_masks_broadcast(case, shape):
    rho, scores = make(case), example(2, 2, 5, 7)
    mask = example(*shape, seed=8) > 0
    assert torch.equal(rho(scores, mask), rho(scores, mask.expand(2, 2, 5, 7).clone()))


@every_map
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_score_at_an_allowed_place_is_not_hidden(case, bad):
    scores = example(1, 2, 3, 6)
    expected = make(case)(scores)
    scores[0, 0, 1, 4] = bad
    weights = make(case)(scores)
    assert weights[0, 0, 1].isnan().any()
    weights[0, 0, 1] = expected[0, 0, 1]
    assert torch.equal(weights, expected)  # the other rows never notice


@every_map
@pytest.mark.parametrize("magnitude", [1e4, 1e30, 3e38])
def test_large_scores_stay_finite(case, magnitude):
    scores = torch.tensor([1.0, -1.0, 0.5, 0.9]).mul(magnitude).expand(1, 2, 4).clone().requires_grad_()
    weights = make(case)(scores)
    assert torch.equal(weights, torch.tensor([1.0, 0, 0, 0]).expand(1, 2, 4))
    weights.square().sum().backward()
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("alpha", [5.0, 20.0, 1000.0])
def test_a_large_alpha_stays_finite(alpha):
    scores = torch.cat([example(4, 300, dtype=torch.float32, scale=0.01), torch.zeros(4, 300)]).requires_grad_()
    weights = probability_map("entmax", alpha=alpha)(scores)
    torch.testing.assert_close(weights.sum(-1), torch.ones(8))
    torch.testing.assert_close(weights[4:], torch.full((4, 300), 1 / 300))
    (weights * example(8, 300, dtype=torch.float32)).sum().backward()
    assert scores.grad.isfinite().all()


@every_map
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reduced_precision_is_computed_in_float32(case, dtype):
    rho, (scores, mask) = make(case), masked_example()
    for p in rho.parameters():
        torch.nn.init.constant_(p, 0.75)  # exact in every dtype, its sigmoid is not
    low = scores.to(dtype).requires_grad_()
    single = low.detach().float().requires_grad_()
    direction = example(2, 2, 5, 7, seed=5, dtype=torch.float32).to(dtype)
    weights, expected = rho(low, mask), rho(single, mask)
    assert weights.dtype == dtype and torch.equal(weights, expected.to(dtype))
    (weights * direction).sum().backward()
    (expected * direction.float()).sum().backward()
    assert torch.equal(low.grad, single.grad.to(dtype))
    assert torch.equal(rho.to(dtype)(low, mask), weights)  # with parameters of that dtype too


@every_map
def test_non_contiguous_scores(case):
    scores = example(7, 5, 2, 2)
    assert torch.equal(make(case)(scores.permute(3, 2, 1, 0)), make(case)(scores.permute(3, 2, 1, 0).contiguous()))


# --------------------------------------------------------------------------------------- module behaviour


@pytest.mark.parametrize("case", sorted(set(OPTIONS) - {"entmax-1", "entmax-2", "entmax-3", "sparsemax"}))
def test_compiled_equals_eager(case):
    torch.compiler.reset()  # one code object serves every map, and dynamo limits the versions of one
    rho, (scores, mask) = make(case), masked_example(dtype=torch.float32)
    results = []
    for f in (rho, torch.compile(rho, fullgraph=True, backend="aot_eager")):
        leaf = scores.masked_fill(~mask, NAN).requires_grad_()
        rho.zero_grad()
        weights = f(leaf, mask)
        (weights * example(2, 2, 5, 7, seed=6, dtype=torch.float32)).sum().backward()
        results.append([weights.detach(), leaf.grad, *(p.grad.clone() for p in rho.parameters())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("method", ["sparsemax", "entmax15", "bisect"])
def test_the_entmax_operator_is_registered_soundly(method):
    scores = example(2, 4, 3).transpose(1, 2)  # the strides of the result are part of the check
    beta = torch.full((3, 1), {"sparsemax": 1.0, "entmax15": 0.5, "bisect": 0.3}[method], dtype=torch.float64)
    arguments = (scores - scores.amax(-1, keepdim=True)).requires_grad_(), beta.requires_grad_(), method
    results = torch.library.opcheck(torch.ops.subquad.entmax.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


def test_compiled_for_every_length():
    torch.compiler.reset()
    rho = make("entmax-learn")
    compiled = torch.compile(rho, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (2, 5, 17):
        scores = example(2, 2, 3, length, dtype=torch.float32)
        mask = torch.arange(length) != 1
        torch.testing.assert_close(compiled(scores, mask), rho(scores, mask))


@every_map
def test_copies_and_round_trips(case):
    rho, scores = make(case), example(2, 2, 5, 7)
    for p in rho.parameters():
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(0))
    fresh = make(case)
    fresh.load_state_dict(rho.state_dict())
    for other in (copy.deepcopy(rho), pickle.loads(pickle.dumps(rho)), fresh):
        assert torch.equal(other(scores), rho(scores))
        assert repr(other) == repr(rho)


def test_sparse_and_repr_say_what_the_map_is():
    described = {case: (make(case).sparse, repr(make(case))) for case in OPTIONS}
    assert described == {
        "softmax": (False, "Softmax()"),
        "topk": (True, "TopK(topk=3)"),
        "sparsemax": (True, "SparselinGen(lam=0.0)"),
        "sparselin-gen": (True, "SparselinGen(lam=0.4)"),
        "entmax-1": (False, "Entmax(alpha=1.0)"),
        "entmax-1.3": (True, "Entmax(alpha=1.3)"),
        "entmax-1.5": (True, "Entmax(alpha=1.5)"),
        "entmax-2": (True, "Entmax(alpha=2.0)"),
        "entmax-3": (True, "Entmax(alpha=3.0)"),
        "entmax-learn": (True, "LearnedEntmax(alpha=learn, num_heads=2)"),
        "hardmax": (True, "Hardmax()"),
    }


# ----------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"topk": k}, "topk is .* integer >= 1") for k in (0, -1, 2.0, True, "3", NAN)),
        *(({"num_heads": h}, "num_heads is .* integer >= 1") for h in (0, 1.5, True)),
        *(({"lam": lam}, "lam is .* 0 <= lam < 1") for lam in (1, 1.0, -0.1, NAN, INF, "0", None, False)),
        *(
            ({"alpha": a}, "alpha is .* finite number >= 1, or 'learn'")
            for a in (0.5, 0, -1, NAN, INF, "x", None, True)
        ),
    ],
)
@pytest.mark.parametrize("name", MAPS)
def test_bad_values_are_refused_whatever_the_map(name, options, message):
    with pytest.raises(ValueError, match=message):
        probability_map(name, **{"topk": 2, "num_heads": 2, **options})


def test_the_missing_and_the_unknown_are_refused():
    with pytest.raises(ValueError, match=r"name is 'sparsemax'; .* softmax, topk, sparselin-gen, entmax, hardmax"):
        probability_map("sparsemax")
    with pytest.raises(ValueError, match="topk is None; the map 'topk' needs an integer >= 1"):
        probability_map("topk")
    with pytest.raises(ValueError, match="num_heads is None; alpha='learn' needs the number of heads"):
        probability_map("entmax", alpha="learn")


@pytest.mark.parametrize("name", MAPS)
def test_options_of_other_maps_may_be_held(name):
    rho = probability_map(name, topk=np.int64(4), lam=np.float64(0.5), alpha=1.2, num_heads=3)
    assert rho(torch.zeros(3, 5)).sum().item() == pytest.approx(3)


def test_wrong_inputs_are_refused():
    rho, scores = probability_map("softmax"), torch.zeros(2, 3, 4)
    with pytest.raises(TypeError, match=r"scores are torch.int64; they must be float16"):
        rho(scores.long())
    with pytest.raises(ValueError, match="scores have no dimension"):
        rho(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"mask is torch.float32; it must be bool"):
        rho(scores, torch.zeros(4))
    for shape in ((3,), (2, 1), (5, 2, 3, 4), (1, 2, 3, 4)):
        with pytest.raises(ValueError, match=r"mask has shape .* must broadcast to the scores' \(2, 3, 4\)"):
            rho(scores, torch.ones(shape, dtype=torch.bool))
    for shape in ((4,), (2, 4), (2, 3, 5, 4)):
        with pytest.raises(ValueError, match=r"num_heads=2 needs \(B, 2, ..., S\)"):
            make("entmax-learn")(torch.zeros(shape))


def test_the_limits_named_in_the_errors_are_accepted():
    assert probability_map("topk", topk=1)(torch.zeros(3)).tolist() == [1, 0, 0]
    assert probability_map("sparselin-gen", lam=math.nextafter(1.0, 0.0))(torch.tensor([1.0, 2.0])).tolist() == [0, 1]
    assert not probability_map("entmax", alpha=1.0).sparse
