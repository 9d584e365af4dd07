"""The report of a comparison: what it says, what it survives, and how a browser takes it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subquad.core.spoken import command_line
from subquad.models import HEADS, SubquadConfig
from subquad.reports import charts, curves, findings
from subquad.reports.pictures import trained_weights
from subquad.reports.report import columns, costs, write_report
from subquad.tasks import task as make_task

EVIL = "combiner-fixed:span=<script>alert('x')</script>"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SETTINGS = ("length=64", "keys=2", "questions=2", "repeats=1", "values=8", "layers=2", "heads=2", "width=8")
VOID = {"meta", "link", "img", "wbr", "input"}


# ---- sample data -------------------------------------------------------------------------------------------


def write_log(run: Path, *, top: float, seconds: float, density: bool = False) -> str:
    """A run of 40 steps, logged every 4, evaluated every 10."""
    run.mkdir(parents=True)
    records: list[dict] = []
    for step in range(2, 41, 2):
        if step % 4 == 0:
            records.append({"step": step, "loss": 2 - top * step / 40, "step_seconds": seconds, "memory": 1})
            if density:
                records[-1]["density"] = [[0.2, 0.4], [0.1, 0.1]]
        if step % 10 == 0:
            records.append({"step": step, "valid": {"accuracy": top * step / 40, "loss": 1.0}})
    (run / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(run)


def make_row(attention: str, scores: list[float], time: float | None, runs: list[str], **more) -> dict:
    mean = sum(scores) / len(scores) if scores else None
    sd = math.dist(scores, [mean] * len(scores)) / (len(scores) - 1) ** 0.5 if len(scores) > 1 else None
    return {
        "attention": attention, "metric": "accuracy" if scores else None, "larger_is_better": True if scores else None,
        "mean": mean, "sd": sd, "scores": scores, "relative_time": time, "step_seconds": time and 0.2 * time,
        "relative_quartiles": time and [0.9 * time, time, 1.1 * time], "total_seconds": time and 400 * time,
        "step_quartiles": time and [0.1 * time, 0.2 * time, 0.3 * time],
        "memory": time and int(time * 300 * 2**20), "parameters": 12_345 + len(attention) if scores else None,
        "connections": time and 4096 * time, "density": None, "runs": runs, "error": None, "rate": None,
        "rates": {}, **more,
    }  # fmt: skip


def make_comparison(rows: list[dict]) -> dict:
    settings = make_task("needle", settings=SETTINGS).recipe.asdict()
    return {
        "task": "needle", "recipe": "small", "settings": settings, "rows": rows,
        "guessing": {"score": 0.25, "error": 0.001}, "timing": {"reference": "full", "costs": {}, "busy": None},
        "command": "subquad compare needle --attention full,sbm --set 'a=<b>&'", "versions": {"torch": "2.6 & up"},
    }  # fmt: skip


def save_model(run: Path, attention: str) -> None:
    """A small untrained model of the needle task, saved as a trained one is."""
    torch.manual_seed(0)
    task = make_task("needle", settings=SETTINGS)
    HEADS[task.head](SubquadConfig(attention=attention, **task.config())).save_pretrained(run / "model")
    about = {"task": "needle", "attention": [attention], "recipe": "small", "settings": task.recipe.asdict(), "seed": 0}
    (run / "model" / "task.json").write_text(json.dumps(about))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> dict:
    """Three attentions of two seeds with logs and models, one that failed, one that has just begun."""
    out = tmp_path_factory.mktemp("runs")
    rows = []
    for name, scores, time in (
        ("full", [0.91, 0.93], 1.0),
        ("combiner-fixed", [0.905, 0.915], 0.25),
        ("sbm", [0.61, 0.67], 0.125),
        ("composite-slice", [0.5, 0.52], 0.75),
    ):
        sbm = name == "sbm"
        runs = [
            write_log(out / name / f"seed{seed}", top=score, seconds=0.2 * time, density=sbm)
            for seed, score in enumerate(scores)
        ]
        save_model(Path(runs[0]), name)
        rows.append(make_row(name, scores, time, runs, density=[[0.2, 0.4], [0.1, 0.1]] if sbm else None))
    rows.append(make_row(EVIL, [], None, [str(out / "none")], error="failed: <img src=x onerror=alert(1)>"))
    rows.append(make_row("axial", [], None, []))
    return make_comparison(rows)


@pytest.fixture(scope="module")
def page(comparison, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert write_report(path, comparison, title="needle: <who> wins?") == path
    return path


class Balanced(HTMLParser):
    """Every tag that is opened is closed, in order; every address is kept."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.kinds: set[str] = set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.kinds.add(tag)
        assert not any(key.startswith("on") for key, _ in attrs)
        self.addresses += [value for key, value in attrs if key in ("src", "href", "srcset", "xlink:href", "action")]
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


