"""`subquad study slice-rank`: degrees, ranks and entropies behind Propositions 1 and 2 of Composite Slice."""

import numpy as np
import pytest
import torch

from subquad.studies.slice_rank import (
    attend,
    contained,
    degrees,
    global_matrix,
    least_degree,
    random_slices,
    random_weights,
    shared_gap,
    study,
)


def test_the_least_degree_of_known_functions():
    nodes = np.cos(np.pi * (np.arange(256) + 0.5) / 256)
    assert least_degree(np.stack([nodes**3 - nodes, 0 * nodes + 2], 1), 1e-9) == 3
    assert least_degree(np.ones((256, 1)), 1e-9) == 0
    exp = np.exp(nodes)[:, None]  # coefficients 2 I_k(1): the seventh is the first below 1e-5
    assert [least_degree(exp, tolerance) for tolerance in (1e-1, 1e-3, 1e-6)] == [2, 4, 7]
    with pytest.raises(ValueError, match="too large"):
        least_degree(np.sign(nodes)[:, None], 1e-6)


def test_attention_is_the_papers():
    generator = torch.Generator().manual_seed(0)
    x, weights = random_slices(8, 4, 3, generator), random_weights(3, generator)
    q, k, v = (x @ w for w in weights)
    assert torch.allclose(attend(x, weights), (q @ k.mT).softmax(-1) @ v)


def test_degrees_grow_with_the_digits_and_stay_below_four_times():
    generator = torch.Generator().manual_seed(1)
    slices = random_slices(16, 4, 4, generator)
    local, coarse = random_weights(4, generator), random_weights(4, generator)
    epsilons = (1e-2, 1e-4, 1e-8)
    plain, composed = (np.array(degrees(slices, local, coarse, c, epsilons)) for c in (False, True))
    assert (np.diff(plain) > 0).all() and (np.diff(composed) > 0).all()
    assert (composed <= 4 * plain).all()
    assert plain[2] - plain[1] <= 3 * (plain[1] - plain[0])  # like log 1/ε, not like a power of 1/ε


def test_ranks_are_the_same_and_only_the_entropy_differs():
    plain, composed = (global_matrix(c, n=32, length=4, width=8, seed=0) for c in ("parallel", "local-global"))
    assert plain.rank == composed.rank == 8  # the number of slices
    assert plain.largest_block_rank == composed.largest_block_rank == 1
    assert plain.entropy == pytest.approx(np.log(4)) and plain.spread < 1e-12
    assert composed.entropy < np.log(4) - 0.05


def test_each_h_is_a_cs_with_weights_of_its_own_and_not_with_shared_ones():
    generator = torch.Generator().manual_seed(2)
    assert contained(random_slices(16, 4, 4, generator), random_weights(4, generator)) < 1e-12
    assert min(shared_gap(points=41)) > 0.05
    assert shared_gap(weight=1.0, points=41) == pytest.approx((0.0, 0.0), abs=1e-12)  # w = w²: there they meet


def test_the_study_as_a_whole():
    result = study(2)
    assert result["smallest_ratio"] <= result["largest_ratio"] < 4
    assert len(result["matrices"]) == 4 and result["contained"] < 1e-12
