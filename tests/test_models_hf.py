"""Models as users of transformers expect them: files, initialisation, outputs, losses, generation."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, GenerationConfig
from transformers.utils import find_labels

from small_models import LENGTH, config, inputs, labels
from subquad.models import HEADS, SubquadConfig, SubquadForCausalLM, SubquadModel
from subquad.models import SubquadForSequenceClassification as Classifier
from subquad.models.attention import AttentionLayer

# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_the_backbone_of_every_head_loads(head, tmp_path):
    model = HEADS[head](config())
    model.save_pretrained(tmp_path)
    backbone, told = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"] and isinstance(backbone, SubquadModel)
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, model.encoder.state_dict()[name]), name


EXTRA = {
    "note": "x",
    "auto_map": {"AutoModel": "mine.Model"},
    "tokenizer_class": "PreTrainedTokenizerFast",
    "sep_token_id": 3,
    "finetuning_task": "sst2",
}


def test_a_configuration_file_may_have_more_keys(tmp_path):
    model = Classifier(config())
    for key, value in EXTRA.items():
        setattr(model.config, key, value)
    model.save_pretrained(tmp_path)
    loaded, told = Classifier.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"]
    quantised = {**model.config.to_dict(), "quantization_config": {"quant_method": "torchao"}}
    from_dict = SubquadConfig.from_dict(quantised)
    assert from_dict.quantization_config == {"quant_method": "torchao"}
    others = (SubquadConfig.from_json_file(tmp_path / "config.json"), AutoConfig.from_pretrained(tmp_path), from_dict)
    for again in (loaded.config, *others):
        assert {key: getattr(again, key) for key in EXTRA} == EXTRA
    with pytest.raises(TypeError, match="did you mean hidden_size"):
        SubquadConfig(hiden_size=8)


@pytest.mark.parametrize("head", HEADS)
def test_a_head_leaves_the_configuration_as_it_was(head):
    given = config()
    before = copy.deepcopy(given.to_dict())
    model = HEADS[head](given)
    model.config.vocab_size = 7
    after = given.to_dict()
    assert (after["is_decoder"], after["is_encoder_decoder"]) == (before["is_decoder"], before["is_encoder_decoder"])
    assert model.config.is_decoder == (head == "causal-lm")


def old_names(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict as it was when q, k and v were one matrix."""
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    for kind in ("weight", "bias"):
        for name in [name for name in state if name.endswith(f"q_proj.{kind}")]:
            stem = name.removesuffix(f"q_proj.{kind}")
            state[f"{stem}in_proj_{kind}"] = torch.cat([state.pop(f"{stem}{x}_proj.{kind}") for x in "qkv"])
    if "lm_head.bias" in state:
        state["bias"] = state.pop("lm_head.bias")
    return state


@pytest.mark.parametrize("head", ["masked-lm", "seq2seq"])
def test_checkpoints_with_fused_projections_still_load(head, tmp_path):
    model = HEADS[head](config()).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    old = old_names(model)
    assert any("in_proj_weight" in name for name in old)
    model.config.save_pretrained(tmp_path)
    old_file = {name: value for name, value in old.items() if name != "decoder.embeddings.tokens.weight"}
    save_file(old_file, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, told = HEADS[head].from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    plain = HEADS[head](config()).eval()
    plain.load_state_dict({**old, "lm_head.weight": model.lm_head.weight})
    expected = model(**inputs(head)).logits
    for each in (loaded, plain):
        torch.testing.assert_close(each(**inputs(head)).logits, expected)
    loaded.save_pretrained(tmp_path)
    assert any(name.endswith("q_proj.weight") for name in load_file(tmp_path / "model.safetensors"))


def test_the_layer_is_torchs_own():
    ours, torchs = AttentionLayer(config()), nn.MultiheadAttention(16, 2, batch_first=True)
    for parameter in torchs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(torchs.state_dict())
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(ours(x)[0], torchs(x, x, x)[0])


def test_fewer_key_heads_and_wide_heads_equal_repeated_ones():
    torch.manual_seed(0)
    few = SubquadModel(config(num_attention_heads=4, num_key_value_heads=2, head_dim=6, positions="rotary")).eval()
    full = SubquadModel(config(num_attention_heads=4, head_dim=6, positions="rotary")).eval()
    state = few.state_dict()
    for name in [name for name in state if "k_proj" in name or "v_proj" in name]:
        state[name] = state[name].unflatten(0, (2, 6)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(state)
    ids = inputs("token")["input_ids"]
    assert few.blocks[0].attention.k_proj.weight.shape == (12, 16)
    torch.testing.assert_close(few(ids).last_hidden_state, full(ids).last_hidden_state)


# ---- initialisation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "full",
        "sbm:clusters=4",
        "combiner-fixed:abstraction=deepsets-max",
        "composite-slice:slice_length=4,positions=ms-vipe,local=mlp,pool=linear,share_weights=false",
    ],
)
@pytest.mark.parametrize("head", ["causal-lm", "pair"])
def test_weights_that_a_checkpoint_lacks_are_initialised(head, spec):
    torch.manual_seed(0)
    keys = {"attention": spec, "hidden_size": 64, "vocab_size": 90}
    usual = HEADS[head](config(**keys))
    with torch.device("meta"):
        later = HEADS[head](config(**keys))
    later.to_empty(device="cpu")
    for tensor in later.parameters():
        tensor.data.fill_(torch.nan)
    later.init_weights()
    lacking = HEADS[head].from_pretrained(None, config=config(**keys), state_dict={})
    for name, one in usual.state_dict().items():
        for other in (later.state_dict()[name], lacking.state_dict()[name]):
            assert other.isfinite().all(), name
            if one.dtype.is_floating_point and one.numel() > 60:
                assert 0.7 < (other.std() + 1e-6) / (one.std() + 1e-6) < 1.4, name
    for name, one in usual.named_buffers():
        assert torch.equal(dict(later.named_buffers())[name], one), name


