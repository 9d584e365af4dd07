"""Committed results: the tables of the docs are in step with them, and measuring is resumable."""

import json
import re
import runpy
from pathlib import Path

import pytest

from subquad import bench
from subquad.bench import Setting
from subquad.studies import processes, speed, tables

ROOT = Path(__file__).parents[1]
SMALL = Setting(heads=2, head_dim=8)


PAGES = [
    "README.md",
    "docs/performance.md",
    "docs/conversion.md",
    "docs/distributed.md",
    "docs/advise.md",
    "docs/composite-slice.md",
]


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_are_in_step_with_the_results(page):
    text = (ROOT / page).read_text()
    assert "<!-- table: " in text
    assert tables.updated(text, ROOT / "docs" / "results") == text, "run `make tables`"


def test_every_piece_is_measured_once_and_kept(tmp_path, monkeypatch):
    path, calls = tmp_path / "speed.json", []
    original = bench.measure
    monkeypatch.setattr(bench, "measure", lambda *a, **k: calls.append(a) or original(*a, **k))
    monkeypatch.setattr(bench, "peak_memory", lambda spec, level, n, setting: 2**20 * n)
    monkeypatch.setattr(bench, "busy", lambda rows: "a neighbour" if len(calls) == 1 else None)
    about = {"names": ("full", "fixed", "fnet", "pattern"), "lengths": (4, 8), "repeats": 1}
    assert not speed.run(path, SMALL, minutes=-1, **about) and not calls, "no time, nothing measured"
    assert not speed.run(path, SMALL, **about), "one piece was measured on a busy machine"
    rows = json.loads(path.read_text())["rows"]
    assert {(row["spec"], row["causal"]) for row in rows} == {("fixed", False), ("fixed", True), ("fnet", False)}
    assert [row["busy"] for row in rows if row["busy"]] == ["a neighbour"] * 2 and len(calls) == 8
    assert speed.run(path, SMALL, **about) and len(calls) == 9, "that one again, and no other"
    rows = json.loads(path.read_text())["rows"]
    assert not any(row["busy"] for row in rows)
    assert {row["memory"] for row in rows if row["n"] == 8 and row["backward"]} == {2**23}
    with pytest.raises(ValueError, match="was measured with other setting"):
        speed.run(path, Setting(heads=4), **about)


def row(n, ratio, causal=False, backward=True, **more):
    about = {"spec": "star", "busy": None, "memory": None, "full_memory": None}
    return {**about, "n": n, "ratio": ratio, "causal": causal, "backward": backward, **more}


def test_the_break_even_length_lies_between_slower_and_faster():
    assert tables.break_even([row(512, 2.0), row(2048, 0.5)], causal=False) == "1,000"  # the middle, on a log scale
    assert tables.break_even([row(512, 0.9), row(1024, 0.5)], causal=False) == "< 512"
    assert tables.break_even([row(512, 3.0), row(1024, 1.5)], causal=False) == "> 1,024"
    wavy = [row(512, 0.9), row(1024, 2.0), row(4096, 0.5)]
    assert tables.break_even(wavy, causal=False) == "2,000", "faster at all longer lengths"
    assert tables.break_even(wavy, causal=True) == ""


def test_tables_are_made_between_their_comments(tmp_path):
    rows = [row(8, 0.5, memory=2**20, full_memory=2**21), row(8, 0.25, causal=True, busy="a neighbour")]
    (tmp_path / "speed.json").write_text(json.dumps({"rows": rows}))
    page = "before\n<!-- table: speed star -->\nold\n<!-- end of table -->\nafter\n"
    text = tables.updated(page, tmp_path)
    assert "| `star` |  | 2 |  |  |  | < 8 |  |" in text and "old" not in text
    assert text.startswith("before\n<!-- table: speed star -->\n") and text.endswith("<!-- end of table -->\nafter\n")
    assert tables.updated(text, tmp_path) == text
    with pytest.raises(ValueError, match="no table is called 'sped'"):
        tables.updated(page.replace("speed", "sped"), tmp_path)


def test_rows_in_use_have_tables_of_their_own(tmp_path):
    used = {"seconds": 3.0, "plain_seconds": 2.0}
    rows = [row(8, 0.5), row(16, 0.1, ragged=True, batch=8, **used), row(16, 0.25, causal=True, level="model")]
    (tmp_path / "speed.json").write_text(json.dumps({"rows": rows}))
    made = {name: tables.updated(f"<!-- table: {name} -->\n<!-- end of table -->\n", tmp_path)
            for name in ("speed star", "lengths backward", "use ragged", "use dropout", "use model")}  # fmt: skip
    assert "| `star` |  | 2 |" in made["speed star"] and "| mechanism | 8 |" in made["lengths backward"]
    assert (
        "| mechanism | forward + backward, n = 16 |" in made["use ragged"] and "| `star` | 1.50 |" in made["use ragged"]
    )
    assert "training step, n = 16" in made["use model"] and "| `star` | 4 |" in made["use model"]
    assert "star" not in made["use dropout"]
    assert [speed.use_of(each) for each in rows] == [(), speed.RAGGED, speed.MODEL]