# ---- the page ----------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_alone(page):
    text = page.read_text()
    parsed = Balanced(text)
    assert {"svg", "img", "table", "h1"} <= parsed.kinds
    assert "script" not in parsed.kinds and "iframe" not in parsed.kinds
    assert parsed.addresses and all(address.startswith("data:") for address in parsed.addresses)
    assert not re.search(r"url\(|@import|https?://", text)
    assert parsed.text.count("needle: <who> wins?") == 2  # escaped in the title and above the headline


def test_every_number_of_the_table_is_there(page, comparison):
    text = Balanced(page.read_text()).text
    for column in columns([{**row, "colour": 0} for row in comparison["rows"]], "accuracy", None):
        for row, cell in zip(comparison["rows"], column.cells, strict=True):
            assert row["mean"] is None or (cell.text in text and cell.note in text)  # None: said in words
    assert "0.920 ± 0.014" in text and "× 0.25" in text and "300 MiB" in text and "12,349" in text
    assert "0.910 · 0.930" in text  # the seeds
    for key, value in comparison["settings"].items():
        assert key in text and (f"{value:,}" if type(value) is int else str(value)) in text
    for row in comparison["rows"]:
        assert row["attention"] in text and all(run in text for run in row["runs"])
    assert comparison["command"] in text and "torch 2.6 & up" in text and "failed: <img src=x onerror=alert(1)>" in text
    assert "not finished yet" in text


def test_pictures_are_there_or_say_why(page):
    text = page.read_text()
    assert text.count('src="data:image/png') == 5 + 1 + 3 * 2  # 5 mechanisms, SBM with 2 heads; 2 layers of 3 models
    assert "adds scales up" in text and "no trained model" in text and "span" in text
    assert "layer 0, n = 64, up to" in text and "How dense" in text
    assert len(re.findall(r"n = \d+", text)) >= text.count('src="data:image/png'), "every picture says its length"
    assert text.count('type="checkbox"') == text.count('src="data:image/png'), "every picture can be enlarged"


def test_nothing_finished_nothing_found(tmp_path):
    rows = [make_row("full", [], None, []), make_row("sbm", [], None, ["/nowhere"], error="out of memory")]
    text = Balanced(write_report(tmp_path / "r.html", make_comparison(rows), title="t").read_text()).text
    assert "No run has finished yet" in text and "out of memory" in text and text.count("Nothing to draw") == 6


def test_one_seed_has_no_plus_minus_and_broken_files_do_no_harm(tmp_path):
    run = Path(write_log(tmp_path / "a" / "seed0", top=0.9, seconds=0.1))
    (run / "model").mkdir()
    (run / "model" / "task.json").write_text("{")
    other = tmp_path / "b" / "seed0"
    other.mkdir(parents=True)
    (other / "log.jsonl").write_bytes(b"\xff\xfe{}\n")
    rows = [make_row("full", [0.9], 1.0, [str(run)]), make_row("strided|full", [float("nan")], 0.5, [str(other)])]
    comparison = {**make_comparison(rows), "task": "a task of one's own"}
    text = Balanced(write_report(tmp_path / "r.html", comparison, title="t").read_text()).text
    assert "±" not in text and "One seed each" in text and "nan" in text
    assert "no example to show them on" in text and "unknown task" in text


# ---- the finding -------------------------------------------------------------------------------------------


def said(*rows: tuple[str, list[float], float], larger: bool = True, guessing=None, busy: str | None = None) -> str:
    made = [
        {**make_row(name, scores, time, []), "colour": 0, "larger_is_better": larger} for name, scores, time in rows
    ]
    return re.sub("<[^>]*>", "", findings.headline(findings.find(made, guessing, busy=busy)))


