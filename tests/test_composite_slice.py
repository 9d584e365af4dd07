"""Composite Slice: what the contract does not already say about it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import subquad
from subquad.attention import call, composite_slice
from subquad.attention.slicing import Composer
from subquad.layers import MultiheadAttention, Projections
from subquad.positions import MultiScalePositions
from subquad.studies.slice_cost import best_slice_length, crossover, draw_slice_cost, linear_cost, slice_cost
from subquad.supports.slices import Slices
from subquad.testing import check_attention

NAN = float("nan")
VIPE = {"positions": "ms-vipe", "max_length": 80}
ABLATIONS = {
    "default": {},
    "extended": {"extension": 2},
    "fractional": {"extension": 1.5},
    "positions": VIPE,
    "extended positions": {"extension": 2, **VIPE},
    "parallel": {"composition": "parallel"},
    "global-local": {"composition": "global-local"},
    "mlp": {"local": "mlp"},
    "wide mlp": {"local": "mlp", "hidden": 20, **VIPE},
    "max": {"pool": "max"},
    "linear": {"pool": "linear"},
    "separate": {"share_weights": False},
    "three levels": {"slice_length": 4, "levels": 3, "extension": 3, **VIPE},
    "all at once": {
        "slice_length": 4,
        "levels": 4,
        "extension": 2,
        "composition": "global-local",
        "pool": "linear",
        "share_weights": False,
    },
}
both = pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
ablation = pytest.mark.parametrize("name", ABLATIONS)


def layer(causal: bool = False, heads: int = 2, width: int = 8, **options) -> MultiheadAttention:
    torch.manual_seed(0)
    options = {"slice_length": 8, **options}
    made = MultiheadAttention(width, heads, batch_first=True, attention="composite-slice", causal=causal, **options)
    for name, p in made.named_parameters():  # biases, positions and pools away from their quiet start
        if p.dim() == 1 or "positions" in name:
            nn.init.normal_(p)
    return made.double().eval()


def tokens(n: int, batch: int = 2, width: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixed(m: MultiheadAttention, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The layer before its output projection."""
    return fast(m, x, x, x, mask)


def fast(m, query, key, value, mask=None):
    return m.attention.attend_tokens(query, key, value, Projections(m), mask)[0]


def same(m: MultiheadAttention, n: int, mask: torch.Tensor | None = None) -> None:
    """Fast path and definition agree, values and gradients of inputs and parameters."""
    x = tokens(n).requires_grad_()
    targets = [x, *m.parameters()]
    direction = tokens(n, seed=7)
    results = []
    for out in (fast(m, x, x, x, mask), m.attention.dense_tokens(x, x, x, Projections(m), mask)):
        grads = torch.autograd.grad(out, targets, direction, allow_unused=True)
        results.append([out, *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, targets, strict=True))])
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 1e-9 * max(1.0, b.abs().max().item())


# ---- against the definition, and the definition against the paper ----------------------------------------


@both
@pytest.mark.parametrize("extension", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 8, 16, 32, "n"])
def test_fast_path_is_the_definition(length, extension, causal):
    n = 37
    size = n if length == "n" else length
    if (extension - 1) * size % 2:  # the reach of an odd slice is whole for α = 1 and 3 only
        with pytest.raises(ValueError, match="extension"):
            layer(causal, slice_length=size, extension=extension)
        return
    mask = torch.arange(n) < torch.tensor([[n], [n - 9]])
    for options in ({}, VIPE):
        same(layer(causal, slice_length=size, extension=extension, **options), n, mask if options else None)


@both
@ablation
def test_ablations_are_their_definition(name, causal):
    m = layer(causal, **ABLATIONS[name])
    place = torch.arange(45)
    hole = torch.stack([(place < 15) | (place >= 33), place >= 10])  # slices of nothing but padding
    for n, mask in ((1, None), (8, None), (45, hole)):
        same(m, n, mask)


