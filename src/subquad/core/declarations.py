"""Class attributes read from source text, without running it.

`subquad list` shows what each mechanism declares on its class, and importing all classes would import torch, which
takes seconds. Attributes are looked up as Python does, through the base classes; what the text alone does not tell (a
property, a computed value) is read from the imported class instead.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class Unreadable(Exception):
    """The text does not tell."""


def declared(entry: str | type, names: Sequence[str]) -> dict[str, Any]:
    """The attributes `names` of a class, or of "module:Class" without importing it. Dataclasses become dicts."""
    if isinstance(entry, str):
        module, _, cls = entry.partition(":")
        try:
            return {name: _look_up(module, cls, name) for name in names}
        except Unreadable:
            entry = getattr(import_module(module), cls)
    values = {name: getattr(entry, name) for name in names}
    return {name: vars(x) if dataclasses.is_dataclass(x) else x for name, x in values.items()}


def _look_up(module: str, cls: str, name: str) -> Any:
    """The attribute of a class, or of the first base class that has it."""
    definition = class_definition(module, cls)
    for key, value in attributes(definition):
        if key == name:
            return _value(module, value)
    for base in definition.bases:
        try:
            return _look_up(*_origin(module, base), name)
        except Unreadable:
            continue
    raise Unreadable(f"{module}:{cls} has no {name}")


def attributes(definition: ast.ClassDef | ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """What the body of a class or a module assigns, the last first; None for what only a running program knows."""
    for node in reversed(definition.body):
        if isinstance(node, ast.FunctionDef):
            yield node.name, None
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
                elif isinstance(target, ast.Tuple):
                    given = node.value.elts if isinstance(node.value, ast.Tuple) else []
                    values = given if len(given) == len(target.elts) else [None] * len(target.elts)
                    yield from ((x.id, y) for x, y in zip(target.elts, values, strict=True) if isinstance(x, ast.Name))


def _value(module: str, node: ast.expr | None) -> Any:
    """A literal; of a call such as Capabilities(cross=True), the fields with their defaults."""
    if node is None:
        raise Unreadable
    if isinstance(node, ast.Call) and not node.args:
        origin = _origin(module, node.func)
        fields = attributes(class_definition(*origin))
        defaults = {name: _value(origin[0], value) for name, value in fields if value is not None}
        return {**defaults, **{word.arg: _value(module, word.value) for word in node.keywords}}
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise Unreadable from None


def _origin(module: str, node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Name):
        raise Unreadable
    return origin(module, node.id)


def origin(module: str, name: str) -> tuple[str, str]:
    """Where a name used in a module is defined: (module, name)."""
    for statement in module_tree(module).body:
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return statement.module, alias.name
    return module, name


def class_definition(module: str, cls: str) -> ast.ClassDef:
    for node in module_tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == cls:
            return node
    raise Unreadable


@lru_cache(maxsize=64)
def module_tree(module: str) -> ast.Module:
    try:
        found = find_spec(module)
        if found is None or found.origin is None:
            raise Unreadable
        return ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, ImportError):  # a frozen or compiled module has no text
        raise Unreadable from None