def test_the_headline_says_who_wins():
    full = ("full", [0.9], 1.0)
    assert said(full) == "full has the best accuracy, 0.900, and is the fastest."
    assert said(full, ("star", [0.95], 0.5)) == "star has the best accuracy, 0.950, and is the fastest."
    assert (
        said(full, ("star", [0.89], 0.4)) == "full has the best accuracy, 0.900; star comes close in 40 % of the time."
    )
    assert said(full, ("star", [0.5], 0.4)).endswith("; star is the fastest, but 0.400 lower.")
    assert said(("full", [9.0], 1.0), ("star", [12.5], 0.4), larger=False).endswith(
        "star is the fastest, but 3.500 higher."
    )
    three = said(full, ("star", [0.5], 0.2), ("sbm", [0.89], 0.5))
    assert "sbm comes close in 50 % of the time; star is the fastest" in three


def test_nobody_wins_by_noise():
    full, star = ("full", [0.9], 1.0), ("star", [0.89], 0.5)
    guessing = {"score": 0.25, "error": 0.01}
    tie = "star and full are level: the best accuracy is 0.900, and the differences are within the noise; "
    assert said(full, ("star", [0.9], 0.5)) == tie + "star needs 50 % of the time of full."
    assert said(("full", [0.8, 1.0], 1.0), ("star", [0.75, 0.85], 0.99)).endswith("noise, at the same cost.")  # seeds
    assert "are level" in said(full, star, guessing=guessing)  # the test set cannot tell them apart
    assert said(full, star, guessing={"score": 0.25, "error": 0.001}).startswith("full has the best accuracy")
    nobody = said(("full", [0.255], 1.0), ("star", [0.2], 0.5), guessing=guessing)
    assert nobody == "No attention beats guessing, accuracy 0.250: this comparison has no winner."
    assert "no winner" in said(("full", [0.2, 0.4], 1.0), guessing=guessing), "within the spread of its own seeds"
    assert "no winner" in said(("full", [30.0], 1.0), larger=False, guessing={"score": 29.0, "error": 0.1})


def test_nobody_wins_on_the_plateau_or_before_the_others_have_finished():
    row = {**make_row("full", [0.9], 1.0, []), "colour": 0}
    missing = {**make_row("star", [], None, []), "colour": 1}
    on_plateau = findings.find([{**row, "left_plateau": [None]}])
    assert "no winner" in findings.headline(on_plateau) and "plateau" in findings.headline(on_plateau)
    first = findings.find([row, missing])
    assert findings.headline(first).striptags() == "Only full has a result so far, accuracy 0.900."
    poor = findings.find([{**row, "left_plateau": [None]}, missing], {"score": 0.9, "error": 0.1})
    assert findings.headline(poor).striptags() == "Only full has a result so far, accuracy 0.900."
    for found in (on_plateau, first):
        assert not findings.cards([row, missing], found)
        assert not any(cell.best for cell in columns([row, missing], "accuracy", found)[0].cells)


def test_advice_fits_what_has_happened():
    """More seeds are advised only to one who asked for one seed and has differences to explain."""
    full, star = make_row("full", [0.9], 1.0, []), make_row("star", [0.8], 0.5, [])
    plain = {**make_comparison([full, star]), "seeds": 1}
    assert "seeds=3" in findings.caution(plain)
    begun = findings.caution({**plain, "seeds": 3})
    assert "seeds=" not in begun and begun.startswith("1 of 3 seeds has finished.")
    waiting = findings.caution({**plain, "rows": [full, make_row("star", [], None, [])]})
    assert "seeds=" not in waiting and "luck" not in waiting and waiting.startswith("star has not finished.")
    lost = {**make_row("star", [], None, []), "error": "out of memory"}
    assert findings.caution({**plain, "rows": [full, lost]}).startswith("star has failed.")
    stuck = [{**row, "left_plateau": [None]} for row in (full, star)]
    text = findings.caution({**plain, "rows": stuck, "plateau": {"score": 0.25, "margin": 0.1, "what": "guessing"}})
    assert "seeds=" not in text and "full and star are still on the plateau" in text
    assert "no better than guessing" in text and "steps" in text


