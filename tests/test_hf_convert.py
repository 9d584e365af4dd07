"""`subquad.hf.convert` on small transformers models with random weights: nothing is downloaded."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers as tf

import subquad
from subquad import hf
from subquad.hf.interface import watching

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
PAIR = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
SMALL = "combiner-window:span=4,window=6,sinks=2"
N = 30


def llama(**more):
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, num_key_value_heads=2, **more))


def whisper():
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    places = {"num_mel_bins": 8, "max_source_positions": 25, "max_target_positions": 64}
    return tf.WhisperForConditionalGeneration(tf.WhisperConfig(**PAIR, **places, **special))


def vit():
    about = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return tf.ViTForImageClassification(tf.ViTConfig(**about, image_size=16, patch_size=4))


def gpt2():
    special = {"bos_token_id": 1, "eos_token_id": 2}
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, **special))


MODELS = {
    "llama": llama,
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, num_key_value_heads=2)),
    "mistral": lambda: tf.MistralForCausalLM(
        tf.MistralConfig(**SIZES, num_key_value_heads=1, head_dim=16, sliding_window=None)
    ),
    "gpt2": gpt2,
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**SIZES)),
    "roberta": lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**SIZES)),
    "vit": vit,
    "whisper": whisper,
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**PAIR, max_position_embeddings=128)),
}
DECODERS = ("llama", "qwen2", "mistral", "gpt2", "whisper", "bart")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make(name):
    return MODELS[name]().eval()


def inputs(name):
    """A batch of two; where the model takes a mask, the first row is padded, on the left in decoder-only models."""
    ids = torch.randint(3, 97, (2, N))
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 50), "decoder_input_ids": ids}
    mask = torch.ones(2, N, dtype=torch.long)
    mask[0, :7] = 0
    mask = mask if name in ("llama", "qwen2", "mistral", "gpt2") else mask.flip(1)
    given = {"input_ids": ids, "attention_mask": mask}
    return {**given, "decoder_input_ids": torch.randint(3, 97, (2, N))} if name == "bart" else given


@torch.no_grad()
def logits(model, given, name="", **more):
    out = model(**given, **({"use_cache": False} if name in DECODERS else {}), **more).logits
    real = given.get("attention_mask")
    return out if real is None or name == "bart" else out[real.bool()]


@pytest.mark.parametrize("name", MODELS)
def test_one_span_is_the_original(name):
    model, given = make(name), inputs(name)
    before = logits(model, given, name)
    hf.convert(model, "combiner-window", span=64, window=64)
    assert all(mechanism is not None for mechanism in hf.converted_layers(model).values())
    torch.testing.assert_close(logits(model, given, name), before, atol=1e-4, rtol=1e-4)
    hf.convert(model, SMALL)
    assert (logits(model, given, name) - before).abs().max() > 1e-4
    hf.revert(model)
    torch.testing.assert_close(logits(model, given, name), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_layers_call_our_attention(name):
    """What a layer gets is what the mechanism gives by hand, with keys of fewer heads, on padded rows."""
    model, given, seen = hf.convert(make(name), SMALL), inputs(name), []
    with watching(lambda *call: seen.append(call)):
        logits(model, given, name)
    assert len(seen) == len(hf.converted_layers(model))
    for layer, mechanism, q, k, v, key_mask, out in seen:
        causal = bool(layer.is_causal)
        by_hand = subquad.attention(SMALL, num_heads=q.shape[1], head_dim=q.shape[3], causal=causal)
        torch.testing.assert_close(out, by_hand(q, k, v, key_mask=key_mask), atol=1e-6, rtol=1e-5)
        assert mechanism.options.causal == causal and k.shape[1] <= q.shape[1]
        assert name not in ("llama", "qwen2", "mistral", "gpt2", "bert", "roberta") or key_mask is not None


@pytest.mark.parametrize("name", DECODERS)
def test_cached_is_uncached(name):
    model, given = hf.convert(make(name), f"{SMALL},abstraction=residual-attended"), inputs(name)
    whole = logits(model, given, name)
    key = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    ids, cache, parts = given[key], None, []
    for start, stop in ((0, 13), (13, 14), (14, 29), (29, 30)):
        chunk = {**given, key: ids[:, start:stop]}
        if key == "input_ids":
            chunk["attention_mask"] = given["attention_mask"][:, :stop]
        with torch.no_grad():
            out = model(**chunk, past_key_values=cache, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
    assert cache.get_seq_length() == N
    together = torch.cat(parts, 1)
    together = together if key != "input_ids" else together[given["attention_mask"].bool()]
    torch.testing.assert_close(together, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_generate_with_states_and_beams(name):
    model, given = hf.convert(make(name), SMALL), inputs(name)
    given.pop("decoder_input_ids", None)
    about = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for beams in (1, 3):
        cached, not_cached = (model.generate(**given, **about, num_beams=beams, use_cache=use) for use in (True, False))
        assert torch.equal(cached, not_cached)


def test_a_cache_does_not_change_what_is_sampled():
    """GPT-2 drops weights in training; in evaluation its states draw nothing from torch's generator."""
    model, given = hf.convert(make("gpt2"), SMALL), inputs("gpt2")
    assert hf.converted_layers(model)["transformer.h.0.attn"].options.dropout > 0
    about = {"max_new_tokens": 9, "do_sample": True, "pad_token_id": 0, "eos_token_id": None}
    found = []
    for use in (True, False):
        torch.manual_seed(5)
        found.append(model.generate(**given, **about, use_cache=use))
    assert torch.equal(*found)


