"""Every mechanism and every model on a GPU that is not there: shapes, dtypes, devices, and nothing moves to the CPU.

Reading a value of a tensor without contents raises, so a trace that ends has never waited for the device. Without CUDA
autograd cannot record tensors of device "cuda", so backward passes of whole layers and models are traced on "meta",
which is not the CPU either; the operators themselves are traced backward on "cuda" (`test_gpu_merge`).
"""

from __future__ import annotations

import contextlib
from contextlib import nullcontext

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

import subquad
from fake_gpu import fake_device, fake_gpu, on_fake_gpu
from subquad.attention.registry import mechanism
from subquad.kernels import devices
from subquad.models import HEADS, SubquadConfig

N, WIDTH = 70, 32


@pytest.fixture(autouse=True)
def without_triton(monkeypatch):
    monkeypatch.setattr(devices, "has_triton", lambda: False)
    monkeypatch.setattr(devices, "_say_once", lambda *about: None)


def directions(name: str) -> list[bool]:
    can = mechanism(name).capabilities
    return [causal for causal, possible in ((True, can.causal), (False, can.bidirectional)) if possible]


def trace(name: str, causal: bool, options: dict) -> None:
    about = {"causal": causal, "max_length": 128, "batch_first": True, **options}
    layer = subquad.MultiheadAttention(WIDTH, 4, attention=name, **about)
    with fake_gpu() as moves, torch.no_grad():
        x = torch.empty(2, N, WIDTH, device="cuda")
        out, _ = on_fake_gpu(layer)(x, x, x, need_weights=False)
        assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
        assert moves.operators and not moves.found, f"{moves.found} move to the CPU"


@pytest.mark.parametrize("name", subquad.available())
def test_a_mechanism_stays_on_the_device(name):
    trace(name, directions(name)[0], mechanism(name).examples[0])


def trace_backward(module, make_output, bodies=False) -> None:
    """Gradients of all parameters: their shapes, dtypes and devices, and nothing moves to the CPU."""
    with fake_device(bodies) as moves:
        out = make_output(on_fake_gpu(module, "meta"))
        parameters = [p for p in module.parameters() if p.requires_grad]
        grads = torch.autograd.grad(out, parameters, torch.empty_like(out), allow_unused=True)
        found = [(p, g) for p, g in zip(parameters, grads, strict=True) if g is not None]
        assert found, "no parameter has a gradient"
        for p, g in found:
            assert (g.shape, g.dtype, g.device) == (p.shape, p.dtype, p.device)
        assert not moves.found, f"{moves.found} move to the CPU"


@pytest.fixture
def no_autocast(monkeypatch):
    """torch.autocast has no dtype for "meta"; where a mechanism switches it off, nothing is to be done."""
    original = torch.autocast
    monkeypatch.setattr(
        torch, "autocast", lambda kind, *a, **k: nullcontext() if kind == "meta" else original(kind, *a, **k)
    )


@pytest.mark.parametrize("name", subquad.available())
def test_the_backward_pass_of_a_mechanism_stays_on_the_device(name, no_autocast):
    about = {"causal": directions(name)[0], "max_length": 128, "batch_first": True, **mechanism(name).examples[0]}

    def output(layer):
        x = torch.empty(2, N, WIDTH, device="meta", requires_grad=True)
        return layer(x, x, x, need_weights=False)[0]

    trace_backward(subquad.MultiheadAttention(WIDTH, 4, attention=name, **about), output)


def check_waiting(name: str, causal: bool, padded: bool, options: dict, dtype=torch.float32) -> str:
    """Forward and backward, inside the operators too: the host waits for the device where the mechanism says so."""
    about = {"causal": causal, "max_length": 128, "batch_first": True, **options}
    layer = subquad.MultiheadAttention(WIDTH, 4, attention=name, **about).to(dtype)

    def output(layer):
        x = torch.empty(2, N, WIDTH, device="meta", dtype=dtype, requires_grad=True)
        padding = torch.empty(2, N, dtype=torch.bool, device="meta") if padded else None
        return layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    declared = layer.attention.host_reads(padded, dtype, N)
    with pytest.raises(GuardOnDataDependentSymNode) if declared else nullcontext():
        trace_backward(layer, output, bodies=True)
    return declared


def paddings(name: str) -> list[bool]:
    return [False, True] if mechanism(name).capabilities.padding else [False]


@pytest.mark.parametrize("name", subquad.available())
def test_operators_do_not_wait_for_the_device(name, no_autocast):
    for causal in directions(name):
        for padded in paddings(name):
            check_waiting(name, causal, padded, mechanism(name).examples[0])


