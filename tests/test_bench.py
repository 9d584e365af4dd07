"""Measurement: what rows hold, what is refused, what survives a kill. Never how fast anything is."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import subquad
from subquad import bench
from subquad.attention.base import Attention, Capabilities, Record
from subquad.bench import Setting, for_length, make_inputs, make_step, measure, peak_memory, report, steps, write
from subquad.core import memory

SMALL = Setting(heads=2, head_dim=8)


@pytest.fixture
def layer_level():
    """A mechanism that works on tokens, registered for one test."""

    @subquad.register("on-tokens")
    class OnTokens(Attention):
        """The mean of all values."""

        capabilities = Capabilities(causal=False, level="layer", needs_max_length=True)

        def attend_tokens(self, query, key, value, project, key_mask, seed=None):
            mixed = project.values(value).mean(2, keepdim=True).expand(-1, -1, value.shape[1], -1)
            return mixed.transpose(1, 2).flatten(2), Record()

    yield "on-tokens"
    subquad.unregister("on-tokens")


def last(rows):
    return list(rows)[-1]


def test_rows_hold_times_flops_and_ratios_against_full_attention():
    rows = last(measure(["longformer:window=4", "fixed"], [8, 16], SMALL, repeats=2, memory=False))
    assert [(row.n, row.spec) for row in rows] == [
        (n, spec) for n in (8, 16) for spec in ("full", "longformer:window=4", "fixed")
    ]
    for row in rows:
        assert row.seconds > 0 and row.repeats == 2 and row.level == "head" and row.memory is None
        assert row.ratio == pytest.approx(row.seconds / row.full_seconds)
    full = [row for row in rows if row.spec == "full"]
    assert [row.ratio for row in full] == [1, 1]
    assert [row.flops for row in full] == [4 * 2 * 8 * n * n for n in (8, 16)]
    assert all(row.full_flops == full[i // 3].flops for i, row in enumerate(rows))


def test_a_busy_machine_is_told(monkeypatch):
    rows = last(measure(["fixed"], [8], SMALL, repeats=3, memory=False))
    assert rows[1].ratio_quartiles[0] <= rows[1].ratio_quartiles[1] <= rows[1].ratio_quartiles[2]
    assert rows[0].ratio_quartiles == [1, 1, 1]
    calm = [replace(row, other_load=0.01, ratio_quartiles=[1, 1, 1]) for row in rows]
    assert bench.busy(calm) is None and bench.busy([replace(row, other_load=None) for row in calm]) is None
    assert "other programs used 50 % of the machine" in bench.busy([calm[0], replace(calm[1], other_load=0.5)])
    wild = [calm[0], replace(calm[1], ratio_quartiles=[1, 1, 2])]
    assert bench.busy(wild) == "the quartiles of fixed at n = 8's relative cost are a factor of 2.0 apart"


def test_backward_runs_and_counts_more():
    forward, both = (
        last(measure(["longformer:window=4"], [16], Setting(heads=2, head_dim=8, backward=b), repeats=1, memory=False))
        for b in (False, True)
    )
    assert both[1].flops > 2 * forward[1].flops
    assert both[1].input_bytes == 4 * 4 * 2 * 8 * 16 and forward[1].input_bytes == 3 * 4 * 2 * 8 * 16


def test_a_step_computes_what_the_mechanism_computes_and_leaves_fresh_gradients():
    setting = Setting(heads=2, head_dim=8, backward=True, causal=True)
    data = make_inputs("head", 16, setting)
    step = make_step("fixed:w=4", "head", 16, setting, data)
    step()
    once = data[0][0].grad.clone()
    step()
    assert torch.equal(data[0][0].grad, once)  # not summed over calls
    q, k, v = (x.detach().clone().requires_grad_() for x in data[0])
    subquad.attention("fixed:w=4", num_heads=2, head_dim=8, causal=True)(q, k, v).backward(data[1])
    assert torch.allclose(q.grad, once, atol=1e-6)


def test_layers_are_held_against_a_layer_of_full_attention(layer_level):
    rows = last(measure([layer_level, "fixed"], [8], SMALL, repeats=1, memory=False))
    assert [(row.spec, row.level) for row in rows] == [
        ("full", "layer"),
        ("full", "head"),
        ("on-tokens", "layer"),
        ("fixed", "head"),
    ]
    by_name = {(row.spec, row.level): row for row in rows}
    assert by_name["on-tokens", "layer"].full_seconds == by_name["full", "layer"].seconds
    assert by_name["fixed", "head"].full_seconds == by_name["full", "head"].seconds
    assert by_name["full", "layer"].flops > by_name["full", "head"].flops  # the projections count


def test_every_step_is_told_and_rows_come_after_every_round():
    told = []
    snapshots = list(measure(["fixed"], [4, 8], SMALL, repeats=2, memory=False, tell=told.append))
    assert len(told) == steps(["fixed"], [4, 8], repeats=2, memory=False)
    assert [len(rows) for rows in snapshots] == [2, 2, 4, 4]
    assert [rows[-1].repeats for rows in snapshots] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("specs", "lengths", "message"),
    [
        (["fixd"], [8], "did you mean fixed"),
        (["pattern"], [8], "sets is needed"),
        (["fixed:w=0"], [8], "w must be an integer ≥ 1"),
        (["fixed"], [0], "lengths ≥ 1"),
        ([], [8], "needs specs"),
        (["fixed:max_length=4"], [4, 8], "fixed:max_length=4 cannot run at n = 8.*max_length=4"),
    ],
)
def test_what_cannot_run_is_refused(specs, lengths, message):
    with pytest.raises(ValueError, match=message):
        list(measure(specs, lengths, SMALL, repeats=1, memory=False))


def test_the_roofline_is_a_share_of_a_matrix_product_of_the_same_run():
    rows = last(measure(["fixed"], [16], SMALL, repeats=2, memory=False))
    assert rows[0].gemm == rows[1].gemm > 0
    for row in rows:
        assert row.of_gemm == pytest.approx(row.flops / row.seconds / row.gemm)
        assert row.plain_seconds is None and row.plain_quartiles is None


@pytest.mark.parametrize("level", ["head", "layer"])
def test_causal_full_attention_counts_the_pairs_it_sees(level):
    counts = {}
    for causal in (False, True):
        setting = replace(SMALL, causal=causal)
        step = make_step("full", level, 16, setting, make_inputs(level, 16, setting))
        step.count()
        counts[causal] = step.flops
    assert counts[False] - counts[True] == 4 * 2 * 8 * (16 * 16 - 16 * 17 // 2)


def test_ragged_rows_are_measured_beside_whole_ones():
    setting = replace(SMALL, batch=3, ragged=True, causal=True)
    assert setting.key_mask(9).sum(1).tolist() == [5, 7, 9] and setting.plain == replace(setting, ragged=False)
    for row in last(measure(["combiner-fixed", "fnet"], [9], replace(setting, causal=False), repeats=2, memory=False)):
        assert row.plain_seconds > 0 and len(row.plain_quartiles) == 3
    data = make_inputs("head", 9, setting)
    full, ours = (make_step(spec, "head", 9, setting, data) for spec in ("full", "full:dropout=0"))
    seen = setting.key_mask(9)[:, None, :, None]
    assert torch.allclose(full.forward() * seen, ours.forward() * seen, atol=1e-6)
    assert {"ragged": True}.items() <= setting.asdict().items() and "ragged" not in SMALL.asdict()


def test_dropout_is_measured_beside_none():
    setting = replace(SMALL, backward=True, dropout=0.5)
    data = make_inputs("head", 32, setting)
    full, ours = (make_step(spec, "head", 32, setting, data) for spec in ("full", "combiner-fixed"))
    for step in (full, ours):
        assert not torch.equal(step.forward(), step.forward()), "two calls drop alike"
    rows = last(measure(["combiner-fixed"], [32], setting, repeats=1, memory=False))
    assert all(row.plain_seconds > 0 for row in rows)
    plain = make_step("combiner-fixed", "head", 32, setting.plain, data)
    assert torch.equal(plain.forward(), plain.forward())


@pytest.mark.parametrize("causal", [False, True])
def test_a_whole_model_takes_a_training_step(causal):
    from subquad.bench_model import LAYERS

    setting = Setting(heads=2, head_dim=4, backward=True, causal=causal, level="model")
    step = make_step("combiner-fixed", "model", 16, setting, make_inputs("model", 16, setting))
    before = {name: x.clone() for name, x in step.module.named_parameters()}
    step.optimizer.param_groups[0]["lr"] = 1e-2
    step()
    moved = [name for name, x in step.module.named_parameters() if not torch.equal(x, before[name])]
    assert step.module.config.num_hidden_layers == LAYERS and len(moved) == len(before)
    rows = last(measure(["fixed"], [16], setting, repeats=1, memory=False))
    assert [(row.spec, row.level) for row in rows] == [("full", "model"), ("fixed", "model")]


def test_impossible_directions_are_refused_before_anything_runs(layer_level):
    told = []
    causal = Setting(heads=2, head_dim=8, causal=True)
    with pytest.raises(ValueError, match="causal=True is not supported"):
        list(measure(["fixed", layer_level], [8], causal, tell=told.append))
    assert not told


def test_settings_are_checked():
    with pytest.raises(ValueError, match="heads must be an integer ≥ 1, not 0"):
        Setting(heads=0)
    with pytest.raises(ValueError, match="dropout acts in training only"):
        Setting(dropout=0.1)
    with pytest.raises(ValueError, match="ragged needs a batch of at least 2 rows, not 1"):
        Setting(ragged=True)


def test_for_length_fills_in_what_the_spec_leaves_open(layer_level):
    assert for_length(layer_level, 12).options.max_length == 12
    assert for_length(f"{layer_level}:max_length=20", 12).options.max_length == 20
    assert for_length("fixed", 12).options.causal is False
    assert for_length("fixed:causal=true", 12).options.causal is True
    assert for_length("fixed", 12, causal=True).options.causal is True
    with pytest.raises(ValueError, match="causal is True in the spec and False"):
        for_length("fixed:causal=true", 12, causal=False)


def test_memory_is_what_the_step_needs():
    n = 65536
    setting = Setting(heads=1, head_dim=64)
    output = 4 * 64 * n  # bytes
    assert output <= peak_memory("longformer:window=8", "head", n, setting) < 6 * output


@pytest.mark.parametrize("compiled", [0, 1, 2])
def test_memory_is_counted_again_after_kernels_were_compiled(compiled, monkeypatch):
    """Twice at most: where nothing can be cached, every process compiles."""
    answers = [bench.COMPILED] * compiled + [0] * 2
    monkeypatch.setattr(
        bench.subprocess, "run", lambda words, **about: subprocess.CompletedProcess(words, answers.pop(0), "1", "")
    )
    assert peak_memory("full", "head", 8, SMALL) == 1 and len(answers) == (2 if compiled == 2 else 1)


@pytest.mark.slow
def test_a_process_says_that_it_has_compiled_kernels(monkeypatch, tmp_path):
    codes, run = [], subprocess.run

    def noted(*words, **about):
        codes.append((done := run(*words, **about)).returncode)
        return done

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(bench.subprocess, "run", noted)
    peak_memory("longformer:window=8", "head", 256, SMALL)
    assert codes == [bench.COMPILED, 0]


def test_memory_that_cannot_be_measured_is_an_error():
    with pytest.raises(
        ValueError, match=r"memory of fixed:max_length=4 at n = 8 could not be measured: .*max_length=4"
    ):
        peak_memory("fixed:max_length=4", "head", 8, SMALL)


def test_a_peak_is_counted_from_the_reset():
    before = memory.reset_peak()
    block = torch.ones(2**22)  # 16 MiB
    grown = memory.peak() - before
    del block
    assert grown >= 15 * 2**20
    assert memory.reset_peak() < before + grown


def test_reports_are_json_with_the_circumstances(tmp_path):
    rows = last(measure(["fixed"], [8], SMALL, repeats=1, memory=False))
    write(tmp_path / "out.json", report(rows, SMALL))
    kept = json.loads((tmp_path / "out.json").read_text())
    assert set(kept) == {"versions", "machine", "setting", "busy", "rows"}
    assert kept["machine"]["cores"] == os.cpu_count() and "processor" in kept["machine"]
    assert kept["setting"]["heads"] == 2 and kept["machine"]["threads"] == torch.get_num_threads()
    assert [bench.Row(**row) for row in kept["rows"]] == rows
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]  # no draft is left


def test_results_survive_a_kill(tmp_path):
    kept = tmp_path / "out.json"
    command = [sys.executable, "-m", "subquad", "bench", "fixed", "--n", "8,64", "--repeats", "1000000"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.Popen([*command, "--json", str(kept)], env=env, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if kept.exists() or run.poll() is not None:
                break
            time.sleep(0.1)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert [row["spec"] for row in json.loads(kept.read_text())["rows"]] == ["full", "fixed"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--decode --dtype float16", "--decode does not go with --dtype"),
        ("--decode --png x.png", "--decode does not go with --png"),
        ("--processes 1,2 --device cuda", "--processes does not go with --device"),
        ("--processes 1,x", "--processes must be comma-separated integers ≥ 1, such as 1,2,4, not '1,x'"),
        ("--decode --processes 1,2", "choose one"),
        ("--decode --model", "--decode and --model are measurements of their own: choose one"),
        ("--peers --causal", "--peers does not go with --causal"),
        ("--model --backward", "--model does not go with --backward"),
        ("--model --ragged", "--model does not go with --ragged"),
        ("--model --dropout 0.1", "--model does not go with --dropout"),
        ("--count-only", "--count-only needs --processes"),
        ("--chunk 8", "--chunk needs --decode"),
        ("--no-crossover", "--crossover needs --peers"),
        ("--dropout 0.1", "--dropout acts in training only: add --backward"),
        ("--dropout 1 --backward", "dropout must be a probability ≥ 0 and < 1, not 1"),
        ("--ragged --batch 1", "--batch must be at least 2, not 1"),
    ],
)
def test_what_a_measurement_would_ignore_is_refused(words, said):
    from typer.testing import CliRunner

    from subquad.cli import app

    result = CliRunner().invoke(app, ["bench", "full", *words.split()])
    assert result.exit_code == 2 and said in " ".join(result.output.replace("│", " ").split())
