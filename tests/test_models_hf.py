"""Models as users of transformers expect them: files, outputs, losses, generation, and the libraries around them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    pipeline,
)

from subquad.models import HEADS, SubquadConfig, SubquadForCausalLM, SubquadForMaskedLM, SubquadModel
from subquad.models import SubquadForConditionalGeneration as Seq2Seq
from subquad.models import SubquadForSequenceClassification as Classifier
from subquad.models.attention import AttentionLayer

LENGTH = 12


def config(**keys) -> SubquadConfig:
    small = {"vocab_size": 20, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
    return SubquadConfig(**{**small, **ids, "max_position_embeddings": 32, "num_labels": 3, **keys})


def inputs(head: str, n: int = LENGTH, rows: int = 2) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 20, (rows, n), generator=draw)
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if head == "pair":
        return {**found, "pair_ids": ids.flip(1)}
    return {**found, "decoder_input_ids": ids[:, : n // 2]} if head == "seq2seq" else found


def labels(head: str, n: int = LENGTH) -> torch.Tensor:
    if head in ("sequence", "pair"):
        return torch.tensor([0, 2])
    return torch.arange(2 * n).view(2, n)[:, : n // 2 if head == "seq2seq" else n] % 3


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_the_backbone_of_every_head_loads(head, tmp_path):
    model = HEADS[head](config())
    model.save_pretrained(tmp_path)
    backbone, told = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"] and isinstance(backbone, SubquadModel)
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, model.encoder.state_dict()[name]), name


def test_a_configuration_file_may_have_more_keys(tmp_path):
    model = Classifier(config())
    model.config.note, model.config.sep_token_id = "x", 3
    model.save_pretrained(tmp_path)
    again = Classifier.from_pretrained(tmp_path).config
    assert (again.note, again.sep_token_id) == ("x", 3)
    assert SubquadConfig.from_json_file(tmp_path / "config.json").note == "x"
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


# ---- PEFT -----------------------------------------------------------------------------------------------------------


def adapted(kind: str, task: str):
    import peft

    projections = ["q_proj", "k_proj", "v_proj", "out_proj"]
    if kind == "lora":
        return peft.LoraConfig(task_type=task, r=2, target_modules=projections)
    if kind == "ia3":
        return peft.IA3Config(task_type=task, target_modules=["k_proj", "v_proj"], feedforward_modules=[])
    return peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3)


PEFT_TASKS = {"causal-lm": "CAUSAL_LM", "sequence": "SEQ_CLS", "token": "TOKEN_CLS", "seq2seq": "SEQ_2_SEQ_LM"}


PEFT_CASES = [("lora", head) for head in PEFT_TASKS] + [("ia3", "causal-lm"), ("ia3", "seq2seq")]
PEFT_CASES += [("prompt", head) for head in PEFT_TASKS]


@pytest.mark.parametrize(("kind", "head"), PEFT_CASES)
@pytest.mark.filterwarnings("ignore:Position ids are not supported")  # PEFT's own positions follow the longer prompt
def test_peft(kind, head, tmp_path):
    import peft

    torch.manual_seed(0)
    spec = "composite-slice:slice_length=4" if kind == "lora" else "combiner-fixed:span=4"
    base = HEADS[head](config(attention=spec, eos_token_id=None))
    model = peft.get_peft_model(copy.deepcopy(base), adapted(kind, PEFT_TASKS[head])).train()
    given = {name: value for name, value in inputs(head).items() if name != "decoder_input_ids"}
    target = labels(head)
    if (kind, head) == ("prompt", "token"):  # PEFT leaves it to the caller that virtual tokens have no labels
        target = nn.functional.pad(target, (3, 0), value=-100)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    frozen = base.encoder.blocks[0].feedforward[0].weight.clone()
    losses = []
    for _ in range(3):
        output = model(**given, labels=target)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(model.get_base_model().encoder.blocks[0].feedforward[0].weight, frozen)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    with torch.no_grad():
        one, other = (each(**given, labels=target).logits for each in (model.eval(), again))
    torch.testing.assert_close(one, other)
    if head in ("causal-lm", "seq2seq"):
        made = again.generate(**given, max_new_tokens=3, do_sample=False)
        assert made.shape == (2, (LENGTH if head == "causal-lm" else 1) + 3)
    if kind == "lora" and head == "causal-lm":
        merged = again.merge_and_unload()
        torch.testing.assert_close(merged(**given).logits, one, rtol=1e-4, atol=1e-5)


# ---- pipelines and trainers -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<mask>", "<unk>", *(f"w{i}" for i in range(15))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = ("pad", "bos", "eos", "mask", "unk")
    special = {f"{name}_token": word for name, word in zip(names, words[:5], strict=True)}
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, padding_side="left", model_input_names=["input_ids", "attention_mask"], **special
    )


def test_pipelines(tokenizer):
    texts = ["w1 w2 w3 w4 w5", "w6"]
    torch.manual_seed(0)
    keys = {"attention": "longformer:window=4"}
    write = pipeline("text-generation", SubquadForCausalLM(config(**keys)), tokenizer=tokenizer, device="cpu")
    settings = {"max_new_tokens": 3, "do_sample": False}
    both = write(texts, batch_size=2, **settings)
    assert [both[i][0] for i in range(2)] == [write(text, **settings)[0] for text in texts], "padding changes nothing"
    fill = pipeline("fill-mask", SubquadForMaskedLM(config(**keys)), tokenizer=tokenizer, device="cpu")
    assert len(fill("w1 <mask> w3")) == 5
    judge = pipeline("text-classification", Classifier(config(**keys)), tokenizer=tokenizer, device="cpu")
    assert judge(texts, batch_size=2)[1]["score"] == pytest.approx(judge(texts[1])[0]["score"], abs=1e-5)
    encode = pipeline("feature-extraction", SubquadModel(config(**keys)), tokenizer=tokenizer, device="cpu")
    assert torch.tensor(encode(texts[0])).shape == (1, 5, 16)
    tag = pipeline("token-classification", HEADS["token"](config(**keys)), tokenizer=tokenizer, device="cpu")
    assert len(tag(texts[0])) == 5


def arguments(kind, folder, **keys):
    return kind(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=2, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1, **keys,
    )  # fmt: skip


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer(bf16, tmp_path):
    rows = inputs("token", rows=4)["input_ids"].tolist()
    data = [{"input_ids": row, "labels": [token % 3 for token in row]} for row in rows]
    model = HEADS["token"](config(attention="combiner-fixed:span=4" if bf16 else "sbm:clusters=4", density_weight=0.1))
    settings = arguments(TrainingArguments, tmp_path, bf16=bf16, gradient_accumulation_steps=2)
    trainer = Trainer(model, settings, train_dataset=data, eval_dataset=data)
    assert trainer.train().training_loss > 0
    assert trainer.predict(data).predictions.shape == (4, LENGTH, 3)


@pytest.mark.parametrize("bf16", [False, True])
def test_seq2seq_trainer_generates(bf16, tokenizer, tmp_path):
    rows = inputs("token", rows=4)["input_ids"].tolist()
    data = [{"input_ids": row, "labels": row[: 3 + i]} for i, row in enumerate(rows)]
    model = Seq2Seq(config(attention="longformer:window=4"))
    settings = arguments(
        Seq2SeqTrainingArguments, tmp_path, bf16=bf16, predict_with_generate=True, generation_max_length=6
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tokenizer's advice on how to pad
        collate = DataCollatorForSeq2Seq(tokenizer, model)
        trainer = Seq2SeqTrainer(model, settings, train_dataset=data, eval_dataset=data, data_collator=collate)
        assert trainer.train().training_loss > 0
        found = trainer.predict(data)
    assert len(found.predictions) == 4 and (found.predictions[:, :6] > 0).any() and found.metrics["test_loss"] > 0
    assert (found.predictions[:, 6:] <= 0).all(), "nothing but padding beyond generation_max_length"


# ---- other machines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "full",
        "sbm:clusters=4",
        "combiner-fixed:abstraction=deepsets-mean",
        "composite-slice:slice_length=4,positions=ms-vipe,share_weights=false",
    ],
)
def test_layers_on_disk_give_the_same_answers(spec, tmp_path):
    torch.manual_seed(0)
    model = SubquadForCausalLM(config(attention=spec, num_hidden_layers=2, evaluation_seed=0)).eval()
    model.save_pretrained(tmp_path / "model")
    places = {"encoder.embeddings": "cpu", "encoder.blocks.0": "disk", "encoder.blocks.1": "disk"}
    places |= {"encoder.norm": "cpu", "lm_head": "cpu"}
    away = SubquadForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk", dtype=torch.float32
    )
    assert away.encoder.blocks[0].attention.q_proj.weight.device.type == "meta"
    given = inputs("causal-lm")
    with torch.no_grad():
        torch.testing.assert_close(away(**given).logits, model(**given).logits)
        torch.testing.assert_close(away(**given).logits, model(**given).logits)


@pytest.mark.parametrize("head", ["causal-lm", "sequence", "seq2seq"])
def test_export_with_dynamic_length(head):
    model = HEADS[head](config(num_hidden_layers=1)).eval()
    m, n = torch.export.Dim("m", min=2, max=8), torch.export.Dim("n", min=9, max=16)
    given = inputs(head)
    shapes = {name: {1: m if name == "decoder_input_ids" else n} for name in given}
    program = torch.export.export(model, (), kwargs=given, dynamic_shapes=shapes, strict=False)
    longer = inputs(head, 16)
    longer["attention_mask"][0, 9:] = 0
    torch.testing.assert_close(program.module()(**longer).logits, model(**longer).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["full", "combiner-fixed:span=4", "composite-slice:slice_length=4"])
def test_int8_dynamic_quantisation(spec):
    torch.manual_seed(0)
    model = Classifier(config(attention=spec, initializer_range=0.2)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is moving its quantisation to another package
        small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert type(small.encoder.blocks[0].attention.q_proj) is not nn.Linear
    one, other = model(**inputs("sequence")).logits, small(**inputs("sequence")).logits
    assert 0 < (one - other).abs().max() < 0.1 * one.abs().max() + 0.02


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
def test_export_of_sub_quadratic_attention_with_dynamic_length(head, specs):
    """A fresh model, any length, padding on the left; and exporting leaves nothing behind for the next model."""
    torch.manual_seed(0)
    keys = {"attention": specs, "evaluation_seed": 3, "num_hidden_layers": len(specs), "max_position_embeddings": 64}
    model = HEADS[head](config(**keys)).eval()
    ids, mask = torch.randint(20, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    n = torch.export.Dim("n", min=3, max=64)
    given, shapes = {"input_ids": ids, "attention_mask": mask}, {"input_ids": {1: n}, "attention_mask": {1: n}}
    program = torch.export.export(model, (), kwargs=given, dynamic_shapes=shapes, strict=False)
    for length in (5, 33, 64):
        longer = {
            "input_ids": torch.randint(20, (2, length)),
            "attention_mask": torch.ones(2, length, dtype=torch.long),
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


@pytest.mark.parametrize("spec", ["full", "sbm", "combiner-fixed:span=4"])
def test_a_padded_slot_gives_the_same_wherever_the_row_stands(spec):
    """transformers' tests look at the last slot of a row, real or not."""
    torch.manual_seed(0)
    model = SubquadForCausalLM(config(attention=spec, evaluation_seed=1, max_position_embeddings=64)).eval()
    ids, mask = torch.randint(3, 20, (2, 7)), torch.tensor([[1, 1, 0, 1, 1, 1, 0], [1, 0, 1, 0, 0, 0, 0]])
    pad = torch.zeros(2, 32, dtype=torch.long)
    near = model(ids, attention_mask=mask).logits[:, -1]
    far = model(torch.cat([pad, ids], 1), attention_mask=torch.cat([pad, mask], 1)).logits[:, -1]
    torch.testing.assert_close(near, far, rtol=1e-5, atol=1e-5)
