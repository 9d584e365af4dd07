"""The baselines beyond the contract: formulas against plain loops, stabilisers, redrawing, kernel sums, bad options."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import subquad
from subquad.attention.base import Call
from subquad.attention.performer import gaussian_orthogonal
from subquad.kernels.fourier import fourier_mix
from subquad.kernels.linear import kernel_sums
from subquad.kernels.linear.reference import kernel_weights, normalised
from subquad.kernels.selected.op import selected
from subquad.supports.longshort import LongShort

close = torch.testing.assert_close


def inputs(n: int, d: int = 4, heads: int = 2, batch: int = 1, seed: int = 0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, n, d, generator=draw, dtype=torch.float64).to(dtype) for _ in range(3)]


def make(spec: str, d: int = 4, heads: int = 2, **options):
    torch.manual_seed(0)
    return subquad.attention(spec, num_heads=heads, head_dim=d, **options).double().eval()


# ---- kernel sums ----


@given(
    n=st.sampled_from([1, 2, 63, 64, 65, 130]),
    causal=st.booleans(),
    scaled=st.booleans(),
    normalise=st.booleans(),
    seed=st.integers(0, 99),
)
def test_kernel_sums_are_the_matrix_of_scores(n, causal, scaled, normalise, seed):
    draw = torch.Generator().manual_seed(seed)
    a, b, v = (torch.rand(1, 2, n, f, generator=draw, dtype=torch.float64).requires_grad_() for f in (5, 5, 3))
    scales = None
    if causal and scaled:  # steps of up to 40: e^-40 and less must be exact too
        scales = (torch.rand(1, 2, n, generator=draw, dtype=torch.float64) * 40).cumsum(-1)
    weights = kernel_weights(a, b, scales, causal=causal)
    slow = (normalised(weights) if normalise else weights) @ v
    fast = kernel_sums(a, b, v, scales, causal=causal, normalise=normalise)
    close(fast, slow, rtol=1e-10, atol=1e-10)
    direction = torch.randn(slow.shape, generator=draw, dtype=torch.float64)
    for x, y in zip(*(torch.autograd.grad(out, (a, b, v), direction) for out in (fast, slow)), strict=True):
        close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_kernel_sums_pass_opcheck(causal):
    a, b, v = (torch.rand(2, 9, f, requires_grad=True) for f in (5, 5, 3))
    scales = torch.rand(2, 9).cumsum(-1) if causal else None
    results = torch.library.opcheck(torch.ops.subquad.kernel_sums.default, (a, b, v, scales, causal, True, False))
    assert set(results.values()) == {"SUCCESS"}


def test_fourier_mix_passes_opcheck_and_is_its_own_derivative():
    x = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    arguments = (x, torch.tensor([7, 0, 5]))
    results = torch.library.opcheck(torch.ops.subquad.fourier_mix.default, arguments)
    assert set(results.values()) == {"SUCCESS"}
    assert torch.autograd.gradcheck(fourier_mix, arguments)


def test_kernel_sums_refuse_a_second_derivative():
    a = torch.rand(1, 1, 4, 3, requires_grad=True)
    (first,) = torch.autograd.grad(kernel_sums(a, a, a, causal=True).sum(), a, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        first.sum().backward()


def test_sums_of_half_precision_are_kept_in_float32():
    n = 4096  # a running sum in float16 would stop growing at 2048
    ones = torch.ones(1, 1, n, 1, dtype=torch.float16)
    out = kernel_sums(ones, ones, ones, causal=True, normalise=False)
    assert out.dtype == torch.float16 and out.flatten().tolist() == list(range(1, 2049)) + out.flatten()[2048:].tolist()
    assert out[0, 0, -1].item() == n


# ---- linear ----


def test_linear_is_a_recurrence():
    q, k, v = inputs(70)
    out = make("linear", causal=True)(q, k, v)
    state, total = torch.zeros(1, 2, 4, 4, dtype=q.dtype), torch.zeros(1, 2, 4, dtype=q.dtype)
    for t in range(70):
        a, b = F.elu(q[:, :, t]) + 1, F.elu(k[:, :, t]) + 1
        state, total = state + b[..., None] * v[:, :, t, None], total + b
        close(out[:, :, t], (a[:, :, None] @ state)[:, :, 0] / (a * total).sum(-1, keepdim=True))


def test_features_do_not_round_to_nothing():
    """elu(-40) + 1 is 0 when the 1 is added last."""
    q, k, v = inputs(3, dtype=torch.float32)
    module = subquad.attention("linear", num_heads=2, head_dim=4)
    close(module(torch.full_like(q, -30.0), torch.zeros_like(k), v), v.mean(2, keepdim=True).expand_as(v))


# ---- performer ----


def test_performer_estimates_softmax_attention():
    """The mean error over draws falls with the number of features; orthogonal ones are no worse."""
    q, k, v = (x / 2 for x in inputs(24, d=8))
    exact = F.scaled_dot_product_attention(q, k, v)
    error = {}
    for features, orthogonal in ((16, True), (256, True), (256, False), (4096, True)):
        module = make("performer", d=8, features=features, orthogonal=orthogonal, epsilon=0.0)
        found = []
        for seed in range(8):
            module.redraw(seed)
            found.append((module(q, k, v) - exact).square().mean().sqrt())
        error[features, orthogonal] = torch.stack(found).mean().item()
    assert error[4096, True] < 0.3 * error[256, True] < 0.3 * error[16, True]
    assert error[256, True] <= error[256, False] * 1.1
    assert error[4096, True] < 0.01


@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
@pytest.mark.parametrize("causal", [False, True])
def test_performer_is_its_formula(epsilon, causal):
    q, k, v = inputs(6)
    module = make("performer", features=5, epsilon=epsilon, causal=causal)
    omega, out = module.projection, module(q, k, v)
    x, y = q * 4**-0.25, k * 4**-0.25
    raw_q = x @ omega.mT - x.square().sum(-1, keepdim=True) / 2
    raw_k = y @ omega.mT - y.square().sum(-1, keepdim=True) / 2
    for h in range(2):
        for i in range(6):
            weights = []
            for j in range(i + 1 if causal else 6):
                top = raw_k[0, h, : j + 1].max() if causal else raw_k[0, h].max()
                phi_q = raw_q[0, h, i].exp() + epsilon * raw_q[0, h, i].max().exp()
                weights.append(phi_q @ (raw_k[0, h, j].exp() + epsilon * top.exp()))
            row = torch.stack(weights) / sum(weights)
            close(out[0, h, i], row @ v[0, h, : len(row)])


@pytest.mark.parametrize("features, epsilon", [(5, 1e-3), (1, 0.0)])
@pytest.mark.parametrize("causal", [False, True])
def test_performer_with_relu_is_its_formula(features, epsilon, causal):
    q, k, v = inputs(6)
    module = make("performer", features=features, kernel="relu", epsilon=epsilon, causal=causal)
    phi_q, phi_k = (F.relu(4**-0.25 * x @ module.projection.mT) + epsilon for x in (q, k))
    weights = phi_q @ phi_k.mT
    weights = weights.tril() if causal else weights
    row = weights.sum(-1, keepdim=True)
    assert bool((row == 0).any()) == (not epsilon), "without ε a query may have no weight at all"
    close(module(q, k, v), torch.where(row > 0, weights / row, 0.0) @ v)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_does_not_round_the_epsilon_of_performer(causal):
    (q, k, v), mask = inputs(12), torch.arange(12)[None] < 9
    module = make("performer", epsilon=0.1, causal=causal)
    alone = module(*(x[:, :, :9] for x in (q, k, v)))
    close(module(q, k, v, key_mask=mask)[:, :, :9], alone, rtol=1e-13, atol=1e-13)


def test_the_stabiliser_does_not_see_the_future():
    """A later key with a huge exponent changes nothing before it, bit for bit."""
    q, k, v = inputs(140, dtype=torch.float32)
    module = subquad.attention("performer", num_heads=2, head_dim=4, causal=True)
    loud = k.clone()
    loud[:, :, 100] = 50 * module.projection[0] / module.projection[0].norm()
    before, after = module(q, k, v), module(q, loud, v)
    assert torch.equal(before[:, :, :100], after[:, :, :100])
    assert not torch.equal(before[:, :, 100:], after[:, :, 100:])
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    grads = torch.autograd.grad(make("performer", causal=True)(q, k, v)[:, :, :100].sum(), (q, k, v))
    assert all(not g[:, :, 100:].any() for g in grads)


def test_early_keys_with_tiny_features_still_have_weights():
    """Their features are e^-300 of those of the later keys: relative to one maximum they would be 0 in float32."""
    q, k, v = inputs(70, dtype=torch.float32)
    k = k * torch.linspace(30, 0.1, 70).view(1, 1, -1, 1)  # norms fall, exponents rise
    out = subquad.attention("performer", num_heads=2, head_dim=4, causal=True)(q, k, v)
    exact = make("performer", causal=True)(*(x.double() for x in (q, k, v)))
    close(out.double(), exact, rtol=1e-3, atol=1e-3)


def test_redraw():
    q, k, v = inputs(5)
    module, other = make("performer"), make("performer", draw=3)
    first = module(q, k, v)
    module.redraw(3)
    assert torch.equal(module(q, k, v), other(q, k, v))
    assert not torch.equal(module(q, k, v), first)
    module.redraw(0)
    assert torch.equal(module(q, k, v), first)
    for seed in (-1, 1.5, True, "x"):
        with pytest.raises(ValueError, match="seed must be an integer ≥ 0"):
            module.redraw(seed)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(q, k, v), first), "the features are saved with the model"


def test_orthogonal_features():
    draw = torch.Generator().manual_seed(0)
    rows = gaussian_orthogonal(3000, 6, draw)
    for block in rows.split(6):
        close(block @ block.mT, torch.diag(block.square().sum(1)))
    assert abs(rows.square().sum(1).mean().item() - 6) < 0.2, "lengths of Gaussian vectors"
    assert rows.mean(0).abs().max() < 0.08, "directions in every orthant"


# ---- the others, from their formulas ----


@pytest.mark.parametrize(("longest", "size"), [(None, 7), (20, 20)])
def test_cosformer_is_its_formula(longest, size):
    q, k, v = inputs(7)
    for causal in (False, True):
        out = make("cosformer", causal=causal, max_length=longest)(q, k, v)
        for h in range(2):
            for i in range(7):
                row = [
                    (q[0, h, i].relu() @ k[0, h, j].relu()) * math.cos(math.pi / 2 * (i - j) / size)
                    for j in range(i + 1 if causal else 7)
                ]
                total = sum(row)
                expected = sum(w * v[0, h, j] for j, w in enumerate(row)) / total if total > 0 else torch.zeros(4)
                close(out[0, h, i], torch.as_tensor(expected).double())


@pytest.mark.parametrize("causal", [False, True])
def test_local_sees_that_many_tokens(causal):
    seen = make("local", window=5, causal=causal).support(20)
    assert set(seen.sum(1)[5:-5].tolist()) == {5} and bool(seen.diagonal().all())
    blocks = make("local", window=5, shape="blocks", causal=causal).support(12)
    i, j = torch.arange(12)[:, None], torch.arange(12)
    assert torch.equal(blocks, (i // 5 == j // 5) & ((j <= i) | (not causal)))
    assert torch.equal(make("local", window=1, causal=causal).support(4), torch.eye(4, dtype=torch.bool))


def test_linformer_with_an_identity_is_full_attention():
    q, k, v = inputs(6)
    module = make("linformer", k=6, max_length=9, share="keys-values")
    with torch.no_grad():
        module.project_keys.copy_(torch.eye(6, 9))
    close(module(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert len(list(module.parameters())) == 1
    assert make("linformer", k=6, max_length=9, share="none").project_keys.shape == (2, 6, 9)


def test_nystrom_with_every_token_a_landmark_is_full_attention():
    q, k, v = inputs(6)
    q, k = 3 * q, 3 * k  # distinct rows, so that the matrix has an inverse worth the name
    module = make("nystrom", landmarks=6, iterations=60, conv=None)
    close(module(q, k, v), F.scaled_dot_product_attention(q, k, v), rtol=1e-6, atol=1e-6)


def test_nystrom_does_not_mix_the_batch():
    """The published code scales the first guess by the largest norm in the batch."""
    module, (q, k, v) = make("nystrom", landmarks=3), inputs(12, batch=2)
    louder = [torch.cat((x[:1], 30 * x[1:])) for x in (q, k, v)]
    assert torch.equal(module(q, k, v)[0], module(*louder)[0])


def test_synthesizer_variants_are_their_formulas():
    q, k, v = inputs(5)
    module = make("synthesizer", max_length=7)
    scores = q.relu() @ module.weight[:, :5].mT + module.bias[:, None, :5]
    close(module(q, k, v), scores.softmax(-1) @ v)
    module = make("synthesizer", max_length=7, variant="random", causal=True)
    for i in range(5):
        row = module.table[:, i, : i + 1].softmax(-1)
        close(module(q, k, v)[0, :, i], (row[:, None] @ v[0, :, : i + 1])[:, 0])
    module = make("synthesizer", max_length=7, variant="factorised-random", rank=3)
    close(module(q, k, v), (module.left[:, :5] @ module.right[:, :5].mT).softmax(-1) @ v)
    module = make("synthesizer", max_length=7, variant="factorised-dense")
    made = q.relu() @ module.weight.mT + module.bias[:, None]
    assert (module.short, module.long) == (3, 3)
    scores = torch.stack([made[..., j % 3] * made[..., 3 + j // 3] for j in range(5)], -1)
    close(module(q, k, v), scores.softmax(-1) @ v)


@pytest.mark.parametrize("activation", ["softplus", "elu"])
def test_causal_luna_is_its_formula(activation):
    q, k, v = inputs(7)
    module = make("luna", memory=3, causal=True, activation=activation)
    out = module(q, k, v)
    for h in range(2):
        scores = k[0, h] @ module.memory[h].mT / 2  # (n, l)
        pack = torch.log2(1 + 2**scores) if activation == "softplus" else F.elu(scores) + 1
        for t in range(7):
            found = sum((q[0, h, t] @ k[0, h, j]) * pack[j] for j in range(t + 1)) / (2 * (t + 1))
            unpack = found.softmax(0)
            close(out[0, h, t], sum((unpack @ pack[j]) * v[0, h, j] for j in range(t + 1)) / (t + 1))


def test_luna_with_one_row_is_a_mean():
    q, k, v = inputs(5)
    module = make("luna", memory=1)
    pack = (module.memory @ k.mT / 2).softmax(-1)
    close(module(q, k, v), (pack @ v).expand(-1, -1, 5, -1))


def test_fnet_is_the_transform_of_the_tokens():
    q, k, v = inputs(7)
    tokens = v.transpose(1, 2).flatten(2)
    expected = torch.fft.fft(torch.fft.fft(tokens, dim=-1), dim=-2).real
    close(make("fnet")(q, k, v).transpose(1, 2).flatten(2), expected)


# ---- what is refused ----


@pytest.mark.parametrize("name", ["linformer", "nystrom", "fnet"])
def test_no_causal_form(name):
    with pytest.raises(ValueError, match="causal=True is not supported"):
        make(name, causal=True, max_length=8)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("linformer:k=4", "max_length is needed"),
        ("synthesizer", "max_length is needed"),
        ("linformer:k=0,max_length=8", "k must be an integer ≥ 1"),
        ("linformer:share=all,max_length=8", "share must be one of heads, keys-values, none"),
        ("nystrom:conv=4", "conv must be odd or None"),
        ("nystrom:landmarks=0", "landmarks must be an integer ≥ 1"),
        ("performer:features=0", "features must be an integer ≥ 1"),
        ("performer:epsilon=1.0", "epsilon must be a number ≥ 0 and < 1"),
        ("luna:memory=0", "memory must be an integer ≥ 1"),
        ("local:shape=star", "shape must be one of window, blocks"),
        *((f"{name}:scale=0.5,max_length=8", "scale must be None") for name in ("linear", "cosformer", "fnet")),
        ("synthesizer:scale=0.5,max_length=8", "scale must be None"),
    ],
)
def test_bad_options(spec, message):
    with pytest.raises(ValueError, match=message):
        make(spec)


@pytest.mark.parametrize("name", ["linformer", "synthesizer"])
def test_beyond_max_length(name):
    with pytest.raises(ValueError, match="length 9 is beyond max_length=8"):
        make(name, max_length=8)(*inputs(9))


@pytest.mark.parametrize("name", ["linformer", "nystrom", "luna", "fnet"])
def test_what_has_no_weights_says_so(name):
    q, k, _ = inputs(5)
    with pytest.raises(TypeError, match=f"{name} has no weights over tokens"):
        make(name, max_length=8).weights(q, k)


# ---- MoBA ----


def test_moba_with_every_block_is_full_attention():
    q, k, v = inputs(23)
    close(make("moba", block=4, topk=6, causal=True)(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_moba_chooses_the_block_that_suits():
    """Three blocks of two; the last query points along the keys of the first block."""
    k = torch.zeros(1, 1, 6, 2, dtype=torch.float64)
    k[0, 0, :2, 0], k[0, 0, 2:4, 1] = 1, 1
    q = torch.tensor([0.0, 1.0]).double().expand(1, 1, 6, 2).clone()
    q[0, 0, 5] = torch.tensor([1.0, 0.0])
    weights = make("moba", d=2, heads=1, block=2, topk=2, causal=True).weights(q, k)[0, 0]
    assert (weights[5] > 0).tolist() == [True, True, False, False, True, True]
    assert (weights[4] > 0).tolist() == [False, False, True, True, True, False]


def test_moba_takes_the_first_of_blocks_that_suit_equally():
    """A query that is 0, as that of a token with the embedding 0, finds all blocks equal: padding decides nothing."""
    (q, k, v), a = inputs(50), make("moba", block=4, topk=3, causal=True)
    q = torch.zeros_like(q)
    out = a(q, k, v)
    close(out, a.dense(q, k, v))
    padded, real = (F.pad(x, (0, 0, 30, 0)) for x in (q, k, v)), F.pad(torch.ones(1, 50, dtype=torch.bool), (30, 0))
    close(a(*padded, key_mask=real)[:, :, 30:], out)
    with torch.no_grad():
        streamed, state = [], a.start(1, dtype=torch.float64)
        for at in range(50):
            y, state = a.extend(*(x[:, :, at : at + 1] for x in (q, k, v)), state)
            streamed.append(y)
    close(torch.cat(streamed, 2), out)


def test_selected_attention_passes_opcheck():
    q, k, v = (x.requires_grad_() for x in inputs(9))
    chosen = torch.full((1, 2, 9, 1), -1)
    chosen[:, :, 4:] = 0
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[0, 1] = False
    arguments = (q, k, v, chosen, mask, torch.tensor([9]), 4, 0.5)
    results = torch.library.opcheck(selected, arguments)
    assert set(results.values()) == {"SUCCESS"}


def test_moba_is_causal_only():
    with pytest.raises(ValueError, match="causal=False is not supported"):
        make("moba")


# ---- Sinkhorn ----


def sorting_of(module, k):
    from_keys = module._blocks(k, k, Call())
    return from_keys.sorting[0]


def test_sinkhorn_sorts_by_a_doubly_stochastic_matrix():
    _, k, _ = inputs(12)
    sorting = sorting_of(make("sinkhorn", block=3, max_length=12, iterations=300), k)
    close(sorting.sum(1), torch.ones(2, 4).double(), rtol=1e-4, atol=1e-4)
    close(sorting.sum(2), torch.ones(2, 4).double())


def test_causal_sinkhorn_takes_only_earlier_blocks():
    _, k, _ = inputs(12)
    sorting = sorting_of(make("sinkhorn", block=3, max_length=12, causal=True), k)
    assert not sorting.triu().any()
    close(sorting.sum(2)[:, 1:], torch.ones(2, 3).double())


def test_sinkhorn_with_a_swap_attends_to_the_other_block(monkeypatch):
    q, k, v = inputs(6)
    module = make("sinkhorn", block=3, max_length=6)
    swap = torch.eye(2).flip(0).double().expand(1, 2, 2, 2)
    monkeypatch.setattr(module, "_sorting", lambda keys, exist: swap)
    close(module(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_sortcut_has_no_causal_form():
    with pytest.raises(ValueError, match="sortcut must be None with causal=True"):
        make("sinkhorn", sortcut=2, causal=True, max_length=8)


# ---- Long-Short ----


@given(n=st.integers(1, 90), window=st.integers(1, 9), rank=st.integers(1, 12), causal=st.booleans())
def test_the_plan_of_long_short_covers_its_sets(n, window, rank, causal):
    sets = LongShort(causal=causal, window=window, rank=rank, segment=7)
    wanted = [sets.near(n).long(), sets.far(n).long()]
    counts = [torch.zeros_like(x) for x in wanted]
    for part in sets.plan(n, "main").parts:
        queries, keys, allowed = part.queries.places(), part.keys.places(), part.allowed()
        for a, rows in enumerate(queries):
            for r, key in zip(*allowed[a % len(allowed)].nonzero(), strict=True):
                counts[part.source][rows[r], keys[a][key]] += 1
    assert all(torch.equal(a, b) for a, b in zip(counts, wanted, strict=True))


def test_long_short_brings_both_kinds_of_keys_to_one_scale():
    q, k, v = inputs(20)
    module = make("long-short", window=4, rank=2)
    close(module(q, 1e4 * k, 1e4 * v), module(q, 2e4 * k, 2e4 * v), rtol=1e-5, atol=1e-5)
