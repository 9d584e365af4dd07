"""`subquad.train` and `subquad.compare`: what they return, and that their errors speak Python."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest
from torch import nn

import subquad
from subquad import tasks
from subquad.core import child
from subquad.core.spoken import again, argument, command_line, given
from subquad.experiments import _reach
from subquad.tasks.needle import Needle
from subquad.training.compare import Comparison
from subquad.training.processes import to_resume
from training_runs import TINY, one_thread  # noqa: F401  (a fixture)

SMALL = dict(text.split("=") for text in TINY) | {"steps": 2, "evaluate": 1}


def test_train_returns_what_a_caller_wants(tmp_path):
    run = subquad.train("needle", "local:window=5", out=tmp_path / "run", seed=1, **SMALL)
    assert (run.task, run.attention, run.metric, run.steps) == ("needle", ["local:window=5"], "accuracy", 2)
    assert run.score == run.test["accuracy"] == run.details["test"]["accuracy"]
    assert str(run) == f"needle, local:window=5: accuracy {run.score:.4f} after 2 steps"
    assert repr(run) == str(run), "what a notebook shows is what print shows"
    model, task = run.load()
    assert not model.training and task.name == "needle" and task.seed == 1
    assert "subquad train needle --attention local:window=5" in run.details["command"]
    with pytest.raises(ValueError, match="already contains a run: resume=True continues it, overwrite=True deletes it"):
        subquad.train("needle", "local:window=5", out=tmp_path / "run", seed=1, **SMALL)
    again = subquad.train("needle", "local:window=5", out=str(tmp_path / "run"), seed=1, resume=True, **SMALL)
    assert again == run
    with pytest.raises(ValueError, match=r"rate was 0.005 and is now 0.1; choose another `out`"):
        subquad.train("needle", "local:window=5", out=tmp_path / "run", seed=1, resume=True, rate=0.1, **SMALL)


@pytest.fixture
def notebook(monkeypatch):
    """A task that no other process can import, as one of a notebook."""
    module = ModuleType("a_notebook")
    cls = type("Own", (Needle,), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tasks.register("own-needle", cls)
    yield "own-needle"
    del tasks._TASKS["own-needle"]


def test_compare_returns_a_table(notebook, tmp_path):
    out = tmp_path / "comparison"
    compared = subquad.compare(notebook, ["full", "local:window=5"], out=out, **SMALL)
    assert [row["attention"] for row in compared.rows] == ["full", "local:window=5"]
    assert compared["full"]["mean"] == compared.rows[0]["scores"][0] and compared["full"]["error"] is None
    assert compared.report == out / "report.html" and compared.report.exists()
    assert compared.metric == "accuracy" and 0 < compared.guessing < 1
    shown = str(compared)
    assert repr(compared) == shown
    assert all(
        word in shown for word in ("local:window=5", "guessing", compared.headline, "still on the plateau", "report: ")
    )
    with pytest.raises(KeyError, match="'linear' was not compared: full, local:window=5"):
        compared["linear"]
    with pytest.raises(ValueError, match=r"jobs must be 1 for a task .* that a script or a notebook defines, not 2"):
        subquad.compare(notebook, ["full"], out=out, jobs=2, **SMALL)
    more = subquad.compare(notebook, "full,local:window=5,linear", out=out, **SMALL)
    assert more["full"]["scores"] == compared["full"]["scores"] and more["linear"]["mean"] is not None


def test_an_attention_that_fails_in_this_process_is_reported(notebook, tmp_path, monkeypatch):
    def fail(self, *args, **kwargs):
        raise RuntimeError("no luck")

    from subquad.training import run

    monkeypatch.setattr(run, "make_model", fail)
    compared = subquad.compare(notebook, ["full"], out=tmp_path, **SMALL)
    assert compared["full"]["error"] == "no luck" and compared.headline == ""


def test_processes_find_modules_of_the_callers(monkeypatch, tmp_path):
    (tmp_path / "my_own_needle.py").write_text(
        "from subquad.tasks import register\nfrom subquad.tasks.needle import Needle\n\n\n"
        "class Own(Needle):\n    pass\n\n\nregister('own-needle', Own)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(child.IMPORTS, "json")
    __import__("my_own_needle")
    try:
        comparison = Comparison("own-needle", ["full"], tmp_path)
        _reach(comparison)
    finally:
        del tasks._TASKS["own-needle"]
    assert not comparison.inside and comparison.environment[child.IMPORTS] == "json,my_own_needle"
    assert str(tmp_path) in comparison.environment["PYTHONPATH"].split(os.pathsep)
    plain = Comparison("needle", ["full|local:window=5"], tmp_path)
    _reach(plain)
    assert not plain.inside and not plain.environment


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: subquad.train("needl"), "unknown task 'needl'; did you mean needle"),
        (lambda: subquad.train("needle", 3), "attention must be a spec or a list of specs, such as .*, not 3"),
        (lambda: subquad.train("needle", nn.Sequential(nn.ReLU(), nn.ReLU())), "such as .*, not Sequential$"),
        (lambda: subquad.train("needle", step=3), "needle has no option 'step'; did you mean steps"),
        (lambda: subquad.train("needle", steps="x"), "needle: steps must be an integer ≥ 1, not 'x'"),
        (lambda: subquad.train("needle", seed="a"), "seed must be an integer ≥ 0, not 'a'"),
        (lambda: subquad.train("needle", out=3), "out must be a path, not 3"),
        (
            lambda: subquad.train("needle", resume=True, overwrite=True),
            "resume=True continues a run and overwrite=True",
        ),
        (lambda: subquad.train("lm-bytes", data="nowhere"), "`data`: the folder nowhere does not exist"),
        (lambda: subquad.compare("lra", "full", data="nowhere"), "`data`: the folder nowhere does not exist"),
        (lambda: subquad.compare("needle", []), "attentions must be a spec or a list of specs"),
        (lambda: subquad.compare("needle", "full", seed=3), "`seeds` is the number of runs"),
        (lambda: subquad.compare("needle", "full", seeds="3"), "seeds must be .* an integer ≥ 1, not '3'"),
        (lambda: subquad.compare("needle", "full", jobs=0), "jobs must be the number of runs at a time, .* not 0"),
        (lambda: subquad.compare("needle", "full", rates=0.1), r"rates must be a list .* such as \[3e-3, 1e-3\]"),
    ],
)
def test_what_cannot_work_is_refused_in_python(call, message):
    with pytest.raises((TypeError, ValueError, OSError), match=message) as caught:
        call()
    assert "--" not in str(caught.value)


def test_no_setting_has_the_name_of_an_argument():
    own = {"task", "attention", "attentions", "seeds", "seed", "out", "recipe", "data", "rates", "resume", "overwrite"}
    for name in tasks.available():
        for recipe in tasks.task_class(name).recipes.values():
            assert not own & set(recipe.asdict()), name


def test_messages_speak_as_their_reader_does():
    assert (argument("out"), given("resume"), given("seeds", 3)) == ("`out`", "resume=True", "seeds=3")
    assert again("resume") == "make the same call again with resume=True"
    assert given("rates", ("3e-3", "1e-3")) == "rates=[3e-3, 1e-3]"
    with command_line():
        assert given("rates", ("3e-3", "1e-3")) == "--rates 3e-3,1e-3"
        assert (argument("out"), given("resume"), given("seeds", 3)) == ("--out", "--resume", "--seeds 3")
        assert again() == "run the same command again"
    assert argument("out") == "`out`"


def test_public_names_are_found():
    assert {"train", "compare", "Trained", "Compared", "training", "models", "tasks"} <= set(dir(subquad))
    assert {"Run", "train", "load", "evaluate", "predict", "generate"} <= set(dir(subquad.training))
    assert subquad.training.load.__name__ == "load"
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        subquad.training.lode  # noqa: B018


def test_a_process_of_a_comparison_says_how_that_is_resumed(monkeypatch):
    assert to_resume() == "make the same call again with resume=True to continue"
    monkeypatch.setenv(child.AGAIN, "make the same call again")
    with command_line():
        assert to_resume() == "make the same call again to continue"


def test_processes_that_belong_together_tell_a_thing_once(monkeypatch, tmp_path):
    assert child.first_to_tell("kernels") and child.first_to_tell("kernels"), "a process alone looks after itself"
    monkeypatch.setenv(child.TOLD, str(tmp_path))
    assert child.first_to_tell("kernels") and not child.first_to_tell("kernels")
    monkeypatch.setenv(child.TOLD, str(tmp_path / "gone"))
    assert child.first_to_tell("kernels")
