"""The explorer: what its pages hold equals what Python computes, and what a browser shows equals both."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import struct
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import subquad
from subquad.attention.base import Capabilities
from subquad.attention.registry import available, for_length, mechanism, register, unregister
from subquad.cli import app
from subquad.explorer import costs, effective, grid, kept, page, patterns, trained
from subquad.explorer.page import Blob, pack_bits, pack_cells, progressions
from subquad.plots import panels, tally
from subquad.supports.pattern import csr_of_mask
from subquad.tasks import task
from subquad.theory.hops import hop_sets, unpack
from subquad.theory.sets import Family
from subquad.training.run import Run, train

EVIL = "</script><img src=x onerror=\"document.title='broken in'\">"
DRAWN = ("strided", "combiner-fixed", "sbm", "hca")  # sets that alternate, summaries, sampled, causal only
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def read_blob(text: str) -> list[bytes]:
    """The chunks of a blob, as the page reads them."""
    whole = zlib.decompress(base64.b64decode(text))
    (count,) = struct.unpack_from("<I", whole)
    lengths = struct.unpack_from(f"<{count}I", whole, 4)
    chunks, at = [], 4 + 4 * count
    for length in lengths:
        chunks.append(whole[at : at + length])
        at += length
    return chunks


@pytest.fixture(scope="module", autouse=True)
def few():
    """Few combinations of options and short pictures: what is true of them is true of more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "MOST", 6)
        patch.setattr(patterns, "LENGTHS", (16, 64))
        yield


# ---- encoding ----


def members_of(runs):
    starts = zip(*(iter(runs),) * 3, strict=True)
    return [start + c * step for start, count, step in starts for c in range(count)]


@pytest.mark.parametrize("members", [[], [3], [0, 1, 2], range(2, 20, 3), [5, 9], [0, 1, 2, 5, 9, 13, 14], range(0)])
def test_progressions_keep_a_set(members):
    assert members_of(progressions(members)) == sorted(members)


def test_a_blob_gives_back_its_chunks_and_stores_equal_ones_once():
    blob = Blob()
    numbers = [blob.add(b"abc"), blob.add(b""), blob.add(b"abc"), blob.add_json({"a": "ü"})]
    assert numbers == [0, 1, 0, 2]
    assert read_blob(blob.text()) == [b"abc", b"", '{"a":"ü"}'.encode()]


def test_cells_and_bits_are_packed_from_the_lowest():
    assert pack_cells(np.array([[1, 2], [0, 3], [2, 0]])) == bytes([1 + 2 * 4 + 3 * 64, 2])
    assert pack_bits(np.array([True, False, False, True] * 3)) == bytes([0b10011001, 0b1001])


# ---- what mechanisms say of themselves ----


@pytest.mark.parametrize("name", available())
def test_summaries_are_what_the_picture_draws(name):
    """Every pair that is drawn as summarised is in a summary of its query, no summary looks ahead or beyond."""
    cls, n = mechanism(name), 27
    for causal in grid.directions(cls):
        a = grid.build(name, n, cls.gallery, causal=causal)
        drawn = a.picture(n)
        drawn = drawn.amax(0) if drawn.dim() == 3 else drawn
        sets, rows = a.summaries(n)
        seen = torch.zeros(n, n, dtype=torch.bool)
        assert len(rows) == n
        for i, row in enumerate(rows):
            for number in row:
                seen[i, list(sets[number])] = True
        assert not ((drawn == 2) & ~seen).any()
        assert not (seen & (drawn == 0)).any()


def test_clusters_of_tokens():
    q, k = torch.randn(2, 1, 4, 9, 16)
    sbm = subquad.attention("sbm:clusters=3", num_heads=4, head_dim=16)
    assert torch.equal(sbm.token_clusters(q, k), sbm.memberships(q, k)[1].argmax(-1))
    routing = subquad.attention("routing:clusters=3", num_heads=4, head_dim=16)
    assert routing.token_clusters(q, k).shape == (1, 4, 9)
    assert subquad.attention("full", num_heads=4, head_dim=16).token_clusters(q, k) is None


# ---- the grid, and costs ----


def test_controls_are_options_that_change_something():
    found = {control.name: control for control in grid.controls("combiner-fixed")}
    assert set(found) == {"span"}  # the abstraction changes weights, not sets
    assert found["span"].values[found["span"].start] == 8
    assert {"heads", "w"} == {control.name for control in grid.controls("strided")}
    for name in DRAWN:
        offered = grid.controls(name)
        assert math.prod(len(control.values) for control in offered) <= grid.MOST
        assert all(len(set(map(str, control.values))) == len(control.values) for control in offered)