def test_what_a_checkpoint_has_is_kept(tmp_path):
    model = HEADS["pair"](config(attention="sbm:clusters=4"))
    model.norm.running_mean.fill_(3.0)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    missing = "encoder.blocks.0.attention.attention.mlp.weight1"
    state.pop(missing)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = HEADS["pair"].from_pretrained(tmp_path)
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]) == (name != missing), name
    assert 0 < again.state_dict()[missing].abs().max() < 1


@pytest.mark.parametrize("spec", ["full", "composite-slice:slice_length=4,positions=ms-vipe"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["causal-lm", "masked-lm", "seq2seq"])
def test_a_tensor_with_several_names_is_loaded_by_one(head, tied, spec, tmp_path):
    """`load_state_dict` of a saved checkpoint, as Trainer calls it: strictly, and what is missing is still missed."""
    model = HEADS[head](config(attention=spec, tie_word_embeddings=tied, num_hidden_layers=2))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in saved) != tied
    other = HEADS[head](model.config)
    other.load_state_dict(saved)
    for name, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    gone = "encoder.embeddings.tokens.weight"
    names = [gone, "decoder.embeddings.tokens.weight", *(["lm_head.weight"] if tied else [])]
    told = other.load_state_dict({name: value for name, value in saved.items() if name != gone}, strict=False)
    assert set(told.missing_keys) == {name for name in names if name in model.state_dict()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["causal-lm", "masked-lm", "seq2seq"])
def test_the_vocabulary_may_grow_and_shrink(head, tied):
    model = HEADS[head](config(tie_word_embeddings=tied)).eval()
    model.resize_token_embeddings(60, mean_resizing=False)
    given = {name: value + (40 if "ids" in name else 0) for name, value in inputs(head).items()}
    assert model(**given).logits.shape[-1] == 60 == model.config.vocab_size
    assert 0.01 < model.get_input_embeddings().weight[20:].std() < 0.03
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    model.resize_token_embeddings(15)
    assert model(**{name: value.clamp(max=14) for name, value in given.items()}).logits.shape[-1] == 15


# ---- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_outputs_are_what_was_asked_for(head):
    model, given = HEADS[head](config(num_hidden_layers=2)).eval(), inputs(head)
    assert isinstance(model(**given, return_dict=None), dict) and isinstance(model(**given, return_dict=False), tuple)
    assert torch.equal(model(**given, return_dict=False)[0], model(**given).logits)
    stem = "encoder_" if head == "seq2seq" else ""
    asked = model(**given, output_hidden_states=True, output_attentions=True)
    model.config.output_hidden_states, model.config.return_dict = True, False
    assert isinstance(model(**given), tuple)
    by_config = model(**given, return_dict=True)
    for output in (asked, by_config):
        states = output[f"{stem}hidden_states"]
        assert len(states) == 3 and states[0].shape[1:] == (LENGTH, 16)
    assert [w.shape[1:] for w in asked[f"{stem}attentions"]] == [(2, LENGTH, LENGTH)] * 2
    if head == "seq2seq":
        assert len(asked.decoder_hidden_states) == 3
        assert [w.shape for w in asked.decoder_attentions] == [(2, 2, 6, 6)] * 2
        assert [w.shape for w in asked.cross_attentions] == [(2, 2, 6, LENGTH)] * 2


