"""`torch.export`: one graph for every length and batch, from a fresh model, and nothing is left behind."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys

import pytest
import torch

from small_models import FIVE, config, inputs
from subquad.models import HEADS


@pytest.mark.parametrize(
    ("head", "spec"),
    [("causal-lm", "full"), ("sequence", "full"), ("seq2seq", "full"), ("causal-lm", "composite-slice:slice_length=4")],
)
def test_export_with_dynamic_sizes(head, spec):
    model = HEADS[head](config(attention=spec, num_hidden_layers=1)).eval()
    m, n = torch.export.Dim("m", min=2, max=8), torch.export.Dim("n", min=9, max=16)
    given, rows = inputs(head), torch.export.Dim("b", min=1, max=8)
    shapes = {name: {0: rows, 1: m if name == "decoder_input_ids" else n} for name in given}
    program = torch.export.export(model, (), kwargs=given, dynamic_shapes=shapes, strict=False)
    longer = inputs(head, 16, rows=3)
    longer["attention_mask"][0, 9:] = 0
    torch.testing.assert_close(program.module()(**longer).logits, model(**longer).logits, rtol=1e-4, atol=1e-5)


FRESH = """
import torch
from subquad.models import SubquadConfig, SubquadForCausalLM

small = {"vocab_size": 20, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
n = torch.export.Dim("n", min=3, max=64)
for spec in ("logsparse", "combiner-fixed"):
    make = lambda: SubquadForCausalLM(SubquadConfig(**small, max_position_embeddings=64, attention=spec)).eval()
    model, ids = make(), torch.arange(24).view(2, 12) % 20
    program = torch.export.export(model, (), {"input_ids": ids}, dynamic_shapes={"input_ids": {1: n}}, strict=False)
    longer = torch.arange(66).view(2, 33) % 20
    after = make()(longer).logits  # another model, after the export
    assert type(after) is torch.Tensor and after.isfinite().all(), spec
    torch.testing.assert_close(program.module()(input_ids=longer).logits, model(longer).logits)
print("both")
"""


def test_a_fresh_process_exports_before_it_has_computed_anything():
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "both", done.stderr


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # the exporter imports it
def test_the_exporter_of_transformers():
    """It makes every axis dynamic, and calls `forward` by its signature."""
    exporters = pytest.importorskip("transformers.exporters")
    model = HEADS["token"](config(attention="combiner-fixed:span=4", num_hidden_layers=1)).eval()
    settings = exporters.DynamoConfig(dynamic=True)
    program = exporters.DynamoExporter().export(model, {**inputs("token"), "return_dict": True}, config=settings)
    other = inputs("token", 9, rows=3)
    torch.testing.assert_close(program.module()(**other).logits, model(**other).logits, rtol=1e-4, atol=1e-5)


BLOCKS = ["combiner-fixed", "combiner-window", "longformer", "strided", "logsparse", "sbm", "fixed", "bigbird"]
SCALES = [
    "composite-slice:slice_length=4,levels=3",
    "combiner-logsparse",
    "combiner-axial",
    "combiner-axial:plan=horizontal,split=true,abstraction=mean",
    "combiner-mixture",
    "combiner-tree",
]


@pytest.mark.parametrize(
    ("head", "specs"),
    [
        pytest.param("causal-lm", BLOCKS, id="causal-blocks"),
        pytest.param("token", SCALES, id="bidirectional-scales"),
        pytest.param("token", BLOCKS, id="bidirectional-blocks", marks=pytest.mark.slow),
        pytest.param("causal-lm", SCALES, id="causal-scales", marks=pytest.mark.slow),
    ],
)
def test_export_of_sub_quadratic_attention_with_dynamic_sizes(head, specs):
    """A fresh model, any length and batch, left padding; and exporting leaves nothing behind for the next model."""
    torch.manual_seed(0)
    keys = {"attention": specs, "evaluation_seed": 3, "num_hidden_layers": len(specs), "max_position_embeddings": 64}
    model = HEADS[head](config(**keys)).eval()
    ids, mask = torch.randint(20, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    b, n = torch.export.Dim("b", min=1, max=8), torch.export.Dim("n", min=3, max=64)
    given = {"input_ids": ids, "attention_mask": mask}
    shapes = {name: {0: b, 1: n} for name in given}
    program = torch.export.export(model, (), kwargs=given, dynamic_shapes=shapes, strict=False)
    for rows, length in ((3, 5), (1, 33), (2, 64)):
        longer = {
            "input_ids": torch.randint(20, (rows, length)),
            "attention_mask": torch.ones(rows, length, dtype=torch.long),
        }
        longer["attention_mask"][0, :3] = 0
        expected = model(**longer).logits
        assert type(expected) is torch.Tensor
        real = longer["attention_mask"].bool()
        found = program.module()(**longer).logits
        torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "words"),
    [("h-transformer-1d", "number of levels follows"), ("composite-slice:local=mlp", "local=mlp cannot be traced")],
)
def test_what_cannot_be_exported_for_every_length_says_so(spec, words):
    model = HEADS["token"](config(attention=spec, num_hidden_layers=1)).eval()
    n = torch.export.Dim("n", min=3, max=32)
    with pytest.raises(ValueError, match=f"{words}.*export it for one length"):
        torch.export.export(
            model, (), {"input_ids": torch.ones(2, 12).long()}, dynamic_shapes={"input_ids": {1: n}}, strict=False
        )


def test_a_traced_graph_refuses_a_packed_batch():
    """Positions are values, which a graph is not made for: it must not take several sequences for one."""
    model = HEADS["causal-lm"](config(num_hidden_layers=1)).eval()
    ids, one = torch.randint(3, 20, (2, 9)), torch.arange(9).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    padded = (mask.cumsum(1) - 1).clamp(min=0)  # the first slots of a row have position 0, all but one are padding
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": padded}
    program = torch.export.export(model, (), given, strict=False).module()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    several = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).repeat(2, 1)
    for graph in (program, compiled):
        for positions in (padded, one):
            torch.testing.assert_close(
                graph(**{**given, "position_ids": positions}).logits[1],
                model(**{**given, "position_ids": positions}).logits[1],
            )
        with pytest.raises(RuntimeError, match="position_ids restart at 0"):
            graph(**{**given, "position_ids": several})


def step_inputs(ids, cache, states=None):
    """What a decode step is given: of a translator also the encoder's states."""
    if states is None:
        return {"input_ids": ids, "past_key_values": cache}
    return {"decoder_input_ids": ids, "encoder_outputs": states, "past_key_values": cache}


@pytest.mark.parametrize(
    ("head", "spec"), [*(("causal-lm", spec) for spec in FIVE), ("seq2seq", "combiner-fixed:span=4")]
)
def test_one_exported_step_writes_a_whole_text(head, spec, tmp_path, monkeypatch):
    """A program takes the cache that it returned, past the length that it was traced at, and survives saving."""
    monkeypatch.setattr(logging.getLogger("torch._export.serde.serialize"), "disabled", True)  # its message is broken
    torch.manual_seed(0)
    model = HEADS[head](config(attention=spec, num_hidden_layers=1, evaluation_seed=3)).eval()
    given = inputs(head)
    given["attention_mask"][0, :5] = 0  # rows of unequal lengths
    translates = head == "seq2seq"
    given = {**given, "decoder_input_ids": torch.ones(2, 1, dtype=torch.long)} if translates else given
    token = torch.tensor([[4], [5]])
    with torch.no_grad():
        begun = model(**given, use_cache=True)
        states = (begun.encoder_last_hidden_state,) if translates else None
        cache, twin = copy.deepcopy(begun.past_key_values), begun.past_key_values
        own = cache.self_attention_cache if translates else cache
        own.reserve(24)
        program = torch.export.export(model, (), step_inputs(token, cache, states), strict=False)
        if spec == "full":
            torch.export.save(program, tmp_path / "step.pt2")
            program = torch.export.load(tmp_path / "step.pt2")
        step = program.module()
        cache = copy.deepcopy(cache)  # tracing leaves the one it is given alone; a step writes into it
        for _ in range(6):
            output = step(**step_inputs(token, cache, states))
            expected = model(**step_inputs(token, twin, states))
            torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-5)
            cache, twin, token = output.past_key_values, expected.past_key_values, output.logits[:, -1:].argmax(-1)
        assert cache.get_seq_length() == twin.get_seq_length() == (7 if translates else 18)
        output = model(**step_inputs(token, cache, states))  # the model itself goes on from it, too
        torch.testing.assert_close(output.logits, model(**step_inputs(token, twin, states)).logits)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # the exporter imports it
