"""The site: pages that are made from the code, links that lead somewhere, and the wheel."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import subquad
from docsite import api, build, links, mechanisms, navigation, prose

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


def test_every_mechanism_has_a_page(tmp_path):
    """With a picture of every direction, a formula, its options, and the reasons of the theory."""
    pages = mechanisms.write_all(tmp_path, RESULTS, theory=8)
    assert [page.stem for page in pages] == list(subquad.available())
    gallery = (tmp_path / "index.md").read_text()
    for page in pages:
        text, cls = page.read_text(), mechanisms.mechanism(page.stem)
        assert f"({page.name})" in gallery
        assert "```text\n" in text, "a formula"
        for way in mechanisms.directions(cls):
            assert (tmp_path / "images" / f"{page.stem}-{way}.png").stat().st_size < 20_000
            assert f"images/{page.stem}-{way}.png" in text
        for field in mechanisms.fields(cls.Options):
            assert f"| `{field.name}` |" in text
        assert "1.3 hops" in text or mechanisms.needs_object(cls)
        assert "see the module docstring" not in text


def test_a_page_says_what_the_theory_does_not_cover():
    text = mechanisms.verdicts(mechanisms.mechanism("reformer"), 8)
    assert text.count("default options: not covered.") == 2 and "not decided" not in text and "softmax" not in text
    assert "default options: a universal approximator." in mechanisms.verdicts(mechanisms.mechanism("full"), 8)


def test_a_page_shows_what_was_measured_and_reproduced(tmp_path):
    assert "| forward | " in mechanisms.measured("combiner-fixed", RESULTS)
    assert "No figure" in mechanisms.measured("combiner-fixed", tmp_path)
    assert "subquad reproduce combiner-table-1" in mechanisms.experiments("combiner-fixed", RESULTS)
    assert "No table" in mechanisms.experiments("moba", RESULTS)


@pytest.mark.parametrize("module", api.MODULES)
def test_every_public_name_is_in_the_reference(module):
    from importlib import import_module

    text = api.page(module)
    for name in import_module(module).__all__:
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert f" {module}.{name}" in section
        assert len(section.split()) > 6, f"{module}.{name} is not explained"


def test_shapes_stand_in_the_reference():
    text = api.page("subquad")
    assert "(B, H, n, d), k and v (B, H or H/g, m, d) → (B, H, n, d)" in text
    assert "| `density` | `Tensor \\| None` | `None` | (H,): sampled edges / possible edges |" in text


def test_formulas_keep_their_columns_and_prose_its_signs():
    doc = (
        "Sums a_i * b_i of `x_i`.\n\n    out = Σ a_i b_i        O(n)\n\nwide    a table\nhere    too\n\n    y = f(x)\n"
    )
    assert prose.markdown(doc) == (
        "Sums a\\_i \\* b\\_i of `x_i`.\n\n```text\nout = Σ a_i b_i        O(n)\n```\n\n"
        "```text\nwide    a table\nhere    too\n```\n\n```python\ny = f(x)\n```"
    )


def test_every_page_of_docs_is_in_the_navigation(tmp_path):
    for page in ("index", "combiner", "tutorials/swap", "mechanisms/index", "mechanisms/full", "brand-new"):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / f"{page}.md").write_text("# A page\n")
    text = navigation.toctrees(tmp_path)
    assert (
        text.index("tutorials/swap") < text.index("mechanisms/index") < text.index("combiner") < text.index("brand-new")
    )
    assert "theory" not in text and "mechanisms/full" not in text and ":caption: More" in text
    named = {name for names in navigation.ORDER.values() for name in names}
    written = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    assert written - {"index"} <= named, "name the new page in tools/docsite/navigation.py"


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.html").write_text('<p id="here">x</p>')
    good = '<a href="other.html#here">a</a><a href="#top" id="top">b</a><a href="https://example.org/x">c</a>'
    (tmp_path / "index.html").write_text(good)
    assert list(links.broken(tmp_path)) == []
    wrong = {
        '<a href="none.html">': "no such file",
        '<a href="other.html#there">': "no such anchor",
        '<a href="#gone">': "no such anchor",
        '<a href="../out.html">': "out of the site",
        '<a href="https://nowhere">': "not an address",
        '<script src="https://example.org/x.js">': "loaded from the network",
    }
    (tmp_path / "index.html").write_text("".join(wrong))
    found = list(links.broken(tmp_path))
    assert len(found) == len(wrong)
    assert all(problem in line for problem, line in zip(wrong.values(), found, strict=True))


def test_links_to_pages_of_the_root_follow_them():
    assert build.moved("[a](../../CONTRIBUTING.md#rules)") == "[a](../contributing.md#rules)"
    assert build.moved("[a](../CHANGELOG.md), [b](../combiner.md)") == "[a](changelog.md), [b](../combiner.md)"


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    pytest.importorskip("furo")
    site = build.build(tmp_path)
    assert (site / "index.html").exists() and (site / "searchindex.js").exists()
    assert all((site / "mechanisms" / f"{name}.html").exists() for name in subquad.available())
    assert 'class="output' in (site / "tutorials" / "swap.html").read_text()


# ---- the wheel ----------------------------------------------------------------------------------------------


def test_the_wheel_works_outside_the_repository(tmp_path):
    pytest.importorskip("hatchling")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    made = [*pip, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
    subprocess.run(made, check=True, capture_output=True, timeout=300)
    [wheel] = tmp_path.glob("subquad-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = (path for path in (ROOT / "src" / "subquad").rglob("*") if path.is_file())
    wanted = {str(path.relative_to(ROOT / "src")) for path in files if "__pycache__" not in path.parts}
    assert wanted <= inside, "package data is missing"
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [*pip, "install", "--no-deps", "--no-index", "--no-compile", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    program = "import subquad, subprocess, sys; print(subquad.__file__); sys.argv = ['subquad', 'list']; "
    program += "import runpy; runpy.run_module('subquad', run_name='__main__')"
    about = {"env": {"PYTHONPATH": str(target), "PATH": ""}, "cwd": elsewhere}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, **about)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(target))
    assert all(name in done.stdout for name in subquad.available())