@pytest.mark.parametrize("options", [{"map": "topk", "topk": 3}, {"map": "sparselin-gen"}, {"map": "entmax"}], ids=str)
def test_other_probability_maps_do_not_wait(options, no_autocast):
    for padded in (False, True):
        check_waiting("strided", True, padded, options)


@pytest.mark.parametrize("name", ["routing", "combiner-routing", "combiner-fixed"])
def test_what_float64_reads_is_declared(name, no_autocast, monkeypatch):
    monkeypatch.setattr(devices, "FEW", 0)
    for padded in (False, True):
        declared = check_waiting(name, False, padded, mechanism(name).examples[0], torch.float64)
        assert bool(declared) == ("routing" in name)


@pytest.mark.parametrize("few", [N, N - 1])
@pytest.mark.parametrize(
    "name, options",
    [
        ("sbm", {}), ("sbm", {"sampler": "fastrg"}), ("sbm", {"ste": "difference", "dropout": 0.1}),
        ("scatterbrain", {}), ("routing", {"dropout": 0.1}), ("combiner-routing", {"dropout": 0.1}),
    ],
    ids=str,
)  # fmt: skip
def test_long_sequences_count_what_short_ones_do_not(name, options, few, no_autocast, monkeypatch):
    """A short sequence has all pairs, masked; so has sbm with ste=difference in training, at any length."""
    monkeypatch.setattr(devices, "FEW", few)
    for padded in (False, True):
        declared = check_waiting(name, True, padded, options)
        assert bool(declared) == (few < N and "ste" not in options)


NESTED = {name: {"nested": True} for name in ("pattern", "combiner-plan")}  # other sets of one's own depend on lengths


@pytest.mark.parametrize("name", subquad.available())
def test_nobody_waits_where_the_host_must_not(name, no_autocast, monkeypatch):
    """As in the capture of a CUDA graph, which a read would end: whoever says that it reads, beyond short sequences."""
    monkeypatch.setattr(devices, "FEW", 0)
    for causal in directions(name):
        for padded in paddings(name):
            for dropout, dtype in ((0.1, torch.float32), (0.0, torch.float64)):
                options = {**mechanism(name).examples[0], "dropout": dropout}
                about = {"num_heads": 4, "head_dim": 8, "causal": causal, "max_length": 128}
                if subquad.attention(name, **about, **options).host_reads(padded, dtype, N):
                    with devices.without_waiting():
                        options |= NESTED.get(name, {})
                        assert not check_waiting(name, causal, padded, options, dtype)


OWN_SETS = [
    ("star", {}), ("star", {"relay": "first"}), ("fixed", {"w": 4, "close": True, "heads": "union"}),
    ("bigbird", {"block": 4}), ("logsparse", {}), ("random", {}), ("combiner-logsparse", {}),
]  # fmt: skip


@pytest.mark.parametrize("name, options", OWN_SETS, ids=str)
def test_padded_rows_with_sets_of_their_own_are_not_read(name, options, no_autocast, monkeypatch):
    """Nor where sequences are long, or weights are dropped."""
    monkeypatch.setattr(devices, "FEW", 0)
    for causal in (True, False):
        for dropout in (0.0, 0.1):
            assert not check_waiting(name, causal, True, {**options, "dropout": dropout})


@pytest.mark.parametrize("name, options", OWN_SETS[:-1], ids=str)
def test_other_maps_of_padded_rows(name, options, no_autocast, monkeypatch):
    """Lists are made on the device, and queries that see everyone are computed for themselves."""
    monkeypatch.setattr(devices, "FEW", 0)
    for dropout in (0.0, 0.1):
        assert not check_waiting(name, False, True, {**options, "map": "topk", "topk": 3, "dropout": dropout})


@pytest.mark.parametrize("name, options", [("strided", {"w": 4}), *OWN_SETS[:-1]], ids=str)
def test_masks_of_compiled_graphs_are_made_on_the_device(name, options, no_autocast, monkeypatch):
    """There other maps have all pairs."""
    monkeypatch.setattr(devices, "FEW", 0)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    attention = subquad.attention(name, num_heads=2, head_dim=8, causal=False, map="topk", topk=3, **options)
    with fake_device(bodies=True) as moves:
        q, k, v = (torch.empty(3, 2, N, 8, device="meta") for _ in range(3))
        attention(q, k, v, key_mask=torch.empty(3, N, dtype=torch.bool, device="meta"))
        assert not moves.found, f"{moves.found} move to the CPU"


OTHERS = ("pattern",)  # without contents a user's function makes no sets
STREAMING = [name for name in subquad.available() if mechanism(name).capabilities.streaming and name not in OTHERS]