@pytest.mark.parametrize(("head", "dynamic"), [("causal-lm", True), ("seq2seq", False)])
def test_prefill_and_decode_of_the_exporter_of_transformers(head, dynamic):
    """It takes the calls of `generate` apart; their caches go through its hands, and come back from the graphs."""
    exporters = pytest.importorskip("transformers.exporters")
    utils = pytest.importorskip("transformers.exporters.utils")
    model = HEADS[head](config(attention="longformer:window=4", num_hidden_layers=1, eos_token_id=None)).eval()
    given = {name: x for name, x in inputs(head).items() if not name.startswith("decoder")}
    for name, (part, taken) in utils.decompose_for_generation(model, given).items():
        program = exporters.DynamoExporter().export(part, taken, config=exporters.DynamoConfig(dynamic=dynamic))
        with torch.no_grad():
            got, expected = (call(**copy.deepcopy(taken)) for call in (program.module(), part))
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-5, msg=name)
        assert got.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


def test_a_cache_that_cannot_be_exported_says_so():
    """A state that is to be computed again has nothing to go on from."""
    model = HEADS["causal-lm"](
        config(attention="local:window=4", num_hidden_layers=1, max_position_embeddings=256)
    ).eval()
    with torch.no_grad():
        cache = model(torch.ones(2, 200, dtype=torch.long), use_cache=True).past_key_values
        cache.crop(-150)
        with pytest.raises(ValueError, match="taken back"):
            step = {"input_ids": torch.tensor([[4], [5]]), "past_key_values": cache}
            torch.export.export(model, (), step, strict=False)
