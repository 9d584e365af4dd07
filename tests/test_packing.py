"""Packed batches: no sequence sees another, each gives what it gives alone, in the layer and in the models."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

import subquad
from subquad.attention.registry import mechanism
from subquad.models import HEADS, SubquadConfig, SubquadForCausalLM, SubquadModel
from subquad.packing import packing_of

LENGTHS = [5, 1, 13, 5, 8]
ENDS = [0, 5, 6, 19, 24, 32]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]  # (1, 32)
CU = torch.tensor(ENDS, dtype=torch.int32)
# sets of one's own have no spec; sampled graphs follow the row that a sequence stands in, see the test of gradients
SPECS = [name for name in subquad.available() if name not in ("pattern", "combiner-plan")]
STEADY = [name for name in SPECS if not mechanism(name).capabilities.stochastic]


def config(**keys) -> SubquadConfig:
    small = {"vocab_size": 20, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return SubquadConfig(
        **{**small, "max_position_embeddings": 16, "num_labels": 3, "num_hidden_layers": 2, "pad_token_id": 0, **keys}
    )


def parts(x: torch.Tensor) -> list[torch.Tensor]:
    """The sequences of a row (1, 32, …), each as a row of its own."""
    return [x[:, a:b] for a, b in pairwise(ENDS)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", STEADY)
@pytest.mark.parametrize("max_length", [None, 16])
def test_the_layer_gives_each_sequence_what_it_gives_alone(spec, causal, max_length):
    able = mechanism(spec).capabilities
    if not (able.causal if causal else able.bidirectional) or (able.needs_max_length and max_length is None):
        pytest.skip("not a direction of this mechanism, or it needs max_length")
    torch.manual_seed(0)
    layer = subquad.MultiheadAttention(
        8, 2, attention=spec, causal=causal, max_length=max_length, batch_first=True, dtype=torch.float64
    )
    x = torch.randn(1, 32, 8, dtype=torch.float64)
    alone = torch.cat([layer(part, part, part, need_weights=False)[0] for part in parts(x)], 1)
    for packed in ({"cu_seqlens": CU}, {"position_ids": POSITIONS}):
        assert_close(layer(x, x, x, need_weights=False, **packed)[0], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spec", SPECS)
def test_no_sequence_sees_another(spec):
    able = mechanism(spec).capabilities
    torch.manual_seed(0)
    layer = subquad.MultiheadAttention(
        8, 2, attention=spec, causal=not able.bidirectional, max_length=16, batch_first=True
    )
    x = torch.randn(1, 32, 8, requires_grad=True)
    y = layer(x, x, x, need_weights=False, cu_seqlens=CU)[0]
    for a, b in pairwise(ENDS):
        (gradient,) = torch.autograd.grad(y[:, a:b].square().sum(), x, retain_graph=True)
        outside = torch.ones(32, dtype=torch.bool)
        outside[a:b] = False
        assert gradient[:, outside].abs().max() == 0
        assert gradient[:, a:b].abs().max() > 0 or b - a == 1  # a sampled graph of one token may be empty


def test_weights_of_a_packed_batch_are_blocks():
    torch.manual_seed(0)
    layer = subquad.MultiheadAttention(8, 2, attention="combiner-fixed:span=4", causal=True, batch_first=True)
    x = torch.randn(1, 32, 8)
    _, weights = layer(x, x, x, cu_seqlens=CU)
    assert_close(weights.sum(-1), torch.ones(1, 32))
    for part, a, b in zip(parts(x), ENDS, ENDS[1:], strict=False):
        assert_close(weights[:, a:b, a:b], layer(part, part, part)[1])
    blocks = torch.block_diag(*[torch.ones(n, n) for n in LENGTHS])
    assert (weights[0] * (1 - blocks) == 0).all()


def test_unbatched_and_batch_second_layers_take_packed_batches():
    torch.manual_seed(0)
    layer = subquad.MultiheadAttention(8, 2, attention="longformer:window=4", causal=True)
    x = torch.randn(32, 8)
    expected = layer(x[:, None], x[:, None], x[:, None], need_weights=False, cu_seqlens=CU)[0][:, 0]
    assert_close(layer(x, x, x, need_weights=False, cu_seqlens=CU.long())[0], expected)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("spec", ["full", "combiner-fixed", "composite-slice", "longformer:window=4"])
@pytest.mark.parametrize("head", ["causal-lm", "masked-lm", "token", "sequence"])
def test_models_give_each_sequence_what_it_gives_alone(head, spec, positions):
    if positions == "rotary" and spec == "composite-slice":
        positions = "own"
    torch.manual_seed(0)
    model = HEADS[head](config(attention=spec, positions=positions, initializer_range=0.5)).double().eval()
    ids = torch.randint(1, 20, (1, 32))
    axis = 0 if head == "sequence" else 1
    with torch.no_grad():
        alone = torch.cat([model(part).logits for part in parts(ids)], axis)
        for packed in ({"cu_seqlens": CU}, {"position_ids": POSITIONS}):
            for mask in (None, torch.ones_like(ids)):
                assert_close(model(ids, mask, **packed).logits, alone, rtol=1e-9, atol=1e-9)


def test_the_loss_of_a_packed_batch_is_that_of_its_sequences():
    """32 tokens of 5 sequences, 27 predictions; several packed rows, one of them with padding behind."""
    torch.manual_seed(0)
    model = SubquadForCausalLM(config(attention="combiner-fixed")).double().eval()
    ids = torch.randint(1, 20, (2, 32))
    mask = torch.ones_like(ids)
    mask[1, 19:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    packed = model(ids, mask, labels=labels, position_ids=POSITIONS).loss
    rows = [*parts(ids[:1]), *parts(ids[1:])[:3]]
    apart = [model(row, labels=row).loss * (row.shape[1] - 1) for row in rows if row.shape[1] > 1]
    assert_close(packed, sum(apart) / sum(row.shape[1] - 1 for row in rows))


def test_hidden_states_and_attentions_of_a_packed_batch():
    torch.manual_seed(0)
    model = SubquadModel(config(attention="longformer:window=4", positions="rotary")).eval()
    ids = torch.randint(1, 20, (1, 32))
    told = model(ids, cu_seqlens=CU, output_attentions=True, output_hidden_states=True)
    assert_close(told.last_hidden_state, model(ids, cu_seqlens=CU).last_hidden_state, rtol=1e-4, atol=1e-5)
    alone = [model(part, output_attentions=True).attentions[1] for part in parts(ids)]
    assert_close(told.attentions[1], torch.stack([torch.block_diag(*[w[0, h] for w in alone]) for h in range(2)])[None])


def test_records_of_a_packed_batch_speak_of_all_sequences():
    torch.manual_seed(0)
    model = HEADS["token"](config(attention="sbm:clusters=4", density_weight=1.0)).train()
    ids = torch.randint(1, 20, (1, 32))
    output = model(ids, cu_seqlens=CU, labels=ids % 3)
    output.loss.backward()
    assert output.density.shape == (2, 2) and 0 < output.density.mean() < 1


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        ({"cu_seqlens": torch.tensor([0, 5, 31])}, "end with the 32 tokens"),
        ({"cu_seqlens": torch.tensor([1, 5, 32])}, "must begin with 0"),
        ({"cu_seqlens": torch.tensor([0, 9, 5, 32])}, "never fall"),
        ({"cu_seqlens": torch.tensor([0.0, 32.0])}, "int32 or int64"),
        ({"cu_seqlens": torch.tensor([[0, 32]])}, "shape \\(S \\+ 1,\\)"),
        ({"cu_seqlens": torch.tensor([0, 20, 32])}, "length 20, beyond max_position_embeddings=16"),
        ({"position_ids": torch.zeros(1, 31, dtype=torch.long)}, "position_ids must have shape"),
    ],
)
def test_what_is_no_packing_is_refused(packed, words):
    with pytest.raises((ValueError, TypeError), match=words):
        SubquadModel(config())(torch.ones(1, 32, dtype=torch.long), **packed)


def test_sequences_of_one_length_stay_where_they_are():
    packing = packing_of((1, 12), cu_seqlens=torch.tensor([0, 4, 8, 12]))
    x = torch.randn(1, 12, 3)
    rows = packing.buckets[0].rows(x)
    assert packing.buckets[0].in_order and rows.shape == (3, 4, 3) and rows.data_ptr() == x.data_ptr()
    assert packing.join([rows]).equal(x)
    uneven = packing_of((1, 12), cu_seqlens=torch.tensor([0, 4, 9, 12]))
    assert not any(bucket.in_order for bucket in uneven.buckets)
    assert uneven.join([bucket.rows(x) for bucket in uneven.buckets]).equal(x)


def test_one_row_for_all_sequences():
    with pytest.raises(ValueError, match="a batch of 1, not of 2"):
        SubquadModel(config())(torch.ones(2, 8, dtype=torch.long), cu_seqlens=torch.tensor([0, 8]))
    layer = subquad.MultiheadAttention(8, 2, batch_first=True)
    x, y = torch.randn(1, 4, 8), torch.randn(1, 6, 8)
    with pytest.raises(ValueError, match="self-attention"):
        layer(x, y, y, cu_seqlens=torch.tensor([0, 4]))


def test_few_slots_are_filled_up():
    """Lengths from 1 to 2000: hardly more slots than tokens, and far fewer calls than sequences."""
    torch.manual_seed(0)
    lengths = torch.randint(1, 2000, (200,))
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    packing = packing_of((1, int(ends[-1])), cu_seqlens=ends)
    slots = sum(bucket.slots.numel() for bucket in packing.buckets)
    assert slots < 1.06 * int(ends[-1]) and len(packing.buckets) < 60


@pytest.mark.parametrize("head", [head for head in HEADS if head not in ("pair", "seq2seq")])
@pytest.mark.parametrize("spec", ["full", "combiner-fixed", "composite-slice", "star", "longformer:window=4"])
def test_padding_anywhere_gives_a_row_what_it_gives_alone(head, spec):
    torch.manual_seed(0)
    model = HEADS[head](config(attention=spec, initializer_range=0.5)).double().eval()
    ids, mask = torch.randint(1, 20, (2, 14)), torch.ones(2, 14, dtype=torch.long)
    mask[0, [0, 4, 5, 9, 13]] = 0
    with torch.no_grad():
        padded = model(ids, mask, output_hidden_states=True)
        for row in range(2):
            real = mask[row].bool()
            alone = model(ids[row : row + 1, real], output_hidden_states=True)
            found = padded.logits[row] if head == "sequence" else padded.logits[row, real]
            assert_close(found, alone.logits[0], rtol=1e-9, atol=1e-9)
            assert_close(padded.hidden_states[-1][row, real], alone.hidden_states[-1][0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spec", ["full", "combiner-fixed", "composite-slice"])
def test_padding_anywhere_in_pairs_and_translations(spec):
    torch.manual_seed(0)
    keys = {"attention": spec, "initializer_range": 0.5, "decoder_start_token_id": 1}
    ids, mask = torch.randint(1, 20, (2, 14)), torch.ones(2, 14, dtype=torch.long)
    mask[0, [0, 4, 5, 9, 13]] = 0
    real, other = mask[0].bool(), ids.flip(0)
    pairs, translator = (HEADS[head](config(**keys)).double().eval() for head in ("pair", "seq2seq"))
    with torch.no_grad():
        whole = pairs(ids, mask, pair_ids=other, pair_mask=mask).logits[:1]
        assert_close(whole, pairs(ids[:1, real], pair_ids=other[:1, real]).logits, rtol=1e-9, atol=1e-9)
        whole = translator(ids, mask, decoder_input_ids=other, decoder_attention_mask=mask).logits[:1, real]
        alone = translator(ids[:1, real], decoder_input_ids=other[:1, real]).logits
        assert_close(whole, alone, rtol=1e-9, atol=1e-9)


def prefix_behind_its_text() -> dict[str, torch.Tensor]:
    """A sequence of 40 tokens and its first 6: a causal layer gives both the same, unless something is drawn."""
    torch.manual_seed(0)
    text = torch.randn(1, 40, 8, dtype=torch.float64)
    return {"x": torch.cat([text, text[:, :6]], 1), "cu_seqlens": torch.tensor([0, 40, 46])}


@pytest.mark.parametrize("spec", ["full", "longformer:window=4", "combiner-fixed:span=4", "linear", "sbm:clusters=4"])
def test_sequences_of_a_pack_draw_numbers_of_their_own(spec):
    """Calls with weights have one seed for all sequences, which are in several buckets."""
    given = prefix_behind_its_text()
    x, ends = given["x"], given["cu_seqlens"]
    layer = subquad.MultiheadAttention(
        8, 2, dropout=0.5, attention=spec, causal=True, max_length=40, batch_first=True, dtype=torch.float64
    )
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(layer(x, x, x, cu_seqlens=ends)[0])
    assert found[0].equal(found[1])
    assert not torch.isclose(found[0][:, 40:46], found[0][:, :6]).all(), "both drop the same"


def test_weights_of_a_packed_batch_are_of_the_graphs_that_were_drawn():
    given = prefix_behind_its_text()
    x, ends = given["x"], given["cu_seqlens"]
    layer = subquad.MultiheadAttention(
        8, 2, attention="sbm:clusters=4", causal=True, max_length=40, batch_first=True, dtype=torch.float64
    )
    out, weights = layer(x, x, x, cu_seqlens=ends, average_attn_weights=False)
    values = (x @ layer.in_proj_weight[16:].T).unflatten(-1, (2, 4)).transpose(1, 2)  # (1, 2, 46, 4); no bias yet
    assert_close(out, layer.out_proj((weights @ values).transpose(1, 2).flatten(2)), rtol=1e-9, atol=1e-9)
    assert not (weights[0, :, 40:, 40:] > 0).equal(weights[0, :, :6, :6] > 0), "both have the same graph"


def test_the_density_of_a_packed_batch_is_that_of_its_weights():
    torch.manual_seed(0)
    model = SubquadModel(config(attention="sbm:clusters=4", max_position_embeddings=40)).train()
    ids, ends = torch.randint(1, 20, (1, 80)), torch.tensor([0, 40, 54, 68, 80])
    told = model(ids, cu_seqlens=ends, output_attentions=True, output_records=True)
    edges = (told.attentions[0] > 0).sum((0, 2, 3))
    assert_close(told.density[0], edges / (40**2 + 2 * 14**2 + 12**2))


def test_sampled_graphs_of_a_pack_are_those_of_its_sequences_in_evaluation():
    torch.manual_seed(0)
    keys = {"attention": "sbm:clusters=4", "max_position_embeddings": 40, "evaluation_seed": 3}
    model = SubquadForCausalLM(config(**keys, initializer_range=0.5)).double().eval()
    ids, ends = torch.randint(1, 20, (1, 80)), [0, 40, 54, 68, 80]
    with torch.no_grad():
        alone = torch.cat([model(ids[:, a:b]).logits for a, b in pairwise(ends)], 1)
        assert_close(model(ids, cu_seqlens=torch.tensor(ends)).logits, alone, rtol=1e-9, atol=1e-9)