@both
@ablation
def test_fewer_key_heads_are_their_definition(name, causal):
    m = layer(causal, heads=4, num_kv_heads=2, **{"max_length": 80, **ABLATIONS[name]})
    mask = torch.stack([torch.arange(21) != 9, torch.arange(21) >= 5])
    same(m, 21, mask)
    assert len(m.attention.weights(*[tokens(21)] * 3, Projections(m))) == m.attention.options.levels
    if causal:
        state, x, outs = m.start(2), tokens(21), []
        for first, last in ((0, 2), (2, 20), (20, 21)):
            y, state = m.extend(x[:, first:last], state, key_mask=mask[:, first:last])
            outs.append(y)
        torch.testing.assert_close(torch.cat(outs, 1)[mask], m.out_proj(mixed(m, x, mask))[mask])


@settings(max_examples=60)
@given(data=st.data())
def test_any_length_reach_and_mask(data):
    size = data.draw(st.integers(1, 9))
    reach = data.draw(st.integers(0, size))
    options = {
        "slice_length": size,
        "extension": 1 + 2 * reach / size,
        "levels": data.draw(st.integers(2, 4)),
    }
    options |= data.draw(st.sampled_from([{}, VIPE]))
    options["composition"] = data.draw(st.sampled_from(["local-global", "parallel", "global-local"]))
    n = data.draw(st.integers(1, 40))
    mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=2, max_size=2)))
    same(layer(data.draw(st.booleans()), **options), n, data.draw(st.sampled_from([None, mask])))


