"""MultiheadAttention: torch's layer with any attention inside."""

import pytest
import torch
from torch import nn

import subquad


def pair(**options):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(24, 4, **options)
    ours = subquad.MultiheadAttention(24, 4, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def same(theirs, ours, *args, **kwargs):
    """Outputs, weights and all gradients agree."""
    results = []
    for m in (theirs, ours):
        xs = [a.detach().clone().requires_grad_() for a in args]
        out, weights = m(*xs, **kwargs)
        m.zero_grad()
        out.square().sum().backward()
        grads = [x.grad for x in xs] + [p.grad for _, p in sorted(m.named_parameters())]
        results.append([out, weights, *grads])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_full_is_torchs_own(batch_first, bias, need_weights):
    theirs, ours = pair(batch_first=batch_first, bias=bias)
    x = torch.randn(3, 7, 24) if batch_first else torch.randn(7, 3, 24)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:], padding[2, :2] = True, True
    same(theirs, ours, x, x, x, key_padding_mask=padding, need_weights=need_weights)
    same(theirs, ours, x, x + 1, x - 1, need_weights=need_weights, average_attn_weights=False)


def test_cross_attention_other_widths_and_no_batch():
    theirs, ours = pair(kdim=10, vdim=6, batch_first=True)
    same(theirs, ours, torch.randn(2, 5, 24), torch.randn(2, 8, 10), torch.randn(2, 8, 6))
    for batch_first in (False, True):
        theirs, ours = pair(batch_first=batch_first)
        same(theirs, ours, torch.randn(5, 24), torch.randn(8, 24), torch.randn(8, 24))


def test_masks_of_full_attention():
    theirs, ours = pair(batch_first=True)
    x, square = torch.randn(2, 6, 24), torch.rand(6, 6) < 0.4
    square.fill_diagonal_(False)
    same(theirs, ours, x, x, x, attn_mask=square)
    per_head = (torch.rand(8, 6, 6) < 0.4) & ~torch.eye(6, dtype=torch.bool)
    same(theirs, ours, x, x, x, attn_mask=per_head)
    same(theirs, ours, x, x, x, attn_mask=torch.zeros(6, 6).masked_fill(square, -torch.inf), need_weights=False)
    causal = subquad.MultiheadAttention(24, 4, batch_first=True, causal=True)
    causal.load_state_dict(theirs.state_dict())
    triangle = nn.Transformer.generate_square_subsequent_mask(6)
    want = theirs(x, x, x, attn_mask=triangle, need_weights=False)[0]
    for kwargs in ({}, {"attn_mask": triangle}, {"attn_mask": triangle, "is_causal": True}):
        torch.testing.assert_close(causal(x, x, x, **kwargs)[0], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["full", "longformer:window=4", "star:w=2", "random:density=0.5"])
def test_inside_torchs_encoder_layer(attention):
    """nn.TransformerEncoder in evaluation would run its own kernel on the weights: it must not."""
    layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True, dropout=0.0)
    swapped = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True, dropout=0.0)
    swapped.self_attn = subquad.MultiheadAttention(24, 4, batch_first=True, attention=attention)
    swapped.load_state_dict(layer.state_dict())
    x, padding = torch.randn(2, 9, 24), torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    with pytest.warns(UserWarning, match="enable_nested_tensor"):
        stack = nn.TransformerEncoder(swapped, 2)
    for mode in (True, False):
        stack.train(mode)
        with torch.set_grad_enabled(mode):
            inner = swapped.self_attn(x, x, x, key_padding_mask=padding, need_weights=False)[0]
            hidden = swapped.norm1(x + inner)
            want = swapped.norm2(hidden + swapped.linear2(swapped.linear1(hidden).relu()))
            swapped.train(mode)
            got = swapped(x, src_key_padding_mask=padding)
            torch.testing.assert_close(got[~padding], want[~padding], atol=1e-5, rtol=1e-4)
            assert stack(x, src_key_padding_mask=padding).shape == x.shape
    if attention == "full":
        torch.testing.assert_close(layer.eval()(x), swapped.eval()(x), atol=1e-5, rtol=1e-4)


def test_effective_weights_are_the_mechanisms():
    m = subquad.MultiheadAttention(24, 4, attention="strided", w=3, heads="multihead", batch_first=True)
    x = torch.randn(2, 8, 24)
    _, mean = m(x, x, x)
    _, heads = m(x, x, x, average_attn_weights=False)
    assert heads.shape == (2, 4, 8, 8)
    torch.testing.assert_close(mean, heads.mean(1))
    assert torch.equal(heads[0] > 0, m.attention.support(8))


def test_long_weights_earn_a_warning():
    m = subquad.MultiheadAttention(2, 1, attention="longformer:window=2", batch_first=True)
    x = torch.randn(1, 4097, 2)
    with pytest.warns(UserWarning, match="need_weights=False"):
        m(x, x, x)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: subquad.MultiheadAttention(25, 4), "embed_dim"),
        (lambda: subquad.MultiheadAttention(24, 0), "num_heads"),
        (lambda: subquad.MultiheadAttention(24, 4, add_bias_kv=True), "add_bias_kv"),
        (lambda: subquad.MultiheadAttention(24, 4, add_zero_attn=True), "add_zero_attn"),
        (lambda: subquad.MultiheadAttention(24, 4, attention="fulll"), "full"),
        (lambda: subquad.MultiheadAttention(24, 4, attention="star", width=3), "width"),
    ],
)
def test_a_bad_layer_is_refused(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_a_bad_call_is_refused():
    m = subquad.MultiheadAttention(24, 4, attention="star", batch_first=True)
    x = torch.randn(2, 6, 24)
    for kwargs, words in (
        ({"attn_mask": torch.ones(6, 6, dtype=torch.bool).triu(1)}, "attn_mask"),
        ({"is_causal": True}, "causal=True"),
        ({"key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)}, "key_padding_mask"),
        ({"key_padding_mask": torch.full((2, 6), 0.5)}, "key_padding_mask"),
        ({"key_padding_mask": torch.zeros(2, 6, dtype=torch.int)}, "key_padding_mask"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            m(x, x, x, **kwargs)
    with pytest.raises(ValueError, match="length"):
        m(x[:, :3], x, x)