def test_a_mechanism_of_your_own_has_a_page():
    """Nothing lists mechanisms by name: what is registered is drawn, with its options."""

    @register("explorers-own")
    class Own(mechanism("local")):
        gallery = {"window": 5}
        capabilities = Capabilities(bidirectional=False)

    try:
        about = patterns.describe_mechanism("explorers-own")
    finally:
        unregister("explorers-own")
    assert about["directions"] == ["causal"]
    assert "window" in [control["name"] for control in about["controls"]]
    assert issubclass(Own, subquad.Attention)


def test_a_combination_that_cannot_be_says_why():
    form = patterns._form(mechanism("combiner-axial"), {"plan": "rowmajor", "split": True}, False, Blob())
    assert set(form) == {"error"} and "split" in form["error"]


@pytest.mark.parametrize("spec", ["longformer:window=8", "logsparse", "strided", "combiner-fixed:span=8"])
def test_costs_beyond_what_is_counted(spec):
    """The curve meets the true count far behind the last length that was counted."""
    found = costs.cost(lambda n: for_length(spec, n, causal=True, num_heads=2, head_dim=4))
    exact = for_length(spec, 2048, causal=True, num_heads=2, head_dim=4).connections
    for n in (64, 512):
        assert found.connections[costs.LENGTHS.index(n)] == pytest.approx(exact(n), abs=0.1)
    assert found.connections[costs.LENGTHS.index(2048)] == pytest.approx(exact(2048), rel=0.03)
    assert found.connections[-1] > found.connections[-2] > 0
    assert found.kept is not None and len(found.kept) == len(costs.LENGTHS)


# ---- effective weights ----


def a_call(spec, n=21, **options):
    torch.manual_seed(0)
    a = for_length(spec, n, num_heads=2, head_dim=4, **options).eval()
    q, k = torch.randn(2, 1, 2, n, 4)
    return effective.Watched(0, a, q, k, torch.tensor(7))


@pytest.mark.parametrize("spec", ["full", "combiner-fixed:span=4", "sbm:clusters=3", "linear", "bigbird:block=2"])
def test_the_fast_path_tells_the_weights_of_the_definition(spec):
    call = a_call(spec, causal=True)
    exact = call.attention.weights(call.q, call.k, seed=call.seed)[0].numpy()
    np.testing.assert_allclose(effective.probed_weights(call), exact, atol=1e-3)  # kept in half precision
    np.testing.assert_array_equal(effective.effective_weights(call), exact)


