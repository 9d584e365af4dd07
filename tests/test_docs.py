"""What the README and docs/ say: every Python block runs, every command is one that the command line takes."""

from pathlib import Path

import pytest

from docsite import blocks, commands

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def named(page, *marks):
    return pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks)


def with_python():
    """Those that start processes of their own take longer."""
    for page in PAGES:
        text = page.read_text()
        if "```python" in text:
            yield named(page, pytest.mark.slow) if "<!-- run -->" in text else named(page)


@pytest.mark.parametrize("page", list(with_python()))
def test_python_blocks_run(page, tmp_path):
    done = blocks.run_page(page, tmp_path)
    assert any(block.language == "python" for block, _ in done)
    assert all(block.marks["not_run"] for block, _ in done if "not_run" in block.marks), "a reason is needed"


@pytest.mark.parametrize("page", [named(page) for page in PAGES if "```" in page.read_text()])
def test_commands_are_those_of_the_parser(page):
    targets = commands.makefile_targets(ROOT / "Makefile")
    assert {"run", "docs"} <= targets
    for block in blocks.blocks(page.read_text()):
        if block.is_shell:
            assert commands.targets(block.text) <= targets
            for words in commands.commands(block.text):
                commands.check_command(words)


@pytest.mark.parametrize(
    "line, problem",
    [
        ("subquad shwo full", "no command 'shwo'"),
        ("subquad show full --wide", "No such option"),
        ("subquad bench full,fixd --n 64", "fixd"),
        ("echo x | subquad train listops --attention fixed:width=3", "no option 'width'"),
        ("torchrun --nproc-per-node 2 -m subquad train listops --atention full", "No such option"),
    ],
)
def test_a_wrong_command_is_found(line, problem):
    [words] = commands.commands(f"{line}      # a comment")
    with pytest.raises(Exception, match=problem) as error:
        commands.check_command(words)
    assert "Traceback" not in str(error.value)


def test_what_a_prompt_prints_is_no_command():
    assert list(commands.commands("$ subquad prove star\nsubquad is not called here")) == [["prove", "star"]]


PAGE = """# A page

<!-- hidden:
x = 3
-->
<!-- in small: 8192=2 -->
```python
print(x * 8192)
x + 1
```

<!-- not run: it needs a GPU -->
```python
import nothing
```

<!-- saved as: page_helper.py -->
```python
name = "saved"
```

Text.

```python
import page_helper
page_helper.name
```
"""


def test_marks_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert [printed for _, printed in blocks.run_page(page, tmp_path)] == ["", "6\n4\n", "", "", "saved\n"]
    shown = blocks.with_output(page, tmp_path)  # on the site, at full size
    assert "x + 1\n```\n\n```{code-block} text\n:class: output\n\n24576\n4\n```" in shown


def test_a_block_that_fails_names_its_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\ny = x.nothing\n```\n")
    with pytest.raises(blocks.BlockError, match=r"page.md, line 4: AttributeError: 'int' object has no attribute"):
        blocks.run_page(page, tmp_path)


def test_what_a_page_registers_is_taken_out_again(tmp_path):
    import subquad

    before = subquad.available()
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nimport subquad\n@subquad.register('of-a-page')\nclass A(subquad.Attention): pass\n```\n"
    )
    blocks.run_page(page, tmp_path)
    assert subquad.available() == before
