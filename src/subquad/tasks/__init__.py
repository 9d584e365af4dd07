"""Tasks: name → class, one line each, imported when first asked for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.core.declarations import declared
from subquad.core.names import look_up, unknown
from subquad.core.source_options import keys, options_class

if TYPE_CHECKING:
    from subquad.tasks.base import Task

_TASKS: dict[str, Any] = {
    "needle": "subquad.tasks.needle:Needle",
    "repeated-tokens": "subquad.tasks.repeated_tokens:RepeatedTokens",
    "copying": "subquad.tasks.copying:Copying",
    "copying-causal": "subquad.tasks.copying:CausalCopying",
    "listops": "subquad.tasks.listops:ListOps",
    "text": "subquad.tasks.text:Text",
    "image": "subquad.tasks.image:Image",
    "retrieval": "subquad.tasks.retrieval:Retrieval",
    "pathfinder": "subquad.tasks.pathfinder:Pathfinder",
    "lm-bytes": "subquad.tasks.bytes:Bytes",
    "lm-words": "subquad.tasks.words:Words",
    "lm-books": "subquad.tasks.books:Books",
    "image-density": "subquad.tasks.density:ImageDensity",
    "translation": "subquad.tasks.translation:Translation",
    "mlm": "subquad.tasks.mlm:Mlm",
    "glue-cola": "subquad.tasks.glue:Cola",
    "glue-sst2": "subquad.tasks.glue:Sst2",
    "glue-mrpc": "subquad.tasks.glue:Mrpc",
    "glue-stsb": "subquad.tasks.glue:Stsb",
    "glue-qqp": "subquad.tasks.glue:Qqp",
    "glue-mnli": "subquad.tasks.glue:Mnli",
    "glue-qnli": "subquad.tasks.glue:Qnli",
    "glue-rte": "subquad.tasks.glue:Rte",
    "glue-wnli": "subquad.tasks.glue:Wnli",
    "xnli": "subquad.tasks.xnli:Xnli",
}


SUITES = {"lra": ("listops", "text", "retrieval", "image", "pathfinder")}  # tasks that are compared together


def available() -> tuple[str, ...]:
    """The names of all tasks."""
    return tuple(_TASKS)


def register(name: str, cls: type[Task], *, replace: bool = False) -> None:
    """Make a task of your own available under `name`; `subquad --import MODULE` makes the command line see it."""
    if name in _TASKS and not replace:
        raise ValueError(f"name {name!r} is taken; pass replace=True to replace it")
    cls.name = name
    _TASKS[name] = cls


def describe(name: str) -> dict[str, Any]:
    """What `subquad tasks` shows of a task, read from the source text of its class: torch need not be imported."""
    if name not in _TASKS:
        raise unknown("task", name, _TASKS)
    return {"name": name, **declared(_TASKS[name], ("title", "head", "metric", "larger_is_better", "needs_data"))}


def check_settings(name: str, settings: Iterable[str] = (), recipe: str | None = None) -> None:
    """Refuse a task that does not exist, a recipe that it does not have, and settings that no recipe of it has, as far
    as the source text of its class tells: torch need not be imported.
    """
    entry = _TASKS.get(name)
    if entry is None:
        raise unknown("task", name, _TASKS)
    if not isinstance(entry, str):
        return
    recipes = keys(entry, "recipes")
    if recipe is not None and recipes is not None and recipe not in recipes:
        raise unknown(f"recipe of {name}", recipe, recipes)
    made = options_class(entry, "recipes") if settings else None
    if made is not None:
        made().changed(name, settings)  # type: ignore[attr-defined]


def task_class(name: str) -> type[Task]:
    """The class registered under `name`."""
    return look_up("task", name, _TASKS)


def task(name: str, recipe: str = "small", settings: tuple[str, ...] = (), data: Path | None = None, seed: int = 0):
    """A task under one of its recipes, with `key=value` changes: task("listops", "small", ("steps=100",))."""
    cls = task_class(name)
    if recipe not in cls.recipes:
        raise unknown(f"recipe of {name}", recipe, cls.recipes)
    return cls(cls.recipes[recipe].changed(name, settings), data, seed)
