"""MultiheadAttention: torch's layer with any attention inside."""

import inspect

import pytest
import torch
from torch import nn

import subquad
from subquad.attention.registry import mechanism
from subquad.layers import Projections
from subquad.testing import cases


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
        (lambda: subquad.MultiheadAttention(True, 1), "embed_dim"),
        (lambda: subquad.MultiheadAttention(24, 4, kdim=0), "kdim"),
        (lambda: subquad.MultiheadAttention(24, 4, vdim="8"), "vdim"),
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
    for wrong, kind in ((x.numpy(), "ndarray"), (x.int(), "torch.int32"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"key must be a tensor of a floating-point dtype, not {kind}"):
            m(x, wrong, x)
    q, a = torch.randn(1, 4, 6, 6), m.attention
    for label in "qkv":
        for call in (a, a.observe, a.dense):
            with pytest.raises(TypeError, match=rf"{label} must be a tensor \(B, H, n, d\), not NoneType"):
                call(**{name: None if name == label else q for name in "qkv"})


@pytest.mark.parametrize("spec", ["full", "linformer:k=3,max_length=9", "hca:window=3,rate=2", "composite-slice"])
def test_tokens_that_do_not_go_together_are_refused_by_name(spec):
    """Some mechanisms project keys and values by themselves, where a batch of 1 would be broadcast."""
    m = subquad.MultiheadAttention(24, 4, attention=spec, causal=spec.startswith("hca"), batch_first=True)
    x = torch.randn(2, 6, 24)
    for tokens, words in (
        ((x, x[:1], x), "key has batch size 1|key must have the shape"),
        ((x, x, x[:1]), "value has batch size 1|value must have the shape"),
        ((x, x, x[:, :5]), "value has length 5|value must have the shape"),
        ((x.double(),) * 3, "query is torch.float64 on cpu, the layer is torch.float32"),
        ((x, x.to("meta"), x), "key is torch.float32 on meta"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            m(*tokens, need_weights=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert m(*(x.bfloat16(),) * 3, need_weights=False)[0].dtype == torch.bfloat16


def test_a_bad_attn_mask_is_refused():
    """A mask (B, n, m) is not one of (B·H, n, m), even where the heads would divide it; 1 of an integer mask may mean
    either."""
    m, x = subquad.MultiheadAttention(24, 2, batch_first=True), torch.randn(2, 6, 24)
    none = torch.zeros(6, 6, dtype=torch.bool)
    for mask in (none.int(), none.tolist(), none.numpy(), none[:5], none.expand(2, 6, 6), none.expand(3, 6, 6),
                 none.expand(8, 6, 6), none.to("meta")):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match="attn_mask"):
            m(x, x, x, attn_mask=mask)
    torch.testing.assert_close(m(x, x, x, attn_mask=none.expand(4, 6, 6)), m(x, x, x))
    for padding in (none[:2].tolist(), none[:2].to("meta")):
        with pytest.raises((TypeError, ValueError), match="key_padding_mask"):
            m(x, x, x, key_padding_mask=padding)


# ---- one call, one graph; padding and masks ----------------------------------------------------------------


def test_weights_are_those_of_the_call_for_sampled_attention_too():
    """The graph is drawn once: the returned weights, times the values, are the output."""
    layer = subquad.MultiheadAttention(8, 2, attention="sbm:clusters=4", batch_first=True).double()
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    for _ in range(3):
        out, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
        values = Projections(layer).values(x)
        expected = layer.out_proj((weights @ values).transpose(1, 2).flatten(2))
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("need_weights", [False, True])
def test_padding_under_an_attention_mask_is_cleaned(need_weights):
    layer = subquad.MultiheadAttention(8, 2, batch_first=True)
    x, mask = torch.randn(2, 6, 8), torch.rand(6, 6) < 0.3
    mask.fill_diagonal_(False)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    spoilt = x.masked_fill(padding[..., None], torch.nan)
    about = {"key_padding_mask": padding, "attn_mask": mask, "need_weights": need_weights}
    clean, dirty = (layer(y, y, y, **about)[0] for y in (x, spoilt))
    torch.testing.assert_close(dirty[~padding], clean[~padding])
    assert dirty.isfinite().all()


def test_an_inferred_causal_mask_is_explained():
    layer = subquad.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 4, 8)
    with pytest.raises(ValueError, match="when the mask that they are given is the causal one"):
        layer(x, x, x, is_causal=True, attn_mask=torch.ones(4, 4).triu(1).bool())


# ---- heads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["full", "combiner-fixed:span=3", "longformer:window=4", "composite-slice"])
def test_fewer_key_heads_are_the_repeated_ones(attention):
    few = subquad.MultiheadAttention(12, 4, num_kv_heads=2, attention=attention, batch_first=True).double()
    many = subquad.MultiheadAttention(12, 4, attention=attention, batch_first=True).double()
    repeat = lambda w: w.unflatten(0, (2, 3)).repeat_interleave(2, 0).flatten(0, 1)  # noqa: E731
    with torch.no_grad():
        weights = (few.q_proj_weight, repeat(few.k_proj_weight), repeat(few.v_proj_weight))
        many.in_proj_weight.copy_(torch.cat(weights))
        many.out_proj.load_state_dict(few.out_proj.state_dict())
    x = torch.randn(2, 11, 12, dtype=torch.float64)
    torch.testing.assert_close(*(layer(x, x, x, need_weights=False)[0] for layer in (few, many)))


def test_heads_of_any_width():
    layer = subquad.MultiheadAttention(12, 4, head_dim=5, attention="combiner-fixed", batch_first=True)
    x = torch.randn(2, 9, 12)
    out, weights = layer(x, x, x)
    assert out.shape == (2, 9, 12)
    assert weights.shape == (2, 9, 9)
    assert layer.out_proj.in_features == 20
    for wrong, words in (({"head_dim": 0}, "head_dim"), ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads=4")):
        with pytest.raises(ValueError, match=words):
            subquad.MultiheadAttention(12, 4, **wrong)
    with pytest.raises(ValueError, match="heads together 20"):
        subquad.MultiheadAttention(12, 4, head_dim=5, attention="composite-slice", batch_first=True)(x, x, x)


# ---- swap -------------------------------------------------------------------------------------------------


def test_swap_replaces_every_layer_and_keeps_the_weights():
    make = lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)  # noqa: E731
    model = nn.TransformerEncoder(make(), 2, enable_nested_tensor=False).eval()
    model.layers[1].self_attn.out_proj.weight.requires_grad_(False)
    x = torch.randn(2, 10, 16)
    before = model(x)
    done = subquad.swap(model, "full")
    assert done.replaced == ("layers.0.self_attn", "layers.1.self_attn")
    assert done.new_parameters == ()
    assert not model.layers[1].self_attn.out_proj.weight.requires_grad
    torch.testing.assert_close(model(x), before)


def test_swap_says_what_is_new_and_changes_nothing_on_an_error():
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double()
    done = subquad.swap(layer, "combiner-fixed:abstraction=deepsets-max")
    assert isinstance(done.model, subquad.MultiheadAttention)
    assert done.model.in_proj_weight.dtype == torch.float64
    assert done.new_parameters == ("attention.abstraction.query_weight", "attention.abstraction.key_weight")
    assert "2 new parameters to train" in str(done) and repr(done) == str(done)
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2, add_bias_kv=True))
    with pytest.raises(ValueError, match="1: add_bias_kv"):
        subquad.swap(model, "full")
    assert type(model[0]) is nn.MultiheadAttention
    with pytest.raises(ValueError, match=r"Linear has no torch\.nn\.MultiheadAttention"):
        subquad.swap(nn.Linear(2, 2), "full")


