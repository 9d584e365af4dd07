"""One sequence over several processes: outputs, losses and gradients are those of one."""

from __future__ import annotations

import copy
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import subquad
from distributed_runs import Team, close, compare, compare_layer, compare_model, make_batch, make_model
from subquad.bench import Setting
from subquad.bench_processes import bytes_sent
from subquad.distributed import average_gradients, counted, layouts, merging, sequence_parallel, shard
from subquad.distributed.across import Across
from subquad.distributed.groups import DryGroup, Group, Pending
from subquad.distributed.layouts import zigzag_ranges
from subquad.distributed.parallel import check, divisible

HEADS = (
    "full",
    "combiner-fixed:span=5",
    "combiner-fixed:span=4,abstraction=mean",
    "combiner-window:span=4,window=6,sinks=3",
    "combiner-tree:span=3",
    "combiner-tree:span=2,depth=3,abstraction=deepsets-max",
    "longformer:window=7,global_tokens=2",
    "local:window=6",
    "local:window=5,shape=blocks",
    "strided:w=5",
    "strided:w=5,heads=multihead",
    "fixed:w=5,layer_index=1",
    "fixed:w=5,heads=union,close=true",
    "linear",
    "performer",
    "cosformer",
    "long-short:window=4,rank=2,segment=6",
)
LAYERS = (
    "composite-slice:slice_length=5",
    "composite-slice:slice_length=4,extension=2.0,positions=ms-vipe,max_length=128",
    "composite-slice:slice_length=3,levels=3,composition=global-local,pool=linear,share_weights=False",
    "composite-slice:slice_length=4,local=mlp,composition=parallel,pool=max",
)


def all_cases(team: Team, lengths: tuple[int, ...], masks: tuple[str, ...]) -> None:
    for function, specs in ((compare, HEADS), (compare_layer, LAYERS)):
        for spec in specs:
            for causal in (True, False):
                for n in lengths:
                    for mask in masks:
                        team.run(function, spec, causal, n, mask)


# ---- two processes -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two():
    team = Team(2)
    yield team
    team.close()


def test_every_mechanism_on_two_processes(two):
    """Shards are no multiples of the span, rows are padded on either side and in the middle."""
    all_cases(two, (23,), ("none", "right", "left", "interior"))


def test_other_lengths_and_numbers(two):
    for spec in (
        "full",
        "combiner-fixed:span=5",
        "longformer:window=70",
        "linear",
        "long-short:window=4,rank=2,segment=6",
    ):
        for causal in (True, False):
            two.run(compare, spec, causal, 3)
            two.run(compare, spec, causal, 40, "right", "float32")
            two.run(compare, spec, causal, 23, "left", "float64", 0.3)  # dropout, by one seed
    for causal in (True, False):
        two.run(compare, "combiner-window:span=4,window=6,sinks=3", causal, 31, "none", "float64", 0.0, 4, 2)
        two.run(compare_layer, "composite-slice:slice_length=5", causal, 23, "left", "float64", 0.3)
        two.run(compare_layer, "composite-slice:slice_length=4,local=mlp", causal, 23, "left", "float64", 0.3)
    two.run(compare, "combiner-fixed:span=128", True, 64, "none", "float32")  # one process has the whole span
    two.run(compare, "full", True, 22, "right", "float64", 0.2, 2, 2, "zigzag")
    two.run(compare, "full", True, 3, "none", "float64", 0.0, 2, 2, "zigzag")


def test_summaries_that_find_their_keys(two):
    """The key of a span is what its query finds, in the keys of two heads that ask together or alone."""
    for more in ("attended", "residual-attended", "attended,shared_heads=2"):
        for causal in (True, False):
            spec = f"combiner-window:span=4,window=6,sinks=3,abstraction={more}"
            two.run(compare, spec, causal, 31, "none", "float64", 0.0, 4, 2)
            two.run(compare, spec, causal, 23, "left", "float64", 0.0, 4, 4)


