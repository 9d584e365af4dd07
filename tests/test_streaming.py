"""Streaming: splits drawn at random, grouped heads, dropout, long chunks, what a state keeps."""

import copy
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import subquad
from subquad.attention.base import draw_seed
from subquad.attention.registry import mechanism
from subquad.testing.case import Case, close, gradients
from subquad.testing.streaming import make, one_call, stream

SEED = torch.tensor(5)
STREAMING = [
    name
    for name in subquad.available()
    if mechanism(name).capabilities.streaming and mechanism(name).capabilities.causal
]


def of(spec, **options):
    torch.manual_seed(0)
    options = {"num_heads": 2, "head_dim": 8, "causal": True, "max_length": 96, **options}
    return subquad.attention(spec, **options).double().eval()


def inputs(n, batch=2, heads=2, key_heads=None, seed=1):
    draw = torch.Generator().manual_seed(seed)
    sizes = (heads, key_heads or heads, key_heads or heads)
    return [torch.randn(batch, h, n, 8, generator=draw, dtype=torch.float64) for h in sizes]


def in_chunks(a, xs, sizes, mask=None, **about):
    case = Case(a.name, True)
    return stream(case, a, xs, sizes, mask, seed=SEED, **about)


@st.composite
def drawn_splits(draw):
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    padding = draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=2, max_size=2))
    return sizes, padding, draw(st.integers(0, 20))