def test_the_pieces_in_use_are_measured_and_read_again(tmp_path):
    use = speed.Piece(("combiner-fixed",), 16, False, True, False, (*speed.DROPOUT,))
    wanted = [piece for piece in speed.pieces(["combiner-fixed"], [1024, 4096, 8192]) if piece.use]
    assert [piece.n for piece in wanted] == [1024, 1024, 4096, 4096, 4096, 8192] and "dropout 0.1" in str(use)
    kept = {}
    speed.measure(use, SMALL, 1, kept)
    path = tmp_path / "speed.json"
    speed.write(path, SMALL, kept)
    assert list(speed.read(path, SMALL)) == [("combiner-fixed", 16, False, True, speed.DROPOUT)]
    assert not speed.missing(use, {key: {**value, "busy": None} for key, value in kept.items()})


def test_a_comparison_is_kept_without_its_folders(tmp_path):
    about = {
        "metric": "accuracy",
        "sd": None,
        "relative_time": 0.5,
        "memory": 2**20,
        "parameters": 7,
        "connections": 9.0,
    }
    whole = {"task": "needle", "guessing": {"score": 0.25}, "timing": {"busy": None, "costs": {}},
             "rows": [{"attention": "star", "mean": 0.75, "runs": ["/somewhere"], **about}]}  # fmt: skip
    (tmp_path / "comparison.json").write_text(json.dumps(whole))
    tables.keep_comparison(tmp_path / "comparison.json", tmp_path)
    assert "somewhere" not in (tmp_path / "run.json").read_text()
    text = tables.updated("<!-- table: run -->\n<!-- end of table -->\n", tmp_path)
    assert "| star | 0.750 | × 0.50 | 1 MiB | 7 | 9 |\n| guessing | 0.250 |" in text
    whole["rows"][0]["mean"] = None
    (tmp_path / "comparison.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="not all attentions are trained"):
        tables.keep_comparison(tmp_path / "comparison.json", tmp_path)


def test_every_dependency_has_a_lowest_version():
    """`make test-oldest` installs what tools/oldest.py makes of them."""
    text = (ROOT / "pyproject.toml").read_text()
    found = runpy.run_path(str(ROOT / "tools" / "oldest.py"))["lowest"](text)
    assert "torch==2.12" in found and "transformers==5.22.2" in found
    needed = text.split("dependencies = [")[1].split("]")[0] + "," + text.split("train = [")[1].split("]")[0]
    names = [word.strip(' "\n') for word in needed.split(",") if word.strip()]
    assert len(names) == len(found) and all(">=" in name for name in names)


def test_the_walk_in_contributing_names_what_exists():
    """From q to out in at most four files each."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## From `q` to `out`")[1].split("\n## ")[0]
    walks = re.split(r"\n\*\*`[\w-]+`\*\*", text)[1:]
    assert len(walks) == 3
    for walk in walks:
        steps = re.findall(r"^(\d)\. `([\w/]+\.py)`(?:, `(?:\w+\.)?(\w+)`)?", walk, re.MULTILINE)
        assert 3 <= len(steps) <= 4
        for _, file, name in steps:
            assert name in (ROOT / "src" / "subquad" / file).read_text()


def test_bytes_and_times_of_several_processes_are_kept_and_shown(tmp_path, monkeypatch):
    path, calls = tmp_path / "processes.json", []
    monkeypatch.setattr(processes, "SENT", ("full", "combiner-fixed:span=4"))
    monkeypatch.setattr(processes, "LENGTHS", (64,))
    monkeypatch.setattr(processes, "peak_memory", lambda spec, n, p, setting: 2**20 * (8 // p))
    monkeypatch.setattr(processes, "step_seconds", lambda **about: calls.append(about) or 2.0 / about["processes"])
    processes.run(path, ["sent", "memory", "times"], rounds=1)
    processes.run(path, ["sent", "memory", "times"], rounds=2)
    assert len(calls) == 2 * 5, "what is known is not measured again"
    page = "".join(
        f"<!-- table: processes {words} -->\n<!-- end of table -->\n" for words in ("sent causal", "memory", "times")
    )
    text = tables.updated(page, tmp_path)
    assert "| `full`, ring | 0.19 + 0.44 | 1 |" in text and "| `combiner-fixed:span=4` | 0.05 + 0.05 | 1/7 |" in text
    assert "| `combiner-fixed` | 8 MiB | 4 MiB (0.50) | 2 MiB (0.25) |" in text
    assert "| `full`, zigzag | 8,192 | 2 | 1.00 s | 2.00 (2.00 to 2.00) |" in text
