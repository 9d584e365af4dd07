"""Commands in shell blocks are parsed by the real parser: a page never shows an option that does not exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

PLACEHOLDER = re.compile(r"[A-Z]{3,}")  # SPEC, TASK, FILE: what a reader fills in


def commands(text: str) -> Iterator[list[str]]:
    """The words after `subquad`, for each time it is called in a block. Printed lines of an example are skipped: in a
    block with a prompt, commands are what stands behind it.
    """
    lines = text.split("\n")
    prompts = [line[2:] for line in lines if line.startswith("$ ")]
    for line in prompts or lines:
        words = shlex.split(line, comments=True)
        pieces = re.split(
            r" \|{1,2} | && ", " ".join(shlex.quote(word) if word not in "|&&" else word for word in words)
        )
        for piece in pieces:
            own = shlex.split(piece)
            if own and (own[0] == "subquad" or (own[0] == "torchrun" and "subquad" in own)):
                yield own[own.index("subquad") + 1 :]


def check_command(words: list[str]) -> None:
    """Raise what `subquad` would say about these words, without doing anything."""
    from subquad.cli import app

    command: Any = typer.main.get_command(app)
    words = list(words)
    while words[:1] == ["--import"]:
        del words[:2]
    context = command.make_context("subquad", [], resilient_parsing=True)
    while hasattr(command, "commands"):
        name = words.pop(0) if words else "--help"
        if name.startswith("-"):
            return
        if command.get_command(context, name) is None:
            raise ValueError(f"subquad has no command {name!r}")
        command = command.get_command(context, name)
        if hasattr(command, "commands"):
            context = command.make_context(name, [], parent=context, resilient_parsing=True)
    params = command.make_context(name, words, parent=context).params
    for spec in _specs(params):
        _check_spec(spec)


def _specs(params: dict[str, Any]) -> Iterator[str]:
    from subquad.core.options import split_list

    for key in ("attention", "spec", "specs"):
        value = params.get(key)
        for text in [value] if isinstance(value, str) else value or ():
            if not PLACEHOLDER.fullmatch(text):
                yield from (one for spec in split_list(text) for one in spec.split("|"))


def _check_spec(spec: str) -> None:
    """Its mechanism exists, or is one of the reader's own; its options are allowed."""
    from subquad.attention.registry import available, mechanism
    from subquad.core.options import make, parse, split_spec

    name, texts = split_spec(spec)
    if name.startswith("my-") and name not in available():
        return
    options = mechanism(name).Options
    make(options, name, parse(options, name, texts))


def targets(text: str) -> set[str]:
    """What a block makes: `make run` → run."""
    return set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE))


def makefile_targets(makefile: Path) -> set[str]:
    return set(re.findall(r"^([\w-]+):", makefile.read_text(), re.MULTILINE))
