"""Classes of options made from source text: a wrong option is refused at once, before torch is imported.

The fields are read, with their types, ranges and defaults, and the methods named `check_task`. What a class checks
beyond them (two options that exclude each other) is found when the real class is used.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
from importlib import import_module
from typing import Any

from subquad.core.declarations import Unreadable, attributes, class_definition, module_tree, origin
from subquad.core.options import Checked

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