def test_states_are_smaller_and_can_be_cropped():
    from subquad.hf.caching import cache_bytes

    model, ids = hf.convert(llama().eval(), SMALL), torch.randint(3, 97, (1, 120))
    with torch.no_grad():
        cache = model(input_ids=ids[:, :100], use_cache=True).past_key_values
        more = model(input_ids=ids[:, 100:110], past_key_values=cache, use_cache=True)
        cache.crop(-10)
        again = model(input_ids=ids[:, 100:110], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(again.logits, more.logits)
    assert cache_bytes(cache) > 0 and cache.get_seq_length() == 110


KEEPS = {"llama": {1: [1]}, "gpt2": {0: [2, 0], 1: [3]}, "bart": {2: [1]}}


@pytest.mark.parametrize("name", KEEPS)
def test_some_heads_keep_full_attention(name):
    """Their outputs are the original's on the same inputs, the others' those of the mechanism with the other heads."""
    model, given, seen = make(name), inputs(name), {}
    part = dict(model.named_modules())[list(hf.converted_layers(model))[max(KEEPS[name])]]
    part.register_forward_hook(
        lambda module, args, about, out: seen.update({module.training: (args, about)}), with_kwargs=True
    )
    hf.convert(model, SMALL, full_heads=KEEPS[name])
    logits(model, given, name)
    (args, about), mechanism = seen[False], part.subquad
    outs = {}
    for output in [part.o_proj if name == "llama" else part.c_proj if name == "gpt2" else part.out_proj]:
        output.register_forward_pre_hook(lambda module, given: outs.update(now=given[0].unflatten(-1, (4, 8))))
    with torch.no_grad(), watching(lambda *call: outs.update(mechanism=call)):
        part(*args, **{key: value for key, value in about.items() if "past" not in key})
        mixed = outs["now"]  # (B, n, H, d)
        part._modules["subquad"] = None
        part(*args, **{key: value for key, value in about.items() if "past" not in key})
    group = 2 if name == "llama" else 1
    kept = [head * group + i for head in KEEPS[name][max(KEEPS[name])] for i in range(group)]
    rest = [head for head in range(4) if head not in kept]
    _, _, q, k, v, mask, _ = outs["mechanism"]
    torch.testing.assert_close(mixed[:, :, kept], outs["now"][:, :, kept])
    torch.testing.assert_close(mixed[:, :, rest], mechanism(q, k, v, key_mask=mask).transpose(1, 2))
    assert mechanism.options.num_heads == q.shape[1] == len(rest) and (mixed - outs["now"]).abs().max() > 1e-3


@pytest.mark.parametrize("name", KEEPS)
def test_full_heads_are_cached_cropped_saved_and_searched(name, tmp_path):
    model, given = hf.convert(make(name), SMALL, full_heads=KEEPS[name]), inputs(name)
    about = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "num_beams": 3}
    prompt = {key: value for key, value in given.items() if key != "decoder_input_ids"}
    cached, not_cached = (model.generate(**prompt, **about, use_cache=use) for use in (True, False))
    assert torch.equal(cached, not_cached)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(again, given, name), logits(model, given, name))


