"""Tasks: name → class, one line each, imported when first asked for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.attention.registry import check_direction, entry_of
from subquad.core.declarations import declared, item, keys, options_class
from subquad.core.names import look_up, unknown
from subquad.core.options import fields, split_spec
from subquad.core.spoken import argument

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


CAUSAL = {"causal-lm": (True,), "seq2seq": (False, True)}  # directions of a head's layers; all others: bidirectional
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
        raise unknown("recipe", recipe, recipes)
    chosen = item(entry, "recipes", recipe or "small")
    if chosen is not None:
        chosen.changed(name, settings).check()
        return
    made = options_class(entry, "recipes") if settings else None
    if made is not None:
        made().changed(name, settings)  # type: ignore[attr-defined]


def check_mechanisms(name: str, specs: Iterable[str], settings: Iterable[str] = (), recipe: str = "small") -> None:
    """Refuse mechanisms that cannot do a task, as far as source text tells: torch need not be imported."""
    chosen = _recipe(name, settings, recipe)
    for spec in specs:
        mechanism, given = split_spec(spec)
        for causal in CAUSAL.get(describe(name)["head"], (False,)):
            if "causal" in given:
                raise ValueError(
                    f"attention={spec!r}: causal is the model's to say ({str(causal).lower()} here): leave it out"
                )
            check_direction(spec, causal)
        entry = entry_of(mechanism)
        options = options_class(entry, "Options") if isinstance(entry, str) else entry.Options
        if chosen is None or options is None or chosen.positions != "own":
            continue
        if "positions" not in {field.name for field in fields(options)}:
            raise ValueError(
                f"positions=own: {mechanism} has no positions of its own; take learned, sinusoidal, rotary"
            )


def check_data(name: str, data: Path | None, settings: Iterable[str] = (), recipe: str = "small") -> None:
    """Refuse a data directory that cannot have the data of a task; torch need not be imported."""
    if data is not None and not data.is_dir():
        raise FileNotFoundError(f"{argument('data')}: the folder {data} does not exist")
    entry, chosen = _TASKS[name], _recipe(name, settings, recipe)
    source = _held(entry, "sources", getattr(chosen, "source", ""))
    path = getattr(chosen, "path", None)
    if path is not None and not Path(path).exists():
        raise FileNotFoundError(f"path={path}: there is no such file")
    if source is not None and path is None:
        source.in_folder(data)


def _recipe(name: str, settings: Iterable[str], recipe: str) -> Any:
    """A recipe with its changes; None where the source text of the task does not tell."""
    chosen = _held(_TASKS[name], "recipes", recipe)
    return None if chosen is None else chosen.changed(name, settings)


def _held(entry: Any, attribute: str, key: str) -> Any:
    """What a class, or the source text of "module:Class", has in a dict under `key`; None if there is nothing."""
    return item(entry, attribute, key) if isinstance(entry, str) else getattr(entry, attribute).get(key)


def as_texts(changes: dict[str, Any]) -> tuple[str, ...]:
    """Changes of a recipe as the command line gives them: {"steps": 5, "tied": True} → ("steps=5", "tied=True")."""
    lists = (tuple, list)
    texts = {key: "+".join(map(str, value)) if isinstance(value, lists) else value for key, value in changes.items()}
    return tuple(f"{key}={value}" for key, value in texts.items())


def task_class(name: str) -> type[Task]:
    """The class registered under `name`."""
    return look_up("task", name, _TASKS)


def task(
    name: str,
    recipe: str = "small",
    settings: Iterable[str] = (),
    data: Path | None = None,
    seed: int = 0,
    **changes: Any,
) -> Task:
    """A task under one of its recipes, with changes: task("listops", steps=100), or as texts, settings=["steps=100"].

    Args:
        name: of the task; `subquad.tasks.available()` has them all.
        recipe: the name of a recipe.
        settings: changes as texts `key=value`, as the command line gives them.
        data: the folder of data sets; None = $SUBQUAD_DATA, or ./data.
        seed: of generated data.
        changes: the same changes as keywords.
    """
    settings = settings if isinstance(settings, str) else tuple(settings)
    if isinstance(settings, str) or not all(isinstance(setting, str) for setting in settings):
        raise TypeError(f'settings must be a list of texts such as ["steps=100"], not {settings!r}')
    cls = task_class(name)
    if recipe not in cls.recipes:
        raise unknown("recipe", recipe, cls.recipes)
    chosen = cls.recipes[recipe].changed(name, (*settings, *as_texts(changes)))
    return cls(chosen, data, seed)