@pytest.mark.parametrize("name", STREAMING)
@given(drawn_splits())
@settings(max_examples=max(2, settings.default.max_examples // 5))
def test_any_split_of_any_mechanism_is_one_call(name, drawn):
    sizes, padding, rollback = drawn
    case, n = Case(name, True, mechanism(name).examples[0]), sum(sizes)
    if n > 72:
        sizes, n = [*sizes[:3]], sum(sizes[:3])
    module = make(case)
    mask = torch.ones(3, n, dtype=torch.bool)
    mask[1, : padding[0] % n], mask[2, padding[1] % n] = False, n == 1  # one row padded on the left, one inside
    xs = case.inputs(n, batch=3)
    with torch.no_grad():
        got, state = stream(case, module, xs, sizes, mask, seed=SEED, rollback=rollback)
        want = one_call(case, module, xs, mask, SEED)
    close(case.rows(got, mask), case.rows(want, mask), 1e-9, f"{name} in chunks of {sizes}")
    assert state.length.tolist() == (n - mask.int().argmax(1)).tolist()


@pytest.mark.parametrize("options", ["cols=5", "cols=8"])
def test_keys_that_are_projected_from_tokens_stream_through_the_layer(options):
    torch.manual_seed(0)
    about = {"batch_first": True, "attention": f"combiner-axial:summary=proj,{options}", "causal": True}
    layer = subquad.MultiheadAttention(16, 2, max_length=64, **about).double().eval()
    x, mask = torch.randn(2, 40, 16, dtype=torch.float64, requires_grad=True), torch.ones(2, 40, dtype=torch.bool)
    mask[1, :3], mask[1, 20] = False, False
    whole, _ = layer(x, x, x, key_padding_mask=~mask, need_weights=False)
    outs, state = [], layer.start(2)
    for first, last in ((0, 2), (2, 17), (17, 18), (18, 40)):
        y, state = layer.extend(x[:, first:last], state, key_mask=mask[:, first:last])
        outs.append(y)
    got = torch.cat(outs, 1)
    close(got[mask], whole[mask], 1e-9, "value")
    close(*(gradients(y * mask[..., None], [x])[0] for y in (got, whole)), 1e-9, "gradient")
    with pytest.raises(TypeError, match="works on tokens"):
        layer.attention.extend(*inputs(1), state)


@pytest.mark.parametrize("name", ["full", "longformer", "strided", "combiner-fixed", "linear", "sbm", "moba"])
def test_fewer_key_heads(name):
    a, xs = of(name, num_heads=4), inputs(40, heads=4, key_heads=2)
    got, _ = in_chunks(a, xs, (3, 1, 20, 16))
    close(got, a(*xs, seed=SEED), 1e-9, "two key heads for four query heads")


SETS = ["strided:w=4,layer_index=1", "strided:w=4,heads=union", "strided:w=4", "fixed:w=5,heads=union", "fixed:w=5",
        "fixed:w=5,layer_index=1", "star:w=2,relay=first", "longformer:window=6,global_tokens=3", "axial:cols=5",
        "local:window=7,shape=blocks", "bigbird:block=4", "full"]  # fmt: skip


@pytest.mark.parametrize("spec", SETS)
@pytest.mark.parametrize("chosen", ["map=topk,topk=2", "map=hardmax"])
def test_of_equal_scores_the_first_is_taken_wherever_its_key_is_kept(spec, chosen):
    a, (q, k, v) = of(f"{spec}{',' if ':' in spec else ':'}{chosen}"), inputs(41)
    xs = [(0.7 * q).round(), (0.7 * k).round(), v]  # many scores are equal
    with torch.no_grad():
        for mask, sizes in ((None, (1,) * 41), (torch.arange(41) >= torch.tensor([[0], [5]]), (20, 2, 1, 18))):
            got, _ = in_chunks(a, xs, sizes, mask, rollback=0)
            want = a(*xs, key_mask=mask)
            real = torch.ones(2, 41, dtype=torch.bool) if mask is None else mask
            close(got.transpose(1, 2)[real], want.transpose(1, 2)[real], 1e-9, f"{a.name} in chunks of {sizes}")


# dropout counts a key by where it is stored, which in these depends on how many tokens there are
STORED_BY_LENGTH = {"combiner-logsparse", "combiner-plan"}


@pytest.mark.parametrize("name", sorted({*STREAMING} - STORED_BY_LENGTH))
@pytest.mark.parametrize("rollback", [0, 64])  # a chunk through the kernels, and token by token
def test_dropout_is_that_of_one_call(name, rollback):
    uneven = torch.arange(41) >= torch.tensor([[0], [5]])  # a row behind padding
    for example in (x for x in mechanism(name).examples if x.get("causal", True)):
        case = Case(name, True, example)
        module = case.make(dropout=0.4, **({"max_length": 72} if "max_length" not in example else {})).train()
        torch.manual_seed(2)
        seed = draw_seed() if case.is_layer else SEED  # a layer draws it from torch's generator
        for mask in (None, uneven):
            with torch.no_grad():
                got, _ = stream(case, module, case.inputs(41), (1, 1, 6, 20, 13), mask, seed=seed, rollback=rollback)
                want = one_call(case, module, case.inputs(41), mask, seed)
            real = torch.ones_like(uneven) if mask is None else mask
            close(case.rows(got, real), case.rows(want, real), 1e-9, f"{case.title}, dropout by the seed of the state")


def test_a_seed_is_drawn_when_something_is_dropped():
    """Evaluation leaves torch's generator alone, so that sampling goes on as it does without a cache."""
    a, xs = of("longformer:window=4", dropout=0.5), inputs(9)
    torch.manual_seed(3)
    expected = torch.randint(2**62, ())
    torch.manual_seed(3)
    y, state = a.extend(*(x[:, :, :4] for x in xs), a.start(2, dtype=torch.float64))
    assert torch.equal(torch.randint(2**62, ()), expected) and state.seed is None
    a.train()
    y, state = a.extend(*(x[:, :, 4:] for x in xs), state)
    torch.testing.assert_close(y, a(*xs, seed=state.seed)[:, :, 4:])
    assert not torch.allclose(y, a.eval()(*xs)[:, :, 4:])


@pytest.mark.parametrize("spec", ["strided:w=4,map=entmax", "full:map=entmax", "combiner-plan"])
def test_rows_of_a_padded_batch_drop_for_themselves(spec):
    """The same tokens in two rows of different lengths: dropout is that of the row's own number."""
    options = mechanism("combiner-plan").examples[0] if spec == "combiner-plan" else {}
    a = of(spec, dropout=0.5, **options).train()
    xs = [x[:1].expand(2, -1, -1, -1) for x in inputs(40)]
    mask = torch.arange(40) < torch.tensor([[40], [39]])
    padded = a(*xs, key_mask=mask, seed=SEED)
    assert (padded[0, :, :30] - padded[1, :, :30]).abs().max() > 0.1


@pytest.mark.parametrize("spec", ["logsparse:map=entmax", "strided:heads=multihead"])
def test_a_first_chunk_may_have_more_padding_than_room(spec):
    """What is left of the chunk behind the last token of a row has no place in the state."""
    a, xs, mask = of(spec), inputs(96, batch=1), torch.arange(96)[None] >= 40
    with torch.no_grad():
        got, state = in_chunks(a, xs, (96,), mask, rollback=128)
    close(got[:, :, 40:], a(*xs, key_mask=mask)[:, :, 40:], 1e-9, spec)
    assert state.length.tolist() == [56]


@pytest.mark.parametrize(
    "spec",
    [
        "combiner-fixed:span=8",
        "combiner-tree:span=4,depth=2",
        "combiner-tree:span=3,depth=4,abstraction=mean",
        "combiner-window:span=4,window=10,sinks=6",
        "longformer:window=12,global_tokens=3",
        "star:w=5,relay=first",
        "local:window=7,shape=blocks",
    ],
)
def test_long_chunks_go_through_the_kernels_and_give_the_same(spec):
    a, xs = of(spec, max_length=None), [x.requires_grad_() for x in inputs(300)]
    got, state = in_chunks(a, xs, (13, 150, 1, 100, 36), rollback=0)
    want = a(*xs)
    close(got, want, 1e-9, "value")
    for x, y in zip(gradients(got, xs), gradients(want, xs), strict=True):
        close(x, y, 1e-9, "gradient")
    assert state.length.tolist() == [300, 300]
    with torch.no_grad():  # in place, and with kernels that have no gradient
        for sizes in ((13, 150, 1, 100, 36), (24, 120, 17, 139)):
            close(in_chunks(a, xs, sizes, rollback=0)[0], want, 1e-9, f"value in chunks of {sizes} without gradients")


@pytest.mark.parametrize(
    ("options", "key_heads"),
    [
        ({"abstraction": "mean"}, 4),
        ({"abstraction": "deepsets-max"}, 4),
        ({"abstraction": "attended"}, 2),
        ({"abstraction": "residual-attended", "shared_heads": 2}, 2),
        ({"abstraction": "max", "shared_heads": 2}, 2),
    ],
)
@pytest.mark.parametrize("train", [False, True])
def test_long_chunks_with_any_summary(options, key_heads, train):
    """A span that has begun before the chunk, one that the chunk completes alone, and padding inside the first."""
    a = of("combiner-window:span=8,window=10,sinks=3", num_heads=4, max_length=None, **options)
    xs, mask = inputs(200, heads=4, key_heads=key_heads), torch.ones(2, 200, dtype=torch.bool)
    mask[1, 27] = False
    with torch.set_grad_enabled(train):
        for real in (None, mask):
            got, _ = in_chunks(a, xs, (29, 20, 75, 76), real, rollback=0)
            case = Case(a.name, True)
            close(
                case.rows(got, mask), case.rows(a(*xs, key_mask=real), mask), 1e-9, f"{options}, padding {real is mask}"
            )


def test_a_long_chunk_after_a_crop():
    a, xs = of("combiner-tree:span=4,depth=2", max_length=None), inputs(200)
    with torch.no_grad():
        _, state = in_chunks(a, [x[:, :, :110] for x in xs], (50, 60), rollback=20)
        got, _ = a.extend(*(x[:, :, 93:] for x in xs), state.crop(93))
    close(got, a(*xs)[:, :, 93:], 1e-9, "as if it had never been longer")


@pytest.mark.parametrize("options", ["slice_length=8", "slice_length=4,levels=3,composition=global-local"])
def test_long_chunks_of_slices(options):
    """Rings grow for a long chunk and shrink again; what can be taken back stays the same."""
    torch.manual_seed(0)
    about = {"batch_first": True, "attention": f"composite-slice:{options}", "causal": True}
    layer = subquad.MultiheadAttention(16, 2, **about).double().eval()
    x = torch.randn(2, 700, 16, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 700, dtype=torch.bool)
    mask[1, :5] = False
    whole, _ = layer(x, x, x, key_padding_mask=~mask, need_weights=False)
    outs, state = [], layer.start(2, rollback=3)
    for a, b in ((0, 70), (70, 71), (71, 660), (660, 690)):
        y, state = layer.extend(x[:, a:b], state, key_mask=mask[:, a:b])
        outs.append(y)
    y, _ = layer.extend(x[:, 687:], state.crop(state.length - 3))
    got, want = torch.cat([*outs, y[:, 3:]], 1) * mask[..., None], whole * mask[..., None]
    close(got, want, 1e-9, "value")
    close(*(torch.autograd.grad(z.square().sum(), x, retain_graph=True)[0] for z in (got, want)), 1e-8, "gradient")


@pytest.mark.parametrize(
    "options",
    [
        "slice_length=8",
        "slice_length=8,extension=1.5",
        "slice_length=4,extension=3,composition=parallel,pool=max",
        "slice_length=4,levels=3,composition=global-local,share_weights=false",
        "slice_length=8,local=mlp,pool=linear",
    ],
)
def test_long_chunks_of_slices_without_padding_go_through_the_kernels(options):
    """Slices that begin before a chunk and end in it or behind it, and a crop after all of that."""
    torch.manual_seed(0)
    about = {"batch_first": True, "attention": f"composite-slice:{options}", "causal": True}
    layer = subquad.MultiheadAttention(16, 2, **about).double().eval()
    x = torch.randn(2, 700, 16, dtype=torch.float64, requires_grad=True)
    whole, _ = layer(x, x, x, need_weights=False)
    for train in (True, False):
        outs, state = [], layer.start(2, rollback=3)
        with torch.set_grad_enabled(train):
            for a, b in ((0, 70), (70, 71), (71, 90), (90, 107), (107, 340), (340, 500), (500, 690)):
                y, state = layer.extend(x[:, a:b], state)
                outs.append(y)
            y, _ = layer.extend(x[:, 687:], state.crop(687))
            got = torch.cat([*outs, y[:, 3:]], 1)
        close(got, whole, 1e-9, f"value, with gradients: {train}")
        if train:
            close(*gradients(got, [x]), *gradients(whole, [x]), 1e-8, "gradient")


@pytest.mark.parametrize("spec", ["hca:window=5,rate=8", "csa:window=7,rate=4,topk=3"])
def test_long_chunks_of_entries(spec):
    """Rings come round many times in a chunk; fewer key heads, dropout by positions, and values of half precision."""
    torch.manual_seed(0)
    about = {"batch_first": True, "attention": spec, "causal": True, "num_kv_heads": 1, "dropout": 0.3}
    layer = subquad.MultiheadAttention(16, 2, **about).double()
    x = torch.randn(2, 300, 16, dtype=torch.float64)
    for part in (layer.train(), layer.eval()):
        torch.manual_seed(3)
        whole, _ = part(x, x, x, need_weights=False)
        torch.manual_seed(3)
        outs, state = [], part.start(2, rollback=3)
        for a, b in ((0, 70), (70, 71), (71, 260), (260, 300)):
            y, state = part.extend(x[:, a:b], state)
            outs.append(y)
        close(torch.cat(outs, 1), whole, 1e-9, "training" if part.training else "evaluation")
    half = layer.to(torch.bfloat16)
    y, state = half.extend(x[:, :20].bfloat16(), half.start(2))
    assert y.dtype == torch.bfloat16 and torch.isfinite(half.extend(x[:, 20:21].bfloat16(), state)[0]).all()


def test_half_precision_keeps_its_dtype():
    a, xs = of("combiner-fixed").to(torch.bfloat16), [x.bfloat16() for x in inputs(40)]
    got, state = in_chunks(a, xs, (30, 10))
    assert got.dtype == torch.bfloat16
    assert state.dtype == torch.bfloat16
    close(got.double(), a(*xs).double(), 0.02, "bfloat16")


@pytest.mark.parametrize("length", [-3, 2.5, "9", True])
def test_room_for_an_impossible_length_is_refused(length):
    state = subquad.attention("longformer:window=4", num_heads=2, head_dim=8, causal=True).start(1)
    with pytest.raises(ValueError, match=f"length must be an integer ≥ 0, not {length!r}"):
        state.reserve(length)


def test_a_state_is_cropped_as_far_as_it_says():
    a, xs = of("combiner-fixed:span=8"), inputs(90)
    with torch.no_grad():
        _, state = in_chunks(a, xs, (90,), rollback=20)
        assert in_chunks(a, xs, (90,), rollback=90)[1].crop(3).length.tolist() == [3, 3]
    assert state.crop(75).crop(70).length.tolist() == [70, 70]
    with pytest.raises(ValueError, match=r"row 0 can be cropped to .* rollback=20"):
        state.crop(30)


def test_a_state_is_pickled_copied_and_moved():
    a, xs = of("longformer:window=8"), inputs(40)
    with torch.no_grad():
        _, state = in_chunks(a, [x[:, :, :39] for x in xs], (39,))
        assert state.to("meta").device.type == "meta"
        want, _ = a.extend(*(x[:, :, 39:] for x in xs), state.clone())
        for twin in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state), state.to("cpu")):
            assert torch.equal(a.extend(*(x[:, :, 39:] for x in xs), twin)[0], want)
    with pytest.raises(ValueError, match="state was used before"):
        state.to("meta")  # the last twin had the same buffers


