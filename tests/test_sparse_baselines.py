"""Reformer, Scatterbrain, NSA, HCA and CSA beyond the contract: limits with known answers, choices, operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import subquad
from subquad.attention.base import Call
from subquad.kernels.clusters.meetings import meet
from subquad.kernels.compressed.index import best
from subquad.kernels.compressed.op import compressed
from subquad.layers import MultiheadAttention

close = torch.testing.assert_close


def inputs(n: int, d: int = 4, heads: int = 2, batch: int = 2, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, n, d, generator=draw, dtype=torch.float64) for _ in range(3)]


def make(spec: str, d: int = 4, heads: int = 2, **options):
    torch.manual_seed(0)
    return subquad.attention(spec, num_heads=heads, head_dim=d, **options).double().eval()


def layer(spec: str, **options) -> MultiheadAttention:
    torch.manual_seed(0)
    return MultiheadAttention(8, 2, batch_first=True, attention=spec, **options).double().eval()


# ---- reformer ----


@pytest.mark.parametrize("causal", [False, True])
def test_reformer_with_one_bucket_is_full_attention_among_others(causal):
    q, k, v = inputs(37)
    scores = q @ F.normalize(q, dim=-1).mT * 0.5
    hidden = torch.eye(37, dtype=torch.bool) | (torch.ones(37, 37).triu(1).bool() if causal else False)
    hidden = hidden & ~((torch.arange(37) == 0)[:, None] & (torch.arange(37) == 0) & causal)  # the first sees itself
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    close(make("reformer:buckets=1,rounds=3", causal=causal)(q, k, v), expected)


def test_reformer_takes_keys_from_queries_and_hashes_from_the_seed():
    q, k, v = inputs(40)
    a = make("reformer:chunk=4,rounds=1", causal=True)
    first, again, other = (a(q, x, v, seed=s) for x, s in ((k, 1), (-k, 1), (k, 2)))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len(torch.unique(a.hashes(q, 8, torch.tensor(1)))) == 8


def test_reformer_puts_near_tokens_into_one_bucket():
    q = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0)).double().repeat_interleave(3, 2)
    q = q * torch.rand(1, 1, 18, 1, generator=torch.Generator().manual_seed(1)).double().add(
        0.5
    )  # lengths do not count
    bucket = make("reformer:rounds=4").hashes(q, 16, torch.tensor(0)).unflatten(-1, (6, 3))
    assert (bucket == bucket[..., :1]).all()


# ---- scatterbrain ----


@pytest.mark.parametrize("causal", [False, True])
def test_scatterbrain_is_exact_where_everybody_meets(causal):
    q, k, v = inputs(21)
    a = make("scatterbrain:buckets=2", causal=causal)
    a.rotation.zero_()  # all in bucket 0
    close(a(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_scatterbrain_is_exact_where_its_features_overestimate(causal):
    """Along one of the directions of the features, they give e³² times the weight that the pairs have."""
    torch.manual_seed(0)
    a = subquad.attention("scatterbrain:buckets=4", num_heads=2, head_dim=64, causal=causal)
    place = torch.arange(4 * 12).view(4, 1, 12, 1) // 12
    along = a.projection[place[..., 0]] / (2 * a.options.softmax_scale**0.5)  # (4, 1, 12, 64): one direction a row
    q, k = (along + torch.randn(4, 2, 12, 64) / 10 for _ in range(2))
    v = torch.randn(4, 2, 12, 64, requires_grad=True)
    met = (a.hashes(q)[..., None] == a.hashes(k)[..., None, :]).all((1, 2, 3))
    assert met.any()
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    out = a(q, k, v)
    torch.testing.assert_close(out[met], exact[met], atol=1e-4, rtol=1e-4)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), v))


def test_scatterbrain_is_performer_where_nobody_meets():
    q, k, v = inputs(21)
    q, k = q.abs() + 0.1, -k.abs() - 0.1
    a, performer = make("scatterbrain:buckets=2,features=12"), make("performer:features=12,epsilon=0")
    a.rotation.fill_(1.0)
    performer.projection.copy_(a.projection)
    close(a(q, k, v), performer(q, k, v))


def test_scatterbrain_redraws_on_request_alone():
    a, (q, k, v) = make("scatterbrain:buckets=4"), inputs(9)
    before = a(q, k, v)
    assert torch.equal(before, a(q, k, v))
    a.redraw(5)
    assert not torch.equal(before, a(q, k, v))
    with pytest.raises(ValueError, match="seed must be an integer ≥ 0, not -1"):
        a.redraw(-1)


# ---- selected and compressed ----


def test_nsa_branches_are_gated_and_selected_by_importance():
    q, k, v = inputs(32, heads=1, batch=1)
    a = make("nsa:compress=4,stride=4,block=4,topk=4,window=4", heads=1, causal=True)
    with torch.no_grad():
        a.gate_bias.copy_(torch.tensor([[-40.0, -40.0, 40.0]]))
    band = torch.ones(32, 32).tril().triu(-3).bool()
    close(a(q, k, v), F.scaled_dot_product_attention(q, k, v, attn_mask=band))
    asks, keys = torch.ones(1, 32, 4, dtype=torch.float64), torch.zeros(1, 8, 4, dtype=torch.float64)
    keys[:, 3] = 9
    chosen = a._choose(asks, keys, None, Call())[0, 31]
    assert set(chosen.tolist()) == {0, 3, 6}  # the first, the one with weight, and the one before the own


def test_csa_prefers_the_earlier_of_equal_entries():
    scores = torch.tensor([[[1.0, 0.0, 0.0, 2.0, 0.0, 5.0]]])
    possible = torch.tensor([[[True, True, True, True, True, False]]])
    assert best(scores, possible, 3).tolist() == [[[True, True, False, True, False, False]]]
    assert best(scores, possible & False, 3).sum() == 0


def test_csa_with_room_for_every_entry_does_not_ask_the_index():
    x = torch.randn(2, 24, 8, dtype=torch.float64)
    few, many = (layer(f"csa:window=3,rate=2,topk={k}", causal=True) for k in (2, 12))
    many.load_state_dict(few.state_dict())
    before = many(x, x, x, need_weights=False)[0]
    assert not torch.allclose(before, few(x, x, x, need_weights=False)[0])
    with torch.no_grad():
        many.attention.index.queries.weight.fill_(torch.nan)
    assert torch.equal(before, many(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("spec", ["hca:rate=4,window=3", "csa:rate=2,topk=3,window=3"])
def test_compressed_attention_sees_beyond_the_window_through_entries(spec):
    x = torch.randn(1, 32, 8, dtype=torch.float64)
    module, moved = layer(spec, causal=True), x.clone()
    moved[:, 0] += 1
    change = (
        (module(moved, moved, moved, need_weights=False)[0] - module(x, x, x, need_weights=False)[0]).abs().amax(-1)
    )
    assert change[0, 4:].max() > 1e-6


@pytest.mark.parametrize("heads", [1, 2])
def test_near_keys_may_be_shared_by_the_heads(heads):
    x = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    module = layer("hca:rate=4,window=3", causal=True, num_kv_heads=heads)
    module(x, x, x, need_weights=False)[0].sum().backward()
    assert x.grad.isfinite().all()


# ---- operators ----


@pytest.mark.parametrize("operator", ["meet", "meet_backward", "compressed", "compressed_backward"])
def test_operator_declarations(operator):
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in inputs(9))
    plain = [x.detach() for x in (q, k, v)]
    bucket, real = torch.arange(36).view(4, 9) % 3, torch.rand(4, 9) > 0.2
    if operator.startswith("meet"):
        scales = torch.zeros(4, 9, dtype=torch.float64)
        places = (bucket, bucket.flip(1), real, 3, True, 0.5)
        exact, lse, over = meet(*plain, *plain[:2], scales, *places)
        empty = lse.masked_fill(lse == -torch.inf, 0)
        arguments = {
            "meet": (q, k, v, plain[0], plain[1], scales, *places),
            "meet_backward": (exact, empty, over, *plain, *plain[:2], scales, exact, lse, *places),
        }[operator]
    else:
        q, k, v = (x.detach().unflatten(0, (2, 2)).contiguous().requires_grad_() for x in (q, k, v))
        entries, sink = torch.randn(2, 1, 3, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        seen, mask = torch.rand(2, 9, 3) > 0.5, torch.rand(2, 9) > 0.2
        about = (seen, sink, mask, None, 3, 0.5)
        plain = [x.detach() for x in (q, k, v)]
        out, lse = compressed(*plain, entries, entries, *about)
        arguments = {
            "compressed": (q, k, v, entries, entries, *about),
            "compressed_backward": (out, *plain, entries, entries, out, lse, *about),
        }[operator]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    result = torch.library.opcheck(getattr(torch.ops.subquad, operator).default, arguments, test_utils=checks)
    assert set(result.values()) == {"SUCCESS"}


# ---- errors ----


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("reformer", {"buckets": 3}, "buckets must be even, or 1, not 3"),
        ("scatterbrain", {"buckets": 3}, "buckets must be even, not 3"),
        ("nsa", {"causal": True, "compress": 24}, "compress must be a multiple of stride=16, not 24"),
        ("nsa", {"causal": True, "block": 24}, "block must be a multiple of stride=16, not 24"),
        ("nsa", {}, "causal=False is not supported; it is causal only"),
        ("hca", {}, "causal=False is not supported; it is causal only"),
        ("hca", {"causal": True, "rotary": 3}, "rotary must be even and at most head_dim=4, not 3"),
        ("hca", {"causal": True, "rotary": 6}, "rotary must be even and at most head_dim=4, not 6"),
        ("csa", {"causal": True, "index_dim": 3}, "index_dim must be even, not 3"),
    ],
)
def test_impossible_options_are_refused(spec, options, message):
    with pytest.raises(ValueError, match=message):
        make(spec, **options)


def test_compressed_attention_works_on_tokens_alone():
    a = make("hca", causal=True)
    with pytest.raises(TypeError, match="hca works on tokens"):
        a(*inputs(4))
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    with pytest.raises(TypeError, match="hca has no weights over tokens"):
        layer("hca", causal=True)(x, x, x)
    wide = MultiheadAttention(6, 2, batch_first=True, attention="hca", causal=True, head_dim=4).double()
    with pytest.raises(ValueError, match="query has width 6, the heads together 8"):
        wide(x[..., :6], x[..., :6], x[..., :6], need_weights=False)
    with pytest.raises(ValueError, match="length 4 is beyond max_length=3"):
        layer("hca", causal=True, max_length=3)(x, x, x, need_weights=False)