def test_one_learning_rate_for_several_attentions_is_doubted():
    full, star = make_row("full", [0.9], 1.0, []), make_row("star", [0.8], 0.5, [])
    plain = {**make_comparison([full, star]), "rates": []}
    assert plain["settings"]["rate"] == 5e-3
    said = "All have the same learning rate, which may suit one better than another: "
    assert f"{said}rates=[2.5e-3, 5e-3, 1e-2] tries several for each." in findings.caution(plain)
    with command_line():
        assert f"{said}--rates 2.5e-3,5e-3,1e-2 tries several for each." in findings.caution(plain)
    assert f"{said}rates=[5e-4, 1e-3, 2e-3] tries" in findings.caution({**plain, "rates": ["1e-3"]})
    assert "learning rate" not in findings.caution({**plain, "rates": ["3e-3", "1e-3"]})
    for rows in ([full], [full, make_row("star", [], None, [])]):
        assert "learning rate" not in findings.caution({**plain, "rows": rows}), "there is nothing to compare"


def test_a_rate_that_is_the_last_one_tried_is_told():
    def chosen(*rates: str) -> str:
        rows = [{**make_row(name, [0.9], 1.0, []), "rate": rate, "rates": {"3e-3": 0.5, "1e-3": 0.4, "5e-4": 0.3}}
                for name, rate in zip(("full", "star"), rates, strict=True)]  # fmt: skip
        return findings.caution({**make_comparison(rows), "rates": ["3e-3", "1e-3", "5e-4"]})

    assert "The rate chosen is the largest tried in 2 of 2 cases: a better one may lie outside." in chosen(
        "3e-3", "3e-3"
    )
    assert "is the largest tried in 1 and the smallest tried in 1 of 2 cases" in chosen("5e-4", "3e-3")
    assert "the smallest tried in 1 of 2 cases" in chosen("5e-4", "1e-3") and "outside" not in chosen("1e-3", "1e-3")


def test_no_speed_is_claimed_from_a_busy_machine(tmp_path):
    rows = [make_row("full", [0.9], 1.0, []), make_row("star", [0.5], 0.2, [])]
    assert said(("full", [0.9], 1.0), ("star", [0.5], 0.2), busy="noise") == "full has the best accuracy, 0.900."
    timing = {"reference": "full", "costs": {}, "busy": "other programs used 80 % of the machine"}
    comparison = {**make_comparison(rows), "timing": timing}
    text = Balanced(write_report(tmp_path / "r.html", comparison, title="t").read_text()).text
    assert "Fastest" not in text and "fastest" not in text and "not to be trusted: other programs used 80 %" in text
    assert "measured side by side, and not to be trusted: other programs used 80 %" in text
    apart = {**make_comparison(rows), "timing": None}
    text = Balanced(write_report(tmp_path / "a.html", apart, title="t").read_text()).text
    assert "busy machine" not in text and "full, not to be trusted: the relative cost has not been measured" in text
    assert "minutes apart" in (findings.untrusted(apart) or "")


@pytest.mark.parametrize("busy", [False, True])
def test_table_and_bars_write_times_alike(busy):
    rows = [make_row("full", [0.9], 1.0, [], colour=""), make_row("sbm", [0.9], 0.5, [], colour="")]
    rows.append(make_row("fixed", [0.9], 0.7, [], colour="", relative_quartiles=None))  # not measured side by side
    table = [cell.text for cell in columns(rows, "accuracy", None, busy=busy)[1].cells]
    assert table == [f"{'≈' if busy else '×'} 1.00", f"{'≈' if busy else '×'} 0.50", "≈ 0.70"]
    chart = next(each["chart"] for each in costs(rows, "accuracy", busy=busy) if "step" in each["title"])
    assert all(text in chart for text in table)


def test_the_task_and_its_chance_level_are_said(page):
    text = Balanced(page.read_text()).text
    assert "The task: answer questions about facts scattered in a long text" in text
    assert "Guessing" in text and "has accuracy 0.250" in text and re.search(r"guessing\s*0\.250", text)