@pytest.mark.parametrize("spec", ["combiner-fixed:span=4", "combiner-tree:span=2", "h-transformer-1d:block=2", "local"])
def test_what_is_kept_adds_up_to_the_weights(spec):
    """Tokens, and summaries opened into their tokens, give back every weight where nothing is dropped."""
    call = a_call(spec, causal=True)
    n, weights = 21, effective.effective_weights(call)
    groups = kept.Groups.of(call.attention, n)
    for head, matrix in zip(kept.keep(weights.copy(), groups), weights, strict=True):
        back, sizes = np.zeros((n, n)), [len(members) for members in groups.sets]
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        for i in range(n):
            for to, w in zip(head.index[i], head.weight[i], strict=True):
                if to < n:
                    back[i, to] += w
                elif head.shares is not None:
                    share = head.shares[int(offsets[to - n]) : int(offsets[to - n + 1])]
                    back[i, list(groups.sets[to - n])] += w * share
        if spec.startswith("h-"):  # a query shares a group's score, not its split: only the masses agree
            np.testing.assert_allclose(back.sum(1), matrix.sum(1), atol=1e-5)
        else:
            np.testing.assert_allclose(back, matrix, atol=1e-5)
        positive = np.where(matrix > 0, matrix, 1)
        np.testing.assert_allclose(head.entropy, -(matrix * np.log2(positive)).sum(1), atol=1e-4)
        away = np.abs(np.arange(n)[:, None] - np.arange(n))
        np.testing.assert_allclose(head.distance, (matrix * away).sum(1), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(head.received, matrix.sum(0), rtol=1e-4)
        np.testing.assert_array_equal(head.degree, (matrix > 0).sum(1))


def test_overlapping_summaries_are_left_to_the_tokens():
    call = a_call("combiner-mixture", causal=True)
    assert kept.Groups.of(call.attention, 21).sets == []


def test_an_encoded_head_keeps_its_largest_weights():
    call = a_call("full", causal=True)
    head = kept.keep(effective.effective_weights(call).copy(), kept.Groups.of(call.attention, 21))[0]
    counts, steps, low, high, *_ = read_blob(kept.encode(head, 3))
    steps = np.frombuffer(steps, "<u2").astype(int)
    weight = ((np.frombuffer(low, np.uint8) + 256.0 * np.frombuffer(high, np.uint8)) / 65535) ** 2
    at = 0
    for i, count in enumerate(counts):
        assert count == min(3, i + 1)
        found = dict(zip(steps[at : at + count].cumsum().tolist(), weight[at : at + count].tolist(), strict=True))
        expected = dict(zip(head.index[i, :count].tolist(), head.weight[i, :count].tolist(), strict=True))
        assert found == pytest.approx(expected, abs=3e-5)
        at += count


def test_a_long_graph_becomes_squares(monkeypatch):
    monkeypatch.setattr(trained, "EXACT", 8)
    monkeypatch.setattr(trained, "COARSE", 4)
    weights = np.zeros((10, 10))
    weights[0, :2] = 1
    squares = trained.graph_of(weights).reshape(4, 4)
    assert squares[0, 0] == round(255 * 2 / 4) and squares.sum() == squares[0, 0]


def test_a_page_that_is_too_large_keeps_fewer_weights(monkeypatch):
    layer = trained.read_layer(a_call("full", n=64, causal=True))
    about = {"run": "r", "task": "t", "text": "x", "tokens": ["a"] * 64}
    whole = trained.page_of([layer], about, [])
    monkeypatch.setattr(trained, "LARGEST", len(whole) - 2000)
    smaller = trained.page_of([layer], about, [])
    depth = [int(re.search(r'"kept":(\d+),"without"', text)[1]) for text in (whole, smaller)]
    assert len(smaller) <= len(whole) - 2000 and depth[0] == kept.DEEPEST > depth[1]
    monkeypatch.setattr(trained, "LARGEST", 1000)
    with pytest.raises(ValueError, match="--layers"):
        trained.page_of([layer], about, [])


# ---- the page, and the command ----


def test_a_page_is_one_file_that_loads_nothing():
    text = page.render("patterns", EVIL, {"mechanisms": [EVIL]})
    assert EVIL not in text and "{{" not in text
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!x )|https?://|@import|\bfetch\(""", text)
    assert "default-src 'none'" in text


def run_command(*words):
    result = CliRunner().invoke(app, ["explore", *map(str, words)])
    return result.exit_code, " ".join((result.stderr or result.output).split())


def test_wrong_requests_are_answered_in_one_line(tmp_path, a_run):
    text = tmp_path / "text.txt"
    text.write_text("hello")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "long.txt").write_text("x" * 65)
    wrong = {
        (tmp_path / "nowhere", "--text", text): "nowhere does not exist",
        (a_run, "--text", tmp_path / "long.txt"): "has 65 tokens, and the model reads at most 64",
        (a_run, "--text", tmp_path / "latin.txt"): "is not UTF-8",
        (a_run, "--text", tmp_path / "empty.txt"): "is empty",
        (a_run, "--text", tmp_path / "missing.txt"): "No such file",
        (a_run, "--text", text, "-o", tmp_path): "is a folder",
        (a_run, "--text", text, "-o", tmp_path / "no" / "page.html"): "does not exist",
        (a_run, "--text", text, "--layers", "7"): "7 is not one of this run's layers",
        (a_run, "--text", text, "--layers", "a"): "comma-separated numbers",
        (a_run,): "belong together",
        ("--text", text): "belong together",
        ("--layers", "0"): "trained model",
        ("--attention", "combinr-fixed"): "combiner-fixed",
        ("--attention", "strided:w=4"): "without options",
        (a_run, "--text", text, "--attention", "full"): "has its own attention",
    }
    for words, answer in wrong.items():
        code, said = run_command(*words)
        assert code == 2 and answer in said, (words, said)
        assert said.startswith("error: ")