def test_swap_leaves_cross_attention_and_numbers_the_layers():
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2)
    done = subquad.swap(decoder, "strided:w=2", causal=True)
    assert done.replaced == ("layers.0.self_attn", "layers.1.self_attn")
    assert done.kept == ("layers.0.multihead_attn", "layers.1.multihead_attn")
    assert [layer.self_attn.attention.options.layer_index for layer in decoder.layers] == [0, 1]
    assert "left as they are (cross-attention)" in str(done)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        subquad.swap("encoder", "full")
    with pytest.raises(TypeError, match="spec must be a text such as 'combiner-fixed:span=64', not None"):
        subquad.swap(decoder, None)


@pytest.mark.parametrize("key", ["num_heads", "head_dim", "dropout", "batch_first"])
def test_swap_refuses_what_the_layer_keeps(key):
    with pytest.raises(
        TypeError, match=f"^{key} cannot be given: that of the replaced layer is kept; .*combiner-fixed"
    ):
        subquad.swap(nn.MultiheadAttention(8, 2), "combiner-fixed", **{key: 4})
    swapped = subquad.swap(nn.MultiheadAttention(8, 2), "full:dropout=0.1").model  # torch's is 0: it says nothing
    assert swapped.attention.options.dropout == 0.1


def test_what_help_and_dir_show():
    for method in (subquad.Attention.forward, subquad.Attention.__init__):
        assert method.__doc__ and method.__doc__ != nn.Module.forward.__doc__
    assert "(B, H, n, d)" in subquad.Attention.forward.__doc__
    assert "(B, n, E)" in subquad.MultiheadAttention.forward.__doc__
    assert subquad.Attention.forward.__annotations__["seed"] == "Tensor | int | None"
    assert "num_heads=8 and head_dim=64 are the defaults" in subquad.attention.__doc__
    assert subquad.attention("full").options.num_heads == 8 and subquad.attention("full").options.head_dim == 64
    assert not {"Any", "ModuleType", "TYPE_CHECKING", "import_module", "sys", "annotations"} & set(dir(subquad))
    assert {*subquad.__all__, "hf", "testing", "__version__"} <= set(dir(subquad))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_swap_turns_nested_tensors_off():
    """nn.TransformerEncoder makes them of padded batches in evaluation, for its own kernel."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 9, 16), torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 5:] = True
    with torch.no_grad():
        want = encoder(x, src_key_padding_mask=padding)
        done = subquad.swap(encoder, "full")
        got = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(got[~padding], want[~padding], atol=1e-5, rtol=1e-4)
    assert done.unnested == ("",)
    assert "nested tensors turned off (enable_nested_tensor=False): the model itself" in str(done)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    done = subquad.swap(nn.ModuleDict({"a": plain, "b": nn.MultiheadAttention(8, 2)}), "full")
    assert done.unnested == ("a",)


@pytest.mark.parametrize("spec", ["full", "combiner-fixed", "random", "sbm"])
def test_empty_batches_and_wrong_seeds_are_refused(spec):
    a, x = subquad.attention(spec, num_heads=2, head_dim=4), torch.randn(2, 2, 5, 4)
    with pytest.raises(ValueError, match="batch size 0"):
        a(x[:0], x[:0], x[:0])
    for wrong in (1.5, torch.tensor(1.5), torch.tensor([1])):
        with pytest.raises(TypeError, match="seed must be an integer"):
            a(x, x, x, seed=wrong)
    with pytest.raises(ValueError, match="seed must fit into 64 bits"):
        a(x, x, x, seed=1 << 64)
    with pytest.raises(TypeError, match="q must be of a floating-point dtype of 16 bits or more"):
        a(*(x.to(torch.float8_e4m3fn),) * 3)
    torch.testing.assert_close(a(x, x, x, seed=3), a(x, x, x, seed=torch.tensor(3)))


@pytest.mark.parametrize("name", subquad.available())
@pytest.mark.parametrize("head_dim", [6, 8])  # 6: torch's products instead of kernels for whole vectors
def test_a_backward_pass_may_be_called_under_autocast(name, head_dim):
    for case in cases(name, **mechanism(name).examples[0]):
        options = {"max_length": 64, **case.options}
        torch.manual_seed(0)
        layer = subquad.MultiheadAttention(
            2 * head_dim, 2, batch_first=True, attention=name, **{**options, "causal": case.causal}
        )
        x, found = torch.randn(2, 19, 2 * head_dim, requires_grad=True), []
        for on in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                torch.manual_seed(1)
                out = layer(x, x, x, need_weights=False)[0].float()
                found.append((out, *torch.autograd.grad(out.square().sum(), x)))
        for exact, rough in zip(*found, strict=True):
            assert rough.isfinite().all()
            assert case.able.stochastic or (exact - rough).abs().max() < 0.2 * exact.abs().max()


def test_float_masks_are_part_of_a_compiled_graph():
    """Their values are checked inside the graph, which is made for all of them."""
    layer = subquad.MultiheadAttention(16, 2, attention="full", causal=True, batch_first=True).eval()
    x, padding = torch.randn(2, 6, 16), torch.zeros(2, 6)
    padding[1, 4:] = -torch.inf
    causal = torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    about = {"key_padding_mask": padding, "attn_mask": causal, "need_weights": False}
    compiled = torch.compile(lambda: layer(x, x, x, **about)[0], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(), layer(x, x, x, **about)[0])
    padding[0, 0] = 1.0
    with pytest.raises(RuntimeError, match="0 and -inf only"):
        compiled()
    torch.compiler.reset()


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"attn_mask": None},
            "has no argument 'attn_mask'; who attends to whom is decided by the mechanism, .* key_mask",
        ),
        ({"is_causal": True}, r"subquad\.attention\('local', …, causal=True\)"),
        ({"key_padding_mask": None}, "True is a real token: key_mask=~key_padding_mask"),
        ({"dropout_p": 0.1}, "decided when the mechanism is created: .*dropout=0.1"),
        ({"keymask": None}, "a call takes q, k, v, key_mask and seed"),
    ],
)
def test_arguments_of_torch_are_answered_with_those_of_a_mechanism(given, message):
    a = subquad.attention("local", num_heads=2, head_dim=4)
    with pytest.raises(TypeError, match=message):
        a(*torch.randn(3, 1, 2, 8, 4), **given)


@pytest.mark.parametrize("kind", [subquad.Attention, subquad.MultiheadAttention])
def test_forward_takes_no_open_list_of_arguments(kind):
    kinds = {parameter.kind for parameter in inspect.signature(kind.forward).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}


def test_wrong_calls_say_what_is_right():
    a, x = subquad.attention("local", num_heads=2, head_dim=4, causal=True), torch.randn(1, 8, 2, 4)
    with pytest.raises(ValueError, match=r"q has 8 heads, .* num_heads=2; q must be \(B, H, n, d\): q.transpose"):
        a(x, x, x)
    with pytest.raises(ValueError, match=r"batch_size must be an integer ≥ 1, not a tensor \(1, 8, 2, 4\)"):
        a.start(x)
    layer = subquad.MultiheadAttention(8, 2, batch_first=True)
    with pytest.raises(
        TypeError, match=r"'key_mask'; padding is given as key_padding_mask, .*: key_padding_mask=~key_mask"
    ):
        layer(*torch.randn(3, 1, 4, 8), key_mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match=r'@subquad.register\("my-mechanism"\)'):

        @subquad.register
        class Nameless(subquad.Attention):
            pass


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", [name for name in subquad.available() if name not in ("pattern", "combiner-plan")])
def test_autocast_changes_digits_alone(spec, half):
    """A layer in float32 under autocast, causal where it can be, padded or not: outputs of float32, rounded."""
    torch.manual_seed(0)
    able = mechanism(spec).capabilities
    layer = subquad.MultiheadAttention(32, 4, attention=spec, causal=able.causal, max_length=24, batch_first=True)
    layer.eval()
    padding = torch.zeros(2, 24, dtype=torch.bool)
    padding[0, :5] = padding[1, 9] = True
    for mask in (None, padding):
        real = 1 if mask is None else ~mask[..., None]
        found = []
        for kind in (half, None):
            torch.manual_seed(1)
            x = torch.randn(2, 24, 32, requires_grad=True)
            with torch.autocast("cpu", kind, enabled=kind is not None):
                y = layer(x, x, x, key_padding_mask=mask, need_weights=False)[0].float() * real
            found.append((y, *torch.autograd.grad(y.sum(), x)))
        assert found[0][1].isfinite().all()
        if not mechanism(spec).data_dependent:  # digits decide about clusters and graphs
            torch.testing.assert_close(found[0][0], found[1][0], rtol=0.1, atol=0.1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, at the first jvp
@pytest.mark.parametrize("of_weights", [False, True])
@pytest.mark.parametrize("spec", ["full:map=entmax", "combiner-fixed", "composite-slice", "hca", "nystrom", "sbm"])
def test_forward_derivatives_are_refused(spec, of_weights):
    """torch would leave the tangents of our operators out, and give wrong derivatives."""
    causal = not mechanism(spec.split(":")[0]).capabilities.bidirectional
    layer = subquad.MultiheadAttention(16, 2, attention=spec, causal=causal, max_length=24, batch_first=True)
    layer.requires_grad_(False)
    x, weight = torch.randn(1, 24, 16), layer.in_proj_weight.clone()

    def run(x, weight):
        return torch.func.functional_call(layer, {"in_proj_weight": weight}, (x, x, x), {"need_weights": False})[0]

    tangents = (torch.zeros_like(x), torch.ones_like(weight)) if of_weights else (torch.ones_like(x), weight * 0)
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(run, (x, weight), tangents)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
            run(dual, weight)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, at the first jvp
def test_forward_derivatives_of_torchs_operators():
    torch.manual_seed(0)
    a = subquad.attention("full:map=topk", num_heads=2, head_dim=4, causal=True).double()
    q, k, v, step = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(4))
    _, slope = torch.func.jvp(lambda q: a(q, k, v), (q,), (step,))
    torch.testing.assert_close(
        slope, (a(q + 1e-6 * step, k, v) - a(q - 1e-6 * step, k, v)) / 2e-6, rtol=1e-5, atol=1e-6
    )