@pytest.mark.parametrize("name", STREAMING)
def test_streaming_does_not_wait_for_the_device(name, no_autocast):
    """Without a key mask the host knows how long rows are: a prompt, short or long, and then some tokens, or one."""
    about = {"causal": True, "max_length": 256, "batch_first": True, **mechanism(name).examples[0]}
    layer = subquad.MultiheadAttention(WIDTH, 4, attention=name, **about).eval()
    for sizes in ((8, 1), (20, 24, 1)):
        with fake_device(bodies=True) as moves, torch.no_grad():
            state = on_fake_gpu(layer, "meta").start(2, rollback=0)
            for t in sizes:
                out, state = layer.extend(torch.empty(2, t, WIDTH, device="meta"), state)
                assert out.shape == (2, t, WIDTH)
            assert not moves.found, f"{moves.found} move to the CPU"


@pytest.mark.parametrize("name", STREAMING)
def test_streaming_of_padded_rows_does_not_wait(name, no_autocast):
    """But to see whether there is padding: rows of their own length go on without a mask, and in another order; with
    one where the host must not look.
    """
    about = {"causal": True, "max_length": 256, "batch_first": True, **mechanism(name).examples[0]}
    layer = on_fake_gpu(subquad.MultiheadAttention(WIDTH, 4, attention=name, **about).eval(), "meta")
    for sizes in ((8, 1, 1), (40, 24, 1)):
        with fake_device(bodies=True) as moves, torch.no_grad():
            state = layer.start(2, rollback=0)
            for number, t in enumerate(sizes):
                x, real = torch.empty(2, t, WIDTH, device="meta"), torch.empty(2, t, dtype=torch.bool, device="meta")
                with devices.without_waiting() if number != 1 else nullcontext():
                    out, state = layer.extend(x, state, key_mask=None if number == 1 else real)
                assert out.shape == (2, t, WIDTH)
                state = state.reorder(torch.empty(2, dtype=torch.int64, device="meta"))
            assert not moves.found, f"{moves.found} move to the CPU"
            with pytest.raises(GuardOnDataDependentSymNode):
                layer.extend(x, state, key_mask=real)


@pytest.mark.parametrize("name", subquad.available())
def test_a_few_tokens_stay_on_the_device(name, no_autocast):
    """Some sources of keys are empty there."""
    options = {"causal": directions(name)[0], "max_length": 128, "batch_first": True, **mechanism(name).examples[0]}
    layer = subquad.MultiheadAttention(WIDTH, 4, attention=name, **options)
    with fake_device(bodies=True) as moves, torch.no_grad():
        for n in (1, 8):
            x = torch.empty(2, n, WIDTH, device="meta")
            assert on_fake_gpu(layer, "meta")(x, x, x, need_weights=False)[0].shape == x.shape
        assert not moves.found, f"{moves.found} move to the CPU"