def test_long_names_are_folded_not_cut():
    name = "combiner-fixed:span=64,abstraction=deepsets-max|strided:w=8,heads=union,layer_index=1"
    assert "".join(charts.folded(name, 26)) == name and max(map(len, charts.folded(name, 26))) <= 26
    bars = charts.bar_chart([charts.Bar(name, 0, 2.0, "2")], label="t")
    assert "…" not in bars and "".join(re.findall(r'class="label"[^>]*>([^<]*)<', bars)) == name
    assert charts.folded("x" * 60, 26) == ["x" * 26, "x" * 26, "x" * 8]


def test_the_best_is_marked_unless_most_are():
    rows = [
        make_row(name, [score], time, []) for name, score, time in (("a", 0.5, 1.0), ("b", 0.7, 0.5), ("c", 0.6, 2.0))
    ]
    found = findings.find([{**row, "colour": 0} for row in rows])
    assert found is not None
    best = next(row for row in rows if row["attention"] == found.best["attention"])
    score, time, total, _, parameters, _ = columns(rows, "accuracy", found._replace(best=best, level=[rows[2]]))
    assert [cell.best for cell in score.cells] == [False, True, True], "those that are level are marked too"
    score = columns(rows, "accuracy", found._replace(best=best))[0]
    assert [cell.text for cell in total.cells] == ["7 min", "3 min", "13 min"] and not any(c.best for c in total.cells)
    assert time.cells[1].note == "quartiles 0.45 to 0.55" and total.cells[0].note == "100 ms to 300 ms a step"
    assert not any(cell.best for cell in columns(rows, "accuracy", None, busy=True)[1].cells)
    assert [cell.best for cell in score.cells] == [False, True, False]
    assert [cell.best for cell in time.cells] == [False, True, False] and [cell.bar for cell in time.cells] == [
        50,
        25,
        100,
    ]
    assert not any(cell.best for cell in parameters.cells)  # all equal


def test_memory_within_the_noise_is_level():
    rows = [make_row("star", [0.5], 1.0, [], memory=memory * 2**20) for memory in (100, 104, 120, 130)]
    assert [cell.best for cell in columns(rows, "accuracy", None)[3].cells] == [True, True, False, False]


def test_the_best_card_names_all_that_are_level(tmp_path):
    rows = [make_row("full", [1.0], 1.0, []), make_row("star", [1.0], 0.5, []), make_row("sbm", [0.5], 0.9, [])]
    text = write_report(tmp_path / "r.html", make_comparison(rows), title="t").read_text()
    card = re.search(r"Best accuracy.*?</p>", text, re.DOTALL)[0]
    assert "star, full" in re.sub(r"<[^>]*>", "", card) and "within the noise" in card and "sbm" not in card


# ---- curves and charts -------------------------------------------------------------------------------------


def test_curves_are_means_over_seeds_and_time_adds_up(tmp_path):
    runs = [write_log(tmp_path / f"seed{i}", top=top, seconds=s) for i, (top, s) in enumerate(((0.8, 0.5), (0.4, 1.0)))]
    (history,) = curves.read_histories([make_row("full", [0.8, 0.4], 1.0, runs)])
    tracks = [curves.metric_track(records, "accuracy", seconds=True) for records in history.seeds]
    assert tracks[0][40] == (20.0, 0.8) and tracks[1][10] == (10.0, pytest.approx(0.1))
    assert curves.mean_track(tracks)[-1] == (30.0, pytest.approx(0.6))
    del tracks[1][40]  # a seed that is not there yet
    assert len(curves.mean_track(tracks)) == 3
    lines = curves.lines_of(history, curves.loss_track, dots=False)
    assert [line.faint for line in lines] == [False, True, True] and lines[0].points[-1] == (40, pytest.approx(1.4))


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_and_within(lo, size):
    found = charts.ticks(lo, lo + size, 7)
    if lo + size > lo + 1e-12 * abs(lo):
        assert 1 <= len(found) <= 7
        assert all(lo - 1e-6 * size <= tick <= lo + size * (1 + 1e-6) for tick in found)