def test_chunks_can_be_trained_on_with_what_came_before_cut_off():
    a = of("combiner-fixed:span=8,abstraction=deepsets-max")
    xs = [x.requires_grad_() for x in inputs(40)]
    first, state = in_chunks(a, [x[:, :, :20] for x in xs], (20,))
    second, _ = a.extend(*(x[:, :, 20:] for x in xs), state.detach())
    assert not torch.autograd.grad(second.sum(), xs[1], retain_graph=True)[0][:, :, :20].any()
    assert torch.autograd.grad(first.sum(), xs[1])[0][:, :, :20].any()


def test_sampled_graphs_are_those_of_one_call_also_after_a_trained_chunk():
    a, xs = of("sbm", self_loops=True), inputs(50)
    state = a.start(2, dtype=torch.float64, seed=SEED)
    outs = []
    for first, last, train in ((0, 20, False), (20, 30, True), (30, 31, False), (31, 50, False)):
        with torch.set_grad_enabled(train):
            y, state = a.extend(*(x[:, :, first:last] for x in xs), state)
        outs.append(y)
    close(torch.cat(outs, 2), a(*xs, seed=SEED), 1e-9, "the same graphs")


def test_user_sets_of_one_length_stream_up_to_that_length():
    sets = torch.ones(12, 12, dtype=torch.bool)
    sets[7, 2] = False
    a, xs = of("pattern", sets=sets, max_length=None), inputs(12)
    close(in_chunks(a, xs, (5, 1, 6))[0], a(*xs), 1e-9, "value")
    with pytest.raises(ValueError, match="12 tokens"):
        in_chunks(a, [torch.cat((x, x), 2) for x in xs], (1, 23))


