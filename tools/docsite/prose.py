"""Docstrings as Markdown: prose stays prose, formulas and code keep their columns."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence

ALIGNED = re.compile(r"\S {3,}\S")  # columns inside a line: a formula, or a list of meanings
SPECIAL = re.compile(r"([*_<>\[\]$|~])")


def markdown(doc: str) -> str:
    """A docstring. A paragraph that is indented, has columns or is Python is set as it is written."""
    parts = []
    for paragraph in paragraphs(inspect.cleandoc(doc)):
        if is_verbatim(paragraph):
            parts.append(verbatim(paragraph))
        else:
            parts.append(escaped(paragraph))
    return "\n\n".join(parts)


def paragraphs(doc: str) -> list[str]:
    """Pieces between blank lines; verbatim ones that follow each other are one."""
    joined: list[str] = []
    for piece in re.split(r"\n\s*\n", doc):
        if joined and piece.startswith("    ") and joined[-1].startswith("    "):
            joined[-1] += "\n\n" + piece
        else:
            joined.append(piece)
    return joined


def is_verbatim(paragraph: str) -> bool:
    return paragraph.startswith("    ") or bool(ALIGNED.search(paragraph)) or _is_python(paragraph)


def has_formula(doc: str) -> bool:
    """Is there a line with an equation, set apart from the text?"""
    return any(is_verbatim(each) and "=" in each and not _is_python(each) for each in paragraphs(inspect.cleandoc(doc)))


def verbatim(paragraph: str) -> str:
    text = textwrap.dedent(paragraph)
    return f"```{'python' if _is_python(paragraph) else 'text'}\n{text}\n```"


def _is_python(paragraph: str) -> bool:
    try:
        body = ast.parse(textwrap.dedent(paragraph)).body
    except SyntaxError:
        return False
    return any(
        isinstance(each, (ast.Assign, ast.Import, ast.ImportFrom, ast.With, ast.FunctionDef)) for each in body
    ) or (bool(body) and all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) for each in body))


def escaped(text: str) -> str:
    """Text whose only markup is `code`. A page of docs/ becomes a link, from a page one folder below it."""
    text = re.sub(r"`(docs/[\w-]+\.md)`", r"\1", text)
    pieces = re.split(r"(`[^`]+`)", text)
    plain = "".join(piece if piece.startswith("`") else SPECIAL.sub(r"\\\1", piece) for piece in pieces)
    return re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](../\1.md)", plain)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """A Markdown table; bars inside cells are kept."""
    rule = ["---", *(["---:" if numbers else "---"] * (len(titles) - 1))]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(titles), rule, *cells])