@pytest.mark.parametrize("head", HEADS)
def test_signatures_say_what_transformers_asks_them(head):
    """Trainer: what is called a label is in every batch. Exporters: arguments are bound before the call."""
    assert find_labels(HEADS[head]) == ["labels"]
    model, given = HEADS[head](config()).eval(), inputs(head)
    bound = inspect.signature(model.forward).bind(**given, return_dict=False)
    assert isinstance(model.forward(*bound.args, **bound.kwargs), tuple)
    with pytest.raises(TypeError, match="unexpected keyword argument 'returndict'"):
        model(**given, returndict=False)


@pytest.mark.parametrize("spec", ["full", "combiner-fixed:span=4", "longformer:window=4", "sbm:clusters=4"])
def test_attentions_are_the_weights_of_this_call(spec):
    torch.manual_seed(0)
    model = SubquadForCausalLM(config(attention=spec, evaluation_seed=5)).eval()
    ids = inputs("causal-lm")["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    output = model(ids, mask, output_attentions=True)
    real = mask.bool()[:, None, :, None]
    for weights in output.attentions:
        assert torch.equal(weights, weights.tril()) and (weights >= 0).all()
        total = weights.sum(-1, keepdim=True).where(real, torch.ones(()))
        assert torch.allclose(total, torch.ones(())) or (spec.startswith("sbm") and total.le(1.0001).all())
    torch.testing.assert_close(output.logits[mask.bool()], model(ids, mask).logits[mask.bool()], rtol=1e-4, atol=1e-5)
    output.attentions[0].retain_grad()
    output.logits.sum().backward()
    assert output.attentions[0].grad.abs().sum() > 0


def test_a_mechanism_without_weights_says_so():
    model = SubquadModel(config(attention="composite-slice:slice_length=4"))
    with pytest.raises(ValueError, match="output_attentions: composite-slice has no single matrix of weights"):
        model(inputs("token")["input_ids"], output_attentions=True)


def test_evaluation_is_repeatable_on_request():
    torch.manual_seed(0)
    model = HEADS["token"](config(attention="sbm:clusters=4", num_hidden_layers=2))
    given = inputs("token")
    assert not torch.equal(model.eval()(**given).logits, model(**given).logits)
    model.config.evaluation_seed = 3
    first = model(**given, output_attentions=True)
    assert torch.equal(model(**given).logits, model(**given).logits)
    assert not torch.equal(*[w.gt(0) for w in first.attentions]), "every layer draws its own graph"
    before = torch.get_rng_state()
    model(**given)
    assert torch.equal(torch.get_rng_state(), before)
    model.config.evaluation_seed = 4
    assert not torch.equal(model(**given).logits, first.logits)
    assert not torch.equal(model.train()(**given).logits, model(**given).logits), "training samples anew"


# ---- losses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_regression_takes_labels_of_either_shape(shape):
    model, given = Classifier(config(num_labels=1)).eval(), inputs("sequence")
    target = torch.tensor([0.5, -2.0])
    output = model(**given, labels=target.view(shape))
    torch.testing.assert_close(output.loss, ((output.logits[:, 0] - target) ** 2).mean())
    with pytest.raises(ValueError, match="labels must have shape"):
        model(**given, labels=torch.zeros(2, 2))


def test_several_labels_at_once():
    model, given = Classifier(config()).eval(), inputs("sequence")
    target = torch.tensor([[1.0, 0, 1], [0, 0, 1]])
    output = model(**given, labels=target)
    torch.testing.assert_close(output.loss, nn.functional.binary_cross_entropy_with_logits(output.logits, target))
    model.config.problem_type = "multi_label_classification"
    torch.testing.assert_close(model(**given, labels=target.long()).loss, output.loss)
    model.config.problem_type = "regression"
    torch.testing.assert_close(model(**given, labels=target).loss, nn.functional.mse_loss(output.logits, target))
    model.config.problem_type = "single_label_classification"
    with pytest.raises(TypeError, match="labels must be integers"):
        model(**given, labels=target)


@pytest.mark.parametrize("head", HEADS)
def test_small_batches_add_up_to_a_large_one(head):
    torch.manual_seed(0)
    model = HEADS[head](config(attention="sbm:clusters=4" if head == "token" else "full", density_weight=0.1)).train()
    given, target = inputs(head), labels(head)
    if target.dim() == 2:
        target[0, 5:] = -100
    if head == "pair":
        model.norm.eval()  # statistics of the batch are another matter
    count = target[:, 1:].ne(-100).sum() if head == "causal-lm" else target.ne(-100).sum()
    parts = [
        model(**{name: value[row : row + 1] for name, value in given.items()}, labels=target[row : row + 1],
              num_items_in_batch=count)
        for row in range(2)
    ]  # fmt: skip
    if head == "token":  # sampled anew: the auxiliary losses have the weights of their batches
        weights = [(target[row] != -100).sum() / count for row in range(2)]
        rest = [part.loss - 0.1 * weight * part.auxiliary_loss for part, weight in zip(parts, weights, strict=True)]
        assert all(torch.isfinite(x) and x > 0 for x in rest)
        torch.testing.assert_close(sum(weights), torch.tensor(1.0))
    else:
        torch.testing.assert_close(parts[0].loss + parts[1].loss, model(**given, labels=target).loss)


def test_shifted_labels_are_taken_as_they_are():
    model, ids = SubquadForCausalLM(config()).eval(), inputs("causal-lm")["input_ids"]
    shifted = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, model(ids, labels=ids).loss)