@pytest.mark.slow
@pytest.mark.parametrize("name", subquad.available())
def test_operators_do_not_wait_with_any_example(name, no_autocast):
    """Also with dropout, which other kernels run, and in float64."""
    for causal in directions(name):
        for options in mechanism(name).examples:
            for padded in paddings(name) if options.get("causal", causal) == causal else ():
                for dropout, dtype in ((0.0, torch.float32), (0.1, torch.float32), (0.0, torch.float64)):
                    check_waiting(name, causal, padded, {**options, "dropout": dropout}, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", subquad.available())
def test_a_mechanism_stays_on_the_device_with_every_example(name):
    for causal in directions(name):
        for options in mechanism(name).examples:
            if options.get("causal", causal) == causal:
                trace(name, causal, options)


def make_model(head: str):
    config = SubquadConfig(
        vocab_size=50, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=128,
        attention="combiner-fixed:span=8", pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    return HEADS[head](config).eval()  # the statistics of a batch norm would ask the driver


def logits_of(model, head: str, device: str, **mask: Tensor) -> Tensor:
    ids = torch.zeros(2, N, dtype=torch.long, device=device)
    more = {"seq2seq": {"decoder_input_ids": ids}, "pair": {"pair_ids": ids}}.get(head, {})
    if mask and head == "pair":
        more |= {"pair_mask": mask["attention_mask"]}
    return model(ids, **more, **mask).logits


@pytest.mark.parametrize("head", sorted(HEADS))
def test_a_model_stays_on_the_device(head):
    with fake_gpu() as moves, torch.no_grad():
        logits = logits_of(on_fake_gpu(make_model(head)), head, "cuda")
        assert logits.device.type == "cuda" and logits.shape[0] == 2
        assert not moves.found, f"{moves.found} move to the CPU"


@pytest.mark.parametrize("head", sorted(HEADS))
def test_the_backward_pass_of_a_model_stays_on_the_device(head, no_autocast):
    trace_backward(make_model(head), lambda model: logits_of(model, head, "meta"))


@pytest.mark.parametrize("head", sorted(HEADS))
def test_a_padded_model_does_not_wait_for_the_device(head, no_autocast):
    """Forward and backward, inside the operators too."""

    def output(model):
        mask = torch.ones(2, N, dtype=torch.long, device="meta")
        return logits_of(model, head, "meta", attention_mask=mask)

    trace_backward(make_model(head), output, bodies=True)


@pytest.mark.parametrize("head", ["causal-lm", "sequence"])
def test_the_loss_of_a_model_does_not_wait_for_the_device(head, no_autocast):
    """Nor are labels read to see whether they are in range."""

    def output(model):
        ids, mask = (torch.ones(2, N, dtype=torch.long, device="meta") for _ in range(2))
        return model(ids, attention_mask=mask, labels=ids if head == "causal-lm" else ids[:, 0]).loss

    trace_backward(make_model(head), output, bodies=True)


@pytest.mark.parametrize("head", ["causal-lm", "masked-lm", "sequence", "token"])
def test_packed_batches_with_starts_on_the_host_do_not_wait(head, no_autocast):
    """Tensors of "meta" have no contents: whoever reads one fails. The starts have some."""
    starts, ids = torch.tensor([0, 20, 21, 50, N]), torch.zeros(1, N, dtype=torch.long, device="meta")
    logits = make_model(head).to("meta")(ids, cu_seqlens=starts).logits
    assert logits.device.type == "meta" and logits.shape[0] == (4 if head == "sequence" else 1)


@pytest.mark.parametrize("head", ["causal-lm", "sequence"])
def test_packed_batches_with_starts_on_the_device_do_not_wait(head, no_autocast):
    """Where the host must not."""

    def output(model):
        starts = torch.zeros(5, dtype=torch.int32, device="meta")
        return model(torch.zeros(1, N, dtype=torch.long, device="meta"), cu_seqlens=starts).logits

    with devices.without_waiting():
        trace_backward(make_model(head), output, bodies=True)


class Captured(Exception):
    """The graphs are there; they are not run where a list of edges without contents would have no length."""


def capture(call) -> tuple[list[GraphModule], list[GraphModule]]:
    """The graphs of the forward and of the backward pass; fullgraph=True raises where a second graph would begin."""
    forward, backward = [], []

    def forwards(graph, inputs):
        def run(*args):
            try:
                return graph(*args)
            except RuntimeError as problem:
                raise Captured from problem

        forward.append(graph)
        return make_boxed_func(run)

    def backwards(graph, inputs):
        backward.append(graph)
        return make_boxed_func(graph)

    with contextlib.suppress(Captured):
        backend = aot_autograd(fw_compiler=forwards, bw_compiler=backwards)
        out = torch.compile(call, fullgraph=True, backend=backend)()
        out.backward(torch.empty_like(out))
    torch.compiler.reset()
    return forward, backward


def check_graphs(call, parameters: list[Tensor], shape: tuple[int, ...]) -> None:
    """One graph forward, which gives the output (maybe behind new statistics), and one backward, for gradients."""
    (forward,), (backward,) = capture(call)
    assert any(tuple(x.shape) == shape and x.device.type == "meta" for x in results(forward))
    grads = [tuple(g.shape) for g in results(backward)]
    assert len(grads) > 1 and set(grads) <= {tuple(p.shape) for p in parameters}


def results(graph: GraphModule) -> list[Tensor]:
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    return [node.meta["val"] for node in output.args[0] if node is not None and isinstance(node.meta["val"], Tensor)]


@pytest.mark.parametrize("name", subquad.available())
def test_a_compiled_layer_is_one_graph(name, no_autocast):
    """Also where the number of edges is open: it is a symbol of the graph."""
    about = {"causal": directions(name)[0], "max_length": 128, "batch_first": True, **mechanism(name).examples[0]}
    layer = on_fake_gpu(subquad.MultiheadAttention(WIDTH, 4, attention=name, **about), "meta")
    x = torch.empty(2, N, WIDTH, device="meta", requires_grad=True)
    check_graphs(lambda: layer(x, x, x, need_weights=False)[0], [x, *layer.parameters()], (2, N, WIDTH))


@pytest.mark.parametrize("head", sorted(HEADS))
def test_a_compiled_model_is_one_graph(head, no_autocast):
    model = on_fake_gpu(make_model(head), "meta")
    shape = tuple(logits_of(model, head, "meta").shape)
    check_graphs(lambda: logits_of(model, head, "meta"), list(model.parameters()), shape)
