"""`subquad analyze` and `subquad prove`."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from subquad.cli import app

KEYS = {"universal", "self_loops", "hamiltonian_path", "hops", "connections", "sparsity"}


def run(*words: str, code: int = 0):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.output


def test_analyze_json():
    found = json.loads(run("analyze", "strided", "--n", "256", "--w", "16", "--json"))
    assert set(found) >= KEYS
    assert found["universal"] is True and found["self_loops"] is True and found["hamiltonian_path"] is True
    assert found["hops"] == 3 and found["path"] == list(range(256))
    assert found["connections"] == 4188 and found["sparsity"] == pytest.approx(1 - 4188 / 256**2)
    same = json.loads(run("analyze", "--w=16", "strided:heads=sequential", "--n", "256", "--json"))
    assert same["hops"] == 3


def test_analyze_says_why():
    text = run("analyze", "fixed:w=16", "--n", "250", "--map", "entmax", "--alpha", "2")
    assert "universal: no" in text and "token 0 never reaches token 240" in text and "entmax(alpha=2.0)" in text
    assert "causal variant" in run("analyze", "star:w=4", "--n", "32", "--causal")
    assert "γ: " in run("analyze", "axial", "--n", "16")


def test_analyze_sets_and_maps_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "sets.json").write_text("[[0, 1], [0, 1, 2], [2]]")
    found = json.loads(run("analyze", "--sets", str(tmp_path / "sets.json"), "--json"))
    assert found["n"] == 3 and found["universal"] is False and found["hops_witness"] == [2, 0]
    np.save(tmp_path / "mask.npy", np.ones((2, 3, 3), dtype=bool))
    found = json.loads(run("analyze", "--sets", str(tmp_path / "mask.npy"), "--map", "entmax", "--json"))
    assert found["families"] == 2 and found["hops"] == 1 and found["map"].startswith("entmax")
    (tmp_path / "mine.py").write_text("def flat(v):\n    return v * 0 + 1 / v.shape[-1]\n")
    monkeypatch.chdir(tmp_path)
    found = json.loads(run("analyze", "star", "--n", "16", "--map", "mine:flat", "--json"))
    assert found["assumption2"] is False and found["universal"] is False


def test_analyze_draws(tmp_path):
    for name, spec in (("a.png", "strided:w=4"), ("b.png", "fixed:w=5")):
        run("analyze", spec, "--n", "32", "--png", str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_analyze_all():
    rows = {row["spec"]: row for row in json.loads(run("analyze", "--all", "--n", "36", "--json"))}
    assert {"full", "star", "strided:heads=union", "SBM Lemma 2, k = √n"} <= set(rows)
    assert rows["full"]["hops"] == 1 and rows["full"]["exponent"] == 2
    assert "| full | yes |" in run("analyze", "--all", "--n", "16", "--causal", "--markdown")


def test_prove():
    text = run("prove", "strided", "--w", "2", "--n", "4", "--d", "1", "--delta", "0.5")
    assert text.count("✓") == 7 and "the network equals the function" in text and "d_2 = " in text
    found = json.loads(run("prove", "fixed:w=2", "--n", "3", "--json", code=1))
    assert found["holds"] is False and found["breaks"].startswith("Property 7.2")
    assert json.loads(run("prove", "full", "--n", "3", "--causal", "--function", "cummax", "--json"))["holds"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["analyze"], "give either a SPEC"),
        (["analyze", "star", "fixed"], "one SPEC"),
        (["analyze", "star", "--jsn"], "--jsn needs a value"),
        (["analyze", "star", "--nosuch", "3"], "nosuch"),
        (["analyze", "star", "--n", "1"], "n is 1"),
        (["analyze", "star:w=2", "--w", "3"], "given twice"),
        (["analyze", "--all", "star"], "--all cannot be combined with SPEC"),
        (["analyze", "star", "--markdown"], "--markdown needs --all"),
        (["analyze", "star", "--map", "nosuch"], "map"),
        (["prove", "star", "--delta", "0.4"], "1/delta"),
        (["prove", "star", "--function", "json:nosuch"], "no nosuch"),
    ],
)
def test_wrong_requests_are_one_line(words, message):
    output = run(*words, code=2)
    assert message in output and len(output.strip().splitlines()) == 1