# ---- generation -----------------------------------------------------------------------------------------------------


def greedy(model, ids, steps: int, **keys) -> torch.Tensor:
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, **keys).logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.fixture(scope="module")
def writer() -> SubquadForCausalLM:
    torch.manual_seed(0)
    model = SubquadForCausalLM(config(initializer_range=0.5, type_vocab_size=2, eos_token_id=None)).eval()
    return model


def test_generate_takes_what_forward_takes(writer):
    ids, steps = inputs("causal-lm", 5)["input_ids"], 4
    settings = {"max_new_tokens": steps, "do_sample": False}
    expected = greedy(writer, ids, steps)
    for extra in ({}, {"use_cache": True}, {"labels": ids}, {"logits_to_keep": 1}, {"generation_config": None}):
        assert torch.equal(writer.generate(ids, **settings, **extra), expected), extra
    whole = writer.generate(ids, generation_config=GenerationConfig(**settings, use_cache=True))
    assert torch.equal(whole, expected)
    embeds = writer.get_input_embeddings()(ids)
    assert torch.equal(writer.generate(inputs_embeds=embeds, **settings), expected[:, 5:])
    assert torch.equal(writer.generate(inputs_embeds=embeds, num_beams=2, **settings)[:, :0], expected[:, :0])
    segments = torch.ones_like(ids)
    longer = torch.ones(2, 1, dtype=torch.long)
    told, step = ids, segments
    for _ in range(steps):
        told = torch.cat([told, writer(told, token_type_ids=step).logits[:, -1:].argmax(-1)], 1)
        step = torch.cat([step, longer], 1)
    assert torch.equal(writer.generate(ids, token_type_ids=segments, **settings), told)


def test_generate_honours_position_ids(writer):
    ids = inputs("causal-lm", 5)["input_ids"]
    places = torch.arange(5)[None].expand(2, 5) + 7
    told = ids
    for step in range(4):
        positions = torch.arange(5 + step)[None].expand(2, -1) + 7
        told = torch.cat([told, writer(told, position_ids=positions).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(writer.generate(ids, position_ids=places, max_new_tokens=4, do_sample=False), told)


def test_logits_to_keep(writer):
    ids = inputs("causal-lm")["input_ids"]
    whole = writer(ids).logits
    torch.testing.assert_close(writer(ids, logits_to_keep=3).logits, whole[:, -3:])
    torch.testing.assert_close(writer(ids, logits_to_keep=torch.tensor([1, 4])).logits, whole[:, [1, 4]])
    with pytest.raises(ValueError, match="the loss needs all logits"):
        writer(ids, labels=ids, logits_to_keep=3)


@pytest.mark.parametrize("head", ["causal-lm", "seq2seq"])
@pytest.mark.parametrize("beams", [1, 2])
def test_generate_returns_states_and_weights(head, beams):
    model = HEADS[head](config(num_hidden_layers=2, eos_token_id=None)).eval()
    ids = inputs(head, 5)["input_ids"]
    wanted = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}
    output = model.generate(ids, max_new_tokens=3, num_beams=beams, do_sample=False, output_scores=True, **wanted)
    stem = "decoder_" if head == "seq2seq" else ""
    states, weights = output[f"{stem}hidden_states"], output[f"{stem}attentions"]
    assert len(states) == len(weights) == 3 and len(states[0]) == 3 and len(weights[0]) == 2
    if head == "seq2seq":
        assert len(output.encoder_hidden_states) == 3 and len(output.cross_attentions[0]) == 2


def test_batched_generation_is_that_of_each_row(writer):
    ids = inputs("causal-lm", 6)["input_ids"]
    ids[0, :2] = 0
    mask = ids.ne(0).long()
    both = writer.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    alone = writer.generate(ids[:1, 2:], max_new_tokens=4, do_sample=False)
    assert torch.equal(both[:1, 2:], alone)
