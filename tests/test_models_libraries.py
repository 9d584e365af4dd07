"""The libraries around transformers, used as their users use them: PEFT, pipelines, trainers, accelerate, int8."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    pipeline,
)

from small_models import FIVE, LENGTH, config, inputs, labels
from subquad.models import HEADS, SubquadForCausalLM, SubquadForMaskedLM, SubquadModel
from subquad.models import SubquadForConditionalGeneration as Seq2Seq
from subquad.models import SubquadForSequenceClassification as Classifier

# ---- PEFT -----------------------------------------------------------------------------------------------------------

PEFT_TASKS = {
    "causal-lm": "CAUSAL_LM",
    "sequence": "SEQ_CLS",
    "token": "TOKEN_CLS",
    "seq2seq": "SEQ_2_SEQ_LM",
    "masked-lm": None,  # PEFT has no task of these names: adapters go into any model
    "pair": None,
}
# how a head is adapted, and inside which attention
PEFT_CASES = [("lora", head, "composite-slice:slice_length=4") for head in PEFT_TASKS]
PEFT_CASES += [("lora", "causal-lm", spec) for spec in FIVE if "composite" not in spec]
PEFT_CASES += [("ia3", head, "longformer:window=4") for head in PEFT_TASKS]
PEFT_CASES += [("prompt", head, "combiner-fixed:span=4") for head, kind in PEFT_TASKS.items() if kind]


def adapted(kind: str, task: str | None):
    import peft

    projections = ["q_proj", "k_proj", "v_proj", "out_proj"]
    if kind == "lora":
        return peft.LoraConfig(task_type=task, r=2, target_modules=projections)
    if kind == "ia3":
        return peft.IA3Config(task_type=task, target_modules=["k_proj", "v_proj"], feedforward_modules=[])
    return peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3)


@pytest.mark.parametrize(("kind", "head", "spec"), PEFT_CASES)
@pytest.mark.filterwarnings("ignore:Position ids are not supported")  # PEFT's own positions follow the longer prompt
def test_peft(kind, head, spec, tmp_path):
    import peft

    torch.manual_seed(0)
    base = HEADS[head](config(attention=spec, eos_token_id=None, evaluation_seed=0))
    model = peft.get_peft_model(copy.deepcopy(base), adapted(kind, PEFT_TASKS[head])).eval()
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
        one, other = (each(**given, labels=target).logits for each in (model, again))
    torch.testing.assert_close(one, other)
    if head in ("causal-lm", "seq2seq"):
        made = again.generate(**given, max_new_tokens=3, do_sample=False)
        assert made.shape == (2, (LENGTH if head == "causal-lm" else 1) + 3)
    if kind != "prompt" and head != "seq2seq":
        merged = again.merge_and_unload()
        torch.testing.assert_close(merged(**given).logits, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "ia3", "prompt"])
def test_peft_on_the_backbone(kind):
    import peft

    torch.manual_seed(0)
    model = peft.get_peft_model(SubquadModel(config()), adapted(kind, "FEATURE_EXTRACTION"))
    states = model(**inputs("token")).last_hidden_state
    assert states.shape == (2, LENGTH + 3 * (kind == "prompt"), 16)
    states.square().sum().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and any(p.grad.abs().sum() > 0 for p in trained)


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


@pytest.mark.parametrize("spec", FIVE)
def test_pipelines(spec, tokenizer):
    texts = ["w1 w2 w3 w4 w5", "w6"]
    torch.manual_seed(0)
    keys = {"attention": spec, "evaluation_seed": 0}
    writer = SubquadForCausalLM(config(**keys)).eval()
    write = pipeline("text-generation", writer, tokenizer=tokenizer, device="cpu")
    settings = {"max_new_tokens": 3, "do_sample": False}
    both = write(texts, batch_size=2, **settings)
    assert [both[i][0] for i in range(2)] == [write(text, **settings)[0] for text in texts], "padding changes nothing"
    fill = pipeline("fill-mask", SubquadForMaskedLM(config(**keys)), tokenizer=tokenizer, device="cpu")
    assert len(fill("w1 <mask> w3")) == 5
    judge = pipeline("text-classification", Classifier(config(**keys)).eval(), tokenizer=tokenizer, device="cpu")
    assert judge(texts, batch_size=2)[1]["score"] == pytest.approx(judge(texts[1])[0]["score"], abs=1e-5)
    encode = pipeline("feature-extraction", SubquadModel(config(**keys)), tokenizer=tokenizer, device="cpu")
    assert torch.tensor(encode(texts[0])).shape == (1, 5, 16)
    tag = pipeline("token-classification", HEADS["token"](config(**keys)), tokenizer=tokenizer, device="cpu")
    assert len(tag(texts[0])) == 5


@pytest.mark.parametrize("spec", FIVE)
def test_translation_of_a_batch_is_that_of_each_text(spec, tokenizer):
    """transformers 5 has no pipeline for it: a tokenizer, `generate`, and the tokenizer again."""
    torch.manual_seed(0)
    keys = {"initializer_range": 0.5, "eos_token_id": None, "tie_word_embeddings": False}
    model = Seq2Seq(config(attention=spec, evaluation_seed=0, **keys)).eval()

    def translate(texts: list[str]) -> list[str]:
        given = tokenizer(texts, padding=True, return_tensors="pt")
        made = model.generate(**given, max_new_tokens=6, num_beams=2, do_sample=False)
        return tokenizer.batch_decode(made, skip_special_tokens=True)

    texts = ["w1 w2 w3 w4 w5", "w6 w7", "w8"]
    together = translate(texts)
    assert together == [translate([text])[0] for text in texts]
    assert any(together)


def arguments(kind, folder, **keys):
    keys = {"save_strategy": "no", **keys}
    return kind(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=2, use_cpu=True,
        report_to="none", disable_tqdm=True, logging_steps=1, **keys,
    )  # fmt: skip


@pytest.mark.parametrize(("spec", "bf16"), [*((spec, True) for spec in FIVE), ("sbm:clusters=4", False)])
def test_trainer(spec, bf16, tmp_path):
    rows = inputs("token", rows=4)["input_ids"].tolist()
    data = [{"input_ids": row, "labels": [token % 3 for token in row]} for row in rows]
    model = HEADS["token"](config(attention=spec, density_weight=0.1))
    settings = arguments(TrainingArguments, tmp_path, bf16=bf16, gradient_accumulation_steps=2)
    trainer = Trainer(model, settings, train_dataset=data, eval_dataset=data)
    assert trainer.train().training_loss > 0
    found = trainer.predict(data)
    assert found.predictions.shape == (4, LENGTH, 3) and found.metrics["test_loss"] > 0


@pytest.mark.parametrize(("spec", "bf16"), [*((spec, True) for spec in FIVE), ("longformer:window=4", False)])
def test_seq2seq_trainer_generates(spec, bf16, tokenizer, tmp_path):
    rows = inputs("token", rows=4)["input_ids"].tolist()
    data = [{"input_ids": row, "labels": row[: 3 + i]} for i, row in enumerate(rows)]
    model = Seq2Seq(config(attention=spec))
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


@pytest.mark.parametrize("head", ["causal-lm", "masked-lm", "seq2seq"])
def test_a_trainer_takes_the_best_language_model_without_a_word(head, tmp_path, monkeypatch):
    """It measures the loss in evaluation, and finds every tied weight in the checkpoint that it loads at the end."""
    said = []
    monkeypatch.setattr(transformers.trainer.logger, "warning", lambda text, *rest: said.append(text))
    data = [{"input_ids": row, "labels": row} for row in inputs("token", rows=4)["input_ids"].tolist()]
    steps = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    settings = arguments(TrainingArguments, tmp_path, load_best_model_at_end=True, learning_rate=0.1, **steps)
    model = HEADS[head](config())
    trainer = Trainer(model, settings, train_dataset=data, eval_dataset=data)
    trainer.train()
    best = trainer.state.best_metric
    assert best > 0 and trainer.evaluate()["eval_loss"] == pytest.approx(best)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert not said


# ---- accelerate -----------------------------------------------------------------------------------------------------

PLACES = {
    "causal-lm": ["encoder.embeddings", "encoder.norm", "lm_head"],
    "seq2seq": ["encoder.embeddings", "encoder.norm", "decoder.embeddings", "decoder.norm", "lm_head"],
}


@pytest.mark.parametrize(
    ("spec", "head"),
    [
        *((spec, "causal-lm") for spec in FIVE),
        ("combiner-fixed:abstraction=deepsets-mean", "causal-lm"),
        ("composite-slice:slice_length=4,positions=ms-vipe,share_weights=false", "causal-lm"),
        ("combiner-fixed:abstraction=deepsets-mean", "seq2seq"),
    ],
)
def test_layers_on_disk_give_the_same_answers(spec, head, tmp_path):
    torch.manual_seed(0)
    model = HEADS[head](config(attention=spec, num_hidden_layers=2, evaluation_seed=0, eos_token_id=None)).eval()
    model.save_pretrained(tmp_path / "model")
    places = dict.fromkeys(PLACES[head], "cpu")
    for stack in ("encoder", "decoder") if head == "seq2seq" else ("encoder",):
        places |= {f"{stack}.blocks.{index}": "disk" for index in range(2)}
    away = HEADS[head].from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk", dtype=torch.float32
    )
    assert away.encoder.blocks[0].attention.q_proj.weight.device.type == "meta"
    given = inputs(head)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(away(**given).logits, model(**given).logits)
    prompt = {name: given[name] for name in ("input_ids", "attention_mask")}
    written = [each.generate(**prompt, max_new_tokens=4, do_sample=False) for each in (away, model)]
    assert torch.equal(*written)


def test_a_block_is_never_split_over_devices(tmp_path):
    """`device_map="auto"` fills the memory it is given, block by block, and puts the rest on disk."""
    model = SubquadForCausalLM(config(attention="sbm:clusters=4", num_hidden_layers=4, evaluation_seed=0)).eval()
    model.save_pretrained(tmp_path / "model")
    size = 4 * sum(p.numel() for p in model.parameters())
    away = SubquadForCausalLM.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={"cpu": size // 2}, offload_folder=tmp_path / "disk"
    )
    assert set(away.hf_device_map.values()) == {"cpu", "disk"}
    for block in away.encoder.blocks:
        assert len({p.device.type for p in block.parameters()}) == 1
    given = inputs("causal-lm")
    with torch.no_grad():
        torch.testing.assert_close(away(**given).logits, model(**given).logits)


# ---- quantisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", FIVE)
def test_int8_dynamic_quantisation(spec):
    torch.manual_seed(0)
    model = Classifier(config(attention=spec, initializer_range=0.2, evaluation_seed=0)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is moving its quantisation to another package
        small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert type(small.encoder.blocks[0].attention.q_proj) is not nn.Linear
    one, other = model(**inputs("sequence")).logits, small(**inputs("sequence")).logits
    assert 0 < (one - other).abs().max() < 0.1 * one.abs().max() + 0.02