def test_models_on_two_processes(two):
    rotary, learned = {"positions": "rotary"}, {"positions": "learned"}
    two.run(compare_model, "causal-lm", "combiner-fixed:span=4", 23, "right", rotary)
    two.run(compare_model, "causal-lm", "combiner-fixed:span=4", 22, "left", learned, "checkpointing")
    two.run(compare_model, "causal-lm", "composite-slice:slice_length=4", 23, "none", {"positions": "own"})
    two.run(compare_model, "masked-lm", "longformer:window=6", 23, "left", {"positions": "sinusoidal"})
    for pooling in ("mean", "cls"):
        two.run(compare_model, "sequence", "combiner-fixed:span=4", 23, "left", {"pooling": pooling})
    dropped = {"dropout": 0.2, "attention_dropout": 0.3}
    two.run(compare_model, "causal-lm", "combiner-fixed:span=4", 23, "right", dropped, "alone")
    two.run(compare_model, "causal-lm", "full", 22, "none", dropped, "alone, checkpointing")


def test_models_close_gaps_across_processes(two):
    """Padding between tokens: a token may move to another process, and its logits come back."""
    for head, spec, keys, how in (
        ("masked-lm", "longformer:window=6", {"positions": "sinusoidal"}, ""),
        ("causal-lm", "combiner-fixed:span=4", {"positions": "rotary"}, "checkpointing"),
        ("causal-lm", "composite-slice:slice_length=4", {"positions": "own"}, ""),
        ("token", "full", {"positions": "learned"}, ""),
        ("sequence", "linear", {"pooling": "mean"}, ""),
        ("causal-lm", "combiner-fixed:span=4", {"dropout": 0.2, "attention_dropout": 0.3}, "alone"),
    ):
        two.run(compare_model, head, spec, 23, "interior", keys, how)


