"""What transformers asks of `generate` in any model: every way to write, with everything returned, from every input.

The ideas are those of transformers' own tests of generation, for the attentions that its tests are run with.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessor, LogitsProcessorList, StaticCache

from small_models import FIVE, config
from subquad.models import HEADS

NEW = 3
WRITERS = [(spec, head) for spec in FIVE for head in ("causal-lm", "seq2seq")]
WAYS = {
    "greedy": {},
    "sample": {"do_sample": True, "top_k": 10, "top_p": 0.7, "temperature": 0.7},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 2.0},
    "beam-sample": {"num_beams": 2, "do_sample": True},
}


def writer(spec: str, head: str = "causal-lm", **keys):
    torch.manual_seed(0)
    keys = {"eos_token_id": None, "evaluation_seed": 3, "initializer_range": 0.5, "num_hidden_layers": 2, **keys}
    return HEADS[head](config(attention=spec, **keys)).double().eval()


def prompts(rows: int = 2) -> dict[str, torch.Tensor]:
    """Rows of 7 tokens, the first one padded on the left."""
    ids = torch.randint(3, 20, (rows, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if rows > 1:
        ids[0, :3], mask[0, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def written(model, given, seed: int = 0, **settings):
    torch.manual_seed(seed)
    settings = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, **settings}
    return model.generate(**given, **settings)


def check_steps(steps, rows: int, lengths: list[int], width: tuple[int, ...] | None = None) -> None:
    """One tuple per step, with a tensor per layer: states (rows, t, *width), or weights (rows, 2, t, t)."""
    assert [len(step) for step in steps] == [3 if width else 2] * NEW
    for step, t in zip(steps, lengths, strict=True):
        shape = (rows, t, *width) if width else (rows, 2, t, t)
        assert {tuple(x.shape) for x in step} == {shape}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("spec", "head"), WRITERS)
def test_everything_that_generate_returns(spec, head, way):
    """With and without a cache the same tokens and scores; states and weights of every step in their shapes."""
    model, given = writer(spec, head), prompts()
    translates, settings = head == "seq2seq", WAYS[way]
    rows = 2 * max(settings.get("num_beams", 1), settings.get("num_return_sequences", 1))
    asked = {"output_scores": True, "output_logits": True, "output_hidden_states": True, **settings}
    cached, plain = (written(model, given, use_cache=use, **asked) for use in (True, False))
    assert torch.equal(cached.sequences, plain.sequences)
    assert len(cached.sequences) == 2 * settings.get("num_return_sequences", 1)
    begun = 1 if translates else 7
    assert cached.sequences.shape[1] == begun + NEW
    for one, other in zip((*cached.scores, *cached.logits), (*plain.scores, *plain.logits), strict=True):
        assert one.shape == (rows, 20)
        assert_close(one, other, rtol=1e-5, atol=1e-5)  # generate keeps them in float32
    assert plain.past_key_values is None
    cache = cached.past_key_values
    assert isinstance(cache, EncoderDecoderCache if translates else DynamicCache)
    assert cache.get_seq_length() == begun + NEW - 1
    stem = "decoder_" if translates else ""
    check_steps(cached[f"{stem}hidden_states"], rows, [begun, *[1] * (NEW - 1)], (16,))
    check_steps(plain[f"{stem}hidden_states"], rows, [begun + step for step in range(NEW)], (16,))


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize(("spec", "head"), [pair for pair in WRITERS if "composite" not in pair[0]])
def test_the_weights_of_every_step(spec, head, beams):
    model, given, rows = writer(spec, head), prompts(), 2 * beams
    told = written(model, given, output_attentions=True, num_beams=beams)
    assert torch.equal(told.sequences, written(model, given, num_beams=beams).sequences)
    if head == "causal-lm":
        check_steps(told.attentions, rows, [7 + step for step in range(NEW)])
        return
    check_steps(told.decoder_attentions, rows, [1 + step for step in range(NEW)])
    assert [tuple(w.shape) for w in told.cross_attentions[0]] == [(rows, 2, 1, 7)] * 2
    assert [tuple(w.shape) for w in told.encoder_attentions] == [(2, 2, 7, 7)] * 2


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("spec", FIVE)
def test_embedded_prompts(spec, beams):
    """With the numbers of the tokens beside them or without; other embeddings give other scores."""
    model, given = writer(spec), prompts()
    ids, mask = given["input_ids"], given["attention_mask"]
    embeds = model.get_input_embeddings()(ids)
    settings = {"num_beams": beams, "output_scores": True}
    expected = written(model, given, **settings)
    both = written(model, {**given, "inputs_embeds": embeds}, **settings)
    alone = written(model, {"inputs_embeds": embeds, "attention_mask": mask}, **settings)
    assert torch.equal(both.sequences, expected.sequences)
    assert torch.equal(alone.sequences, expected.sequences[:, 7:])
    other = written(model, {**given, "inputs_embeds": embeds.flip(1)}, **settings)
    assert not torch.allclose(other.scores[0], expected.scores[0])


@pytest.mark.parametrize(("spec", "head"), WRITERS)
def test_a_text_goes_on_from_the_cache_of_another_call(spec, head):
    """Three tokens and one more are the four of one call, padded rows too, and leave the same cache."""
    model, given = writer(spec, head), prompts()
    whole = written(model, given, max_new_tokens=4)
    first = written(model, given, max_new_tokens=3)
    ids = {"past_key_values": first.past_key_values, "input_ids": first.sequences}
    mask = torch.nn.functional.pad(given["attention_mask"], (0, 3), value=1)
    if head == "seq2seq":
        ids = {**ids, "input_ids": given["input_ids"], "decoder_input_ids": first.sequences}
        mask = given["attention_mask"]
        ids["decoder_attention_mask"] = torch.ones_like(first.sequences)  # says that these are all tokens, not new ones
    second = written(model, {**ids, "attention_mask": mask}, max_new_tokens=1)
    assert torch.equal(second.sequences, whole.sequences)
    next_tokens = torch.tensor([[5], [6]])
    news = {"input_ids": next_tokens}
    if head == "seq2seq":
        states = model.encoder(**given).last_hidden_state
        mask = {"attention_mask": given["attention_mask"]}
        news = {"decoder_input_ids": next_tokens, "encoder_outputs": (states,), **mask}
    with torch.no_grad():
        one, other = (model(**news, past_key_values=each.past_key_values).logits for each in (whole, second))
    assert_close(one, other)


@pytest.mark.parametrize("spec", FIVE)
def test_an_embedded_prompt_goes_on_from_its_cache(spec):
    model, ids = writer(spec), prompts(1)["input_ids"]
    embeds = model.get_input_embeddings()(ids)
    whole = written(model, {"inputs_embeds": embeds}, max_new_tokens=4).sequences
    first = written(model, {"inputs_embeds": embeds}, max_new_tokens=3)
    longer = torch.cat([embeds, model.get_input_embeddings()(first.sequences)], 1)
    more = {"inputs_embeds": longer, "past_key_values": first.past_key_values}
    assert torch.equal(written(model, more, max_new_tokens=1).sequences, whole[:, 3:])


@pytest.mark.parametrize("spec", FIVE)
def test_all_logits_or_the_last_ones(spec):
    """What `generate` keeps of the logits changes nothing, nor do positions that are given; assisted or not."""
    model, given = writer(spec), prompts()
    expected = written(model, given).sequences
    positions = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    for extra in ({"logits_to_keep": 0}, {"logits_to_keep": 1}, {"position_ids": positions}):
        assert torch.equal(written(model, {**given, **extra}).sequences, expected), extra
    alone = prompts(1)
    expected = written(model, alone, max_new_tokens=8).sequences
    for extra in ({}, {"logits_to_keep": 0}):
        assisted = written(model, {**alone, **extra}, max_new_tokens=8, assistant_model=copy.deepcopy(model))
        assert torch.equal(assisted.sequences, expected), extra


@pytest.mark.parametrize(("spec", "head"), WRITERS)
def test_caches_of_transformers(spec, head):
    """An empty dynamic cache is taken; what would hold keys and values is refused by name."""
    model, given = writer(spec, head), prompts()
    expected = written(model, given).sequences
    assert torch.equal(written(model, given, cache_implementation="dynamic").sequences, expected)
    for empty in (DynamicCache(), DynamicCache(config=model.config)):
        cache = EncoderDecoderCache(empty, DynamicCache()) if head == "seq2seq" else empty
        told = written(model, given, past_key_values=cache)
        assert torch.equal(told.sequences, expected) and told.past_key_values is cache
    for kind in ("static", "quantized", "offloaded"):
        with pytest.raises(ValueError, match="cache_implementation: these models have a cache of their own"):
            written(model, given, cache_implementation=kind)
    fixed = StaticCache(config=model.config, max_cache_len=20)
    with pytest.raises(TypeError, match="not a StaticCache"):
        written(
            model, given, past_key_values=EncoderDecoderCache(fixed, DynamicCache()) if head == "seq2seq" else fixed
        )


@pytest.mark.parametrize("spec", FIVE)
def test_a_text_from_nothing(spec):
    """Without a prompt the text begins with bos_token_id."""
    model = writer(spec)
    begun = written(model, {"input_ids": torch.tensor([[1]])}).sequences
    assert torch.equal(written(model, {}).sequences, begun)


class Ending(LogitsProcessor):
    """Row 0 ends at its second new token, no other row does."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 2] = -torch.inf
        if input_ids.shape[1] == 8:
            scores[0] = -torch.inf
            scores[0, 2] = 0.0
        return scores


