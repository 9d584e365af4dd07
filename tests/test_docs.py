"""What the README and docs/ say: every Python block runs, every command is one that the command line takes."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from docsite import blocks, commands

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text()], ids=name)
def test_python_blocks_run(page, tmp_path):
    done = blocks.run_page(page, tmp_path)
    assert any(block.language == "python" for block, _ in done)
    assert all(block.marks["not_run"] for block, _ in done if "not_run" in block.marks), "a reason is needed"


@pytest.mark.parametrize("page", [p for p in PAGES if "```\n" in p.read_text()], ids=name)
def test_commands_are_those_of_the_parser(page):
    shell = [block for block in blocks.blocks(page.read_text()) if block.is_shell]
    makes = commands.makefile_targets(ROOT / "Makefile")
    for block in shell:
        for words in commands.commands(block.text):
            commands.check_command(words)
        assert commands.targets(block.text) <= makes