def hidden_states(group: Group, head: str) -> None:
    """Inputs that are vectors, and outputs of every layer: each process has those of its own slots, with gradients."""
    model, batch = make_model(head, "combiner-fixed:span=4"), make_batch(head, 23, "interior")
    divided, real = sequence_parallel(copy.deepcopy(model), group), batch["attention_mask"]
    x = torch.randn(2, 23, 16, dtype=torch.float64)
    parts = shard({"inputs_embeds": x, "attention_mask": real}, group)
    whole, part = x.clone().requires_grad_(), parts["inputs_embeds"].clone().requires_grad_()
    expected = model(inputs_embeds=whole, attention_mask=real, output_hidden_states=True)
    found = divided(**{**parts, "inputs_embeds": part}, output_hidden_states=True)
    cut = subquad.distributed.Layout(group, 23)
    for a, b in zip(found.hidden_states, expected.hidden_states, strict=True):
        close(a, cut.take(b), "hidden states")
    close(found.logits, cut.take(expected.logits), "logits")
    weight = torch.randn(expected.logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (expected.logits * weight).sum().backward()
    (found.logits * cut.take(weight)).sum().backward()
    close(part.grad, cut.take(whole.grad), "gradient of the inputs")


def test_outputs_come_back_to_their_slots(two):
    two.run(hidden_states, "masked-lm")


def compare_converted(group: Group, mask: str) -> None:
    """A model of transformers: its positions are the slots of the batch, padded or not."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 64}  # fmt: skip
    model = subquad.hf.convert(LlamaForCausalLM(LlamaConfig(**sizes)).double(), "combiner-fixed:span=4")
    batch, divided = make_batch("causal-lm", 23, mask), sequence_parallel(copy.deepcopy(model), group)
    expected, found = model(**batch), divided(**shard(batch, group))
    real = subquad.distributed.Layout(group, 23).take(batch["attention_mask"].bool()[..., None])
    close(found.loss, expected.loss, f"{mask}: loss", 1e-6)  # computed in float32
    logits = subquad.distributed.Layout(group, 23).take(expected.logits)
    close(found.logits * real, logits * real, f"{mask}: logits")


def test_converted_models_on_two_processes(two):
    for mask in ("right", "left", "interior"):
        two.run(compare_converted, mask)


def refuse_packed(group: Group) -> None:
    model = sequence_parallel(make_model("causal-lm", "full"), group)
    ids = torch.zeros(1, 10, dtype=torch.long)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]])  # the second sequence begins with the second process
    with pytest.raises(ValueError, match="a packed batch cannot be divided among processes"):
        model(**shard({"input_ids": ids, "position_ids": positions}, group))
    with pytest.raises(ValueError, match="a packed batch cannot be divided among processes"):
        model(**shard({"input_ids": ids}, group), cu_seqlens=torch.tensor([0, 5]))
    expected = subquad.distributed.whole(copy.deepcopy(model))(ids, position_ids=torch.arange(10)[None]).logits
    found = model(**shard({"input_ids": ids, "position_ids": torch.arange(10)[None]}, group)).logits
    close(found, subquad.distributed.Layout(group, 10).take(expected), "logits")


def test_packed_batches_are_refused(two):
    two.run(refuse_packed)


def count_real(group: Group, spec: str, causal: bool, n: int) -> tuple[int, int, list[int]]:
    """What a process really sends in a call, in a forward and a backward pass."""
    a = sequence_parallel(subquad.attention(spec, num_heads=2, head_dim=8, causal=causal), group)
    size = next(hi - lo for lo, hi in subquad.distributed.Layout(group, n).mine)
    xs = [torch.randn(1, 2, size, 8, requires_grad=True) for _ in range(3)]
    a(*xs)
    with counted() as forward:
        out = a(*xs)
    with counted() as backward:
        out.sum().backward()
    agreement = 4 * 8 * (group.size - 1)  # four numbers about the batch, which a model exchanges once
    return forward.sent - agreement, backward.sent, forward.parts


def test_counted_bytes(two):
    """What is counted without data is what travels."""
    for spec in (
        "combiner-fixed:span=4",
        "combiner-window:span=4,window=6,sinks=3",
        "longformer:window=8",
        "full",
        "linear",
    ):
        for causal in (True, False):
            found = two.run(count_real, spec, causal, 37)
            counted_ = bytes_sent(spec, 37, 2, Setting(heads=2, head_dim=8, causal=causal, backward=True))
            assert counted_.forward == max(one[0] for one in found), (spec, causal)
            assert counted_.backward == max(one[1] for one in found), (spec, causal)


def refuse_lengths(group: Group) -> str:
    a = sequence_parallel(subquad.attention("combiner-fixed", num_heads=1, head_dim=4), group)
    x = torch.randn(1, 1, 5 + 2 * group.rank, 4)
    with pytest.raises(ValueError, match="lengths differ between the processes of a sequence: 5, 7 tokens") as caught:
        a(x, x, x)
    with pytest.raises(ValueError, match="batch sizes differ"):
        a(*[torch.randn(1 + group.rank, 1, 5, 4)] * 3)
    model = sequence_parallel(make_model("causal-lm", "full"), group)
    with pytest.raises(ValueError, match="length 66, beyond max_position_embeddings=64"):
        model(torch.zeros(1, 33, dtype=torch.long))
    with pytest.raises(TypeError, match="cannot give its weights"):
        a.weights(x, x)
    return str(caught.value)


def test_lengths_that_differ_are_an_error_on_all(two):
    assert len(set(two.run(refuse_lengths))) == 1


def save_and_load(group: Group, path: str) -> None:
    """A state dict is that of the whole model, on any number of processes."""
    model = sequence_parallel(make_model("causal-lm", "combiner-fixed:span=4"), group)
    batch = make_batch("causal-lm", 20, "none")
    loss = model(**shard(batch, group)).loss
    loss.backward()
    average_gradients(model, group)
    if group.rank == 0:
        model.save_pretrained(path)
    dist.barrier()
    from subquad.models import SubquadForCausalLM

    again = SubquadForCausalLM.from_pretrained(path, dtype=torch.float64)
    close(again(**batch).loss, loss, "loss of the loaded model")
    assert subquad.distributed.whole(model)(**batch).loss == again(**batch).loss


def test_a_saved_model_loads_anywhere(two, tmp_path):
    two.run(save_and_load, str(tmp_path / "model"))


# ---- other numbers of processes ------------------------------------------------------------------------------


def test_three_processes():
    """One of them may have nothing of a row, or no whole span."""
    team = Team(3)
    try:
        all_cases(team, (23,), ("right",))
        for spec in ("full", "combiner-fixed:span=16", "combiner-tree:span=3", "longformer:window=40", "performer"):
            for causal in (True, False):
                team.run(compare, spec, causal, 23, "left")
        for function, specs in ((compare, HEADS), (compare_layer, LAYERS)):  # a process may have no token at all
            for spec in specs:
                team.run(function, spec, True, 2)
                team.run(function, spec, False, 1)
        team.run(compare, "full", True, 25, "left", "float64", 0.0, 4, 2, "zigzag")
        team.run(compare_model, "causal-lm", "combiner-fixed:span=4", 23, "right", {"positions": "rotary"})
    finally:
        team.close()


def compare_mesh(group: Group) -> None:
    """Two dimensions: DDP over the whole mesh, or over the data dimension with the sequence's gradients averaged."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    batch = make_batch("causal-lm", 22, "none")
    whole = make_model("causal-lm", "combiner-fixed:span=4")
    whole(**batch).loss.backward()
    own = {key: x[mesh["data"].get_local_rank()][None] for key, x in batch.items()}
    for over in (None, mesh["data"].get_group()):
        model = sequence_parallel(make_model("causal-lm", "combiner-fixed:span=4"), mesh["sequence"])
        wrapped = DistributedDataParallel(model, process_group=over)
        wrapped(**shard(own, mesh["sequence"])).loss.backward()
        if over is not None:
            average_gradients(model, mesh["sequence"])
        for (name, p), q in zip(whole.named_parameters(), model.parameters(), strict=True):
            close(q.grad, p.grad, f"DDP: gradient of {name}", 1e-7)


def compare_fsdp(group: Group) -> None:
    """Parameters divided over the data dimension, sequences over the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    batch = make_batch("causal-lm", 22, "none")
    whole = make_model("causal-lm", "combiner-fixed:span=4")
    whole(**batch).loss.backward()
    own = {key: x[mesh["data"].get_local_rank()][None] for key, x in batch.items()}
    model = sequence_parallel(make_model("causal-lm", "combiner-fixed:span=4"), mesh["sequence"])
    for block in model.encoder.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    model(**shard(own, mesh["sequence"])).loss.backward()
    average_gradients(model, mesh["sequence"])
    for (name, p), q in zip(whole.named_parameters(), model.parameters(), strict=True):
        close(q.grad.full_tensor(), p.grad, f"FSDP: gradient of {name}", 1e-7)


@pytest.mark.slow
def test_four_processes():
    team = Team(4)
    try:
        all_cases(team, (7, 61), ("none", "right", "left", "interior"))
        team.run(compare_mesh)
        team.run(compare_fsdp)
        for n in (22, 61):
            team.run(compare, "full", True, n, "right", "float64", 0.2, 4, 2, "zigzag")
    finally:
        team.close()


# ---- faults --------------------------------------------------------------------------------------------------


def die_in_the_middle(group: Group) -> tuple[str, float]:
    a = sequence_parallel(subquad.attention("combiner-fixed", num_heads=1, head_dim=4), group)
    x = torch.randn(1, 1, 8, 4)
    a(x, x, x)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(ConnectionError) as caught:
        a(x, x, x)
    return str(caught.value), time.monotonic() - start


def test_a_dead_process_is_named():
    team = Team(2)
    try:
        for pipe in team.pipes:
            pipe.send((die_in_the_middle, ()))
        assert team.pipes[0].poll(60), "the other process does not hang"
        (said, seconds), error = team.pipes[0].recv()
        assert error is None and seconds < 30
        assert said.startswith(f"process 1 (pid {team.processes[1].pid}) has died") and "\n" not in said
    finally:
        team.close()


# ---- one process ---------------------------------------------------------------------------------------------


def test_what_cannot_be_divided_says_what_can():
    for spec in ("sbm", "routing", "random", "bigbird", "combiner-routing", "strided:map=topk", "full:map=entmax"):
        with pytest.raises(
            ValueError, match=r"cannot be divided among processes; these can: full, strided, .*combiner-tree"
        ):
            check(subquad.attention(spec, num_heads=2, head_dim=4))
    with pytest.raises(ValueError, match="zigzag"):
        check(subquad.attention("local", num_heads=2, head_dim=4), zigzag=True)
    assert {"combiner-fixed", "composite-slice", "long-short", "linear"} <= set(divisible())


def test_zigzag_gives_all_the_same_work():
    n, p = 4096, 8
    work = [sum((i + 1) for lo, hi in some for i in range(lo, hi)) for some in zigzag_ranges(n, p)]
    assert max(work) == min(work) and sorted(x for some in zigzag_ranges(n, p) for x in some)[0] == (0, 256)


@pytest.mark.parametrize("spec", ["combiner-fixed:span=4", "longformer:window=4"])
def test_own_keys_are_attended_to_while_others_travel(monkeypatch, spec):
    """The keys of others are sent for before the own part is computed, and waited for after it."""
    events = []

    class Noting(DryGroup):
        def _start(self, *args):
            pending = super()._start(*args)
            events.append("send")
            pending.wait = lambda: events.append("wait") or Pending.wait(pending)
            return pending

    def noting(function, at):
        return lambda *args: events.append(args[at].rpartition(":")[2]) or function(*args)

    monkeypatch.setattr(merging, "merge", noting(merging.merge, 7))
    monkeypatch.setattr(merging, "merge_backward", noting(merging.merge_backward, 10))
    a, group = subquad.attention(spec, num_heads=2, head_dim=8, causal=True).to("meta"), Noting(2, 1)
    a.across = Across(group)
    xs = [torch.empty(1, 2, 16, 8, device="meta", requires_grad=True) for _ in range(3)]
    with subquad.distributed.Layout(group, 32).active():
        out = a(*xs)
        assert events[events.index("send") :] == ["send", "local", "wait", "remote"]  # summaries come before that
        events.clear()
        out.backward(torch.empty_like(out))
    assert events[:4] == ["remote", "send", "local", "wait"]


def test_a_graph_can_be_captured_after_a_sequence_was_divided():
    """torch.compile cannot read a ContextVar: where no layout is in use, none is read."""
    token = layouts.enter(object())
    assert layouts.current() is not None
    layouts.leave(token)
    step = torch.compile(lambda x: x + (layouts.current() is None), backend="eager", fullgraph=True)
    assert torch.equal(step(torch.zeros(2)), torch.ones(2))


@pytest.mark.parametrize("causal", [True, False])
def test_summaries_are_a_fraction_of_the_ring(causal):
    setting = Setting(causal=causal, backward=True)
    ring = bytes_sent("full", 16384, 4, setting)
    keys = 2 * 3 * 16384 // 4 * 512 * 4  # keys and values, three steps of a quarter of the tokens, float32
    assert ring.forward == keys and ring.backward == keys + keys // 3 * 4
    assert bytes_sent("combiner-fixed", 16384, 4, setting).both <= ring.both / 16
    assert bytes_sent("combiner-fixed:span=128", 16384, 4, setting).forward == 2 * 32 * 3 * 512 * 4  # 32 summaries each


def test_the_command_counts():
    from subquad.cli import app

    told = CliRunner().invoke(app, ["bench", "combiner-fixed", "--n", "1024", "--processes", "2", "--count-only"])
    assert told.exit_code == 0 and "combiner-fixed" in told.output and "1/" in told.output
    sent = [float(number) for number in re.findall(r"([0-9.]+) MiB", told.output)]
    assert len(sent) == 2 and all(0 < number < 1 for number in sent), "small numbers are not rounded to 0"
    wrong = CliRunner().invoke(app, ["bench", "combiner-fixed", "--count-only"])
    assert wrong.exit_code != 0
