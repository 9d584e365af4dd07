"""Class attributes and classes of options read from source text, without running it.

`subquad list` shows what each mechanism declares on its class, and importing all classes would import torch, which
takes seconds. Attributes are looked up as Python does, through the base classes; what the text alone does not tell (a
property, a computed value) is read from the imported class instead.

A wrong option is refused at once, too: of a class of options the fields are read, with their types, ranges and
defaults, and the methods named `check_task`. What a class checks beyond them (two options that exclude each other) is
found when the real class is used.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from subquad.core.options import Checked


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


LIGHT = (
    "typing", "dataclasses", "subquad.core.options", "subquad.data.files", "subquad.tasks.recipe",
)  # imported as they are  # fmt: skip


def options_class(entry: str, attribute: str) -> type[Checked] | None:
    """The class of options that "module:Class" has as `attribute`, or that the calls in that attribute make, such as
    recipes = {"small": NeedleRecipe(…)}; None where the text does not tell.
    """
    module, _, cls = entry.partition(":")
    try:
        return _find(module, class_definition(module, cls), attribute)
    except (Unreadable, NameError, TypeError, AttributeError):
        return None


def keys(entry: str, attribute: str) -> list[str] | None:
    """The keys of the dict that "module:Class" has as `attribute`, as recipes; None where the text does not tell."""
    module, _, cls = entry.partition(":")
    try:
        return _constants(_dict(module, class_definition(module, cls), attribute)[1])
    except (Unreadable, NameError, TypeError, AttributeError):
        return None


def item(entry: str, attribute: str, key: str) -> Any:
    """What the dict that "module:Class" has as `attribute` holds under `key`; None where the text does not tell."""
    module, _, cls = entry.partition(":")
    try:
        place, node = _dict(module, class_definition(module, cls), attribute)
        return _evaluate(place, node.values[_constants(node).index(key)])
    except (Unreadable, NameError, TypeError, AttributeError, ValueError):
        return None


def _dict(module: str, definition: ast.ClassDef, attribute: str) -> tuple[str, ast.Dict]:
    """The dict that a class has as `attribute`, and the module of the names in it."""
    for name, value in attributes(definition):
        if name == attribute:
            if not isinstance(value, ast.Dict) or not value.keys:
                raise Unreadable
            return module, value
    for base in definition.bases:
        if isinstance(base, ast.Name):
            place, name = origin(module, base.id)
            return _dict(place, class_definition(place, name), attribute)
    raise Unreadable


def _constants(node: ast.Dict) -> list[str]:
    """The keys of a dict in the text."""
    found = [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
    if len(found) < len(node.keys):  # {**others, …}
        raise Unreadable
    return found


def _find(module: str, definition: ast.ClassDef, attribute: str) -> type[Checked]:
    for node in definition.body:
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            return _make(module, node)
    for name, value in attributes(definition):
        if name == attribute:
            return _class_of(module, value)
    for base in definition.bases:
        if isinstance(base, ast.Name):
            place, name = origin(module, base.id)
            return _find(place, class_definition(place, name), attribute)
    raise Unreadable


def _class_of(module: str, node: ast.expr | None) -> type[Checked]:
    """Of a class, itself; of a dict of objects, the class of the first."""
    first = node.values[0] if isinstance(node, ast.Dict) else node
    if first is None:
        raise Unreadable
    found = _evaluate(module, first)
    found = found if isinstance(found, type) else type(found)
    if not issubclass(found, Checked):
        raise Unreadable
    return found


def _make(module: str, node: ast.ClassDef) -> type[Checked]:
    """The dataclass with the fields of a class in the text, on top of its base classes."""
    bases = tuple(_evaluate(module, base) for base in node.bases)
    fields = [
        (field.target.id, _evaluate(module, field.annotation), _evaluate(module, field.value))
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None
    ]
    methods: dict[str, Any] = {}
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "check_task":
            exec(compile(ast.Module([part], []), module, "exec"), Names(module), methods)
    return dataclasses.make_dataclass(node.name, fields, bases=bases, namespace=methods, frozen=True, kw_only=True)


def _evaluate(module: str, node: ast.expr) -> Any:
    return eval(compile(ast.Expression(node), module, "eval"), {"__builtins__": {}}, Names(module))


class Names(dict):
    """The names of a module, looked up in its text when an expression asks for them."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __missing__(self, name: str) -> Any:
        place, name = origin(self.module, name)
        if place in LIGHT:
            return getattr(import_module(place), name)
        for node in module_tree(place).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return _make(place, node)
        for key, value in attributes(module_tree(place)):
            if key == name and value is not None:
                return _evaluate(place, value)
        return getattr(builtins, name)