@pytest.mark.parametrize("spec", FIVE)
def test_a_row_that_has_ended_is_padded(spec):
    model, given = writer(spec, eos_token_id=2), prompts()
    ends = LogitsProcessorList([Ending()])
    made = written(model, given, max_new_tokens=5, logits_processor=ends).sequences
    assert made[0, 8:].tolist() == [2, 0, 0, 0] and (made[1, 7:] != 2).all()
    alone = {name: value[1:] for name, value in given.items()}
    free = LogitsProcessorList([lambda ids, scores: scores.index_fill(1, torch.tensor([2]), -torch.inf)])
    assert torch.equal(made[1:], written(model, alone, max_new_tokens=5, logits_processor=free).sequences)


@pytest.mark.parametrize("spec", FIVE)
def test_assistants_and_sampling(spec):
    """Speculative sampling and prompt lookup with sampling run and end where they should."""
    model, alone = writer(spec), prompts(1)
    repeated = {"input_ids": alone["input_ids"].repeat(1, 2)}
    helper = writer("full", num_hidden_layers=1)
    for given, how in ((alone, {"assistant_model": helper}), (repeated, {"prompt_lookup_num_tokens": 3})):
        made = written(model, given, do_sample=True, max_new_tokens=6, **how).sequences
        assert made.shape == (1, given["input_ids"].shape[1] + 6)
        greedy = written(model, given, max_new_tokens=6).sequences
        ended = int(greedy[0, given["input_ids"].shape[1] + 2])
        stopped = written(model, given, max_new_tokens=6, eos_token_id=ended, **how).sequences
        assert torch.equal(stopped, written(model, given, max_new_tokens=6, eos_token_id=ended).sequences)