@pytest.mark.parametrize(
    ("spec", "options", "match"),
    [
        ("combiner-fixed", {"causal": False}, "causal=True"),
        ("combiner-fixed", {"max_length": None}, "span or max_length"),
        ("cosformer", {"max_length": None}, "max_length"),
        ("reformer:chunk=4", {"max_length": None}, "buckets or max_length"),
        ("reformer:buckets=4", {"max_length": None}, "chunk or max_length"),
        ("fnet", {"causal": False}, "mechanisms that can: full"),
    ],
)
def test_what_cannot_stream_says_so(spec, options, match):
    with pytest.raises(ValueError, match=match):
        of(spec, **options).start(1)


def test_a_state_of_another_mechanism_is_refused():
    with pytest.raises(ValueError, match="state belongs to linear"):
        of("full").extend(*inputs(1), of("linear").start(2, dtype=torch.float64))


def test_bench_decode_measures_a_step_a_state_and_the_prefill(tmp_path):
    from subquad.cli import app

    path = tmp_path / "out.json"
    arguments = "bench combiner-fixed composite-slice --decode --n 64 --heads 2 --head-dim 8 --repeats 1 --chunk 16"
    result = CliRunner().invoke(app, [*arguments.split(), "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "composite-slice" in result.output and "(layer)" in result.output and "prefill" in result.output
    assert '"chunk_seconds"' in path.read_text()


def test_a_state_is_printed_in_one_line():
    a = of("combiner-fixed:span=8")
    mask = torch.tensor([[True] * 20, [False] * 5 + [True] * 15])
    _, padded = a.extend(*inputs(20), a.start(2, dtype=torch.float64), key_mask=mask)
    _, even = a.extend(*inputs(20), a.start(2, dtype=torch.float64))
    assert re.fullmatch(r"State\(combiner-fixed, rows=2, length=20, [\d.]+ KiB\)", repr(even))
    assert "length=15 … 20" in repr(padded) and "length=0" in repr(a.start(2, dtype=torch.float64))


@pytest.mark.parametrize("spec", ["full", "combiner-fixed:span=8", "longformer:window=5", "linear"])
def test_a_state_is_used_once(spec):
    """Without gradients, or the tokens of one continuation would silently stand in the other."""
    a = subquad.attention(spec, num_heads=2, head_dim=4, causal=True)
    q, k, v = torch.randn(3, 1, 2, 40, 4)
    with torch.no_grad():
        expected = a(q, k, v)
        _, state = a.extend(q[:, :, :20], k[:, :, :20], v[:, :, :20], a.start(1))
        kept, copied = state.clone(), copy.deepcopy(state)
        rest = q[:, :, 20:], k[:, :, 20:], v[:, :, 20:]
        _, after = a.extend(*(x[:, :, :3] for x in rest), state)
        for again in (lambda: a.extend(*rest, state), state.clone, lambda: state.crop(19), lambda: state.reserve(50)):
            with pytest.raises(ValueError, match=r"state was used before: .* clone the state"):
                again()
        assert int(state.crop(0).length) == 0, "an empty state is always to be had"
        for other in (kept, copied, after.crop(20)):
            torch.testing.assert_close(a.extend(*rest, other)[0], expected[:, :, 20:])
        with pytest.raises(ValueError, match="used before"):
            a.extend(*rest, after)
    with torch.inference_mode():  # tensors do not count there
        _, state = a.extend(q, k, v, a.start(1))
        a.extend(q[:, :, :1], k[:, :, :1], v[:, :, :1], state)
    _, state = a.extend(q[:, :, :20], k[:, :, :20], v[:, :, :20], a.start(1))
    for _ in range(2):  # with gradients nothing is written
        torch.testing.assert_close(a.extend(*rest, state)[0], expected[:, :, 20:])


def quarters(n):
    """Sets that follow from the length."""
    part = torch.arange(n) * 4 // n
    return part[:, None] == part


def part_and_rest(n):
    seen = quarters(n)
    return [row.nonzero()[:, 0].tolist() for row in seen], [[(~row).nonzero()[:, 0].tolist()] for row in seen]


@pytest.mark.parametrize("name, options", [("pattern", {"sets": quarters}), ("combiner-plan", {"plan": part_and_rest})])
def test_sets_that_depend_on_the_length_cannot_stream(name, options):
    """How long the sequence becomes is not known: the split would decide what a query sees."""
    with pytest.raises(ValueError, match=f"{name}: streaming needs sets that do not depend on the length"):
        of(name, **options).start(1)