def test_an_attention_without_weights_is_refused():
    def model(*names):
        layers = [SimpleNamespace(name=name, capabilities=mechanism(name).capabilities) for name in names]
        return SimpleNamespace(attention_layers=lambda: layers)

    with pytest.raises(ValueError, match="composite-slice, has no weights over tokens"):
        trained.refuse_unsuited(model("composite-slice"), SimpleNamespace(head="causal-lm"), None)
    with pytest.raises(ValueError, match="one stack"):
        trained.refuse_unsuited(model("full"), SimpleNamespace(head="seq2seq", name="translation"), None)
    trained.refuse_unsuited(model("composite-slice", "full"), SimpleNamespace(head="causal-lm"), [1])


def test_labels_of_tokens():
    class Mute:
        def decode(self, ids):
            raise ValueError("no text")

    assert trained.labels(Mute(), [1, 2], "ab") == ["a", "b"]
    assert trained.labels(Mute(), [9, 1, 2], "ab") == ["[CLS]", "a", "b"]
    assert trained.labels(Mute(), [5, 6], "[MAX 3") == ["[MAX", "3"]
    assert trained.labels(Mute(), [5, 6, 7, 8], "x y") == ["[CLS]", "x", " ", "y"]
    assert trained.labels(Mute(), [5] * 9, "x y") == ["#5"] * 9


# ---- in a browser ----


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as tool:
        opened = tool.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """A tiny language model on bytes: one layer with summaries, one with sampled graphs."""
    folder = tmp_path_factory.mktemp("explorer")
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 30)
    settings = (
        "source=file", f"path={folder / 'text.txt'}", "length=64", "stride=64", "width=16", "heads=2", "layers=2",
        "feedforward=16", "batch=2", "steps=1", "evaluate=1", "eval_size=1", "warmup=0",
    )  # fmt: skip
    made = task("lm-bytes", "small", settings)
    train(Run(made, ["combiner-fixed:span=8", "sbm:clusters=4"], folder / "run", command=["subquad", "train"]))
    return folder / "run"


def visit(browser, path: Path, width=1000):
    """The page when it has drawn; every error and every request beyond the file is a fault."""
    opened = browser.new_page(viewport={"width": width, "height": 900})
    faults = []
    opened.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("request", lambda request: faults.append(request.url) if not request.url.startswith("file:") else None)
    opened.goto(path.as_uri())
    opened.wait_for_selector("html[data-ready=yes]")
    return opened, faults


