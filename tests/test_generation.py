"""Generation with a cache: token for token what it is without one, however rows are padded, split or cropped."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import subquad
from subquad.attention.registry import mechanism
from subquad.models import HEADS, SubquadCache, SubquadConfig, SubquadModel

CAUSAL = [
    name
    for name in subquad.available()
    if name not in ("pattern", "combiner-plan") and mechanism(name).capabilities.causal
]
STREAMING = [name for name in CAUSAL if mechanism(name).capabilities.streaming]


def config(**keys) -> SubquadConfig:
    small = {"vocab_size": 30, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": None}
    more = {"max_position_embeddings": 48, "num_hidden_layers": 2, "evaluation_seed": 3, "initializer_range": 0.5}
    return SubquadConfig(**{**small, **ids, **more, **keys})


def writer(spec: str = "combiner-fixed", head: str = "causal-lm", seed: int = 0, **keys):
    torch.manual_seed(seed)
    return HEADS[head](config(attention=spec, **keys)).double().eval()


def prompts() -> dict[str, torch.Tensor]:
    """Three rows of 13, 6 and 9 tokens, padded on the left."""
    torch.manual_seed(1)
    ids, mask = torch.randint(1, 30, (3, 13)), torch.ones(3, 13, dtype=torch.long)
    for row, padding in ((1, 7), (2, 4)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def both(model, given, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, **settings}
    found = []
    for cached in (True, False):
        torch.manual_seed(5)
        found.append(model.generate(**given, **settings, use_cache=cached))
    return found[0], found[1]


@pytest.mark.parametrize("spec", STREAMING)
def test_cached_equals_uncached(spec):
    """Greedy, beams, left padding; rotary positions where the mechanism works on q, k, v."""
    layers = mechanism(spec).capabilities.level == "layer"
    model, given = writer(spec, positions="learned" if layers else "rotary"), prompts()
    alone = {"input_ids": given["input_ids"][:1]}
    for inputs, beams in ((alone, 1), (given, 1), (given, 3)):
        cached, uncached = both(model, inputs, num_beams=beams)
        assert torch.equal(cached, uncached), f"{beams} beams"
    short = model.generate(given["input_ids"][1:2, 7:], max_new_tokens=10, do_sample=False)
    cached = model.generate(**given, max_new_tokens=10, do_sample=False)
    assert torch.equal(cached[1:2, 7:], short), "a padded row is continued as it is alone"


@pytest.mark.parametrize(
    "spec", ["full", "combiner-fixed", "combiner-tree", "composite-slice", "longformer:window=4", "sbm"]
)
def test_any_split_gives_the_logits_of_one_call(spec):
    model, given = writer(spec), prompts()
    ids, mask = given["input_ids"], given["attention_mask"]
    with torch.no_grad():
        expected = model(ids, mask).logits
        for cuts in ([13], [1] * 13, [3, 7, 2, 1]):
            cache, found, at = None, [], 0
            for size in cuts:
                at += size
                output = model(ids[:, at - size : at], mask[:, :at], past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                found.append(output.logits)
            assert cache.get_seq_length() == 13 and cache.lengths.tolist() == [13, 6, 9]
            real = mask.bool()
            assert_close(torch.cat(found, 1)[real], expected[real], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spec", ["combiner-fixed", "composite-slice", "sbm"])
def test_sampling_chunked_prefill_and_several_answers(spec):
    model, given = writer(spec), prompts()
    assert torch.equal(*both(model, given, do_sample=True, top_k=5))
    assert torch.equal(*both(model, given, do_sample=True, num_return_sequences=2))
    assert torch.equal(*both(model, given, num_beams=2, num_return_sequences=2, length_penalty=0.5))
    whole, _ = both(model, given)
    for size in (1, 4, 13):
        settings = {"max_new_tokens": 10, "do_sample": False, "prefill_chunk_size": size}
        assert torch.equal(model.generate(**given, **settings), whole)


def test_every_causal_mechanism_streams():
    assert STREAMING == CAUSAL and len(CAUSAL) > 30


@pytest.mark.parametrize("spec", [*STREAMING, "longformer:window=4"])
def test_assisted_decoding_equals_greedy(spec):
    model, helper, ids = writer(spec), writer("full", seed=9, num_hidden_layers=1), prompts()["input_ids"][:1]
    settings = {"max_new_tokens": 10, "do_sample": False}
    greedy = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, assistant_model=helper, **settings), greedy)
    assert torch.equal(model.generate(ids, assistant_model=writer(spec), **settings), greedy), "everything is accepted"
    repeated = torch.cat([ids, ids], 1)
    looked_up = model.generate(repeated, prompt_lookup_num_tokens=4, **settings)
    assert torch.equal(looked_up, model.generate(repeated, **settings))


def test_a_conversation_goes_on_from_its_cache():
    model, ids = writer(), prompts()["input_ids"][:1]
    settings = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    cache = DynamicCache()
    first = model.generate(ids, past_key_values=cache, **settings)
    assert first.past_key_values is cache and cache.get_seq_length() == 17
    kept = copy.deepcopy(cache)
    question = torch.cat([first.sequences, torch.tensor([[7, 8, 9]])], 1)
    again = model.generate(question, past_key_values=cache, **settings).sequences
    assert torch.equal(again, model.generate(question, **settings).sequences)
    assert torch.equal(again, model.generate(question, past_key_values=kept, **settings).sequences), "a copy is a copy"


def test_the_cache_is_small_and_its_rows_can_be_moved():
    model = writer("combiner-fixed:span=4", max_position_embeddings=512)
    given = prompts()
    with torch.no_grad():
        output = model(**given, use_cache=True)
        cache = output.past_key_values
        assert isinstance(cache, SubquadCache) and cache.batch_size == 3 and cache.nbytes > 0
        plain = copy.deepcopy(cache)
        new, mask = (
            torch.tensor([[4, 5], [6, 7], [8, 9]]),
            torch.nn.functional.pad(given["attention_mask"], (0, 2), value=1),
        )
        expected = model(new, mask, past_key_values=plain).logits
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([4, 1, 3]))
        order = [2, 0, 1]
        assert_close(model(new[order], mask[order], past_key_values=cache).logits, expected[order])
        cache.crop(-2)
        assert cache.get_seq_length() == 13 and cache.lengths.tolist() == [9, 13, 6]
        cache.reorder_cache(torch.tensor([1, 2, 0]))
        assert_close(model(new, mask, past_key_values=cache).logits, expected)
        cache.reset()
        assert_close(model(**given, past_key_values=cache).logits, output.logits)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "none"])
def test_positions_go_on_from_a_rows_own_length(positions):
    model, given = writer(positions=positions), prompts()
    ids, mask = given["input_ids"], given["attention_mask"].clone()
    mask[0, [0, 3, 4, 9]] = 0  # and padding between the tokens of a prompt
    with torch.no_grad():
        cache = model(ids, mask, use_cache=True).past_key_values
        assert cache.lengths.tolist() == [9, 6, 9]
        new = torch.tensor([[4, 5], [6, 7], [8, 9]])
        found = model(new, past_key_values=cache).logits  # no mask: the cache knows
        for row in range(3):
            alone = torch.cat([ids[row, mask[row].bool()], new[row]])[None]
            assert_close(found[row], model(alone).logits[0, -2:], rtol=1e-9, atol=1e-9)


def test_padding_between_chunks_is_skipped():
    """A token that the mask takes away (generate guesses masks from pad tokens) is not there for a cache either."""
    model, ids = writer(), prompts()["input_ids"][:1]
    mask = torch.ones(1, 13, dtype=torch.long)
    mask[0, [5, 6, 9]] = 0
    with torch.no_grad():
        expected = model(ids, mask).logits[mask.bool()]
        cache, found = SubquadCache(2), []
        for a, b in ((0, 4), (4, 6), (6, 7), (7, 13)):
            found.append(model(ids[:, a:b], mask[:, :b], past_key_values=cache).logits)
        assert_close(torch.cat(found, 1)[mask.bool()], expected, rtol=1e-9, atol=1e-9)
        assert cache.get_seq_length() == 13 and cache.lengths.tolist() == [10]
        cache.crop(-7)  # back to slot 6: five tokens
        assert cache.lengths.tolist() == [5]
        again = model(ids[:, 6:], mask, past_key_values=cache).logits
        assert_close(again[mask[:, 6:].bool()], expected[5:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spec", ["combiner-fixed:span=4", "composite-slice:slice_length=4", "linear"])
def test_a_cache_goes_back_further_than_its_states(spec):
    """Beyond what the states keep the tokens are read again: by numbers, embedded, padded, with rows that moved."""
    model = writer(spec, max_position_embeddings=256)
    ids, new = torch.randint(1, 30, (2, 150)), torch.randint(1, 30, (2, 3))
    mask = torch.ones(2, 150, dtype=torch.long)
    mask[1, :7], mask[:, 90:93] = 0, 0
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids[:, :40])
        cache = model(inputs_embeds=embeds, attention_mask=mask[:, :40], use_cache=True).past_key_values
        for a, b in ((40, 100), (100, 101), (101, 150)):
            model(ids[:, a:b], mask[:, :b], past_key_values=cache)
        assert (cache.layers[0].state.earliest > 61).all()
        cache.crop(-50)
        cache.crop(-5)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert cache.get_seq_length() == 95 and cache.lengths.tolist() == [85, 92]
        order = [1, 0]
        whole = torch.cat([mask[order, :95], torch.ones_like(new)], 1)
        found = model(new, whole, past_key_values=cache).logits
        expected = model(torch.cat([ids[order, :95], new], 1), whole).logits[:, -3:]
        assert_close(found, expected, rtol=1e-9, atol=1e-9)
        assert cache.lengths.tolist() == [88, 95] and cache.get_seq_length() == 98


def test_a_translation_goes_back_further_than_its_states():
    model, ids = writer("combiner-fixed:span=4", "seq2seq", max_position_embeddings=256), prompts()["input_ids"][:1]
    read = torch.randint(1, 30, (1, 120))
    with torch.no_grad():
        first = model(ids, decoder_input_ids=read, use_cache=True)
        first.past_key_values.crop(-100)
        about = {"encoder_outputs": (first.encoder_last_hidden_state,), "past_key_values": first.past_key_values}
        found = model(decoder_input_ids=read[:, 20:23], **about).logits
        expected = model(ids, decoder_input_ids=read[:, :23]).logits[:, -3:]
    assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spec", ["full", "combiner-fixed", "composite-slice", "longformer:window=4", "sbm"])
def test_translation_with_a_cache(spec):
    model, given = writer(spec, "seq2seq"), prompts()
    for beams in (1, 3):
        assert torch.equal(*both(model, given, num_beams=beams))
    alone = {"input_ids": given["input_ids"][:1]}
    greedy, _ = both(model, alone)
    helper = writer("full", "seq2seq", seed=9)
    assisted = model.generate(**alone, assistant_model=helper, max_new_tokens=10, do_sample=False)
    assert torch.equal(assisted, greedy)
    with torch.no_grad():
        read = greedy[:, :6]
        expected = model(**alone, decoder_input_ids=read).logits
        first = model(**alone, decoder_input_ids=read[:, :4], use_cache=True)
        assert isinstance(first.past_key_values, EncoderDecoderCache)
        encoder_outputs = (first.encoder_last_hidden_state,)
        rest = model(
            encoder_outputs=encoder_outputs, decoder_input_ids=read[:, 4:], past_key_values=first.past_key_values
        )
    assert_close(torch.cat([first.logits, rest.logits], 1), expected, rtol=1e-9, atol=1e-9)


def test_embedded_prompts_and_hidden_states():
    model, ids = writer(), prompts()["input_ids"][:1]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    embedded = model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=6, do_sample=False)
    assert torch.equal(embedded, expected[:, 13:])
    told = model.generate(
        ids,
        max_new_tokens=6,
        do_sample=False,
        output_hidden_states=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert [states[0].shape[1] for states in told.hidden_states] == [13, 1, 1, 1, 1, 1]
    assert_close(
        torch.stack(told.logits, 1), model(told.sequences[:, :-1]).logits[:, 12:].float(), rtol=1e-4, atol=1e-5
    )
    weights = model.generate(
        ids, max_new_tokens=3, do_sample=False, output_attentions=True, return_dict_in_generate=True
    )
    assert [w[0].shape[2] for w in weights.attentions] == [13, 14, 15], "weights need the whole sequence"


def test_a_mechanism_that_does_not_stream_generates_without_a_cache(monkeypatch):
    model, ids = writer("longformer:window=4"), prompts()["input_ids"][:1]
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    able = copy.copy(mechanism("longformer").capabilities)
    object.__setattr__(able, "streaming", False)
    monkeypatch.setattr(mechanism("longformer"), "capabilities", able)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False), expected[:, 13:])
    for ask in (lambda: model.generate(ids, use_cache=True, max_new_tokens=5), lambda: model(ids, use_cache=True)):
        with pytest.raises(ValueError, match="use_cache: longformer cannot go on from a cache"):
            ask()


def test_what_a_cache_refuses():
    model, given = writer(), prompts()
    ids, mask = given["input_ids"], given["attention_mask"]
    cache = model(ids, mask, use_cache=True).past_key_values
    before = cache.lengths.clone()
    one = torch.ones(3, 1, dtype=torch.long)
    for call, words in (
        (lambda: model(one, mask, past_key_values=cache), "must have 14 columns, 13 cached and 1 new"),
        (
            lambda: model(one, torch.cat([mask, one % 2 * torch.tensor([[1], [0], [1]])], 1), past_key_values=cache),
            "pad prompts",
        ),
        (lambda: model(one[:2], past_key_values=cache), "batch size"),
        (
            lambda: model(torch.ones(3, 40, dtype=torch.long), past_key_values=cache),
            "beyond max_position_embeddings=48",
        ),
        (lambda: model(one, past_key_values=cache, output_attentions=True), "no weights to show"),
        (lambda: model(ids[:1], position_ids=torch.arange(13)[None] % 5, use_cache=True), "a packed batch"),
        (lambda: model(ids[:1], cu_seqlens=torch.tensor([0, 5, 13]), use_cache=True), "packed batch"),
        (lambda: model(one, past_key_values=SubquadCache(3)), "3 layers, the model has 2"),
        (lambda: model(one, past_key_values=StaticCache(config=model.config, max_cache_len=8)), "a StaticCache"),
        (lambda: model(one, past_key_values=((one, one),)), "must be a transformers Cache"),
        (lambda: cache.crop(-14), "down to -13"),
        (lambda: SubquadModel(config())(one, use_cache=True), "full cannot go on"),
        (lambda: model.generate(ids, cache_implementation="static", max_new_tokens=2), "cache_implementation"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            call()
        assert torch.equal(cache.lengths, before), words
    keys = DynamicCache()
    keys.update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0)
    with pytest.raises(ValueError, match="from another model"):
        model(one, past_key_values=keys)


def test_gradients_flow_through_a_cache():
    """Truncated backpropagation is a choice of the caller: without it chunks give the gradients of one call."""
    model, ids = writer(), prompts()["input_ids"][:1]
    whole = model(ids).logits.square().sum()
    expected = torch.autograd.grad(whole, list(model.encoder.parameters()))
    first = model(ids[:, :6], use_cache=True)
    second = model(ids[:, 6:], past_key_values=first.past_key_values)
    loss = first.logits.square().sum() + second.logits.square().sum()
    for one, other in zip(torch.autograd.grad(loss, list(model.encoder.parameters())), expected, strict=True):
        assert_close(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("spec", STREAMING)
def test_cached_generation_in_half_precision(spec):
    model = writer(spec).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.generate(**prompts(), max_new_tokens=3, do_sample=False).shape == (3, 16)
    half = model.to(torch.bfloat16)
    assert half.generate(**prompts(), max_new_tokens=3, do_sample=False).shape == (3, 16)
