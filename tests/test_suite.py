"""The tasks of a suite side by side: the averages, the page, and the command that writes them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console
from typer.testing import CliRunner

import subquad
from subquad import tasks
from subquad.cli import app
from subquad.reports import suite as suites
from subquad.reports.scores import suite_table
from subquad.tasks.needle import Needle
from subquad.training import compare as comparing
from test_report import Balanced, make_comparison, make_row
from training_runs import TINY, one_thread  # noqa: F401  (a fixture)


def made_up(task: str, rows: list[dict], *, busy: str | None = None, **more) -> dict:
    for row in rows:
        row.setdefault("left_plateau", [100] * len(row["scores"]))
    timing = {"reference": "full", "costs": {}, "busy": busy}
    return {**make_comparison(rows), "task": task, "seeds": 2, "timing": timing, **more}


def two_tasks(**changes) -> list[dict]:
    """listops and text; `changes` replace what star has on text."""
    star = make_row("star", [0.5, 0.6], 0.4, [], memory=100, parameters=3000)
    return [
        made_up("listops", [
            make_row("full", [0.3, 0.4], 1.0, [], memory=200, parameters=1000),
            make_row("star", [0.2, 0.4], 0.1, [], memory=50, parameters=1500),
        ]),
        made_up("text", [make_row("full", [0.6, 0.9], 1.0, [], memory=400, parameters=2000), {**star, **changes}]),
    ]  # fmt: skip


def lines_of(suite: dict) -> list[list[str]]:
    """The table as a terminal shows it, each line cut at its wide gaps."""
    console = Console(width=120, color_system=None)
    with console.capture() as text:
        console.print(suite_table(suite))
    return [re.split(r"\s{2,}", line.strip()) for line in text.get().splitlines()]


# ---- the numbers -------------------------------------------------------------------------------------------


def test_scores_are_averaged_and_costs_multiplied():
    suite = suites.combine("mini", two_tasks())
    full, star = suite["rows"]
    assert star["average"] == pytest.approx((0.3 + 0.55) / 2)
    assert star["averages"] == pytest.approx([0.35, 0.5]), "a seed over the tasks"
    assert star["sd"] == pytest.approx(0.15 / 2**0.5)
    assert star["relative_time"] == pytest.approx((0.1 * 0.4) ** 0.5), "geometric"
    assert star["relative_quartiles"][0] == pytest.approx(0.9 * 0.2)
    assert star["relative_memory"] == pytest.approx(0.25) and full["relative_memory"] == 1
    assert star["parameters"] == 2250 and suite["reference"] == "full"
    assert suite["guessing"]["score"] == 0.25 and suite["guessing"]["error"] == pytest.approx(0.001 / 2**0.5)
    assert lines_of(suite) == [
        ["attention", "listops", "text", "average"],
        ["full", "35.00 ± 7.07", "75.00 ± 21.21", "55.00 ± 14.14"],
        ["star", "30.00 ± 14.14", "55.00 ± 7.07", "42.50 ± 10.61"],
        ["guessing", "25.00", "25.00", "25.00"],
    ]


NOTHING = make_row("star", [], None, [])


@pytest.mark.parametrize("error", [None, "out of memory"])
def test_without_a_task_there_is_no_average(error):
    suite = suites.combine("mini", two_tasks(**{**NOTHING, "error": error}))
    star = suite["rows"][1]
    assert star["tasks"]["listops"]["mean"] == pytest.approx(0.3) and star["tasks"]["text"]["error"] == error
    for key in ("average", "sd", "relative_time", "relative_quartiles", "relative_memory", "parameters"):
        assert star[key] is None
    assert lines_of(suite)[2] == ["star", "30.00 ± 14.14", "–", "–"]
    assert ("star has failed on text." if error else "star has not finished text.") in suites.caution(suite)
    assert suites.headline(suites.find(suite)).striptags() == "Only full has finished all tasks so far, average 55.00."


def test_a_lost_seed_leaves_an_average_without_spread():
    suite = suites.combine("mini", two_tasks(scores=[0.5], mean=0.5, sd=None, left_plateau=[100], error="no luck"))
    star = suite["rows"][1]
    assert star["average"] == pytest.approx(0.4) and star["sd"] is None
    assert lines_of(suite)[2] == ["star", "30.00 ± 14.14", "50.00", "40.00"]
    assert "star has lost a seed on text. Mean ± standard deviation over 1 to 2 seeds." in suites.caution(suite)


def test_the_plateau_is_marked_and_counts():
    suite = suites.combine("mini", two_tasks(left_plateau=[100, None]))
    assert lines_of(suite)[2] == ["star", "30.00 ± 14.14", "55.00 ± 7.07*", "42.50 ± 10.61"]
    assert "* A run is still on the plateau, no better than guessing: star on text." in suites.caution(suite)


def test_one_learning_rate_for_several_attentions_is_doubted():
    said = (
        "All have the same learning rate, which may suit one better than another: rates=[1e-3, 2e-3, 5e-3, 1e-2] tries"
    )
    own = zip(two_tasks(), (5e-3, 2e-3), strict=True)
    tasks = [{**each, "settings": {**each["settings"], "rate": rate}} for each, rate in own]
    plain, rated = (
        suites.combine("mini", [{**each, "rates": rates} for each in tasks]) for rates in ([], ["3e-3", "1e-3"])
    )
    assert said in suites.caution(plain) and "learning rate" not in suites.caution(rated)
    assert "learning rate" not in suites.caution({**plain, "rows": plain["rows"][:1]})
    assert "outside" not in suites.caution(rated), "there are no results of rates"
    for task in tasks:
        task["rows"] = [{**row, "rate": "3e-3", "rates": {"3e-3": 0.5, "1e-3": 0.4}} for row in task["rows"]]
    chosen = suites.combine("mini", [{**each, "rates": ["3e-3", "1e-3"]} for each in tasks])
    assert "The rate chosen is the largest tried in 4 of 4 cases" in suites.caution(chosen)


def test_one_busy_task_makes_the_relative_times_doubtful():
    comparisons = two_tasks()
    comparisons[0]["rows"][1].update(scores=[0.2, 0.2], mean=0.2, sd=0.0)
    quiet, busy = suites.combine("mini", comparisons), comparisons
    assert suites.busy(quiet) is None and "0.20" not in suites.caution(quiet)
    assert suites.find(quiet).fastest["attention"] == "star"
    busy[1]["timing"]["busy"] = "other programs used 80 %"
    doubtful = suites.combine("mini", busy)
    assert suites.find(doubtful).fastest is None
    assert "The times are not reliable (text: other programs used 80 %)." in suites.caution(doubtful)


# ---- the page ----------------------------------------------------------------------------------------------


def write(out: Path, comparisons: list[dict], reported: tuple[str, ...] = ("listops",)) -> str:
    for task in reported:
        (out / task).mkdir()
        (out / task / "report.html").touch()
    suite = suites.write_suite(out, "mini", comparisons)
    assert json.loads((out / "suite.json").read_text()) == suite
    return (out / "report.html").read_text()


def test_the_page_shows_the_table_and_leads_to_the_tasks(tmp_path):
    page = write(tmp_path, two_tasks(left_plateau=[None, 100]))
    parsed = Balanced(page)
    links = [address for address in parsed.addresses if not address.startswith("data:")]
    assert links == ["listops/report.html", "listops/report.html", "suite.json"], "text has no report to lead to"
    assert "script" not in parsed.kinds and not re.search(r"url\(|@import|https?://", page)
    star = re.search(r'<tr class="k1">.*?</tr>', page, re.DOTALL)[0]
    assert re.findall(r'class="value">([^<]*)<', star) == [
        "30.00", "55.00 *", "42.50", "× 0.20", "× 0.25", "2,250"
    ]  # fmt: skip
    assert re.findall(r"<small>([^<]*)<", star) == ["± 14.14", "± 7.07", "± 10.61"]
    guess = re.search(r'<tr class="guess">.*?</tr>', page, re.DOTALL)[0]
    assert re.findall(r'class="value">([^<]*)<', guess) == ["25.00"] * 3


def test_the_picture_is_average_over_time_with_circles_as_memory(tmp_path):
    page = write(tmp_path, two_tasks())
    figure = re.search(r"<h3>Average against time.*?</figure>", page, re.DOTALL)[0]
    assert re.findall(r"<title>([^<]*)</title>", figure) == [
        "full, 1,500 parameters: time per step 1.00, average accuracy, per cent 55",
        "star, 2,250 parameters: time per step 0.20, average accuracy, per cent 42.5",
    ]
    radii = [float(radius) for radius in re.findall(r' r="([\d.]+)"', figure)]
    assert radii == [14.0, 7.0], "a quarter of the memory is half the radius"
    bars = re.search(r"<h3>Peak memory.*?</figure>", page, re.DOTALL)[0]
    assert re.findall(r"<title>([^<]*)</title>", bars) == ["full: × 1.00", "star: × 0.25"]


def test_the_page_says_what_is_missing_and_what_is_doubtful(tmp_path):
    comparisons = two_tasks(**{**NOTHING, "error": "killed by <9>"})
    comparisons[0]["timing"]["busy"] = "other programs used 80 %"
    text = Balanced(write(tmp_path, comparisons)).text
    assert "star on text: killed by <9>" in text and "failed" in text
    assert "the times are not to be trusted: listops: other programs used 80 %" in text
    assert "≈ 1.00" in text and "× 1.00" in text, "time is doubtful, memory is not"
    (tmp_path / "later").mkdir()
    nobody = [comparisons[0], made_up("text", [make_row("full", [], None, []), dict(NOTHING)])]
    text = Balanced(write(tmp_path / "later", nobody)).text
    assert "No attention has finished all tasks yet." in text and "No attention has finished text yet." in text
    assert text.count("Drawn once an attention has finished all tasks.") == 3


# ---- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def mini(monkeypatch):
    """A suite of two tasks that are trained in this process."""
    module = ModuleType("two_needles")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tasks.register("needle-again", type("Again", (Needle,), {"__module__": module.__name__}))
    monkeypatch.setitem(tasks.SUITES, "mini", ("needle", "needle-again"))
    monkeypatch.setattr(comparing, "run_one", comparing.run_inside)
    monkeypatch.setattr(comparing, "measure_timing", lambda comparison, tell: None)
    yield "mini"
    del tasks._TASKS["needle-again"]


def test_a_suite_is_stopped_resumed_and_reported(mini, tmp_path, monkeypatch):
    out = tmp_path / "out"
    settings = [word for text in (*TINY, "steps=2", "evaluate=1") for word in ("--set", text)]
    line = ["compare", mini, "--attention", "full,local:window=5", "--out", str(out), *settings]
    inside = comparing.run_inside

    def stopped(comparison, *run):
        return 130 if comparison.task == "needle-again" else inside(comparison, *run)

    monkeypatch.setattr(comparing, "run_one", stopped)
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 130 and "No attention has finished all tasks yet." in result.stdout
    begun = json.loads((out / "suite.json").read_text())["rows"][0]
    assert begun["tasks"]["needle"]["mean"] is not None and begun["tasks"]["needle-again"]["mean"] is None

    monkeypatch.setattr(comparing, "run_one", inside)
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    suite = json.loads((out / "suite.json").read_text())
    known = [json.loads((out / task / "comparison.json").read_text())["rows"] for task in tasks.SUITES[mini]]
    for row, own in zip(suite["rows"], zip(*known, strict=True), strict=True):
        assert row["average"] == pytest.approx(sum(each["mean"] for each in own) / 2)
        assert f"{100 * row['average']:.2f}" in result.stdout
    assert suite["rows"][0]["tasks"]["needle"] == begun["tasks"]["needle"], "it was not trained again"
    assert f"report: {out / 'report.html'}" in result.stdout
    assert "needle-again/report.html" in Balanced((out / "report.html").read_text()).addresses


def test_python_compares_a_suite_too(mini, tmp_path, monkeypatch):
    small = dict(text.split("=") for text in TINY) | {"steps": 2, "evaluate": 1}
    specs = ["full", "local:window=5"]
    compared = subquad.compare(mini, specs, out=tmp_path, **small)
    assert list(compared.tasks) == list(tasks.SUITES[mini]), "a comparison per task"
    one, other = (each["full"]["mean"] for each in compared.tasks.values())
    assert compared["full"]["average"] == pytest.approx((one + other) / 2)
    assert compared.metric == "average" and compared.report == tmp_path / "report.html"
    assert json.loads((tmp_path / "suite.json").read_text()) == compared.details
    lines = str(compared).splitlines()
    assert lines[0].split() == ["attention", *tasks.SUITES[mini], "average"] and repr(compared) == str(compared)
    assert lines[-1] == f"report: {tmp_path / 'report.html'}" and compared.headline in lines
    before = compared.tasks["needle"].details["rows"]
    again = subquad.compare(mini, specs, out=tmp_path, **small)
    assert again.tasks["needle"].details["rows"] == before, "nothing was trained again"

    def stop(comparison):
        raise KeyboardInterrupt

    monkeypatch.setattr("subquad.experiments._finish", stop)
    (tmp_path / "suite.json").unlink()
    with pytest.raises(KeyboardInterrupt):
        subquad.compare(mini, specs, out=tmp_path, **small)
    assert (tmp_path / "suite.json").exists(), "what there is is reported"
    with pytest.raises(ValueError, match="already contains the comparison of a task: choose another `out`"):
        subquad.compare(mini, "full", out=tmp_path / "needle", **small)


def test_a_suite_and_a_task_do_not_share_a_folder(mini, tmp_path):
    suites.write_suite(tmp_path, "mini", two_tasks())
    with pytest.raises(ValueError, match="already contains a comparison of several tasks: choose another `out`"):
        comparing.prepare(comparing.Comparison("needle", ["full"], tmp_path), overwrite=True)
    suites.clear(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "comparison.json").write_text("{}")
    (tmp_path / "report.html").write_text("of a task")
    settings = [word for text in TINY for word in ("--set", text)]
    result = CliRunner().invoke(app, ["compare", mini, "--attention", "full", "--out", str(tmp_path), *settings])
    assert result.exit_code == 2 and "already contains the comparison of a task: choose another --out" in result.stderr
    suites.clear(tmp_path)
    assert (tmp_path / "report.html").read_text() == "of a task", "only a suite's own files are deleted"
