"""`subquad analyze`, `subquad prove` and `subquad study slice-rank`."""

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


def test_analyze_says_the_same_everywhere_of_what_is_not_covered():
    text = run("analyze", "reformer", "--n", "16")
    assert "universal: not covered\n" in text and "its keys are its queries" in text
    assert "256 possible per layer" in text and "γ" not in text and "blocks" not in text
    found = json.loads(run("analyze", "reformer", "--n", "16", "--json"))
    assert found["answer"] == "not covered" and found["universal"] is None and found["blocks"] is None
    assert "| reformer | not covered | – | – | 1 |" in run("analyze", "--all", "--n", "16", "--markdown")


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
    assert rows["full"]["hops"] == 1 and rows["full"]["exponent"] == pytest.approx(2)
    assert "| full | yes |" in run("analyze", "--all", "--n", "16", "--causal", "--markdown")


def test_prove():
    text = run("prove", "strided", "--w", "2", "--n", "3", "--d", "1", "--delta", "0.5")
    exact, measured = text.split("Theorem 1, measured")
    assert exact.count("✓") == 7 and "the network equals the function" in exact and "d_2(f̄, g) = " in exact
    assert measured.count("✓") == 6 and "Lemma 5" in measured and "on finer grids" in measured
    found = json.loads(run("prove", "fixed:w=2", "--n", "3", "--json", code=1))
    assert found["holds"] is False and found["breaks"].startswith("Property 7.2")
    assert json.loads(run("prove", "full", "--n", "3", "--causal", "--function", "cummax", "--json"))["holds"]


def test_prove_measures_a_function_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "bumps.py").write_text(
        "import numpy as np\n\ndef bump(x):\n    return np.exp(-np.asarray(x, dtype=float) ** 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    found = json.loads(run("prove", "star", "--n", "2", "--function", "bumps:bump", "--json"))["theorem1"]
    assert found["holds"] and found["distance"] <= found["epsilon"]
    assert found["lemma5_on_finer_grids"]["1/16"] < found["lemma5"] / 4  # continuous: it falls with δ
    text = run("prove", "star", "--n", "2", "--function", "bumps:bump", "--epsilon", "0.2", code=1)
    assert "✗ piecewise constant (Lemma 5)" in text and "is fine enough, with" in text


def test_analyze_and_prove_a_combiner():
    found = json.loads(run("analyze", "combiner-fixed", "--n", "64", "--span", "8", "--json"))
    assert set(found) >= KEYS and found["universal"] is True and found["proposition1"]["status"] == "proved"
    assert found["proposition1"]["direct_sets_universal"] is False
    text = run("analyze", "combiner-axial:plan=rowmajor", "--n", "60")
    assert "universal: not decided" in text and "prints no proof" in text and "not full" in text
    text = run("prove", "combiner-fixed:span=2", "--n", "3", "--function", "mean")
    assert "✓ summaries (Combiner, Proposition 1)" in text and "✓ Theorem 1" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["analyze"], "give either a SPEC"),
        (["analyze", "star", "fixed"], "one SPEC"),
        (["analyze", "star", "--jsn"], "--jsn needs a value"),
        (["analyze", "star", "--nosuch", "3"], "nosuch"),
        (["analyze", "star", "--n", "1"], "--n"),
        (["analyze", "star:w=2", "--w", "3"], "given twice"),
        (["analyze", "--all", "star"], "--all cannot be combined with SPEC"),
        (["analyze", "star", "--markdown"], "--markdown needs --all"),
        (["analyze", "star", "--map", "nosuch"], "map"),
        (["prove", "star", "--delta", "0.4"], "1/delta"),
        (["prove", "star", "--function", "json:nosuch"], "no nosuch"),
        (["prove", "star", "--function", "nosuch"], "reverse, sum, mean"),
        (["prove", "star", "--n", "3", "--epsilon", "0"], "--epsilon must be a number > 0, not 0"),
        (["prove", "star", "--n", "3", "--epsilon", "1e-12"], "F.4 asks for"),
        (["prove", "composite-slice"], "nothing to be built from"),
    ],
)
def test_wrong_requests_are_one_line(words, message):
    output = run(*words, code=2)
    assert message in output and len(output.strip().splitlines()) == 1


def test_the_help_names_every_function():
    from subquad.cli.prove import FUNCTIONS
    from subquad.theory import functions

    assert FUNCTIONS.split(", ") == [*functions.FUNCTIONS, *functions.CAUSAL_FUNCTIONS]


def test_study_slice_rank(tmp_path):
    text = run("study", "slice-rank", "--seeds", "1", "--png", str(tmp_path / "a.png"))
    assert "CS / H" in text and "neither contains the other" in text
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