def until(opened, expression, seconds=20):
    """Waits for it. Playwright's own wait_for_function needs eval in the page, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not opened.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression[:200]}"
        time.sleep(0.02)


def settle(opened):
    """Two frames: what was asked for has been drawn."""
    opened.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def figures(opened, side):
    items = opened.query_selector_all(f"#side{side} [data-figure]")
    return {item.get_attribute("data-figure"): item.inner_text() for item in items}


def number(text):
    return int(text.replace(",", ""))


@pytest.fixture(scope="module")
def patterns_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    code, said = run_command("--attention", ",".join(DRAWN), "-o", path)
    assert code == 0, said
    return path


def choose(opened, side, label, value):
    opened.select_option(f'#side{side} select[aria-label="{label}"]', label=value)
    opened.wait_for_timeout(20)
    settle(opened)


def slide(opened, name, value):
    opened.eval_on_selector(
        f"#{name}", "(x, v) => { x.value = v; x.dispatchEvent(new Event('input', {bubbles: true})); }", str(value)
    )
    opened.wait_for_timeout(20)
    settle(opened)


def of_page(name, options, causal, n):
    cls = mechanism(name)
    return patterns._built(name, n, patterns._given(cls, options), causal)


def test_the_page_shows_what_python_counts(browser, patterns_page):
    """Every option of every mechanism moves the picture, and its figures are those of the sets in Python."""
    opened, faults = visit(browser, patterns_page)
    for name in DRAWN:
        choose(opened, 0, "Mechanism", name)
        offered = grid.controls(name)
        started = {control.name: control.values[control.start] for control in offered}
        for control in offered:
            for value in control.values:
                choose(opened, 0, control.name, "auto" if value is None else patterns._text(value))
                options = {**started, control.name: value}
                for side, causal in enumerate((False, True)):
                    if causal not in grid.directions(mechanism(name)):
                        assert "causal only" in opened.inner_text(f"#side{side} .missing")
                        continue
                    shown = figures(opened, side)
                    direct, summary = tally(panels(of_page(name, options, causal, 64).picture(64))[0][1])
                    pairs = 64 * 65 // 2 if causal else 64 * 64
                    counted = [number(shown[key]) for key in ("direct", "summary", "none")]
                    assert counted == [direct, summary, pairs - direct - summary], (name, options)
            choose(opened, 0, control.name, patterns._text(started[control.name]).replace("None", "auto"))
    assert faults == []
    opened.close()


def test_layers_grow_as_the_theory_says(browser, patterns_page):
    opened, faults = visit(browser, patterns_page)
    choose(opened, 0, "Mechanism", "strided")
    choose(opened, 0, "heads", "sequential")
    options = {"heads": "sequential", "w": None}
    for side, causal in enumerate((False, True)):
        a = of_page("strided", options, causal, 64)
        cycle = tuple(Family(*csr_of_mask(m)) for m in (a.pattern.mask(64, f) for f in range(2)))
        sets = hop_sets(patterns.families(a, 64, None))
        assert len(cycle) == len(patterns.families(a, 64, None))
        for layer in (1, 2, 3):
            reached = int(unpack(next(sets), 64).sum())
            if layer > 1:
                slide(opened, "layer", layer)
                assert number(figures(opened, side)["reached"]) == reached
    opened.focus("#side0 .matrix")
    opened.keyboard.press("ArrowLeft")
    settle(opened)
    assert opened.inner_text("#layer-out") == "2"
    assert faults == []
    opened.close()


def test_a_query_is_chosen_by_pointer_and_by_keys(browser, patterns_page):
    opened, faults = visit(browser, patterns_page)
    a = of_page("combiner-fixed", {"span": 8}, False, 64)
    opened.hover("#side0 .matrix", position={"x": 50, "y": 3})
    settle(opened)
    assert opened.inner_text("#query-out") == "0"
    sets, rows = a.summaries(64)
    said = opened.inner_text("#side0 .say")
    assert said == f"Query 0 sees 8 tokens directly and 56 more through {len(rows[0])} summaries."
    before = opened.evaluate("document.querySelector('#side0 .arcs').toDataURL()")
    opened.focus("#side0 .matrix")
    opened.keyboard.press("End")
    settle(opened)
    assert opened.inner_text("#query-out") == "63" and len(sets) == 8
    assert opened.evaluate("document.querySelector('#side0 .arcs').toDataURL()") != before
    slide(opened, "n", 0)
    assert opened.inner_text("#n-out") == "16" and opened.inner_text("#query-out") == "15"
    assert faults == []
    opened.close()


def test_costs_two_mechanisms_and_the_theme(browser, patterns_page):
    opened, faults = visit(browser, patterns_page, width=390)
    assert opened.evaluate("document.documentElement.scrollWidth") == 390
    opened.check("#mode input[value=mechanisms]", force=True)
    opened.wait_for_timeout(50)
    choose(opened, 1, "Mechanism", "hca")
    slide(opened, "length", costs.LENGTHS.index(2**20))
    opened.select_option("#heads", "4")
    settle(opened)
    cells = opened.eval_on_selector_all("#figures tr", "rows => rows.map((r) => [...r.cells].map((c) => c.innerText))")
    found = costs.cost(lambda n: of_page("hca", {}, True, n))
    assert cells[2][0].strip() == "hca, causal"
    assert number(cells[2][1]) == round(found.connections[-1])
    assert cells[3][:2] == ["full attention, bidirectional", f"{2**40:,}"]
    assert cells[3][2] == "1.13 P" and cells[3][3] == "16 TiB"  # 4·4·64·n² operations, 4·4·n² bytes
    dark = "getComputedStyle(document.body).backgroundColor"
    before = opened.evaluate(dark)
    opened.click("#theme")
    assert opened.evaluate(dark) != before
    opened.click("#play")
    until(opened, "document.querySelector('#layer-out').textContent !== '1'")
    assert faults == []
    opened.close()


def test_a_trained_page_shows_the_weights_of_the_run(browser, a_run, tmp_path):
    """Weights, statistics and opened summaries equal Python's; tokens that look like HTML stay text."""
    (tmp_path / "text.txt").write_text(EVIL)
    path = tmp_path / "page.html"
    code, said = run_command(a_run, "--text", tmp_path / "text.txt", "-o", path)
    assert code == 0 and path.stat().st_size < 8e6, said
    from subquad.training import use

    model, made = use.load(a_run)
    layers = trained.read_layers(model, made.encode(EVIL), None, lambda what: None)
    opened, faults = visit(browser, path)
    assert opened.title() == "What run attends to" and opened.query_selector("img") is None
    slide(opened, "token", 40)
    check_weights(opened, layers[0], 0, 40)
    opened.click("#weights details summary")
    opened.wait_for_selector("#weights .inside span[data-member]")
    check_summary(opened, layers[0])
    opened.keyboard.press("]")
    until(opened, "document.querySelector('#head').value === '1'")
    check_weights(opened, layers[0], 1, 40)
    assert opened.evaluate(TWO_AT_ONCE), "the head that was chosen last is shown, whichever is decoded last"
    opened.focus("#text")
    opened.keyboard.press("ArrowRight")
    settle(opened)
    check_weights(opened, layers[0], 1, 41)
    assert opened.is_hidden("#graph")
    varied = next(h for h, (clusters, _) in enumerate(layers[1].more) if len(set(clusters.tolist())) > 1)
    opened.click(f'[data-head="1,{varied}"]')
    opened.wait_for_selector("#graph", state="visible")
    check_weights(opened, layers[1], varied, 41)
    check_map(opened)
    assert faults == []
    opened.close()


