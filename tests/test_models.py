"""Models: every mechanism under every head trains, saves and loads; positions, padding, generation, errors."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import subquad
from subquad.attention.registry import mechanism
from subquad.models import HEADS, SubquadConfig, SubquadForCausalLM, SubquadForSequenceClassification, SubquadModel

# mechanisms that are made of a user's own sets have no spec, so a configuration cannot name them
SPECS = [name for name in subquad.available() if name not in ("pattern", "combiner-plan")]


def config(**keys) -> SubquadConfig:
    keys = {"pad_token_id": 0, "decoder_start_token_id": 1, **keys}
    small = {"vocab_size": 20, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return SubquadConfig(**{**small, "max_position_embeddings": 40, "num_labels": 3, "num_hidden_layers": 2, **keys})


def batch(head: str, n: int = 33) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    mask = torch.ones(2, n, dtype=torch.long)
    mask[1, n - 5 :] = 0
    labels = torch.randint(3, (2,)) if head == "sequence" else torch.randint(3, (2, n))
    both = {"input_ids": torch.randint(20, (2, n)), "attention_mask": mask, "labels": labels}
    if head == "pair":
        return {**both, "labels": labels[:, 0], "pair_ids": torch.randint(20, (2, n)), "pair_mask": mask}
    return both


# a mechanism knows of a head whether it is causal; every head is tried with one mechanism of each kind
KINDS = ["full", "sbm", "composite-slice"]
CAUSAL = [spec for spec in SPECS if mechanism(spec).capabilities.causal]
PAIRS = [(spec, head) for spec in SPECS for head in HEADS if spec in KINDS]
PAIRS += [(spec, "causal-lm") for spec in CAUSAL if spec not in KINDS]
PAIRS += [(s, "token") for s in SPECS if s not in KINDS and mechanism(s).capabilities.bidirectional]


@pytest.mark.parametrize(("spec", "head"), PAIRS)
def test_every_mechanism_trains_saves_and_loads(spec, head, tmp_path):
    torch.manual_seed(1)
    model = HEADS[head](config(attention=spec, density_weight=0.1, num_hidden_layers=1))
    inputs = batch(head, 19)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert any("k_proj" in name or "v_proj" in name for name in moved), "the attention learns"
    model.save_pretrained(tmp_path)
    again = HEADS[head].from_pretrained(tmp_path)
    for (name, one), (other_name, other) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other_name and torch.equal(one, other), name
    answers = []
    for each in (model, again):
        torch.manual_seed(2)  # sampled attention
        answers.append(each.eval()(**inputs).logits)
    assert torch.equal(*answers)


@pytest.mark.parametrize(("spec", "head"), PAIRS)
def test_every_mechanism_trains_under_bf16_autocast(spec, head):
    """Padded rows, which mechanisms mask with the least number of the dtype that they compute in."""
    torch.manual_seed(1)
    model = HEADS[head](config(attention=spec))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**batch(head))
    output.loss.backward()
    assert torch.isfinite(output.loss) and all(
        torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None
    )


@pytest.mark.parametrize("spec", [spec for spec in CAUSAL if not mechanism(spec).capabilities.stochastic])
def test_causal_models_do_not_see_the_future(spec):
    model = SubquadForCausalLM(config(attention=spec, positions="sinusoidal")).eval()
    ids = batch("causal-lm")["input_ids"]
    other = ids.clone()
    other[:, 20:] = (other[:, 20:] + 1) % 20
    first, second = model(ids).logits, model(other).logits
    torch.testing.assert_close(first[:, :20], second[:, :20], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(first[:, 20:], second[:, 20:], atol=1e-3)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "none"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_positions_and_norms(positions, norm):
    torch.manual_seed(0)
    model = SubquadModel(config(positions=positions, norm=norm)).eval()
    ids = torch.randint(20, (1, 10))
    swapped = ids.flip(1)
    same = torch.allclose(model(ids).last_hidden_state, model(swapped).last_hidden_state.flip(1), atol=1e-5)
    assert same == (positions == "none"), "without positions full attention does not know the order"


def test_rotary_knows_distances_only():
    torch.manual_seed(0)
    model = SubquadModel(config(positions="rotary")).eval()
    ids = torch.randint(20, (1, 10))
    here, there = (model(ids, position_ids=torch.arange(10)[None] + shift).last_hidden_state for shift in (0, 17))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_own_positions_are_shared_by_all_layers_and_saved_once(tmp_path, head, tied):
    own = {"attention": "composite-slice", "positions": "own"}
    mixed = {"attention": ["composite-slice:positions=ms-vipe", "full"]}
    model = HEADS[head](config(num_hidden_layers=3, tie_word_embeddings=tied, **(own if tied else mixed)))
    model.save_pretrained(tmp_path)
    again = HEADS[head].from_pretrained(tmp_path)
    for each in (model, again):
        layers = [block.attention.attention for block in each.encoder.blocks]
        tables = [layer.positions for layer in layers if getattr(layer, "positions", None) is not None]
        assert len(tables) == (3 if tied else 2)
        assert all(x is y for table in tables for x, y in zip(table.parameters(), tables[0].parameters(), strict=True))
    for (name, one), (_, other) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(one, other), name


def test_a_spec_does_not_say_causal():
    for cls, word in ((SubquadForCausalLM, "false"), (SubquadForSequenceClassification, "true")):
        with pytest.raises(ValueError, match="causal is the model's to say"):
            cls(config(attention=f"full:causal={word}"))


@pytest.mark.parametrize("spec", ["full", "combiner-fixed", "combiner-axial", "combiner-tree", "strided", "axial"])
def test_padding_changes_nothing(spec):
    model = SubquadForSequenceClassification(config(attention=spec)).eval()
    ids = torch.randint(20, (1, 20))
    padded = torch.cat([ids, torch.zeros(1, 9, dtype=torch.long)], 1)
    mask = (torch.arange(29) < 20).long()[None]
    torch.testing.assert_close(model(ids).logits, model(padded, mask).logits, rtol=1e-4, atol=1e-5)


def test_left_padding_keeps_positions():
    model = SubquadForCausalLM(config()).eval()
    ids = torch.randint(20, (1, 8))
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = (torch.arange(13) >= 5).long()[None]
    torch.testing.assert_close(model(ids).logits, model(padded, mask).logits[:, 5:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_pooling_counts_real_tokens_only(pooling):
    model = SubquadForSequenceClassification(config(pooling=pooling)).eval()
    ids = torch.randint(20, (1, 8))
    padded = torch.cat([torch.full((1, 3), 7), ids], 1)
    mask = (torch.arange(11) >= 3).long()[None]
    torch.testing.assert_close(model(ids).logits, model(padded, mask).logits, rtol=1e-4, atol=1e-5)


def test_layers_take_their_attention_in_turn():
    model = SubquadModel(config(attention=["full", "strided:w=4"], num_hidden_layers=4))
    layers = [block.attention.attention for block in model.blocks]
    assert [layer.name for layer in layers] == ["full", "strided", "full", "strided"]
    assert [layer.options.layer_index for layer in layers[1::2]] == [1, 3]


def test_weights_are_tied_and_survive_saving(tmp_path):
    model = SubquadForCausalLM(config())
    model.save_pretrained(tmp_path)
    again = SubquadForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.encoder.embeddings.tokens.weight
    free = SubquadForCausalLM(config(tie_word_embeddings=False))
    assert free.lm_head.weight is not free.encoder.embeddings.tokens.weight


def test_auto_classes(tmp_path):
    SubquadForCausalLM(config(attention="combiner-fixed:span=8")).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).attention == "combiner-fixed:span=8"
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), SubquadForCausalLM)
    # the backbone of a language model, made bidirectional, under a fresh head
    head = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    causal = SubquadForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(head.encoder.embeddings.tokens.weight, causal.encoder.embeddings.tokens.weight)
    assert head.classifier.weight.std() > 0 and head.classifier.out_features == 5
    assert isinstance(AutoModel.from_pretrained(tmp_path), SubquadModel)


@pytest.mark.parametrize("spec", ["full", "combiner-fixed:span=4", "composite-slice:slice_length=4"])
def test_generation_equals_the_likeliest_token_step_by_step(spec):
    torch.manual_seed(0)
    model = SubquadForCausalLM(config(attention=spec)).eval()
    ids = prompt = torch.randint(20, (2, 5))
    for _ in range(8):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), ids)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("head", ["token", "seq2seq"])
def test_gradient_checkpointing_gives_the_same_gradients(head, reentrant):
    inputs, gradients = batch(head, 17), []
    for wanted in (False, True):
        torch.manual_seed(0)
        model = HEADS[head](config(attention="sbm:clusters=4", num_hidden_layers=2, density_weight=1.0)).train()
        if wanted:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(1)
        model(**inputs).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients)


def test_density_is_reported_and_regularised():
    model, inputs = HEADS["token"](config(attention="sbm", density_weight=10.0)), batch("token")
    torch.manual_seed(0)
    with_loss = model(**inputs)
    model.config.density_weight = 0.0
    torch.manual_seed(0)
    plain = model(**inputs)
    assert with_loss.density.shape == (2, 2) and 0 < with_loss.density.mean() < 1
    torch.testing.assert_close(with_loss.loss, plain.loss + 10 * plain.density.mean())
    assert HEADS["token"](config())(**inputs).density is None
    assert model.eval()(**inputs).density is None and model(**inputs, output_records=True).density.shape == (2, 2)


def test_every_layer_is_given_its_own_statistics(monkeypatch):
    model, given = HEADS["seq2seq"](config()), []
    for index, layer in enumerate(model.attention_layers()):
        monkeypatch.setattr(layer, "update", lambda one, index=index: given.append((index, one.item())), raising=False)
    model.update_statistics([None, torch.tensor(1.0), torch.tensor(2.0), None])
    assert given == [(1, 1.0), (2, 2.0)]
    model.update_statistics(None)
    with pytest.raises(ValueError, match="shorter"):
        model.update_statistics([None])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"hidden_size": 15}, "hidden_size must be a multiple"),
        ({"positions": "relative"}, "positions must be one of learned"),
        ({"norm": "none"}, "norm must be one of pre, post"),
        ({"attention": "ful"}, "did you mean full"),
        ({"attention": []}, "attention must be a spec"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer ≥ 1"),
        ({"attenton": "full"}, "no key 'attenton'; did you mean attention"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads=2"),
        ({"head_dim": 0}, "head_dim must be an integer ≥ 1"),
        ({"head_dim": 5, "positions": "rotary"}, "heads of even width, not 5"),
        ({"evaluation_seed": -1}, "evaluation_seed must be an integer"),
    ],
)
def test_impossible_configurations(keys, words):
    with pytest.raises((ValueError, TypeError), match=words):
        config(**keys)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"positions": "own"}, "full has no positions of its own"),
        ({"positions": "rotary", "attention": "composite-slice"}, "works on tokens"),
        ({"num_key_value_heads": 1, "attention": "composite-slice"}, "num_key_value_heads must be"),
        ({"head_dim": 16, "attention": "composite-slice"}, "head_dim must be hidden_size / num_attention_heads"),
    ],
)
def test_impossible_layers(keys, words):
    with pytest.raises(ValueError, match=words):
        SubquadModel(config(**keys))


def test_bad_inputs():
    with pytest.raises(ValueError, match="attention must be a spec or a list of specs, not 3"):
        config(attention=3)
    with pytest.raises(TypeError, match=r"no key 'hiden_size'; did you mean hidden_size .*\(its keys: vocab_size,"):
        SubquadConfig(hiden_size=3)
    model = SubquadForSequenceClassification(config())
    with pytest.raises(ValueError, match="beyond max_position_embeddings=40"):
        model(torch.zeros(1, 41, dtype=torch.long))
    with pytest.raises(ValueError, match="label 3 is out of range: labels go from 0 to 2"):
        model(torch.zeros(1, 4, dtype=torch.long), labels=torch.tensor([3]))
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="no segments"):
        model(torch.zeros(1, 4, dtype=torch.long), token_type_ids=torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("head", HEADS)
def test_inputs_of_a_wrong_shape_or_dtype_are_named(head):
    model = HEADS[head](config()).eval()
    good = batch(head, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    ids = good["input_ids"]
    for wrong, words in (
        ({"input_ids": ids[0]}, r"input_ids must have shape \(B, n\), not \(8,\); for a batch of one row pass"),
        ({"input_ids": ids.float()}, r"input_ids must be a tensor \(B, n\) of dtype torch.int64 .* not torch.float32"),
        ({"input_ids": ids.tolist()}, "input_ids must be a tensor .* not list"),
        ({"attention_mask": mask[:, :7]}, r"attention_mask must have shape \(B, n\) = \(2, 8\), not \(2, 7\)"),
        ({"attention_mask": mask[:1]}, r"attention_mask must have shape \(B, n\) = \(2, 8\), not \(1, 8\)"),
        ({"attention_mask": mask[0]}, r"attention_mask must have shape \(B, n\) = \(2, 8\), not \(8,\)"),
        ({"attention_mask": [1] * 8}, "attention_mask must be a tensor .* not list"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            model(**{**good, **wrong})
    if head != "pair":
        embeds = torch.randn(2, 8, 5)
        with pytest.raises(ValueError, match=r"inputs_embeds must have shape \(B, n, 16\), not \(2, 8, 5\)"):
            model(**{**good, "input_ids": None, "inputs_embeds": embeds})


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_padded_row_gives_what_it_gives_alone(spec, positions):
    """Left, right and both, in a causal and in a bidirectional model; a prefix gives the same whatever follows it."""
    if positions == "rotary" and mechanism(spec).capabilities.level == "layer":
        positions = "own" if "positions" in mechanism(spec).Options.__dataclass_fields__ else "none"
    able = mechanism(spec).capabilities
    heads = [head for head, can in (("causal-lm", able.causal), ("token", able.bidirectional)) if can]
    for head in heads:
        torch.manual_seed(0)
        keys = {"attention": spec, "positions": positions, "evaluation_seed": 5, "initializer_range": 0.5}
        model = HEADS[head](config(**keys)).eval()
        ids = torch.randint(1, 20, (1, 13))
        with torch.no_grad():
            alone = model(input_ids=ids).logits[0]
            for left, right in ((9, 0), (0, 11), (4, 6)):
                batch, mask = (
                    torch.randint(1, 20, (2, 13 + left + right)),
                    torch.ones(2, 13 + left + right, dtype=torch.long),
                )
                batch[0, left : left + 13] = ids[0]
                mask[0, :left], mask[0, left + 13 :] = 0, 0
                padded = model(input_ids=batch, attention_mask=mask).logits[0, left : left + 13]
                torch.testing.assert_close(padded, alone, atol=1e-4, rtol=1e-4)
            if head == "causal-lm":
                longer = model(input_ids=torch.cat([ids, torch.randint(1, 20, (1, 20))], 1)).logits[0, :13]
                torch.testing.assert_close(longer, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", ["combiner-fixed", "composite-slice", "star:relay=first", "combiner-window", "sbm"])
def test_left_padded_prompts_are_continued_as_alone(spec):
    torch.manual_seed(0)
    model = SubquadForCausalLM(config(attention=spec, evaluation_seed=3, initializer_range=0.5)).eval()
    long, short = torch.randint(1, 20, (17,)), torch.randint(1, 20, (6,))
    ids, mask = (
        torch.stack([torch.cat([torch.zeros(11, dtype=torch.long), short]), long]),
        torch.ones(2, 17, dtype=torch.long),
    )
    mask[0, :11] = 0
    together = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    alone = model.generate(short[None], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert together[0, 17:].tolist() == alone[0, 6:].tolist()


@pytest.mark.parametrize("spec", ["full", "sbm", "combiner-fixed:span=4"])
def test_a_padded_slot_gives_the_same_wherever_the_row_stands(spec):
    """transformers' tests look at the last slot of a row, real or not."""
    torch.manual_seed(0)
    model = SubquadForCausalLM(
        config(attention=spec, evaluation_seed=1, max_position_embeddings=64, num_hidden_layers=1)
    ).eval()
    ids, mask = torch.randint(3, 20, (2, 7)), torch.tensor([[1, 1, 0, 1, 1, 1, 0], [1, 0, 1, 0, 0, 0, 0]])
    pad = torch.zeros(2, 32, dtype=torch.long)
    near = model(ids, attention_mask=mask).logits[:, -1]
    far = model(torch.cat([pad, ids], 1), attention_mask=torch.cat([pad, mask], 1)).logits[:, -1]
    torch.testing.assert_close(near, far, rtol=1e-5, atol=1e-5)


def test_wrong_ids_and_configurations_are_named():
    config = SubquadConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, attention="full")
    with pytest.raises(ValueError, match=r"input_ids must be between 0 and 15 \(vocab_size=16\), not 3 to 99"):
        SubquadForCausalLM(config)(torch.tensor([[3, 99]]))
    with pytest.raises(TypeError, match="config must be a SubquadConfig, not 'combiner-fixed'"):
        SubquadForCausalLM("combiner-fixed")
