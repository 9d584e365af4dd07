"""The code blocks of a Markdown page, and running them as a reader would: in order, in one program.

Comments that nobody sees in the rendered page say what a block needs:

    <!-- hidden: CODE -->          Python to run at this place, such as a model that the page takes for granted
    <!-- in small: 8192=256 -->    in the tests the next block is run with these numbers in place of its own
    <!-- not run: REASON -->       the next block is not run
    <!-- saved as: NAME -->        the next block is a file, which later blocks import or start
    <!-- run -->                   the next block is for the shell, and is run; in others commands are only parsed

A Python block prints what it prints, and the value of its last line where that is an expression, as a notebook does.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[\w{}-]*)[^`]*$")
COMMENT = re.compile(r"<!-- (?P<mark>hidden|in small|not run|saved as|run)(?::\s*(?P<value>.*?))?\s*-->", re.DOTALL)
SECONDS = 600  # a command that takes longer is stuck, even on a busy machine


class Block(NamedTuple):
    """One block of a page. Marks are those of the comments in front of it."""

    language: str  # "python", "" for the shell, or what the fence says; "hidden" is hidden Python
    text: str
    first: int  # the line of the page where its text begins, from 1
    last: int  # the line of its closing fence
    marks: dict[str, str]

    def in_small(self) -> Block:
        """With smaller numbers, where a mark gives them."""
        smaller = dict(change.split("=") for change in self.marks.get("in_small", "").split(", ") if change)
        text = re.sub(r"\b\d+\b", lambda number: smaller.get(number[0], number[0]), self.text)
        return self._replace(text=text)

    @property
    def is_shell(self) -> bool:
        return self.language in ("", "bash", "sh")


class BlockError(Exception):
    """A block that fails, with the page and the line."""


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page, in order."""
    lines, at, marks = text.split("\n"), 0, {}
    while at < len(lines):
        fence, comment = FENCE.match(lines[at]), lines[at].startswith("<!-- ")
        if comment:
            end = next((i for i in range(at, len(lines)) if "-->" in lines[i]), at)
            found = COMMENT.match("\n".join(lines[at : end + 1]))
            if found and found["mark"] == "hidden":
                yield Block("hidden", found["value"], at + 1, end + 1, {})
            elif found:
                marks[found["mark"].replace(" ", "_")] = found["value"] or ""
            at = end
        elif fence:
            end = next(i for i in range(at + 1, len(lines)) if lines[i].startswith(fence["fence"]))
            yield Block(fence["language"], "\n".join(lines[at + 1 : end]), at + 2, end + 1, marks)
            at, marks = end, {}
        elif lines[at].strip():
            marks = {}
        at += 1


# ---- running ------------------------------------------------------------------------------------------------


def run_page(path: Path, folder: Path, *, small: bool = True) -> list[tuple[Block, str]]:
    """Run the blocks of a page in the empty folder `folder`, in small where a mark says how: each with what it printed.
    Registered mechanisms and tasks are taken out again, and imported files forgotten.
    """
    page, text = types.ModuleType("page"), path.read_text(encoding="utf-8")
    with _as_found(folder), _known(page):
        return [(block, _run(block.in_small() if small else block, path, page)) for block in blocks(text)]


def _run(block: Block, path: Path, page: types.ModuleType) -> str:
    if "not_run" in block.marks:
        return ""
    try:
        if "saved_as" in block.marks:
            Path(block.marks["saved_as"]).write_text(block.text + "\n", encoding="utf-8")
            return ""
        if block.language in ("python", "hidden"):
            return run_python(block, path, vars(page))
        return run_shell(block.text) if block.is_shell and "run" in block.marks else ""
    except Exception as error:
        raise BlockError(f"{path.name}, line {block.first}: {type(error).__name__}: {error}") from error


def run_python(block: Block, path: Path, names: dict[str, Any]) -> str:
    """What the block prints, and the value of its last expression. Tracebacks name the lines of the page."""
    tree = ast.parse("\n" * (block.first - 1) + block.text, str(path))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(path), "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(path), "eval"), names)
            if value is not None:
                print(value if isinstance(value, str) else repr(value))
    return printed.getvalue()


def run_shell(text: str) -> str:
    """What the commands print, each a line. `subquad` and `torchrun` are those of this Python."""
    printed = ""
    for line in text.split("\n"):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        module = {"subquad": ["-m", "subquad"], "torchrun": ["-m", "torch.distributed.run"], "python": []}
        command = [sys.executable, *module[words[0]], *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            raise RuntimeError(f"`{line}` ends with code {done.returncode}: {done.stderr[-2000:]}")
        printed += done.stdout
    return printed


@contextlib.contextmanager
def _as_found(folder: Path) -> Iterator[None]:
    """Inside: the working folder and the first place to import from. Afterwards everything is as it was."""
    from subquad import tasks
    from subquad.attention import registry

    before, modules = os.getcwd(), set(sys.modules)
    known = {registry: dict(registry._MECHANISMS), tasks: dict(tasks._TASKS)}
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]
        for registered, entries in ((registry._MECHANISMS, known[registry]), (tasks._TASKS, known[tasks])):
            for name in set(registered) - set(entries):
                del registered[name]


@contextlib.contextmanager
def _known(page: types.ModuleType) -> Iterator[None]:
    """Dataclasses look up the module of a class by its name."""
    sys.modules[page.__name__] = page
    try:
        yield
    finally:
        del sys.modules[page.__name__]


# ---- a page with what it printed ----------------------------------------------------------------------------


def with_output(path: Path, folder: Path) -> str:
    """The text of the page, and below every block what it printed."""
    lines = path.read_text(encoding="utf-8").split("\n")
    for block, printed in reversed(run_page(path, folder, small=False)):
        if printed.strip():
            lines[block.last : block.last] = ["", "```{code-block} text", ":class: output", "", printed.rstrip(), "```"]
    return "\n".join(lines)