def test_a_chart_leaves_gaps_and_turns_logarithmic():
    drawn = charts.line_chart([charts.Line("a", 0, [(1, 1), (2, float("nan")), (3, 500), (4, 400)])], x="x", y="y")
    assert re.search(r'd="M[\d. ]+ M[\d. ]+ L[\d. ]+"', drawn) and "y (log)" in drawn and "nan" not in drawn
    bars = charts.bar_chart([charts.Bar("<a>", 0, 2.0, "2"), charts.Bar("b", 1, 1.0, "1")], label="t", marked=1.0)
    assert re.findall(r'width="([\d.]+)"', bars) == ["344.0", "172.0"] and "&lt;a&gt;" in bars


@pytest.mark.parametrize(("memory", "radii"), [((4.0, 1.0), ["14.0", "7.0"]), ((4.0, None), ["5.5", "5.5"])])
def test_circles_are_as_large_as_the_memory(memory, radii):
    """Figure 2 of Composite Slice; where the memory of one is not known, all are alike."""
    dots = [charts.Dot(name, 0, x, 0.5, None, size) for name, x, size in zip("ab", (1.0, 0.5), memory, strict=True)]
    assert re.findall(r'r="([\d.]+)"', charts.scatter_chart(dots, x="x", y="y")) == radii


def test_a_large_circle_does_not_take_the_place_of_its_own_name():
    dots = [charts.Dot(name, 0, x, y, None, 9.0) for name, x, y in (("alone", 1.0, 0.5), ("other", 0.2, 0.9))]
    drawn = charts.scatter_chart(dots, x="x", y="y")
    for name in ("alone", "other"):
        circle = re.search(rf'<title>{name}.*?cx="([\d.]+)".*? r="([\d.]+)"', drawn)
        label = re.search(rf'class="label" x="([\d.]+)"[^>]*>{name}<', drawn)
        assert circle and label and abs(float(label[1]) - float(circle[1])) > float(circle[2]) == 14


# ---- trained weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["full", "combiner-fixed", "sbm", "composite-slice"])
def test_trained_weights_are_those_of_the_model(comparison, attention):
    run = next(row["runs"][0] for row in comparison["rows"] if row["attention"] == attention)
    ids = torch.arange(40) % 30
    layers = trained_weights(Path(run) / "model", ids)
    assert len(layers) == 2
    if attention == "composite-slice":
        assert layers == [None, None]
        return
    for weights, kind in layers:
        torch.testing.assert_close(weights.sum(-1), torch.ones(40))
        assert weights.shape == kind.shape == (40, 40)
        assert set(kind.unique().tolist()) == ({1, 2} if attention == "combiner-fixed" else {1})


# ---- a browser ---------------------------------------------------------------------------------------------

HARNESS = """<body><script>
for (const [page, width] of [["report.html", 390], ["report.html", 1200], ["bad.html", 390]]) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 800; frame.src = page;
  frame.onload = () => {
    const page_ = frame.contentDocument, charts = [...page_.querySelectorAll("svg")];
    frame.dataset.seen = [page_.documentElement.scrollWidth, charts.length,
      charts.every(chart => chart.getBoundingClientRect().height > 100)].join(" ");
  };
  document.body.append(frame);
}
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on this machine")
def test_a_browser_shows_it_without_complaint(page, tmp_path):
    """Wide and narrow, no message on the console, nothing loaded, nothing cut off; a bad page beside it is noticed."""
    text = page.read_text()
    (tmp_path / "report.html").write_text(text)
    bad = '<script>alert(1)</script><img src="https://example.org/a.png"><div style="width:2000px">wide</div></main>'
    (tmp_path / "bad.html").write_text(text.replace("</main>", bad))
    (tmp_path / "look.html").write_text(HARNESS)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--dump-dom",
               "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
               "--v=0", "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]  # fmt: skip
    command = [BROWSER, *options, (tmp_path / "look.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    seen = [line.split() for line in re.findall(r'data-seen="([^"]*)"', done.stdout)]
    assert [each[0] for each in seen[:2]] == ["390", "1200"] and int(seen[2][0]) >= 2000
    assert all(each[1:] == ["7", "true"] for each in seen)
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not [line for line in messages if "report.html" in line]
    assert len([line for line in messages if "bad.html" in line]) >= 2  # the script and the image, both refused