TWO_AT_ONCE = """async () => {
  const real = openBlob;
  let first = true;
  opened.clear();
  openBlob = async (text) => {
    if (first) { first = false; await new Promise((done) => setTimeout(done, 100)); }
    return real(text);
  };
  await Promise.all([chooseHead(0, 0), chooseHead(0, 1)]);
  openBlob = real;
  return now === opened.get("0,1");
}"""


def check_weights(opened, layer, number_of_head, token):
    head, n = layer.heads[number_of_head], len(EVIL)
    rows = opened.eval_on_selector_all(
        "#weights li", "items => items.map((x) => [x.dataset.to ?? `s${x.dataset.summary}`, x.lastChild.innerText])"
    )
    expected = [(i, w) for i, w in zip(head.index[token], head.weight[token], strict=True) if w > 1e-9]
    names = {f"{i}" if i < n else f"s{i - n}": w for i, w in expected}
    assert {name: float(text) for name, text in rows} == pytest.approx(names, rel=0.05, abs=1e-4)
    said = opened.inner_text("#say")
    entropy, distance, keys = re.search(
        r"entropy ([\d.]+) bits, mean distance ([\d.]+) tokens, (\d+) key", said
    ).groups()
    assert float(entropy) == pytest.approx(head.entropy[token], abs=0.006)
    assert float(distance) == pytest.approx(head.distance[token], abs=0.2)
    assert int(keys) == head.degree[token]
    shown = opened.inner_text(f'[data-head$=",{number_of_head}"][aria-pressed=true]')
    assert float(shown) == pytest.approx(head.entropy.mean(), abs=0.006)


def check_summary(opened, layer):
    at = int(opened.get_attribute("#weights li.summary", "data-summary"))
    shares = opened.eval_on_selector_all(
        "#weights li.summary:first-of-type .inside span[data-member], #weights details[open] span[data-member]",
        "items => items.map((x) => [x.dataset.member, x.lastChild.textContent])",
    )
    offset = sum(len(members) for members in layer.groups.sets[:at])
    exact = dict(zip(layer.groups.sets[at], layer.heads[0].shares[offset:], strict=False))
    found = {int(member): float(text.replace("%", "")) / 100 for member, text in shares}
    assert found == pytest.approx(exact, abs=0.005)


def check_map(opened):
    """Zoom, the sampled graph and the order by cluster each change the map, and the whole text comes back."""
    image = "document.querySelector('#map').toDataURL()"
    first = opened.evaluate(image)
    assert opened.inner_text("#where").startswith(f"Queries 0 – {len(EVIL) - 1}")
    for button in ("#graph", "#sort", "#in"):
        before = opened.evaluate(image)
        opened.click(button)
        until(opened, f"{image} !== {json.dumps(before)}")
    assert "ordered by cluster" in opened.inner_text("#where")
    assert opened.inner_text("#map-title").startswith("Sampled graph, density")
    opened.focus("#map")
    opened.keyboard.press("0")
    for button in ("#graph", "#sort"):
        opened.click(button)
    settle(opened)
    assert opened.evaluate(image) == first
    text = "document.querySelector('#text canvas').toDataURL()"
    for shade in ("cluster", "received", "weight"):
        before = opened.evaluate(text)
        opened.check(f"#shade input[value={shade}]", force=True)
        settle(opened)
        assert opened.evaluate(text) != before
