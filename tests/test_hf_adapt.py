"""`subquad adapt`, `perplexity`, `passkey` and `convert` on a small model with random weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers as tf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode
from typer.testing import CliRunner

from subquad import hf
from subquad.cli import app
from subquad.hf.adapting import Adapter, Settings
from subquad.hf.fitting import fit_loss, tune_backward, watch_original
from subquad.hf.lowrank import add_updates, merge_updates, original
from subquad.hf.passkey import hide, looking_heads
from subquad.hf.perplexity import measure, summary_mass
from subquad.hf.texts import hide_numbers, window, windows

SPEC = "combiner-window:span=4,window=6,sinks=2,abstraction=residual-attended"
TEXT = "".join(chr(32 + (7 * i * i + i // 3) % 90) for i in range(3000))
QUICK = {"length": 40, "fit_steps": 2, "repeats": 2, "tune_steps": 2, "rank": 2}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make_model():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    about = {"vocab_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **about, eos_token_id=2)).eval()


def make_tokenizer():
    """One token for each ASCII character."""
    plain = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    return tf.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?")


@pytest.fixture
def converted():
    return hf.convert(make_model(), SPEC)


def adapter(model, folder, **settings):
    return Adapter(model, make_tokenizer(), [TEXT, TEXT[::-1]], folder, Settings(**{**QUICK, **settings}))


# ---- the parts ----------------------------------------------------------------------------------------------


def test_the_original_is_inside(converted):
    ids = torch.randint(3, 128, (1, 40))
    plain = make_model()
    plain.load_state_dict(converted.state_dict(), strict=False)
    add_updates(converted.model.layers[0].self_attn, 2)
    torch.nn.init.normal_(converted.model.layers[0].self_attn.q_proj.parametrizations.weight[0].up)
    with torch.no_grad():
        want, changed = plain(input_ids=ids).logits, converted(input_ids=ids).logits
        with original(converted):
            inside = converted(input_ids=ids, use_cache=False).logits
        again = converted(input_ids=ids).logits
    torch.testing.assert_close(inside, want)
    assert (changed - want).abs().max() > 1e-3
    torch.testing.assert_close(again, changed)


def test_merged_updates_change_nothing(converted):
    ids, layer = torch.randint(3, 128, (1, 20)), converted.model.layers[1].self_attn
    for parameter in add_updates(layer, 3):
        torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        before = converted(input_ids=ids).logits
        merge_updates(converted)
        torch.testing.assert_close(converted(input_ids=ids).logits, before)
    assert type(layer.q_proj) is torch.nn.Linear and not hasattr(layer.q_proj, "parametrizations")


def test_losses_are_what_they_say(converted):
    ids = torch.randint(3, 128, (1, 40))
    layers = {name: converted.get_submodule(name) for name in hf.converted_layers(converted)}
    seen = watch_original(converted, layers, ids)
    name, layer = next(iter(layers.items()))
    with torch.no_grad():
        out = layer(*seen[name].args, **seen[name].about)[0]
        wanted = (out - seen[name].out).norm() ** 2 / seen[name].out.norm() ** 2
        torch.testing.assert_close(fit_loss(layer, seen[name]), wanted)
    entropy, divergence = tune_backward(converted, ids, 0.5)
    got = converted.model.layers[0].self_attn.q_proj.weight.grad.clone()
    converted.zero_grad()
    own = converted(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    with torch.no_grad(), original(converted):
        full = converted(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    ce = torch.nn.functional.nll_loss(own, ids[0, 1:])
    kl = (full.exp() * (full - own)).sum(-1).mean()
    (0.5 * ce + 0.5 * kl).backward()
    assert entropy == pytest.approx(ce.item(), rel=1e-4) and divergence == pytest.approx(kl.item(), rel=1e-3)
    torch.testing.assert_close(converted.model.layers[0].self_attn.q_proj.weight.grad, got, atol=1e-6, rtol=1e-3)


def test_mass_on_summaries_is_the_definitions(converted):
    mechanism = converted.model.layers[0].self_attn.subquad.double()
    q, k = (torch.randn(2, heads, 23, 8, dtype=torch.float64) for heads in (4, 2))
    terms = mechanism.terms(q, k.repeat_interleave(2, 1), mechanism._call(_no_rows(), None, 23))
    logits = torch.cat([terms.direct_logits, terms.group_logits], -1)
    allowed = torch.cat([terms.direct, terms.groups], -1).expand(logits.shape)
    share = logits.masked_fill(~allowed, -torch.inf).softmax(-1)[..., 23:].sum(-1)
    torch.testing.assert_close(mechanism.summary_mass(q, k), share)
    assert share[:, :, :8].sum() == 0 and share[:, :, -1].min() > 0


def _no_rows():
    from subquad.attention.call import Rows

    return Rows.of(None, align=True)


def test_windows_are_drawn_and_skipped():
    tokenizer = make_tokenizer()
    first, again = (windows([TEXT, TEXT], tokenizer, 10, seed=3, skip=skip) for skip in (0, 2))
    drawn = [next(first) for _ in range(4)]
    assert torch.equal(drawn[2], next(again)) and torch.equal(drawn[3], next(again))
    assert not torch.equal(drawn[0], drawn[1])
    with pytest.raises(ValueError, match="4 tokens behind character 0: 10 are needed"):
        window("abcd", tokenizer, 10)


def test_numbers_are_said_early_and_asked_for_at_the_end():
    ids, tokenizer = torch.tensor([[ord("~")] * 600]), make_tokenizer()
    found = [hide_numbers(ids, tokenizer, 2, torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    for tokens in found:
        text = "".join(map(chr, tokens.tolist()))
        end = text[text.rindex("~") + 1 :]
        said = re.findall(r"\d+", text[: -len(end)])
        assert len(text) == 600 and text.count("~") + len(end) < 600
        assert len(said) == 2 and sorted(said) == sorted(re.findall(r"\d+", end))  # each is asked for
    with pytest.raises(ValueError, match=r"numbers=12 needs windows of at least .* tokens, not 600"):
        hide_numbers(ids, tokenizer, 12, torch.Generator().manual_seed(0))


# ---- a run --------------------------------------------------------------------------------------------------


def test_layers_come_closer_to_the_original(converted, tmp_path):
    run = adapter(converted, tmp_path, repeats=15, rank=0, rate=3e-3)
    ids = torch.randint(32, 122, (1, 40))
    run.calibrate(ids)
    line = run.fit(ids)
    assert line["after"] < line["error"]
    assert all(p.requires_grad == (".subquad." in name) for name, p in converted.named_parameters())
    assert all(p.requires_grad for p in run.finish().parameters())


def test_a_run_writes_its_log(converted, tmp_path):
    run = adapter(converted, tmp_path)
    run.run()
    lines = [json.loads(line) for line in (tmp_path / "adapt.jsonl").read_text().splitlines()]
    assert [(line["step"], line["phase"]) for line in lines] == [(1, "fit"), (2, "fit"), (3, "tune"), (4, "tune")]
    assert list((tmp_path / "tensorboard").iterdir()) and all(line["of"] == 4 for line in lines)


def test_a_run_that_was_stopped_resumes(tmp_path):
    hf.convert(make_model(), SPEC).save_pretrained(tmp_path / "start")

    def begin(folder):
        more = {"length": 300, "numbers": 1, "decay": True}
        return adapter(tf.LlamaForCausalLM.from_pretrained(tmp_path / "start").eval(), tmp_path / folder, **more)

    def stop(line):
        if line["step"] == 3:
            raise KeyboardInterrupt

    whole = begin("whole")
    whole.run()
    with pytest.raises(KeyboardInterrupt):  # a checkpoint after step 2 and none after step 3
        begin("part").run(stop, every=60)
    rest = begin("part")
    rest.run()
    assert rest.step == whole.step == 4
    for one, other in zip(rest.parameters, whole.parameters, strict=True):
        torch.testing.assert_close(one, other)


def test_rates_fall_to_zero(converted, tmp_path):
    run, rates = adapter(converted, tmp_path, fit_steps=0, tune_steps=4, decay=True), []
    run.run(lambda line: rates.append(run.optimizer.param_groups[-1]["lr"]))
    assert rates == pytest.approx([5e-4 * left for left in (1, 0.75, 0.5, 0.25)])


def test_layers_that_keep_their_attention_are_updated_too(tmp_path):
    model = hf.convert(make_model(), SPEC, layers=[1])
    run = adapter(model, tmp_path, fit_steps=0)
    kept, before = model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.q_proj.weight.clone()
    run.run()
    run.finish()
    assert type(kept) is torch.nn.Linear and (kept.weight - before).abs().max() > 0


def test_other_settings_are_not_resumed(converted, tmp_path):
    adapter(converted, tmp_path).run()
    with pytest.raises(ValueError, match="already contains a run with rank=2, not 3"):
        adapter(hf.convert(make_model(), SPEC), tmp_path, rank=3).run()


def test_another_model_or_text_is_not_resumed(tmp_path):
    hf.convert(make_model(), SPEC).save_pretrained(tmp_path / "start")
    same = lambda: tf.LlamaForCausalLM.from_pretrained(tmp_path / "start").eval()  # noqa: E731
    adapter(same(), tmp_path / "run").run()
    again = adapter(same(), tmp_path / "run")
    again.run()
    assert again.step == again.total, "the same"
    with pytest.raises(ValueError, match="already contains a run with another text: repeat its command to resume"):
        Adapter(same(), make_tokenizer(), [TEXT[1:]], tmp_path / "run", Settings(**QUICK)).run()
    with pytest.raises(ValueError, match="already contains a run with another model"):
        adapter(hf.convert(make_model(), SPEC), tmp_path / "run").run()
    with pytest.raises(ValueError, match="already contains a model, and no run to resume: choose another folder"):
        adapter(same(), tmp_path / "start").run()


def test_what_cannot_be_adapted(tmp_path):
    with pytest.raises(ValueError, match="the model is not converted"):
        adapter(make_model(), tmp_path)
    bare = hf.convert(make_model(), "combiner-window:span=4,window=6")
    with pytest.raises(ValueError, match="nothing to train"):
        adapter(bare, tmp_path, rank=0)


# ---- the commands -------------------------------------------------------------------------------------------


def command(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


@pytest.fixture
def folders(tmp_path):
    make_model().save_pretrained(tmp_path / "plain")
    make_tokenizer().save_pretrained(tmp_path / "plain")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_from_a_folder_to_a_heat_map(folders):
    code, output = command("convert", folders / "plain", "--attention", SPEC, "-o", folders / "new")
    assert code == 0 and "2 of 2 layers converted" in output
    code, output = command("perplexity", folders / "new", "--text", folders / "text.txt", "--n", "20,60", "--json")
    rows = json.loads(output)
    assert code == 0 and [(row["n"], row["attention"]) for row in rows][-1] == (60, "converted")
    assert rows[0]["mass on summaries"] is None and 0 < rows[3]["mass on summaries"] < 1
    assert rows[3]["loss"] == pytest.approx(4.85, abs=0.3)  # a model that knows nothing: ln 128
    words = ("--length", 40, "--fit-steps", 1, "--tune-steps", 1, "--rank", 2)
    code, output = command("adapt", folders / "new", "--text", folders / "text.txt", "-o", folders / "best", *words)
    assert code == 0 and (folders / "best/model.safetensors").exists()
    code, output = command("passkey", folders / "best", "--n", 200, "--depths", 3, "--json")
    found = json.loads(output)["200"]
    assert code == 0 and [one["depth"] for one in found] == [0, 0.5, 1] and found[0]["distance"] > found[2]["distance"]
    code, output = command("passkey", folders / "best", "--n", 200, "--depths", 2)
    assert code == 0 and "share of numbers found" in output
    code, output = command("perplexity", folders / "best", "--text", folders / "text.txt", "--n", "30")
    assert code == 0 and "converted" in output


def test_heads_that_look_a_number_up(folders):
    """The attention of eager transformers, of the query head of each key/value head that looks most."""
    model, tokenizer = make_model(), make_tokenizer()
    looks = looking_heads(model, tokenizer, 220)
    key = str(int(torch.randint(10000, 100000, (), generator=torch.Generator().manual_seed(0))))
    ids, answer, _ = hide(tokenizer, key, 220, 0.1)
    model.set_attn_implementation("eager")
    weights = torch.stack(model(input_ids=ids, output_attentions=True).attentions)[:, 0]  # (layers, H, n, n)
    said = [j for j in range(220 - answer) if chr(ids[0, j]) in key]
    want = weights[:, :, -answer - 1 : -1][..., said].sum(-1).mean(-1)  # (layers, H)
    torch.testing.assert_close(looks, torch.stack([want[:, :2].amax(1), want[:, 2:].amax(1)], 1))
    code, output = command("passkey", folders / "plain", "--n", 220, "--heads", "--json")
    rows = json.loads(output)
    assert code == 0 and len(rows) == 4 and rows[0]["attention"] >= rows[1]["attention"]
    code, output = command("passkey", folders / "plain", "--n", 220, "--heads")
    assert code == 0 and "attention to the number" in output
    words = ("--attention", SPEC, "--full-heads", "1:0", "-o", folders / "new")
    assert command("convert", folders / "plain", *words)[0] == 0
    code, output = command("passkey", folders / "new", "--n", 220, "--heads")
    assert code == 2 and "the model is converted" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("convert", "plain", "--attention", "nothing", "-o", "x"), "nothing"),
        (("convert", "plain", "--attention", SPEC, "-o", "plain"), "already contains files"),
        (("convert", "none", "--attention", SPEC, "-o", "x"), "neither a folder"),
        (("convert", "none.gguf", "--attention", SPEC, "-o", "x"), "no such file"),
        (("perplexity", "plain", "--text", "text.txt"), "is not converted"),
        (("perplexity", "plain", "--text", "text.txt", "--n", "a"), "comma-separated integers"),
        (("convert", "plain", "--attention", SPEC, "--full-heads", "1", "-o", "x"), "must be LAYER:HEAD"),
        (("convert", "plain", "--attention", SPEC, "--full-heads", "1:7", "-o", "x"), "from 0 to 1"),
        (("adapt", "plain", "--text", "text.txt", "-o", "x"), "the model is not converted"),
        (("passkey", "plain", "--attention", SPEC, "--n", "10"), "--n must be at least"),
    ],
)
def test_wrong_words(folders, monkeypatch, words, message):
    monkeypatch.chdir(folders)
    code, output = command(*words)
    assert code == 2 and message in output


def test_a_prefill_without_a_measurable_peak_has_no_ratio():
    from subquad.studies.conversion_tables import speeds

    small = {"prefill": 1.0, "decode": 1.0, "memory": 0, "cache": 2**20}
    assert "| 16 | 1.00 × | 1.00 × | – | 1.00 |" in speeds(
        {"speeds": [{"attention": "a", "n": 16, "original": small, "converted": small}]}
    )


def test_the_study_of_a_conversion(folders, monkeypatch):
    """Every number is measured once; texts and lengths are added; the page shows what is closed."""
    from subquad.studies import conversion as study

    monkeypatch.chdir(folders)
    monkeypatch.setattr(study, "BEYOND", 12)
    Path("book.txt").write_text(TEXT)
    Path("other.txt").write_text(TEXT[::-1])
    words = ("study", "conversion", "plain", "--out", "page", "--n", 40, "--start", 0, "--speed", "16,24")
    words = (*words, "--attention", SPEC, "--tries", 1, "--hidden", 0)
    code, output = command(*words, "--text", "book.txt")
    assert code == 0 and "window and sinks alone" in output, output
    before = json.loads(Path("page/conversion.json").read_text())
    assert [row["n"] for row in before["speeds"]] == [16, 24] and len(before["losses"]) == 3
    assert command("convert", "plain", "--attention", SPEC, "-o", "converted")[0] == 0
    code, output = command("convert", "converted", "--attention", SPEC, "-o", "again")
    assert code == 0 and "2,192 new parameters" in output  # not those of the conversion that it replaces
    code, output = command(*words, "--text", "book.txt,other.txt", "--adapted", "converted")
    after = json.loads(Path("page/conversion.json").read_text())
    assert code == 0 and after["losses"][:3] == before["losses"] and after["speeds"][:2] == before["speeds"]
    assert {row["attention"] for row in after["speeds"]} == {SPEC, "adapted: converted"}
    assert len(after["losses"]) == 8 and "adapted: converted" in Path("page/conversion.md").read_text()
    assert "not reliable: other programs used 60 % of the machine" in study.page({**after, "speeds": [
        {**row, "busy": 0.6} for row in after["speeds"]]})  # fmt: skip
    assert "not reliable" not in study.page({**after, "speeds": [{**row, "busy": 0.1} for row in after["speeds"]]})
    found = {row["attention"]: row for row in after["losses"] if row["text"] == "book"}
    assert found["full"]["mass"] is None and found[SPEC]["mass"] > 0
    code, output = command("study", "conversion", "converted", "--out", "page", "--text", "book.txt", "--n", 40)
    assert code == 2 and "is about plain, not converted" in output


def test_the_share_of_the_gap_that_is_closed():
    from subquad.studies import conversion_tables as shown

    rows = [("full", 3.0), (shown.ALONE, 3.2), ("a:b=1", 3.05), ("worse", 3.3)]
    rows = [{"attention": name, "text": "book", "beyond": x, "loss": x, "by position": [2.9]} for name, x in rows]
    rows[2]["by position"] = [2.88]  # 0.02 of the 0.15 nats are not the attention's
    found = {(row["attention"], "book"): row for row in rows}
    assert [round(shown.closed(found, name, "book"), 9) for name in ("a:b=1", "worse")] == [0.75, -0.5]
    table = shown.losses({"losses": rows})
    assert "| `a:b=1` | +0.050 | +0.050 | -0.020 | 75% | 65% |" in table
    assert "| full | 3.000 | +0.000 | +0.000 |  |  |" in table and "| +0.300 | +0.300 | +0.000 | -50% | -50% |" in table


def test_measured_beside_the_original(converted):
    ids = torch.randint(3, 128, (1, 60))
    full, own = measure(converted, ids, full=True), measure(converted, ids)
    assert full.mass is None and own.mass == pytest.approx(summary_mass(converted, ids)) and own.mass > 0
    with torch.no_grad():
        loss = converted(input_ids=ids, labels=ids, use_cache=False).loss.item()
    assert own.loss() == pytest.approx(loss, rel=1e-4) and len(own.by_position()) == 8
    assert full.loss() != own.loss() and full.losses[:6] == pytest.approx(own.losses[:6].tolist(), rel=1e-4)


def write_gguf(path):
    """A file of one small Llama layer with random weights and a tokenizer of bytes."""
    gguf = pytest.importorskip("gguf")
    width, inner, vocabulary = 32, 48, 259
    file = gguf.GGUFWriter(str(path), "llama")
    file.add_block_count(1)
    file.add_context_length(128)
    file.add_embedding_length(width)
    file.add_feed_forward_length(inner)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_vocab_size(vocabulary)
    file.add_tokenizer_model("gpt2")
    file.add_token_list(["<s>", "</s>", *sorted(bytes_to_unicode().values()), "ab"])
    file.add_token_types([3, 3] + [1] * 257)
    file.add_token_merges(["a b"])
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)
    shapes = {"attn_q": (width, width), "attn_k": (16, width), "attn_v": (16, width), "attn_output": (width, width)}
    shapes |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()}
    shapes |= {"token_embd": (vocabulary, width), "output": (vocabulary, width)}
    for name, shape in shapes.items():
        file.add_tensor(f"{name}.weight", torch.randn(shape).mul(0.1).numpy())
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        file.add_tensor(f"{name}.weight", torch.ones(width).numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def test_a_file_of_packed_weights(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    code, output = command("convert", tmp_path / "tiny.gguf", "--attention", SPEC, "-o", tmp_path / "new")
    assert code == 0 and "1 of 1 layers converted" in output
    from subquad.hf.loading import load

    ids = torch.randint(2, 258, (1, 20))
    (packed, _), (saved, tokenizer) = load(tmp_path / "tiny.gguf"), load(tmp_path / "new")
    with torch.no_grad(), original(saved):
        want, got = packed(input_ids=ids).logits, saved(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(got, want)
    assert len(tokenizer("ab")["input_ids"]) > 0