def by_hand(m: MultiheadAttention, x: torch.Tensor, size: int, causal: bool) -> torch.Tensor:
    """Two scales, α = 1, n a multiple of L: masks on full matrices, the strict mask and the shifted query."""
    n, project, scale = x.shape[1], Projections(m), m.head_dim**-0.5
    t = torch.arange(n) // size
    i, j = torch.arange(n)[:, None], torch.arange(n)
    q, k, v = project.together(x, x, x)
    seen = (t[:, None] == t) & ((j <= i) | (not causal))
    local = ((q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
    z = local.unflatten(1, (-1, size)).mean(2)
    q, k, v = project.together(z, z, z)
    if not causal:
        return local + ((q @ k.mT * scale).softmax(-1) @ v).transpose(1, 2).flatten(2)[:, t]
    q = q.roll(1, 2)  # slice t asks with the query of slice t-1
    strict = torch.ones(n // size, n // size).tril(-1).bool()
    weights = (q @ k.mT * scale).masked_fill(~strict, -torch.inf).softmax(-1).nan_to_num()  # slice 0: nothing
    return local + (weights @ v).transpose(1, 2).flatten(2)[:, t]


@both
@pytest.mark.parametrize("size", [1, 4, 8, 24])
def test_both_agree_with_the_paper_written_out(size, causal):
    m, x = layer(causal, slice_length=size), tokens(24)
    expected = by_hand(m, x, size, causal)
    assert torch.allclose(mixed(m, x), expected, atol=1e-12)
    assert torch.allclose(m.attention.dense_tokens(x, x, x, Projections(m)), expected, atol=1e-12)


@both
def test_three_levels_are_two_levels_over_slices(causal):
    fine, three = layer(causal, slice_length=4), layer(causal, slice_length=4, levels=3)
    x = tokens(30)
    local = fine.attention.weights(x, x, x, Projections(fine))[0] @ Projections(fine).values(x)
    local = local.transpose(1, 2).flatten(2)  # (B, n, E)
    z = torch.stack([piece.mean(1) for piece in local.split(4, 1)], 1)
    coarse = mixed(fine, z[:, :-1] if causal else z)
    coarse = F.pad(coarse, (0, 0, 1, 0)) if causal else coarse
    assert torch.allclose(mixed(three, x), local + coarse[:, torch.arange(30) // 4], atol=1e-12)


def test_queries_keys_and_values_of_different_tokens():
    q, k, v = (tokens(21, seed=s) for s in range(3))
    for composition in ("local-global", "parallel", "global-local"):
        m = layer(extension=2, composition=composition, **VIPE)
        quick, slow = fast(m, q, k, v), m.attention.dense_tokens(q, k, v, Projections(m), None)
        assert torch.allclose(quick, slow, atol=1e-12)
        assert not torch.allclose(quick, mixed(m, q))


# ---- causality and padding --------------------------------------------------------------------------------


@ablation
def test_nothing_leaks_from_the_future(name):
    m, n = layer(True, **ABLATIONS[name]), 21
    x = tokens(n, batch=1).requires_grad_()
    out = mixed(m, x)
    for t in range(1, n):
        moved = x.detach().clone()
        moved[:, t:] += 3
        assert torch.equal(mixed(m, moved)[:, :t], out[:, :t])
        (grad,) = torch.autograd.grad(out[:, :t].sum(), x, retain_graph=True)
        assert not grad[:, t:].any()


@both
@ablation
def test_padding_is_as_if_it_were_not_there(name, causal):
    m, x = layer(causal, **ABLATIONS[name]), tokens(29)
    longer = F.pad(x, (0, 0, 0, 14), value=NAN)
    mask = (torch.arange(43) < 29).expand(2, 43)
    assert torch.allclose(mixed(m, longer, mask)[:, :29], mixed(m, x), atol=1e-12)


@both
@pytest.mark.parametrize("side", ["left", "right", "interior"])
def test_padded_slots_reach_nothing(side, causal):
    n = 43
    place = torch.arange(n)
    real = {"left": place >= 11, "right": place < 30, "interior": (place < 6) | (place >= 25)}[side]
    mask = torch.stack([torch.ones_like(real), real])
    m = layer(causal, extension=2, **VIPE)
    base = mixed(m, tokens(n), mask)
    spoilt = tokens(n).masked_fill(~mask[..., None], NAN).requires_grad_()
    out = mixed(m, spoilt, mask)
    assert torch.equal(out[mask], base[mask])
    assert out.isfinite().all()
    (grad,) = torch.autograd.grad(out.sum(), spoilt)
    assert grad.isfinite().all() and not grad[~mask].any()
    assert torch.allclose(mixed(m, tokens(n)[1:], mask[1:])[0, real], out[1, real], atol=1e-12)


@both
@ablation
def test_nothing_but_padding_gives_zero(name, causal):
    m = layer(causal, **ABLATIONS[name])
    assert not mixed(m, tokens(21), torch.zeros(2, 21, dtype=torch.bool)).any()


# ---- weights, support, picture ----------------------------------------------------------------------------


@both
def test_weights_of_both_scales_make_the_output(causal):
    m, x = layer(causal, extension=2), tokens(21)
    mask = torch.arange(21) < torch.tensor([[21], [14]])
    project, t = Projections(m), torch.arange(21) // 8
    clean = x.masked_fill(~mask[..., None], 0)
    local, coarse = m.attention.weights(x, x, x, project, key_mask=mask)
    assert local.shape == (2, 2, 21, 21) and coarse.shape == (2, 2, 3, 3)
    fine = (local @ project.values(clean)).transpose(1, 2).flatten(2)
    kept = fine * mask[..., None]
    counts = torch.stack([c.sum(1) for c in mask.split(8, 1)], 1).clamp(min=1)
    z = torch.stack([c.sum(1) for c in kept.split(8, 1)], 1) / counts[..., None]
    out = fine + (coarse @ project.values(z)).transpose(1, 2).flatten(2)[:, t]
    assert torch.allclose(out[mask], mixed(m, x, mask)[mask], atol=1e-12)
    for w in (local, coarse):
        total = w.sum(-1)
        assert (w >= 0).all() and torch.allclose(total, (total > 0).double())
    assert (coarse[0, 0] > 0).equal(torch.ones(3, 3).tril(-1).bool() if causal else torch.ones(3, 3).bool())


def test_an_mlp_has_no_weights():
    x = tokens(21)
    m = layer(True, local="mlp")
    local, coarse = m.attention.weights(x, x, x, Projections(m))
    assert local is None and coarse.shape == (2, 2, 3, 3)
    m = layer(True)
    assert m.attention.weights(x[:, :5], x[:, :5], x[:, :5], Projections(m))[1].eq(torch.zeros(2, 2, 1, 1)).all()


@both
@ablation
def test_picture_and_support(name, causal):
    n, m = 21, layer(causal, **ABLATIONS[name])
    picture, support = m.attention.picture(n), m.attention.support(n)
    assert ((picture > 0) == support).all()
    direct = torch.zeros(n, n, dtype=torch.bool)
    o = m.attention.options
    for p in Slices(causal=causal, size=o.slice_length, reach=o.reach).plan(n, "main").parts:
        seen = torch.from_numpy(p.allowed())
        for a, (rows, keys) in enumerate(zip(p.queries.places(), p.keys.places(), strict=True)):
            direct[rows[:, None], keys] |= seen[0 if len(seen) == 1 else a]
    assert ((picture == 1) == direct).all()
    x = tokens(n, batch=1).requires_grad_()
    out = mixed(m, x)
    reached = torch.stack([torch.autograd.grad(out[0, i].sum(), x, retain_graph=True)[0][0].any(-1) for i in range(n)])
    assert (reached <= support).all()
    if o.pool != "max":
        assert (reached == support).all()


# ---- positions ---------------------------------------------------------------------------------------------


def test_linear_pooling_is_a_convolution():
    layer = subquad.attention("composite-slice", num_heads=2, head_dim=3, slice_length=4, pool="linear").double()
    with torch.no_grad():
        layer.pools[0].add_(torch.randn(layer.pools[0].shape, dtype=torch.float64))  # (L, E, E)
    x = torch.randn(2, 12, 6, dtype=torch.float64)
    kernel = layer.pools[0].permute(2, 1, 0) / 4  # (E out, E in, L)
    expected = nn.functional.conv1d(x.mT, kernel, stride=4).mT
    for pooled in (Composer(layer, None)._pool(x, real, 0) for real in (None, x[..., 0] < 9)):
        torch.testing.assert_close(pooled, expected)


def count(m: nn.Module) -> int:
    return sum(p.numel() for p in m.parameters())


def test_parameter_counts():
    full = count(MultiheadAttention(64, 4))
    make = lambda **o: MultiheadAttention(64, 4, attention="composite-slice", slice_length=8, **o)  # noqa: E731
    assert count(make()) == full
    assert count(make(levels=4, composition="parallel", pool="max", extension=3)) == full
    assert count(make(share_weights=False)) == full + 3 * 64 * 64
    assert count(make(pool="linear")) == full + 8 * 64 * 64, "a convolution of kernel and stride L"
    assert count(make(local="mlp", hidden=32)) == full + 2 * 8 * 32
    for extension, n in ((1, 1024), (2, 1024), (3, 1000)):
        positions = make(positions="ms-vipe", extension=extension, max_length=n).attention.positions
        assert count(positions) == (extension * 8 + n // 8) * 64
        assert count(positions) < n * 64


def test_positions_are_shared_by_the_layers_of_a_model():
    first, second = layer(**VIPE), layer(**VIPE)
    second.attention.share_positions(first.attention)
    model = nn.ModuleList([first, second])
    assert count(model) == 2 * count(layer()) + (8 + 10) * 8
    twin = copy.deepcopy(model)
    assert twin[0].attention.positions is twin[1].attention.positions is not first.attention.positions
    with pytest.raises(ValueError, match="shapes"):
        layer(extension=2, **VIPE).attention.share_positions(first.attention)
    with pytest.raises(ValueError, match="ms-vipe"):
        layer().attention.share_positions(first.attention)


def test_positions_touch_queries_and_keys_only():
    m = layer(extension=2, **VIPE)
    x = tokens(30)
    before = mixed(m, x)
    with torch.no_grad():
        for p in m.attention.positions.parameters():
            p.add_(1.0 + torch.arange(len(p))[:, None])
    assert not torch.allclose(mixed(m, x), before)
    with torch.no_grad():
        m.in_proj_weight[: 2 * 8].zero_()  # no queries, no keys: nothing tells places apart
    plain = layer(extension=2)
    plain.load_state_dict({k: v for k, v in m.state_dict().items() if "positions" not in k})
    assert torch.allclose(mixed(m, x), mixed(plain, x), atol=1e-12)


def test_positions_end_at_the_maximum_length_or_stretch():
    with pytest.raises(ValueError, match="max_length=80"):
        mixed(layer(**VIPE), tokens(81))
    m = layer(interpolate=True, **VIPE)
    assert mixed(m, tokens(200)).shape == (2, 200, 8)
    same(m, 100)
    m.load_state_dict(layer(**VIPE).state_dict())
    assert torch.equal(mixed(m, tokens(80)), mixed(layer(**VIPE), tokens(80)))
    table = MultiScalePositions(4, local=8, slices=3, interpolate=True)
    stretched = table(1, 5)
    assert torch.allclose(stretched[::2], table.globe)
    assert torch.allclose(stretched[1], (table.globe[0] + table.globe[1]) / 2)
    with pytest.raises(ValueError, match="4 slices are beyond the 3"):
        MultiScalePositions(4, local=8, slices=3)(1, 4)


def test_causal_queries_stand_at_the_last_positions():
    """α = 3, causal: of the 3L rows of P_l the slice has the last L, its left extension the L before."""
    m, x = layer(True, extension=3, **VIPE), tokens(21)
    before = mixed(m, x)
    with torch.no_grad():
        m.attention.positions.local[0][:8] += 1
        assert torch.equal(mixed(m, x), before)
        m.attention.positions.local[0][8:16] += torch.randn(8, 8).double()
        after = mixed(m, x)
    assert torch.equal(after[:, :8], before[:, :8])
    assert (after[:, 8:16] != before[:, 8:16]).any(-1).all()


# ---- the rest of the contract on variants ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "extension": 2, "positions": "ms-vipe", "max_length": 256},
        {"causal": False, "local": "mlp", "pool": "linear", "levels": 3},
    ],
)
def test_contract_on_variants(options):
    checks = [
        "compiles",
        "any_layout_and_dtype",
        "copies_and_seeds",
        "no_state_between_calls",
        "dropout_is_fair",
    ]
    check_attention("composite-slice", only=checks, slice_length=8, **options)


def test_a_pickled_layer_is_the_same_layer():
    m = layer(True, extension=2, share_weights=False, **VIPE)
    assert torch.equal(mixed(pickle.loads(pickle.dumps(m)), tokens(21)), mixed(m, tokens(21)))


def test_it_is_a_layer():
    a = subquad.attention("composite-slice", num_heads=2, head_dim=4)
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(TypeError, match="MultiheadAttention"):
        a(q, q, q)
    with pytest.raises(TypeError, match="project"):
        a.weights(q, q)
    m, x = layer(), tokens(9)
    with pytest.raises(TypeError, match="need_weights=False"):
        m(x, x, x)
    assert m(x, x, x, need_weights=False)[1] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slice_length": 0}, "slice_length must be an integer ≥ 1"),
        ({"extension": 3.5}, "extension must be a number ≥ 1 and ≤ 3"),
        ({"slice_length": 5, "extension": 2}, "extension must make"),
        ({"positions": "absolute"}, "positions must be one of none, ms-vipe"),
        ({"positions": "ms-vipe"}, "max_length is needed"),
        ({"interpolate": True}, "interpolate=True needs positions=ms-vipe"),
        ({"composition": "series"}, "composition must be one of local-global, parallel, global-local"),
        ({"local": "conv"}, "local must be one of attention, mlp"),
        ({"local": "mlp", "extension": 2}, "extension must be 1 with local=mlp"),
        ({"hidden": 8}, "hidden=8 needs local=mlp"),
        ({"causal": True, "local": "mlp", "hidden": 4}, "hidden must be ≥ slice_length=8"),
        ({"pool": "median"}, "pool must be one of mean, max, linear"),
        ({"levels": 1}, "levels must be an integer ≥ 2"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        layer(**options)


def test_wrong_tokens_are_refused():
    m, x = layer(), tokens(9)
    with pytest.raises(ValueError, match="length 9 and k has length 5"):
        m(x, x[:, :5], x[:, :5], need_weights=False)
    other = MultiheadAttention(8, 2, kdim=6, vdim=8, batch_first=True, attention="composite-slice").double()
    with pytest.raises(ValueError, match="key must have the shape of query"):
        other(x, x[..., :6], x, need_weights=False)


# ---- the study of section A.4 ------------------------------------------------------------------------------


@given(n=st.integers(64, 1 << 20), extension=st.sampled_from([1.0, 2.0, 3.0]))
def test_the_rule_for_the_slice_length_is_the_minimum(n, extension):
    best = best_slice_length(n, extension)
    assert all(slice_cost(n, best, extension) <= slice_cost(n, best * f, extension) for f in (0.8, 0.99, 1.01, 1.25))


def test_slices_are_cheaper_than_linear_up_to_the_crossover():
    n = crossover(32, 128)
    assert n == 32**2 * 96
    assert slice_cost(n, 32) == linear_cost(n, 128)
    assert slice_cost(n - 1, 32) < linear_cost(n - 1, 128)
    assert crossover(64, 64) == 0


def test_the_plot_is_drawn(tmp_path):
    path = draw_slice_cost(tmp_path / "new" / "cost.png", slice_lengths=(8, 32), abstractions=(64,))
    assert path.read_bytes().startswith(b"\x89PNG")


# ---- rows of similar length together ----


@both
@ablation
def test_a_padded_batch_in_groups_of_similar_length_is_the_definition(name, causal, monkeypatch):
    monkeypatch.setattr(call, "LEAST", 1)
    calls = []
    together = call.put_together
    monkeypatch.setattr(composite_slice, "put_together", lambda *a: calls.append(a) or together(*a))
    m = layer(causal, **ABLATIONS[name])
    lengths = torch.tensor([7, 70, 0, 33, 64, 12, 1])
    place, first = torch.arange(70), torch.tensor([3, 0, 0, 20, 0, 0, 69])[:, None]
    mask = (place >= first) & (place < first + lengths[:, None])
    mask[4, 10:20] = False  # a hole
    x = torch.randn(7, 70, 8, dtype=torch.double)
    x[~mask] = NAN  # never reaches anything
    x.requires_grad_()
    y = torch.where(mask[..., None], x.detach(), 0.0).requires_grad_()
    found = fast(m, x, x, x, mask)
    expected = m.attention.dense_tokens(y, y, y, Projections(m), mask)
    assert len(calls) == 1 and torch.allclose(found, expected, atol=1e-10)
    grad = torch.randn_like(found)
    parameters = [p for p in m.parameters() if p is not m.out_proj.weight and p is not m.out_proj.bias]
    ours = torch.autograd.grad(found, [x, *parameters], grad, allow_unused=True)
    theirs = torch.autograd.grad(expected, [y, *parameters], grad, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, atol=1e-9))


def test_groups_are_made_only_where_they_pay():
    x = torch.empty(8, 1024, 512)
    lengths = torch.linspace(512, 1024, 8).long()
    groups = call.length_groups(lengths, x)
    assert [group.longest for group in groups] == [1024, 877, 731, 585]
    assert sorted(torch.cat([group.rows for group in groups]).tolist()) == list(range(8))
    assert not call.length_groups(torch.full((8,), 1000), x), "nothing would be spared"
    assert not call.length_groups(lengths, x[:, :, :8]), "a small batch"
    assert not call.length_groups(None, x)


@pytest.mark.parametrize("n", [1, 7])
def test_the_limits_of_slices_are_full_attention_and_something_more(n):
    """Footnote 7: full attention over XW_v beside XW_v for L = 1; beside one vector for all tokens for L = N."""
    x = tokens(n)

    def projected(m, of):
        return F.linear(of, m.in_proj_weight, m.in_proj_bias).chunk(3, -1)

    def full(m, of):  # (B, n, D), two heads side by side
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in projected(m, of))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    m = layer(slice_length=1)
    values = projected(m, x)[2]
    torch.testing.assert_close(mixed(m, x), values + full(m, values))
    m = layer(slice_length=n)
    local = full(m, x)
    torch.testing.assert_close(mixed(m, x), local + projected(m, local.mean(1, keepdim=True))[2])