def test_the_cache_of_full_heads():
    from subquad.hf.caching import cache_bytes

    caches, ids = [], torch.randint(3, 97, (1, 110))
    for kept in ({}, {1: [0]}):
        model = hf.convert(llama().eval(), SMALL, full_heads=kept)
        with torch.no_grad():
            caches.append(model(input_ids=ids[:, :100], use_cache=True).past_key_values)
            more = model(input_ids=ids[:, 100:], past_key_values=caches[-1], use_cache=True)
            caches[-1].crop(-10)
            again = model(input_ids=ids[:, 100:], past_key_values=caches[-1], use_cache=True)
        torch.testing.assert_close(again.logits, more.logits)
    mine, other = caches[1].layers[1], caches[0].layers[1]
    assert mine.keys.shape == (1, 1, 110, 8) and mine.nbytes > mine.state.nbytes and other.keys is None
    assert cache_bytes(caches[1]) == sum(layer.nbytes for layer in caches[1].layers)
    caches[1].reset()
    assert mine.keys is None and mine.nbytes == 0


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({0: [2]}, "full_heads must be different key/value heads from 0 to 1, not"),
        ({0: [1, 1]}, "full_heads must be different"),
        ({0: [0, 1]}, "names every key/value head; leave the layer out"),
        ({5: [0]}, "layers must be integers from 0 to 1"),
        ({1: [0]}, "full_heads: layer 1 is not converted"),
    ],
)
def test_wrong_full_heads(kept, message):
    with pytest.raises(ValueError, match=message):
        hf.convert(llama(), SMALL, layers=[0], full_heads=kept)


def test_a_padded_row_is_what_it_is_alone():
    model, given = hf.convert(make("llama"), SMALL), inputs("llama")
    alone = logits(model, {"input_ids": given["input_ids"][:1, 7:]}, "llama")[0]
    places = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    padded = logits(model, {**given, "position_ids": places}, "llama")[: N - 7]
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-4)


def test_some_layers_keep_their_attention():
    model, given = llama(), inputs("llama")
    hf.convert(model.eval(), SMALL, layers=[-1])
    assert [made is None for made in hf.converted_layers(model).values()] == [True, False]
    one = logits(model, given, "llama")
    hf.convert(model, {0: "full", 1: SMALL})
    torch.testing.assert_close(logits(model, given, "llama"), one)
    hf.convert(model, {0: SMALL, 1: "strided:w=4"})
    assert [made.name for made in hf.converted_layers(model).values()] == ["combiner-window", "strided"]
    whole = logits(model, given, "llama")
    cached = model.generate(**given, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert whole.isfinite().all() and cached.shape == (2, N + 3)


@pytest.mark.parametrize("name", ["llama", "bert", "whisper"])
def test_saved_and_restored(name, tmp_path):
    model, given = make(name), inputs(name)
    hf.convert(model, f"{SMALL},abstraction=residual-mean", layers=[0])
    first = next(iter(hf.converted_layers(model).values()))
    for parameter in first.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert [str(x) for x in hf.converted_layers(again).values()] == [
        str(x) for x in hf.converted_layers(model).values()
    ]
    torch.testing.assert_close(logits(again.eval(), given, name), logits(model, given, name))
    body = tf.AutoModel.from_pretrained(tmp_path)  # without the head
    assert next(iter(hf.converted_layers(body).values())) is not None


def test_copied_and_pickled():
    model, given = hf.convert(make("llama"), SMALL), inputs("llama")
    want = logits(model, given, "llama")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(logits(other, given, "llama"), want)
        assert other.generate(**given, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, N + 2)


def test_new_parameters_are_trained():
    model, given = hf.convert(llama(), f"{SMALL},abstraction=residual-mean").train(), inputs("llama")
    model(**given, labels=given["input_ids"]).loss.backward()
    own = [p for name, p in model.named_parameters() if ".subquad." in name]
    assert own and all(p.grad is not None for p in own)
    assert any(p.grad.abs().sum() > 0 for p in own)


def test_dropout_is_the_layers_own():
    model = hf.convert(llama(attention_dropout=0.25), SMALL).train()
    assert {made.options.dropout for made in hf.converted_layers(model).values()} == {0.25}
    assert model(**inputs("llama")).logits.isfinite().all()


# ---- what is refused ----------------------------------------------------------------------------------------


def t5():
    about = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    return tf.T5ForConditionalGeneration(tf.T5Config(**about))


def bloom():
    return tf.BloomForCausalLM(tf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4))


REFUSED = {
    "relative position biases": t5,
    "does not ask transformers' AttentionInterface": bloom,
    "a soft cap": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8)),
    "a sliding window": lambda: tf.MistralForCausalLM(
        tf.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8)
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused_by_name(reason):
    model = REFUSED[reason]()
    with pytest.raises(ValueError, match=reason):
        hf.convert(model, SMALL)
    assert model.config._attn_implementation != "subquad"


def test_sliding_layers_may_keep_their_attention():
    layers = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, num_key_value_heads=2, **layers)).eval()
    given = {"input_ids": torch.randint(3, 97, (2, N))}
    before = logits(model, given, "qwen2")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn \(Qwen2Attention\): a sliding window \(8\)"):
        hf.convert(model, SMALL)
    hf.convert(model, "combiner-window:span=64,window=64", layers=[0])
    torch.testing.assert_close(logits(model, given, "qwen2"), before, atol=1e-5, rtol=1e-4)


def test_packed_batches_and_masks_of_ones_own_are_refused():
    model, ids = hf.convert(llama(), SMALL), torch.randint(3, 97, (1, 10))
    with pytest.raises(ValueError, match="packed batch"):
        model(input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]), use_cache=False)
    with pytest.raises(ValueError, match="mask of your own"):
        model(input_ids=ids, attention_mask=torch.ones(1, 1, 10, 10, dtype=torch.bool), use_cache=False)


@pytest.mark.parametrize(
    ("spec", "more", "message"),
    [
        ("composite-slice", {}, "works on tokens and projects them itself"),
        ("combiner-window:span=0", {}, "span must be an integer ≥ 1"),
        ("combiner-windows", {}, "combiner-window"),
        (SMALL, {"layers": [2]}, "layers must be integers from 0 to 1, not 2"),
        (SMALL, {"layers": []}, "layers is empty"),
        (SMALL, {"layers": 1}, "layers must be a list of integers from 0 to 1, or None for all, not 1"),
        (SMALL, {"layers": "all"}, "layers must be a list of integers from 0 to 1, or None for all, not 'all'"),
        (SMALL, {"full_heads": [0]}, "full_heads must be a dictionary from layers to lists of heads, or None, not"),
        ({0: "full"}, {}, "nothing to convert"),
        (SMALL, {"num_heads": 2}, "num_heads cannot be given: the layer's own is kept"),
        ({0: SMALL}, {"layers": [0]}, "a dictionary names the layers itself"),
    ],
)
def test_wrong_requests(spec, more, message):
    model = llama()
    with pytest.raises((TypeError, ValueError), match=message):
        hf.convert(model, spec, **more)
    assert model.config._attn_implementation != "subquad"


def test_wrong_models():
    with pytest.raises(TypeError, match="PreTrainedModel"):
        hf.convert(torch.nn.Linear(2, 2), SMALL)


def test_a_cache_of_keys_is_no_state():
    """The error names the cause: a size that is left open, training, or a cache that was made elsewhere."""
    ids = torch.randint(3, 97, (1, 12))
    for spec, mode, message in (
        ("combiner-fixed", False, r"span is left open.*set span or max_length, convert\(model, 'combiner-fix"),
        ("cosformer", False, r"max_length is left open.*set max_length, convert"),
        (SMALL, True, r"in training mode with gradients: call model\.eval\(\)"),
    ):
        model = hf.convert(llama().train(mode), spec)
        cache = model(input_ids=ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match=message):
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
    cache = llama().eval()(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cannot go on from a cache of keys"):
        model.eval()(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)


def test_generate_in_training_mode():
    """Nothing is dropped in this model: it writes what it writes in evaluation, with states in its cache."""
    model, ids = hf.convert(llama().eval(), SMALL), torch.randint(3, 97, (2, 11))
    about = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **about)
    got = model.train().generate(ids, **about, return_dict_in_generate=True)
    assert torch.equal(got.sequences, want)
    assert all(type(layer).__name__ == "StateLayer" for layer in got.past_key_values.layers)
    dropping = hf.convert(llama(attention_dropout=0.3).train(), SMALL)
    assert dropping.generate(ids, **about).shape == (2, 19)


# ---- tools of the trade -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [{}, {1: [0]}])
def test_export_and_compile(kept):
    model, given = hf.convert(llama().eval(), SMALL, full_heads=kept), inputs("llama")
    want = logits(model, given, "llama")
    program = torch.export.export(model, (), {**given, "use_cache": False}, strict=False).module()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for other in (program, compiled):
        torch.testing.assert_close(logits(other, given, "llama"), want, atol=1e-5, rtol=1e-4)
    with pytest.raises(Exception, match="give the model an attention_mask"):
        torch.export.export(model, (), {"input_ids": given["input_ids"], "use_cache": False}, strict=False)


def test_low_rank_adapters_of_peft():
    peft = pytest.importorskip("peft")
    model, given = hf.convert(llama(), SMALL), inputs("llama")
    before = logits(model.eval(), given, "llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    torch.testing.assert_close(logits(adapted.eval(), given, "llama"), before)
    adapted.train()(**given, labels=given["input_ids"], use_cache=False).loss.backward()
    assert any(
        p.grad is not None and p.grad.abs().sum() > 0 for name, p in adapted.named_parameters() if "lora" in name
    )
